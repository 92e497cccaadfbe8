"""Shapes as people write them, in YAML and on the command line. Imports only errors and words; bad text raises
UsageError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral

from trt_layering.errors import UsageError
from trt_layering.words import quoted

Shape = tuple[int, ...]

_DIGITS = 18


class ShapeRange:
    """The smallest, the most usual and the largest shape of one input; all three alike where nothing varies.

    No dataclass, which msgspec would fill by itself and so without the checks. Immutable by convention.
    """

    __slots__ = ("max", "min", "opt")

    def __init__(self, min: Shape, opt: Shape, max: Shape) -> None:
        self.min, self.opt, self.max = min, opt, max

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShapeRange):
            return NotImplemented
        return (self.min, self.opt, self.max) == (other.min, other.opt, other.max)

    def __hash__(self) -> int:
        return hash((self.min, self.opt, self.max))

    def __repr__(self) -> str:
        return f"ShapeRange({self})"

    @classmethod
    def parse(cls, value: object) -> ShapeRange:
        """From `1x3x224x224`, a list of numbers, or a mapping of min, opt and max to those. UsageError otherwise."""
        if not isinstance(value, Mapping):
            shape = parse_shape(value)
            return cls(shape, shape, shape)
        wanted = ("min", "opt", "max")
        for key in value:
            if key not in wanted:
                raise UsageError(f"unknown key {quoted(key)} in a shape", remedy="the keys are min, opt and max")
        missing = [key for key in wanted if key not in value]
        if missing:
            raise UsageError(f"a shape range lacks {', '.join(missing)}", remedy="give min, opt and max, or one shape")
        return cls(*(parse_shape(value[key]) for key in wanted)).checked()

    def checked(self) -> ShapeRange:
        """Itself, or UsageError unless min, opt and max have one rank and do not shrink."""
        if not len(self.min) == len(self.opt) == len(self.max):
            raise UsageError(f"min, opt and max of a shape differ in rank: {self}", remedy="give them one rank")
        if any(not low <= usual <= high for low, usual, high in zip(self.min, self.opt, self.max, strict=True)):
            raise UsageError(f"min, opt and max of a shape are out of order: {self}", remedy="order them dim by dim")
        return self

    def for_build(self) -> Shape | dict[str, Shape]:
        """The form that `build` takes: one shape where nothing varies, else a dict of min, opt and max."""
        return self.opt if self.min == self.max else {"min": self.min, "opt": self.opt, "max": self.max}

    def __str__(self) -> str:
        if self.min == self.max:
            return format_shape(self.opt)
        return f"min {format_shape(self.min)}, opt {format_shape(self.opt)}, max {format_shape(self.max)}"


def parse_shape(value: object) -> Shape:
    """A shape from `1x3x224x224`, `[1,3,224,224]` or a list of numbers; "" and [] are a scalar's. UsageError."""
    given = value
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            value = [part.strip() for part in text[1:-1].split(",")] if text[1:-1].strip() else []
        else:
            value = re.split(r"[xX]", text) if text else []
    if not isinstance(value, Sequence) or not all(map(_is_dim, value)):
        raise UsageError(f"{quoted(given)} is not a shape", remedy="write it like 1x3x224x224, every dim a number")
    shape = tuple(int(part) for part in value)
    if 0 in shape:
        raise UsageError(f"shape {format_shape(shape)} has a dim of zero", remedy="every dim must be above zero")
    return shape


def _is_dim(part: object) -> bool:
    if isinstance(part, str):
        return re.fullmatch(rf"[0-9]{{1,{_DIGITS}}}", part) is not None
    return isinstance(part, Integral) and not isinstance(part, bool) and 0 <= int(part) < 10**_DIGITS


def parse_named(text: str) -> dict[str, Shape]:
    """Shapes by input name from `x:1x3x224x224`, or from several of those with commas between; UsageError otherwise.

    The last colon divides, since tensor names may contain colons. Commas may belong to a name too: they divide only
    where every part is a shape with a name.
    """
    parts = re.split(r",(?![^\[]*\])", text)
    try:
        pairs = [_named(part) for part in parts]
    except UsageError:
        pairs = [_named(text)]
    shapes = dict(pairs)
    if len(shapes) < len(pairs):
        raise UsageError(f"{quoted(text)} gives a shape twice", remedy="give it once")
    return shapes


def _named(text: str) -> tuple[str, Shape]:
    name, colon, dims = text.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{quoted(text)} is not a shape with a name", remedy="write it like x:1x3x224x224")
    return name, parse_shape(dims)


def format_shape(shape: Sequence[object]) -> str:
    """`1x3x224x224`; "scalar" for rank 0; "?" stands for a dim of which nothing is known."""
    return "x".join("?" if dim is None else str(dim) for dim in shape) or "scalar"
