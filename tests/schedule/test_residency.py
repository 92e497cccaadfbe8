"""Every layout is right whatever the loader and the executor do when, and the words about it are true."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.memory_model import PAGE, Memory, timed, wanted
from trt_layering.schedule.layouts import ring
from trt_layering.schedule.residency import Schedule, lengths_of, place
from trt_layering.schedule.simulate import Pace, rough_sweep_time, sweep_time

WEIGHTS = [(1, 1, 1, 1), (9, 9, 1, 0.1), (9, 1, 1, 1), (1, 9, 9, 9), (0.1, 0.1, 9, 9), (9, 0.1, 9, 0.1)]

Blocks = list[list[tuple[int, int]]]


@st.composite
def chains(draw: Any) -> Blocks:
    """Blocks of a few extents of a few pages, some extents in several blocks, some blocks without any."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=10))
    extents = [(index, length * PAGE) for index, length in enumerate(lengths)]
    count = draw(st.integers(1, 9))
    return [draw(st.lists(st.sampled_from(extents), max_size=3, unique=True)) for _ in range(count)]


@st.composite
def placed(draw: Any) -> tuple[Blocks, Schedule]:
    """A chain whose blocks lie anywhere in an arena, in any way over each other."""
    blocks = draw(chains())
    pages = draw(st.integers(0, 12))
    offsets = [draw(st.integers(0, pages)) * PAGE for _ in blocks]
    return blocks, place(blocks, offsets, draw(st.integers(1, 5)) * PAGE)


@settings(max_examples=300)
@given(placed(), st.integers(1, 4), st.sampled_from(WEIGHTS), st.integers(0, 2**32))
def test_every_block_sees_its_own_bytes_in_any_order_of_events(case: Any, threads: int, odds: Any, seed: int) -> None:
    """Wherever blocks lie: nothing is overwritten before its block has finished, what is read once stays, and there is
    always something that may happen."""
    blocks, schedule = case
    memory = Memory(blocks, schedule, sweeps=4, threads=threads)
    rng = random.Random(seed)
    while not memory.done:
        memory.step(rng, odds)
    assert not memory.waiting
    assert not memory.under_way


