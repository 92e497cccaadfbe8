"""The model as users have it today: mapped by plain ONNX Runtime under a memory limit, to compare a chain with.

Child functions for the benches; imports onnxruntime only inside them. The limit is a memory cgroup of the budget plus
what a Python process with ONNX Runtime takes. The mapped session does not prepack, since that copies the weights. It
comes in two forms, of which the faster counts: the model optimised while it is loaded, which for convolutions
copies weights and may not survive the limit, and the model optimised beforehand without a limit and mapped as that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chains
import measure
import models

from trt_layering.bench.caches import drop_caches
from trt_layering.bench.cgroup import MemoryGroup
from trt_layering.bench.plain import PROCESS_BYTES as PROCESS
from trt_layering.bench.plain import optimise

KILLED = -9
PATIENCE = 180.0  # seconds for a child; under too small a limit the kernel can go on reclaiming for minutes
RUNS = 5
OPTIMISED = models.DEFAULT_FOLDER / "optimised"


def run_mapped(model: str, level: str, shapes: Mapping[str, Sequence[int]], runs: int) -> dict[str, Any]:
    """Child function: seconds of each of `runs` runs after a first one, and of that."""
    from trt_layering.bench.plain import mapped_session

    session = mapped_session(model, level)
    feeds = chains.feeds(shapes)
    seconds = [measure.timed(lambda: session.run(None, feeds)) for _ in range(runs + 1)]
    return {"first": seconds[0], "seconds": seconds[1:]}


def run_chain(name: str, budget: int, shapes: Mapping[str, Sequence[int]], runs: int) -> dict[str, Any]:
    """Child function: the same for a chain."""
    import trt_layering as tl

    tl.share_thread_pool()
    feeds = chains.feeds(shapes)
    with tl.open_chain(name, repository=chains.REPOSITORY, budget=budget) as chain:
        seconds = [measure.timed(lambda: chain.run(feeds)) for _ in range(runs + 1)]
    return {"first": seconds[0], "seconds": seconds[1:]}


def compare(case: models.Case, name: str, budget: int) -> dict[str, Any]:
    """Medians of the chain and of the mapped model, each in a group of `budget` plus `PROCESS` bytes, caches dropped
    before. `mapped` is None where no form of it survives. Raises OSError where no group can be made."""
    original = models.make(case.model)
    prepared = _optimised(case.model, original)
    shapes = dict(case.shapes)
    forms = {
        "optimised while loaded": {"model": str(original), "level": "ORT_ENABLE_ALL"},
        "optimised beforehand": {"model": str(prepared), "level": "ORT_DISABLE_ALL"},
    }
    found: dict[str, Any] = {"limit_bytes": budget + PROCESS, "forms": {}}
    for form, arguments in forms.items():
        drop_caches(original.parent, prepared.parent)
        found["forms"][form] = _limited(run_mapped, budget, shapes=shapes, runs=RUNS, **arguments)
    drop_caches(chains.folder(name))
    found["chain"] = _limited(run_chain, budget, name=name, budget=budget, shapes=shapes, runs=RUNS)
    medians = [measure.spread(form["seconds"]).median for form in found["forms"].values() if form]
    found["mapped_median"] = min(medians, default=None)
    found["chain_median"] = measure.spread(found["chain"]["seconds"]).median if found["chain"] else None
    return found


def _limited(function: Callable[..., Any], granted: int, /, **arguments: Any) -> dict[str, Any] | None:
    """What the child function returns in a group of `granted` plus `PROCESS` bytes; None when that stopped it."""
    with MemoryGroup(granted + PROCESS) as group:
        try:
            result: dict[str, Any] = measure.call(function, group=group, timeout=PATIENCE, **arguments)
        except subprocess.TimeoutExpired:
            return None
        except measure.ChildError as error:
            if error.status == KILLED or "bad_alloc" in str(error):
                return None
            raise
        return {**result, "peak_bytes": group.peak_bytes()}


def _optimised(model: str, original: Path) -> Path:
    path = OPTIMISED / f"{model}.onnx"
    if not path.exists() or path.stat().st_mtime < original.stat().st_mtime:
        OPTIMISED.mkdir(parents=True, exist_ok=True)
        for stale in OPTIMISED.glob(f"{model}.onnx*"):
            stale.unlink()
        measure.call(optimise, model=str(original.resolve()), target=str(path.resolve()))
    return path
