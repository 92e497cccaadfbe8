"""How long does it take to make a chain's table of schedules, and to choose from it?

    python scripts/bench/schedules.py [CASE ...] [--blocks 150]

A made-up chain of so many blocks (seeded sizes and times, blocks joined by four and by sixteen) and those of CASES:
the table is made anew, written, read back and asked, each in this process. Claimed: at most 10 s to make it, and under
10 ms to choose, reading the file included. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import chains
import measure
import models

MOST_MAKING = 10.0
MOST_CHOOSING = 0.010
PAGE = 4096


def made_up(blocks: int) -> Any:
    """A chain of `blocks` blocks of 1 to 16 MiB that execute for up to 5 ms; its manifest."""
    from trt_layering.store.manifest import UNMEASURED, Backend, Block, Chain, Check, Extent, Memory, Part

    generator = random.Random(0)
    lengths = [generator.randrange(256, 4096) * PAGE for _ in range(blocks)]
    starts = [sum(lengths[:index]) for index in range(blocks)]
    digest = "0" * 16
    extents = tuple(
        Extent(offset=o, length=n, checksum=digest, tensors=()) for o, n in zip(starts, lengths, strict=True)
    )

    def block(name: str, first: int, count: int) -> Block:
        indices = tuple(range(first, first + count))
        return Block(name=name, file=f"{name}.onnx", digest=2 * digest, extents=indices, inputs=(), outputs=())

    singles = tuple(block(f"block-{index}", index, 1) for index in range(blocks))
    runs = [(first, step) for step in (4, 16) for first in range(0, blocks - step + 1, step)]
    joined = tuple(Part(first=f, count=n, block=block(f"joined-{f}-{n}", f, n)) for f, n in runs)
    times = [generator.random() * 5e-3 for _ in range(blocks)]
    times += [0.97 * sum(times[first : first + count]) for first, count in runs]
    import msgspec

    profile = msgspec.structs.replace(UNMEASURED, execute_seconds=tuple(times), execute_slowdown=1.1, read_slowdown=1.1)
    return Chain(
        format=2, name="made-up", source="", source_digest="", backend=Backend(name="", version="", fingerprint={}),
        precision="fp32", optimised=True, block_size=16 << 20, inputs=(), outputs=(), extents=extents, blocks=singles,
        memory=Memory(activations=0, scratch=0, engines=0, shapes={}), profile=profile,
        check=Check(max_abs_diff=0.0, max_abs_output=0.0, seed=0), joined=joined,
    )  # fmt: skip


def measure_chain(label: str, chain: Any) -> dict[str, Any]:
    from trt_layering.runtime.schedules import read_table, scheduled, write_table

    with TemporaryDirectory(dir=models.DEFAULT_FOLDER) as folder:
        path = Path(folder)
        making = measure.timed(lambda: write_table(path, chain))
        table, why = read_table(path, chain)
        assert why is None, why
        middle = (table[0].arena_bytes + table[-1].arena_bytes) // 2
        choosing = [measure.timed(lambda: scheduled(path, chain, middle, 4 << 20, "auto")) for _ in range(21)]
        size = (path / "schedules.json").stat().st_size
    chosen = measure.spread(choosing).median
    held = making <= MOST_MAKING and chosen < MOST_CHOOSING
    return {
        "case": label, "blocks": len(chain.blocks), "parts": len(chain.parts), "entries": len(table), "bytes": size,
        "making": making, "choosing": chosen, "held": held,
    }  # fmt: skip


def table_row(row: dict[str, Any]) -> list[str]:
    return [
        row["case"], str(row["blocks"]), str(row["parts"]), str(row["entries"]), f"{row['bytes'] / 1024:.0f}",
        f"**{row['making']:.2f}**", f"**{row['choosing'] * 1e3:.2f}**", "yes" if row["held"] else "NO",
    ]  # fmt: skip


def main() -> int:
    from trt_layering.store.manifest import read_manifest

    parser = chains.parser(__doc__, list(chains.LARGE))
    parser.add_argument("--blocks", type=int, default=150)
    arguments = parser.parse_args()
    rows = [measure_chain("made up", made_up(arguments.blocks))]
    for case in (models.CASES[name] for name in arguments.cases):
        name = chains.ensure(case, rebuild=arguments.rebuild)
        rows.append(measure_chain(name, read_manifest(chains.folder(name))))
    header = ["chain", "blocks", "with joined ones", "schedules", "file, KiB", "to make it, s", "to choose, ms", "held"]
    measure.print_table("Tables of schedules", header, [table_row(row) for row in rows])
    machine = measure.describe_machine(chains.folder(arguments.cases[0]) / "weights.bin")
    print(measure.write_results("schedules", machine, rows))
    return 0 if all(row["held"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
