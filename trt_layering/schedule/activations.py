"""Where activations of known size lie in one buffer, so that those never alive together share bytes. Pure numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 256  # what GPUs ask of addresses


@dataclass(frozen=True)
class Lifetime:
    """`nbytes` needed from block `first`, which produces them, to block `last`, which uses them last, both included."""

    nbytes: int
    first: int
    last: int


def pack(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets (multiples of 256) for each lifetime, and the buffer's size in bytes.

    Largest first, each at the lowest offset that is free for as long as it lives.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].nbytes, i)):
        mine = lifetimes[index]
        others = [i for i in placed if lifetimes[i].first <= mine.last and mine.first <= lifetimes[i].last]
        cursor = 0
        for other in sorted(others, key=lambda i: offsets[i]):
            if offsets[other] - cursor >= mine.nbytes:
                break
            cursor = max(cursor, _align(offsets[other] + lifetimes[other].nbytes))
        offsets[index] = cursor
        placed.append(index)
    return offsets, max((offsets[i] + _align(lifetimes[i].nbytes) for i in placed), default=0)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
