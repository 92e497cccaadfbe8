"""The command `trt-layering`: one function a verb; the heavy imports are inside those.

May import everything. Nothing leaves `main` but an exit status: 0 done, 1 failed, 2 usage or configuration, 3 does not
fit the budget, 4 store corrupt or built for something else, 130 interrupted, 141 nobody reads the output. What a person
reads goes to standard output, or with --json one object; progress and errors go to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_layering import arguments
from trt_layering.errors import LayeringError, UsageError
from trt_layering.shapes import format_shape
from trt_layering.table import columns
from trt_layering.terminal import Progress, Result, Terminal, explain, say
from trt_layering.units import format_size
from trt_layering.words import printable, quoted

if TYPE_CHECKING:
    import numpy as np

    from trt_layering.config import Model
    from trt_layering.inputs import Feeds
    from trt_layering.runtime.chain import Chain
    from trt_layering.store.manifest import Value


_INTERRUPTED = 130
_SILENT = logging.NullHandler()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is without the program's name, None for the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.getLogger("onnx_ir").addHandler(_SILENT)  # what it warns of is an error of ours, or does not matter
    terminal = Terminal(as_json=any(word.partition("=")[0] == "--json" for word in words))
    try:
        with terminal.only_results_on_stdout():
            options = arguments.parsed(words, _VERBS)
            options.whole_process = argv is None
            result: Result = options.verb(options)
        return terminal.show(result)
    except KeyboardInterrupt:
        return terminal.failed(LayeringError("interrupted"), _INTERRUPTED)
    except SystemExit as left:  # argparse, after --help and --version
        return terminal.leave(say("", sys.stdout), left.code if isinstance(left.code, int) else 0)
    except Exception as error:
        return _report(terminal, error)
    finally:
        say("", sys.stderr)


def _report(terminal: Terminal, error: Exception) -> int:
    if os.environ.get("TRT_LAYERING_TRACEBACK"):
        say("".join(traceback.format_exception(error)), sys.stderr)
    explained = explain(error)
    return terminal.failed(explained, explained.exit_status)


def build(options: argparse.Namespace) -> Result:
    """Build the chain of one ONNX file, or of every model of a deployment (with --name: of that one)."""
    repository, models = arguments.models_to_build(options)
    _share_thread_pool(options)
    if options.all:
        return _build_all(models, repository)
    told = [_build(model, repository) for model in models]
    lines = []
    for one in told:
        lines += [
            f"built {one['name']} version {one['version']} in {one['seconds']:.1f} s: {one['path']}",
            f"  {one['blocks']} blocks, {format_size(one['weights_bytes'])} of weights; "
            f"runs in {format_size(one['floor_bytes'])} or more",
            f"  differs from the uncut model by {one['max_abs_diff']:.3g} (largest output {one['max_abs_output']:.3g})",
            *(f"  {line}" for line in one.pop("cost_lines")),
        ]
    return Result({"models": told}, lines)


def _build_all(models: Sequence[Model], repository: str) -> Result:
    """Build what is not up to date, a line on standard error for each thing that happens; status 1 if one failed."""
    from trt_layering import deploying
    from trt_layering.interrupts import interruptible
    from trt_layering.terminal import Steps

    def tell(text: str) -> None:
        say("".join(f"{printable(line)}\n" for line in text.split("\n")), sys.stderr)

    with interruptible():
        outcomes = deploying.build_all(models, Path(repository), lambda name: Steps(sys.stderr, name), tell)
    return deploying.told(outcomes)


def _share_thread_pool(options: argparse.Namespace) -> None:
    """One thread pool for all engines, where nobody else's sessions could be harmed by it; imports onnxruntime."""
    if options.whole_process:
        import trt_layering as tl

        tl.share_thread_pool()


def _build(model: Model, repository: str) -> dict[str, Any]:
    import trt_layering as tl
    from trt_layering import deploying
    from trt_layering.costs import cost_lines, costs, halves

    begin = time.monotonic()
    with Progress(sys.stderr) as progress:
        built = deploying.build(model, Path(repository), progress)
    manifest, path = built.manifest, Path(built.path)
    return {
        "name": model.name, "version": int(path.name), "path": str(path), "seconds": time.monotonic() - begin,
        "backend": manifest.backend.name, "precision": manifest.precision, "blocks": len(manifest.blocks),
        "weights_bytes": manifest.weights_bytes, "floor_bytes": tl.footprint(model.name, repository=repository).floor,
        "max_abs_diff": manifest.check.max_abs_diff, "max_abs_output": manifest.check.max_abs_output,
        "weights": manifest.weights, "narrowed": costs(manifest), "halved": halves(manifest),
        "cost_lines": cost_lines(manifest),
    }  # fmt: skip


