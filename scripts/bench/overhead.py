"""What does a chain cost when nothing is streamed?

    python scripts/bench/overhead.py [CASE ...] [--rebuild]

Two questions, each answered within one process by runs in turn with plain ONNX Runtime (all optimisations, its own
copy of the weights, as many threads):

- the chain's own work per block: `run` of a one-block chain against the same model as a plain session, and for chains
  of many blocks the time of `run` that is not spent executing, divided by the blocks. Claimed: under 0.2 ms.
- the chain at a budget that holds everything against plain ONNX Runtime. Claimed: within 5 %.

Exit status 1 where one of them does not hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import chains
import measure
import models

MOST_ADDED = 0.2e-3
MOST_RATIO = 1.05
ONE_BLOCK = "tiny-1"


def against_plain(
    name: str, model: str, shapes: Mapping[str, Sequence[int]], rounds: int, batch: int
) -> dict[str, Any]:
    """Child function: seconds of runs of the chain and of a plain session, and the chain's own share of its runs."""
    import onnxruntime as ort

    import trt_layering as tl

    feeds = chains.feeds(shapes)
    # Before the chain: once ONNX Runtime has a thread pool for all sessions, it refuses sessions with one of their own.
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    own: list[float] = []
    with tl.open_chain(name, repository=chains.REPOSITORY) as chain:

        def run() -> None:
            before = chain.stats()
            seconds = measure.timed(lambda: chain.run(feeds))
            after = chain.stats()
            own.append(seconds - (after["execute_seconds"] - before["execute_seconds"]))

        samples = measure.interleave(
            {"plain": lambda: session.run(None, feeds), "chain": lambda: chain.run(feeds)}, rounds=rounds, batch=batch
        )
        for _ in range(rounds * batch):
            run()
        stats = chain.stats()
    return {**samples, "own": own, "blocks": stats["blocks"], "mode": stats["mode"]}


def measure_case(label: str, case: models.Case, block_size: str, rebuild: bool) -> dict[str, Any]:
    name = chains.ensure(case, name=label, block_size=block_size, rebuild=rebuild)
    rounds, batch = (40, 50) if case.model == "tiny" else (8, 5)
    found: dict[str, Any] = measure.call(
        against_plain, name=name, model=str(models.make(case.model)), shapes=dict(case.shapes),
        rounds=rounds, batch=batch,
    )  # fmt: skip
    return {"case": label, **found}


def judge(row: dict[str, Any]) -> None:
    """Adds to `row` the medians, the ratio, the added time per block, and whether the claims hold."""
    plain, chain = measure.spread(row["plain"]), measure.spread(row["chain"])
    row["ratio"] = chain.median / plain.median
    row["added"] = measure.spread(row["own"]).median / row["blocks"]
    if row["case"] == ONE_BLOCK:
        row["added_against_plain"] = chain.median - plain.median
        row["held"] = max(row["added"], row["added_against_plain"]) < MOST_ADDED
    else:
        row["held"] = row["added"] < MOST_ADDED and row["ratio"] < MOST_RATIO


def table_row(row: Mapping[str, Any]) -> list[str]:
    plain, chain = measure.spread(row["plain"]), measure.spread(row["chain"])
    against = f"{row['added_against_plain'] * 1e3:.3f}" if "added_against_plain" in row else ""
    return [row["case"], f"{row['blocks']}", plain.text(digits=3), chain.text(digits=3), f"{row['ratio']:.3f}",
            f"{row['added'] * 1e3:.3f}", against, "yes" if row["held"] else "NO"]  # fmt: skip


def main() -> int:
    arguments = chains.parser(__doc__, ["resnet152", "vgg19", "encoder-1", "encoder-128"]).parse_args()
    wanted = [(ONE_BLOCK, models.CASES["tiny"], "64MiB")]
    wanted += [(name, models.CASES[name], chains.BLOCK_SIZE) for name in arguments.cases]
    rows = [measure_case(label, case, size, arguments.rebuild) for label, case, size in wanted]
    for row in rows:
        judge(row)
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(machine.text())
    header = ["case", "blocks", "plain, ms", "chain, ms", "ratio", "own per block, ms", "chain - plain, ms", "held"]
    measure.print_table("Everything loaded: median (quartiles)", header, [table_row(row) for row in rows])
    print(measure.write_results("overhead", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
