"""The three stages, read, copy and execute, with the real loader and arenas, and copies in the place of engines.

Imports the package and numpy; PyCUDA through `cuda.Device`. Fails as they do; wrong bytes raise Wrong.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tests.gpu.report import Wrong
from trt_layering.backends.tensorrt.cuda import Device
from trt_layering.backends.tensorrt.memory import Placement, make_arena
from trt_layering.runtime.loader import Loader, LoaderOptions
from trt_layering.schedule.partition import Partition, Piece
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import best_choice
from trt_layering.store.manifest import WEIGHTS_FILE, Extent
from trt_layering.store.reader import WeightFile
from trt_layering.store.writer import StoreWriter

_BLOCKS_IN_ARENA = 3


@dataclass(frozen=True)
class Sample:
    """A weight store of blocks of one size, with what each of them holds, as a digest."""

    path: Path
    extents: tuple[Extent, ...]
    digests: tuple[bytes, ...]

    @property
    def block_bytes(self) -> int:
        return self.extents[0].length

    @property
    def nbytes(self) -> int:
        return sum(extent.length for extent in self.extents)


@contextmanager
def sample(folder: Path, blocks: int, block_bytes: int) -> Iterator[Sample]:
    """A store in `folder`, removed in the end."""
    digests = []
    with StoreWriter(folder, "gpu-check") as writer:
        for index in range(blocks):
            data = np.random.default_rng(index).bytes(block_bytes)
            digests.append(xxhash.xxh3_128_digest(data))
            writer.add_extent([(f"w{index}", "uint8", (block_bytes,), lambda data=data: [data])])
        yield Sample(writer.folder / WEIGHTS_FILE, writer.extents, tuple(digests))


class Stages:
    """An open loader, arena and executor. `work` says how often a block's bytes are copied within the GPU while it
    executes."""

    def __init__(self, device: Device, found: Sample, placement: Placement, options: LoaderOptions, work: int) -> None:
        self._device, self._sample, self._work = device, found, work
        self._count = len(found.extents)
        pieces = tuple(Piece(n, 1, ((n, extent.length),), 1e-3) for n, extent in enumerate(found.extents))
        partition = Partition(pieces)
        choice = best_choice(partition, _BLOCKS_IN_ARENA * found.block_bytes, Pace(1e-9))
        self._schedule = choice.schedule(partition.pieces, options.read_bytes)
        self.arena = make_arena(
            placement, device, self._schedule.arena_bytes, self._count, options.parallel_reads, options.read_bytes
        )
        self._executed = device.allocate(found.block_bytes, "the stand-in for engines")
        self._seen = device.pinned(found.block_bytes, "comparing")
        self._marks = [device.event() for _ in range(2)]
        self._file = WeightFile(found.path)
        self.loader = Loader(self._schedule, found.extents, self.arena, self._file, options)
        self.direct = self._file.direct
        self._unfinished: list[int] = []
        self._next = 0
        self.loader.start()

    def sweep(self) -> float:
        """Every block once, one ahead; the seconds it took."""
        begin = time.perf_counter()
        for g in range(self._next, self._next + self._count):
            if not self.loader.has_loaded(g):
                self._finish_all()
            self.loader.wait_loaded(g)
            self._execute(g)
            if len(self._unfinished) > 1:
                self._finish()
        self._finish_all()
        self._next += self._count
        return time.perf_counter() - begin

    def compare(self) -> None:
        """A sweep that looks at what each block finds. Raises Wrong."""
        for g in range(self._next, self._next + self._count):
            self.loader.wait_loaded(g)
            self._execute(g)
            self._device.download(self._seen.memory, self._executed.address, self._device.compute)
            self._finish_all()
            self._device.compute.synchronize()
            if xxhash.xxh3_128_digest(self._seen.memory) != self._sample.digests[g % self._count]:
                raise Wrong(f"block {g % self._count} did not find its bytes in sweep {g // self._count}")
        self._next += self._count

    def execute_only(self) -> float:
        """Seconds that executing takes without reading or copying, over what lies in the arena."""
        begin = time.perf_counter()
        for g in range(self._count):
            self._ask(g)
        self._device.compute.synchronize()
        return time.perf_counter() - begin

    def _ask(self, g: int) -> None:
        weight = self.arena.weight(self._schedule.offsets[g % self._count], "uint8", (self._sample.block_bytes,))
        for _ in range(self._work):
            self._device.copy_within(self._executed.address, weight.address, weight.nbytes, self._device.compute)

    def _execute(self, g: int) -> None:
        self.arena.arrive(g % self._count)
        self._ask(g)
        self._marks[g % 2].record(self._device.compute)
        self._unfinished.append(g)

    def _finish_all(self) -> None:
        while self._unfinished:
            self._finish()

    def _finish(self) -> None:
        g = self._unfinished.pop(0)
        self._marks[g % 2].wait()
        self.loader.finish(g)

    def close(self) -> None:
        self.loader.stop()
        self.arena.close()
        self._file.close()
        for owned in (self._executed, self._seen, *self._marks):
            owned.free()


@contextmanager
def running(device: Device, found: Sample, placement: Placement, options: LoaderOptions, work: int) -> Iterator[Stages]:
    """Stages, closed in the end."""
    stages = Stages(device, found, placement, options, work)
    try:
        yield stages
    finally:
        stages.close()


def read_only(found: Sample, options: LoaderOptions, device: Device) -> float:
    """Seconds that reading every block into pinned memory takes, by as many threads as the loader has."""
    from concurrent.futures import ThreadPoolExecutor

    threads, size = options.parallel_reads, options.read_bytes
    memory = device.pinned(threads * size, "reading")
    file = WeightFile(found.path)
    spans = [(e.offset + at, min(size, e.length - at)) for e in found.extents for at in range(0, e.length, size)]

    def read(thread: int) -> None:
        for offset, length in spans[thread::threads]:
            file.read_into(memory.memory[thread * size : thread * size + length], offset)

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
    seconds = time.perf_counter() - begin
    file.close()
    memory.free()
    return seconds


def copy_only(found: Sample, size: int, device: Device) -> float:
    """Seconds that copying as many bytes to the device takes, in pieces of `size`."""
    pinned, memory = device.pinned(size, "copying"), device.allocate(size, "copying")
    device.upload(memory.address, pinned.memory, device.copy)
    device.copy.synchronize()
    begin = time.perf_counter()
    for _ in range(-(-found.nbytes // size)):
        device.upload(memory.address, pinned.memory, device.copy)
    device.copy.synchronize()
    seconds = time.perf_counter() - begin
    pinned.free()
    memory.free()
    return seconds
