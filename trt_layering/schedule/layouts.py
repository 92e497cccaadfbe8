"""Ways to lay blocks out in an arena, for a schedule to be chosen from. Pure numbers; imports nothing of ours.

A layout is an offset for each block. Blocks that share no byte with others stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PAGE = 4096
_MORE_LAPS = 3

Layout = tuple[int, ...]


def ring(lengths: Sequence[int], size: int) -> Layout:
    """Blocks one after the other, going back to 0 where one does not fit into `size` bytes."""
    offsets, cursor = [], 0
    for length in lengths:
        if cursor + length > size:
            cursor = 0
        offsets.append(cursor)
        cursor += length
    return tuple(offsets)


def even_rings(lengths: Sequence[int], size: int) -> Iterator[Layout]:
    """Rings of at most `size` bytes that all blocks go round a whole number of times, so that the last round ends near
    the ring's end: the fewest rounds that can be, and some more."""
    if sum(lengths) == 0 or size == 0:
        return
    laps = -(-sum(lengths) // size)
    for lap in range(laps, laps + _MORE_LAPS):
        even = _even_size(lengths, lap)
        if even <= size:
            yield ring(lengths, even)


def _even_size(lengths: Sequence[int], laps: int) -> int:
    """The smallest ring, in whole pages, in which all blocks fit in `laps` rounds."""
    low, high = -(-max(lengths) // PAGE), -(-sum(lengths) // PAGE)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _rounds(lengths, middle * PAGE) <= laps else (middle + 1, high)
    return low * PAGE


def _rounds(lengths: Sequence[int], size: int) -> int:
    """How often blocks go round a ring of `size` bytes."""
    rounds, cursor = 1, 0
    for length in lengths:
        cursor += length
        if cursor > size:
            rounds, cursor = rounds + 1, length
    return rounds


def double_buffer(lengths: Sequence[int], arena_bytes: int) -> Layout | None:
    """Two halves in turn, each with as many consecutive blocks as it holds: while one half executes, the other is read.
    The fixed double buffer of Demand Layering. None where a half cannot hold the largest block."""
    half = arena_bytes // 2 // PAGE * PAGE
    if max(lengths, default=0) > half:
        return None
    offsets, cursor, base = [], 0, 0
    for length in lengths:
        if cursor + length > half:
            cursor, base = 0, half - base
        offsets.append(base + cursor)
        cursor += length
    return tuple(offsets)


def beside(lengths: Sequence[int], kept: frozenset[int], arena_bytes: int) -> tuple[list[int], int]:
    """What is to go round where the blocks `kept` have places of their own: all lengths, with 0 for those, and the
    bytes that are left for the ring."""
    streamed = [0 if index in kept else length for index, length in enumerate(lengths)]
    return streamed, arena_bytes - sum(lengths[index] for index in kept)


def with_kept(layout: Layout, lengths: Sequence[int], kept: frozenset[int]) -> Layout:
    """`layout` of what goes round, and behind it, one after the other, the blocks `kept`."""
    offsets = list(layout)
    cursor = max((o + n for i, (o, n) in enumerate(zip(layout, lengths, strict=True)) if i not in kept), default=0)
    for index in sorted(kept):
        offsets[index] = cursor
        cursor += lengths[index]
    return tuple(offsets)


def fitting(lengths: Sequence[int], order: Sequence[int], room: int) -> frozenset[int]:
    """Blocks that fit into `room` bytes together, taken in `order`."""
    kept = set()
    for index in order:
        if 0 < lengths[index] <= room:
            kept.add(index)
            room -= lengths[index]
    return frozenset(kept)


def spread(count: int) -> list[int]:
    """All indices in an order of which every beginning is spread evenly (van der Corput's sequence)."""
    bits = max(count - 1, 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [index for index in reversed_bits if index < count]


def read_bound(lengths: Sequence[int], execute: Sequence[float]) -> list[int]:
    """All indices, first the blocks whose reading is hidden least by their own executing."""
    return sorted(range(len(lengths)), key=lambda index: execute[index] / max(lengths[index], 1))
