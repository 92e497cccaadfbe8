"""The loader with real threads over a drive under the test's control: right bytes or an error of ours, never a hang."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.drives import PATIENCE, Faulty, Hanging, Shuffling, failure
from trt_layering.backends.arena import Arena
from trt_layering.errors import ClosedError, CorruptError, LayeringError, ReadError, UsageError
from trt_layering.runtime.loader import Loader, LoaderOptions
from trt_layering.runtime.trace import Trace
from trt_layering.schedule.partition import Partition, Piece
from trt_layering.schedule.residency import Read, Schedule
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import best_choice
from trt_layering.store.manifest import PAGE, UNMEASURED, WEIGHTS_FILE, Extent
from trt_layering.store.reader import WeightFile
from trt_layering.store.writer import StoreWriter

Blocks = list[list[int]]
"""For each block the extents it has."""


class Store:
    """A weight store of seeded extents; `pages[i]` long."""

    def __init__(self, repository: Path, pages: Sequence[int]) -> None:
        rng = np.random.default_rng(len(pages))
        with StoreWriter(repository, "weights") as writer:
            for index, length in enumerate(pages):
                data = rng.bytes(length * PAGE - 7)
                writer.add_extent([(f"w{index}", "uint8", (len(data),), lambda data=data: [data])])
            self.extents: tuple[Extent, ...] = writer.extents
            self.path = repository / WEIGHTS_FILE
            (writer.folder / WEIGHTS_FILE).rename(self.path)
        self.data = self.path.read_bytes()

    def content(self, block: Sequence[int]) -> bytes:
        """What the arena must hold from a block's offset on."""
        spans = ((self.extents[e].offset, self.extents[e].length) for e in block)
        return b"".join(self.data[offset : offset + length] for offset, length in spans)

    def schedule(self, blocks: Blocks, arena: int | None = None, read_size: int = 2 * PAGE) -> Schedule:
        """For an arena of so many pages, or of the floor."""
        sized = [tuple((e, self.extents[e].length) for e in block) for block in blocks]
        partition = Partition(tuple(Piece(index, 1, extents, 1e-3) for index, extents in enumerate(sized)))
        size = partition.floor if arena is None else arena * PAGE
        return best_choice(partition, size, Pace(1e-9)).schedule(partition.pieces, read_size)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"), pages=[3, 1, 4, 1, 5, 2, 6, 2])


LINE: Blocks = [[0], [1], [2], [3], [4], [5], [6], [7]]


class Machine:
    """A loader and what it works on. `execute(g)` is what the chain does: wait, use the bytes, say so."""

    def __init__(
        self,
        store: Store,
        blocks: Blocks,
        schedule: Schedule,
        preadv: Any,
        options: LoaderOptions,
        path: Path | None,
        **more: Any,
    ) -> None:
        self.store, self.blocks, self.schedule = store, blocks, schedule
        self.arena = Arena(schedule.arena_bytes)
        self.file = WeightFile(path or store.path, direct=options.direct_io, preadv=preadv)
        self.loader = Loader(schedule, store.extents, self.arena, self.file, options, **more)

    def execute(self, g: int, busy: Callable[[], None] = lambda: None) -> None:
        self.loader.wait_loaded(g)
        self.look(g)
        busy()
        self.look(g)
        self.loader.finish(g)

    def look(self, g: int) -> None:
        block = g % len(self.blocks)
        wanted = self.store.content(self.blocks[block])
        seen = bytes(self.arena.view(self.schedule.offsets[block], len(wanted)))
        assert seen == wanted, f"block {block} does not find its bytes"

    def sweep(self, first: int) -> None:
        """One sweep from block number `first` on, as `Chain.run` makes it."""
        try:
            for index in range(len(self.blocks)):
                self.execute(first + index)
        except BaseException:
            self.loader.abandon(first + len(self.blocks))
            raise

    def close(self) -> None:
        self.loader.stop()
        self.arena.close()
        self.file.close()


