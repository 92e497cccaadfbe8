"""Every layout is right whatever the loader and the executor do when, and the words about it are true."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.memory_model import PAGE, Memory, timed, wanted
from trt_layering.schedule.residency import Schedule, floor, lay_out
from trt_layering.schedule.simulate import sweep_time

WEIGHTS = [(1, 1, 1, 1), (9, 9, 1, 0.1), (9, 1, 1, 1), (1, 9, 9, 9), (0.1, 0.1, 9, 9), (9, 0.1, 9, 0.1)]


@st.composite
def chains(draw: Any) -> list[list[tuple[int, int]]]:
    """Blocks of a few extents of a few pages, some extents in several blocks, some blocks without any."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=10))
    extents = [(index, length * PAGE) for index, length in enumerate(lengths)]
    count = draw(st.integers(1, 9))
    return [draw(st.lists(st.sampled_from(extents), max_size=3, unique=True)) for _ in range(count)]


def lengths_of(blocks: list[list[tuple[int, int]]]) -> list[int]:
    return [sum(length for _, length in block) for block in blocks]


@st.composite
def laid_out(draw: Any) -> tuple[list[list[tuple[int, int]]], int, Schedule]:
    """A chain, bytes of arena from the floor up, and the schedule for them."""
    blocks = draw(chains())
    total = sum(lengths_of(blocks))
    arena = draw(st.integers(floor(blocks), max(total, floor(blocks)) + 2 * PAGE))
    execute = draw(st.lists(st.floats(0, 1), min_size=len(blocks), max_size=len(blocks)))
    rate = draw(st.sampled_from([1e3, 1e5, 1e7]))
    return blocks, arena, lay_out(blocks, arena, draw(st.integers(1, 5)) * PAGE, execute, rate)


@settings(max_examples=300)
@given(laid_out(), st.integers(1, 4), st.sampled_from(WEIGHTS), st.integers(0, 2**32))
def test_every_block_sees_its_own_bytes_in_any_order_of_events(case: Any, threads: int, odds: Any, seed: int) -> None:
    """At any arena from the floor up: nothing is overwritten before its block has finished, what is read once stays,
    and there is always something that may happen."""
    blocks, _, schedule = case
    memory = Memory(blocks, schedule, sweeps=4, threads=threads)
    rng = random.Random(seed)
    while not memory.done:
        memory.step(rng, odds)
    assert not memory.waiting
    assert not memory.under_way


@given(laid_out())
def test_reads_bring_each_block_whole_in_whole_pages(case: Any) -> None:
    blocks, arena, schedule = case
    assert schedule.arena_bytes <= arena
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


def test_an_arena_that_is_no_whole_pages_changes_nothing() -> None:
    lengths = [(1 + index * 5 % 7) * PAGE for index in range(12)]
    blocks = [[(index, length)] for index, length in enumerate(lengths)]
    for arena in range(max(lengths), sum(lengths), PAGE):
        for odd in (1, 512, PAGE - 1):
            assert lay_out(blocks, arena + odd, PAGE, [1.0] * 12, 1e4) == lay_out(blocks, arena, PAGE, [1.0] * 12, 1e4)


@given(laid_out())
def test_waits_are_as_short_as_memory_allows(case: Any) -> None:
    """Page by page: a read waits for the last block that used one of its pages, and not for a later one."""
    blocks, _, schedule = case
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


@given(laid_out())
def test_the_words_and_sums_are_true(case: Any) -> None:
    blocks, arena, schedule = case
    total = sum(lengths_of(blocks))
    assert schedule.resident_bytes + schedule.streamed_bytes == total
    assert (schedule.mode == "resident") == (total <= arena)
    assert schedule.mode in ("sequential", "double", "ring", "resident")
    if schedule.mode == "sequential":
        assert 2 * schedule.read_ahead <= schedule.streamed_bytes


@pytest.mark.parametrize(
    ("slots", "mode", "streamed"),
    [(1, "sequential", 6), (2, "double", 6), (3, "ring", 6), (4, "ring", None), (6, "resident", 0)],
)
def test_equal_blocks_in_so_many_slots(slots: int, mode: str, streamed: int | None) -> None:
    blocks = [[(index, 4 * PAGE)] for index in range(6)]
    schedule = lay_out(blocks, slots * 4 * PAGE, 2 * PAGE, [1.0] * 6, 4 * PAGE)
    assert schedule.mode == mode
    if streamed is not None:
        assert schedule.streamed_bytes == streamed * 4 * PAGE


def test_two_slots_hide_the_reads_behind_execution() -> None:
    blocks = [[(index, 4 * PAGE)] for index in range(6)]

    def sweep(slots: int, read: float) -> float:
        """Time of a sweep, in which each block executes for a second and is read in `read` seconds."""
        execute, rate = [1.0] * 6, 4 * PAGE / read
        return sweep_time(lay_out(blocks, slots * 4 * PAGE, 4 * PAGE, execute, rate), execute, 1 / rate)

    assert sweep(1, read=1.0) == pytest.approx(12)
    assert sweep(2, read=0.5) == pytest.approx(6)
    assert sweep(2, read=2.0) == pytest.approx(12)
    assert sweep(6, read=9.0) == pytest.approx(6)


@given(chains(), st.data())
def test_more_arena_is_never_predicted_to_be_slower_than_the_floor(blocks: Any, data: st.DataObject) -> None:
    execute = [float(data.draw(st.integers(0, 20))) for _ in blocks]
    arena = data.draw(st.integers(floor(blocks), sum(lengths_of(blocks)) + PAGE))
    rate = float(PAGE)

    def sweep(size: int) -> float:
        return sweep_time(lay_out(blocks, size, PAGE, execute, rate), execute, 1 / rate)

    sequential = sum(execute) + sum(lengths_of(blocks)) / rate
    assert sweep(arena) <= 1.01 * sequential + 1e-9


@settings(max_examples=200)
@given(laid_out(), st.data())
def test_prediction_agrees_with_the_clock(case: Any, data: st.DataObject) -> None:
    blocks, _, schedule = case
    execute = [data.draw(st.integers(0, 30_000)) for _ in blocks]
    finished = timed(schedule, execute, byte_time=1, sweeps=3)
    last, before = finished[3 * len(blocks) - 1], finished[2 * len(blocks) - 1]
    assert sweep_time(schedule, execute, 1) == last - before


@given(chains())
def test_less_than_the_floor_is_refused(blocks: Any) -> None:
    assert floor(blocks) == max(lengths_of(blocks))
    if floor(blocks):
        with pytest.raises(ValueError, match="largest block"):
            lay_out(blocks, floor(blocks) - 1, PAGE, [0.0] * len(blocks), 1e9)


def test_a_chain_without_weights_needs_no_arena() -> None:
    schedule = lay_out([[], []], 0, PAGE, [1.0, 2.0], 1e9)
    assert (schedule.arena_bytes, schedule.reads, schedule.mode) == (0, ((), ()), "resident")
    assert sweep_time(schedule, [1.0, 2.0], 1e-9) == 3.0


def test_hundreds_of_blocks_are_laid_out_at_once() -> None:
    """Opening a chain must not feel it."""
    import time

    blocks = [[(index, (1 + index * 7 % 5) * PAGE)] for index in range(300)]
    begin = time.process_time()
    lay_out(blocks, 150 * PAGE, 64 * PAGE, [1e-3] * 300, 1e9)
    assert time.process_time() - begin < 2
