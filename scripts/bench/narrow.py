"""How much sooner does a chain answer whose weights are stored in 16 bits, where the drive is what it waits for?

    python scripts/bench/narrow.py [CASE ...] [--rebuild] [--rounds 5] [--weights fp16] [--budgets 25%] [--rate 500MB]

For each budget, a part of the weights in float32, one process opens the chain in float32 and the one in 16 bits, both
at that budget, and lets them run sweeps in turn; the first sweep of a turn is not counted, since before it the loader
had time to read ahead. With `--rate 500MB` reads take exactly as long as a drive of that many bytes per second would,
one after the other, and bring nothing: answers are then not looked at. What the narrow chain costs in accuracy is what
its build measured.

Claimed: wherever a chain in float32 spends more time reading than executing, the narrow one takes at most 1/1.7 of its
time (medians). Exit status 1 where that does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import chains
import measure
import models
from measure import MIB
from pipeline import PacedDrive

from trt_layering.units import parse_size

if TYPE_CHECKING:
    from trt_layering import Chain

LEAST_RATIO = 1.7
BATCH = 3


def measured(
    names: Sequence[str], budget: int, shapes: Mapping[str, Sequence[int]], rounds: int, rate: int
) -> list[dict[str, Any]]:
    """Child function: seconds per sweep of each chain, in turn, at `rate` bytes per second if not 0; and what it read,
    executed and waited per sweep."""
    import trt_layering as tl

    tl.share_thread_pool()
    feeds = chains.feeds(shapes)
    with ExitStack() as stack:
        opened = [stack.enter_context(tl.open_chain(n, repository=chains.REPOSITORY, budget=budget)) for n in names]
        for chain in opened:
            chain.run(feeds)
            chain.run(feeds)  # after this every extent has been loaded and checked
            if rate:
                chain._supply.file._preadv = PacedDrive(rate)
        before = [chain.stats() for chain in opened]
        subjects = {name: partial(chain.run, feeds) for name, chain in zip(names, opened, strict=True)}
        seconds = measure.interleave(subjects, rounds=rounds, batch=BATCH)
        found = [_per_sweep(chain, earlier) for chain, earlier in zip(opened, before, strict=True)]
    return [{"seconds": seconds[name], **one} for name, one in zip(names, found, strict=True)]


def _per_sweep(chain: Chain, before: Mapping[str, Any]) -> dict[str, Any]:
    after = chain.stats()
    sweeps = after["sweeps"] - before["sweeps"]
    keys = ("bytes_read", "execute_seconds", "read_seconds", "stall_seconds")
    return {"mode": after["mode"], **{key: (after[key] - before[key]) / sweeps for key in keys}}


def cost(name: str) -> dict[str, Any]:
    """What the build of chain `name` measured of its accuracy, each as a part of the largest element."""
    from trt_layering.store.manifest import read_manifest

    chain = read_manifest(chains.folder(name))
    return {
        "chain": chain.check.max_abs_diff / chain.check.max_abs_output if chain.check.max_abs_output else 0.0,
        "worst_block": max((one.max_rel_diff for one in chain.narrowed), default=0.0),
        "kept": sum(len(one.kept) for one in chain.narrowed),
    }


def measure_budget(
    case: models.Case, names: Sequence[str], label: str, budget: int, rounds: int, rate: int
) -> dict[str, Any]:
    wide, narrow = measure.call(
        measured, names=list(names), budget=budget, shapes=dict(case.shapes), rounds=rounds, rate=rate
    )
    ratio = measure.spread(wide["seconds"]).median / measure.spread(narrow["seconds"]).median
    disk_bound = wide["read_seconds"] > wide["execute_seconds"]
    return {
        "case": case.name, "label": label, "budget_bytes": budget, "wide": wide, "narrow": narrow, "ratio": ratio,
        "disk_bound": disk_bound, "held": ratio >= LEAST_RATIO or not disk_bound, "cost": cost(names[1]),
    }  # fmt: skip


HEADER = [
    "case", "budget", "MiB", "modes", "read, MiB", "execute, ms", "stall, ms", "float32, ms", "16 bits, ms",
    "times as fast", "output differs", "worst block", "kept", "held",
]  # fmt: skip


def table_row(row: Mapping[str, Any]) -> list[str]:
    wide, narrow = row["wide"], row["narrow"]

    def both(key: str, scale: float) -> str:
        return f"{wide[key] * scale:.0f}, {narrow[key] * scale:.0f}"

    return [
        row["case"], row["label"], f"{row['budget_bytes'] / MIB:.0f}", f"{wide['mode']}, {narrow['mode']}",
        both("bytes_read", 1 / MIB), both("execute_seconds", 1e3), both("stall_seconds", 1e3),
        measure.spread(wide["seconds"]).text(digits=1), measure.spread(narrow["seconds"]).text(digits=1),
        f"{row['ratio']:.2f}", f"{row['cost']['chain']:.1e}", f"{row['cost']['worst_block']:.1e}",
        str(row["cost"]["kept"]), "yes" if row["held"] else "NO",
    ]  # fmt: skip


def main() -> int:
    parser = chains.parser(__doc__, ["encoder-1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", choices=("fp16", "bf16"), default="fp16", help="of the narrow chain")
    parser.add_argument("--budgets", default="25%", help="parts of the weights in float32 (default: 25%%)")
    parser.add_argument("--rate", help="of a stand-in for the drive, for instance 500MB (per second)")
    arguments = parser.parse_args()
    chains.share_thread_pool()
    rate = parse_size(arguments.rate, what="--rate") if arguments.rate else 0
    rows = []
    for case in (models.CASES[name] for name in arguments.cases):
        wide = chains.ensure(case, rebuild=arguments.rebuild)
        named = f"{case.name}-{arguments.weights}"
        narrow = chains.ensure(case, name=named, rebuild=arguments.rebuild, weights=arguments.weights)
        needs = chains.footprint(wide)
        least = max(needs.floor, chains.footprint(narrow).floor)
        for label in arguments.budgets.split(","):
            budget = int(float(label.rstrip("%")) / 100 * needs.weights)
            if budget < least:
                print(f"{case.name}: {label} is under the floors; measured at {least / MIB:.1f} MiB", flush=True)
            rows.append(measure_budget(case, (wide, narrow), label, max(budget, least), arguments.rounds, rate))
            print(" ".join(table_row(rows[-1])), flush=True)
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(machine.text())
    measure.print_table("Weights in 16 bits against float32", HEADER, [table_row(row) for row in rows])
    print(measure.write_results("narrow-paced" if rate else "narrow", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
