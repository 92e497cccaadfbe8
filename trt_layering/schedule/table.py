"""The best schedule for every size of arena, found once, so that choosing one takes no time. Pure; imports neighbours.

For each size several covers, sets of blocks that stay, and rings for the others are simulated. The quickest wins,
that which reads least among equals. What was found for a smaller arena is kept unless a larger one is quicker, or reads
less in the same time, so more memory never costs time; times are the same where they differ by less than a thousandth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from trt_layering.schedule import layouts
from trt_layering.schedule.partition import Cover, Partition, Piece
from trt_layering.schedule.residency import Schedule, place
from trt_layering.schedule.simulate import Pace, rough_sweep_time, sweep_time

SIZES = 64
"""At most so many sizes of arena in a table."""
_SLOTS = (2, 3, 4, 6, 10, 16)
"""How many of the largest blocks a ring beside kept blocks may hold."""
_FINALISTS = 4
_ALIKE = 1.005
_SAME = 1e-3
_WHOLE = 1 << 62


@dataclass(frozen=True)
class Choice:
    """A schedule for any arena of at least `arena_bytes`: the pieces that execute, in order, as indices, and the offset
    of each. `seconds` is its predicted sweep, in which `streamed_bytes` are read; `resident_bytes` stay."""

    arena_bytes: int
    seconds: float
    resident_bytes: int
    streamed_bytes: int
    parts: tuple[int, ...]
    offsets: tuple[int, ...]

    def schedule(self, pieces: Sequence[Piece], read_size: int) -> Schedule:
        """The reads and waits, requests being at most `read_size` bytes."""
        return place([pieces[index].extents for index in self.parts], self.offsets, read_size)


Table = tuple[Choice, ...]
"""Ascending by `arena_bytes`; `seconds` fall, or stay while `streamed_bytes` fall. The last streams nothing."""


def choose(table: Table, arena_bytes: int) -> Choice:
    """The best choice for an arena of `arena_bytes`. Raises ValueError where that is under the first."""
    index = bisect_right(table, arena_bytes, key=attrgetter("arena_bytes"))
    if index == 0:
        raise ValueError("the arena is smaller than the largest block")
    return table[index - 1]


def make_table(partition: Partition, pace: Pace) -> Table:
    """The best schedules from the floor to an arena that holds everything."""
    return table_of(partition, _sizes(partition), pace)


def table_of(partition: Partition, sizes: Iterable[int], pace: Pace) -> Table:
    """The best schedules for arenas of `sizes`, which ascend from the floor, and for one that holds everything."""
    table: list[Choice] = []
    for size in sizes:
        _improve(table, best_choice(partition, size, pace))
    covers = dict.fromkeys(choice.parts for choice in table)
    _improve(table, min((keep_all(partition, cover, pace) for cover in covers), key=attrgetter("seconds")))
    return tuple(table)


def _improve(table: list[Choice], best: Choice) -> None:
    """Append `best`, the best for a larger arena, if it is better than the last; a time that is the same but for
    `_SAME` becomes the same."""
    if table:
        if not _better(best, table[-1]):
            return
        best = replace(best, seconds=min(best.seconds, table[-1].seconds))
    while table and table[-1].arena_bytes >= best.arena_bytes:
        table.pop()
    table.append(best)


def _better(one: Choice, other: Choice) -> bool:
    if one.seconds < (1 - _SAME) * other.seconds:
        return True
    return one.seconds <= (1 + _SAME) * other.seconds and one.streamed_bytes < other.streamed_bytes


def _sizes(partition: Partition) -> list[int]:
    """Sizes of arena: in equal steps, finer near the floor."""
    low, high = partition.floor, partition.total
    steps = min(SIZES - 1, max(1, (high - low) // layouts.PAGE))
    even = {low + (high - low) * step // steps for step in range(steps + 1)}
    halves = {low * half // 2 for half in range(2, 13) if low * half // 2 < high}
    return sorted({size - size % layouts.PAGE for size in even | halves} | {high})


def best_choice(partition: Partition, arena_bytes: int, pace: Pace) -> Choice:
    """The best schedule for an arena of at most `arena_bytes`. Raises ValueError when that is under the floor."""
    if arena_bytes < partition.floor:
        raise ValueError("the arena is smaller than the largest block")
    arena_bytes -= arena_bytes % layouts.PAGE
    good = _best(partition, set(_drafts(partition, arena_bytes)), pace)
    finer = {draft for one in good for draft in _refined(partition, one, arena_bytes)}
    choices = [rate(partition, draft.cover, draft.offsets, pace) for draft in _best(partition, finer.union(good), pace)]
    quickest = min(choice.seconds for choice in choices)
    return min((c for c in choices if c.seconds <= _ALIKE * quickest), key=attrgetter("streamed_bytes", "seconds"))


class _Draft(NamedTuple):
    """Pieces to execute at `offsets`; those at the positions `kept` of the cover have places of their own."""

    cover: Cover
    kept: tuple[int, ...]
    offsets: layouts.Layout


def _best(partition: Partition, drafts: Set[_Draft], pace: Pace) -> list[_Draft]:
    """A few of `drafts`, the best by a quick prediction; always the same ones."""
    return nsmallest(_FINALISTS, drafts, key=lambda draft: (_rough(partition, draft, pace), draft))


def _rough(partition: Partition, draft: _Draft, pace: Pace) -> tuple[float, int]:
    """A quick prediction, in which one whole block is read at once, and the bytes read."""
    pieces = [partition.pieces[index] for index in draft.cover]
    schedule = place([((0, piece.nbytes),) for piece in pieces], draft.offsets, _WHOLE)
    execute = [piece.execute * pace.execute_slowdown for piece in pieces]
    return rough_sweep_time(schedule, execute, pace.byte_time, pace.first_read), schedule.streamed_bytes


def rate(partition: Partition, cover: Cover, offsets: layouts.Layout, pace: Pace) -> Choice:
    """The choice of `cover` at `offsets`, with its predicted sweep."""
    pieces = partition.pieces
    schedule = place([pieces[index].extents for index in cover], offsets, pace.read_size)
    seconds = sweep_time(schedule, [pieces[index].execute for index in cover], pace)
    return Choice(schedule.arena_bytes, seconds, schedule.resident_bytes, schedule.streamed_bytes, cover, offsets)


def keep_all(partition: Partition, cover: Cover, pace: Pace) -> Choice:
    """The choice of `cover` in an arena that holds all of it."""
    lengths = [partition.pieces[index].nbytes for index in cover]
    return rate(partition, cover, layouts.ring(lengths, sum(lengths)), pace)


def _drafts(partition: Partition, arena_bytes: int) -> Iterator[_Draft]:
    """Candidates for one size of arena: for each cover a ring, the double buffer, and rings beside blocks that stay."""
    for cover in partition.covers():
        pieces = [partition.pieces[index] for index in cover]
        lengths = [piece.nbytes for piece in pieces]
        if max(lengths, default=0) > arena_bytes:
            continue
        yield _Draft(cover, (), layouts.ring(lengths, arena_bytes))
        if sum(lengths) <= arena_bytes:
            continue
        halves = layouts.double_buffer(lengths, arena_bytes)
        if halves is not None:
            yield _Draft(cover, (), halves)
        for kept in _kept(lengths, [piece.execute for piece in pieces], arena_bytes):
            joined, stays = partition.join_kept(cover, kept)
            yield _beside(partition, joined, stays, arena_bytes)


def _kept(lengths: Sequence[int], execute: Sequence[float], arena_bytes: int) -> set[frozenset[int]]:
    """Sets of blocks that could stay, beside rings for so many of the largest."""
    found = set()
    for order in (layouts.spread(len(lengths)), layouts.read_bound(lengths, execute)):
        for slots in _SLOTS:
            found.add(layouts.fitting(lengths, order, arena_bytes - slots * max(lengths)))
    return found - {frozenset()}


def _beside(partition: Partition, cover: Cover, kept: frozenset[int], arena_bytes: int) -> _Draft:
    """A ring beside the pieces that stay."""
    lengths = [partition.pieces[index].nbytes for index in cover]
    streamed, room = layouts.beside(lengths, kept, arena_bytes)
    offsets = layouts.with_kept(layouts.ring(streamed, room), lengths, kept)
    return _Draft(cover, tuple(sorted(kept)), offsets)


def _refined(partition: Partition, draft: _Draft, arena_bytes: int) -> Iterator[_Draft]:
    """`draft` with rings that its pieces go round a whole number of times."""
    kept = frozenset(draft.kept)
    lengths = [partition.pieces[index].nbytes for index in draft.cover]
    streamed, room = layouts.beside(lengths, kept, arena_bytes)
    for ring in layouts.even_rings(streamed, room):
        yield draft._replace(offsets=layouts.with_kept(ring, lengths, kept))
