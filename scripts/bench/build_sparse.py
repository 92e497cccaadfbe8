"""How long and how large is the build of a 2.4 GB model, mostly holes, whose weights are external data?

    python scripts/bench/build_sparse.py [--rounds 3]

Builds and plain copies of the weights file take turns, both from dropped caches and synced to the drive at their end.
The copy is written in full, as the chain's weights are. Claimed: a build takes at most 10 s more than the copy, and
under 300 MB of memory, its child processes and what was resident before the build included. Exit status 1 where that
does not hold.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import chains
import measure
import models

from trt_layering.bench.caches import drop_caches

NAME = "sparse-build"
MOST_SECONDS = 10.0
MOST_BYTES = 300_000_000


def measured_build(model: str) -> dict[str, Any]:
    """Child function: one build, its seconds and its memory: own peak, largest child, and the sampled sum of all."""
    import trt_layering as tl

    measure.reset_peak()
    with measure.TreeSampler(os.getpid()) as sampler:
        begin = time.perf_counter()
        tl.build(model, name=NAME, repository=chains.REPOSITORY, backend="onnxruntime", block_size=chains.BLOCK_SIZE)
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "own_peak_bytes": measure.usage().peak,
        "largest_child_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "tree_peak_bytes": sampler.peak,
    }


def plain_copy(source: Path, target: Path) -> float:
    """Seconds to copy `source` chunk by chunk, holes as zeros, and sync it."""
    begin = time.perf_counter()
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        chunk = bytearray(8 * measure.MIB)
        while count := reader.readinto(chunk):
            writer.write(memoryview(chunk)[:count])
        os.fsync(writer.fileno())
    return time.perf_counter() - begin


def one_round(model: Path) -> dict[str, Any]:
    data = model.with_name(f"{model.name}.data")
    copy = models.DEFAULT_FOLDER / "sparse.copy"
    drop_caches(data)
    try:
        copy_seconds = plain_copy(data, copy)
    finally:
        copy.unlink(missing_ok=True)
    drop_caches(data)
    found: dict[str, Any] = measure.call(measured_build, model=str(model))
    shutil.rmtree(chains.REPOSITORY / NAME)
    found["copy_seconds"] = copy_seconds
    found["peak_bytes"] = max(found[key] for key in ("own_peak_bytes", "largest_child_bytes", "tree_peak_bytes"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    model = models.make("sparse")
    rounds = [one_round(model) for _ in range(arguments.rounds)]
    encoder = models.make("encoder")
    machine = measure.describe_machine(encoder.with_name(f"{encoder.name}.data"))
    build = measure.spread([found["seconds"] for found in rounds])
    copy = measure.spread([found["copy_seconds"] for found in rounds])
    peak = max(found["peak_bytes"] for found in rounds)
    held = build.median - copy.median < MOST_SECONDS and peak < MOST_BYTES
    print(machine.text())
    row = [
        build.text(1, 1),
        copy.text(1, 1),
        f"{build.median - copy.median:.1f}",
        f"{peak / 1e6:.0f}",
        "yes" if held else "NO",
    ]
    header = ["build, s", "plain copy, s", "build - copy, s", "peak memory, MB", "under 10 s and 300 MB"]
    measure.print_table("Building the 2.4 GB sparse model", header, [row])
    print(measure.write_results("build_sparse", machine, rounds))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
