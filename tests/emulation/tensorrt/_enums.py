"""The enumerations of the emulated version, each an attribute here; imports `_native` and `_tables`."""

from __future__ import annotations

from typing import Any

from . import _native, _tables


def __getattr__(name: str) -> Any:
    found = _native.REGISTRY.get(name)
    if found is None:
        raise AttributeError(f"TensorRT {_tables.VERSION} has no {name}")
    return found


for _name, _described in _tables.CLASSES.items():
    _values = {member: fact for member, fact in _described["members"].items() if isinstance(fact, int)}
    if _values:
        _native.REGISTRY[_name] = _native.enumeration(_name, _values)


class Severity(_native.NativeEnum):
    """`ILogger.Severity`: unlike the others it may be compared."""

    def __lt__(self, other: Severity) -> bool:
        return self._value < other._value

    def __le__(self, other: Severity) -> bool:
        return self._value <= other._value

    def __gt__(self, other: Severity) -> bool:
        return self._value > other._value

    def __ge__(self, other: Severity) -> bool:
        return self._value >= other._value


Severity._values = {
    name: Severity(value) for value, name in enumerate(["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])
}
for _name, _value in Severity._values.items():
    setattr(Severity, _name, _value)
