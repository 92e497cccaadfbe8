"""Classes that look as pybind11 makes them: only what the emulated version has, its parameter names and types, no
attribute it does not know. Imports `_tables` and `emulated_device`. What a version has and the emulation lacks is an
EmulationFault when used."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from emulated_device import machine

from . import _tables

MODULE = "tensorrt.tensorrt"
REGISTRY: dict[str, type] = {}
"""All classes of the emulated version by name."""


class NativeMeta(type):
    """Construction as pybind11 has it."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._constructible:
            raise TypeError(f"{MODULE}.{cls.__name__}: No constructor defined!")
        made = super().__call__(*args, **kwargs)
        if "_made" not in made.__dict__:
            raise TypeError(f"{MODULE}.{cls.__name__}.__init__() must be called when overriding __init__")
        return made


class Native(metaclass=NativeMeta):
    """A class of the bindings. Only subclasses written by the user take new attributes."""

    _constructible = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and REGISTRY.get(type(self).__name__) is type(self):
            found = inspect.getattr_static(type(self), name, None)
            if not isinstance(found, property):
                raise AttributeError(f"'{MODULE}.{type(self).__name__}' object has no attribute '{name}'")
        object.__setattr__(self, name, value)

    @classmethod
    def _new(cls, *args: Any) -> Any:
        """An instance made by the library itself."""
        made = cls.__new__(cls)
        object.__setattr__(made, "_made", True)
        made._setup(*args)
        return made


def plain(name: str, default: Any) -> property:
    """A property that is a value and nothing else."""
    key = f"_plain_{name}"
    return property(lambda self: self.__dict__.get(key, default), lambda self, value: setattr(self, key, value))


class Signature:
    """One overload: `(name: str, index: int = 0) -> bool`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.parameters = []
        for part in _split(text[1 : text.rindex(") ->")] if ") ->" in text else ""):
            name, _, rest = part.partition(":")
            annotation, equals, default = rest.partition(" = ")
            self.parameters.append((name.strip(), annotation.strip(), bool(equals), default.strip() == "None"))

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments by name, or None where this overload does not take them."""
        names = [name for name, *_ in self.parameters]
        if len(args) > len(names) or set(kwargs) - set(names[len(args) :]):
            return None
        bound = dict(zip(names, args, strict=False)) | kwargs
        for name, annotation, optional, nullable in self.parameters:
            if name not in bound:
                if not optional:
                    return None
            elif not (accepts(annotation, bound[name]) or (nullable and bound[name] is None)):
                return None
        return bound


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def accepts(annotation: str, value: Any) -> bool:
    """Whether pybind11 would convert `value` to a parameter of this type."""
    if annotation.startswith("List["):
        inner = annotation[5:-1]
        return isinstance(value, Sequence) and not isinstance(value, str) and all(accepts(inner, v) for v in value)
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    if annotation == "ILogger.Severity":
        return isinstance(value, REGISTRY["ILogger"].Severity)
    cls = REGISTRY.get(annotation)
    return cls is None or isinstance(value, cls)


def _is_integer(value: Any) -> bool:
    if isinstance(value, float | np.floating | str | bytes) or value is None:
        return False
    return hasattr(value, "__index__") or hasattr(value, "__int__")


def _is_buffer(value: Any) -> bool:
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def _is_dims(value: Any) -> bool:
    if isinstance(value, REGISTRY["Dims"]):
        return True
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(_is_integer, value))


_SCALARS: dict[str, Callable[[Any], bool]] = {
    "int": _is_integer,
    "float": lambda value: isinstance(value, float | int | np.floating | np.integer),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool | np.bool_),
    "buffer": _is_buffer,
    "Dims": _is_dims,
    "tuple": lambda value: isinstance(value, tuple),
    "list": lambda value: isinstance(value, list),
    "numpy.ndarray": lambda value: isinstance(value, np.ndarray),
    "Weights": lambda value: isinstance(value, REGISTRY["Weights"] | np.ndarray),
    "object": lambda value: True,
    "capsule": lambda value: True,
}


