"""What reading and executing do to each other: by how much each takes longer beside the other. For the process that
measures.

May import the runtime and the timing of blocks. Raises what opening, running and reading raise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from trt_layering.inputs import Feeds
from trt_layering.store.manifest import Chain
from trt_layering.timing import Stopwatch, open_in_little, through

_LEAST_RUNS, _MOST_RUNS = 3, 12
_LEAST_SHARE = 0.3
_MOST = 10.0


@dataclass(frozen=True)
class Sweep:
    """One run in which blocks are read while others execute: its `seconds`, those in which blocks executed and those in
    which at least one read was under way, and the bytes read."""

    seconds: float
    execute_seconds: float
    read_seconds: float
    bytes_read: int


def slowdowns(
    folder: Path, chain: Chain, feeds: Feeds, execute: Sequence[float], rate: float, seconds: float
) -> tuple[float, float]:
    """How many times as long executing takes while the drive reads, and reading while blocks execute, in runs on
    `feeds` through two halves of a small arena, for about `seconds`. `execute` is the seconds of each block and `rate`
    the drive's bytes per second, each without the other."""
    sweeps: list[Sweep] = []
    with closing(open_in_little(folder, through(chain, range(len(chain.blocks))))) as opened:
        opened.start()
        opened.run(feeds)
        end = time.perf_counter() + seconds
        while len(sweeps) < _LEAST_RUNS or (time.perf_counter() < end and len(sweeps) < _MOST_RUNS):
            watch, before, begin = Stopwatch(opened), opened.stats(), time.perf_counter()
            watch.run(feeds)
            took, after = time.perf_counter() - begin, opened.stats()
            reading, nbytes = (after[key] - before[key] for key in ("read_seconds", "bytes_read"))
            sweeps.append(Sweep(took, sum(watch.seconds), reading, nbytes))
    alone = sum(execute[: len(chain.blocks)])
    return (
        statistics.median(execute_slowdown(sweep, alone) for sweep in sweeps),
        statistics.median(read_slowdown(sweep, rate) for sweep in sweeps),
    )


def execute_slowdown(sweep: Sweep, alone: float) -> float:
    """From executions that would take `alone` seconds without reads: what they took longer, by the share of the sweep
    in which the drive read."""
    return _slowdown(sweep.execute_seconds / max(alone, 1e-9), sweep.read_seconds / max(sweep.seconds, 1e-9))


def read_slowdown(sweep: Sweep, rate: float) -> float:
    """From reads at `rate` bytes per second without executions: what they took longer, by the share of the sweep in
    which blocks executed."""
    if not sweep.bytes_read:
        return 1.0
    return _slowdown(sweep.read_seconds * rate / sweep.bytes_read, sweep.execute_seconds / max(sweep.seconds, 1e-9))


def _slowdown(ratio: float, share: float) -> float:
    return min(max(1 + (ratio - 1) / max(share, _LEAST_SHARE), 1.0), _MOST)
