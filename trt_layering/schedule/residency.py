"""Where each block lies in the arena, which of its bytes stay, and what must have finished before they are overwritten.

Pure functions over numbers; imports only its neighbour `simulate`. A schedule that cannot exist raises ValueError: the
caller compares the budget with `floor` first.

Blocks execute 0..N-1, again and again, each at a fixed offset. Counted on from the first sweep, block number g (block
g mod N) may be read into its place once every earlier block that used those bytes has finished. The latest of these
executed d blocks earlier, so the read waits for `finished >= g - lag` with lag = d - 1. Bytes that no other block uses
stay: they are read once. Nothing else is needed: at the floor every block waits for the one before it (sequential);
with two slots the loader is one block ahead (the double buffer of Demand Layering, section IV); more arena is more
read-ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trt_layering.schedule.simulate import sweep_time


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

    Several layouts are tried. The shortest sweep wins, simulated with the seconds each block executes and the drive's
    rate in bytes per second; where they are within a hundredth of the best, the fewest bytes read, then the most
    read-ahead. Raises ValueError when `arena_bytes` is under `floor`.
    """
    lengths = [sum(length for _, length in block) for block in blocks]
    if arena_bytes < max(lengths, default=0):
        raise ValueError("the arena is smaller than the largest block")

    layouts = sorted({tuple(offsets) for offsets in _layouts(lengths, arena_bytes)})
    schedules = [_schedule(blocks, lengths, offsets, read_size) for offsets in layouts]
    times = [sweep_time(schedule, execute, 1 / read_rate) for schedule in schedules]
    good = [schedule for schedule, time in zip(schedules, times, strict=True) if time <= 1.01 * min(times)]
    return min(good, key=lambda schedule: (schedule.streamed_bytes, -schedule.read_ahead))


def _layouts(lengths: Sequence[int], arena_bytes: int) -> Iterator[list[int]]:
    """Candidate offsets: rings of several sizes, and two alternating halves."""
    total, largest = sum(lengths), max(lengths, default=0)
    if total <= arena_bytes:
        yield _ring(lengths, total)
        return
    laps = -(-total // max(arena_bytes, 1))
    yield _ring(lengths, arena_bytes)
    for lap in range(laps, laps + 4):
        size = _even_ring(lengths, lap)
        if largest <= size <= arena_bytes:
            yield _ring(lengths, size)
    if 2 * largest <= arena_bytes:
        yield [index % 2 * (arena_bytes // 2 // 4096 * 4096) for index in range(len(lengths))]


def _ring(lengths: Sequence[int], size: int) -> list[int]:
    """Blocks one after the other, going back to 0 where one does not fit."""
    offsets, cursor = [], 0
    for length in lengths:
        if cursor + length > size:
            cursor = 0
        offsets.append(cursor)
        cursor += length
    return offsets


def _even_ring(lengths: Sequence[int], laps: int) -> int:
    """The smallest ring in which all blocks fit in `laps` rounds, so that the last round ends near the ring's end."""
    low, high = max(lengths), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        offsets = _ring(lengths, middle)
        rounds = 1 + sum(1 for before, after in pairwise(offsets) if after < before)
        low, high = (low, middle) if rounds <= laps else (middle + 1, high)
    return low


def _schedule(blocks: Blocks, lengths: Sequence[int], offsets: Sequence[int], read_size: int) -> Schedule:
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
