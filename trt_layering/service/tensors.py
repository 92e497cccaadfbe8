"""One tensor's elements as the protocol sends them, and as an array. Imports numpy, datatypes and refusals; elements
that do not fit their datatype or shape, and those that a form cannot say, raise ProtocolError."""

from __future__ import annotations

import re
import struct
from functools import cache, reduce
from itertools import chain
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from trt_layering.service.datatypes import Datatype
from trt_layering.service.encoding import Buffer
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.shapes import format_shape
from trt_layering.words import printable, quoted

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding JSON raises where its depth was checked before."""
_OPENING = re.compile(rb"[\s\[]*")
_LENGTH = struct.Struct("<I")
_PIECE = 64 << 10
_INSIDE, _STEPS = np.zeros(256, np.uint8), np.zeros(256, np.int8)
_INSIDE[ord('"')] = 1
_STEPS[[ord("["), ord("{")]], _STEPS[[ord("]"), ord("}")]] = 1, -1


def check_json(text: bytes, limits: Limits, where: str) -> None:
    """ProtocolError if `text`, should it be JSON, nests deeper or has more values than `limits` say. Takes time and
    memory in proportion to its length, however it is made."""
    commas = text.count(b",")
    if commas > limits.max_objects:
        raise ProtocolError("too large", f"JSON of {commas} values, where {limits.max_objects} may be", where=where,
                            remedy="send large tensors in binary, or fewer")  # fmt: skip
    if text.count(b"[") + text.count(b"{") > limits.max_json_depth and _deeper(text, limits.max_json_depth):
        raise ProtocolError("malformed", f"JSON nested deeper than {limits.max_json_depth}", where=where,
                            remedy="nest a tensor's data as deep as its shape, or not at all")  # fmt: skip


def _deeper(text: bytes, limit: int) -> bool:
    """Whether arrays and objects nest deeper than `limit`; texts do not count."""
    text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    depth, inside = 0, np.uint8(0)
    for start in range(0, len(text), _PIECE):
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        within = np.bitwise_xor.accumulate(_INSIDE[piece]) ^ inside
        depths = depth + np.cumsum(_STEPS[piece[within == 0]], dtype=np.int64)
        if depths.size:
            if depths.max() > limit:
                return True
            depth = int(depths[-1])
        inside = within[-1]
    return False


def from_binary(raw: memoryview, datatype: Datatype, shape: Shape, limits: Limits, where: str) -> Array:
    """The array that `raw` holds, little-endian and in row-major order.

    It is a view of `raw`'s memory, which it keeps alive, where that is aligned for its dtype, and a copy where not.
    BYTES become an array of str.
    """
    count = prod(shape)
    if not datatype.nbytes:
        return _shaped(_texts(raw, count, limits, where), shape)
    if len(raw) != count * datatype.nbytes:
        raise ProtocolError(
            "contradictory", f"{len(raw)} bytes, where {datatype.name} of shape {format_shape(shape)} has "
            f"{count * datatype.nbytes}", where=where, remedy="let binary_data_size, shape and datatype agree",
        )  # fmt: skip
    if datatype.name == "BOOL":
        flags = np.frombuffer(raw, np.uint8)
        if flags.size and flags.max() > 1:
            raise ProtocolError("malformed", "a byte of BOOL is neither 0 nor 1", where=where, remedy="send 0 or 1")
        return flags.view(np.bool_).reshape(shape)
    array = np.frombuffer(raw, datatype.dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _texts(raw: memoryview, count: int, limits: Limits, where: str) -> list[str]:
    """`count` texts, each behind its length."""
    if count > limits.max_objects:
        raise _too_many(count, limits, where)
    texts, place, end = [], 0, len(raw)
    for number in range(count):
        begin = place + _LENGTH.size
        place = begin + _LENGTH.unpack_from(raw, place)[0] if begin <= end else end + 1
        if place > end:
            raise ProtocolError("incomplete", f"its {end} bytes end within element {number} of {count}", where=where,
                                remedy="send each element behind its length, four bytes, little-endian")  # fmt: skip
        try:
            texts.append(str(raw[begin:place], "utf-8"))
        except UnicodeDecodeError as error:
            raise ProtocolError("malformed", f"element {number} is not UTF-8", where=where,
                                remedy="send text as UTF-8") from error  # fmt: skip
    if place != end:
        raise ProtocolError("contradictory", f"{end - place} bytes follow its {count} elements", where=where,
                            remedy="let binary_data_size, shape and the elements agree")  # fmt: skip
    return texts


def from_json(raw: Buffer, datatype: Datatype, shape: Shape, limits: Limits, where: str) -> Array:
    """The array that `raw`, JSON that `check_json` has passed, holds: all elements in one list in row-major order, or
    lists nested as `shape` says. Always new memory."""
    if not datatype.in_json:
        raise ProtocolError(
            "unsupported", f"{datatype.name} has no form in JSON", where=where, remedy="send it in binary"
        )
    if prod(shape) > limits.max_objects:
        raise _too_many(prod(shape), limits, where)
    opening = _OPENING.match(raw)
    depth = opening[0].count(b"[") if opening else 0
    if depth == 0 or depth > max(1, len(shape)):
        raise ProtocolError("malformed", f"its data is nested {depth} deep, and its shape is {format_shape(shape)}",
                            where=where, remedy="give one list, or lists nested as the shape says")  # fmt: skip
    try:
        nested = _decoder(datatype.name, depth).decode(raw)
    except UNREADABLE as error:
        raise ProtocolError("malformed", f"its data does not fit {datatype.name}: {printable(str(error))}", where=where,
                            remedy=f"send elements that {datatype.name} can hold") from error  # fmt: skip
    elements = _flat(nested, depth, shape, where)
    return _shaped(elements, shape) if not datatype.nbytes else _numbers(elements, datatype, where).reshape(shape)


@cache
def _decoder(name: str, depth: int) -> msgspec.json.Decoder[Any]:
    """For elements of the datatype called `name` in lists in lists, `depth` deep."""
    element: Any = {"BOOL": bool, "FP32": float, "FP64": float, "BYTES": str}.get(name)
    if name == "UINT64":  # msgspec's bounds end with int64
        element = Annotated[int, Meta(ge=0)]
    elif element is None:
        bounds = np.iinfo(name.lower())
        element = Annotated[int, Meta(ge=int(bounds.min), le=int(bounds.max))]
    return msgspec.json.Decoder(reduce(lambda inner, _: list[inner], range(depth), element))  # type: ignore[valid-type]


def _flat(nested: list[Any], depth: int, shape: Shape, where: str) -> list[Any]:
    """The elements of lists nested as `shape` says, or already flat."""
    count = prod(shape)
    if depth == 1 and len(nested) == count:
        return nested
    level, whole = [nested], len(shape) > 0
    for size in shape[:depth]:
        whole = whole and all(len(row) == size for row in level)
        level = list(chain.from_iterable(level)) if whole else level
    if not whole or (depth < len(shape) and count):
        found = f"a list of {len(nested)}" if depth == 1 else f"lists, {depth} deep, the outer one of {len(nested)}"
        raise ProtocolError("contradictory", f"its data is {found}, and its shape is {format_shape(shape)}",
                            where=where, remedy=f"give {count} elements, flat or nested as the shape says")  # fmt: skip
    return level if count else []


def _numbers(elements: list[Any], datatype: Datatype, where: str) -> Array:
    if datatype.name == "UINT64" and max(elements, default=0) >= 2**64:
        raise ProtocolError("malformed", f"{quoted(max(elements))} is more than UINT64 can hold", where=where,
                            remedy="send elements that UINT64 can hold")  # fmt: skip
    if datatype.name != "FP32":
        return np.array(elements, datatype.dtype)
    with np.errstate(over="ignore"):
        array = np.array(elements, np.float64).astype(np.float32)
    if not np.isfinite(array).all():
        raise ProtocolError("malformed", "a number is more than FP32 can hold", where=where,
                            remedy="send elements that FP32 can hold")  # fmt: skip
    return array


def to_binary(array: Array) -> Buffer:
    """The bytes of `array`, in row-major order: a view of its memory where that is contiguous, which must not change
    until the bytes are sent. Texts are written each behind its length."""
    if array.dtype.kind != "O":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    parts: list[bytes] = []
    for element in array.flat:
        encoded = element.encode()
        parts += (_LENGTH.pack(len(encoded)), encoded)
    return b"".join(parts)


def to_json(array: Array, where: str) -> list[Any]:
    """The elements of `array` in row-major order, as JSON can hold them. ProtocolError for NaN and infinities, which it
    cannot."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ProtocolError("unsupported", "it holds NaN or an infinity, which JSON has not", where=where,
                            remedy="ask for this output in binary")  # fmt: skip
    found: list[Any] = array.ravel().tolist()
    return found


def _shaped(texts: list[str], shape: Shape) -> Array:
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(shape)


def _too_many(count: int, limits: Limits, where: str) -> ProtocolError:
    return ProtocolError("too large", f"{count} elements, where {limits.max_objects} are allowed in this form",
                         where=where, remedy="send numbers in binary, and texts in several requests")  # fmt: skip
