"""How close does a sweep come to what the machine could do at best, and how far is it from what users have today?

    python scripts/bench/pipeline.py [CASE ...] [--rebuild] [--rounds 5] [--budgets 25%,50%] [--rate 2GB]

For each budget a fresh process opens the chain and measures in turn, `rounds` times:

- the bound: two things side by side that never wait for each other, one thread executing all blocks of the chain back
  to back, and as many threads as the loader has doing all reads of a sweep in the loader's requests. The bound is when
  the later of the two is done. It is measured before and after
- the chain: consecutive sweeps, the first not counted, since before it the loader had time to read ahead
- the fixed double buffer at the same budget, opened beside it.

The sweep that the chain's table predicts is printed beside the measured one, and "least": what no schedule with this
arena could beat, at the block times and the rate of that run. While blocks i to j execute, all that they have beyond
the arena's bytes must be read; so a sweep takes at least the other blocks' executions and these reads.

Then, where memory cgroups can be made, the chain and the same model mapped by plain ONNX Runtime run in a group of the
budget plus 96 MiB, all caches dropped before.

Budgets are parts of the weights; where such a part is under the floor, the arena alone has it ("10%+").

A drive whose rate jumps shows in the ratio, since a bound that never waits averages what a bounded arena cannot. With
`--rate 2GB` reads take exactly as long as a drive of that many bytes per second would, one after the other, and bring
nothing: the chain's answers are then not looked at, its schedules are those for such a drive, and the mapped model is
left out.

Claimed, at every budget under the weights: a sweep takes at most 1.05 times the bound (median of the rounds), no longer
than the double buffer's (by more than 2 %, as far as this can tell), less time than the mapped model (at 50 % half of
it, a fifth for the encoder at length 1), and what was predicted within 10 %. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import chains
import mapped
import measure
import models
import numpy as np
from measure import MIB

from trt_layering.units import parse_size

if TYPE_CHECKING:
    from trt_layering import Chain

MOST_RATIO = 1.05
MOST_ERROR = 0.10
NOISE = 1.02


class Bound:
    """The same block executions and the same reads as `chain`'s sweep, which do not wait for each other.

    Executions use the chain's engines over the chain's arena, as it is: what they compute is not looked at. Reads go to
    another arena of the same size. The chain must be idle. This looks behind the chain's public face on purpose.
    """

    def __init__(self, chain: Chain, feeds: Mapping[str, Any]) -> None:
        from trt_layering.backends.arena import Arena

        self._chain, self._feeds = chain, feeds
        self._supply = chain._supply
        schedule = self._supply.loader._schedule
        extents = chain.manifest.extents
        self._reads = [
            (read.target, read.length, extents[read.extent].offset + read.offset)
            for reads in schedule.reads
            for read in reads
            if not read.once
        ]
        self._threads = len(self._supply.loader._threads)
        self._arena = Arena(schedule.arena_bytes)
        self._into = [self._targets(index) for index in range(len(self._supply.engines))]

    @property
    def bytes_read(self) -> int:
        """Bytes that one sweep reads."""
        return sum(length for _, length, _ in self._reads)

    def close(self) -> None:
        self._arena.close()

    def _targets(self, index: int) -> dict[str, Any]:
        """Tensors for those outputs of the model that block `index` makes, where their shape is known."""
        chain = self._chain
        return {
            value.name: chain._runtime.wrap(np.empty(_static(value.shape), value.dtype))
            for value in chain._blocks[index].outputs
            if value.name in chain._outputs and value.name in chain._static
        }

    def execute(self) -> None:
        """All blocks, back to back."""
        chain = self._chain
        live = {name: chain._runtime.wrap(array) for name, array in self._feeds.items()}
        for engine, into, drops in zip(self._supply.engines, self._into, chain._drops, strict=True):
            live.update(engine.execute(live, into))
            for name in drops:
                live.pop(name, None)

    def least(self, execute_alone: float, rate: float) -> float:
        """Seconds that a sweep takes at least with this arena, whatever the schedule: see above."""
        manifest, arena = self._chain.manifest, self._arena.size
        blocks = range(len(manifest.blocks))
        times = manifest.profile.execute_seconds[: len(blocks)]
        scale = execute_alone / sum(times)
        sizes = [manifest.block_bytes(index) for index in blocks]
        least = execute_alone
        for first in blocks:
            inside, nbytes = 0.0, 0
            for index in (*blocks[first:], *blocks[:first]):
                inside, nbytes = inside + scale * times[index], nbytes + sizes[index]
                least = max(least, execute_alone - inside + (nbytes - arena) / rate)
        return least

    def read(self, sweeps: int) -> None:
        """All reads of `sweeps` sweeps, in order, as many under way as the loader has threads."""
        requests = (read for _ in range(sweeps) for read in self._reads)
        lock = threading.Lock()
        workers = [threading.Thread(target=self._work, args=(requests, lock)) for _ in range(self._threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, requests: Iterator[tuple[int, int, int]], lock: threading.Lock) -> None:
        while True:
            with lock:
                request = next(requests, None)
            if request is None:
                return
            target, length, offset = request
            self._supply.file.read_into(self._arena.view(target, length), offset)

    def seconds(self, sweeps: int) -> dict[str, float]:
        """Seconds per sweep until all executions and until all reads of `sweeps` sweeps are done, begun together."""
        ends: dict[str, float] = {}
        barrier = threading.Barrier(3)

        def side(name: str, work: Callable[[], None]) -> None:
            barrier.wait()
            work()
            ends[name] = time.perf_counter()

        def execute() -> None:
            for _ in range(sweeps):
                self.execute()

        sides = [
            threading.Thread(target=side, args=("execute", execute)),
            threading.Thread(target=side, args=("read", lambda: self.read(sweeps))),
        ]
        for thread in sides:
            thread.start()
        barrier.wait()
        begin = time.perf_counter()
        for thread in sides:
            thread.join()
        return {name: (end - begin) / sweeps for name, end in ends.items()}


class PacedDrive:
    """Stands in for `os.preadv`: requests take as long as at `rate` bytes per second, one after the other."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def __call__(self, _descriptor: int, buffers: Sequence[memoryview], _offset: int) -> int:
        length = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + length / self._rate
            done = self._free
        time.sleep(max(0.0, done - time.perf_counter()))
        return length


