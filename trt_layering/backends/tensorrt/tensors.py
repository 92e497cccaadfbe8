"""Activations in device memory: where each lies, what it holds now, and the memory of one request.

May import `cuda` and the manifest's types. What does not fit where it is to go raises BackendError.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from trt_layering.backends.arena import dtype_of
from trt_layering.backends.tensorrt.cuda import Device
from trt_layering.errors import BackendError
from trt_layering.store.manifest import Value, tensor_nbytes

Array = np.ndarray[Any, Any]

_ALIGNMENT = 256


@dataclass
class Tensor:
    """A value in device memory: room for `capacity` bytes at `address`, of which `shape` says what is used now. `host`
    is pinned memory to pass it through, for a model's inputs and outputs."""

    name: str
    address: int
    capacity: int
    dtype: str
    shape: tuple[int, ...]
    host: memoryview | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it has now."""
        return tensor_nbytes(self.dtype, self.shape) or 0

    def take(self, shape: tuple[int, ...]) -> None:
        """Let it have `shape` from now on. BackendError where there is no room for that."""
        needed = tensor_nbytes(self.dtype, shape) or 0
        if needed > self.capacity:
            raise BackendError(
                f"{self.name!r} of shape {shape} takes {needed} bytes, where the engines were built for "
                f"{self.capacity}",
                remedy="give smaller inputs, or build for larger ones with --max-shape",
            )
        self.shape = shape


@dataclass(frozen=True)
class DeviceBuffers:
    """One request's activations; see `backends.base.Buffers`. The memory is the device's until that is closed."""

    tensors: Mapping[str, Tensor]


def buffers(
    device: Device,
    places: Sequence[tuple[Value, int]],
    nbytes: int,
    ends: Iterable[Value],
    from_host: Collection[str] = (),
) -> DeviceBuffers:
    """Memory of `nbytes` with activations at their `places`, and behind it the `ends`. These have pinned memory, too,
    and so have the activations that come `from_host`, by name."""
    ends, cursor, located = tuple(ends), _aligned(nbytes), list(places)
    for value in ends:
        located.append((value, cursor))
        cursor += _aligned(_capacity(value))
    memory = device.allocate(max(cursor, 1), "activations")
    passed = [*ends, *(value for value, _ in places if value.name in from_host)]
    *begins, end = accumulate((_aligned(_capacity(value)) for value in passed), initial=0)
    starts = {value.name: begin for value, begin in zip(passed, begins, strict=True)}
    passing = device.pinned(max(end, 1), "inputs and outputs")
    tensors = {
        value.name: Tensor(
            value.name, memory.address + offset, _capacity(value), value.dtype, _fixed(value),
            passing.memory[starts[value.name] :][: _capacity(value)] if value.name in starts else None,
        )
        for value, offset in located
    }  # fmt: skip
    return DeviceBuffers(tensors)


def bytes_of(array: Array) -> memoryview:
    """The bytes of a C-contiguous array, which must outlive them."""
    return memoryview((ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)).cast("B")


def empty(tensor: Tensor) -> Array:
    """An array for what `tensor` holds now."""
    return np.empty(tensor.shape, dtype_of(tensor.dtype))


def _capacity(value: Value) -> int:
    return max(tensor_nbytes(value.dtype, _fixed(value)) or 0, 1)


def _fixed(value: Value) -> tuple[int, ...]:
    shape = value.shape or ()
    if value.shape is None or not all(isinstance(dim, int) for dim in shape):
        raise BackendError(f"the size of {value.name!r} is not known", remedy="build the chain again")
    return tuple(dim for dim in shape if isinstance(dim, int))


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT
