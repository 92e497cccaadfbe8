"""How long the blocks of a chain execute when nothing is read, and what memory that takes. For the process that
measures.

May import the runtime. Raises what opening and running a chain raise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from trt_layering.inputs import Feeds
from trt_layering.runtime import meter
from trt_layering.runtime.chain import Chain as OpenChain
from trt_layering.runtime.chain import Observer
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.schedules import Mode
from trt_layering.schedule.layouts import double_buffer
from trt_layering.store.manifest import PAGE, UNMEASURED, Chain, Part

_RUNS = 9
_LEAST_RUNS = 4
_LONG_RUN = 2.0
_LITTLE = 48 << 20


@dataclass(frozen=True)
class Timed:
    """Runs of a chain in little memory: `seconds` of each of its blocks, the bytes taken beside arena and engines, and
    the last run's outputs."""

    seconds: Sequence[float]
    beside: int
    outputs: Feeds


class Stopwatch:
    """Times the blocks of an open chain, each from its weights being there until the next block may begin: with all
    that the chain does between executions, without waiting for the drive."""

    def __init__(self, chain: OpenChain) -> None:
        self._chain = chain
        self._runs: list[list[float]] = []
        self._since = self._stalled = 0.0

    def run(self, feeds: Mapping[str, Any], observer: Observer | None = None) -> Feeds:
        """One inference; what `observer` takes, which is called after each block, does not count."""
        laps: list[float] = []

        def observe(index: int, took: float, live: Mapping[str, Any]) -> None:
            laps.append(self._lap())
            if observer is not None:
                observer(index, took, live)
            self._restart()

        self._restart()
        outputs = self._chain.observe(feeds, observe)
        laps[-1] += self._lap()  # what is done after the last block
        self._runs.append(laps)
        return outputs

    def _restart(self) -> None:
        self._stalled = self._chain.stall_seconds
        self._since = time.perf_counter()

    def _lap(self) -> float:
        took = time.perf_counter() - self._since
        return max(0.0, took - (self._chain.stall_seconds - self._stalled))

    @property
    def seconds(self) -> list[float]:
        """Of each block the median; the first run does not count where there were others."""
        return [statistics.median_low(laps) for laps in zip(*(self._runs[1:] or self._runs), strict=True)]


def covers(joined: Sequence[Part], blocks: int) -> list[list[int]]:
    """Ways to go through `blocks` blocks in which each part of `joined` comes at least once, the coarsest first; as
    indices of `Chain.parts`, in the order in which they execute."""
    unused, ways = set(range(len(joined))), []
    while unused:
        way, position = [], 0
        while position < blocks:
            here = [index for index in unused if joined[index].first == position]
            if here:
                best = max(here, key=lambda index: joined[index].count)
                unused.remove(best)
                way.append(blocks + best)
                position += joined[best].count
            else:
                way.append(position)
                position += 1
        ways.append(way)
    return ways


def through(chain: Chain, way: Sequence[int]) -> Chain:
    """`chain` with the parts of `way` as its blocks, and nothing else that it could execute."""
    blocks = tuple(chain.parts[index].block for index in way)
    return msgspec.structs.replace(chain, blocks=blocks, joined=(), whole=(), profile=UNMEASURED)


class Batches:
    """Lets `opened`, whose blocks lie in two halves of an arena in turn, execute one half at a time: nothing is read
    while blocks execute, and blocks follow each other as closely as in a sweep that never waits. Call `load` before
    each run, and pass `after` as the run's observer."""

    def __init__(self, opened: OpenChain, sizes: Sequence[int], arena_bytes: int) -> None:
        self._opened, self._count = opened, len(sizes)
        offsets = double_buffer(sizes, arena_bytes) or (0,) * len(sizes)
        ends = [o + n for o, n in zip(offsets, sizes, strict=True)]
        starts = [i for i in range(len(sizes)) if i == 0 or offsets[i] != ends[i - 1]]
        self._batches = [range(a, b) for a, b in pairwise([*starts, len(sizes)])]
        self._following = {batch[-1]: later for batch, later in pairwise(self._batches)}

    def load(self) -> None:
        """Read what the next run begins with."""
        self._fill(range(self._count, self._count + len(self._batches[0])))

    def after(self, index: int, _took: float, _live: Mapping[str, Any]) -> None:
        """Read the next half, when the last block of one has executed."""
        if index in self._following:
            self._fill(self._following[index])

    def _fill(self, blocks: range) -> None:
        self._opened.resume_reads()
        for block in blocks:
            self._opened.await_weights(block)
        self._opened.pause_reads()


def timed(folder: Path, chain: Chain, feeds: Feeds, seconds: float) -> Timed:
    """Run `chain` in little memory for about `seconds`, reading nothing while a block executes: four times at least, or
    once where that takes over two seconds."""
    arena_bytes = beside_floor(chain)
    with closing(open_in_little(folder, chain)) as opened:
        before = meter.current_rss_bytes()
        meter.reset_peak()
        batches = Batches(opened, [chain.block_bytes(index) for index in range(len(chain.blocks))], arena_bytes)
        opened.start()
        watch, begin = Stopwatch(opened), time.perf_counter()
        for run in range(_RUNS):
            batches.load()
            outputs = watch.run(feeds, batches.after)
            took = time.perf_counter() - begin
            if (run + 1 >= _LEAST_RUNS and took > seconds) or took > max(seconds, _LONG_RUN):
                break
        held = sum(array.nbytes for array in outputs.values())  # by a caller, while the next sweep runs
        beside = max(0, meter.peak_rss_bytes() + held - before - opened.stats()["arena_bytes"])
        return Timed(watch.seconds, beside, outputs)


def timed_whole(folder: Path, chain: Chain, feeds: Feeds, seconds: float) -> float:
    """The seconds of a run of `chain` with everything in memory, as it is opened without a budget: the median of those
    that `seconds` give time for, four at least, or one where that takes over two seconds; a first does not count."""
    laps: list[float] = []
    with closing(OpenChain(folder, chain, budget=None, loader=LoaderOptions(verify="never"))) as opened:
        opened.start()
        opened.run(feeds)
        while len(laps) < _RUNS:
            begin = time.perf_counter()
            opened.run(feeds)
            laps.append(time.perf_counter() - begin)
            if (len(laps) >= _LEAST_RUNS and sum(laps) > seconds) or sum(laps) > max(seconds, _LONG_RUN):
                break
    return statistics.median_low(laps)


def beside_floor(chain: Chain) -> int:
    """Bytes of an arena of at most 48 MiB more than the largest block."""
    needs = Footprint.of(chain)
    return min(needs.weights, needs.largest_block + _LITTLE) // PAGE * PAGE


def open_in_little(folder: Path, chain: Chain) -> OpenChain:
    """`chain` in `folder` with the arena of `beside_floor`, its blocks in two halves in turn, or one at a time where a
    half does not hold the largest; it loads nothing before `start`."""
    needs, arena_bytes = Footprint.of(chain), beside_floor(chain)
    mode: Mode = "double" if 2 * needs.largest_block <= arena_bytes else "sequential"
    budget = max(needs.fixed + arena_bytes, 1)
    return OpenChain(folder, chain, budget=budget, loader=LoaderOptions(), mode=mode)