def _static(shape: Sequence[Any] | None) -> tuple[int, ...]:
    return tuple(int(dim) for dim in shape or ())


def opened(name: str, budget: int, mode: Any, rate: int) -> Chain:
    """The chain `name`, as if it had been profiled on a drive of `rate` bytes per second if that is not 0."""
    import msgspec

    from trt_layering.runtime.chain import Chain
    from trt_layering.runtime.loader import LoaderOptions
    from trt_layering.store.manifest import read_manifest

    folder = chains.folder(name)
    manifest = read_manifest(folder)
    if rate:
        paced = {"read_rate": float(rate), "read_seconds": (), "execute_slowdown": 1.0, "read_slowdown": 1.0}
        profile = msgspec.structs.replace(manifest.profile, **paced)
        manifest = msgspec.structs.replace(manifest, profile=profile)
    chain = Chain(folder, manifest, budget=budget, loader=LoaderOptions(), mode=mode)
    chain.start()
    return chain


def measured(
    name: str, budget: int, shapes: Mapping[str, Sequence[int]], rounds: int, sweeps: int, rate: int
) -> dict[str, Any]:
    """Child function: seconds per sweep of the bound, the chain and the double buffer, in turn; at `rate` bytes per
    second if not 0."""
    import trt_layering as tl

    tl.share_thread_pool()
    feeds = chains.feeds(shapes)
    found: dict[str, Any] = {"bounds": [], "chain": [], "double": [], "execute": [], "stall": []}
    with opened(name, budget, "auto", rate) as chain, opened(name, budget, "double", rate) as double:
        for each in (chain, double):
            each.run(feeds)
            each.run(feeds)  # after this every extent has been loaded and checked
            if rate:
                each._supply.file._preadv = PacedDrive(rate)
        with closing(Bound(chain, feeds)) as bound:
            bound.read(1)
            bound.execute()
            found["execute_alone"] = measure.timed(bound.execute)
            found["read_alone"] = measure.timed(lambda: bound.read(1))
            found["bounds"].append(bound.seconds(sweeps))
            for _ in range(rounds):
                chain.run(feeds)
                before = chain.stats()
                found["chain"].append(measure.timed(lambda: [chain.run(feeds) for _ in range(sweeps)]) / sweeps)
                after = chain.stats()
                for part in ("execute", "stall"):
                    key = f"{part}_seconds"
                    found[part].append((after[key] - before[key]) / sweeps)
                found["bounds"].append(bound.seconds(sweeps))
                double.run(feeds)
                found["double"].append(measure.timed(lambda: [double.run(feeds) for _ in range(sweeps)]) / sweeps)
            found["bytes_read"] = bound.bytes_read
            found["least"] = bound.least(
                found["execute_alone"], rate or max(1.0, found["bytes_read"] / found["read_alone"])
            )
        found["stats"], found["double_mode"] = chain.stats(), double.stats()["mode"]
    return found


