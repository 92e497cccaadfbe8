"""Inference by the Open Inference Protocol (KServe v2), as NVIDIA's `tritonclient` speaks it: the bytes and headers of
a request to arrays, arrays to those of an answer. Imports the other modules of this folder and manifest types; pure
functions, which raise ProtocolError and nothing else for whatever a client sends.

    body = Body(headers, limits)                        # one `add` a piece, then `finish`
    request = parse_infer(body.finish(), headers, limits)
    wanted = wanted_outputs(request, model.outputs)     # before the work is done
    answer = infer_answer(request, wanted, results, model.name, model.version, headers.get("accept-encoding"))

Headers have names in small letters, or take names as they come, as starlette's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from trt_layering.service.body import HEADER_LENGTH, length
from trt_layering.service.datatypes import DATATYPES, Datatype, datatype_of
from trt_layering.service.encoding import WORTH_COMPRESSING, Buffer, accepted, compressed, inflated
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.service.tensors import UNREADABLE, Array, check_json, from_binary, from_json, to_binary, to_json
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Value
from trt_layering.words import printable, quoted

Parameter = bool | int | float | str
Dim = Annotated[int, Meta(ge=0, le=2**62)]
_Record = TypeVar("_Record")


class _Input(msgspec.Struct):
    name: str
    shape: list[Dim]
    datatype: str
    parameters: dict[str, Parameter] = {}
    data: msgspec.Raw = msgspec.Raw(b"")


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Parameter] = {}


class _Infer(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] = []
    id: str = ""
    parameters: dict[str, Parameter] = {}


_INFER = msgspec.json.Decoder(_Infer)


@dataclass(frozen=True)
class WantedOutput:
    """An output that a client asked for, and whether behind the JSON or in it."""

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """What a client asks of a model. `feeds` are its inputs by name, read-only or not, as `tensors.from_binary` says of
    their memory. `outputs` are those it named, in its order; none: all, in binary if `binary`. `timeout` is in seconds.
    `priority` is 1 for the most urgent, then 2, and so on; None: usual. `parameters` are the client's own."""

    id: str
    feeds: Mapping[str, Array]
    outputs: tuple[WantedOutput, ...]
    binary: bool
    timeout: float | None
    priority: int | None
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class Answer:
    """The body of an HTTP answer, and its headers beside Content-Length."""

    body: bytes
    headers: Mapping[str, str]


def parse_infer(body: Buffer, headers: Mapping[str, str], limits: Limits) -> InferRequest:
    """The request that `body` holds. Its memory must not change while the feeds are in use, which keep it alive.

    Takes no more memory than a few times the body's size, beside `limits.max_objects` Python objects; raises
    ProtocolError.
    """
    if len(body) > limits.max_body:
        raise ProtocolError("too large", f"a body of {len(body)} bytes, where {limits.max_body} are allowed",
                            where="body", remedy="send less at once, or raise service.max_body")  # fmt: skip
    body = inflated(body, headers.get("content-encoding"), limits.max_body)
    text, binary = _split(body, headers)
    found = decoded(text, _INFER, limits)
    _check_parameters(found, limits)
    _check_names("input", [one.name for one in found.inputs], limits)
    _check_names("output", [one.name for one in found.outputs], limits)
    behind = _flag(found.parameters, "binary_data_output", False, "the request")
    timeout = _number(found.parameters, "timeout", "the request")
    return InferRequest(
        id=found.id,
        feeds=_feeds(found.inputs, binary, limits),
        outputs=tuple(_wanted(one, behind) for one in found.outputs),
        binary=behind,
        timeout=timeout / 1e6 if timeout else None,
        priority=_number(found.parameters, "priority", "the request") or None,
        parameters={name: value for name, value in found.parameters.items() if name not in _OURS},
    )


_OURS = ("binary_data_output", "timeout", "priority", "sequence_id", "sequence_start", "sequence_end")


