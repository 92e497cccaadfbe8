"""Checks what a caller feeds to a chain. Imports numpy and the manifest's types; what does not fit raises
InputError."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trt_layering.errors import InputError
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Range, Value

Array = np.ndarray[Any, Any]


def checked(feeds: Mapping[str, Any], inputs: Sequence[Value], ranges: Mapping[str, Range]) -> dict[str, Array]:
    """`feeds` as C-contiguous arrays, one for each of `inputs`, with the right dtypes, ranks and dims, and shapes
    within `ranges` where they name an input.

    Arrays that already fit are passed on, not copied. A symbol must have one size everywhere.
    """
    known = [value.name for value in inputs]
    if not isinstance(feeds, Mapping):
        raise InputError(f"feeds are no mapping but {type(feeds).__name__}", remedy="feed {name: array, ...}")
    for name in feeds:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the inputs are {', '.join(map(repr, known))}"
            raise InputError(f"the model has no input {name!r}", remedy=hint)
    symbols: dict[str, tuple[int, str]] = {}
    found = {value.name: _checked(feeds, value, symbols) for value in inputs}
    for name in ranges.keys() & found.keys():
        _check_range(name, found[name].shape, ranges[name])
    return found


def _checked(feeds: Mapping[str, Any], value: Value, symbols: dict[str, tuple[int, str]]) -> Array:
    where = f"input {value.name!r}"
    if value.name not in feeds:
        raise InputError(f"the input {value.name!r} is missing", where=where, remedy=f"feed {_describe(value)}")
    try:
        array = np.asarray(feeds[value.name])
    except (ValueError, TypeError) as error:
        raise InputError(f"this is no array: {error}", where=where, remedy=f"feed {_describe(value)}") from error
    if value.dtype == "string":
        array = _text(array, where)
    wanted = "object" if value.dtype == "string" else value.dtype
    if array.dtype.name != wanted or not array.dtype.isnative:
        raise InputError(
            f"dtype {array.dtype.str if array.dtype.name == wanted else array.dtype.name} does not fit",
            where=where, remedy=f"feed {_describe(value)}, for instance with .astype({wanted!r})",
        )  # fmt: skip
    if value.shape is not None:
        _check_shape(array.shape, value, symbols)
    return np.ascontiguousarray(array) if array.ndim else array


def _text(array: Array, where: str) -> Array:
    """`array` as objects, all of them str."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "O" and all(isinstance(element, str) for element in array.flat):
        return array
    raise InputError(f"an array of {array.dtype.name} is not text", where=where, remedy="feed an array of str")


def _check_shape(shape: tuple[int, ...], value: Value, symbols: dict[str, tuple[int, str]]) -> None:
    assert value.shape is not None
    where = f"input {value.name!r}"
    if len(shape) != len(value.shape):
        raise InputError(
            f"rank {len(shape)} (shape {format_shape(shape)}) does not fit",
            where=where, remedy=f"feed {_describe(value)}",
        )  # fmt: skip
    for axis, (size, dim) in enumerate(zip(shape, value.shape, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise InputError(
                f"shape {format_shape(shape)} does not fit: axis {axis} is {size} and must be {dim}",
                where=where, remedy=f"feed {_describe(value)}",
            )  # fmt: skip
        if isinstance(dim, str) and symbols.setdefault(dim, (size, value.name))[0] != size:
            other, owner = symbols[dim]
            raise InputError(
                f"axis {axis} ({dim}) is {size} here and {other} in the input {owner!r}",
                where=where, remedy=f"give {dim} the same size in both",
            )  # fmt: skip


def _check_range(name: str, shape: tuple[int, ...], span: Range) -> None:
    same_rank = len(shape) == len(span.min)
    if same_rank and all(low <= size <= high for low, size, high in zip(span.min, shape, span.max, strict=True)):
        return
    least, most = format_shape(span.min), format_shape(span.max)
    raise InputError(
        f"shape {format_shape(shape)} is outside what the engines were built for, {least} to {most}",
        where=f"input {name!r}", remedy=f"feed another shape, or build with --min-shape, --max-shape {name}:...",
    )  # fmt: skip


def _describe(value: Value) -> str:
    shape = "of any shape" if value.shape is None else f"of shape {format_shape(value.shape)}"
    return f"an array of {value.dtype} {shape}"
