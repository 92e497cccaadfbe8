"""The verb `bench`: what was asked for, checked before anything is measured; then the measuring, the files, the table.

May import the command line's words, the config, the sweep, and the figures when they are drawn. Budgets under the floor
raise BudgetError, whatever else makes no sense UsageError, and so before any work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_layering import arguments, inputs
from trt_layering.bench import figures
from trt_layering.bench.results import table
from trt_layering.bench.subjects import AGAINST, SUBJECTS
from trt_layering.bench.sweep import Request, default_budgets, newest, sweep
from trt_layering.config import resolve_model
from trt_layering.errors import UsageError
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import Chain, read_manifest
from trt_layering.terminal import Progress, Result
from trt_layering.units import parse_size
from trt_layering.words import quoted

RESULTS_FILE = "bench.json"
_FORMATS = (".svg", ".png")
_ON_THE_GPU = "the memory of the chain, which runs on the GPU, is the process's and what it took of the GPU's"
_PLAIN_ONES = "ONNX Runtime runs the uncut model on the processor, not on the GPU"


def bench(options: argparse.Namespace) -> Result:
    """Measure, write what was asked for, and tell."""
    target = arguments.Target.of(options)
    folder, plot = _places(options)
    for flag, number in (("--iterations", options.iterations), ("--rounds", options.rounds)):
        if number < 1:
            raise UsageError(f"{flag} must be 1 or more, not {number}")
    request, notes = _request(options, target)
    if plot is not None:
        figures.require()
    with Progress(sys.stderr) as progress:
        result = sweep(request, progress)
    result["notes"] = [*notes, *result["notes"]]
    if folder is not None and not figures.drawable():
        result["notes"].append("no pictures: Matplotlib is not installed (.venv/bin/pip install matplotlib)")
    written = _write(result, folder, plot)
    return Result(result, [*table(result), *(f"wrote {path}" for path in written)])


def _request(options: argparse.Namespace, target: arguments.Target) -> tuple[Request, list[str]]:
    """What is to be measured, and in words what is not."""
    repository = Path(target.repository)
    version_folder, version = newest(repository, target.name, target.version)
    chain = read_manifest(version_folder)
    needs = Footprint.of(chain)
    onnx = options.onnx or target.onnx
    against, notes = _against(options.against, onnx)
    if chain.tensorrt is not None:
        notes += [_ON_THE_GPU, *([_PLAIN_ONES] if any(SUBJECTS[name].needs_model for name in against) else [])]
    shapes = arguments.shapes(options.shape) or chain.memory.shapes
    request = Request(
        chain=chain, repository=repository, version=version, budgets=_budgets(options.budgets, needs, chain),
        against=against, model=resolve_model(onnx) if onnx else None,
        feeds=inputs.seeded(chain.inputs, shapes, options.seed), iterations=options.iterations, rounds=options.rounds,
        loader=target.loader,
    )  # fmt: skip
    return request, notes


def _budgets(text: str | None, needs: Footprint, chain: Chain) -> list[int]:
    """Bytes, from the smallest up, each once; BudgetError for one under the floor."""
    if text is None:
        return default_budgets(needs)
    budgets = sorted({parse_size(part, what="--budgets") for part in text.split(",")})
    for budget in budgets:
        needs.arena(budget, chain)
    return budgets


def _against(text: str | None, onnx: str | Path | None) -> tuple[list[str], list[str]]:
    """The names of the subjects to compare with, and notes on those that were left out."""
    without = [name for name in AGAINST if SUBJECTS[name].needs_model and not onnx]
    if text is None:
        notes = [f"{SUBJECTS[name].label} is left out: --onnx does not name the uncut model" for name in without]
        return [name for name in AGAINST if name not in without], notes
    asked = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in asked:
        if name not in AGAINST:
            what = f"--against {quoted(name)} is nothing to compare with"
            raise UsageError(what, remedy=f"name some of {', '.join(AGAINST)}")
        if name in without:
            raise UsageError(f"--against {name} needs the uncut model", remedy="add --onnx MODEL.onnx")
    return asked, []


def _places(options: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """The folder and the picture to write, whose places are there; UsageError where they cannot be."""
    folder = Path(options.output) if options.output is not None else None
    plot = Path(options.plot) if options.plot is not None else None
    if plot is not None and plot.suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot draw into {quoted(plot.name)}", where="--plot", remedy="name a .svg or a .png file")
    if plot is not None and not plot.parent.is_dir():
        what = f"there is no folder {quoted(str(plot.parent))}"
        raise UsageError(what, where="--plot", remedy="make it, or name another")
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            what = f"{quoted(str(folder))} is no folder"
            raise UsageError(what, where="--output", remedy="name another, which need not be there yet")
        folder.mkdir(parents=True, exist_ok=True)
    return folder, plot


def _write(result: Mapping[str, Any], folder: Path | None, plot: Path | None) -> Sequence[Path]:
    """The files that were asked for; first the numbers, which need no other package."""
    written = []
    if folder is not None:
        written.append(folder / RESULTS_FILE)
        written[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for suffix in _FORMATS if figures.drawable() else ():
            written.append(figures.draw_curve(result, folder / f"curve{suffix}"))
            if result["timeline"] is not None:
                written.append(figures.draw_timeline(result, folder / f"timeline{suffix}"))
    if plot is not None:
        written.append(figures.draw_curve(result, plot))
    return written
