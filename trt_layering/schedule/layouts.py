"""Ways to lay blocks out in an arena, for the schedule to choose from. Pure numbers; imports nothing of ours.

A layout is an offset for each block. Blocks that share no byte with others stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

_PAGE = 4096
_SHARES = 8
_SLOTS = 3
"""Largest blocks that a ring beside kept blocks must hold: with fewer, each hiccup of the drive shows."""
_MORE_LAPS = 4

Layout = tuple[int, ...]


def layouts(lengths: Sequence[int], arena_bytes: int, execute: Sequence[float]) -> set[Layout]:
    """Candidates for blocks of `lengths` bytes that execute for `execute` seconds, in at most `arena_bytes`.

    All blocks in a ring, of all the arena or of a part that they go round a whole number of times; two alternating
    halves, the double buffer; and rings beside blocks that stay, which have a part of the arena to themselves.
    `arena_bytes` must hold the largest block.
    """
    arena_bytes -= arena_bytes % _PAGE
    if sum(lengths) <= arena_bytes:
        return {_ring(lengths, arena_bytes)}
    found = {*_rings(lengths, arena_bytes), *_halves(lengths, arena_bytes)}
    for order in (_spread(len(lengths)), _read_bound(lengths, execute)):
        for share in range(1, _SHARES):
            found.update(_beside(lengths, arena_bytes, _kept(lengths, order, arena_bytes * share // _SHARES)))
    return found


def _rings(lengths: Sequence[int], arena_bytes: int) -> Iterator[Layout]:
    yield _ring(lengths, arena_bytes)
    laps = -(-sum(lengths) // arena_bytes)
    for lap in range(laps, laps + _MORE_LAPS):
        size = _even_ring(lengths, lap)
        if size <= arena_bytes:
            yield _ring(lengths, size)


def _ring(lengths: Sequence[int], size: int) -> Layout:
    """Blocks one after the other, going back to 0 where one does not fit."""
    offsets, cursor = [], 0
    for length in lengths:
        if cursor + length > size:
            cursor = 0
        offsets.append(cursor)
        cursor += length
    return tuple(offsets)


def _even_ring(lengths: Sequence[int], laps: int) -> int:
    """The smallest ring in which all blocks fit in `laps` rounds, so that the last round ends near the ring's end."""
    low, high = max(lengths), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        rounds = 1 + sum(1 for before, after in pairwise(_ring(lengths, middle)) if after < before)
        low, high = (low, middle) if rounds <= laps else (middle + 1, high)
    return low


def _halves(lengths: Sequence[int], arena_bytes: int) -> Iterator[Layout]:
    half = arena_bytes // 2 // _PAGE * _PAGE
    if max(lengths) <= half:
        yield tuple(index % 2 * half for index in range(len(lengths)))


def _beside(lengths: Sequence[int], arena_bytes: int, kept: frozenset[int]) -> Iterator[Layout]:
    """A ring for what is not `kept`, and above it places for what is; none where the ring would get too small."""
    streamed = [0 if index in kept else length for index, length in enumerate(lengths)]
    above = arena_bytes - sum(lengths[index] for index in kept)
    if _SLOTS * max(streamed) > above:
        return
    for ring in _rings(streamed, above):
        offsets, cursor = list(ring), above
        for index in sorted(kept):
            offsets[index] = cursor
            cursor += lengths[index]
        yield tuple(offsets)


def _kept(lengths: Sequence[int], order: Sequence[int], room: int) -> frozenset[int]:
    """Blocks that fit in `room` bytes together, taken in `order`."""
    kept = set()
    for index in order:
        if 0 < lengths[index] <= room:
            kept.add(index)
            room -= lengths[index]
    return frozenset(kept)


def _spread(count: int) -> list[int]:
    """All indices in an order of which every beginning is spread evenly (van der Corput's sequence)."""
    bits = max(count - 1, 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return [index for index in reversed_bits if index < count]


def _read_bound(lengths: Sequence[int], execute: Sequence[float]) -> list[int]:
    """First the blocks whose reading is hidden least by their own executing."""
    return sorted(range(len(lengths)), key=lambda index: execute[index] / max(lengths[index], 1))
