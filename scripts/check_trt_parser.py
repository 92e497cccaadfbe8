#!/usr/bin/env python3
"""Does NVIDIA's own ONNX parser take the blocks, and its builder compile them? On a machine without a GPU.

    .venv/bin/python scripts/check_trt_parser.py FILE.onnx ...
    .venv/bin/python scripts/check_trt_parser.py --model MODEL.onnx [--shape x:1x3x48x96 [--max-shape x:4x3x48x320]]
    .venv/bin/python scripts/check_trt_parser.py --positions

MODEL.onnx is a path, or package:FOLDER/FILE as for `trt-layering build`.

--model prepares and cuts the model as a build for TensorRT does and checks every different block twice: with its
streamed weights as inputs of the engine, and with all weights constant. --positions checks what the product takes for
granted: each operator and input whose weights it streams.

The parser and the builder are those of TensorRT-RTX, under the Python bindings of TensorRT 11: two pinned wheels of the
public package index, which the first call puts into an environment of their own (about 150 MB to download, 400 MB on
disk). That a block is taken says nothing of refitting, of speed, of numbers, or of older versions of TensorRT.

The exit status is 0 if everything was taken, 1 if something was refused, 2 if nothing could be checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_parser_environment import WHEELS, Unchecked, prepared

if TYPE_CHECKING:
    from trt_layering.backends.base import CutBlock
    from trt_layering.backends.tensorrt.profiles import Found
    from trt_layering.shapes import ShapeRange

PATIENCE = 300.0
MEMORY = 1 << 30  # as a build has by default
Profile = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Case:
    """One file to be checked, what to call it, and the ranges of its inputs' shapes."""

    name: str
    file: Path
    profile: Profile


def main() -> int:
    options = _arguments()
    try:
        import onnx  # noqa: F401

        from trt_layering.errors import LayeringError
    except ModuleNotFoundError as error:
        print(f"error: {sys.executable} has no {error.name}", file=sys.stderr)
        print("  to do: pip install -e . first, or call this with .venv/bin/python", file=sys.stderr)
        return 2
    try:
        if not (options.files or options.model or options.positions):
            raise Unchecked("there is nothing to check\n  to do: name files, or --model MODEL.onnx; see --help")
        environment = prepared(options.environment)
        with tempfile.TemporaryDirectory(prefix="trt-parser-") as folder:
            cases = list(_cases(options, Path(folder)))
            refused = _check(cases, environment)
    except (Unchecked, LayeringError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(cases) - refused} of {len(cases)} taken by {WHEELS[0]}")
    return 1 if refused else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.onnx", help="checked as they are")
    parser.add_argument("--model", action="append", default=[], help="a model, checked block by block")
    parser.add_argument("--positions", action="store_true", help="check each position whose weights are streamed")
    parser.add_argument("--block-size", default="auto", help="as for a build (default: auto)")
    for flag in ("--shape", "--min-shape", "--max-shape"):
        parser.add_argument(flag, action="append", default=[], metavar="NAME:SHAPE", help="of a model's input")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trt_layering" / "trt-parser"
    parser.add_argument("--environment", type=Path, default=cache, help="where the wheels go (default: %(default)s)")
    return parser.parse_args()


