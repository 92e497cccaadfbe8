"""The part "cuda": what needs CUDA but not TensorRT, with PyCUDA alone. Each method named `check_*` is a check.

Imports the package, and PyCUDA by way of `cuda.Device`. A check returns numbers or raises: Wrong, or what it met.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from tests.gpu import stages
from tests.gpu.report import Numbers, Part, Wrong, carry_out
from trt_layering.backends.tensorrt import placement
from trt_layering.backends.tensorrt.cuda import PAGE, Device, HostMemory
from trt_layering.backends.tensorrt.memory import Placement, StagedArena, make_arena, staging_size
from trt_layering.errors import MemoryLimitError
from trt_layering.runtime.loader import LoaderOptions

_GRANULE = 2 << 20  # in which drivers give memory
_MOST_WORK = 2000


@dataclass(frozen=True)
class Sizes:
    """How much is moved: `copied` bytes at a time, `blocks` blocks of `block_bytes`, read in pieces of `read_size`."""

    copied: int
    blocks: int
    block_bytes: int
    read_size: int


FULL = Sizes(64 << 20, 16, 16 << 20, 4 << 20)
SMALL = Sizes(1 << 20, 6, 64 << 10, 16 << 10)


def part(device: Device, folder: Path, sizes: Sizes, emulated: bool, say: Callable[[str], None]) -> Part:
    """Carry out every check on `device`; files go to `folder`. Nothing stays allocated."""
    checks = CudaChecks(device, folder, sizes, emulated)
    return carry_out("cuda", [(title, getattr(checks, name)) for name, title in titles().items()], say)


def titles() -> dict[str, str]:
    """The checks' methods and what they are called, in order."""
    names = [name for name in vars(CudaChecks) if name.startswith("check_")]
    return {name: name.removeprefix("check_").replace("_", " ") for name in names}


