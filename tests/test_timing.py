"""Times of blocks by a clock that the test turns, and ways through a chain that execute every joined block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains import assert_close, feed, in_this_process, layers, saved, uncut
from tests.store.samples import H, X
from trt_layering import timing
from trt_layering.building import build
from trt_layering.store.manifest import PAGE, Block, Part
from trt_layering.timing import Stopwatch, covers


class Clockwork:
    """An open chain of three blocks whose every step takes a known time: feeding 1, then per block a stall, an
    execution and 0.25 of handling, and 2 at the end."""

    def __init__(self, stalls: list[float], executions: list[float]) -> None:
        self.now = 100.0
        self._stalls, self._executions = stalls, executions
        self.stall_seconds = 0.0

    def perf_counter(self) -> float:
        return self.now

    def observe(self, feeds: Any, observer: Any) -> Any:
        self.now += 1
        for index, (stall, execution) in enumerate(zip(self._stalls, self._executions, strict=True)):
            self.now += stall + execution
            self.stall_seconds += stall
            observer(index, execution, {})
            self.now += 0.25
        self.now += 2 - 0.25
        return feeds


def test_a_block_takes_from_its_weights_to_the_next_block(monkeypatch):
    chain = Clockwork(stalls=[50.0, 0.0, 7.0], executions=[10.0, 20.0, 30.0])
    monkeypatch.setattr(timing, "time", chain)
    watch = Stopwatch(chain)

    def slow_observer(index, took, live):
        chain.now += 1000

    assert watch.run({"x": 1}) == {"x": 1}
    assert watch.run({}, slow_observer) == {}
    assert watch.seconds == [11.0, 20.25, 32.25]
    assert sum(watch.seconds) == pytest.approx(60 + 1 + 2 + 2 * 0.25), "a sweep that never waits"


def test_of_several_runs_the_first_does_not_count_and_the_median_does(monkeypatch):
    chain = Clockwork([0.0], [100.0])
    monkeypatch.setattr(timing, "time", chain)
    watch = Stopwatch(chain)
    watch.run({})
    assert watch.seconds == [103.0]
    for execution in (1.0, 9.0, 2.0):
        chain._executions = [execution]
        watch.run({})
    assert watch.seconds == [5.0]


# ------------------------------------------------------------------------------------------------------ joined blocks

BLOCK = Block(name="b", file="b.onnx", digest="0" * 32, extents=(), inputs=(X,), outputs=(H,))


def parts(*bounds: tuple[int, int]) -> list[Part]:
    return [Part(first=first, count=count, block=BLOCK) for first, count in bounds]


@given(
    bounds=st.lists(st.tuples(st.integers(0, 11), st.integers(2, 12)), max_size=12).map(
        lambda found: [(first, count) for first, count in found if first + count <= 12]
    )
)
def test_every_joined_block_comes_once_and_each_way_goes_through_the_whole_chain(bounds):
    joined = parts(*bounds)
    ways = covers(joined, 12)
    assert sorted(index - 12 for way in ways for index in way if index >= 12) == list(range(len(joined)))
    for way in ways:
        position = 0
        for index in way:
            first, count = (index, 1) if index < 12 else (joined[index - 12].first, joined[index - 12].count)
            assert first == position
            position += count
        assert position == 12
    assert len(ways) <= len(joined)


def test_levels_are_gone_through_one_after_the_other_the_coarsest_first():
    joined = parts((0, 2), (2, 2), (4, 2), (0, 4), (4, 3))
    assert covers(joined, 7) == [[10, 11], [7, 8, 9, 6]]
    assert covers([], 7) == []


# ------------------------------------------------------------------------------------------------------------ batches


@given(pages=st.lists(st.integers(0, 5), min_size=1, max_size=9), arena=st.integers(1, 12))
def test_while_blocks_execute_nothing_is_read(pages, arena):
    """Every half is loaded before its first block executes, and then reads are shut out."""
    opened = Paused()
    batches = timing.Batches(opened, [page * PAGE for page in pages], arena * PAGE)
    for _sweep in range(3):
        batches.load()
        for index in range(len(pages)):
            assert opened.paused
            assert opened.loaded >= index
            batches.after(index, 0.0, {})
        opened.loaded -= len(pages)


class Paused:
    """An open chain that notes which block was waited for last; one that is paused could wait for ever."""

    paused, loaded = False, -1

    def pause_reads(self):
        self.paused = True

    def resume_reads(self):
        self.paused = False

    def await_weights(self, block):
        assert not self.paused
        self.loaded = max(self.loaded, block)


def test_a_chain_is_timed_in_little_memory(tmp_path):
    with in_this_process():
        done = build(saved(layers(6), tmp_path / "layers.onnx"), repository=tmp_path, block_size="16KiB")
    chain = timing.through(done.manifest, range(6))
    found = timing.timed(done.path, chain, feed(1), 0.0)
    assert len(found.seconds) == 6
    assert all(0 < seconds < 5 for seconds in found.seconds)
    assert_close(uncut(tmp_path / "layers.onnx", feed(1)), found.outputs)