def _split(body: Buffer, headers: Mapping[str, str]) -> tuple[bytes, memoryview]:
    """The JSON, and what follows it."""
    size = length(headers, HEADER_LENGTH)
    if size is None:
        return bytes(body), memoryview(b"")
    if not 0 < size <= len(body):
        raise ProtocolError(
            "incomplete" if size else "unsupported",
            f"JSON of {size} bytes, and the body has {len(body)}", where=HEADER_LENGTH,
            remedy="say there how many bytes of JSON the body begins with, once it is inflated",
        )  # fmt: skip
    view = memoryview(body)
    return bytes(view[:size]), view[size:]


def decoded(text: bytes, decoder: msgspec.json.Decoder[_Record], limits: Limits) -> _Record:
    """What `text` says, as the decoder's type; ProtocolError if it is no such JSON, or more than the limits allow."""
    check_json(text, limits, "JSON")
    try:
        return decoder.decode(text)
    except UNREADABLE as error:
        raise ProtocolError("malformed", printable(str(error)), where="JSON",
                            remedy="see the Open Inference Protocol for its form") from error  # fmt: skip


def _check_parameters(found: _Infer, limits: Limits) -> None:
    if len(found.id) > limits.max_text:
        raise ProtocolError("too large", f"an id of {len(found.id)} characters, where {limits.max_text} are allowed",
                            where="the request", remedy="give a shorter one")  # fmt: skip
    if found.parameters.get("sequence_id"):
        raise ProtocolError("unsupported", "models keep nothing from one request to the next", where="sequence_id",
                            remedy="leave sequence_id out")  # fmt: skip


def _check_names(what: str, names: Sequence[str], limits: Limits) -> None:
    if len(names) > limits.max_tensors:
        raise ProtocolError("too large", f"{len(names)} {what}s, where {limits.max_tensors} are allowed",
                            where=f"{what}s", remedy="name only those that the model has")  # fmt: skip
    if any(len(name) > limits.max_text for name in names):
        raise ProtocolError("too large", f"a name of more than {limits.max_text} characters", where=f"{what}s",
                            remedy="name only those that the model has")  # fmt: skip
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ProtocolError("contradictory", f"the {what} {quoted(twice)} is there twice", where=f"{what}s",
                            remedy="name each once")  # fmt: skip


def _feeds(inputs: Sequence[_Input], binary: memoryview, limits: Limits) -> dict[str, Array]:
    """The arrays, of which the binary ones lie in `binary` one behind the other."""
    feeds: dict[str, Array] = {}
    place = 0
    for one in inputs:
        where = f"input {quoted(one.name)}"
        datatype, shape = _datatype(one, where), _shape(one, limits, where)
        _check_here(one.parameters, where)
        size = _number(one.parameters, "binary_data_size", where)
        data = memoryview(one.data)
        if (size is None) == (not data.nbytes):
            both = "neither data nor binary_data_size" if size is None else "data as well as binary_data_size"
            raise ProtocolError("contradictory", f"it has {both}", where=where, remedy="send it in one of both forms")
        if size is None:
            feeds[one.name] = from_json(data, datatype, shape, limits, where)
            continue
        if place + size > len(binary):
            raise ProtocolError(
                "incomplete", f"binary_data_size is {size}, and {len(binary) - place} bytes are left", where=where,
                remedy=f"send all bytes behind the JSON, and its length as {HEADER_LENGTH}",
            )  # fmt: skip
        feeds[one.name] = from_binary(binary[place : place + size], datatype, shape, limits, where)
        place += size
    if place < len(binary):
        raise ProtocolError("contradictory", f"{len(binary) - place} bytes belong to no input", where="body",
                            remedy="let each binary_data_size add up to all bytes behind the JSON")  # fmt: skip
    return feeds


def _datatype(one: _Input, where: str) -> Datatype:
    if one.datatype not in DATATYPES:
        raise ProtocolError("malformed", f"the datatype {quoted(one.datatype)} is unknown", where=where,
                            remedy=f"the datatypes are {', '.join(DATATYPES)}")  # fmt: skip
    return DATATYPES[one.datatype]


def _shape(one: _Input, limits: Limits, where: str) -> tuple[int, ...]:
    """Its shape, once it is no more than can be worked with."""
    if len(one.shape) > limits.max_rank:
        raise ProtocolError("too large", f"a shape of {len(one.shape)} dims, where {limits.max_rank} are allowed",
                            where=where, remedy="give the shape that the model wants")  # fmt: skip
    if prod(max(1, dim) for dim in one.shape) > limits.max_elements:
        raise ProtocolError("too large", f"shape {format_shape(one.shape)}, where {limits.max_elements} elements are "
                            "allowed", where=where, remedy="send less at once")  # fmt: skip
    return tuple(one.shape)