class CudaChecks:
    """The checks, and what they share."""

    def __init__(self, device: Device, folder: Path, sizes: Sizes, emulated: bool) -> None:
        self._device, self._folder, self._sizes, self._emulated = device, folder, sizes, emulated
        self._options = LoaderOptions(threads=2, read_size=sizes.read_size, verify="never")

    def _placements(self) -> list[Placement]:
        found: list[Placement] = ["staged", "zero-copy", "pinned"]
        return [*found, "managed"] if self._device.shares_managed_memory else found

    def _random(self, nbytes: int) -> bytes:
        return np.random.default_rng(1).bytes(nbytes)

    def check_memory_of_every_kind(self) -> Numbers:
        """Bytes go to the device and back by way of each kind of memory; host memory begins at a page."""
        data = self._random(self._sizes.read_size)
        memory = self._device.allocate(len(data), "a check")
        hosts = [self._device.pinned(len(data), "a check"), self._device.mapped(len(data), "a check")]
        hosts += [self._device.managed(len(data), "a check")] if self._device.shares_managed_memory else []
        for host in hosts:
            self._there_and_back(host, memory.address, data)
            host.free()
        memory.free()
        return {"kinds": len(hosts) + 1}

    def _there_and_back(self, host: HostMemory, address: int, data: bytes) -> None:
        if host.host_address % PAGE:
            raise Wrong(f"host memory begins at {host.host_address:#x}, not at a page")
        host.memory[:] = data
        self._device.upload(address, host.memory, self._device.copy)
        self._device.copy.synchronize()
        host.memory[:] = bytes(len(data))
        self._device.download(host.memory, address, self._device.copy)
        self._device.copy.synchronize()
        if bytes(host.memory) != data:
            raise Wrong("bytes that went to the device and back are not what they were")
        if host.address:
            self._device.copy_within(host.address, address, len(data), self._device.compute)
            self._device.compute.synchronize()
            if bytes(host.memory) != data:
                raise Wrong("what the device writes to mapped memory is not what the host finds there")

    def check_direct_reads_into_pinned_memory(self) -> Numbers:
        """Whether a file system and a driver agree on reads past the page cache into pinned and mapped memory; that
        they do not is no fault, but slower."""
        path = self._folder / "direct"
        path.write_bytes(self._random(self._sizes.read_size))
        numbers: Numbers = {}
        for name, make in (("pinned", self._device.pinned), ("mapped", self._device.mapped)):
            host = make(self._sizes.read_size, "a check")
            numbers[f"{name}_error"] = self._direct_read(path, host)
            if numbers[f"{name}_error"] is None and bytes(host.memory) != path.read_bytes():
                raise Wrong(f"a direct read into {name} memory brought other bytes")
            host.free()
        path.unlink()
        return numbers

    def _direct_read(self, path: Path, host: HostMemory) -> str | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return f"open: {errno.errorcode.get(error.errno or 0, error.errno)}"
        try:
            os.preadv(descriptor, [host.memory], 0)
        except OSError as error:
            return f"read: {errno.errorcode.get(error.errno or 0, error.errno)}"
        finally:
            os.close(descriptor)
        return None

    def check_copies(self) -> Numbers:
        """Bandwidths: to the device, from it, and within it (which reads and writes)."""
        size, device = self._sizes.copied, self._device
        host, memory = device.pinned(size, "a check"), device.allocate(2 * size, "a check")
        first, second = memory.address, memory.address + size
        host.memory[:] = bytes(size)
        numbers = {
            "to_device_bytes_per_second": self._rate(lambda: device.upload(first, host.memory, device.copy)),
            "from_device_bytes_per_second": self._rate(lambda: device.download(host.memory, first, device.copy)),
            "within_device_bytes_per_second": self._rate(lambda: device.copy_within(second, first, size, device.copy)),
        }
        host.free()
        memory.free()
        return numbers

    def _rate(self, ask: Callable[[], None]) -> float:
        begin, end = self._device.timed_event(), self._device.timed_event()
        times = []
        for _ in range(6):
            begin.record(self._device.copy)
            ask()
            end.record(self._device.copy)
            end.wait()
            times.append(end.seconds_since(begin))
        begin.free()
        end.free()
        return self._sizes.copied / max(median(times[1:]), 1e-9)

    def check_events_order_the_streams(self) -> Numbers:
        """Two streams take turns at the same bytes, kept in order by events alone."""
        device, size, turns = self._device, self._sizes.copied, 50
        memory, host = device.allocate(2 * size, "a check"), device.pinned(size, "a check")
        events = [device.event(), device.event()]
        for turn in range(turns):
            device.fill(memory.address, turn, size, device.copy)
            events[0].record(device.copy)
            device.compute.wait(events[0])
            device.copy_within(memory.address + size, memory.address, size, device.compute)
            events[1].record(device.compute)
            device.copy.wait(events[1])
            device.download(host.memory, memory.address + size, device.copy)
            device.copy.synchronize()
            if np.frombuffer(host.memory, np.uint8).tobytes() != bytes([turn]) * size:
                raise Wrong(f"turn {turn} found the bytes of another")
        for owned in (memory, host, *events):
            owned.free()
        return {"turns": turns, "wait_seconds": self._wait_seconds()}

    def _wait_seconds(self) -> float:
        event, begin = self._device.event(), time.perf_counter()
        for _ in range(100):
            event.record(self._device.compute)
            event.wait()
        event.free()
        return (time.perf_counter() - begin) / 100

    def check_threads(self) -> Numbers:
        """Threads use the device at once and end without harm."""
        failed: list[BaseException] = []

        def use() -> None:
            try:
                for _ in range(20):
                    self._device.allocate(PAGE, "a check").free()
                    self._device.event().free()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return {"threads": len(threads)}

    def check_memory_against_the_driver(self) -> Numbers:
        """What an arena is accounted with is what the driver has less afterwards, and has again in the end."""
        size, threads = 4 * self._sizes.copied, 2
        before = self._device.memory_info()[0]
        arena = make_arena("staged", self._device, size, 4, threads, self._sizes.read_size)
        taken = before - self._device.memory_info()[0]
        arena.close()
        left = before - self._device.memory_info()[0]
        wanted = size + (staging_size("staged", threads, self._sizes.read_size) if self._device.integrated else 0)
        numbers = {"accounted_bytes": wanted, "taken_bytes": taken, "left_bytes": left}
        if not self._device.integrated and abs(taken - wanted) > 4 * _GRANULE:
            raise Wrong(f"an arena accounted with {wanted} bytes took {taken}")
        if not self._device.integrated and abs(left) > 4 * _GRANULE:
            raise Wrong(f"{left} bytes were not given back")
        return numbers

    def check_too_much_memory_is_refused(self) -> Numbers:
        """An allocation beyond what there is raises our error in words, and the device serves on."""
        size = 2 * self._device.total_bytes
        try:
            StagedArena(self._device, size, 1, 1, PAGE)
        except MemoryLimitError as error:
            self.check_threads()
            return {"asked_bytes": size, "said": error.what}
        raise Wrong(f"the driver gave {size} bytes, twice what there is")

    def check_three_stages(self) -> Numbers:
        """Read, copy, execute: every block finds its bytes, in each kind of arena."""
        with stages.sample(self._folder, self._sizes.blocks, self._sizes.block_bytes) as sample:
            for kind in self._placements():
                if kind != "pinned":
                    with stages.running(self._device, sample, kind, self._options, work=1) as running:
                        for _ in range(3):
                            running.compare()
            checked = LoaderOptions(threads=2, read_size=self._sizes.read_size, verify="always")
            with stages.running(self._device, sample, "staged", checked, work=1) as running:
                running.compare()
                return {"streamed_bytes": sample.nbytes, "direct": running.direct}

    def check_overlap(self) -> Numbers:
        """How much of reading, copying and executing goes on at the same time, with about as much of the third as of
        the first."""
        with stages.sample(self._folder, self._sizes.blocks, self._sizes.block_bytes) as sample:
            read = median(stages.read_only(sample, self._options, self._device) for _ in range(3))
            copy = median(stages.copy_only(sample, self._sizes.read_size, self._device) for _ in range(3))
            with stages.running(self._device, sample, "staged", self._options, work=1) as one:
                one.sweep()
                single = median(self._executing(one) for _ in range(3))
            work = min(_MOST_WORK, max(1, round(read / max(single, 1e-9))))
            with stages.running(self._device, sample, "staged", self._options, work) as running:
                running.sweep()
                sweep = median(running.sweep() for _ in range(5))
                execute = median(self._executing(running) for _ in range(3))
        numbers = {"read_seconds": read, "copy_seconds": copy, "execute_seconds": execute, "sweep_seconds": sweep}
        numbers |= {"streamed_bytes": sample.nbytes, "work": work}
        if not self._emulated and sweep > 0.95 * (read + copy + execute):
            raise Wrong(f"nothing overlaps: {numbers}")
        return numbers

    def _executing(self, running: stages.Stages) -> float:
        running.loader.settle()
        return running.execute_only()

    def check_placements(self) -> Numbers:
        """Which placement is quickest here."""
        results = placement.measure(self._device, min(placement.SAMPLE, 4 * self._sizes.copied))
        found = {result.placement: {"seconds": result.seconds, "words": result.words} for result in results}
        return {"chosen": placement.choose(results), "placements": found}
