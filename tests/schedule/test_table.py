"""The best schedules: right for every arena, never slower for more memory, and no worse than what anyone would try."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.memory_model import PAGE, Memory
from trt_layering.schedule import layouts
from trt_layering.schedule.partition import Partition, Piece
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import Choice, best_choice, choose, make_table, rate


@st.composite
def partitions(draw: Any, most: int = 9) -> Partition:
    """Blocks of a few pages, some without weights, and joined ones over runs of two and of four."""
    lengths = draw(st.lists(st.integers(0, 7), min_size=1, max_size=most))
    times = [draw(st.floats(0, 20)) for _ in lengths]
    pieces = [
        Piece(index, 1, ((index, length * PAGE),) if length else (), time)
        for index, (length, time) in enumerate(zip(lengths, times, strict=True))
    ]
    for step in (2, 4):
        for first in range(0, len(lengths) - step + 1, step):
            run = pieces[first : first + step]
            extents = tuple(extent for piece in run for extent in piece.extents)
            pieces.append(Piece(first, step, extents, draw(st.floats(0.7, 1)) * sum(piece.execute for piece in run)))
    return Partition(tuple(pieces))


PACE = Pace(1 / PAGE, 1.2, 1.3)
EVEN = Pace(1 / PAGE)
"""Nothing slows anything down, so that times are the same of schedules that differ."""


@settings(max_examples=150)
@given(partitions(), st.data())
def test_any_arena_has_a_schedule_that_is_right(partition: Partition, data: st.DataObject) -> None:
    """Each block executes once, in order, and sees its own bytes whatever happens when."""
    arena = data.draw(st.integers(partition.floor, partition.total + 2 * PAGE))
    choice = choose(make_table(partition, PACE), arena)
    assert choice.arena_bytes <= arena
    chosen = [partition.pieces[index] for index in choice.parts]
    assert [b for piece in chosen for b in range(piece.first, piece.first + piece.count)] == [*range(partition.blocks)]
    schedule = choice.schedule(partition.pieces, 2 * PAGE)
    assert schedule.arena_bytes == choice.arena_bytes
    assert schedule.streamed_bytes <= choice.streamed_bytes  # smaller requests overlap less
    assert schedule.resident_bytes + schedule.streamed_bytes == choice.resident_bytes + choice.streamed_bytes
    memory = Memory([piece.extents for piece in chosen], schedule, sweeps=3, threads=2)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    while not memory.done:
        memory.step(rng, (1, 1, 1, 1))


@given(partitions(), st.sampled_from([PACE, EVEN, replace(PACE, first_read=0.5)]))
def test_more_memory_never_costs_time(partition: Partition, pace: Pace) -> None:
    """Nor does what a table says differ by more than a thousandth from the clock."""
    table = make_table(partition, pace)
    assert table[0].arena_bytes <= partition.floor
    for less, more in pairwise(table):
        assert less.arena_bytes < more.arena_bytes
        assert more.seconds <= less.seconds
        assert more.seconds < 0.999 * less.seconds or more.streamed_bytes < less.streamed_bytes
    for choice in table:
        clocked = rate(partition, choice.parts, choice.offsets, pace)
        assert choice.seconds <= clocked.seconds <= 1.001 * choice.seconds + 1e-9
        assert replace(clocked, seconds=choice.seconds) == choice


@given(partitions(), st.sampled_from([PACE, EVEN]))
def test_enough_memory_for_everything_streams_nothing(partition: Partition, pace: Pace) -> None:
    table = make_table(partition, pace)
    assert table[-1].streamed_bytes == 0
    assert table[-1].arena_bytes <= partition.total
    assert all(table[-1].seconds <= choice.seconds for choice in table)
    executing = sum(partition.pieces[index].execute for index in table[-1].parts)
    assert table[-1].seconds == pytest.approx(executing, rel=2e-3, abs=1e-9)


def test_times_that_rounding_alone_tells_apart_are_the_same() -> None:
    """Reads are hidden with room for three blocks; what more memory spares takes a sum of the same times."""
    times = [0.1, 0.7, 0.3, 1.1, 0.9, 0.2, 1.3]
    partition = Partition(tuple(Piece(i, 1, ((i, PAGE),), time) for i, time in enumerate(times)))
    table = make_table(partition, Pace(1e-3 / PAGE))
    assert table[-1].streamed_bytes == 0
    hidden = [choice for choice in table if choice.arena_bytes >= 3 * PAGE]
    assert len({choice.seconds for choice in hidden}) == 1
    assert [choice.streamed_bytes for choice in hidden] == sorted({c.streamed_bytes for c in hidden}, reverse=True)
    assert len(hidden) > 2


def test_requests_are_as_large_as_the_pace_says() -> None:
    """Smaller ones wait for less: only with those of a page a block is read half while the one before it executes."""
    blocks = tuple(Piece(index, 1, ((index, 2 * PAGE),), 2.0) for index in range(4))
    partition, offsets = Partition(blocks), (0, PAGE, 0, PAGE)
    whole, halves = (rate(partition, (0, 1, 2, 3), offsets, replace(EVEN, read_size=n * PAGE)) for n in (2, 1))
    assert whole.seconds > halves.seconds


@given(partitions(), st.data())
def test_never_slower_than_the_sequential_mode_or_the_double_buffer(partition: Partition, data: st.DataObject) -> None:
    arena = data.draw(st.integers(partition.floor, partition.total + PAGE))
    best = best_choice(partition, arena, PACE).seconds
    single = tuple(range(partition.blocks))
    lengths = [partition.pieces[index].nbytes for index in single]
    halves = layouts.double_buffer(lengths, arena)
    assert best <= 1.01 * rate(partition, single, (0,) * len(single), PACE).seconds + 1e-9
    if halves is not None:
        assert best <= 1.01 * rate(partition, single, halves, PACE).seconds + 1e-9


def test_what_only_reads_stays_and_what_executes_long_streams() -> None:
    """Three blocks that execute long with few weights, then six that only read: those are kept."""
    long = [Piece(index, 1, ((index, PAGE),), 9.0) for index in range(3)]
    wide = [Piece(index, 1, ((index, 2 * PAGE),), 0.1) for index in range(3, 9)]
    partition = Partition((*long, *wide))
    choice = best_choice(partition, 11 * PAGE, Pace(1 / PAGE))
    kept = [index for index, reads in enumerate(choice.schedule(partition.pieces, PAGE).reads) if reads[0].once]
    assert set(kept) <= set(range(3, 9))
    assert len(kept) >= 3


def test_blocks_that_stay_are_joined() -> None:
    pieces = [Piece(index, 1, ((index, PAGE),), 1.0) for index in range(8)]
    pieces.append(Piece(0, 8, tuple((index, PAGE) for index in range(8)), 6.0))
    everything = best_choice(Partition(tuple(pieces)), 8 * PAGE, EVEN)
    assert everything.parts == (8,)
    assert everything.seconds == pytest.approx(6)


def test_less_than_the_floor_is_refused() -> None:
    partition = Partition((Piece(0, 1, ((0, 3 * PAGE),), 1.0),))
    for refused in (lambda: best_choice(partition, 2 * PAGE, PACE), lambda: choose(make_table(partition, PACE), PAGE)):
        with pytest.raises(ValueError, match="largest block"):
            refused()


def test_an_arena_that_is_no_whole_pages_changes_nothing() -> None:
    partition = Partition(tuple(Piece(i, 1, ((i, (1 + i * 5 % 7) * PAGE),), 1.0) for i in range(12)))
    for arena in range(partition.floor, partition.total, 3 * PAGE):
        assert best_choice(partition, arena + PAGE - 1, PACE) == best_choice(partition, arena, PACE)


@given(partitions(), st.data())
def test_a_double_buffer_never_reads_the_half_that_executes(partition: Partition, data: st.DataObject) -> None:
    lengths = [piece.nbytes for piece in partition.pieces if piece.count == 1]
    arena = data.draw(st.integers(0, 2 * sum(lengths) + PAGE))
    offsets = layouts.double_buffer(lengths, arena)
    half = arena // 2 // PAGE * PAGE
    if offsets is None:
        assert max(lengths) > half
        return
    for offset, length in zip(offsets, lengths, strict=True):
        assert offset >= 0
        assert offset + length <= 2 * half
        assert length == 0 or offset // max(half, 1) == (offset + length - 1) // max(half, 1)


def test_choices_are_plain_numbers() -> None:
    """They are written to a file and read back."""
    import msgspec

    table = make_table(Partition(tuple(Piece(i, 1, ((i, PAGE),), 1.0) for i in range(5))), PACE)
    assert msgspec.json.decode(msgspec.json.encode(table), type=tuple[Choice, ...]) == table
