"""The part "tensorrt": chains of small models, with each binding, on this GPU. Each check runs in a process of its own,
which is ended when its time is up.

Imports the package; what needs TensorRT is imported in the checks' processes. A check returns numbers or raises.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.gpu import models
from tests.gpu.report import LeftOut, Numbers, Part, Wrong, attempted, carry_out, not_carried_out
from trt_layering.backends.tensorrt import present

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 150.0
_RUNS = 5
_SPARE = 64 << 20
"""Bytes by which a GPU's driver may exceed a budget: it gives memory in large pieces, also to others."""
_LATE = "run it again on an idle machine, and post both reports"

Check = Callable[[Path, models.Sizes], Numbers]


def titles() -> list[str]:
    """The checks, in order: what is most worth knowing first."""
    return list(_CHECKS)


def part(chosen: Sequence[str], folder: Path, small: bool, until: float, say: Callable[[str], None]) -> Part:
    """Carry out the checks `chosen`, all by `until` (of time.monotonic); files go to `folder`. Where TensorRT cannot be
    used, none, and the part says why."""
    missing = present.missing()
    if missing is not None:
        return not_carried_out("tensorrt", missing, say)
    return carry_out("tensorrt", [(title, partial(_apart, title, folder, small, until)) for title in chosen], say)


def _apart(title: str, folder: Path, small: bool, until: float) -> Numbers:
    """One check in a process of its own, and of a session of its own, so that its children end with it."""
    seconds = min(_LIMIT, until - time.monotonic())
    if seconds <= 0:
        raise Wrong("not carried out, for want of time", f"run scripts/gpu_check.sh --check '{title}'")
    told, log = folder / "told.json", folder / "log.txt"
    told.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu.tensorrt_check", title, str(folder), "small" if small else "full"]
    with log.open("wb") as out:
        child = subprocess.Popen(command, cwd=_ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Wrong(f"did not end within {seconds:.0f} s and was stopped", _LATE) from None
        finally:
            _end(child)
    if not told.exists():
        tail = log.read_text(errors="replace")[-1000:]
        raise Wrong(f"its process ended with {child.returncode}: {tail}", "post the report: this is a fault of ours")
    found = json.loads(told.read_text())
    if found["left_out"]:
        raise LeftOut(found["words"])
    if not found["ok"]:
        raise Wrong(found["words"], found["to_do"])
    numbers: Numbers = found["numbers"]
    return numbers


def _end(child: subprocess.Popen[bytes]) -> None:
    """The session of `child`, whatever is left of it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()


# ------------------------------------------------------------------------------------------- in the process of a check


def main(title: str, folder: str, size: str) -> None:
    """Carry out one check, and leave what it found."""
    sizes = models.SMALL if size == "small" else models.FULL
    found = attempted(title, lambda: _CHECKS[title](Path(folder), sizes))
    Path(folder, "told.json").write_text(json.dumps(asdict(found)))


def _with_binding(model: str, binding: str, folder: Path, sizes: models.Sizes) -> Numbers:
    """The chain of a model gives ONNX Runtime's answers at every budget, in the memory it was given."""
    made = models.MODELS[model](folder, sizes)
    name = f"{model}-{binding}"
    numbers, built = _built(made, name, folder, binding=binding, block_size=made.block_size)
    wanted = _uncut(made)
    numbers["budgets"] = {
        words: _at(budget, made, name, folder, wanted, built) for words, budget in _budgets(built.manifest).items()
    }
    return numbers


def _in_fp16(model: str, folder: Path, sizes: models.Sizes) -> Numbers:
    """The same computing in float16: what it saves, and how far it is off."""
    made = models.MODELS[model](folder, sizes)
    name = f"{model}-fp16"
    numbers, built = _built(made, name, folder, binding="inputs", block_size=made.block_size // 2, precision="fp16")
    halved = built.manifest.halved
    numbers |= {"nodes_in_fp16": sum(one.halved for one in halved), "nodes_kept": sum(len(one.kept) for one in halved)}
    numbers["saved_bytes"] = sum(one.saved_bytes for one in halved)
    budget = _budgets(built.manifest)["middle"]
    numbers["budgets"] = {"middle": _at(budget, made, name, folder, _uncut(made), built)}
    return numbers


def _whole(model: str, folder: Path, sizes: models.Sizes) -> Numbers:
    """One plan for the whole model, to compare the sum of blocks with."""
    made = models.MODELS[model](folder, sizes)
    return _built(made, f"{model}-uncut", folder, binding="inputs", block_size=1 << 30)[0]


_CHECKS: dict[str, Check] = {
    "convolutions with inputs": partial(_with_binding, "convolutions", "inputs"),
    "layers with inputs": partial(_with_binding, "layers", "inputs"),
    "layers with refit": partial(_with_binding, "layers", "refit"),
    "layers with swap": partial(_with_binding, "layers", "swap"),
    "layers uncut": partial(_whole, "layers"),
    "layers in fp16": partial(_in_fp16, "layers"),
    "convolutions with refit": partial(_with_binding, "convolutions", "refit"),
    "convolutions with swap": partial(_with_binding, "convolutions", "swap"),
    "convolutions uncut": partial(_whole, "convolutions"),
    "convolutions in fp16": partial(_in_fp16, "convolutions"),
    "a real model with inputs": partial(_with_binding, "real", "inputs"),
}


def _built(made: models.Model, name: str, folder: Path, **asked: Any) -> tuple[Numbers, Any]:
    """The chain, and what building it measured of its blocks, each by itself."""
    import trt_layering as tl

    shapes = {key: list(array.shape) for key, array in made.feeds.items()}
    begin = time.perf_counter()
    with _measurements() as measured:
        built = tl.build(
            made.path, name=name, repository=folder / "engines", backend="tensorrt", shapes=shapes, **asked
        )
    manifest = built.manifest
    assert manifest.tensorrt is not None
    return {
        "build_seconds": time.perf_counter() - begin, "blocks": len(manifest.blocks),
        "plans": len({block.file for block in manifest.blocks}), "weights_bytes": manifest.weights_bytes,
        "plan_bytes": sum(block.plan_bytes for block in measured), "placement": manifest.tensorrt.placement,
        "bind_seconds": sum(block.bind_seconds for block in measured),
        "execute_seconds": sum(block.execute_seconds for block in measured),
        "max_rel_diff": max((block.max_rel_diff for block in measured), default=0.0),
    }, built  # fmt: skip


@contextmanager
def _measurements() -> Iterator[list[Any]]:
    """What `trials.measure` finds meanwhile."""
    from trt_layering.backends.tensorrt import trials

    found: list[Any] = []
    measure = trials.measure

    def kept(*arguments: Any) -> Any:
        found[:] = measure(*arguments)
        return list(found)

    trials.measure = kept
    try:
        yield found
    finally:
        trials.measure = measure


def _uncut(made: models.Model) -> dict[str, models.Array]:
    import onnxruntime as ort

    session = ort.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, made.feeds), strict=True))


