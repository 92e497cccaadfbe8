"""How long does a chain take to open?

    python scripts/bench/open_time.py [CASE ...] [--rebuild]

Each opening is the only one of a fresh process that has imported its modules, once with the chain's files in the page
cache and once with all caches dropped, budget a quarter of the weights. `encoder-24` is the encoder in 24 blocks, 1.15
GiB. Claimed for it: open_chain returns within 0.3 s. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import chains
import measure
import models

from trt_layering.bench.caches import drop_caches

MOST_SECONDS = 0.3
ROUNDS = 7
IN_24_BLOCKS = "encoder-24"


def opened(name: str, budget: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Child function: seconds until the chain is open, and from there until its first result."""
    import onnxruntime  # noqa: F401

    import trt_layering as tl

    open_chain = tl.open_chain  # imported here, before the clock starts
    feeds = chains.feeds(shapes)
    begin = time.perf_counter()
    with open_chain(name, repository=chains.REPOSITORY, budget=budget) as chain:
        open_seconds = time.perf_counter() - begin
        first_run = measure.timed(lambda: chain.run(feeds))
        blocks = chain.stats()["blocks"]
    return {"open": open_seconds, "first_run": first_run, "blocks": blocks}


def measure_case(label: str, case: models.Case, block_size: str, rebuild: bool) -> list[dict[str, Any]]:
    name = chains.ensure(case, name=label, block_size=block_size, rebuild=rebuild)
    needs = chains.footprint(name)
    budget = max(needs.floor, needs.weights // 4)
    samples: dict[str, list[dict[str, float]]] = {"in the page cache": [], "caches dropped": []}
    for _ in range(ROUNDS):
        for state, found in samples.items():
            if state == "caches dropped":
                drop_caches(chains.folder(name))
            found.append(measure.call(opened, name=name, budget=budget, shapes=dict(case.shapes)))
    return [
        {"case": label, "files": state, "weights_bytes": needs.weights, "budget_bytes": budget, "samples": found}
        for state, found in samples.items()
    ]


def table_row(row: Mapping[str, Any]) -> list[str]:
    opening = measure.spread([found["open"] for found in row["samples"]])
    first = measure.spread([found["first_run"] for found in row["samples"]])
    size = f"{row['weights_bytes'] / measure.MIB:.0f}"
    return [row["case"], size, f"{row['samples'][0]['blocks']:.0f}", row["files"], opening.text(), first.text()]


def main() -> int:
    arguments = chains.parser(__doc__, ["resnet152", "vgg19", "encoder-128"]).parse_args()
    wanted = [(name, models.CASES[name], chains.BLOCK_SIZE) for name in arguments.cases]
    wanted.append((IN_24_BLOCKS, models.CASES["encoder-128"], "49MiB"))
    rows = [row for label, case, size in wanted for row in measure_case(label, case, size, arguments.rebuild)]
    machine = measure.describe_machine(chains.folder(IN_24_BLOCKS) / "weights.bin")
    print(machine.text())
    header = ["case", "weights, MiB", "blocks", "chain's files", "open, ms", "first run after it, ms"]
    measure.print_table("Opening a chain: median (quartiles)", header, [table_row(row) for row in rows])
    print(measure.write_results("open_time", machine, rows))
    claimed = [row for row in rows if row["case"] == IN_24_BLOCKS]
    held = all(measure.spread([s["open"] for s in row["samples"]]).median < MOST_SECONDS for row in claimed)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
