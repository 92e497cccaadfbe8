"""The loader: threads that read weights from the drive into the arena ahead of execution.

May import the store and the schedule. Whatever goes wrong in its threads reaches the executor as one of our errors,
from `Loader.wait_loaded`.

Loader and executor share a few fields under one lock. The executor publishes how many blocks it has `finished`, which
wakes the loader; the loader publishes which block numbers have been `loaded`, which wakes the executor. Block numbers g
count on over sweeps, see `schedule.residency`.

A read may begin when its place in the arena is free. Where the arena is staged, it may begin at once, and what was read
is put to its place when that is free: staging memory is so much more read-ahead.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from trt_layering.backends.base import Arena
from trt_layering.errors import ClosedError, LayeringError, ReadError, UsageError
from trt_layering.runtime.gate import Lane
from trt_layering.runtime.pace import ReadMeter, usual_seconds
from trt_layering.runtime.trace import ReadEvent, Trace
from trt_layering.schedule.residency import Read, Schedule
from trt_layering.store.manifest import PAGE, UNMEASURED, Extent, Profile
from trt_layering.store.reader import WeightFile, verify_extent
from trt_layering.units import parse_size

Verify = Literal["first", "always", "never"]
DirectIO = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class LoaderOptions:
    """How weights are read. `direct_io`: past the page cache if the file system can ("auto"), or it is an error if not
    ("always"), or never. `threads` reads are under way at once, each of at most `read_size` bytes; "auto" is what the
    chain's profile found best for its drive, 2 of 4 MiB where it has none. `verify`: compare an extent's checksum when
    it is first loaded, each time ("always"), or never.

    Raises UsageError for a value that makes no sense.
    """

    direct_io: DirectIO = "auto"
    threads: int | Literal["auto"] = "auto"
    read_size: int | str = "auto"
    verify: Verify = "first"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("direct_io", self.direct_io, get_args(DirectIO)),
            ("verify", self.verify, get_args(Verify)),
        ):
            if value not in known:
                raise UsageError(
                    f"{name} cannot be {value!r}", where="loader options", remedy=f"use {', '.join(known)}"
                )
        if self.threads != "auto" and (type(self.threads) is not int or not 1 <= self.threads <= 64):
            raise UsageError(
                f"threads must be 1 to 64 or auto, not {self.threads!r}", where="loader options", remedy="try auto"
            )
        if self.read_bytes % PAGE:
            raise UsageError(
                f"read_size must be a multiple of {PAGE} bytes, not {self.read_size!r}",
                where="loader options", remedy="try 4MiB",
            )  # fmt: skip

    def resolved(self, profile: Profile) -> LoaderOptions:
        """These options with what `profile` found in the place of "auto"."""
        threads = profile.threads if self.threads == "auto" else self.threads
        return replace(
            self, threads=threads, read_size=profile.read_size if self.read_size == "auto" else self.read_size
        )

    def within(self, staging: int) -> LoaderOptions:
        """These options with reads small enough that `staging` bytes hold two for each thread, and one more."""
        most = max(PAGE, staging // (2 * self.parallel_reads + 1) // PAGE * PAGE)
        return replace(self, read_size=min(self.read_bytes, most))

    @property
    def parallel_reads(self) -> int:
        """`threads` as a number; that of a chain without a profile for "auto"."""
        return UNMEASURED.threads if self.threads == "auto" else self.threads

    @property
    def read_bytes(self) -> int:
        """`read_size` in bytes; that of a chain without a profile for "auto"."""
        return UNMEASURED.read_size if self.read_size == "auto" else parse_size(self.read_size, what="read_size")


class _Task(NamedTuple):
    g: int
    read: Read


class Loader:
    """Brings blocks into `arena` as `schedule` says, in its order, several reads under way at once.

    `extents` are all those of the chain, by index, and `profile` says how long they usually take. The loader owns its
    threads from `start` to `stop`; it borrows `arena` and `file`, which must stay open until `stop` has returned, and
    `trace`, to which it adds its reads. With a `lane`, reads take their turn among those of other loaders. `clock` is
    replaced by tests.
    """

    def __init__(
        self,
        schedule: Schedule,
        extents: Sequence[Extent],
        arena: Arena,
        file: WeightFile,
        options: LoaderOptions,
        *,
        profile: Profile = UNMEASURED,
        trace: Trace | None = None,
        lane: Lane | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._schedule, self._extents, self._arena, self._file = schedule, extents, arena, file
        self._verify = options.verify
        self._count = len(schedule.reads)
        self._trace, self._lane, self._clock = trace, lane, clock
        self._usual = usual_seconds(extents, profile)
        self._lock = threading.RLock()  # a signal handler may come while its thread holds it
        self._arrived = threading.Condition(self._lock)
        self._may_read = threading.Condition(self._lock)
        self._may_put = threading.Condition(self._lock)
        self._finished = 0
        self._loaded = [-1] * self._count
        self._settled = {block for block, reads in enumerate(schedule.reads) if not reads}
        self._kept: set[int] = set()  # blocks whose `once` reads have arrived
        self._asked: set[int] = set()  # those, and blocks whose `once` reads are queued or under way
        self._queue: deque[_Task] = deque()
        self._cursor = 0
        self._unread: dict[int, int] = {}  # by block number, how many of its reads have not ended
        self._missing: dict[int, int] = {}  # and how many pieces are not at their place
        self._under_way = 0
        self._waiters = 0
        self._held = 0  # of these, reads that have ended and wait for their place
        self._resume_at: int | None = None
        self._stopping = self._paused = False
        self._error: LayeringError | None = None
        self._checked: set[int] = set()
        self._meter = ReadMeter()
        self.bytes_read = 0
        self._threads = [
            threading.Thread(target=self._work, args=[n], name=f"trt-layering-loader-{n}", daemon=True)
            for n in range(options.parallel_reads)
        ]

    def start(self) -> None:
        """Begin to read the first blocks."""
        for thread in self._threads if any(self._schedule.reads) else ():
            thread.start()

    @property
    def read_seconds(self) -> float:
        """Seconds in which at least one read was under way."""
        return self._meter.seconds(self._clock())

    @property
    def slow_reads(self) -> int:
        """How many stretches of reading, of 64 MiB or half a second, went at less than half the profile's rate."""
        return self._meter.slow

    @property
    def fallbacks(self) -> list[str]:
        """In words, the first time that the drive was slow, if it was."""
        return [str(self._meter.first_slow)] if self._meter.first_slow else []

    def interrupt(self) -> None:
        """Give whoever waits for a block ClosedError, and let each thread end after its read. Does not wait."""
        with self._lock:
            self._stopping = True
            self._arrived.notify_all()
            self._may_read.notify_all()
            self._may_put.notify_all()
            self._wake_lane()

    def stop(self) -> None:
        """End all threads and wait for them; whoever waits for a block gets ClosedError."""
        self.interrupt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def owns_this_thread(self) -> bool:
        """Whether the caller is one of the loader's threads, which cannot wait for itself."""
        return threading.current_thread() in self._threads

    def wait_loaded(self, g: int) -> float:
        """Wait until block number `g` may execute; returns the seconds waited.

        Raises the error that a loader thread met before it had loaded the block, or ClosedError after `stop`.
        """
        with self._lock:
            if self._is_loaded(g) and not self._stopping:
                return 0.0
            begin = self._clock()
            self._waiters += 1
            try:
                self._arrived.wait_for(lambda: self._is_loaded(g) or self._has_failed() or self._stopping)
            finally:
                self._waiters -= 1
            if self._stopping:
                raise ClosedError("the chain was closed while it ran", remedy="open it again")
            if self._error is not None and not self._is_loaded(g):
                raise self._error.with_traceback(None)  # else it would hold the frames of all runs it ever ended
            return self._clock() - begin

    @property
    def awaits_drive(self) -> bool:
        """Whether somebody waits for a block while the drive has a read to end. Takes no lock."""
        return self._waiters > 0 and self._under_way > self._held

    def has_loaded(self, g: int) -> bool:
        """Whether block number `g` may execute now."""
        with self._lock:
            return self._is_loaded(g)

    def finish(self, g: int) -> None:
        """Say that block number `g` has executed: from now on its bytes may be overwritten."""
        with self._lock:
            self._finished = g + 1
            self._may_read.notify()
            if self._held:
                self._may_put.notify_all()

    def pause(self) -> None:
        """Let no read begin until `resume`, and wait until none is under way (or the loader stops). For measuring."""
        with self._lock:
            self._paused = True
            self._arrived.wait_for(lambda: self._under_way == self._held or self._stopping)

    def settle(self) -> None:
        """Wait until no read is under way and none may begin before a block finishes (or the loader stops or fails)."""
        with self._lock:
            self._arrived.wait_for(lambda: self._stopping or self._has_failed() or self._is_idle())

    def _is_idle(self) -> bool:
        task = self._head()
        full = self._held == len(self._threads)
        return self._under_way == self._held and (task is None or full or not self._may_begin(task))

    def resume(self) -> None:
        """Let reads begin again."""
        with self._lock:
            self._paused = False
            self._may_read.notify_all()

    def abandon(self, g: int) -> None:
        """Give up all blocks before number `g`, with which the next sweep begins, and read on from there once the reads
        under way have ended, since later ones may go to the same bytes. Does not wait for that: a drive may hang.

        A ReadError is forgotten, so that the next sweep tries again; any other error stays.
        """
        with self._lock:
            self._resume_at = g
            self._may_put.notify_all()
            self._wake_lane()
            if self._under_way == 0:
                self._resume(g)

    def _resume(self, g: int) -> None:
        self._resume_at = None
        self._queue.clear()
        self._unread.clear()
        self._missing.clear()
        self._asked = set(self._kept)
        self._finished = max(self._finished, g)
        resume = g
        while resume < self._cursor and self._is_loaded(resume):
            resume += 1
        self._cursor = resume
        self._loaded = [min(loaded, resume - 1) for loaded in self._loaded]
        if isinstance(self._error, ReadError):
            self._error = None
        self._may_read.notify_all()
        self._arrived.notify_all()  # an error that stays is now told

    def _has_failed(self) -> bool:
        return self._error is not None and self._resume_at is None

    def _is_loaded(self, g: int) -> bool:
        return g % self._count in self._settled or self._loaded[g % self._count] >= g

    def _work(self, thread: int) -> None:
        while (task := self._next()) is not None:
            try:
                self._carry_out(task, thread)
            except LayeringError as error:
                self._fail(error)
            except Exception as error:
                self._fail(LayeringError(f"the loader failed: {error!r}", remedy="report this as a fault"))

    def _next(self) -> _Task | None:
        """The next read, once it may begin; None when the loader stops. A thread that got one wakes another if the read
        after it may begin, too."""
        with self._lock:
            while not self._stopping:
                task = self._head()
                if task is not None and self._may_begin(task):
                    self._under_way += 1
                    self._queue.popleft()
                    following = self._head()
                    if following is not None and self._may_begin(following):
                        self._may_read.notify()
                    self._meter.begin(self._clock())
                    return task
                self._may_read.wait()
            return None

    def _may_begin(self, task: _Task) -> bool:
        goes_on = self._resume_at is None and self._error is None and not self._paused
        return goes_on and (self._arena.staged or self._has_place(task))

    def _has_place(self, task: _Task) -> bool:
        return self._finished >= task.g - task.read.lag

    def _head(self) -> _Task | None:
        """The first read not yet begun, after moving the cursor past blocks that have all they need."""
        for _ in range(self._count if len(self._settled) < self._count else 0):
            if self._queue:
                return self._queue[0]
            block = self._cursor % self._count
            reads = [read for read in self._schedule.reads[block] if not (read.once and block in self._asked)]
            self._asked.add(block)
            self._queue.extend(_Task(self._cursor, read) for read in reads)
            if reads:
                self._unread[self._cursor] = self._missing[self._cursor] = len(reads)
            self._cursor += 1
        return self._queue[0] if self._queue else None

    def _carry_out(self, task: _Task, thread: int) -> None:
        read, begin, arrived = task.read, self._clock(), 0
        try:
            landing = self._arena.landing(thread, read.target, read.length)
            with self._turn():
                begin = self._clock()
                self._file.read_into(landing.memory, self._extents[read.extent].offset + read.offset)
            arrived = read.length
        finally:
            self._count_in(task, thread, begin, arrived)
        if self._wait_for_place(task):
            landing.put()
            if self._counts_last(task):
                self._check(task.g % self._count)
                self._arena.publish(task.g % self._count)
                with self._lock:
                    self._publish(task.g)
        with self._lock:
            self._leave()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One read, when it is this loader's turn to read; at once where it has the drive to itself. Called without the
        lock."""
        if self._lane is None:
            yield
            return
        with self._lock:
            self._meter.wait(self._clock())
        with self._lane.reading(lambda: not self._stopping and self._resume_at is None):
            with self._lock:
                self._meter.begin(self._clock())
            yield

    def _wake_lane(self) -> None:
        if self._lane is not None:
            self._lane.wake()

    def _count_in(self, task: _Task, thread: int, begin: float, arrived: int) -> None:
        """Note that a read has ended, which began at `begin` and brought `arrived` bytes."""
        read = task.read
        with self._lock:
            now = self._clock()
            slow = self._meter.end(now, arrived, self._usual[read.extent] * arrived)
            self.bytes_read += arrived
            self._unread[task.g] -= bool(arrived)
            if self._trace is not None:
                sweep, block = divmod(task.g, self._count)
                completes = self._unread[task.g] == 0
                self._trace.add(
                    ReadEvent(
                        "read", block, sweep, begin, now, arrived, extent=read.extent, offset=read.offset,
                        target=read.target, length=read.length, thread=thread, completes=completes,
                    )
                )  # fmt: skip
                if slow is not None:
                    self._trace.add_slowdown(slow)

    def _wait_for_place(self, task: _Task) -> bool:
        """Wait until what was read may be put to its place; whether it is still wanted. Nothing is from `abandon` on:
        blocks that stay in memory may finish before the reads under way have ended, and then `finished` says of others
        that they have executed, which were given up."""
        with self._lock:
            if not self._has_place(task):
                self._held += 1
                self._arrived.notify_all()
                self._may_put.wait_for(lambda: self._has_place(task) or self._stopping or self._resume_at is not None)
                self._held -= 1
            return self._has_place(task) and not self._stopping and self._resume_at is None

    def _counts_last(self, task: _Task) -> bool:
        """Note that a piece of a block has been put; whether it was the last that was missing."""
        with self._lock:
            self._missing[task.g] -= 1
            return self._missing[task.g] == 0

    def _publish(self, g: int) -> None:
        block = g % self._count
        del self._missing[g], self._unread[g]
        self._loaded[block] = g
        self._kept.add(block)
        if all(read.once for read in self._schedule.reads[block]):
            self._settled.add(block)
        self._arrived.notify_all()

    def _leave(self) -> None:
        self._under_way -= 1
        if self._under_way == 0 and self._resume_at is not None:
            self._resume(self._resume_at)
        if self._under_way == self._held:
            self._arrived.notify_all()

    def _fail(self, error: LayeringError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            self._arrived.notify_all()
            self._leave()

    def _check(self, block: int) -> None:
        """Compare the checksums of the block's extents, which have all arrived and which nothing overwrites yet."""
        target = self._schedule.offsets[block]
        for index in dict.fromkeys(read.extent for read in self._schedule.reads[block]):
            extent = self._extents[index]
            if self._verify == "always" or (self._verify == "first" and index not in self._checked):
                verify_extent(extent, index, self._arena.pieces(target, extent.length), path=self._file.path)
                self._checked.add(index)
            target += extent.length
