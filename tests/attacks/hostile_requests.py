"""Bodies of inference requests that must be refused, each with its headers, the kind of refusal and a word of it."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from trt_layering.service.body import HEADER_LENGTH
from trt_layering.service.refusals import Kind


class Hostile(NamedTuple):
    body: bytes
    kind: Kind
    word: str
    headers: Mapping[str, str] = {}


def tensor(**changes: Any) -> dict[str, Any]:
    """An input of two numbers, in JSON, with fields changed; None takes a field out."""
    fields = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.5, 2.5], **changes}
    return {name: value for name, value in fields.items() if value is not None}


def text(*inputs: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": inputs, **fields}).encode()


def one(**changes: Any) -> bytes:
    return text(tensor(**changes))


def raw(data: str, datatype: str = "FP32", shape: str = "[2]") -> bytes:
    """A request whose data is text that need not be JSON."""
    return f'{{"inputs":[{{"name":"x","shape":{shape},"datatype":"{datatype}","data":{data}}}]}}'.encode()


def binary(data: bytes, size: Any = None, header: str | None = None, **changes: Any) -> tuple[bytes, dict[str, str]]:
    """A request with `data` behind the JSON, which says `size`; and its headers."""
    size = len(data) if size is None else size
    said = one(data=None, parameters={"binary_data_size": size}, **changes)
    return said + data, {HEADER_LENGTH: str(len(said)) if header is None else header}


def hostile_binary(kind: Kind, word: str, data: bytes, **changes: Any) -> Hostile:
    body, headers = binary(data, **changes)
    return Hostile(body, kind, word, headers)


def encoded(body: bytes, encoding: str, kind: Kind, word: str) -> Hostile:
    return Hostile(body, kind, word, {"content-encoding": encoding})


GOOD = one()
ZIPPED = gzip.compress(GOOD)
EIGHT = bytes(8)

JSON_FORM = {
    "nothing": Hostile(b"", "malformed", "truncated"),
    "half of it": Hostile(GOOD[: len(GOOD) // 2], "malformed", "truncated"),
    "no object": Hostile(b"[]", "malformed", "Expected `object`"),
    "null": Hostile(b"null", "malformed", "Expected `object`"),
    "no inputs": Hostile(b"{}", "malformed", "inputs"),
    "garbage behind": Hostile(GOOD + b"}", "malformed", "trailing"),
    "a byte order mark": Hostile(b"\xef\xbb\xbf" + GOOD, "malformed", "JSON"),
    "utf-16": Hostile(GOOD.decode().encode("utf-16"), "malformed", "JSON"),
    "bytes that are no text": Hostile(GOOD.replace(b'"x"', b'"\xff\xfe"'), "malformed", "UTF-8"),
    "half a surrogate": Hostile(raw('["\\ud800", "a"]', "BYTES"), "malformed", "escape"),
    "NaN": Hostile(raw("[NaN, 1]"), "malformed", "JSON"),
    "Infinity": Hostile(raw("[1, -Infinity]"), "malformed", "JSON"),
    "nested for ever": Hostile(raw("[" * 100_000), "malformed", "deeper"),
    "nested in what is not read": Hostile(
        text(tensor(), more=json.loads("[" * 200 + "]" * 200)), "malformed", "deeper"
    ),
    "nested behind a text": Hostile(raw('["\\"]\\\\", ' + "[" * 100 + "]" * 100 + "]"), "malformed", "deeper"),
    "a million commas": Hostile(raw("[" + "1," * (1 << 20) + "1,1]"), "too large", "values"),
    "10,000 tensors": Hostile(text(*(tensor(name=str(n)) for n in range(10_000))), "too large", "10000 inputs"),
    "10,000 outputs": Hostile(
        text(tensor(), outputs=[{"name": str(n)} for n in range(10_000)]), "too large", "outputs"
    ),
    "an endless id": Hostile(text(tensor(), id="a" * 2000), "too large", "id"),
    "an id that is a number": Hostile(text(tensor(), id=7), "malformed", "id"),
    "an endless name": Hostile(one(name="a" * 2000), "too large", "name"),
    "a number for a name": Hostile(one(name=1), "malformed", "name"),
    "an input twice": Hostile(text(tensor(), tensor()), "contradictory", "twice"),
    "an output twice": Hostile(text(tensor(), outputs=[{"name": "y"}, {"name": "y"}]), "contradictory", "twice"),
}

SHAPES = {
    "a dim below zero": Hostile(one(shape=[-2]), "malformed", "shape"),
    "minus one": Hostile(one(shape=[-1]), "malformed", "shape"),
    "a dim of true": Hostile(one(shape=[True, 2]), "malformed", "shape"),
    "a dim of 2.0": Hostile(one(shape=[2.0]), "malformed", "shape"),
    "a dim of 10 to the 30": Hostile(one(shape=[10**30]), "malformed", "shape"),
    "a dim of thousands of digits": Hostile(raw("[1]", shape=f"[{'9' * 5000}]"), "malformed", "out of range"),
    "a product of 2 to the 64": Hostile(one(shape=[2**32, 2**32]), "too large", "shape"),
    "nothing times much": Hostile(one(shape=[0, 2**62, 2**62], data=[]), "too large", "shape"),
    "100 dims": Hostile(one(shape=[1] * 100), "too large", "100 dims"),
    "no list": Hostile(one(shape="2"), "malformed", "shape"),
    "no shape": Hostile(one(shape=None), "malformed", "shape"),
    "more data": Hostile(one(shape=[1]), "contradictory", "data"),
    "less data": Hostile(one(shape=[3]), "contradictory", "data"),
    "a scalar with two": Hostile(one(shape=[]), "contradictory", "data"),
    "ragged": Hostile(one(shape=[2, 2], data=[[1, 2, 3], [4]]), "contradictory", "data"),
    "numbers among lists": Hostile(one(shape=[2, 2], data=[[1, 2], 3]), "malformed", "data"),
    "transposed": Hostile(one(shape=[3, 1], data=[[1, 2, 3]]), "contradictory", "data"),
    "deeper than its shape": Hostile(one(data=[[1, 2]]), "malformed", "nested 2 deep"),
    "empty lists": Hostile(one(shape=[1, 0], data=[[], []]), "contradictory", "data"),
    "much in a form for little": Hostile(one(shape=[2**21]), "too large", "elements"),
}

ELEMENTS = {
    "an unknown datatype": Hostile(one(datatype="FP8"), "malformed", "datatype"),
    "a manifest's word": Hostile(one(datatype="float32"), "malformed", "datatype"),
    "no datatype": Hostile(one(datatype=None), "malformed", "datatype"),
    "FP16": Hostile(one(datatype="FP16"), "unsupported", "JSON"),
    "BF16": Hostile(one(datatype="BF16"), "unsupported", "JSON"),
    "no data": Hostile(one(data=None), "contradictory", "neither"),
    "null data": Hostile(raw("null"), "malformed", "nested 0"),
    "a number": Hostile(one(data=1), "malformed", "nested 0"),
    "a text": Hostile(one(data="[1,2]"), "malformed", "nested 0"),
    "null among numbers": Hostile(one(data=[1, None]), "malformed", "null"),
    "300 of UINT8": Hostile(one(datatype="UINT8", data=[1, 300]), "malformed", "255"),
    "-1 of UINT8": Hostile(one(datatype="UINT8", data=[1, -1]), "malformed", "0"),
    "-1 of UINT64": Hostile(one(datatype="UINT64", data=[1, -1]), "malformed", "0"),
    "2 to the 64 of UINT64": Hostile(one(datatype="UINT64", data=[1, 2**64]), "malformed", "UINT64"),
    "2 to the 63 of INT64": Hostile(one(datatype="INT64", data=[1, 2**63]), "malformed", "INT64"),
    "128 of INT8": Hostile(one(datatype="INT8", data=[128, 0]), "malformed", "127"),
    "1.5 of INT32": Hostile(one(datatype="INT32"), "malformed", "float"),
    "true of INT32": Hostile(one(datatype="INT32", data=[True, False]), "malformed", "bool"),
    "true of FP32": Hostile(one(data=[True, 1.0]), "malformed", "bool"),
    "1 of BOOL": Hostile(one(datatype="BOOL", data=[1, 0]), "malformed", "int"),
    "a text of FP32": Hostile(one(data=["1", "2"]), "malformed", "str"),
    "a number of BYTES": Hostile(one(datatype="BYTES", data=["a", 1]), "malformed", "int"),
    "1e39 of FP32": Hostile(one(data=[1e39, 0]), "malformed", "FP32"),
    "1e400 of FP64": Hostile(raw("[1e400, 0]", "FP64"), "malformed", "range"),
    "thousands of digits": Hostile(raw(f"[{'9' * 5000}, 0]", "INT64"), "malformed", "range"),
}

BINARY = {
    "two sizes": hostile_binary("contradictory", "8 bytes", EIGHT, shape=[3]),
    "less than said": hostile_binary("incomplete", "left", EIGHT, size=12, shape=[3]),
    "more than said": hostile_binary("contradictory", "belong", EIGHT + b"more", size=8),
    "bytes of nobody": hostile_binary("contradictory", "belong", EIGHT, size=4, shape=[1]),
    "a size below zero": hostile_binary("malformed", "binary_data_size", EIGHT, size=-8),
    "a size of true": hostile_binary("malformed", "binary_data_size", EIGHT, size=True),
    "a size of 8.0": hostile_binary("malformed", "binary_data_size", EIGHT, size=8.0),
    "a size of text": hostile_binary("malformed", "binary_data_size", EIGHT, size="8"),
    "a huge size": hostile_binary("incomplete", "left", EIGHT, size=2**61),
    "a list for a size": hostile_binary("malformed", "parameters", EIGHT, size=[8]),
    "no header": Hostile(binary(EIGHT)[0], "malformed", "trailing"),
    "no header, no bytes": Hostile(binary(b"", size=8)[0], "incomplete", "left"),
    "a header of nothing": hostile_binary("unsupported", "0 bytes", EIGHT, header="0"),
    "a header beyond the body": hostile_binary("incomplete", "body has", EIGHT, header="100000"),
    "a header too short": hostile_binary("malformed", "JSON", EIGHT, header="20"),
    "a header into the tensor": hostile_binary("malformed", "JSON", EIGHT, header="104"),
    "a header below zero": hostile_binary("malformed", "no length", EIGHT, header="-1"),
    "a header of words": hostile_binary("malformed", "no length", EIGHT, header="all of it"),
    "a header of other digits": hostile_binary("malformed", "no length", EIGHT, header="١٢"),
    "a header of too many digits": hostile_binary("malformed", "no length", EIGHT, header="9" * 40),
    "a BOOL of 2": hostile_binary("malformed", "neither 0 nor 1", b"\x00\x02", datatype="BOOL"),
    "texts without lengths": hostile_binary("incomplete", "element 0", b"ab", datatype="BYTES"),
    "a text longer than all": hostile_binary("incomplete", "element 0", b"\xff\xff\xff\xffab", datatype="BYTES"),
    "one text of two": hostile_binary("incomplete", "element 1", b"\x01\x00\x00\x00a", datatype="BYTES"),
    "bytes behind texts": hostile_binary("contradictory", "follow", bytes(9), datatype="BYTES"),
    "texts that are no text": hostile_binary("malformed", "UTF-8", b"\x01\0\0\0\xff\0\0\0\0", datatype="BYTES"),
    "two million texts": hostile_binary("too large", "elements", EIGHT, shape=[2**21], datatype="BYTES"),
    "both forms": Hostile(one(parameters={"binary_data_size": 8}), "contradictory", "as well as"),
}

PARAMETERS = {
    "shared memory": Hostile(one(parameters={"shared_memory_region": "r"}), "unsupported", "shared memory"),
    "shared memory for an output": Hostile(
        text(tensor(), outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), "unsupported", "shared"
    ),
    "classification": Hostile(
        text(tensor(), outputs=[{"name": "y", "parameters": {"classification": 3}}]), "unsupported", "classification"
    ),
    "binary_data of 1": Hostile(
        text(tensor(), outputs=[{"name": "y", "parameters": {"binary_data": 1}}]), "malformed", "binary_data"
    ),
    "binary_data_output of yes": Hostile(
        text(tensor(), parameters={"binary_data_output": "yes"}), "malformed", "binary_data_output"
    ),
    "a sequence": Hostile(text(tensor(), parameters={"sequence_id": 7}), "unsupported", "sequence_id"),
    "a timeout below zero": Hostile(text(tensor(), parameters={"timeout": -1}), "malformed", "timeout"),
    "a timeout of 1.5": Hostile(text(tensor(), parameters={"timeout": 1.5}), "malformed", "timeout"),
    "a priority of text": Hostile(text(tensor(), parameters={"priority": "high"}), "malformed", "priority"),
    "null for a parameter": Hostile(text(tensor(), parameters={"mine": None}), "malformed", "null"),
    "an object for a parameter": Hostile(text(tensor(), parameters={"mine": {}}), "malformed", "object"),
}

ENCODINGS = {
    "an unknown encoding": encoded(GOOD, "br", "encoding", "br"),
    "two encodings": encoded(ZIPPED, "gzip, gzip", "encoding", "gzip, gzip"),
    "not gzip": encoded(GOOD, "gzip", "malformed", "not gzip"),
    "not deflate": encoded(GOOD, "deflate", "malformed", "not deflate"),
    "raw deflate": encoded(zlib.compress(GOOD)[2:-4], "deflate", "malformed", "not deflate"),
    "gzip, called deflate": encoded(ZIPPED, "deflate", "malformed", "not deflate"),
    "half of gzip": encoded(ZIPPED[: len(ZIPPED) // 2], "gzip", "incomplete", "too early"),
    "gzip without its checksum": encoded(ZIPPED[:-8], "gzip", "incomplete", "too early"),
    "gzip with a wrong checksum": encoded(ZIPPED[:-8] + bytes(8), "gzip", "malformed", "not gzip"),
    "gzip twice": encoded(ZIPPED + ZIPPED, "gzip", "malformed", "follow"),
    "gzip of nothing": encoded(b"", "gzip", "incomplete", "too early"),
    "gzip in gzip": encoded(gzip.compress(ZIPPED), "gzip", "malformed", "JSON"),
    "a bomb": encoded(gzip.compress(bytes(80 << 20), 1), "gzip", "too large", "inflates"),
    "a bomb of deflate": encoded(zlib.compress(bytes(80 << 20), 1), "deflate", "too large", "inflates"),
}

REQUESTS: Mapping[str, Hostile] = {
    f"{group}: {name}": hostile
    for group, table in (
        ("json", JSON_FORM),
        ("shape", SHAPES),
        ("elements", ELEMENTS),
        ("binary", BINARY),
        ("parameters", PARAMETERS),
        ("encoding", ENCODINGS),
    )
    for name, hostile in table.items()
}
"""All of them by name; with the limits that are usual."""
