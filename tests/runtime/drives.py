"""Stand-ins for `os.preadv`: drives that are slow, fail, interrupt and tear, under the control of a test."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable

PATIENCE = 20.0
"""Seconds that a test waits for what must happen at once, before it fails."""


def failure(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))


class Faulty:
    """Reads truly, but for calls by number: an error in `faults` is raised, an int reads at most so many bytes."""

    def __init__(self, faults: dict[int, OSError | int] | None = None) -> None:
        self.faults = dict(faults or {})
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            fault = self.faults.get(self.calls)
            self.calls += 1
        if isinstance(fault, OSError):
            raise failure(fault.errno or errno.EIO)
        if isinstance(fault, int):
            return os.preadv(descriptor, [buffers[0][:fault]], offset)
        return os.preadv(descriptor, buffers, offset)


class Broken:
    """Fails every call with EIO from the moment `broken` is set, and reads truly while it is not."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.broken.is_set():
            raise failure()
        return os.preadv(descriptor, buffers, offset)


class Hanging:
    """Reads truly until `hang` is set; then calls wait until `release` is set. `caught` says that one is waiting."""

    def __init__(self, then: OSError | None = None) -> None:
        self.hang, self.release, self.caught = threading.Event(), threading.Event(), threading.Event()
        self._then = then

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.hang.is_set() and not self.release.is_set():
            self.caught.set()
            assert self.release.wait(PATIENCE)
            if self._then is not None:
                raise self._then
        return os.preadv(descriptor, buffers, offset)


class Shuffling:
    """Lets reads end in any order: each fills its buffer with rubbish, then waits until the test's `release_one` picks
    it by chance. `fault` may turn the end of a read, by its number, into an error or a short one."""

    def __init__(self, seed: int, fault: Callable[[int], OSError | int | None] = lambda number: None) -> None:
        self._rng = random.Random(seed)
        self._fault = fault
        self._condition = threading.Condition()
        self._pending: list[threading.Event] = []
        self._open = False
        self.calls = 0

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        buffers[0][:] = b"\xee" * len(buffers[0])
        mine = threading.Event()
        with self._condition:
            number, self.calls = self.calls, self.calls + 1
            if self._open:
                mine.set()
            self._pending.append(mine)
            self._condition.notify_all()
        assert mine.wait(PATIENCE)
        fault = self._fault(number)
        if isinstance(fault, OSError):
            raise fault
        part = buffers[0] if fault is None else buffers[0][:fault]
        return os.preadv(descriptor, [part], offset)

    def release_one(self, stop: threading.Event) -> None:
        """Wait for a read and let one of those under way end; returns at once when `stop` is set (see `wake`)."""
        with self._condition:
            assert self._condition.wait_for(lambda: self._pending or stop.is_set(), PATIENCE)
            if self._pending:
                self._pending.pop(self._rng.randrange(len(self._pending))).set()

    def let_one_begin(self) -> None:
        """Give other threads the chance to begin a read, if they do so at once."""
        with self._condition:
            before = self.calls
            self._condition.wait_for(lambda: self.calls > before, 0.0005)

    def open(self) -> None:
        """From now on reads end at once."""
        with self._condition:
            self._open = True
            for event in self._pending:
                event.set()
            self._pending.clear()
            self._condition.notify_all()