def run(options: argparse.Namespace) -> Result:
    """Open a chain, run it, and tell what came out, how long it took and what memory it took."""
    target = arguments.Target.of(options)
    from trt_layering.runtime.footprint import MOST_WAVE, USUAL_WAVE

    if options.wave is not None and not 1 <= options.wave <= MOST_WAVE:
        what = f"--wave must be 1 to {MOST_WAVE}, not {quoted(options.wave)}"
        raise UsageError(what, remedy=f"try {USUAL_WAVE}")
    iterations = (options.wave or 1) if options.iterations is None else options.iterations
    if iterations < 1:
        raise UsageError(f"--iterations must be 1 or more, not {iterations}")
    import trt_layering as tl
    from trt_layering.runtime import meter
    from trt_layering.runtime.trace import writable

    _share_thread_pool(options)
    loader = tl.LoaderOptions(**{**target.loader, **arguments.loader_flags(options)})
    trace, trace_file = (None, None) if options.trace is None else (tl.Trace(), writable(options.trace))
    with tl.open_chain(
        target.name, repository=target.repository, budget=_granted(target), version=target.version, loader=loader,
        wave=options.wave or 1, trace=trace,
    ) as chain:  # fmt: skip
        output = _output_file(options.output, len(chain.outputs))
        with Progress(sys.stderr) as progress:
            outputs, seconds = _run(chain, options, iterations, progress)
        stats = chain.stats()
    if output is not None:
        _write(output, outputs)
    if trace is not None and trace_file is not None:
        trace.write(trace_file)
    return _ran(target.name, outputs, seconds, stats, meter.peak_rss_bytes(), options.wave or 1)


def _run(
    chain: Chain, options: argparse.Namespace, iterations: int, progress: Progress
) -> tuple[dict[str, Any], list[float]]:
    """The outputs of the last of `iterations` requests, and the seconds that each took; in a wave, its share. In waves,
    each has random inputs of its own."""
    seconds: list[float] = []
    usual = chain.manifest.usual_shapes
    alone = None if options.wave else _feeds(options, chain.inputs, usual)
    while len(seconds) < iterations:
        numbers = range(len(seconds), min(len(seconds) + (options.wave or 1), iterations))
        wave = [_feeds(options, chain.inputs, usual, number) if alone is None else alone for number in numbers]
        begin = time.perf_counter()
        outputs = chain.run_many(wave, wave=options.wave)[-1] if alone is None else chain.run(alone)
        seconds += [(time.perf_counter() - begin) / len(wave)] * len(wave)
        progress("runs", len(seconds), iterations)
    return outputs, seconds


def _feeds(
    options: argparse.Namespace, values: Sequence[Value], usual: Mapping[str, Sequence[int]], number: int = 0
) -> Feeds:
    """Arrays for the inputs `values`, from the files that were named or else random ones, others for each `number`; of
    the `usual` shapes where none were asked for."""
    from trt_layering import inputs

    shapes, pixels = arguments.shapes(options.shape), arguments.pixels(options)
    if options.input:
        return inputs.load(options.input, values, shapes=shapes, pixels=pixels)
    return inputs.seeded(values, shapes or usual, options.seed + number)


