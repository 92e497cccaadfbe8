"""The part of `pycuda.driver` (2026.1) that the backend uses, over `emulated_device`, with its names and signatures.

Imports numpy and the emulated device. Errors are PyCUDA's classes with the driver's words; misuse is an EmulationFault.

Kept from the real one: the driver's asynchronous "synchronous" calls (`memset_d8`, `memcpy_dtod`, and `memcpy_htod`
from memory that is not pinned return before the device is done), contexts that only their own thread can activate for
cleaning up, events and streams that are destroyed with their objects, buffers that are not kept alive by copies.
"""

import enum
import threading

import numpy as np
from emulated_device import Allocation, OutOfMemory, machine

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class Error(Exception):
    pass


class MemoryError(Error):
    pass


class LogicError(Error):
    pass


class LaunchError(Error):
    pass


class RuntimeError(Error):
    pass


class event_flags(enum.IntFlag):
    DEFAULT = 0
    BLOCKING_SYNC = 1
    DISABLE_TIMING = 2
    INTERPROCESS = 4


class host_alloc_flags:
    PORTABLE = 1
    DEVICEMAP = 2
    WRITECOMBINED = 4


class mem_attach_flags(enum.IntFlag):
    GLOBAL = 1
    HOST = 2
    SINGLE = 4


class device_attribute(enum.IntEnum):
    INTEGRATED = 18
    CAN_MAP_HOST_MEMORY = 19
    ASYNC_ENGINE_COUNT = 40
    UNIFIED_ADDRESSING = 41
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    MANAGED_MEMORY = 83
    PAGEABLE_MEMORY_ACCESS = 88
    CONCURRENT_MANAGED_ACCESS = 89
    MULTIPROCESSOR_COUNT = 16


_initialized = False


def _call(name: str) -> None:
    """What every driver function does first: fail if it is told to, and need a context."""
    _fail(name)
    machine().require_context(name)


def _fail(name: str) -> None:
    words = machine().failure(name)
    if words is None:
        return
    kind = MemoryError if words == "out of memory" else LaunchError if "launch" in words else LogicError
    raise kind(f"{name} failed: {words}")


def init(flags: int = 0) -> None:
    global _initialized
    _fail("cuInit")
    _initialized = True


def get_version() -> tuple[int, int, int]:
    return (12, 6, 0)


def get_driver_version() -> int:
    return machine().driver_version


class Device:
    def __init__(self, number: int) -> None:
        if not _initialized:
            raise LogicError("cuDeviceGet failed: initialization error")
        if not 0 <= number < machine().devices:
            raise LogicError("cuDeviceGet failed: invalid device ordinal")
        self._number = number

    @staticmethod
    def count() -> int:
        if not _initialized:
            raise LogicError("cuDeviceGetCount failed: initialization error")
        return machine().devices

    def name(self) -> str:
        return machine().name

    def pci_bus_id(self) -> str:
        return "0000:00:00.0"

    def compute_capability(self) -> tuple[int, int]:
        major, minor = machine().sm.split(".")
        return int(major), int(minor)

    def total_memory(self) -> int:
        return machine().total_memory

    def get_attribute(self, attr: device_attribute) -> int:
        major, minor = self.compute_capability()
        return {
            device_attribute.INTEGRATED: int(machine().integrated),
            device_attribute.CAN_MAP_HOST_MEMORY: 1,
            device_attribute.ASYNC_ENGINE_COUNT: 1 if machine().integrated else 2,
            device_attribute.UNIFIED_ADDRESSING: 1,
            device_attribute.COMPUTE_CAPABILITY_MAJOR: major,
            device_attribute.COMPUTE_CAPABILITY_MINOR: minor,
            device_attribute.MANAGED_MEMORY: 1,
            device_attribute.PAGEABLE_MEMORY_ACCESS: 0,
            device_attribute.CONCURRENT_MANAGED_ACCESS: int(machine().concurrent_managed),
            device_attribute.MULTIPROCESSOR_COUNT: 8,
        }[attr]

    def retain_primary_context(self) -> "Context":
        _fail("cuDevicePrimaryCtxRetain")
        return Context(self)


