"""The memory that streamed weights pass through on a GPU: four kinds of `backends.base.Arena`.

May import errors, units, the manifest and `cuda`. What the GPU refuses raises BackendError; memory that it does not
give, MemoryLimitError.

staged: device memory; reads land in pinned slots, two for each loader thread, and the copy stream brings them over.
zero-copy: pinned host memory that the GPU reads where it lies. managed: memory of both. pinned: host memory for plans,
which the GPU never reads (`swap`). Into all but the first, reads go straight.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trt_layering.backends.tensorrt.cuda import PAGE, Device, Event, HostMemory
from trt_layering.errors import BackendError
from trt_layering.store.manifest import tensor_nbytes
from trt_layering.units import format_size

Placement = Literal["staged", "zero-copy", "managed", "pinned"]
Location = Literal["device", "host"]

_SLOTS = 2  # of each loader thread: it reads into one while the other is copied


@dataclass(frozen=True)
class Weight:
    """Where a weight lies, for engines. `address` is the device's or the host's, as `location` says; the bytes there
    are the arena's and hold the weight only while its block is there."""

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    location: Location


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a weight. BackendError for a dtype that the manifest does not know."""
    nbytes = tensor_nbytes(dtype, shape)
    if nbytes is None:
        raise BackendError(f"weights of {dtype} are unknown here", remedy="build the chain anew with this version")
    return nbytes


def staging_size(placement: Placement, threads: int, read_size: int) -> int:
    """Pinned bytes that an arena takes beside its own: the slots, and one for checksums."""
    return (_SLOTS * threads + 1) * read_size + 2 * PAGE if placement == "staged" else 0


class _Slot:
    """Pinned memory for one read, and the event of the last copy out of it."""

    def __init__(self, memory: memoryview, copied: Event) -> None:
        self.memory, self.copied = memory, copied


@dataclass(frozen=True)
class _Staged:
    """A read on its way: see `backends.base.Landing`."""

    memory: memoryview
    arena: StagedArena
    slot: _Slot
    target: int

    def put(self) -> None:
        """Have it copied to its place, after all copies asked for before."""
        self.arena.copy_in(self)


class StagedArena:
    """Device memory, filled by way of pinned slots.

    Reads may begin before their place is free: they land in a slot of their thread. Copies go to the device's copy
    stream in the order of `put`; a slot is used again once the copy out of it is done. Engines wait on the compute
    stream, not here. Everything is allocated at once, at open.
    """

    staged = True

    def __init__(self, device: Device, size: int, blocks: int, threads: int, read_size: int) -> None:
        self.size = size
        self._device, self._read_size = device, read_size
        self._memory = device.allocate(size, "the arena")
        staging = device.pinned(_SLOTS * threads * read_size, "the staging of reads")
        self._returning = device.pinned(read_size, "checking what was read")
        self._pinned = [staging, self._returning]
        views = (staging.memory[n * read_size : (n + 1) * read_size] for n in range(_SLOTS * threads))
        slots = [_Slot(view, device.event()) for view in views]
        self._slots = [itertools.cycle(slots[n : n + _SLOTS]) for n in range(0, len(slots), _SLOTS)]
        self._returned = device.event()
        self._arrived = [device.event() for _ in range(blocks)]
        self._events = [*(slot.copied for slot in slots), self._returned, *self._arrived]
        self._checking = threading.Lock()

    def landing(self, thread: int, target: int, length: int) -> _Staged:
        """The thread's other slot, once the copy out of it is done."""
        if length > self._read_size:
            raise BackendError(
                f"a read of {format_size(length)} does not fit the staging of {format_size(self._read_size)}",
                remedy="report this as a fault",
            )
        slot = next(self._slots[thread])
        slot.copied.wait()
        return _Staged(slot.memory[:length], self, slot, target)

    def copy_in(self, landing: _Staged) -> None:
        """`landing.put`."""
        self._device.upload(self._memory.address + landing.target, landing.memory, self._device.copy)
        landing.slot.copied.record(self._device.copy)

    def publish(self, block: int) -> None:
        """Note in the copy stream that all of the block has been asked for."""
        self._arrived[block % len(self._arrived)].record(self._device.copy)

    def arrive(self, block: int) -> None:
        """Let the compute stream go on only once the block has been copied."""
        self._device.compute.wait(self._arrived[block % len(self._arrived)])

    def pieces(self, target: int, length: int) -> Iterator[memoryview]:
        """The bytes as they are on the device, copied back piece by piece."""
        with self._checking:
            for offset in range(0, length, self._read_size):
                piece = self._returning.memory[: min(self._read_size, length - offset)]
                self._device.download(piece, self._memory.address + target + offset, self._device.copy)
                self._returned.record(self._device.copy)
                self._returned.wait()
                yield piece

    def weight(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Weight:
        """The weight in device memory."""
        return Weight(self._memory.address + offset, size_of(dtype, shape), dtype, shape, "device")

    def close(self) -> None:
        """Wait for copies and what was asked of the GPU, and give everything back. May be called twice."""
        self._device.settle()
        self._memory.free()
        for pinned in self._pinned:
            pinned.free()
        for event in self._events:
            event.free()


@dataclass(frozen=True)
class _InPlace:
    """A read that goes to its place."""

    memory: memoryview

    def put(self) -> None:
        """It is there."""


class _HostArena:
    """Host memory into which reads go straight. What was read before an engine was asked to work is there for it."""

    staged = False
    location: Location = "device"

    def __init__(self, device: Device, memory: HostMemory) -> None:
        self.size = memory.nbytes
        self._device, self._memory = device, memory

    def landing(self, thread: int, target: int, length: int) -> _InPlace:
        """The place itself, whichever thread asks."""
        return _InPlace(self.view(target, length))

    def publish(self, block: int) -> None:
        """What was read is where it belongs."""

    def arrive(self, block: int) -> None:
        """What was read is where it belongs."""

    def pieces(self, target: int, length: int) -> Iterator[memoryview]:
        """All `length` bytes at `target` as one piece."""
        yield self.view(target, length)

    def view(self, offset: int, length: int) -> memoryview:
        """The host's bytes [offset, offset + length); valid until `close`."""
        return self._memory.memory[offset : offset + length]

    def weight(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Weight:
        """The weight where it lies, by the address that its user needs."""
        start = self._memory.address if self.location == "device" else self._memory.host_address
        return Weight(start + offset, size_of(dtype, shape), dtype, shape, self.location)

    def close(self) -> None:
        """Wait for what was asked of the GPU, and give the memory back. May be called twice."""
        self._device.settle()
        self._memory.free()


class ZeroCopyArena(_HostArena):
    """Pinned memory that the GPU reads where it lies, without caching it (Orin)."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__(device, device.mapped(size, "the arena"))


class ManagedArena(_HostArena):
    """Managed memory. BackendError where processor and GPU cannot use it at the same time."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__(device, device.managed(size, "the arena"))


class PinnedArena(_HostArena):
    """Pinned memory for plans, which TensorRT reads on the host (`swap`)."""

    location: Location = "host"

    def __init__(self, device: Device, size: int) -> None:
        super().__init__(device, device.pinned(size, "the arena"))


def make_arena(
    placement: Placement, device: Device, size: int, blocks: int, threads: int, read_size: int
) -> StagedArena | _HostArena:
    """The arena of `size` bytes that `placement` names, for `blocks` blocks, read by `threads` threads in pieces of at
    most `read_size` bytes. MemoryLimitError or BackendError where the GPU does not give it; what it gave until then is
    freed with the device."""
    if placement == "staged":
        return StagedArena(device, size, blocks, threads, read_size)
    kinds = {"zero-copy": ZeroCopyArena, "managed": ManagedArena, "pinned": PinnedArena}
    return kinds[placement](device, size)
