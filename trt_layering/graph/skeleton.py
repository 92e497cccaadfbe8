"""An ONNX file without its weights: the protobuf message, each large tensor's bytes left where they lie in the file.

May import onnx and errors. A file that is no protobuf message, or that ends too early, raises ModelError.

Parsing a 2 GB file the ordinary way holds it in memory twice. Here only the fields on the way to a tensor are walked,
in a memory map; the payload of a tensor of `LARGE` bytes or more is replaced by a reference in ONNX's own form for
external data, with `INSIDE` for its location and the offset counted from the start of the model file.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx

from trt_layering.errors import ModelError

INSIDE = "\0inside"
LARGE = 1024
_LONGEST_MESSAGE = 2**31

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _numbers(message: str, **children: str) -> dict[int, str]:
    """Field numbers of `message`, by name, with the message that each holds."""
    fields = getattr(onnx, message).DESCRIPTOR.fields_by_name
    return {fields[name].number: child for name, child in children.items()}


# The fields that lead from a model to a tensor.
_PATHS = {
    "ModelProto": _numbers("ModelProto", graph="GraphProto", functions="FunctionProto"),
    "FunctionProto": _numbers("FunctionProto", node="NodeProto"),
    "GraphProto": _numbers("GraphProto", node="NodeProto", initializer="TensorProto"),
    "NodeProto": _numbers("NodeProto", attribute="AttributeProto"),
    "AttributeProto": _numbers(
        "AttributeProto", t="TensorProto", g="GraphProto", tensors="TensorProto", graphs="GraphProto"
    ),
}
# The fields whose bytes in the file are the tensor's bytes in memory; the second and third are packed.
_PAYLOADS = set(_numbers("TensorProto", raw_data="", float_data="", double_data=""))


class _Field(NamedTuple):
    """One field of a message: it lies at [begin, end) of the file, its value at [value, end)."""

    number: int
    wire_type: int
    begin: int
    value: int
    end: int


def read_skeleton(path: Path) -> onnx.ModelProto:
    """The model in `path` with every payload of `LARGE` bytes or more left in the file, at most a few MiB in memory.

    Raises ModelError when the bytes are no protobuf message, and OSError when the file cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        raise _broken("is empty" if stat.S_ISREG(status.st_mode) else "is not a regular file", path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            model: onnx.ModelProto = onnx.ModelProto.FromString(_shrink(data, 0, len(data), "ModelProto"))
        except Exception as error:  # ValueError from here, several kinds from another library's parser
            raise _broken("is truncated or not an ONNX model", path) from error
    return model


def _broken(what: str, path: Path) -> ModelError:
    return ModelError(f"the file {what}", where=str(path), remedy="copy or export the model again, as a .onnx file")


def _shrink(data: mmap.mmap, begin: int, end: int, message: str) -> bytes:
    """The message at [begin, end), with the large payloads below it replaced by references."""
    if message == "TensorProto":
        return _shrink_tensor(data, begin, end)
    children = _PATHS[message]
    parts = []
    kept = begin  # bytes from here to the next large child are copied as they are
    for field in _fields(data, begin, end):
        child = children.get(field.number)
        if child and field.wire_type == _BYTES and field.end - field.value >= LARGE:
            shrunk = _shrink(data, field.value, field.end, child)
            parts += [_copied(data, kept, field.begin), _header(field.number, len(shrunk)), shrunk]
            kept = field.end
    return b"".join([*parts, _copied(data, kept, end)])


def _copied(data: mmap.mmap, begin: int, end: int) -> bytes:
    if end - begin > _LONGEST_MESSAGE:
        raise ValueError("more than a message can hold, and none of it tensors")
    return data[begin:end]


def _shrink_tensor(data: mmap.mmap, begin: int, end: int) -> bytes:
    """The tensor at [begin, end), its payload replaced by a reference when it lies in one piece and is large."""
    payloads = [f for f in _fields(data, begin, end) if f.number in _PAYLOADS and f.wire_type == _BYTES]
    if len(payloads) != 1 or payloads[0].end - payloads[0].value < LARGE:
        return _copied(data, begin, end)
    payload = payloads[0]
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", INSIDE), ("offset", payload.value), ("length", payload.end - payload.value)):
        reference.external_data.add(key=key, value=str(text))
    encoded: bytes = reference.SerializeToString()
    return _copied(data, begin, payload.begin) + _copied(data, payload.end, end) + encoded


def _fields(data: mmap.mmap, begin: int, end: int) -> Iterator[_Field]:
    """The fields of the message at [begin, end); ValueError or IndexError where one is malformed or passes the end."""
    at = begin
    while at < end:
        tag, value = _varint(data, at)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, stop = _varint(data, value)
        elif wire_type == _BYTES:
            length, value = _varint(data, value)
            stop = value + length
        elif wire_type in (_FIXED32, _FIXED64):
            stop = value + (4 if wire_type == _FIXED32 else 8)
        else:
            raise ValueError(f"unknown wire type {wire_type}")
        if stop > end:
            raise ValueError("a field passes the end of its message")
        yield _Field(tag >> 3, wire_type, at, value, stop)
        at = stop


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """The number at `at` and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a number longer than ten bytes")


def _header(number: int, length: int) -> bytes:
    """Tag and length of a field of `length` bytes."""
    encoded = bytearray()
    for value in (number << 3 | _BYTES, length):
        while value >= 0x80:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)
