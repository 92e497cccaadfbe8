"""What shapes activations have, from the smallest to the largest, found by executing the blocks on ONNX Runtime.

May import child, inputs, shapes, the graph room, the store's types and the ONNX Runtime backend; nothing of TensorRT.
A size that depends on more than the shapes of the model's inputs raises BuildError, which names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trt_layering import child, inputs
from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.runtime import reported, return_memory, run_plainly, uncut_options
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.errors import BackendError, BuildError
from trt_layering.graph.shape_tensors import shape_inputs
from trt_layering.graph.stored import unmapped
from trt_layering.shapes import ShapeRange, format_shape
from trt_layering.store.manifest import Range, Shape, Value

_SEEDS = (0, 1)
_LABELS = ("min", "opt", "max")
_MOST_ALONE = 4
"""How many of the sizes that vary are taken one by one, each a pass over the model."""


@dataclass(frozen=True)
class Found:
    """The range of each value's shape by name, and the shape itself: numbers where it never varies, and names for the
    others, such that sizes have one name if they were the same in every pass."""

    ranges: dict[str, Range]
    dims: dict[str, tuple[int | str, ...]]


@dataclass(frozen=True)
class _Run:
    """One pass over all blocks: `label` says at which of the shapes, `shapes` is what came out, `live` what is still
    needed."""

    label: str
    seed: int
    live: child.Feeds
    shapes: dict[str, Shape]


def ranges(
    blocks: Sequence[ir.Model],
    known: Sequence[Value],
    shapes: Mapping[str, ShapeRange],
    work: Path,
    tell: Progress,
) -> Found:
    """The shapes of every input of the model, which are `known`, and of all that its consecutive `blocks` make.

    The blocks are executed with seeded inputs at the least, the usual and the largest of `shapes`, twice, with other
    values, and with each size that varies at its largest while the others are at their least. One block is executed
    after the other; its weights alone are in memory. What each block took and made at the usual shapes is left in
    `arrays_file(work, index)`. Raises BuildError where the same shapes gave others the second time, where a block takes
    a shape from another, or where the model does not take the shapes; InputError where these do not fit its inputs.
    """
    runs = _runs(known, shapes)
    last = {value.name: index for index, block in enumerate(blocks) for value in block.graph.inputs}
    for index, block in enumerate(blocks):
        tell("shapes", index, len(blocks))
        _check_no_shapes(block.graph, index)
        _execute(block, index, runs, work)
        for run in runs:
            for name in [name for name in run.live if last.get(name, -1) <= index]:
                del run.live[name]
        return_memory()
    tell("shapes", len(blocks), len(blocks))
    names: dict[tuple[int, ...], str] = {}
    return Found(
        {name: _range(name, runs) for name in runs[0].shapes},
        {name: _dims([run.shapes[name] for run in runs], names) for name in runs[0].shapes},
    )


def arrays_file(work: Path, index: int) -> Path:
    """Where `ranges` leaves two sets of named arrays, for `child.load_arrays`: what block `index` took and made."""
    return work / f"arrays-{index:03d}.npz"


def _runs(known: Sequence[Value], shapes: Mapping[str, ShapeRange]) -> list[_Run]:
    """Two for each of the three sets of shapes, but for those that equal the usual ones, and one for each size that
    varies, if there are several."""
    sets = {
        "min": {name: span.min for name, span in shapes.items()},
        "opt": {name: span.opt for name, span in shapes.items()},
        "max": {name: span.max for name, span in shapes.items()},
    }
    tries = [(label, seed) for label in _LABELS if label == "opt" or sets[label] != sets["opt"] for seed in _SEEDS]
    sizes = _varying(known, shapes)
    for number, size in enumerate(sizes[:_MOST_ALONE] if len(sizes) > 1 else []):
        label = f"mixed-{number}"
        sets[label] = {
            name: tuple(
                high if (name, axis) in size else low
                for axis, (low, high) in enumerate(zip(span.min, span.max, strict=True))
            )
            for name, span in shapes.items()
        }
        tries.append((label, _SEEDS[0]))
    feeds = [inputs.seeded(known, sets[label], seed) for label, seed in tries]
    return [
        _Run(label, seed, fed, {name: array.shape for name, array in fed.items()})
        for (label, seed), fed in zip(tries, feeds, strict=True)
    ]


def _varying(known: Sequence[Value], shapes: Mapping[str, ShapeRange]) -> list[list[tuple[str, int]]]:
    """The sizes that vary, each as the inputs and axes that have it."""
    sizes: dict[Any, list[tuple[str, int]]] = {}
    for value in known:
        span = shapes.get(value.name)
        for axis, dim in enumerate(value.shape or () if span is not None else ()):
            if span is not None and span.min[axis] != span.max[axis]:
                sizes.setdefault(dim if isinstance(dim, str) else (value.name, axis), []).append((value.name, axis))
    return list(sizes.values())


def _check_no_shapes(graph: ir.Graph, index: int) -> None:
    names = shape_inputs(graph)
    if names:
        raise BuildError(
            f"TensorRT would need {names[0]!r} on the host, since a shape follows from its elements",
            where=f"block {index}",
            remedy="use a larger --block-size, or --backend onnxruntime; export the model with shapes from Shape alone",
        )


def _execute(block: ir.Model, index: int, runs: Sequence[_Run], work: Path) -> None:
    variant = block.clone()
    for value in variant.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = unmapped(value.const_value)
    names = [value.name or "" for value in variant.graph.outputs]
    session = open_session(variant, uncut_options(optimised=False))
    for run in runs:
        feeds = {value.name or "": run.live[value.name or ""] for value in variant.graph.inputs}
        try:
            with reported(f"block {index}"):
                made = run_plainly(session, names, feeds)
        except BackendError as error:
            raise _refused(run, index, error) from error
        if (run.label, run.seed) == ("opt", _SEEDS[0]):
            child.save_arrays(arrays_file(work, index), [feeds, made])
        run.live.update(made)
        run.shapes.update({name: array.shape for name, array in made.items()})


def _refused(run: _Run, index: int, error: BackendError) -> BuildError:
    return BuildError(
        f"the model does not take inputs of its {run.label} shapes: {error.what}",
        where=f"block {index}",
        remedy="give --shape a range in which the model works",
    )


def _range(name: str, runs: Sequence[_Run]) -> Range:
    found = {run.label: run.shapes[name] for run in runs}
    for run in runs:
        if run.shapes[name] != found[run.label]:
            both = f"{format_shape(run.shapes[name])} and {format_shape(found[run.label])}"
            raise BuildError(
                f"the size of {name!r} depends on the values of the inputs: it was {both} for inputs of equal shapes",
                where=repr(name),
                remedy="use --backend onnxruntime; TensorRT engines of blocks need sizes that follow from shapes",
            )
    least, most = (tuple(map(pick, zip(*found.values(), strict=True))) for pick in (min, max))
    return Range(min=least, opt=found["opt"], max=most)


def _dims(found: Sequence[Shape], names: dict[tuple[int, ...], str]) -> tuple[int | str, ...]:
    """One value's shape, of those that it had in each pass; `names` are those that sizes have got so far."""
    return tuple(
        sizes[0] if len(set(sizes)) == 1 else names.setdefault(sizes, f"s{len(names)}")
        for sizes in zip(*found, strict=True)
    )
