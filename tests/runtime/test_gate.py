"""Several loaders on one drive: whose reads go first, and that none waits for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.drives import PATIENCE, Faulty, Hanging, failure
from tests.runtime.test_loader import LINE, Store, in_thread, running, within
from trt_layering.errors import ClosedError, ReadError
from trt_layering.runtime.gate import Gate, Lane
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import PAGE

OPTIONS = LoaderOptions(direct_io="never", threads=2, read_size=2 * PAGE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"), pages=[3, 1, 4, 1, 5, 2, 6, 2])


def always() -> bool:
    return True


class Reads:
    """Threads that enter lanes, and the order in which they were let in."""

    def __init__(self) -> None:
        self.entered: list[Lane] = []
        self._changed = threading.Condition()

    def begin(self, lane: Lane, wanted: Callable[[], bool] = always) -> threading.Thread:
        def enter() -> None:
            lane.enter(wanted)
            with self._changed:
                self.entered.append(lane)
                self._changed.notify_all()

        return in_thread(enter)[0]

    def await_entered(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.entered) >= count, PATIENCE)


def waits(gate: Gate, count: int) -> None:
    """Until so many reads wait or are under way."""
    until(lambda: sum(gate._busy.values()) >= count)


def until(holds: Callable[[], bool]) -> None:
    """Give other threads the processor until it `holds`."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        os.sched_yield()


def test_reads_of_the_chain_that_executes_go_first_then_those_of_the_next() -> None:
    gate, reads = Gate(), Reads()
    first, following, other = gate.lane(), gate.lane(), gate.lane()
    gate.prefer([first, following])
    first.enter(always)
    threads = [reads.begin(other), reads.begin(following)]
    waits(gate, 3)
    first.enter(always)  # another of its own does not wait
    assert reads.entered == []
    first.leave()
    assert reads.entered == []
    first.leave()
    reads.await_entered(1)
    assert reads.entered == [following]
    following.leave()
    reads.await_entered(2)
    assert reads.entered == [following, other]
    other.leave()
    for thread in threads:
        thread.join(PATIENCE)


def test_when_another_chain_executes_its_reads_go_on() -> None:
    gate, reads = Gate(), Reads()
    one, two = gate.lane(), gate.lane()
    gate.prefer([one])
    one.enter(always)
    thread = reads.begin(two)
    waits(gate, 2)
    gate.prefer([two])
    reads.await_entered(1)
    thread.join(PATIENCE)


def test_a_read_that_nobody_needs_waits_no_longer() -> None:
    gate, reads, wanted = Gate(), Reads(), threading.Event()
    one, two = gate.lane(), gate.lane()
    gate.prefer([one])
    one.enter(always)
    thread = reads.begin(two, lambda: not wanted.is_set())
    waits(gate, 2)
    wanted.set()
    two.wake()
    reads.await_entered(1)
    thread.join(PATIENCE)


@settings(max_examples=30)
@given(
    slack=st.lists(st.integers(0, 26), min_size=2, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=6),
    fault=st.none() | st.integers(0, 40),
)
def test_chains_in_any_order_get_their_weights(
    store: Store, slack: list[int], order: list[int], fault: int | None
) -> None:
    """Sweeps of several chains on one drive, one after the other in any order, and reads that fail: right bytes or an
    error, never a hang."""
    gate = Gate()
    lanes = [gate.lane() for _ in slack]
    drives = [Faulty({} if fault is None else {fault: failure()}) for _ in slack]
    swept = [0] * len(slack)

    def sweep(machine: Any, index: int) -> None:
        others = [lane for lane in lanes if lane is not lanes[index]]
        gate.prefer([lanes[index], others[0]])
        first, swept[index] = swept[index], swept[index] + len(LINE)
        machine.sweep(first)

    def work() -> None:
        with running(store, arena=6 + slack[0], preadv=drives[0], options=OPTIONS, lane=lanes[0]) as one:  # noqa: SIM117
            with running(store, arena=6 + slack[1], preadv=drives[1], options=OPTIONS, lane=lanes[1]) as two:
                for index in order:
                    try:
                        sweep((one, two)[index % 2], index % 2)
                    except ReadError:
                        sweep((one, two)[index % 2], index % 2)

    within(PATIENCE, work)


def test_a_loader_that_may_not_read_can_be_stopped_and_its_waiting_is_no_reading(store: Store) -> None:
    gate = Gate()
    mine, other = gate.lane(), gate.lane()
    gate.prefer([mine])
    mine.enter(always)
    with running(store, options=OPTIONS, lane=other) as machine:
        waits(gate, 3)
        thread, results = in_thread(lambda: machine.loader.wait_loaded(0))
        assert machine.loader.bytes_read == 0
        assert machine.loader.read_seconds == machine.loader.read_seconds
    thread.join(PATIENCE)
    assert isinstance(results[0], ClosedError)


def test_a_sweep_that_is_given_up_does_not_wait_for_the_others(store: Store) -> None:
    gate = Gate()
    mine, other = gate.lane(), gate.lane()
    gate.prefer([mine])
    mine.enter(always)
    with running(store, options=OPTIONS, lane=other) as machine:
        waits(gate, 3)
        machine.loader.abandon(8)
        waits(gate, 3)
        mine.leave()
        within(PATIENCE, lambda: machine.sweep(8))


def test_whoever_waits_for_the_drive_says_so(store: Store) -> None:
    drive = Hanging()
    with running(store, preadv=drive, options=OPTIONS, arena=8) as machine:
        machine.sweep(0)
        drive.hang.set()
        assert not machine.loader.awaits_drive
        thread, _ = in_thread(lambda: machine.sweep(8))
        assert drive.caught.wait(PATIENCE)
        until(lambda: machine.loader.awaits_drive)
        drive.release.set()
        thread.join(PATIENCE)
        assert not machine.loader.awaits_drive


def test_a_lane_that_is_none(tmp_path: Path) -> None:
    from trt_layering.errors import UsageError
    from trt_layering.runtime.chain import open_chain

    with pytest.raises(UsageError, match="lane"):
        open_chain("a", repository=tmp_path, lane="fast")  # type: ignore[arg-type]
