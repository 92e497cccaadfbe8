"""The pipeline in numbers: how long a sweep takes under a schedule. Pure; imports nothing but types.

It steps the very waits the loader and the executor follow, so prediction and execution cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trt_layering.schedule.residency import Schedule

_SWEEPS = 3


def sweep_time(schedule: Schedule, execute: Sequence[float], byte_time: float) -> float:
    """Time of one sweep once sweeps follow each other without a pause.

    `execute[b]` is the time block `b` executes and `byte_time` that to read one byte, in any one unit; the result is in
    the same unit. Reads follow one another at the drive's rate; each waits for the blocks it overwrites.
    """
    blocks = len(schedule.offsets)
    finished = [0.0] * (blocks * _SWEEPS)
    drive = 0.0
    for g in range(len(finished)):
        sweep, block = divmod(g, blocks)
        for read in schedule.reads[block]:
            if read.once and sweep:
                continue
            before = g - read.lag - 1
            drive = max(drive, finished[before] if before >= 0 else 0.0) + read.length * byte_time
        arrived = drive if schedule.reads[block] else 0.0
        finished[g] = max(finished[g - 1] if g else 0.0, arrived) + execute[block]
    return finished[-1] - finished[-1 - blocks]