@contextmanager
def running(
    store: Store,
    blocks: Blocks = LINE,
    *,
    arena: int | None = None,
    preadv: Any = None,
    options: LoaderOptions | None = None,
    path: Path | None = None,
    **more: Any,
) -> Iterator[Machine]:
    options = options or LoaderOptions(read_size=2 * PAGE)
    schedule = store.schedule(blocks, arena, options.read_bytes)
    machine = Machine(store, blocks, schedule, preadv or os.preadv, options, path, **more)
    before = set(threading.enumerate())
    machine.loader.start()
    try:
        yield machine
    finally:
        machine.close()
        assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("trt-layering")]


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that is at work, and a list that gets what `work` returned or raised."""
    results: list[Any] = []

    def carry_out() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=carry_out)
    thread.start()
    return thread, results


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises; a failure if that takes longer."""
    thread, results = in_thread(work)
    thread.join(seconds)
    assert results, f"nothing happened within {seconds} s"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


# ------------------------------------------------------------------------------------------------------- right bytes


@contextmanager
def shuffled(drive: Shuffling) -> Iterator[None]:
    """Lets the reads of `drive` end, one by one, in an order by chance."""
    done = threading.Event()

    def release() -> None:
        while not done.is_set():
            drive.release_one(done)

    releasing, results = in_thread(release)
    try:
        yield
    finally:
        done.set()
        drive.open()
        releasing.join(PATIENCE)
        assert results == [None]


@settings(max_examples=150)
@given(
    blocks=st.lists(st.lists(st.integers(0, 7), max_size=3, unique=True), min_size=1, max_size=7),
    slack=st.integers(0, 30),
    threads=st.integers(1, 4),
    read_pages=st.integers(1, 4),
    verify=st.sampled_from(["first", "always", "never"]),
    seed=st.integers(0, 2**32),
)
def test_a_loaded_block_is_there_whatever_the_order_of_reads(
    store: Store, blocks: Blocks, slack: int, threads: int, read_pages: int, verify: Any, seed: int
) -> None:
    """Reads end in any order, at any moment of execution, and until they end their place holds rubbish."""
    pages = max(len(store.content(block)) for block in blocks) // PAGE
    drive = Shuffling(seed)
    options = LoaderOptions(direct_io="never", threads=threads, read_size=read_pages * PAGE, verify=verify)
    rng = random.Random(seed)

    def execute_all(machine: Machine) -> None:
        for g in range(4 * len(blocks)):
            machine.execute(g, busy=lambda: drive.let_one_begin() if rng.random() < 0.5 else None)

    with running(store, blocks, arena=pages + slack, preadv=drive, options=options) as machine, shuffled(drive):
        within(PATIENCE, lambda: execute_all(machine))


def test_reads_come_in_the_order_of_the_schedule_and_no_more_than_threads_at_once(store: Store) -> None:
    seen: list[tuple[int, int]] = []
    drive = Faulty()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((offset, len(buffers[0])))
        return drive(descriptor, buffers, offset)

    options = LoaderOptions(direct_io="never", threads=1, read_size=2 * PAGE)
    with running(store, preadv=preadv, options=options) as machine:
        for first in (0, 8):
            machine.sweep(first)
        reads = [read for block in machine.schedule.reads for read in block]
        wanted = [(store.extents[read.extent].offset + read.offset, read.length) for read in reads]
        assert seen[: 2 * len(wanted)] == 2 * wanted
        assert machine.loader.bytes_read >= 2 * sum(length for _, length in wanted)
        assert machine.loader.read_seconds > 0


def test_what_stays_is_read_once(store: Store) -> None:
    drive = Faulty()
    with running(store, arena=24, preadv=drive) as machine:
        for sweep in range(5):
            machine.sweep(8 * sweep)
        assert machine.loader.bytes_read == len(store.data)
        assert machine.schedule.mode == "resident"


