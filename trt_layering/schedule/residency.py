"""Where each block lies in the arena, which of its bytes stay, and what must have finished before they are overwritten.

Pure functions over numbers; imports only its neighbours. A schedule that cannot exist raises ValueError: the
caller compares the budget with `floor` first.

Blocks execute 0..N-1, again and again, each at a fixed offset. Counted on from the first sweep, block number g (block
g mod N) may be read into its place once every earlier block that used those bytes has finished. The latest of these
executed d blocks earlier, so the read waits for `finished >= g - lag` with lag = d - 1. Bytes that no other block uses
stay: they are read once. Nothing else is needed: at the floor every block waits for the one before it (sequential);
with two slots the loader is one block ahead (the double buffer of Demand Layering, section IV); more arena is more
read-ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_layering.schedule.layouts import layouts
from trt_layering.schedule.simulate import sweep_time

_ALIKE = 1.01


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


def floor(blocks: Blocks) -> int:
    """The smallest arena, in bytes: the largest block."""
    return max((sum(length for _, length in block) for block in blocks), default=0)


def lay_out(blocks: Blocks, arena_bytes: int, read_size: int, execute: Sequence[float], read_rate: float) -> Schedule:
    """The best schedule for an arena of at most `arena_bytes`, requests being at most `read_size` bytes.

    Of several layouts the one with the shortest sweep wins, simulated with the seconds each block executes and the
    drive's rate in bytes per second; where they are within a hundredth of the best, that which reads least, then that
    with the most read-ahead. Raises ValueError when `arena_bytes` is under `floor`.
    """
    if arena_bytes < floor(blocks):
        raise ValueError("the arena is smaller than the largest block")
    lengths = [sum(length for _, length in block) for block in blocks]
    if not any(lengths):
        return _schedule(blocks, (0,) * len(blocks), read_size)
    choice = sorted(layouts(lengths, arena_bytes, execute))
    drafts = [_schedule(blocks, offsets, max(lengths)) for offsets in choice]
    times = [sweep_time(draft, execute, 1 / read_rate) for draft in drafts]
    good = [draft for draft, time in zip(drafts, times, strict=True) if time <= _ALIKE * min(times)]
    best = min(good, key=lambda draft: (draft.streamed_bytes, -draft.read_ahead))
    return _schedule(blocks, best.offsets, read_size)


def _schedule(blocks: Blocks, offsets: Sequence[int], read_size: int) -> Schedule:
    """The reads that bring `blocks` to `offsets`, each with the wait that the others' places ask for."""
    lengths = (sum(length for _, length in block) for block in blocks)
    spans = [(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)]
    reads = []
    for index, block in enumerate(blocks):
        target, pieces = offsets[index], []
        for extent, length in block:
            for start in range(0, length, read_size):
                piece = min(read_size, length - start)
                pieces.append(_read(spans, index, extent, start, target + start, piece))
            target += length
        reads.append(tuple(pieces))
    return Schedule(max((end for _, end in spans), default=0), tuple(offsets), tuple(reads))


def _read(spans: Sequence[tuple[int, int]], index: int, extent: int, offset: int, target: int, length: int) -> Read:
    count = len(spans)
    for distance in range(1, count):
        start, end = spans[(index - distance) % count]
        if start < target + length and target < end and start < end:
            return Read(extent, offset, target, length, lag=distance - 1, once=False)
    return Read(extent, offset, target, length, lag=count - 1, once=True)