def _cases(options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    for file in options.files:
        if not file.is_file():
            raise Unchecked(f"there is no file {file}\n  to do: name ONNX files")
        yield Case(str(file), file.absolute(), {})
    from trt_layering.config import resolve_model

    for index, model in enumerate(options.model):
        yield from _blocks(resolve_model(model), options, folder / f"model-{index}")
    if options.positions:
        from trt_parser_positions import positions

        for name, file in positions(folder):
            yield Case(name, file, {})


# ------------------------------------------------------------------------------------------------------------ checks


def _check(cases: Sequence[Case], environment: Path) -> int:
    """How many were refused; each is told in a line."""
    refused = 0
    worker: _Worker | None = None
    for number, case in enumerate(cases, 1):
        worker = worker or _Worker(environment)
        answer = worker.ask(case)
        if answer is None:
            answer = {"stage": "check", "words": worker.end()}
            worker = None
        told = f"[{number}/{len(cases)}] {case.name}:"
        if answer["stage"]:
            refused += 1
            print(f"{told} REFUSED by the {answer['stage']}: {answer['words']}", flush=True)
        else:
            print(f"{told} taken, {answer['inputs']} inputs, {answer['layers']} layers, plan {answer['plan']} bytes")
    if worker is not None:
        worker.end()
    return refused


class _Worker:
    """A process in the environment, which may die of what it is asked."""

    def __init__(self, environment: Path) -> None:
        variables = {**os.environ, "LD_LIBRARY_PATH": str(environment / "lib")}
        variables.pop("PYTHONPATH", None)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(environment / "venv/bin/python"), str(Path(__file__).with_name("trt_parser_worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables,
        )  # fmt: skip

    def ask(self, case: Case) -> dict[str, Any] | None:
        """Its answer, or None if it died or took too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        limit = threading.Timer(PATIENCE, self._process.kill)
        limit.start()
        try:
            print(json.dumps({"file": str(case.file), "profile": case.profile}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            limit.cancel()
        return json.loads(line) if line else None

    def end(self) -> str:
        """Stop it, and say how it ended and what it said."""
        self._process.communicate()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()[-1000:]
        self._errors.close()
        return f"the library ended the process with status {self._process.returncode}: {said}"


# ------------------------------------------------------------------------------------------------- blocks of a model


def _blocks(path: Path, options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Both forms of each different block of the model at `path`, written to `folder`."""
    import onnx_ir as ir

    from trt_layering.graph.canonical import as_inputs, canonical, save_with_weights, shaped

    folder.mkdir()
    blocks, found = _prepared(path, options, folder)
    seen: set[str] = set()
    for index, block in enumerate(blocks):
        form = shaped(canonical(block.graph, block.weights), found.dims)
        if (key := form.key(found.ranges)) in seen:
            continue
        seen.add(key)
        profile = {
            f"i{at}": [list(shape) for shape in _ends(found.ranges[name])] for at, name in enumerate(form.inputs)
        }
        for kind in ("inputs", "constants"):
            file = folder / f"block-{index:03d}-{kind}.onnx"
            if kind == "inputs":
                ir.save(as_inputs(form), file)
            else:
                save_with_weights(form, file)
            yield Case(f"{path.name} block {index}, weights as {kind}", file, profile)
    print(f"{path.name}: {len(blocks)} blocks, {len(seen)} different", flush=True)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _ends(span: Any) -> tuple[tuple[int, ...], ...]:
    return span.min, span.opt, span.max


def _prepared(path: Path, options: argparse.Namespace, folder: Path) -> tuple[list[CutBlock], Found]:
    """The model's blocks as a build makes them, and the shapes of what they take and make."""
    from trt_layering.assembly import Cutting, cut_windows
    from trt_layering.backends.tensorrt.builder import TensorRtBuilder, Wanted
    from trt_layering.backends.tensorrt.profiles import ranges
    from trt_layering.backends.values import as_value
    from trt_layering.building import _block_size, _dims, _divide, _trials
    from trt_layering.graph.model import infer_shapes, normalise, open_model
    from trt_layering.units import parse_size

    source = open_model(path)
    normalise(source)
    infer_shapes(source)
    auto = options.block_size == "auto"
    size = _block_size(source.graph, "fp32") if auto else parse_size(options.block_size, what="--block-size")
    known, shapes = tuple(map(as_value, source.graph.inputs)), _shape_ranges(options)
    dims = _dims(source.graph, _trials(known, shapes)[0])
    _divide(source, size)
    builder = TensorRtBuilder(Wanted("inputs", "staged", folder))
    windows = builder.prepare(source, folder, MEMORY, _silent)
    blocks = list(cut_windows(builder, windows, Cutting(size, dims)))
    return blocks, ranges([block.graph for block in blocks], known, shapes, folder, _silent)


def _shape_ranges(options: argparse.Namespace) -> Mapping[str, ShapeRange]:
    from trt_layering.arguments import shapes
    from trt_layering.shapes import ShapeRange

    usual, least, most = map(shapes, (options.shape, options.min_shape, options.max_shape))
    return {
        name: ShapeRange(least.get(name, shape), shape, most.get(name, shape)).checked()
        for name, shape in usual.items()
    }


if __name__ == "__main__":
    sys.exit(main())