def _ran(
    name: str, outputs: Mapping[str, Any], seconds: Sequence[float], stats: Mapping[str, Any], peak: int, wave: int
) -> Result:
    """What to tell of runs in waves of `wave`; the first wave, which also waits for the first reads, by itself."""
    told = {key: _summary(array) for key, array in outputs.items()}
    later = seconds[wave:]
    first, median = seconds[0], statistics.median(later or seconds)
    per_second = len(later or seconds) / sum(later or seconds)
    data = {
        "name": name, "iterations": len(seconds), "first_ms": first * 1e3, "median_ms": median * 1e3, "wave": wave,
        "requests_per_second": per_second, "process_peak_bytes": peak, "outputs": told, "stats": dict(stats),
    }  # fmt: skip
    each = ", for each request" if wave > 1 else ""
    rows = [(f"first {'wave' if each else 'run'}{each}", f"{first * 1e3:.2f} ms")]
    rows += [(f"later {'waves' if each else 'runs'}, median{each}", f"{median * 1e3:.2f} ms")] if later else []
    rows += [("requests per second", f"{per_second:.3g}")] if each else []
    for words, key in (("waited for weights", "stall_seconds"), ("executed", "execute_seconds")):
        rows.append((f"{words}, all runs", f"{stats[key] * 1e3:.2f} ms"))
    if stats["read_rate"]:
        rows.append(("the drive read", f"{stats['read_rate'] / 1e6:.0f} MB/s"))
    for key in ("budget", "floor", "arena", "resident"):
        if stats.get(f"{key}_bytes"):
            rows.append((key, format_size(stats[f"{key}_bytes"])))
    if stats["device_bytes"]:
        rows.append(("taken of the GPU's memory", format_size(stats["device_bytes"])))
    rows.append(("whole process with Python and libraries, peak", format_size(peak)))
    notes = [f"note: {note}" for note in stats["fallbacks"]]
    return Result(data, [*columns([_output_row(key, part) for key, part in told.items()]), *columns(rows), *notes])


def _output_row(name: str, told: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = "" if told["min"] is None else f"min {told['min']:.6g}  max {told['max']:.6g}"
    return name, told["dtype"], format_shape(told["shape"]), numbers


def _summary(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape), "min": None, "max": None}
    if array.size and array.dtype.kind != "O":
        with contextlib.suppress(TypeError, ValueError):
            told |= {"min": float(array.min()), "max": float(array.max())}
    return told


def _output_file(text: str | None, outputs: int) -> Path | None:
    """Where `outputs` arrays are to go; UsageError where they cannot."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix != ".npz" and (path.suffix != ".npy" or outputs != 1):
        raise UsageError(f"cannot write {outputs} outputs to {path.name!r}", remedy="name a .npz file")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r}", where=text, remedy="make it, or name another")
    return path


def _write(path: Path, outputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """All outputs as a .npz, or the only one as a .npy; plain arrays, no pickles."""
    try:
        _save(path, {key: array.astype(str) if array.dtype.kind == "O" else array for key, array in outputs.items()})
    except OSError as error:
        what = f"the outputs cannot be written: {error.strerror or error}"
        raise LayeringError(what, where=str(path), remedy="free some disk space, or name another file") from error


def _save(path: Path, plain: Mapping[str, np.ndarray[Any, Any]]) -> None:
    import zipfile

    import numpy as np

    if path.suffix == ".npy":
        np.save(path, next(iter(plain.values())), allow_pickle=False)
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.ascontiguousarray(array), allow_pickle=False)


def verify(options: argparse.Namespace) -> Result:
    """Compare a chain's outputs with the uncut model's; status 1 if they differ by more than is allowed."""
    target = arguments.Target.of(options)
    onnx = options.onnx or target.onnx
    if onnx is None:
        raise UsageError("verify needs the uncut model", remedy="add --onnx MODEL.onnx")
    import trt_layering as tl
    from trt_layering.config import resolve_model
    from trt_layering.store.manifest import read_manifest, resolve

    _share_thread_pool(options)
    manifest = read_manifest(resolve(Path(target.repository), target.name, target.version))
    found = tl.verify(
        target.name, onnx=resolve_model(onnx), repository=target.repository, budget=_granted(target),
        version=target.version, loader=tl.LoaderOptions(**target.loader), tolerance=options.tolerance,
        feeds=_feeds(options, manifest.inputs, {}) if options.input or options.shape else None, seed=options.seed,
    )  # fmt: skip
    data = {
        "name": target.name, "onnx": str(onnx), "passed": found.passed, "max_abs_diff": found.max_abs_diff,
        "max_abs_output": found.max_abs_output, "per_output": found.per_output,
    }  # fmt: skip
    verdict = "agrees with" if found.passed else "DIFFERS from"
    numbers = f"largest difference {found.max_abs_diff:.3g}, largest output {found.max_abs_output:.3g}"
    return Result(data, [f"{target.name} {verdict} {onnx}: {numbers}"], 0 if found.passed else 1)


def schedule(options: argparse.Namespace) -> Result:
    """Tell what a budget buys, of one chain or divided among a deployment's models; status 3 if it does not fit."""
    from trt_layering import planning, sharing, telling

    config = arguments.config_of(options.target)
    rate = arguments.read_rate(options)
    _share_thread_pool(options)
    if config is None or options.name is not None:
        target = arguments.Target.of(options)
        told = planning.forecast(
            target.name, repository=target.repository, budget=_granted(target), version=target.version, read_rate=rate
        )
        return telling.forecast(told)
    if options.chain_version is not None or rate is not None:
        remedy = "choose one with --name, or leave out --chain-version and --read-rate"
        raise UsageError("--chain-version and --read-rate are for one model", remedy=remedy)
    return telling.division(sharing.division(config, repository=options.repository, budget=arguments.budget(options)))


