"""What passes between blocks: which values have a size that is known, how long each is alive, and memory for them.

May import numpy, the schedule and the manifest's types. Nothing here fails but for want of memory (MemoryError).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_layering.schedule.activations import Lifetime, pack
from trt_layering.store.manifest import Block, Value

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Buffers:
    """The memory of one request's activations, and the backend's tensors over it by name."""

    memory: Array
    tensors: dict[str, Any]


@dataclass(frozen=True)
class Packing:
    """Where the activations of known size lie in one piece of memory of `nbytes`, for each request anew; the model's
    outputs, which its caller gets, are `output_bytes` beside it."""

    places: tuple[tuple[Value, int], ...]
    nbytes: int
    output_bytes: int

    @classmethod
    def of(cls, inputs: Sequence[Value], outputs: Sequence[Value], blocks: Sequence[Block]) -> Packing:
        """For a chain of `blocks` between `inputs` and `outputs`."""
        static, ends = static_outputs(inputs, blocks), {value.name for value in outputs}
        last = {name: index for index, names in enumerate(last_uses(blocks)) for name in names}
        produced = [
            (value, index)
            for index, block in enumerate(blocks)
            for value in block.outputs
            if value.name in static and value.name not in ends
        ]
        lifetimes = [Lifetime(nbytes(v) or 0, index, last.get(v.name, index)) for v, index in produced]
        offsets, size = pack(lifetimes)
        places = tuple((value, offset) for (value, _), offset in zip(produced, offsets, strict=True))
        return cls(places, size, sum(nbytes(value) or 0 for value in static.values() if value.name in ends))

    def buffers(self, wrap: Callable[[Array], Any]) -> Buffers:
        """Memory for one request, zero until written; `wrap` makes the backend's tensors."""
        memory = np.zeros(self.nbytes, np.uint8)
        tensors = {}
        for value, offset in self.places:
            array = memory[offset : offset + (nbytes(value) or 0)].view(value.dtype).reshape(_shape(value))
            tensors[value.name] = wrap(array)
        return Buffers(memory, tensors)


def static_outputs(inputs: Sequence[Value], blocks: Sequence[Block]) -> dict[str, Value]:
    """Activations of known size by name. Where an input's size varies there are none: what a file declares of values
    behind it need not hold for the next input."""
    if any(nbytes(value) is None for value in inputs):
        return {}
    return {value.name: value for block in blocks for value in block.outputs if nbytes(value) is not None}


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
    return math.prod(_shape(value)) * dtype.itemsize or None if dtype.isbuiltin == 1 else None


def empty(value: Value) -> Array:
    """An array for `value`, whose shape is known."""
    return np.empty(_shape(value), value.dtype)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(dim for dim in value.shape or () if isinstance(dim, int))
