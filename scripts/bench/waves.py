"""How many more requests a second does a disk-bound chain answer in waves than one by one?

    python scripts/bench/waves.py [CASE ...] [--rebuild] [--rounds 5] [--wave 8] [--budget 10%] [--rate 200MB]

One process opens the chain once, with room for the wave, and answers in turn, `rounds` times: as many requests as make
a wave one by one, and the same in a wave. The first run of each is not counted. With `--rate` reads take exactly as
long as a drive of that many bytes per second would, one after the other, and bring nothing: then answers are not looked
at. Without it, those of the wave are compared with those of single runs, bit for bit.

Claimed: waves of 8 at a budget of 10 % of the weights answer at least 5 times as many requests. Exit status 1 where
that does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import chains
import measure
import models
from measure import MIB
from pipeline import PacedDrive

from trt_layering.units import parse_size

LEAST = 5.0


def measured(
    name: str, budget: int, shapes: Mapping[str, Sequence[int]], wave: int, rounds: int, rate: int
) -> dict[str, Any]:
    """Child function: seconds of `wave` requests one by one and in a wave, in turn; at `rate` bytes per second if not
    0."""
    import trt_layering as tl

    tl.share_thread_pool()
    asked = [chains.feeds(shapes, seed) for seed in range(wave)]
    with tl.open_chain(name, repository=chains.REPOSITORY, budget=budget, wave=wave) as chain:
        alone, together = [chain.run(feeds) for feeds in asked], chain.run_many(asked, wave=wave)
        same = all(
            one[key].tobytes() == other[key].tobytes()
            for one, other in zip(alone, together, strict=True)
            for key in one
        )
        if rate:
            chain._supply.file._preadv = PacedDrive(rate)
        samples = measure.interleave(
            {
                "one_by_one": lambda: [chain.run(feeds) for feeds in asked],
                "together": lambda: chain.run_many(asked, wave=wave),
            },
            rounds=rounds, batch=1, warm_up=1,
        )  # fmt: skip
        stats = chain.stats()
    return {**samples, "same": same, "stats": stats}


def measure_case(case: models.Case, share: float, wave: int, rounds: int, rate: int, rebuild: bool) -> dict[str, Any]:
    import trt_layering as tl

    name = chains.ensure(case, rebuild=rebuild)
    needs = tl.footprint(name, repository=chains.REPOSITORY, wave=wave)
    budget = max(int(share * needs.weights), needs.floor)
    found: dict[str, Any] = measure.call(
        measured, name=name, budget=budget, shapes=dict(case.shapes), wave=wave, rounds=rounds, rate=rate
    )
    single, together = measure.spread(found["one_by_one"]), measure.spread(found["together"])
    ratio = single.median / together.median
    cut = any("waves of" in fallback for fallback in found["stats"]["fallbacks"])
    held = found["same"] and not cut and ratio >= LEAST
    return {
        "case": case.name, "budget_bytes": budget, "weights_bytes": needs.weights, "wave": wave, "rate": rate,
        "single_per_second": wave / single.median, "wave_per_second": wave / together.median, "ratio": ratio,
        "held": held, **found,
    }  # fmt: skip


def table_row(row: Mapping[str, Any]) -> list[str]:
    return [
        row["case"], f"{row['budget_bytes'] / MIB:.0f}", f"{row['budget_bytes'] / row['weights_bytes']:.0%}",
        row["stats"]["mode"], f"{row['wave']}", f"{row['single_per_second']:.2f}", f"{row['wave_per_second']:.2f}",
        f"{row['ratio']:.2f}", "yes" if row["same"] else "NO", "yes" if row["held"] else "NO",
    ]  # fmt: skip


HEADER = [
    "case", "MiB", "of weights", "mode", "wave", "single, requests/s", "wave, requests/s", "ratio", "same bits", "held"
]  # fmt: skip


def main() -> int:
    parser = chains.parser(__doc__, ["encoder-1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wave", type=int, default=8)
    parser.add_argument("--budget", default="10%", help="a part of the weights (default: 10%%), or the floor above it")
    parser.add_argument("--rate", help="of a stand-in for the drive, for instance 2GB (per second)")
    arguments = parser.parse_args()
    chains.share_thread_pool()
    rate = parse_size(arguments.rate, what="--rate") if arguments.rate else 0
    share = float(arguments.budget.rstrip("%")) / 100
    cases = [models.CASES[name] for name in arguments.cases]
    rows = [measure_case(case, share, arguments.wave, arguments.rounds, rate, arguments.rebuild) for case in cases]
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(machine.text())
    title = f"Waves against single runs{f', drive of {rate / 1e6:.0f} MB/s' if rate else ''}: median of the rounds"
    measure.print_table(title, HEADER, [table_row(row) for row in rows])
    print(measure.write_results("waves-paced" if rate else "waves", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