class Context:
    """The primary context; PyCUDA's own contexts are not emulated."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._thread = threading.get_ident()
        self._valid = True

    @property
    def handle(self) -> int:
        return 0xC0DE

    def push(self) -> None:
        if not self._valid:
            raise LogicError("cuCtxPushCurrent failed: invalid device context")
        machine().push_context(self)

    @staticmethod
    def pop() -> None:
        if machine().current_context() is None:
            raise LogicError("context::pop failed: invalid device context - cannot pop non-current context")
        machine().pop_context()

    @staticmethod
    def get_current() -> "Context | None":
        return machine().current_context()

    @staticmethod
    def get_device() -> Device:
        _call("cuCtxGetDevice")
        return machine().current_context()._device

    @staticmethod
    def synchronize() -> None:
        _call("cuCtxSynchronize")
        machine().synchronize()

    def detach(self) -> None:
        if not self._valid:
            raise LogicError("context::detach failed: invalid device context - cannot detach from invalid context")
        if machine().current_context() is self:
            machine().fault("a primary context released while it is pushed: the driver keeps it on its stack")
        self._valid = False


class _Owned:
    """Something of a context, that only a thread with this context pushed (or the context's own) can clean up."""

    def __init__(self) -> None:
        self._context = machine().current_context()
        self._machine = machine()

    def _may_clean_up(self, what: str) -> bool:
        context, here = self._context, machine().current_context()
        if machine() is not self._machine or context is None or not context._valid:
            return False
        if here is not context and threading.get_ident() != context._thread:
            machine().leaks.append(f"{what} in out-of-thread context could not be cleaned up")
            return False
        return True


class Stream(_Owned):
    def __init__(self, flags: int = 0) -> None:
        _call("cuStreamCreate")
        super().__init__()
        self._stream = machine().new_stream(blocking=not flags & NON_BLOCKING)

    @property
    def handle(self) -> int:
        return self._stream.handle

    def synchronize(self) -> None:
        _call("cuStreamSynchronize")
        self._stream.synchronize()

    def is_done(self) -> bool:
        _call("cuStreamQuery")
        return self._stream.is_done()

    def wait_for_event(self, evt: "Event") -> None:
        _call("cuStreamWaitEvent")
        self._stream.wait_for(evt._event)

    def __del__(self) -> None:
        if hasattr(self, "_stream") and self._may_clean_up("stream"):
            machine().destroy_stream(self.handle)


class Event(_Owned):
    def __init__(self, flags: int = 0) -> None:
        _call("cuEventCreate")
        super().__init__()
        self._event = machine().new_event(timing=not int(flags) & event_flags.DISABLE_TIMING)

    def record(self, stream: "Stream | None" = None) -> "Event":
        _call("cuEventRecord")
        self._event.record(_stream(stream))
        return self

    def synchronize(self) -> "Event":
        _call("cuEventSynchronize")
        self._event.synchronize()
        return self

    def query(self) -> bool:
        _call("cuEventQuery")
        return self._event.query()

    def time_since(self, event: "Event") -> float:
        _call("cuEventElapsedTime")
        marks = [event._event.mark, self._event.mark]
        if not (event._event.timing and self._event.timing) or None in marks:
            raise LogicError("cuEventElapsedTime failed: invalid resource handle")
        if not all(mark.done for mark in marks):
            raise RuntimeError("cuEventElapsedTime failed: device not ready")
        return (marks[1].finished_at - marks[0].finished_at) * 1e3

    def time_till(self, event: "Event") -> float:
        return event.time_since(self)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._may_clean_up("event")


def _stream(stream: Stream | None):
    if stream is not None and not isinstance(stream, Stream):
        raise TypeError("stream must be a pycuda.driver.Stream")
    return machine().stream(0 if stream is None else stream.handle)


# Memory


def _allocate(name: str, nbytes: int, kind: str) -> Allocation:
    _call(name)
    if nbytes <= 0:
        raise LogicError(f"{name} failed: invalid argument")
    try:
        return machine().allocation(machine().allocate(nbytes, kind))
    except OutOfMemory:
        raise MemoryError(f"{name} failed: out of memory") from None


class _Freed(_Owned):
    def __init__(self, allocation: Allocation) -> None:
        super().__init__()
        self._allocation: Allocation | None = allocation

    def free(self) -> None:
        if self._allocation is None:
            raise LogicError("device_allocation::free failed: invalid resource handle")
        allocation, self._allocation = self._allocation, None
        if self._may_clean_up(type(self).__name__):
            machine().free(allocation.address)

    def __del__(self) -> None:
        if getattr(self, "_allocation", None) is not None:
            self.free()


class DeviceAllocation(_Freed):
    def __init__(self, allocation: Allocation) -> None:
        super().__init__(allocation)
        self._address = allocation.address

    def __int__(self) -> int:
        return self._address

    __index__ = __int__


class PagelockedHostAllocation(_Freed):
    def __init__(self, allocation: Allocation, flags: int) -> None:
        super().__init__(allocation)
        self._flags = flags

    def get_device_pointer(self) -> int:
        _call("cuMemHostGetDevicePointer")
        if self._allocation is None or not self._flags & host_alloc_flags.DEVICEMAP:
            raise LogicError("cuMemHostGetDevicePointer failed: invalid argument")
        return self._allocation.address

    def get_flags(self) -> int:
        return self._flags


HostAllocation = PagelockedHostAllocation


class ManagedAllocation(DeviceAllocation):
    def get_device_pointer(self) -> int:
        return self._address

    def attach(self, mem_flags: int, stream: Stream | None = None) -> None:
        _call("cuStreamAttachMemAsync")


class _Based(np.ndarray):
    """numpy lets no Python code set `base`; PyCUDA sets it to the allocation."""

    _base: _Freed | None = None

    @property
    def base(self):
        return self._base if self._base is not None else super().base


def mem_get_info() -> tuple[int, int]:
    _call("cuMemGetInfo")
    return machine().memory_info()


def mem_alloc(bytes: int) -> DeviceAllocation:
    return DeviceAllocation(_allocate("cuMemAlloc", bytes, "device"))


def _empty(owner: _Freed, allocation: Allocation, shape, dtype, order) -> np.ndarray:
    array = allocation.memory.view(dtype).reshape(shape, order=order).view(_Based)
    array._base = owner
    return array


def _nbytes(shape, dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def pagelocked_empty(shape, dtype, order="C", mem_flags=0):
    allocation = _allocate("cuMemHostAlloc", _nbytes(shape, dtype), "pinned")
    return _empty(PagelockedHostAllocation(allocation, mem_flags), allocation, shape, dtype, order)


def pagelocked_zeros(shape, dtype, order="C", mem_flags=0):
    result = pagelocked_empty(shape, dtype, order, mem_flags)
    result.fill(0)
    return result


def managed_empty(shape, dtype, order="C", mem_flags=0):
    if mem_flags not in (mem_attach_flags.GLOBAL, mem_attach_flags.HOST):
        raise LogicError("cuMemAllocManaged failed: invalid argument")
    allocation = _allocate("cuMemAllocManaged", _nbytes(shape, dtype), "managed")
    return _empty(ManagedAllocation(allocation), allocation, shape, dtype, order)


def managed_zeros(shape, dtype, order="C", mem_flags=0):
    result = managed_empty(shape, dtype, order, mem_flags)
    result.fill(0)
    return result


# Copies


def _host(buffer, writable: bool) -> np.ndarray:
    view = memoryview(buffer)
    if not view.contiguous:
        raise BufferError("buffer is not contiguous")
    if writable and view.readonly:
        raise BufferError("Object is not writable.")
    return np.frombuffer(view.cast("B"), np.uint8)


def _pinned(array: np.ndarray, what: str) -> np.ndarray:
    """The same bytes without a reference to the object that was passed: real copies keep none either."""
    address, nbytes = array.ctypes.data, array.nbytes
    if not machine().is_pinned(address, nbytes):
        machine().fault(f"{what} of host memory that is not pinned: it would not be asynchronous")
    return machine().host_view(address, nbytes)


def _write(stream: Stream | None, what: str, dest: int, nbytes: int, source, uses) -> None:
    machine().view(int(dest), nbytes)

    def run() -> None:
        machine().view(int(dest), nbytes)[:] = source()

    _stream(stream).enqueue(run, what, [(int(dest), nbytes), *uses])


def memcpy_htod(dest, src) -> None:
    _call("cuMemcpyHtoD")
    host = _host(src, writable=False)
    pinned = machine().is_pinned(host.ctypes.data, host.nbytes)
    staged = host.copy()
    _write(None, "memcpy_htod", dest, host.nbytes, lambda: staged, [])
    if pinned:
        machine().stream(0).finish()


def memcpy_htod_async(dest, src, stream: Stream | None = None) -> None:
    _call("cuMemcpyHtoDAsync")
    host = _pinned(_host(src, writable=False), "memcpy_htod_async")
    _write(stream, "memcpy_htod_async", dest, host.nbytes, lambda: host, [(host.ctypes.data, host.nbytes)])


def memcpy_dtoh(dest, src) -> None:
    _call("cuMemcpyDtoH")
    host = _host(dest, writable=True)
    machine().view(int(src), host.nbytes)

    def run() -> None:
        host[:] = machine().view(int(src), host.nbytes)

    machine().stream(0).enqueue(run, "memcpy_dtoh", [(int(src), host.nbytes)])
    machine().stream(0).finish()


def memcpy_dtoh_async(dest, src, stream: Stream | None = None) -> None:
    _call("cuMemcpyDtoHAsync")
    host = _pinned(_host(dest, writable=True), "memcpy_dtoh_async")
    machine().view(int(src), host.nbytes)

    def run() -> None:
        host[:] = machine().view(int(src), host.nbytes)

    uses = [(int(src), host.nbytes), (host.ctypes.data, host.nbytes)]
    _stream(stream).enqueue(run, "memcpy_dtoh_async", uses)


def memcpy_dtod(dest, src, size: int) -> None:
    memcpy_dtod_async(dest, src, size)


def memcpy_dtod_async(dest, src, size: int, stream: Stream | None = None) -> None:
    _call("cuMemcpyDtoDAsync")
    machine().view(int(src), size)
    _write(stream, "memcpy_dtod_async", dest, size, lambda: machine().view(int(src), size).copy(), [(int(src), size)])


def memset_d8(dest, data: int, size: int) -> None:
    memset_d8_async(dest, data, size)


def memset_d8_async(dest, data: int, size: int, stream: Stream | None = None) -> None:
    _call("cuMemsetD8Async")
    _write(stream, "memset_d8_async", dest, size, lambda: data, [])


def memset_d32(dest, data: int, size: int) -> None:
    memset_d32_async(dest, data, size)


def memset_d32_async(dest, data: int, size: int, stream: Stream | None = None) -> None:
    _call("cuMemsetD32Async")
    _write(stream, "memset_d32_async", dest, 4 * size, lambda: np.full(size, data, np.uint32).view(np.uint8), [])
