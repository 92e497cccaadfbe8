"""Reads a line of text with an OCR model in less memory than half of its weights, after scripts/quickstart.sh.

Builds the chain of configs/quickstart.yaml unless it is there as that file has it, runs it in a process of its own
within the budget, and compares with the uncut model. Words for people first; the last line of standard output is one
JSON object. The exit status is the command line's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from trt_layering.config import Config, Model

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
IMAGE = ROOT / "docs" / "line.png"
RUNS = 20

Array = np.ndarray[Any, Any]


def main() -> int:
    """The whole demonstration, on the image named on the command line or the one kept in the repository."""
    from trt_layering import config

    image = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE
    settings = config.load(CONFIG)
    model = settings.model(None)
    onnx = config.resolve_model(model.onnx)
    chain = build_if_needed(model, ROOT / settings.deployment.repository)
    pixels = read_image(image, chain.inputs[0])
    budget = settings.deployment.memory_budget
    measured, output = run_in_own_process(settings, model, pixels)
    uncut = run_uncut(onnx, chain.inputs[0].name, pixels)
    found = {
        "text": decode(output),
        "weights_bytes": chain.weights_bytes,
        "model_bytes": onnx.stat().st_size,
        "budget_bytes": budget,
        **measured,
        "max_abs_diff": float(np.abs(output - uncut).max()),
        "max_abs_output": float(np.abs(uncut).max()),
    }
    show(image, found)
    print(json.dumps(found), flush=True)
    return 0


def build_if_needed(model: Model, repository: Path) -> Any:
    """The manifest of the model's chain, built now unless the newest one was built here in the same way."""
    from trt_layering import deploying
    from trt_layering.store.manifest import read_manifest, resolve
    from trt_layering.terminal import Progress

    if deploying.stale(model, repository) is None:
        return read_manifest(resolve(repository, model.name))
    print(f"building {model.name} from {model.for_build()['model'].name} ...", flush=True)
    with Progress(sys.stderr) as progress:
        return deploying.build(model, repository, progress).manifest


def read_image(file: Path, value: Any) -> Array:
    """As the model's own package does it: grey, 64 pixels high, pixels from 0 to 1."""
    from trt_layering.inputs import Pixels, image

    return image(file, value, Pixels())


def decode(logits: Array) -> str:
    """The text: the likeliest character at each step, repetitions joined, blanks left out."""
    import runpy

    from trt_layering.config import resolve_model

    characters = runpy.run_path(str(resolve_model("package:ddddocr/charsets.py")))["CHARSET_BETA"]
    steps = logits[:, 0].argmax(axis=-1).tolist()
    return "".join(
        characters[step] for step, last in zip(steps, [0, *steps[:-1]], strict=True) if step not in (0, last)
    )


def run_uncut(onnx: Path, name: str, pixels: Array) -> Array:
    """The whole model in memory, by plain ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    outputs: list[Array] = session.run(None, {name: pixels})
    return outputs[0]


def run_in_own_process(settings: Config, model: Model, pixels: Array) -> tuple[dict[str, Any], Array]:
    """Run the chain in one process and, in another, only import the modules that the first one had: the difference of
    their peaks is what the chain took."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/in.npy", pixels)
        repository = str(ROOT / settings.deployment.repository)
        told = child("run", folder, model.name, repository, str(int(settings.deployment.memory_budget or 0)))
        bare = child("import", *told.pop("modules"))
        output: Array = np.load(f"{folder}/out.npy")
    return {"peak_bytes": told.pop("peak_rss") - bare["peak_rss"], **told}, output


def child(*words: str) -> dict[str, Any]:
    """Run this file again as `words` say; what it meets is on its standard error and ends us too."""
    done = subprocess.run([sys.executable, __file__, "--child", *words], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def child_run(folder: str, name: str, repository: str, budget: str) -> dict[str, Any]:
    """The measured process: open, run, and tell the time, the peak and the modules that were imported."""
    import trt_layering as tl
    from trt_layering.runtime import meter

    tl.share_thread_pool()
    pixels = np.load(f"{folder}/in.npy")
    seconds = []
    with tl.open_chain(name, repository=repository, budget=int(budget)) as chain:
        feeds = {chain.inputs[0].name: pixels}
        for _ in range(RUNS):
            begin = time.perf_counter()
            outputs = chain.run(feeds)
            seconds.append(time.perf_counter() - begin)
        stats = chain.stats()
    peak = meter.peak_rss_bytes()
    np.save(f"{folder}/out.npy", next(iter(outputs.values())))
    return {
        "peak_rss": peak, "latency_ms": statistics.median(seconds) * 1e3, "floor_bytes": stats["floor_bytes"],
        "blocks": stats["blocks"], "modules": sorted(set(sys.modules) - {"__main__"}),
    }  # fmt: skip


def child_import(*modules: str) -> dict[str, Any]:
    """The process to compare with: the same modules and nothing else."""
    import contextlib
    import importlib

    from trt_layering.runtime import meter

    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    return {"peak_rss": meter.peak_rss_bytes()}


def show(image: Path, found: dict[str, Any]) -> None:
    """The same for people."""
    from trt_layering.table import columns
    from trt_layering.units import format_size

    rows = [
        ("picture", image),
        ("text read", found["text"]),
        ("weights", f"{format_size(found['weights_bytes'])} in {found['blocks']} blocks"),
        ("budget", f"{format_size(found['budget_bytes'])} (at least {format_size(found['floor_bytes'])} is needed)"),
        ("peak memory", f"{format_size(found['peak_bytes'])} beyond the imported libraries"),
        ("latency", f"{found['latency_ms']:.1f} ms, median of {RUNS} runs"),
        (
            "difference",
            f"{found['max_abs_diff']:.2g} from the uncut model, outputs up to {found['max_abs_output']:.3g}",
        ),
    ]
    print("\n".join(columns(rows)))


def guarded() -> int:
    """`main`, or a child's part, with errors in words."""
    from trt_layering.terminal import explain

    try:
        if sys.argv[1:2] != ["--child"]:
            return main()
        parts: dict[str, Callable[..., dict[str, Any]]] = {"run": child_run, "import": child_import}
        print(json.dumps(parts[sys.argv[2]](*sys.argv[3:])))
        return 0
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        explained = explain(error)
        print(f"error: {explained}", file=sys.stderr)
        return explained.exit_status


if __name__ == "__main__":
    sys.exit(guarded())
