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
from pathlib import Path
from typing import Any

import msgspec

from trt_layering.inputs import Feeds
from trt_layering.runtime import meter
from trt_layering.runtime.chain import Chain as OpenChain
from trt_layering.runtime.chain import Observer
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import UNMEASURED, Chain, Part

_RUNS = 9
_LEAST_RUNS = 4
_LONG_RUN = 2.0


@dataclass(frozen=True)
class Timed:
    """Runs of a chain at its floor: `seconds` of each of its blocks, the bytes taken beside arena and engines, and the
    last run's outputs."""

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
        self._stalled = self._chain.stats()["stall_seconds"]
        self._since = time.perf_counter()

    def _lap(self) -> float:
        took = time.perf_counter() - self._since
        stalled: float = self._chain.stats()["stall_seconds"] - self._stalled
        return max(0.0, took - stalled)

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


def timed(folder: Path, chain: Chain, feeds: Feeds, seconds: float) -> Timed:
    """Run `chain` at its floor, where nothing is read while a block executes, for about `seconds`: four times at least,
    or once where that takes over two seconds."""
    with closing(open_at_floor(folder, chain)) as opened:
        before = meter.current_rss_bytes()
        meter.reset_peak()
        opened.start()
        watch, begin = Stopwatch(opened), time.perf_counter()
        for run in range(_RUNS):
            outputs = watch.run(feeds)
            took = time.perf_counter() - begin
            if (run + 1 >= _LEAST_RUNS and took > seconds) or took > max(seconds, _LONG_RUN):
                break
        held = sum(array.nbytes for array in outputs.values())  # by a caller, while the next sweep runs
        beside = max(0, meter.peak_rss_bytes() + held - before - opened.stats()["arena_bytes"])
        return Timed(watch.seconds, beside, outputs)


def open_at_floor(folder: Path, chain: Chain) -> OpenChain:
    """`chain` in `folder`, with an arena of its largest block, in which each block is read when the one before it has
    executed; it loads nothing before `start`."""
    budget = max(Footprint.of(chain).floor, 1)
    return OpenChain(folder, chain, budget=budget, loader=LoaderOptions(), mode="sequential")
