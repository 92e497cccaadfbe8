"""The GPU through PyCUDA: its context, two streams, events, memory and copies. The only module that imports PyCUDA.

May import errors and units; PyCUDA is imported when a `Device` is made, after `present.require()`. What the driver
refuses raises BackendError, memory it does not give MemoryLimitError, both in words.

The primary context is retained once for each GPU and kept until the process ends: the libraries beside us keep it, too,
and PyCUDA can release a context in no thread but the one that retained it. It is never left pushed: PyCUDA aborts the
process when a thread ends with a context on its stack. Streams do not wait for the null stream, so nothing here is
asked of that one, except where the device is then waited for.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from numpy.typing import NDArray

from trt_layering.errors import BackendError, LayeringError, MemoryLimitError
from trt_layering.units import format_size

if TYPE_CHECKING:
    from pycuda import driver

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, for which PyCUDA has no name
PAGE = 4096
"""Host memory from here begins at a multiple of this, as direct reads need; the driver promises less."""

_Owned = TypeVar("_Owned", bound="Memory | Event")
_keep_one = threading.Lock()


@functools.cache
def _primary_context(device: type[driver.Device], ordinal: int) -> driver.Context:
    return device(ordinal).retain_primary_context()


class Memory(Protocol):
    """Bytes that a device gave: `nbytes` of them, the first at `address` as the device counts."""

    address: int
    nbytes: int

    def free(self) -> None:
        """Give them back, once nothing uses them. May be called twice, from any thread."""
        ...


class _Pushed:
    """Pushes the context in this thread and takes it away again; may be entered many times over. Cheap: two calls of
    the driver that change nothing but the thread's own state."""

    def __init__(self, context: driver.Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.push()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._context.pop()


class Stream:
    """Work for the device, done in the order in which it is asked. Belongs to its device."""

    def __init__(self, device: Device, name: str) -> None:
        from pycuda import driver

        self._device, self._name = device, name
        with device.asking(f"making the {name} stream"):
            self._stream: driver.Stream | None = driver.Stream(_NON_BLOCKING)
            self.handle = self._stream.handle

    def wait(self, event: Event) -> None:
        """Let what is asked from now on come after what `event` was last recorded behind. Does not wait itself."""
        with self._device.asking(f"letting the {self._name} stream wait"):
            self.asked.wait_for_event(event.recorded)

    def synchronize(self) -> None:
        """Return when all that was asked is done. BackendError if it failed."""
        with self._device.asking(f"the {self._name} stream worked"):
            self.asked.synchronize()

    @property
    def asked(self) -> driver.Stream:
        """PyCUDA's stream, until it is freed."""
        assert self._stream is not None
        return self._stream

    @property
    def freed(self) -> bool:
        return self._stream is None

    def free(self) -> None:
        """Let go of it; the device calls this."""
        with self._device.current():
            self._stream = None


class Event:
    """A moment in a stream. Belongs to its device; `free` it earlier where many come and go."""

    def __init__(self, device: Device, flags: int) -> None:
        from pycuda import driver

        self._device = device
        with device.asking("making an event"):
            self._event: driver.Event | None = driver.Event(flags)

    def record(self, stream: Stream) -> None:
        """From now on stand for all that has been asked of `stream` so far."""
        with self._device.asking("recording an event"):
            self.recorded.record(stream.asked)

    def wait(self) -> None:
        """Sleep until all that was asked before is done; return at once if nothing was recorded. BackendError if what
        was asked failed."""
        with self._device.asking("the GPU worked"):
            self.recorded.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Between two events of `Device.timed_event`, both recorded and done."""
        with self._device.asking("comparing two moments"):
            return self.recorded.time_since(earlier.recorded) / 1e3

    @property
    def recorded(self) -> driver.Event:
        """PyCUDA's event, until it is freed."""
        assert self._event is not None
        return self._event

    def free(self) -> None:
        """Let go of it. May be called twice."""
        with self._device.current():
            self._event = None
        self._device.forget(self)


class DeviceMemory:
    """Bytes that only the device can reach."""

    def __init__(self, device: Device, nbytes: int, purpose: str) -> None:
        from pycuda import driver

        self._device, self.nbytes = device, nbytes
        with device.asking_for(nbytes, purpose):
            self._allocation: driver.DeviceAllocation | None = driver.mem_alloc(max(nbytes, 1))
            self.address = int(self._allocation)

    def free(self) -> None:
        """Give the bytes back, once nothing uses them. May be called twice."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            with self._device.asking("freeing memory of the GPU"):
                allocation.free()
        self._device.forget(self)


class HostMemory:
    """Bytes that the host can reach at `memory`, and that never move. `host_address` is where they begin for the host,
    a multiple of PAGE; `address` is where they begin for the device, 0 where it does not read them by itself."""

    def __init__(self, device: Device, nbytes: int, purpose: str, kind: _HostKind) -> None:
        from pycuda import driver

        self._device, self.nbytes = device, nbytes
        with device.asking_for(nbytes, purpose):
            array = kind.make(nbytes + PAGE)
            owner: object = array.base
            assert isinstance(owner, (driver.PagelockedHostAllocation, driver.ManagedAllocation))
            self._owner: driver.PagelockedHostAllocation | driver.ManagedAllocation | None = owner
            skipped = -array.ctypes.data % PAGE
            self.host_address: int = array.ctypes.data + skipped
            self.address = owner.get_device_pointer() + skipped if kind.mapped else 0
        self.memory = memoryview((ctypes.c_ubyte * nbytes).from_address(self.host_address)).cast("B")

    def free(self) -> None:
        """Give the bytes back, once nothing uses them, neither the device nor a view of `memory`. May be called
        twice."""
        owner, self._owner = self._owner, None
        if owner is not None:
            with self._device.asking("freeing pinned memory"):
                owner.free()
        self._device.forget(self)


@dataclass(frozen=True)
class _HostKind:
    make: Callable[[int], NDArray[Any]]
    mapped: bool


class Device:
    """GPU number `ordinal`: its streams `compute` and `copy`, and all that is allocated here, until `close`.

    May be used from any thread. Every method brings the context along; who calls another library's functions does so
    under `with device.current()`.
    """

    def __init__(self, ordinal: int = 0) -> None:
        """Raises BackendError if there is no such GPU or its driver does not answer."""
        from pycuda import driver

        self._owned: dict[int, Memory | Event] = {}
        self._lock = threading.RLock()  # a signal handler may come while its thread holds it
        self.name = f"GPU {ordinal}"
        try:
            driver.init()
            with _keep_one:
                context = _primary_context(driver.Device, ordinal)
            self._pushed = _Pushed(context)
            self._describe(driver.Device(ordinal))
        except driver.Error as error:
            raise self._told("opening it", error) from error
        self.compute = Stream(self, "compute")
        self.copy = Stream(self, "copy")

    def _describe(self, device: driver.Device) -> None:
        from pycuda.driver import device_attribute as attribute

        self.name = device.name()
        self.sm = "{}.{}".format(*device.compute_capability())
        self.total_bytes = device.total_memory()
        self.integrated = bool(device.get_attribute(attribute.INTEGRATED))
        """Whether the GPU's memory is the processor's."""
        self.shares_managed_memory = bool(device.get_attribute(attribute.CONCURRENT_MANAGED_ACCESS))
        """Whether the processor may use managed memory while the GPU works."""

    def current(self) -> AbstractContextManager[None]:
        """This device's context in this thread, for the length of a `with`. May be nested."""
        return self._pushed

    @contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """`current`, with PyCUDA's errors raised as ours; `what` is what was being done."""
        from pycuda import driver

        try:
            with self._pushed:
                yield
        except driver.Error as error:
            raise self._told(what, error) from error

    @contextmanager
    def asking_for(self, nbytes: int, purpose: str) -> Iterator[None]:
        """`asking`, for memory."""
        from pycuda import driver

        try:
            with self._pushed:
                yield
        except driver.MemoryError as error:
            raise self._refused(nbytes, purpose) from error
        except driver.Error as error:
            raise self._told(f"allocating {format_size(nbytes)} for {purpose}", error) from error

    def _told(self, what: str, error: Exception) -> LayeringError:
        from pycuda import driver

        if isinstance(error, driver.MemoryError):
            return MemoryLimitError(
                f"the GPU ran out of memory: {what}: {error}", where=self.name,
                remedy="lower the budget, or stop other programs that use the GPU",
            )  # fmt: skip
        return BackendError(
            f"the GPU failed: {what}: {error}", where=self.name,
            remedy="start the process again, since a GPU that failed serves a process no more; if it fails again, "
            "look for NVRM or Xid in `dmesg`",
        )  # fmt: skip

    def _refused(self, nbytes: int, purpose: str) -> MemoryLimitError:
        try:
            free, total = (format_size(size) for size in self.memory_info())
        except LayeringError:
            free, total = "an unknown amount", format_size(self.total_bytes)
        others = " (the processor's programs count, too: it is the same memory)" if self.integrated else ""
        return MemoryLimitError(
            f"the GPU did not give {format_size(nbytes)} for {purpose}: {free} of {total} are free", where=self.name,
            remedy=f"lower the budget, or stop other programs that use the GPU{others}",
        )  # fmt: skip

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes, as the driver counts them: all processes together, contexts and libraries too."""
        from pycuda import driver

        with self.asking("asking for the free memory"):
            return driver.mem_get_info()

    def allocate(self, nbytes: int, purpose: str) -> DeviceMemory:
        """Device memory, undefined until written, aligned to 256 bytes. `purpose` names it in errors, which are
        MemoryLimitError and BackendError."""
        return self._own(DeviceMemory(self, nbytes, purpose))

    def pinned(self, nbytes: int, purpose: str) -> HostMemory:
        """Host memory that async copies go to and from."""
        from pycuda import driver

        flags = driver.host_alloc_flags
        return self._host(nbytes, purpose, _HostKind(self._pagelocked(flags.PORTABLE), mapped=False))

    def mapped(self, nbytes: int, purpose: str) -> HostMemory:
        """Pinned host memory that the device reads where it lies."""
        from pycuda import driver

        flags = driver.host_alloc_flags
        return self._host(nbytes, purpose, _HostKind(self._pagelocked(flags.PORTABLE | flags.DEVICEMAP), mapped=True))

    def managed(self, nbytes: int, purpose: str) -> HostMemory:
        """Memory of one address for both, which both may use at once. BackendError where `shares_managed_memory` is
        false: there the processor must not touch it while the GPU works."""
        from pycuda import driver

        if not self.shares_managed_memory:
            raise BackendError(
                "processor and GPU cannot use managed memory at the same time", where=self.name,
                remedy="use another placement: staged or zero-copy",
            )  # fmt: skip
        everywhere = int(driver.mem_attach_flags.GLOBAL)
        make = functools.partial(driver.managed_empty, dtype="uint8", mem_flags=everywhere)
        return self._host(nbytes, purpose, _HostKind(make, mapped=True))

    def _pagelocked(self, flags: int) -> Any:
        from pycuda import driver

        return functools.partial(driver.pagelocked_empty, dtype="uint8", mem_flags=flags)

    def _host(self, nbytes: int, purpose: str, kind: _HostKind) -> HostMemory:
        return self._own(HostMemory(self, nbytes, purpose, kind))

    def event(self) -> Event:
        """An event that is cheap to record and to sleep on."""
        from pycuda import driver

        flags = driver.event_flags
        return self._own(Event(self, int(flags.BLOCKING_SYNC) | int(flags.DISABLE_TIMING)))

    def timed_event(self) -> Event:
        """An event that knows when it happened."""
        from pycuda import driver

        return self._own(Event(self, int(driver.event_flags.BLOCKING_SYNC)))

    def upload(self, address: int, source: memoryview, stream: Stream) -> None:
        """Ask `stream` to copy `source`, which must be pinned and stay as it is until that is done."""
        from pycuda import driver

        with self.asking("copying to the GPU"):
            driver.memcpy_htod_async(address, source, stream.asked)

    def download(self, target: memoryview, address: int, stream: Stream) -> None:
        """Ask `stream` to fill `target`, which must be pinned and stay until that is done."""
        from pycuda import driver

        with self.asking("copying from the GPU"):
            driver.memcpy_dtoh_async(target, address, stream.asked)

    def copy_within(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Ask `stream` to copy bytes from one address of the device to another."""
        from pycuda import driver

        with self.asking("copying within the GPU"):
            driver.memcpy_dtod_async(target, source, nbytes, stream.asked)

    def fill(self, address: int, byte: int, nbytes: int, stream: Stream) -> None:
        """Ask `stream` to set `nbytes` bytes to `byte`."""
        from pycuda import driver

        with self.asking("filling memory of the GPU"):
            driver.memset_d8_async(address, byte, nbytes, stream.asked)

    def write(self, address: int, source: memoryview) -> None:
        """Copy any host memory to the device, and return when it is there. Waits for all that was asked before."""
        from pycuda import driver

        with self.asking("copying to the GPU"):
            driver.Context.synchronize()
            driver.memcpy_htod(address, source)
            driver.Context.synchronize()

    def read(self, target: memoryview, address: int) -> None:
        """Copy from the device to any host memory, after all that was asked before, and return when it is there."""
        from pycuda import driver

        with self.asking("copying from the GPU"):
            driver.Context.synchronize()
            driver.memcpy_dtoh(target, address)

    def settle(self) -> None:
        """Return when nothing asked of the two streams can be under way any more; a failure is not told again, since
        whoever asked was told."""
        for stream in (self.compute, self.copy):
            try:
                stream.synchronize()
            except LayeringError:
                continue

    def _own(self, owned: _Owned) -> _Owned:
        with self._lock:
            self._owned[id(owned)] = owned
        return owned

    def forget(self, owned: object) -> None:
        """`owned` was freed by itself."""
        with self._lock:
            self._owned.pop(id(owned), None)

    def close(self) -> None:
        """Wait for what was asked, and free all that has not been freed. May be called twice."""
        if self.compute.freed:
            return
        self.settle()
        for owned in reversed(list(self._owned.values())):
            owned.free()
        self.compute.free()
        self.copy.free()