@given(placed())
def test_reads_bring_each_block_whole_in_whole_pages(case: Any) -> None:
    blocks, schedule = case
    for index, (block, reads) in enumerate(zip(blocks, schedule.reads, strict=True)):
        for read in reads:
            assert read.target % PAGE == read.offset % PAGE == read.length % PAGE == 0
            assert read.length > 0
            assert read.target + read.length <= schedule.arena_bytes
        brought = [
            (read.target // PAGE + page, (read.extent, read.offset // PAGE + page))
            for read in reads
            for page in range(read.length // PAGE)
        ]
        first = schedule.offsets[index] // PAGE
        assert brought == list(enumerate(wanted(blocks, index), start=first))
        assert len(block) <= len({read.extent for read in reads})


@given(placed())
def test_waits_are_as_short_as_memory_allows(case: Any) -> None:
    """Page by page: a read waits for the last block that used one of its pages, and not for a later one."""
    blocks, schedule = case
    count = len(blocks)
    used = [
        {offset // PAGE + page for page in range(length // PAGE)}
        for offset, length in zip(schedule.offsets, lengths_of(blocks), strict=True)
    ]
    for block, reads in enumerate(schedule.reads):
        for read in reads:
            pages = {read.target // PAGE + page for page in range(read.length // PAGE)}
            users = [earlier for earlier in range(block - count + 1, block) if pages & used[earlier % count]]
            assert read.once == (not users)
            assert read.lag == block - (max(users) if users else block - count) - 1


@given(placed())
def test_the_words_and_sums_are_true(case: Any) -> None:
    blocks, schedule = case
    assert schedule.resident_bytes + schedule.streamed_bytes == sum(lengths_of(blocks))
    assert (schedule.mode == "resident") == (schedule.streamed_bytes == 0)
    assert schedule.mode in ("sequential", "double", "ring", "resident")
    if schedule.mode == "sequential":
        assert 2 * schedule.read_ahead <= schedule.streamed_bytes


@pytest.mark.parametrize(
    ("slots", "mode", "streamed"), [(1, "sequential", 6), (2, "double", 6), (3, "ring", 6), (6, "resident", 0)]
)
def test_equal_blocks_in_a_ring_of_so_many_slots(slots: int, mode: str, streamed: int) -> None:
    blocks = [[(index, 4 * PAGE)] for index in range(6)]
    schedule = place(blocks, ring([4 * PAGE] * 6, slots * 4 * PAGE), 2 * PAGE)
    assert schedule.mode == mode
    assert schedule.streamed_bytes == streamed * 4 * PAGE


def test_two_slots_hide_the_reads_behind_execution() -> None:
    blocks = [[(index, 4 * PAGE)] for index in range(6)]

    def sweep(slots: int, read: float) -> float:
        """Time of a sweep, in which each block executes for a second and is read in `read` seconds."""
        schedule = place(blocks, ring([4 * PAGE] * 6, slots * 4 * PAGE), 4 * PAGE)
        return sweep_time(schedule, [1.0] * 6, Pace(read / (4 * PAGE)))

    assert sweep(1, read=1.0) == pytest.approx(12)
    assert sweep(2, read=0.5) == pytest.approx(6)
    assert sweep(2, read=2.0) == pytest.approx(12)
    assert sweep(6, read=9.0) == pytest.approx(6)


@settings(max_examples=200)
@given(placed(), st.data())
def test_prediction_agrees_with_the_clock(case: Any, data: st.DataObject) -> None:
    blocks, schedule = case
    execute = [data.draw(st.integers(0, 30_000)) for _ in blocks]
    first_read = data.draw(st.sampled_from([0, 0, 1500]))
    finished = timed(schedule, execute, byte_time=1, sweeps=3, first_read=first_read)
    last, before = finished[3 * len(blocks) - 1], finished[2 * len(blocks) - 1]
    assert rough_sweep_time(schedule, execute, 1, first_read) == last - before
    assert sweep_time(schedule, execute, Pace(1.0, first_read=first_read)) == pytest.approx(last - before)


@given(placed(), st.data(), st.floats(1, 3), st.floats(1, 3))
def test_slowing_each_other_down_costs_no_more_than_its_share(
    case: Any, data: st.DataObject, execute_slowdown: float, read_slowdown: float
) -> None:
    """What goes on at once is slower: between nothing slowed down and everything."""
    blocks, schedule = case
    execute = [float(data.draw(st.integers(0, 30_000))) for _ in blocks]
    quick = sweep_time(schedule, execute, Pace(1.0))
    slow = sweep_time(schedule, execute, Pace(1.0, execute_slowdown, read_slowdown))
    worst = max(execute_slowdown, read_slowdown) * (sum(execute) + schedule.streamed_bytes)
    assert slow <= worst + 1e-6
    assert slow >= max(sum(execute), schedule.streamed_bytes) - 1e-6
    if execute_slowdown == read_slowdown == 1:
        assert slow == pytest.approx(quick)


def test_reading_and_executing_at_once_take_as_long_as_each_slows_the_other_down() -> None:
    """Two blocks with places of their own beside two that share one: by hand."""
    schedule = place([[(0, PAGE)], [(1, PAGE)]], [0, 0], PAGE)  # sequential: nothing goes on at once
    assert sweep_time(schedule, [1.0, 1.0], Pace(1 / PAGE, 9.0, 9.0)) == pytest.approx(4)
    blocks = [[(index, PAGE)] for index in range(3)]
    double = place(blocks, [0, PAGE, 0], PAGE)
    assert sweep_time(double, [2.0] * 3, Pace(1 / PAGE)) == pytest.approx(7)  # 2 waits for 0, which waits for 2
    assert sweep_time(double, [2.0] * 3, Pace(1 / PAGE, 1.5, 1.0)) > 7


def test_a_read_that_waits_for_its_block_finds_the_drive_idle() -> None:
    """By hand, reads of one second, executions of two, and a quarter of a second for the first read of many."""
    pace = Pace(1 / PAGE, first_read=0.25)
    blocks = [[(index, PAGE)] for index in range(4)]

    def both(offsets: list[int], execute: list[float]) -> float:
        schedule = place(blocks, offsets, PAGE)
        rough = rough_sweep_time(schedule, execute, pace.byte_time, pace.first_read)
        assert sweep_time(schedule, execute, pace) == pytest.approx(rough)
        return rough

    assert both([0] * 4, [2.0] * 4) == pytest.approx(4 * (2 + 1 + 0.25))  # each waits for the one before it
    assert both([0, PAGE] * 2, [2.0] * 4) == pytest.approx(8)  # each waits, and is there all the same in time
    assert both([0, PAGE] * 2, [0.5] * 4) == pytest.approx(4)  # the drive is never idle
    assert both([0, PAGE] * 2, [1.1] * 4) == pytest.approx(2 * (1.25 + 1.1))  # every other read waits
    assert both([0, PAGE, 2 * PAGE, 3 * PAGE], [2.0] * 4) == pytest.approx(8)  # nothing is read again


def test_a_chain_without_weights_needs_no_arena() -> None:
    schedule = place([[], []], [0, 0], PAGE)
    assert (schedule.arena_bytes, schedule.reads, schedule.mode) == (0, ((), ()), "resident")
    assert sweep_time(schedule, [1.0, 2.0], Pace(1e-9)) == 3.0