def _wanted(one: _Output, binary: bool) -> WantedOutput:
    where = f"output {quoted(one.name)}"
    _check_here(one.parameters, where)
    if one.parameters.get("classification"):
        raise ProtocolError("unsupported", "classification is not done here", where=where,
                            remedy="ask for the output itself, and sort it")  # fmt: skip
    return WantedOutput(one.name, _flag(one.parameters, "binary_data", binary, where))


def _check_here(parameters: Mapping[str, Parameter], where: str) -> None:
    if "shared_memory_region" in parameters:
        raise ProtocolError("unsupported", "shared memory is not had here", where=where,
                            remedy="send tensors in the body")  # fmt: skip


def _flag(parameters: Mapping[str, Parameter], name: str, default: bool, where: str) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise ProtocolError("malformed", f"{name} is {quoted(value)}", where=where, remedy="give true or false")
    return value


def _number(parameters: Mapping[str, Parameter], name: str, where: str) -> int | None:
    value = parameters.get(name)
    if value is None or (type(value) is int and 0 <= value < 2**62):
        return value
    raise ProtocolError("malformed", f"{name} is {quoted(value)}", where=where, remedy="give a whole number from 0 on")


def wanted_outputs(request: InferRequest, outputs: Sequence[Value]) -> tuple[WantedOutput, ...]:
    """The outputs that the answer will hold, of the model's `outputs`. ProtocolError if it has one of them not, or if
    its datatype has not the form asked for; to be called before the model works."""
    named = {value.name: value for value in outputs}
    for one in request.outputs:
        if one.name not in named:
            raise ProtocolError("contradictory", f"the model has no output {quoted(one.name)}", where="outputs",
                                remedy=f"the outputs are {', '.join(map(quoted, named))}")  # fmt: skip
    wanted = request.outputs or tuple(WantedOutput(name, request.binary) for name in named)
    for one in wanted:
        where = f"output {quoted(one.name)}"
        if not one.binary and not datatype_of(named[one.name].dtype, where).in_json:
            raise ProtocolError("unsupported", f"{named[one.name].dtype} has no form in JSON", where=where,
                                remedy="ask for it with binary_data, or for all with binary_data_output")  # fmt: skip
    return wanted


def infer_answer(
    request: InferRequest,
    wanted: Sequence[WantedOutput],
    results: Mapping[str, Array],
    model: str,
    version: int | None,
    accept_encoding: str | None = None,
) -> Answer:
    """The answer with the outputs `wanted` of `results`, whose bytes are copied once. ProtocolError for NaN and
    infinities that are wanted in JSON."""
    outputs: list[dict[str, Any]] = []
    parts: list[Buffer] = [b""]
    for one in wanted:
        array, where = results[one.name], f"output {quoted(one.name)}"
        word = "string" if array.dtype.kind == "O" else array.dtype.name
        output = {"name": one.name, "datatype": datatype_of(word, where).name, "shape": array.shape}
        if one.binary:
            parts.append(to_binary(array))
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = to_json(array, where)
        outputs.append(output)
    named = {"id": request.id} if request.id else {}
    parts[0] = msgspec.json.encode(
        {**named, "model_name": model, "model_version": "" if version is None else str(version), "outputs": outputs}
    )
    return _answer(parts, any(one.binary for one in wanted), accept_encoding)


def _answer(parts: Sequence[Buffer], binary: bool, accept_encoding: str | None) -> Answer:
    """Of JSON and what follows it."""
    headers = {"content-type": "application/octet-stream" if binary else "application/json"}
    if binary:
        headers[HEADER_LENGTH] = str(len(parts[0]))
    body = b"".join(parts)
    encoding = accepted(accept_encoding) if len(body) >= WORTH_COMPRESSING else None
    if encoding is not None:
        body, headers["content-encoding"] = compressed(body, encoding), encoding
    return Answer(body, headers)
