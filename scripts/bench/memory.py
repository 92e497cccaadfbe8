"""Does a chain stay within its budget? Peak resident memory against the budget, from the floor up.

    python scripts/bench/memory.py [CASE ...] [--rebuild]

For each budget a fresh process opens the chain and runs it a few times. From its peak the resident memory of another
fresh process is taken, which imported the same modules and did nothing else. Claimed: the rest is at most the budget
plus 8 MiB. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import chains
import measure
import models
from measure import MIB

ALLOWANCE = 8 * MIB
RUNS = 4


def peak(name: str, budget: int, shapes: Mapping[str, Sequence[int]], runs: int) -> dict[str, Any]:
    """Child function: memory of a process that opens chain `name` with `budget` and runs it `runs` times."""
    import trt_layering as tl

    feeds = chains.feeds(shapes)
    measure.reset_peak()
    with tl.open_chain(name, repository=chains.REPOSITORY, budget=budget) as chain:
        for _ in range(runs):
            chain.run(feeds)
        used = measure.usage()
        stats = chain.stats()
    return {
        "peak_bytes": used.peak,
        "end_bytes": used.now,
        "end_anonymous_bytes": used.anonymous,
        "end_file_bytes": used.file,
        "stats": stats,
        "modules": sorted(sys.modules),
    }


def baseline(modules: Sequence[str]) -> int:
    """Resident bytes of a process with these modules imported: the median of three."""
    return int(statistics.median(measure.call(measure.imported, modules=modules) for _ in range(3)))


def measure_case(case: models.Case, rebuild: bool) -> list[dict[str, Any]]:
    name = chains.ensure(case, rebuild=rebuild)
    needs = chains.footprint(name)
    rows = []
    bare = 0
    for label, budget in chains.budgets(needs):
        found = measure.call(peak, name=name, budget=budget, shapes=dict(case.shapes), runs=RUNS)
        bare = bare or baseline(found["modules"])
        del found["modules"]
        used = found["peak_bytes"] - bare
        rows.append(
            {
                "case": case.name, "label": label, "weights_bytes": needs.weights, "budget_bytes": budget,
                "baseline_bytes": bare, "used_bytes": used, "over_bytes": used - budget,
                "held": used <= budget + ALLOWANCE, **found,
            }
        )  # fmt: skip
    return rows


def table_row(row: Mapping[str, Any]) -> list[str]:
    def mib(key: str) -> str:
        return f"{row[key] / MIB:.1f}"

    verdict = "yes" if row["held"] else "NO"
    stats = row["stats"]
    return [row["case"], mib("weights_bytes"), row["label"], mib("budget_bytes"), mib("used_bytes"), mib("over_bytes"),
            stats["mode"], f"{stats['resident_bytes'] / MIB:.1f}", verdict]  # fmt: skip


def main() -> int:
    arguments = chains.parser(__doc__, ["resnet152", "vgg19", "encoder-1", "encoder-128"]).parse_args()
    rows = [row for case in arguments.cases for row in measure_case(models.CASES[case], arguments.rebuild)]
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(machine.text())
    header = ["case", "weights", "budget", "MiB", "used", "used - budget", "mode", "resident", "within 8 MiB"]
    measure.print_table("Peak memory beyond the imported modules, in MiB", header, [table_row(row) for row in rows])
    print(measure.write_results("memory", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
