"""Where each block lies in the arena, which of its bytes stay, and what must have finished before they are overwritten.

Pure functions over numbers; imports nothing. Blocks execute 0..N-1, again and again, each at a fixed offset. Counted on
from the first sweep, block number g (block g mod N) may be read into its place once every earlier block that used
those bytes has finished. The latest of these executed d blocks earlier, so the read waits for `finished >= g - lag`
with lag = d - 1. Bytes that no other block uses stay: they are read once. Nothing else is needed: at the floor every
block waits for the one before it (sequential); with two slots the loader is one block ahead (the double buffer of
Demand Layering, section IV); more arena is more read-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """One request to the drive: `length` bytes at `offset` of extent `extent`, to byte `target` of the arena, not
    before `finished >= g - lag`. `once`: the bytes stay, so later sweeps leave it out."""

    extent: int
    offset: int
    target: int
    length: int
    lag: int
    once: bool


@dataclass(frozen=True)
class Schedule:
    """`offsets[b]` is where block b begins in the arena of `arena_bytes`; `reads[b]` brings it there, in order."""

    arena_bytes: int
    offsets: tuple[int, ...]
    reads: tuple[tuple[Read, ...], ...]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the arena that are read once."""
        return sum(read.length for block in self.reads for read in block if read.once)

    @property
    def streamed_bytes(self) -> int:
        """Bytes read in every sweep."""
        return sum(read.length for block in self.reads for read in block if not read.once)

    @property
    def read_ahead(self) -> int:
        """How early reads may begin: bytes times blocks, summed over a sweep."""
        return sum(read.length * read.lag for block in self.reads for read in block if not read.once)

    @property
    def mode(self) -> str:
        """The kind of schedule: "resident" where nothing is read twice; else by how many blocks ahead of execution
        reads may on average begin: "sequential" (none), "double" (one) or "ring" (more)."""
        if not self.streamed_bytes:
            return "resident"
        return {0: "sequential", 1: "double"}.get(round(self.read_ahead / self.streamed_bytes), "ring")


Blocks = Sequence[Sequence[tuple[int, int]]]
"""For each block its extents, in arena order, as (extent index, length in bytes)."""


def lengths_of(blocks: Blocks) -> list[int]:
    """Bytes of each block."""
    return [sum(length for _, length in block) for block in blocks]


def place(blocks: Blocks, offsets: Sequence[int], read_size: int) -> Schedule:
    """The reads, of at most `read_size` bytes each, that bring `blocks` to `offsets` of an arena, each with the wait
    that the others' places ask for."""
    spans = [(offset, offset + length) for offset, length in zip(offsets, lengths_of(blocks), strict=True)]
    alone = _alone(spans)
    reads = []
    for index, block in enumerate(blocks):
        target, pieces = offsets[index], []
        for extent, length in block:
            for start in range(0, length, read_size):
                piece = min(read_size, length - start)
                lag = len(spans) - 1 if alone[index] else _lag(spans, index, target + start, piece)
                pieces.append(Read(extent, start, target + start, piece, lag, once=lag == len(spans) - 1))
            target += length
        reads.append(tuple(pieces))
    return Schedule(max((end for _, end in spans), default=0), tuple(offsets), tuple(reads))


def _alone(spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each span whether no other shares a byte with it."""
    alone = [True] * len(spans)
    last, reach = -1, 0
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        start, end = spans[index]
        if start == end:
            continue
        if start < reach:
            alone[index] = alone[last] = False
        if end > reach:
            last, reach = index, end
    return alone


def _lag(spans: Sequence[tuple[int, int]], index: int, target: int, length: int) -> int:
    """How many blocks execute between block `index` and the one before it that last used these bytes."""
    count = len(spans)
    for distance in range(1, count):
        start, end = spans[index - distance]
        if start < target + length and target < end and start < end:
            return distance - 1
    return count - 1