def _budgets(manifest: Any) -> dict[str, int]:
    """The least, one that streams about a third of the weights, and all of it."""
    from trt_layering.runtime.footprint import Footprint

    needs = Footprint.of(manifest)
    middle = max(needs.largest_block, needs.weights * 2 // 3 // 4096 * 4096)
    return {"floor": max(needs.floor, 1), "middle": max(needs.fixed + middle, 1), "all": max(needs.resident, 1)}


def _at(
    budget: int, made: models.Model, name: str, folder: Path, wanted: Mapping[str, models.Array], built: Any
) -> Numbers:
    """Answers, times, overlap and memory of the chain at one budget. Raises Wrong."""
    import trt_layering as tl

    trace, seconds, worst, taken, asked = tl.Trace(), [], 0.0, 0, time.perf_counter()
    with tl.open_chain(name, repository=folder / "engines", budget=budget, trace=trace) as chain:
        open_seconds = time.perf_counter() - asked
        for _ in range(_RUNS):
            begin = time.perf_counter()
            got = chain.run(made.feeds)
            seconds.append(time.perf_counter() - begin)
            worst = max(worst, *(_apart_by(wanted[key], got[key]) for key in wanted))
            taken = max(taken, chain.stats()["device_bytes"])
        stats, integrated = chain.stats(), built.manifest.backend.fingerprint["memory"] == "integrated"
    numbers = {
        "open_seconds": open_seconds, "first_run_seconds": seconds[0], "run_seconds": median(seconds[1:]),
        "max_rel_diff": worst, "mode": stats["mode"], "budget_bytes": budget,
        "device_bytes": taken, "stall_seconds": stats["stall_seconds"] / _RUNS,
        "bytes_read": stats["bytes_read"], "notes": stats["fallbacks"], **_overlap(trace),
    }  # fmt: skip
    allowed = built.manifest.check.tolerance
    if not worst <= allowed:
        raise Wrong(f"at a budget of {budget} an output differs by {worst:.3g}, over {allowed:.3g}", _REPORT)
    if not integrated and taken > budget + _SPARE:
        raise Wrong(f"at a budget of {budget} the driver has {taken} bytes less", _REPORT)
    return numbers


_REPORT = "post the report with the output of scripts/gpu_check.sh: this is a fault of ours"


def _apart_by(wanted: models.Array, got: models.Array) -> float:
    from trt_layering.compare import difference

    diff, scale = difference(wanted, got)
    return diff / scale if scale else diff


def _overlap(trace: Any) -> Numbers:
    """Seconds in which something was read, in which something executed, and in which both were, after the first run."""
    events = [event for event in trace.events if event.sweep > 0]
    reads, executions = (
        _union([(event.begin, event.end) for event in events if event.kind == kind]) for kind in ("read", "execute")
    )
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in reads for b in executions)
    return {"reading_seconds": _length(reads), "executing_seconds": _length(executions), "both_seconds": both}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _length(spans: list[tuple[float, float]]) -> float:
    return float(np.sum([end - begin for begin, end in spans])) if spans else 0.0


if __name__ == "__main__":
    main(*sys.argv[1:])