def ratios(found: Mapping[str, Any]) -> list[float]:
    """Each round's sweep against the mean of the bounds before and after it."""
    limits = [max(bound.values()) for bound in found["bounds"]]
    return [2 * sweep / sum(around) for sweep, around in zip(found["chain"], pairwise(limits), strict=True)]


def measure_budget(case: models.Case, name: str, label: str, budget: int, rounds: int, rate: int) -> dict[str, Any]:
    needs = chains.footprint(name)
    sweeps = 10 if case.model == "tiny" else 3
    found: dict[str, Any] = measure.call(
        measured, name=name, budget=budget, shapes=dict(case.shapes), rounds=rounds, sweeps=sweeps, rate=rate
    )
    row = {"case": case.name, "label": label, "budget_bytes": budget, "weights_bytes": needs.weights, **found}
    row["ratio"] = measure.spread(ratios(found)).median
    row["chain_median"] = measure.spread(found["chain"]).median
    row["double_median"] = measure.spread(found["double"]).median
    row["error"] = (found["stats"]["predicted_seconds"] or row["chain_median"]) / row["chain_median"] - 1
    row["limited"] = None
    if not rate:
        try:
            row["limited"] = mapped.compare(case, name, budget)
        except OSError as error:
            print(f"not compared with the mapped model: {error}", flush=True)
    row["failed"] = failures(row)
    return row


def failures(row: Mapping[str, Any]) -> list[str]:
    """Which claims do not hold."""
    failed = []
    if abs(row["error"]) > MOST_ERROR:
        failed.append("prediction")
    if row["budget_bytes"] >= row["weights_bytes"]:
        return failed
    if row["ratio"] > MOST_RATIO:
        failed.append("ratio")
    if row["chain_median"] > NOISE * row["double_median"]:
        failed.append("double")
    if row["limited"]:
        chain, plain = row["limited"]["chain_median"], row["limited"]["mapped_median"]
        asked = 5.0 if row["case"] == "encoder-1" else 2.0
        if chain is None or (plain is not None and plain < chain * (asked if row["label"] == "50%" else 1.0)):
            failed.append("mapped")
    return failed


def table_row(row: Mapping[str, Any]) -> list[str]:
    def milliseconds(seconds: float | None) -> str:
        return "killed" if seconds is None else f"{seconds * 1e3:.1f}"

    limits = [max(bound.values()) for bound in row["bounds"]]
    limited = [milliseconds(row["limited"][key]) if row["limited"] else "" for key in ("chain_median", "mapped_median")]
    return [
        row["case"], f"{row['label']}, {row['budget_bytes'] / MIB:.0f} MiB",
        f"{row['stats']['mode']}, {row['stats']['blocks']}", f"{row['stats']['arena_bytes'] / MIB:.0f}",
        f"{row['bytes_read'] / MIB:.0f}", milliseconds(row["execute_alone"]), milliseconds(row["read_alone"]),
        milliseconds(measure.spread(limits).median), milliseconds(row["least"]), milliseconds(row["chain_median"]),
        f"**{row['ratio']:.3f}**", f"{row['chain_median'] / row['least']:.3f}",
        f"{row['error']:+.1%}", milliseconds(row["double_median"]), *limited, ", ".join(row["failed"]) or "",
    ]  # fmt: skip


HEADER = [
    "model", "budget", "mode, blocks", "arena, MiB", "read, MiB", "execute alone, ms", "read alone, ms", "bound, ms",
    "least, ms", "sweep, ms", "ratio", "to least", "predicted", "double buffer, ms", "in the cgroup: chain, ms",
    "mapped, ms", "not held",
]  # fmt: skip


def main() -> int:
    parser = chains.parser(__doc__, list(chains.LARGE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", help="of a stand-in for the drive, for instance 2GB (per second)")
    parser.add_argument("--budgets", help="only these, by name: floor, 10%%, 25%%, 50%%, 75%%, weights")
    arguments = parser.parse_args()
    chains.share_thread_pool()
    rate = parse_size(arguments.rate, what="--rate") if arguments.rate else 0
    rows = []
    for case in (models.CASES[name] for name in arguments.cases):
        name = chains.ensure(case, rebuild=arguments.rebuild)
        for label, budget in chains.budgets(chains.footprint(name))[:-1]:
            if not arguments.budgets or label.rstrip("+") in arguments.budgets.split(","):
                rows.append(measure_budget(case, name, label, budget, arguments.rounds, rate))
                print("| " + " | ".join(table_row(rows[-1])) + " |", flush=True)
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(machine.text())
    measure.print_table("Sweeps against the bound and the mapped model", HEADER, [table_row(row) for row in rows])
    print(measure.write_results("pipeline-paced" if rate else "pipeline", machine, rows))
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