def _granted(target: arguments.Target) -> int | None:
    """The bytes of a target: of a deployment's budget, a model's share. To be asked once the thread pool is shared."""
    if target.divided is None:
        return target.budget
    from trt_layering import sharing

    return sharing.share_of(target.name, target.divided, repository=target.repository)


def bench(options: argparse.Namespace) -> Result:
    """Measure a chain at many budgets beside what else there is, and draw it."""
    from trt_layering.bench import command

    _share_thread_pool(options)
    return command.bench(options)


def inspect(options: argparse.Namespace) -> Result:
    """Tell what is in a chain or a file."""
    from trt_layering.inspect import examine

    report = examine(options.target, repository=options.repository or "engines", version=options.chain_version)
    return Result(report.data, report.lines)


def profile(options: argparse.Namespace) -> Result:
    """Measure a chain and its drive again, keep the profile, and tell what it says."""
    import msgspec

    import trt_layering as tl
    from trt_layering.profiling import describe
    from trt_layering.store.manifest import read_manifest, resolve

    repository, version = options.repository or "engines", options.chain_version
    with Progress(sys.stderr) as progress:
        found = tl.profile(options.target, repository=repository, version=version, progress=progress)
    chain = read_manifest(resolve(Path(repository), options.target, version))
    return Result({"name": options.target, **msgspec.to_builtins(found)}, columns(describe(chain)))


def doctor(options: argparse.Namespace) -> Result:
    """Tell what this machine has; status 1 if something keeps chains from running."""
    from trt_layering.doctor import examine

    config = arguments.config_of(options.target) if options.target else None
    if options.target and config is None:
        raise UsageError(f"{options.target!r} is no CONFIG.yaml", remedy="name a .yaml file, or none")
    repository = options.repository or (config.deployment.repository if config else "engines")
    findings = examine(repository)
    settings = config.settings() if config else []
    rows = [(finding.status, finding.name, finding.value) for finding in findings]
    lines = []
    for line, finding in zip(columns(rows), findings, strict=True):
        lines += [line, *([f"      to do: {finding.remedy}"] if finding.remedy else [])]
    if settings:
        lines += ["", *columns([(setting.field, setting.value, setting.origin) for setting in settings])]
    data = {
        "findings": [asdict(finding) for finding in findings],
        "settings": [asdict(setting) for setting in settings],
    }
    return Result(data, lines, 1 if any(finding.status == "fail" for finding in findings) else 0)


def serve(options: argparse.Namespace) -> Result:
    """Serve the models of a deployment over HTTP until a signal ends it."""
    if not options.target.endswith((".yaml", ".yml")):
        raise UsageError(f"{quoted(options.target)} is no CONFIG.yaml", remedy="name a .yaml file")
    try:
        from trt_layering.service.logs import logging_to
        from trt_layering.service.serving import serve as serve_until_told
    except ModuleNotFoundError as error:
        remedy = "pip install 'trt-layering[serve]'"
        raise LayeringError(f"{error.name} is not installed", remedy=remedy) from error
    _share_thread_pool(options)
    with logging_to(form=options.log):
        serve_until_told(options.target, options.repository)
    return Result({"served": options.target}, [])


_VERBS = {
    "build": build, "run": run, "verify": verify, "schedule": schedule, "bench": bench, "inspect": inspect,
    "profile": profile, "doctor": doctor, "serve": serve,
}  # fmt: skip
