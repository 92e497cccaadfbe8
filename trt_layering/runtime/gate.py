"""One drive, several chains: whose reads go first. Imports nothing of ours; nothing here fails.

Each loader has a **lane** to the drive. A read may begin when no lane before its own has a read that waits or is under
way: those of the chain that executes come first, then those of the chain that runs next, then all others.

Nobody waits for ever. Between `enter` and `leave` a thread waits for nothing but the drive, and holds no other lock; a
lane of the first rank is never made to wait; and one that waits is woken whenever a read ends, ranks change, or its
loader stops. So the chain that executes always gets its weights, whatever the others do, and when it has what it needs
the next goes on. `wake` may be called with a loader's lock held: the gate's lock is innermost, and what is asked under
it takes no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Gate:
    """The drive that several loaders read from."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # a signal handler may come while its thread holds it
        self._order: tuple[Lane, ...] = ()
        self._busy: dict[Lane, int] = {}  # reads that wait or are under way

    def lane(self) -> Lane:
        """A new lane to the drive."""
        return Lane(self)

    def prefer(self, order: Sequence[Lane]) -> None:
        """From now on reads of these lanes go first, in this order; those of all others come after them."""
        with self._changed:
            if self._order != tuple(order):
                self._order = tuple(order)
                self._changed.notify_all()

    def _rank(self, lane: Lane) -> int:
        return self._order.index(lane) if lane in self._order else len(self._order)

    def _is_free(self, lane: Lane) -> bool:
        rank = self._rank(lane)
        return not any(self._rank(other) < rank for other in self._busy)


class Lane:
    """One loader's way to the drive. Any of its threads may use it."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def enter(self, wanted: Callable[[], bool]) -> None:
        """Wait until a read may begin, or `wanted` says that nobody needs it. `wanted` must take no lock and not
        wait."""
        gate = self._gate
        with gate._changed:
            gate._busy[self] = gate._busy.get(self, 0) + 1
            gate._changed.wait_for(lambda: gate._is_free(self) or not wanted())

    def leave(self) -> None:
        """The read that entered has ended."""
        gate = self._gate
        with gate._changed:
            gate._busy[self] -= 1
            if not gate._busy[self]:
                del gate._busy[self]
                gate._changed.notify_all()

    @contextmanager
    def reading(self, wanted: Callable[[], bool]) -> Iterator[None]:
        """One read, from `enter` to `leave`."""
        self.enter(wanted)
        try:
            yield
        finally:
            self.leave()

    def wake(self) -> None:
        """Whether reads are wanted may have changed."""
        with self._gate._changed:
            self._gate._changed.notify_all()
