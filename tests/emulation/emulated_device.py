"""A GPU that exists in this process only: memory, streams and events, for the emulated `pycuda` and `tensorrt`.

Imports numpy and nothing of ours. What real CUDA would punish, or silently get wrong, raises EmulationFault and is kept
in `Machine.faults`, so that a test sees it even where something swallowed the exception.

Work given to a stream is deferred. It runs when a host wait requires it, in the order CUDA promises and no more: what
else runs, and when, is drawn from a seed, so that a missing wait soon gives wrong numbers.
"""

from __future__ import annotations

import bisect
import itertools
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

DEVICE_BASE = 1 << 56  # no host pointer is there
POISON = 0xFF  # NaN in every floating-point type
HERE = os.path.dirname(os.path.abspath(__file__))
WRAPPERS = (HERE, os.path.join("backends", "tensorrt", "cuda.py"))  # files that pass waits on for somebody else


class EmulationFault(AssertionError):
    """A misuse of CUDA, PyCUDA or TensorRT."""


class OutOfMemory(Exception):
    """The emulated machine has no such amount of memory left."""


@dataclass(eq=False)
class Allocation:
    """`memory` holds the bytes. `address` is what the device calls the first of them, `host` what the host does (None
    where it cannot reach them)."""

    address: int
    memory: np.ndarray
    kind: str
    owner: str
    host: int | None


@dataclass(eq=False)
class Work:
    """Something a stream will do, after the work before it and after all of `after`."""

    stream: Stream
    run: Callable[[], None]
    what: str
    after: list[Work] = field(default_factory=list)
    uses: list[Allocation] = field(default_factory=list)
    done: bool = False
    finished_at: float = 0.0


class Stream:
    """Work in order. `blocking`: it and the null stream wait for each other, as streams without CU_STREAM_NON_BLOCKING
    do."""

    def __init__(self, machine: Machine, handle: int, blocking: bool) -> None:
        self.machine, self.handle, self.blocking = machine, handle, blocking
        self.queue: deque[Work] = deque()
        self.last: Work | None = None
        self.waiting_for: list[Work] = []

    def enqueue(self, run: Callable[[], None], what: str, uses: Iterable[tuple[int, int]] = ()) -> Work:
        """Do `run` once the stream gets there. `uses` are (address, bytes) that must stay allocated until then."""
        return self.machine._enqueue(self, run, what, list(uses))

    def wait_for(self, event: Event) -> None:
        """Let work enqueued from now on come after what `event` was last recorded behind."""
        self.machine._wait_for(self, event)

    def synchronize(self) -> None:
        """Return when everything enqueued so far has been done."""
        self.machine._synchronize(self.last)

    def finish(self) -> None:
        """The same, for what is synchronous by itself and so no wait that could be missing."""
        self.machine._synchronize(self.last, counted=False)

    def is_done(self) -> bool:
        """Whether nothing is pending."""
        return self.machine._poll(self.last)


class Event:
    """A point in a stream."""

    def __init__(self, machine: Machine, timing: bool = True) -> None:
        self.machine, self.timing = machine, timing
        self.mark: Work | None = None

    def record(self, stream: Stream) -> None:
        """From now on the event stands for what has been enqueued so far."""
        if not self.machine._is_ignored("record"):
            self.mark = stream.enqueue(lambda: None, "event")

    def synchronize(self) -> None:
        """Return when what was recorded has been done; at once where nothing was."""
        self.machine._synchronize(self.mark)

    def query(self) -> bool:
        """Whether what was recorded has been done."""
        return self.machine._poll(self.mark)