def checked(name: str, function: Callable[..., Any], signatures: list[str]) -> Callable[..., Any]:
    """`function` taking what the overloads take, by their names, and nothing else."""
    overloads = [Signature(text) for text in signatures]

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for overload in overloads:
            bound = overload.bind(args, kwargs)
            if bound is not None:
                if name == "__init__":
                    object.__setattr__(self, "_made", True)
                return function(self, **bound)
        supported = "\n".join(f"    {number}. {text}" for number, text in enumerate(signatures, 1))
        raise TypeError(
            f"{name}(): incompatible function arguments. The following argument types are supported:\n{supported}\n\n"
            f"Invoked with: {args!r}, kwargs: {kwargs!r}"
        )

    return call


def _lacking(what: str) -> Callable[..., Any]:
    def lacking(*args: Any, **kwargs: Any) -> Any:
        machine().fault(f"{what} exists in TensorRT {_tables.VERSION}, but is not emulated")

    return lacking


def _nothing(self: Any) -> None:
    pass


def shape_class(cls: type, members: dict[str, Any]) -> None:
    """Make an implementation look as the emulated version has it."""
    for name in [name for name in vars(cls) if not name.startswith("_")]:
        if name not in members:
            delattr(cls, name)
    for name, fact in members.items():
        found = inspect.getattr_static(cls, name, None)
        own = vars(cls).get(name)
        if name == "__init__":
            cls._constructible = fact != "method"
            if fact != "method" and (own is not None or fact == ["() -> None"]):
                setattr(cls, name, checked(name, own or _nothing, fact))
        elif isinstance(fact, str) and fact.startswith("property"):
            _shape_property(cls, name, fact, found)
        elif found is None:
            setattr(cls, name, _lacking(f"{cls.__name__}.{name}"))
        elif own is not None and fact != "method":
            setattr(cls, name, checked(name, own, fact))
    cls.__module__ = MODULE


def _shape_property(cls: type, name: str, fact: str, found: Any) -> None:
    lacking = _lacking(f"{cls.__name__}.{name}")
    getter = found.fget if isinstance(found, property) else lacking
    setter = found.fset if isinstance(found, property) and found.fset else lacking
    setattr(cls, name, property(getter, setter if fact == "property rw" else None))


def generated(name: str, bases: list[str], members: dict[str, Any]) -> type:
    """A class that exists and whose every use is a fault, but for its constructor where it is there to be derived
    from."""
    known = [REGISTRY[base] for base in bases]
    least = tuple(b for b in known if not any(issubclass(other, b) for other in known if other is not b))
    cls = NativeMeta(name, least or (Native,), {})
    shape_class(cls, members)
    return cls


class EnumMeta(type):
    """An enumeration as `py::enum_` makes it: not iterable, no arithmetic."""

    @property
    def __members__(cls) -> dict[str, Any]:
        return dict(cls._values)


class NativeEnum(metaclass=EnumMeta):
    _values: ClassVar[dict[str, Any]] = {}

    def __init__(self, value: int) -> None:
        self._value = int(value)

    @property
    def value(self) -> int:
        return self._value

    @property
    def name(self) -> str:
        return next((name for name, member in self._values.items() if member._value == self._value), "???")

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def enumeration(name: str, members: dict[str, int]) -> type:
    """The enumeration with these values."""
    cls = EnumMeta(name, (NativeEnum,), {"__module__": MODULE})
    cls._values = {member: cls(value) for member, value in members.items()}
    for member, value in cls._values.items():
        setattr(cls, member, value)
    return cls


def build_namespace(implementations: list[type]) -> dict[str, type]:
    """All classes of the emulated version."""
    known = {cls.__name__: cls for cls in implementations}
    waiting = [name for name in _tables.CLASSES if name not in REGISTRY]
    while waiting:
        name = next(n for n in waiting if all(b in REGISTRY for b in _tables.CLASSES[n]["bases"]))
        waiting.remove(name)
        described = _tables.CLASSES[name]
        if name in known:
            REGISTRY[name] = known[name]
        else:
            REGISTRY[name] = generated(name, described["bases"], described["members"])
    for name, cls in known.items():
        if name in REGISTRY:
            shape_class(cls, _tables.CLASSES[name]["members"])
    return REGISTRY