def test_the_next_sweep_is_read_ahead_while_nothing_executes(store: Store) -> None:
    """As far as the arena goes: between inferences it holds the first blocks."""
    wanted = 2 * len(store.data)
    arrived = threading.Event()
    with running(store, arena=8) as machine:
        machine.sweep(0)
        ahead = len(store.content([0])) + len(store.content([1]))

        def watch() -> None:
            machine.loader.wait_loaded(9)
            arrived.set()

        within(PATIENCE, watch)
        assert arrived.is_set()
        assert len(store.data) + ahead <= machine.loader.bytes_read < wanted


def test_a_chain_without_weights_has_no_threads_to_wait_for(store: Store) -> None:
    before = set(threading.enumerate())
    with running(store, [[], []]) as machine:
        assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("trt-layering")]
        machine.sweep(0)
        machine.sweep(2)


class Staging(Arena):
    """Host memory that reads reach by way of memory of their own; `checking` is called before bytes are checked."""

    staged = True

    def __init__(self, size: int, checking: Callable[[int], None]) -> None:
        super().__init__(size)
        self._checking = checking

    def landing(self, thread: int, target: int, length: int) -> Any:
        return Landed(self, target, Arena(length))

    def pieces(self, target: int, length: int) -> Iterator[memoryview]:
        self._checking(target)
        yield self.view(target, length)


class Landed:
    def __init__(self, arena: Staging, target: int, own: Arena) -> None:
        self._arena, self._target, self._own = arena, target, own
        self.memory = own.view(0, own.size)

    def put(self) -> None:
        self._arena.view(self._target, self._own.size)[:] = self.memory


@pytest.mark.parametrize("held", [True, False], ids=["read before", "read after"])
def test_what_was_given_up_is_not_put_though_a_resident_block_finishes(tmp_path: Path, held: bool) -> None:
    """Block 0 stays; 1 and 2 share a place. While 1 is checked its sweep is given up, and block 0 of the next finishes
    before that check has ended: block 2, which was read or is being read, must not go over what is checked."""
    store = Store(tmp_path, pages=[1, 1, 1])
    once, first, second = (
        Read(0, 0, 0, PAGE, 2, True), Read(1, 0, PAGE, PAGE, 1, False), Read(2, 0, PAGE, PAGE, 0, False)
    )  # fmt: skip
    schedule = Schedule(2 * PAGE, (0, PAGE, PAGE), ((once,), (first,), (second,)))
    in_check, go_on, reading, read_on = (threading.Event() for _ in range(4))
    checks = itertools.count()

    def checking(target: int) -> None:
        if target == PAGE and next(checks) == 0:
            in_check.set()
            assert go_on.wait(PATIENCE)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == store.extents[2].offset and not reading.is_set():
            reading.set()
            assert held or read_on.wait(PATIENCE)
        return os.preadv(descriptor, buffers, offset)

    arena = Staging(schedule.arena_bytes, checking)
    file = WeightFile(store.path, direct="never", preadv=preadv)
    options = LoaderOptions(threads=2, verify="always", direct_io="never")
    loader = Loader(schedule, store.extents, arena, file, options)
    loader.start()
    try:
        loader.wait_loaded(0)
        assert in_check.wait(PATIENCE)
        assert reading.wait(PATIENCE)
        if held:
            within(PATIENCE, lambda: _until_held(loader))
        with loader._lock:  # a held read wakes only after both, as on a busy machine
            loader.abandon(3)
            loader.wait_loaded(3)
            loader.finish(3)
        read_on.set()
        within(PATIENCE, lambda: _until_under_way(loader, 1))
        go_on.set()
        for g in (4, 5):
            within(PATIENCE, lambda g=g: loader.wait_loaded(g))
            assert bytes(arena.view(PAGE, PAGE)) == store.content([g % 3])
            loader.finish(g)
    finally:
        for event in (go_on, read_on):
            event.set()
        loader.stop()
        arena.close()
        file.close()


