"""Loader and executor stepped one event at a time over a memory of pages, in any order the waits allow.

It shares nothing with the code it judges but the `Schedule`: bytes are pages that remember what was read into them, a
page that a read is under way to holds rubbish, and a block that executes looks at every page of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trt_layering.schedule.residency import Read, Schedule

PAGE = 4096
Blocks = Sequence[Sequence[tuple[int, int]]]
Page = tuple[int, int] | str
"""What a page holds: (extent, number of the page in it), or a word for rubbish."""


class Task(NamedTuple):
    g: int
    read: Read


def wanted(blocks: Blocks, block: int) -> list[Page]:
    """What a block's pages must hold when it executes."""
    return [(extent, page) for extent, length in blocks[block] for page in range(length // PAGE)]


def tasks(schedule: Schedule, sweeps: int) -> Iterator[Task]:
    """All reads of so many sweeps, in the loader's order."""
    for sweep, (block, reads) in itertools.product(range(sweeps), enumerate(schedule.reads)):
        for read in reads:
            if not (read.once and sweep):
                yield Task(sweep * len(schedule.reads) + block, read)


@dataclass
class Memory:
    """The machine: `step` does one thing that may happen now; `finished` blocks have executed."""

    blocks: Blocks
    schedule: Schedule
    sweeps: int
    threads: int
    finished: int = 0
    executing: bool = False
    pages: list[Page] = field(default_factory=list)
    waiting: list[Task] = field(default_factory=list)
    under_way: list[Task] = field(default_factory=list)
    reads: int = 0

    def __post_init__(self) -> None:
        self.pages = ["never written"] * (self.schedule.arena_bytes // PAGE)
        self.waiting = list(tasks(self.schedule, self.sweeps))[::-1]

    @property
    def done(self) -> bool:
        return self.finished == self.sweeps * len(self.blocks)

    def may_begin_a_read(self) -> bool:
        if not self.waiting or len(self.under_way) == self.threads:
            return False
        g, read = self.waiting[-1]
        return self.finished >= g - read.lag

    def may_execute(self) -> bool:
        if self.executing or self.done:
            return False
        return all(task.g > self.finished for task in (*self.waiting[-1:], *self.under_way))

    def step(self, rng: random.Random, weights: Sequence[float]) -> None:
        """One event: a read begins or ends, a block begins or ends to execute; `weights` says how likely each is."""
        events = {
            self.begin_read: self.may_begin_a_read(),
            self.end_read: bool(self.under_way),
            self.begin_block: self.may_execute(),
            self.end_block: self.executing,
        }
        odds = [weight * may for weight, may in zip(weights, events.values(), strict=True)]
        assert any(events.values()), f"deadlock: {self.finished} blocks finished, the next read is {self.waiting[-1:]}"
        if not any(odds):
            odds = [float(may) for may in events.values()]
        event = rng.choices(list(events), odds)[0]
        event(rng)

    def begin_read(self, _: random.Random) -> None:
        task = self.waiting.pop()
        for page, _content in self._pages_of(task.read):
            self.pages[page] = "half read"
        self.under_way.append(task)
        self.reads += 1

    def end_read(self, rng: random.Random) -> None:
        task = self.under_way.pop(rng.randrange(len(self.under_way)))
        for page, content in self._pages_of(task.read):
            self.pages[page] = content

    def begin_block(self, _: random.Random) -> None:
        self._look()
        self.executing = True

    def end_block(self, _: random.Random) -> None:
        self._look()
        self.executing = False
        self.finished += 1

    def _look(self) -> None:
        block = self.finished % len(self.blocks)
        content = wanted(self.blocks, block)
        first = self.schedule.offsets[block] // PAGE
        seen = self.pages[first : first + len(content)]
        assert seen == content, f"block {block} finds {seen}"

    def _pages_of(self, read: Read) -> Iterator[tuple[int, Page]]:
        for page in range(read.length // PAGE):
            yield read.target // PAGE + page, (read.extent, read.offset // PAGE + page)


def timed(schedule: Schedule, execute: Sequence[int], byte_time: int, sweeps: int, first_read: int = 0) -> list[int]:
    """When each block finishes if one drive and one executor do at once whatever they may do, by the clock. A read that
    begins later than the one before it ended takes `first_read` more."""
    count = len(schedule.reads)
    waiting = list(tasks(schedule, sweeps))[::-1]
    finished: list[int] = []
    clock = 0
    drive_free_at, executor_free_at = 0, 0
    reading: Task | None = None
    executing = False
    while len(finished) < sweeps * count:
        if reading is not None and drive_free_at <= clock:
            reading = None
        if executing and executor_free_at <= clock:
            executing = False
            finished.append(clock)
            continue
        if reading is None and waiting and len(finished) >= waiting[-1].g - waiting[-1].read.lag:
            reading = waiting.pop()
            idle = first_read if clock > drive_free_at else 0
            drive_free_at = clock + idle + reading.read.length * byte_time
            continue
        outstanding = [task.g for task in (*waiting[-1:], *([reading] if reading else []))]
        if not executing and all(g > len(finished) for g in outstanding):
            executing = True
            executor_free_at = clock + execute[len(finished) % count]
            continue
        soon = [at for at, busy in ((drive_free_at, reading is not None), (executor_free_at, executing)) if busy]
        clock = min(soon)
    return finished
