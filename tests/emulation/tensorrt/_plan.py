"""What an emulated plan holds, and its bytes; imports `_tables` and `emulated_device`. Bytes that are no plan of this
version and device: a PlanError in TensorRT's words."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx
from emulated_device import machine

from . import _tables

_HEADER = struct.Struct("<4sIQI4x4BI")  # magic, format, length, checksum, version at 24-27, bytes of the description
_FORMAT = 239


class PlanError(Exception):
    """Why a plan cannot be taken: TensorRT's error code and words."""


@dataclass
class PlanWeight:
    """A constant of the engine's. `checksum` is of the values at the build, `stored` whether the plan has them."""

    name: str
    onnx_type: int
    shape: list[int]
    nbytes: int
    checksum: int
    refittable: bool
    stored: bool


@dataclass
class PlanTensor:
    """An input or output. `profiles` has [min, opt, max] for each profile, of values for a shape tensor's."""

    name: str
    is_input: bool
    onnx_type: int
    shape: list[int]
    is_shape_tensor: bool
    profiles: list[list[list[int]]] = field(default_factory=list)


@dataclass
class Plan:
    """`model` is the graph as ONNX, its weights turned into inputs; `values` those weights that are stored."""

    name: str
    sm: str
    gpu: str
    refit: str
    stripped: bool
    scratch: list[int]
    layers: int
    tensors: list[PlanTensor]
    weights: list[PlanWeight]
    model: bytes = b""
    values: bytes = b""

    def encode(self) -> bytes:
        """The bytes of the plan."""
        described = asdict(self)
        del described["model"], described["values"]
        described["model_bytes"] = len(self.model)
        text = json.dumps(described).encode()
        body = b"".join((text, self.model, self.values))
        length = _HEADER.size + len(body)
        head = _HEADER.pack(b"ftrt", _FORMAT, length, zlib.crc32(body), *_tables.NUMBERS, len(text))
        return head + body

    @property
    def input_names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors if tensor.is_input]

    @property
    def output_names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors if not tensor.is_input]

    def tensor(self, name: str) -> PlanTensor | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def decode(data: bytes) -> Plan:
    """The plan in `data`. Raises PlanError."""
    if len(data) < _HEADER.size or data[:4] != b"ftrt":
        raise PlanError("4: API Usage Error", "The engine plan file has a wrong magic tag: it is corrupt or no plan.")
    _, form, length, checksum, *version, text = _HEADER.unpack_from(data)
    if tuple(version) != _tables.NUMBERS:
        raise PlanError(
            "6: API Usage Error",
            "The engine plan file is not compatible with this version of TensorRT, expecting library version "
            f"{'.'.join(map(str, _tables.NUMBERS))} got {'.'.join(map(str, version))}, please rebuild.",
        )
    body = data[_HEADER.size : length]
    if form != _FORMAT or length > len(data) or zlib.crc32(body) != checksum:
        raise PlanError("4: Internal Error", "Stdio archive: the engine plan file is truncated or corrupt.")
    plan = _described(json.loads(body[:text]), body[text:])
    if plan.sm != machine().sm:
        raise PlanError(
            "6: API Usage Error",
            "The engine plan file is generated on an incompatible device, expecting compute "
            f"{machine().sm} got compute {plan.sm}, please rebuild.",
        )
    return plan


def _described(found: dict[str, Any], rest: bytes) -> Plan:
    size = found.pop("model_bytes")
    found["tensors"] = [PlanTensor(**tensor) for tensor in found["tensors"]]
    found["weights"] = [PlanWeight(**weight) for weight in found["weights"]]
    return Plan(**found, model=rest[:size], values=rest[size:])


def tensor_shape(value: onnx.ValueInfoProto) -> list[int]:
    """The shape an ONNX value declares, -1 where it is not known."""
    return [d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim]
