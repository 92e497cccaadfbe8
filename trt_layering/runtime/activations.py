"""What passes between blocks: which values have a size that is known, how long each is alive, and memory for them.

May import numpy, the schedule and the manifest's types. Nothing here fails but for want of memory (MemoryError).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from trt_layering.schedule.activations import Lifetime, pack
from trt_layering.store.manifest import Block, Chain, Value, tensor_nbytes

Array = np.ndarray[Any, Any]
SizeOf = Callable[[Value], int | None]


@dataclass(frozen=True)
class Packing:
    """Where the activations of known size lie in one piece of memory of `nbytes`, for each request anew; the model's
    inputs and outputs of known size, the `ends`, of which the outputs are `output_bytes`, are beside it."""

    places: tuple[tuple[Value, int], ...]
    nbytes: int
    ends: tuple[Value, ...]
    output_bytes: int

    @classmethod
    def of(cls, chain: Chain, blocks: Sequence[Block]) -> Packing:
        """For `blocks` of `chain`, one after the other. Where a value's shape has a range, for the largest."""
        inputs, blocks = _largest(chain, chain.inputs), _at_largest(chain, blocks)
        size_of = device_nbytes if chain.tensorrt else nbytes
        static, ends = static_outputs(inputs, blocks, size_of), {value.name for value in chain.outputs}
        last = {name: index for index, names in enumerate(last_uses(blocks)) for name in names}
        produced = [
            (value, index)
            for index, block in enumerate(blocks)
            for value in block.outputs
            if value.name in static and value.name not in ends
        ]
        lifetimes = [Lifetime(size_of(v) or 0, index, last.get(v.name, index)) for v, index in produced]
        offsets, size = pack(lifetimes)
        places = tuple((value, offset) for (value, _), offset in zip(produced, offsets, strict=True))
        outputs = [value for value in static.values() if value.name in ends]
        return cls(places, size, (*inputs, *outputs), sum(size_of(value) or 0 for value in outputs))


def _largest(chain: Chain, values: Sequence[Value]) -> tuple[Value, ...]:
    ranges = chain.tensorrt.ranges if chain.tensorrt else {}
    return tuple(replace(v, shape=ranges[v.name].max) if v.name in ranges else v for v in values)


def _at_largest(chain: Chain, blocks: Sequence[Block]) -> Sequence[Block]:
    return [
        replace(block, inputs=_largest(chain, block.inputs), outputs=_largest(chain, block.outputs)) for block in blocks
    ]


def static_outputs(inputs: Sequence[Value], blocks: Sequence[Block], size_of: SizeOf | None = None) -> dict[str, Value]:
    """Activations of known size by name; `size_of`: `nbytes`, or another. Where an input's size varies there are none:
    what a file declares of values behind it need not hold for the next input."""
    size_of = size_of or nbytes
    if any(size_of(value) is None for value in inputs):
        return {}
    return {value.name: value for block in blocks for value in block.outputs if size_of(value) is not None}


def last_uses(blocks: Sequence[Block]) -> list[list[str]]:
    """For each block the names that nothing uses after it."""
    last: dict[str, int] = {}
    for index, block in enumerate(blocks):
        last.update({value.name: index for value in (*block.outputs, *block.inputs)})
    drops: list[list[str]] = [[] for _ in blocks]
    for name, index in last.items():
        drops[index].append(name)
    return drops


def nbytes(value: Value) -> int | None:
    """Bytes of a value whose shape is known and whose dtype numpy has; None for others."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    try:
        dtype = np.dtype(value.dtype)
    except TypeError:
        return None
    return math.prod(fixed_shape(value)) * dtype.itemsize or None if dtype.isbuiltin == 1 else None


def device_nbytes(value: Value) -> int | None:
    """Bytes that a device needs for a value whose shape is known: at least one, so that it has an address; None for
    others."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    size = tensor_nbytes(value.dtype, fixed_shape(value))
    return None if size is None else max(size, 1)


def empty(value: Value) -> Array:
    """An array for `value`, whose shape is known."""
    return np.empty(fixed_shape(value), value.dtype)


def fixed_shape(value: Value) -> tuple[int, ...]:
    """The shape of a value whose shape is known."""
    return tuple(dim for dim in value.shape or () if isinstance(dim, int))