class _Contexts(threading.local):
    """The contexts pushed in a thread. PyCUDA aborts the process when a thread ends with one."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self._end = _ThreadEnd(self.stack)


class _ThreadEnd:
    def __init__(self, stack: list[object]) -> None:
        self._stack = stack

    def __del__(self) -> None:
        if self._stack and not sys.is_finalizing():
            machine().note_fault("a thread ended with a context pushed: PyCUDA would abort the process")


class Machine:
    """The emulated machine as the environment describes it, see README.md. Thread-safe."""

    def __init__(self) -> None:
        get = os.environ.get
        self.version = get("EMULATED_TENSORRT", "10.3")
        self.integrated = get("EMULATED_INTEGRATED", "1") == "1"
        self.concurrent_managed = get("EMULATED_CONCURRENT_MANAGED", "0" if self.integrated else "1") == "1"
        self.total_memory = int(get("EMULATED_MEMORY", str(8 << 30)))
        self.name = get("EMULATED_GPU", "Orin (nvgpu)")
        self.sm = get("EMULATED_SM", "8.7")
        self.devices = int(get("EMULATED_DEVICES", "1"))
        self.driver_version = int(get("EMULATED_DRIVER", "12060"))
        self.no_more_allocations = False
        self.failures: dict[str, str] = dict(
            pair.split("=", 1) for pair in filter(None, get("EMULATED_FAIL", "").split(";"))
        )
        self.faults: list[str] = []
        self.leaks: list[str] = []
        self.peak = self.used = 0
        self.wait_sites: dict[tuple[str, str], int] = {}
        self.ignored_waits: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._random = random.Random(int(get("EMULATED_SEED", "0")))
        self._allocations: dict[int, Allocation] = {}
        self._starts: list[tuple[int, int, Allocation]] = []
        self._next_address = DEVICE_BASE
        self._handles = itertools.count(0x5000, 0x10)
        self._null = Stream(self, 0, blocking=True)
        self._streams: dict[int, Stream] = {0: self._null}
        self._eager: dict[int, float] = {}
        self._calls = 0
        self._contexts = _Contexts()

    # Faults

    def note_fault(self, text: str) -> None:
        """Keep `text` for `assert_clean`, where raising is no use."""
        self.faults.append(text)

    def fault(self, text: str) -> None:
        """Record a misuse and raise it."""
        self.note_fault(text)
        raise EmulationFault(text)

    def failure(self, call: str) -> str | None:
        """What the driver's function `call` is to fail with, if it is, in the driver's words."""
        return self.failures.get(call)

    def assert_clean(self) -> None:
        """Raise EmulationFault if anything was misused, leaked, or is still allocated, pushed or pending."""
        left = [*self.faults, *self.leaks]
        left += [f"{a.memory.nbytes} bytes of {a.kind} memory were never freed" for a in self.allocations()]
        left += ["a context is still pushed in this thread"] if self._contexts.stack else []
        left += [f"{n} pieces of work are pending" for n in [self.pending()] if n]
        if left:
            raise EmulationFault("\n".join(left))

    # Contexts

    def push_context(self, context: object) -> None:
        self._contexts.stack.append(context)

    def pop_context(self) -> None:
        self._contexts.stack.pop()

    def current_context(self) -> object | None:
        """The context pushed last in this thread."""
        return self._contexts.stack[-1] if self._contexts.stack else None

    def require_context(self, what: str) -> None:
        """Fault if this thread has no context."""
        if not self._contexts.stack:
            self.fault(f"{what} in a thread without a context")

    # Memory

    def allocate(self, nbytes: int, kind: str, owner: str = "program") -> int:
        """The address, for the device, of new memory full of NaN.

        `kind`: "device" (host cannot reach it), "pinned" (its host pointer is another one, `allocation(a).host`) or
        "managed" (one pointer for both). `owner` "library" marks what a library takes for itself, which
        `no_more_allocations` does not forbid. Raises OutOfMemory.
        """
        with self._lock:
            if nbytes <= 0:
                self.fault(f"allocation of {nbytes} bytes")
            if self.no_more_allocations and owner == "program":
                self.fault(f"{nbytes} bytes of {kind} memory allocated during a run")
            if self._counts(kind) and self.used + nbytes > self.total_memory:
                raise OutOfMemory(f"{nbytes} bytes of {kind} memory")
            allocation = self._place(nbytes, kind, owner)
            if self._counts(kind):
                self.used += nbytes
                self.peak = max(self.peak, self.used)
            self._allocations[allocation.address] = allocation
            self._index()
            return allocation.address

    def _counts(self, kind: str) -> bool:
        return self.integrated or kind != "pinned"

    def _place(self, nbytes: int, kind: str, owner: str) -> Allocation:
        block = np.full(nbytes + 8192, POISON, np.uint8)
        start = -block.ctypes.data % 4096 + 512  # pinned memory is aligned to 512 bytes, no more
        memory = block[start : start + nbytes]
        host = None if kind == "device" else memory.ctypes.data
        if kind == "managed":
            return Allocation(memory.ctypes.data, memory, kind, owner, host)
        address = self._next_address + 256  # device memory is aligned to 256 bytes, no more
        self._next_address += -(-nbytes // 4096 + -2) * 4096
        return Allocation(address, memory, kind, owner, host)

    def _index(self) -> None:
        starts = [(a.address, a) for a in self._allocations.values()]
        starts += [(a.host, a) for a in self._allocations.values() if a.kind == "pinned" and a.host is not None]
        self._starts = sorted((start, start + a.memory.nbytes, a) for start, a in starts)

    def free(self, address: int) -> None:
        """Give memory back. Fault if it is not allocated, or if pending work uses it."""
        with self._lock:
            allocation = self._allocations.get(address)
            if allocation is None:
                self.fault(f"free of {address:#x}, which is not allocated")
            for stream in self._streams.values():
                for work in stream.queue:
                    if allocation in work.uses:
                        self.fault(f"{allocation.kind} memory freed while a pending {work.what} uses it")
            del self._allocations[address]
            self._index()
            allocation.memory.fill(POISON)
            if self._counts(allocation.kind):
                self.used -= allocation.memory.nbytes

    def allocation(self, address: int) -> Allocation:
        """The allocation that `address`, of the device or of the host, points into. Fault if there is none."""
        with self._lock:
            found = self._find(address)
            if found is None:
                self.fault(f"address {address:#x} is in no live allocation")
            return found[1]

    def _find(self, address: int) -> tuple[int, Allocation] | None:
        at = bisect.bisect_right(self._starts, address, key=lambda start: start[0]) - 1
        if at >= 0 and address < self._starts[at][1]:
            return self._starts[at][0], self._starts[at][2]
        return None

    def allocations(self, owner: str = "program") -> list[Allocation]:
        """All live allocations of `owner`."""
        with self._lock:
            return [a for a in self._allocations.values() if a.owner == owner]

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes that the device finds at `address`, writable. Fault outside a live allocation, or for a pointer
        that only the host has."""
        return self._view(address, nbytes, "device")

    def host_view(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes of pinned or managed memory that the host finds at `address`, writable. Fault for anything else."""
        return self._view(address, nbytes, "host")

    def _view(self, address: int, nbytes: int, side: str) -> np.ndarray:
        with self._lock:
            found = self._find(address)
            if found is None:
                self.fault(f"{side} access of {nbytes} bytes at {address:#x}, in no live allocation")
            start, allocation = found
            if start != (allocation.address if side == "device" else allocation.host):
                self.fault(f"{side} access through a pointer of the other side, to {allocation.kind} memory")
            offset = address - start
            if offset + nbytes > allocation.memory.nbytes:
                self.fault(
                    f"{side} access of {nbytes} bytes at {offset} of {allocation.memory.nbytes} bytes of "
                    f"{allocation.kind} memory"
                )
            return allocation.memory[offset : offset + nbytes]

    def is_pinned(self, host_address: int, nbytes: int) -> bool:
        """Whether the host's bytes there are pinned (or managed) memory, all of them."""
        with self._lock:
            found = self._find(host_address)
            return (
                found is not None
                and found[0] == found[1].host
                and host_address + nbytes <= found[0] + found[1].memory.nbytes
            )

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes, as the driver tells them."""
        with self._lock:
            return self.total_memory - self.used, self.total_memory

    # Streams and events

    def new_stream(self, blocking: bool) -> Stream:
        with self._lock:
            stream = Stream(self, next(self._handles), blocking)
            self._streams[stream.handle] = stream
            return stream

    def stream(self, handle: int) -> Stream:
        """The stream of this handle (0: the null stream). Fault if there is none."""
        found = self._streams.get(handle)
        if found is None:
            self.fault(f"stream {handle:#x} does not exist")
        return found

    def destroy_stream(self, handle: int) -> None:
        """The stream does what it was given and is gone."""
        with self._lock:
            self._synchronize(self.stream(handle).last, counted=False)
            del self._streams[handle]

    def new_event(self, timing: bool = True) -> Event:
        return Event(self, timing)

    def pending(self) -> int:
        """How many pieces of work, markers of events left out, have not been done."""
        with self._lock:
            return sum(work.what != "event" for stream in self._streams.values() for work in stream.queue)

    def synchronize(self) -> None:
        """Do everything that is pending, as cuCtxSynchronize waits for."""
        for stream in list(self._streams.values()):
            stream.synchronize()

    def _enqueue(self, stream: Stream, run: Callable[[], None], what: str, uses: list[tuple[int, int]]) -> Work:
        with self._lock:
            if self._streams.get(stream.handle) is not stream:
                self.fault(f"{what} given to a stream that was destroyed")
            allocations = []
            for address, nbytes in uses:
                allocation = self.allocation(address)
                start = address - (allocation.host if address < DEVICE_BASE else allocation.address)
                if start + nbytes > allocation.memory.nbytes:
                    self.fault(f"{what} of {nbytes} bytes at {start} of {allocation.memory.nbytes}")
                allocations.append(allocation)
            after = stream.waiting_for + self._across_null(stream)
            work = Work(stream, run, what, [w for w in after if not w.done], allocations)
            stream.waiting_for = []
            stream.queue.append(work)
            stream.last = work
            self._drift()
            return work

    def _across_null(self, stream: Stream) -> list[Work]:
        if not stream.blocking:
            return []
        others = [self._null] if stream is not self._null else [s for s in self._streams.values() if s.blocking]
        return [other.last for other in others if other is not stream and other.last is not None]

    def _wait_for(self, stream: Stream, event: Event) -> None:
        with self._lock:
            if not self._is_ignored("wait_for_event") and event.mark is not None:
                stream.waiting_for = [*stream.waiting_for, event.mark]
            self._drift()

    def _synchronize(self, work: Work | None, counted: bool = True) -> None:
        with self._lock:
            if counted and self._is_ignored("synchronize"):
                return
            self._complete(work)
            self._drift()

    def _poll(self, work: Work | None) -> bool:
        with self._lock:
            if work is not None and self._random.random() < 0.5:
                self._complete(work)
            return work is None or work.done

    def _complete(self, work: Work | None) -> None:
        stack = [] if work is None else [work]
        while stack:
            if stack[-1].done:
                stack.pop()
                continue
            head = stack[-1].stream.queue[0]
            before = next((other for other in head.after if not other.done), None)
            if before is not None:
                stack.append(before)
            else:
                self._run(head)

    def _run(self, work: Work) -> None:
        work.stream.queue.popleft()
        work.done = True
        for allocation in work.uses:
            if self._allocations.get(allocation.address) is not allocation:
                self.fault(f"{work.what} of {allocation.kind} memory that was freed")
        work.run()
        work.after, work.uses = [], []
        work.finished_at = time.perf_counter()

    def _drift(self) -> None:
        """Let streams go on by themselves, some at once, some not at all, as the seed has it for a while."""
        self._calls += 1
        if self._calls % 16 == 1:
            self._eager = {handle: self._random.choice((0.0, 0.0, 0.3, 1.0)) for handle in self._streams}
        ready = list(self._streams.values())
        self._random.shuffle(ready)
        for stream in ready:
            while stream.queue and self._random.random() < self._eager.get(stream.handle, 0.0):
                if any(not other.done for other in stream.queue[0].after):
                    break
                self._run(stream.queue[0])

    def _is_ignored(self, kind: str) -> bool:
        site = (kind, _caller())
        self.wait_sites[site] = self.wait_sites.get(site, 0) + 1
        return site in self.ignored_waits

    @contextmanager
    def without(self, kind: str, site: str) -> Iterator[None]:
        """Ignore the waits (or records) at `site`, one of `wait_sites`: a mutation."""
        self.ignored_waits.add((kind, site))
        try:
            yield
        finally:
            self.ignored_waits.discard((kind, site))


def _caller() -> str:
    """The line, outside the emulation and thin wrappers, that asked: "memory.py:57 arrive"."""
    frame = sys._getframe(2)
    while frame.f_back is not None and any(name in frame.f_code.co_filename for name in WRAPPERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


_machine: Machine | None = None
_machine_lock = threading.RLock()  # collecting garbage asks for the machine, too


def machine() -> Machine:
    """The one machine of this process, made when first asked for."""
    global _machine
    with _machine_lock:
        if _machine is None:
            _machine = Machine()
        return _machine


def replace_machine() -> Machine:
    """A new machine, as the environment now describes it, in the place of the one there was."""
    global _machine
    made = Machine()
    with _machine_lock:
        _machine = made
        return made
