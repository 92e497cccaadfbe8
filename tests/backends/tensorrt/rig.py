"""A chain's loader and executor over the emulated GPU, with copies in the place of engines."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.emulation.install import installed
from tests.runtime.test_loader import Blocks, Store
from trt_layering.backends.tensorrt.cuda import Device
from trt_layering.backends.tensorrt.memory import Placement, make_arena
from trt_layering.runtime.loader import Loader, LoaderOptions
from trt_layering.store.reader import WeightFile


@contextmanager
def emulated(**switches: str) -> Iterator[tuple[Device, Any]]:
    """A device on the emulated machine; on leaving, nothing may be misused or left."""
    with installed(**switches) as machine:
        device = Device()
        try:
            yield device, machine
        finally:
            device.close()
        machine.assert_clean()


class Uneven:
    """Lets reads end out of order, after having filled their buffer with rubbish."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        buffers[0][:] = b"\xee" * len(buffers[0])
        for _ in range(self._random.choice((0, 3, 30))):
            os.sched_yield()
        return os.preadv(descriptor, buffers, offset)


class Rig:
    """Executes blocks by copying their bytes out of the arena on the compute stream, one block ahead, and compares."""

    def __init__(
        self, device: Device, store: Store, blocks: Blocks, arena: int | None, placement: Placement,
        options: LoaderOptions, preadv: Any = os.preadv,
    ) -> None:  # fmt: skip
        self.device, self.store, self.blocks = device, store, blocks
        self.schedule = store.schedule(blocks, arena, options.read_bytes)
        self.arena = make_arena(
            placement, device, self.schedule.arena_bytes, len(blocks), options.parallel_reads, options.read_bytes
        )
        self.wanted = [store.content(block) for block in blocks]
        largest = max(map(len, self.wanted))
        self.seen = [device.pinned(largest, "a test") for _ in range(2)]
        self.marks = [device.event() for _ in range(2)]
        self.file = WeightFile(store.path, direct="never", preadv=preadv)
        self.loader = Loader(self.schedule, store.extents, self.arena, self.file, options)
        self.unfinished: list[int] = []

    def sweep(self, first: int) -> None:
        """One sweep from block number `first` on, as a chain makes it."""
        try:
            for g in range(first, first + len(self.blocks)):
                if not self.loader.has_loaded(g):
                    self._finish_all()
                self.loader.wait_loaded(g)
                self._execute(g)
                if len(self.unfinished) > 1:
                    self._finish()
            self._finish_all()
        except BaseException:
            self.unfinished.clear()
            self.device.compute.synchronize()
            self.loader.abandon(first + len(self.blocks))
            raise

    def _execute(self, g: int) -> None:
        block = g % len(self.blocks)
        self.arena.arrive(block)
        weight = self.arena.weight(self.schedule.offsets[block], "uint8", (len(self.wanted[block]),))
        seen = self.seen[g % 2].memory[: weight.nbytes]
        if weight.location == "device":
            self.device.download(seen, weight.address, self.device.compute)
        else:
            seen[:] = self.arena.view(self.schedule.offsets[block], weight.nbytes)
        self.marks[g % 2].record(self.device.compute)
        self.unfinished.append(g)

    def _finish_all(self) -> None:
        while self.unfinished:
            self._finish()

    def _finish(self) -> None:
        g = self.unfinished.pop(0)
        self.marks[g % 2].wait()
        wanted = self.wanted[g % len(self.blocks)]
        assert bytes(self.seen[g % 2].memory[: len(wanted)]) == wanted, f"block {g} does not find its bytes"
        self.loader.finish(g)

    def close(self) -> None:
        self.loader.stop()
        self.arena.close()
        self.file.close()


@contextmanager
def streaming(device: Device, machine: Any, *what: Any, **more: Any) -> Iterator[Rig]:
    """A `Rig` whose loader runs; nothing may be allocated until it ends."""
    rig = Rig(device, *what, **more)
    machine.no_more_allocations = True
    rig.loader.start()
    try:
        yield rig
    finally:
        machine.no_more_allocations = False
        rig.close()
