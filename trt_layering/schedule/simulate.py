"""The pipeline in numbers: how long a sweep takes under a schedule. Pure; imports nothing but types.

It steps the very waits the loader and the executor follow, so prediction and execution cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trt_layering.schedule.residency import Schedule

_SWEEPS = 3
_NEVER = float("inf")


@dataclass(frozen=True)
class Pace:
    """How fast a machine is: `byte_time` to read one byte with nothing else going on, in the unit of the blocks'
    execution times; while the drive reads, executing takes `execute_slowdown` times as long, and reading
    `read_slowdown` times as long while a block executes. A read that finds the drive idle takes `first_read` longer:
    nothing else is on its way. One request is at most `read_size` bytes."""

    byte_time: float
    execute_slowdown: float = 1.0
    read_slowdown: float = 1.0
    first_read: float = 0.0
    read_size: int = 4 << 20


def rough_sweep_time(schedule: Schedule, execute: Sequence[float], byte_time: float, first_read: float = 0.0) -> float:
    """`sweep_time` where reading and executing do not slow each other down: quick, for comparing many schedules."""
    blocks = len(schedule.offsets)
    finished = [0.0] * (blocks * _SWEEPS)
    drive = 0.0
    for g in range(len(finished)):
        sweep, block = divmod(g, blocks)
        for read in schedule.reads[block]:
            if read.once and sweep:
                continue
            before = g - read.lag - 1
            if before >= 0 and finished[before] > drive:
                drive = finished[before] + first_read
            drive += read.length * byte_time
        arrived = drive if schedule.reads[block] else 0.0
        finished[g] = max(finished[g - 1] if g else 0.0, arrived) + execute[block]
    return finished[-1] - finished[-1 - blocks]


class _Task(NamedTuple):
    """One read: of block number `g`, not before so many blocks have `finished`, for `time` if nothing executes."""

    g: int
    finished: int
    time: float


def sweep_time(schedule: Schedule, execute: Sequence[float], pace: Pace) -> float:
    """Time of one sweep once sweeps follow each other without a pause.

    `execute[b]` is the time block `b` executes alone; the result is in its unit. Reads follow one another at the
    drive's rate; each waits for the blocks it overwrites, and then costs what a drive that was idle costs; each block
    waits for its reads, and what goes on at the same time slows the other down as `pace` says.
    """
    blocks = len(execute)
    tasks = _tasks(schedule, pace.byte_time)
    task = next(tasks, None)
    reading = task.time if task else 0.0  # left of the current read, and of the current block
    executing = execute[0] if blocks else 0.0
    now, finished, ends = 0.0, 0, [0.0]
    idle_since: float | None = 0.0  # until the read that comes next has begun
    while finished < blocks * _SWEEPS:
        reads = task is not None and finished >= task.finished
        if reads and idle_since is not None:
            reading += pace.first_read if now > idle_since else 0.0
            idle_since = None
        executes = task is None or task.g > finished
        read_pace = pace.read_slowdown if executes else 1.0
        execute_pace = pace.execute_slowdown if reads else 1.0
        step = min(reading * read_pace if reads else _NEVER, executing * execute_pace if executes else _NEVER)
        now += step
        reading_done = reads and reading * read_pace <= step
        executing_done = executes and executing * execute_pace <= step
        reading -= step / read_pace if reads else 0.0
        executing -= step / execute_pace if executes else 0.0
        if reading_done:
            task, idle_since = next(tasks, None), now
            reading = task.time if task else 0.0
        if executing_done:
            finished += 1
            executing = execute[finished % blocks]
            if finished % blocks == 0:
                ends.append(now)
    return ends[-1] - ends[-2] if blocks else 0.0


def _tasks(schedule: Schedule, byte_time: float) -> Iterator[_Task]:
    """All reads in order; endless where something is read in every sweep."""
    blocks = len(schedule.reads)
    sweep = 0
    while sweep == 0 or schedule.streamed_bytes:
        for block, reads in enumerate(schedule.reads):
            g = sweep * blocks + block
            yield from (_Task(g, g - read.lag, read.length * byte_time) for read in reads if not (read.once and sweep))
        sweep += 1
