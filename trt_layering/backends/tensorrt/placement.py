"""Which memory weights are best streamed through on this GPU, found by streaming some bytes through each kind.

May import errors, units, `base`, `cuda` and `memory`. A placement that the GPU refuses is a result with the reason,
no error; a GPU that fails raises BackendError.

A pass does what a sweep does, without a drive and without engines: the processor writes pieces to where reads would
land, the pieces are put, and the GPU then reads all of the weights, once, which stands for executing. Engines read
weights once or more, so zero-copy, which the GPU does not cache, is at its best here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trt_layering.backends.base import Arena
from trt_layering.backends.tensorrt.cuda import Device, DeviceMemory, Event
from trt_layering.backends.tensorrt.memory import Placement, Weight, make_arena
from trt_layering.errors import MemoryLimitError
from trt_layering.units import format_rate, format_seconds

SAMPLE = 32 << 20
READ_SIZE = 4 << 20
ROUNDS = 5
CANDIDATES: tuple[Placement, ...] = ("staged", "zero-copy", "managed")
_BLOCKS = 2


@dataclass(frozen=True)
class Result:
    """What one placement came to: seconds for a pass over `nbytes`, None where it cannot be used, and why in words."""

    placement: Placement
    seconds: float | None
    nbytes: int
    words: str


def measure(device: Device, nbytes: int = SAMPLE, rounds: int = ROUNDS) -> list[Result]:
    """A result for each placement that makes sense on `device`, which nothing else should use meanwhile.

    Takes `nbytes` twice over and the staging, and gives it back. On a GPU with memory of its own there is nothing to
    measure. MemoryLimitError where there is no room even for the first placement.
    """
    if not device.integrated:
        words = "a GPU with memory of its own: weights are read from there, and staged is the only way to bring them"
        return [Result("staged", None, nbytes, words)]
    return [_measured(device, placement, nbytes, rounds) for placement in CANDIDATES]


def choose(results: Sequence[Result]) -> Placement:
    """The quickest; the first where none was measured."""
    measured = [result for result in results if result.seconds is not None]
    if not measured:
        return results[0].placement
    return min(measured, key=lambda result: result.seconds or 0.0).placement


def _measured(device: Device, placement: Placement, nbytes: int, rounds: int) -> Result:
    if placement == "managed" and not device.shares_managed_memory:
        return Result(placement, None, nbytes, "processor and GPU cannot use managed memory at the same time here")
    try:
        seconds = median(_passes(device, placement, nbytes, rounds))
    except MemoryLimitError as error:
        if placement == CANDIDATES[0]:
            raise
        return Result(placement, None, nbytes, error.what)
    words = f"{format_seconds(seconds)} for a pass, {format_rate(nbytes / max(seconds, 1e-9))}"
    return Result(placement, seconds, nbytes, words)


def _passes(device: Device, placement: Placement, nbytes: int, rounds: int) -> list[float]:
    arena = make_arena(placement, device, nbytes, _BLOCKS, threads=1, read_size=READ_SIZE)
    try:
        read = device.allocate(nbytes, "measuring placements")
        done = device.event()
        times = [_pass(device, arena, read, done) for _ in range(rounds + 1)]
        read.free()
        done.free()
        return times[1:]  # the first touches the memory
    finally:
        arena.close()


def _pass(device: Device, arena: Arena, read: DeviceMemory, done: Event) -> float:
    source = memoryview(bytes(READ_SIZE))
    begin = time.perf_counter()
    for block in range(_BLOCKS):
        first, end = arena.size * block // _BLOCKS, arena.size * (block + 1) // _BLOCKS
        for target in range(first, end, READ_SIZE):
            length = min(READ_SIZE, end - target)
            landing = arena.landing(0, target, length)
            landing.memory[:] = source[:length]
            landing.put()
        arena.publish(block)
        arena.arrive(block)
        weights: Weight = arena.weight(first, "uint8", (end - first,))
        device.copy_within(read.address + first, weights.address, weights.nbytes, device.compute)
    done.record(device.compute)
    done.wait()
    return time.perf_counter() - begin