def _until_held(loader: Loader) -> None:
    with loader._lock:
        loader._arrived.wait_for(lambda: loader._held == 1)


def _until_under_way(loader: Loader, count: int) -> None:
    while loader._under_way != count:
        os.sched_yield()


# --------------------------------------------------------------------------------------------------------- bad drives


@settings(max_examples=40)
@given(
    slack=st.integers(0, 26),
    threads=st.integers(1, 3),
    faults=st.dictionaries(
        st.integers(0, 30), st.sampled_from([failure(errno.EINTR), 1, PAGE // 2, PAGE]), min_size=1, max_size=20
    ),
)
def test_short_and_interrupted_reads_change_nothing(
    store: Store, slack: int, threads: int, faults: dict[int, OSError | int]
) -> None:
    options = LoaderOptions(direct_io="never", threads=threads, read_size=2 * PAGE, verify="always")
    with running(store, arena=6 + slack, preadv=Faulty(faults), options=options) as machine:
        for sweep in range(3):
            within(PATIENCE, lambda first=8 * sweep: machine.sweep(first))


@settings(max_examples=150)
@given(
    slack=st.integers(0, 26),
    threads=st.integers(1, 4),
    broken=st.sets(st.integers(0, 40), min_size=1, max_size=4),
    verify=st.sampled_from(["first", "always"]),
    seed=st.integers(0, 2**32),
)
def test_a_failed_read_ends_its_sweep_and_the_next_one_is_right(
    store: Store, slack: int, threads: int, broken: set[int], verify: Any, seed: int
) -> None:
    """EIO on any reads: each ends at most one sweep, all others run, and every block that executes has its bytes."""
    options = LoaderOptions(direct_io="never", threads=threads, read_size=2 * PAGE, verify=verify)
    drive = Shuffling(seed, lambda number: failure() if number in broken else None)
    sweeps = len(broken) + 3
    failed: list[ReadError] = []
    with running(store, arena=6 + slack, preadv=drive, options=options) as machine, shuffled(drive):
        for first in range(0, 8 * sweeps, 8):
            try:
                within(PATIENCE, lambda first=first: machine.sweep(first))
            except ReadError as error:
                failed.append(error)
        met = sum(number < drive.calls for number in broken)
        assert len(failed) <= met
        if met == len(broken):  # the last may have met the reads ahead of the sweep that follows
            with suppress(ReadError):
                machine.sweep(8 * sweeps)
            machine.sweep(8 * sweeps + 8)
    for told in failed:
        assert "Input/output error" in told.what
        assert str(store.path) in told.where
        assert told.remedy


@pytest.mark.parametrize("number", range(0, 14))
def test_the_error_comes_from_waiting_at_once(store: Store, number: int) -> None:
    with running(store, preadv=Faulty({number: failure()})) as machine:
        with pytest.raises(ReadError, match="Input/output error"):
            within(PATIENCE, lambda: machine.sweep(0))
        within(PATIENCE, lambda: machine.sweep(8))


def test_blocks_that_had_arrived_before_an_error_still_execute(store: Store) -> None:
    options = LoaderOptions(direct_io="never", threads=1, read_size=2 * PAGE)
    with running(store, arena=12, preadv=Faulty({4: failure()}), options=options) as machine:
        for g in (0, 1):
            machine.execute(g)
        with pytest.raises(ReadError):
            machine.execute(2)


def test_an_error_does_not_wait_for_another_read_that_hangs(store: Store) -> None:
    """A drive that dies fails some reads and never answers others; the sweep ends all the same, and when the drive
    comes back the next sweep is right."""
    hanging = Hanging()
    hanging.hang.set()
    first = threading.Lock()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if first.acquire(blocking=False):
            return hanging(descriptor, buffers, offset)
        if not hanging.release.is_set():
            assert hanging.caught.wait(PATIENCE)
            raise failure()
        return hanging(descriptor, buffers, offset)

    options = LoaderOptions(direct_io="never", threads=2, read_size=2 * PAGE)
    with running(store, preadv=preadv, options=options) as machine:
        try:
            with pytest.raises(ReadError):
                within(PATIENCE, lambda: machine.sweep(0))
            after, results = in_thread(lambda: machine.sweep(8))
        finally:
            hanging.release.set()
        after.join(PATIENCE)
        assert results == [None]


def test_what_was_read_ahead_past_a_failure_is_read_again_before_it_executes(tmp_path: Path) -> None:
    """The last block of a sweep and the first of the next fail while the second of the next arrives: as later reads go
    on from the first, the second will be read over while it would execute, if it counted as loaded."""
    store = Store(tmp_path, pages=[1] * 8)
    places, lags, once = (0, 1, 2, 3, 4, 0, 1, 5), (2, 2, 7, 7, 7, 4, 4, 7), (2, 3, 4, 7)
    reads = [(Read(b, 0, places[b] * PAGE, PAGE, lags[b], once=b in once),) for b in range(8)]
    drive = _Failing(block_of={extent.offset: index for index, extent in enumerate(store.extents)})
    options = LoaderOptions(direct_io="never", threads=3, read_size=PAGE)
    schedule = Schedule(6 * PAGE, tuple(place * PAGE for place in places), tuple(reads))
    machine = Machine(store, LINE, schedule, drive, options, None)
    machine.loader.start()
    try:
        with pytest.raises(ReadError):
            within(PATIENCE, lambda: machine.sweep(0))
        machine.execute(8)
        second, results = in_thread(lambda: machine.execute(9))
        assert drive.again.wait(PATIENCE)
        second.join(0.05)
        assert results == [], "it executed while it was being read"
        drive.release.set()
        second.join(PATIENCE)
        assert results == [None]
    finally:
        drive.release.set()
        machine.close()


class _Failing:
    """Fails the first read of block 7 and the second of block 0, once block 1 has been read for the second time; while
    it is read for the third time, its place holds rubbish until `release`."""

    def __init__(self, block_of: dict[int, int]) -> None:
        self._block_of = block_of
        self._counts = dict.fromkeys(block_of.values(), 0)
        self._lock = threading.Lock()
        self._arrived, self.again, self.release = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        block = self._block_of[offset]
        with self._lock:
            self._counts[block] += 1
            call = (block, self._counts[block])
        if call in ((7, 1), (0, 2)):
            assert self._arrived.wait(PATIENCE)
            raise failure()
        if call == (1, 3):
            buffers[0][:] = b"\xee" * len(buffers[0])
            self.again.set()
            assert self.release.wait(PATIENCE)
        done = os.preadv(descriptor, buffers, offset)
        if call == (1, 2):
            self._arrived.set()
        return done


def test_a_read_that_fails_late_does_not_spoil_the_next_sweep(store: Store) -> None:
    """It belonged to the sweep that was given up."""
    hanging = Hanging(then=failure())
    hanging.hang.set()
    options = LoaderOptions(direct_io="never", threads=1, read_size=2 * PAGE)
    with running(store, preadv=hanging, options=options) as machine:
        assert hanging.caught.wait(PATIENCE)
        machine.loader.abandon(8)
        after, results = in_thread(lambda: machine.sweep(8))
        hanging.release.set()
        after.join(PATIENCE)
        assert results == [None]


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("arena", [6, 12, 24])
def test_a_flipped_bit_is_found_and_stays_an_error(store: Store, tmp_path: Path, verify: Any, arena: int) -> None:
    damaged = bytearray(store.data)
    damaged[store.extents[4].offset + 77] ^= 4
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(damaged)
    options = LoaderOptions(read_size=2 * PAGE, verify=verify)
    with running(store, arena=arena, options=options, path=path) as machine:
        for first in range(0, 160, 8):
            with pytest.raises(CorruptError, match="extent 4") as caught:
                within(PATIENCE, lambda first=first: machine.sweep(first))
            assert "w4" in caught.value.where
            depth = len(list(_frames(caught.value)))
            assert depth < 30, "the error keeps the frames of all runs that it ended"


def _frames(error: BaseException) -> Iterator[Any]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def test_checksums_are_compared_as_often_as_asked(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_layering.runtime import loader

    checked: list[int] = []
    monkeypatch.setattr(loader, "verify_extent", lambda extent, index, pieces, *, path: checked.append(index))
    for verify, least, most in (("never", 0, 0), ("first", 8, 8), ("always", 24, 32)):
        checked.clear()
        options = LoaderOptions(read_size=2 * PAGE, verify=verify)  # type: ignore[arg-type]
        with running(store, options=options) as machine:
            for sweep in range(3):
                machine.sweep(8 * sweep)
        assert least <= len(checked) <= most


def test_a_file_that_ends_early_is_corrupt(store: Store, tmp_path: Path) -> None:
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(store.data[: store.extents[6].offset + PAGE])
    with running(store, path=path) as machine, pytest.raises(CorruptError, match="ends at byte"):
        within(PATIENCE, lambda: machine.sweep(0))


def test_what_nobody_thought_of_is_an_error_of_ours(store: Store) -> None:
    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise ZeroDivisionError("oops")

    with running(store, preadv=preadv) as machine, pytest.raises(LayeringError, match="oops"):
        within(PATIENCE, lambda: machine.sweep(0))


# ------------------------------------------------------------------------------------------------------------ the end


def test_stop_from_another_thread_ends_the_wait(store: Store) -> None:
    hanging = Hanging()
    hanging.hang.set()
    with running(store, preadv=hanging) as machine:
        waiting, results = in_thread(lambda: machine.sweep(0))
        assert hanging.caught.wait(PATIENCE)
        stopping, _ = in_thread(machine.loader.stop)
        waiting.join(1)
        assert not waiting.is_alive(), "the sweep waits for a drive that hangs, though it was closed"
        assert isinstance(results[0], ClosedError)
        assert stopping.is_alive(), "a read may still write to the arena"
        hanging.release.set()
        stopping.join(PATIENCE)
        assert not stopping.is_alive()


def test_stop_is_idempotent_and_needs_no_start(store: Store) -> None:
    with running(store) as machine:
        machine.loader.stop()
        machine.loader.stop()
        with pytest.raises(ClosedError):
            machine.execute(7)
    never = Machine(store, LINE, store.schedule(LINE), Faulty(), LoaderOptions(), None)
    never.close()
    never.close()


def test_stop_between_sweeps_leaves_no_thread(store: Store) -> None:
    names = lambda: {thread.name for thread in threading.enumerate()}  # noqa: E731
    for threads in (1, 4):
        with running(store, options=LoaderOptions(threads=threads, read_size=PAGE)) as machine:
            machine.sweep(0)
            assert sum(name.startswith("trt-layering-loader") for name in names()) == threads
        assert not any(name.startswith("trt-layering-loader") for name in names())


def test_giving_up_after_many_sweeps_without_reads_is_quick(store: Store) -> None:
    """When everything has arrived there is nothing to count on for."""
    import time

    with running(store, arena=24) as machine:
        for sweep in range(2000):
            machine.sweep(8 * sweep)
        begin = time.process_time()
        machine.loader.abandon(16000)
        assert time.process_time() - begin < 0.05


# ----------------------------------------------------------------------------------------------------- what it tells


class Timed:
    """A clock, and a drive that takes `rate` bytes per second by it; reads wait for each other."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.now = 100.0
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        done = os.preadv(descriptor, buffers, offset)
        with self._lock:
            self.now += done / self.rate
        return done


ONE_READER = LoaderOptions(direct_io="never", threads=1, read_size=2 * PAGE)
PROFILED = msgspec.structs.replace(UNMEASURED, execute_seconds=(0.1,) * 8, read_rate=4e6)


def test_the_seconds_of_reading_are_right_while_a_read_is_under_way(store: Store) -> None:
    hanging, now = Hanging(), [50.0]
    hanging.hang.set()
    with running(store, preadv=hanging, options=ONE_READER, clock=lambda: now[0]) as machine:
        assert hanging.caught.wait(PATIENCE)
        for seconds in (0.0, 2.0, 7.5):
            now[0] = 50.0 + seconds
            assert machine.loader.read_seconds == seconds
        hanging.release.set()
        machine.sweep(0)
        now[0] = 1000.0
        assert machine.loader.read_seconds == 7.5, "no read is under way any more"


def test_a_drive_that_reads_all_the_time_has_its_true_rate(store: Store) -> None:
    """Reads that never go idle count, too: the schedule lets the next begin as each ends."""
    drive = Timed(rate=3e6)
    with running(store, arena=12, preadv=drive, options=ONE_READER, clock=drive.clock) as machine:
        for first in range(0, 80, 8):
            machine.sweep(first)
        machine.loader.stop()
        assert machine.loader.bytes_read / machine.loader.read_seconds == pytest.approx(3e6)


@pytest.mark.parametrize(("rate", "slow"), [(4.1e6, False), (2.1e6, False), (1.9e6, True), (0.4e6, True)])
def test_a_drive_that_slows_down_is_told_and_changes_no_byte(store: Store, rate: float, slow: bool) -> None:
    """At first it is as fast as the profile says; then it is not."""
    drive, trace = Timed(rate=4e6), Trace()
    trace.open("line", [f"block-{n}" for n in range(8)], 6 * PAGE)
    with running(store, preadv=drive, options=ONE_READER, clock=drive.clock, profile=PROFILED, trace=trace) as machine:
        for first in range(0, 240, 8):
            machine.sweep(first)
        assert (machine.loader.slow_reads, machine.loader.fallbacks) == (0, [])
        drive.rate = rate
        for first in range(240, 800, 8):
            machine.sweep(first)
        machine.loader.stop()
        found, told = machine.loader.slow_reads, machine.loader.fallbacks
    assert bool(found) == slow
    assert len(trace.slowdowns) == found
    if slow:
        [words] = told
        assert "that the profile measured" in words
        assert "of the 4 MB/s" in words
        assert found >= 70 * len(store.data) / rate / 0.6 - 1, "each half second of reading is looked at"
        assert all(0.999 * rate < stretch.rate < 2e6 for stretch in trace.slowdowns)
    else:
        assert told == []


def test_a_drive_nobody_measured_is_never_slow(store: Store) -> None:
    drive = Timed(rate=1e3)
    with running(store, preadv=drive, options=ONE_READER, clock=drive.clock) as machine:
        machine.sweep(0)
        assert (machine.loader.slow_reads, machine.loader.fallbacks) == (0, [])


def test_extents_that_were_slow_when_profiled_are_not_slow_now(store: Store) -> None:
    """Small reads never reach the drive's rate; and blocks that execute slow reads down."""
    drive = Timed(rate=1e6)
    own = tuple(extent.length / 1.1e6 for extent in store.extents)
    for profile in (
        msgspec.structs.replace(PROFILED, read_seconds=own),
        msgspec.structs.replace(PROFILED, read_slowdown=3.0),
    ):
        with running(store, preadv=drive, options=ONE_READER, clock=drive.clock, profile=profile) as machine:
            for first in range(0, 160, 8):
                machine.sweep(first)
            assert machine.loader.read_seconds > 1
            assert machine.loader.slow_reads == 0


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"direct_io": "maybe"}, "direct_io"),
        ({"verify": "sometimes"}, "verify"),
        ({"threads": 0}, "threads"),
        ({"threads": 65}, "threads"),
        ({"threads": 2.0}, "threads"),
        ({"threads": "2"}, "threads"),
        ({"read_size": 4097}, "4096"),
        ({"read_size": "100KB"}, "4096"),
        ({"read_size": 0}, "above zero"),
        ({"read_size": "much"}, "read_size"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        LoaderOptions(**options)
    assert caught.value.remedy


def test_auto_is_what_the_profile_found() -> None:
    profile = msgspec.structs.replace(UNMEASURED, threads=7, read_size=8192)
    found = LoaderOptions(verify="never").resolved(profile)
    assert found == LoaderOptions(verify="never", threads=7, read_size=8192)
    assert (found.parallel_reads, found.read_bytes) == (7, 8192)
    assert LoaderOptions(threads=1).resolved(profile) == LoaderOptions(threads=1, read_size=8192)
    assert LoaderOptions(read_size="64KiB").resolved(profile).read_bytes == 65536
    assert (LoaderOptions().parallel_reads, LoaderOptions().read_bytes) == (2, 4 << 20)


def test_options_as_people_write_them() -> None:
    assert LoaderOptions(read_size="64KiB").read_bytes == 65536
    assert LoaderOptions(read_size=8192, threads=64).read_bytes == 8192


# ------------------------------------------------------------------------------------------------- pausing and settling


def test_while_it_is_paused_nothing_is_read(store: Store) -> None:
    """Nor is anything under way when `pause` returns, though it may begin; afterwards all goes on."""
    calls = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return os.preadv(descriptor, buffers, offset)

    with running(store, preadv=preadv) as machine:
        within(PATIENCE, lambda: machine.execute(0))
        within(PATIENCE, machine.loader.pause)
        loaded = machine.loader.bytes_read
        before = len(calls)
        machine.loader.finish(1)  # block 2 could be read now
        waiting, results = in_thread(lambda: machine.loader.wait_loaded(3))
        machine.loader.pause()
        assert (len(calls), machine.loader.bytes_read) == (before, loaded)
        assert waiting.is_alive()
        machine.loader.finish(2)
        machine.loader.resume()
        waiting.join(PATIENCE)
        assert isinstance(results[0], float)


def test_pausing_waits_for_the_read_under_way_and_ends_when_the_loader_does(store: Store) -> None:
    hanging = Hanging()
    hanging.hang.set()
    with running(store, preadv=hanging) as machine:
        assert hanging.caught.wait(PATIENCE)
        pausing, results = in_thread(machine.loader.pause)
        settling, settled = in_thread(machine.loader.settle)
        assert not results
        assert not settled
        machine.loader.interrupt()
        pausing.join(PATIENCE)
        settling.join(PATIENCE)
        assert results == settled == [None]
        hanging.release.set()


def test_it_has_settled_when_it_has_read_ahead_as_far_as_it_can(store: Store) -> None:
    """Through a slow drive, too: as long as a read is under way it has not."""
    shuffling = Shuffling(seed=3)
    with running(store, arena=12, preadv=shuffling) as machine:
        settling, settled = in_thread(machine.loader.settle)
        stop = threading.Event()
        shuffling.release_one(stop)
        assert not settled
        shuffling.open()
        settling.join(PATIENCE)
        assert settled == [None]
        numbered = [(g, read) for g, block in enumerate(machine.schedule.reads) for read in block]
        ahead = sum(read.length for g, read in itertools.takewhile(lambda one: one[0] <= one[1].lag, numbered))
        assert machine.loader.bytes_read == ahead > 0


def test_it_has_settled_when_the_drive_fails(store: Store) -> None:
    with running(store, preadv=Faulty({0: failure()})) as machine:
        within(PATIENCE, machine.loader.settle)
        with pytest.raises(ReadError):
            machine.loader.wait_loaded(0)
