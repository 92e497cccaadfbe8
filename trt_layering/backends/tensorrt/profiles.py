"""What shapes activations have, from the smallest to the largest, found by executing the blocks on ONNX Runtime.

May import child, inputs, shapes, the graph room, the store's types and the ONNX Runtime backend; nothing of TensorRT.
A size that depends on more than the shapes of the model's inputs raises BuildError, which names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
) -> dict[str, Range]:
    """The range of every input of the model, which are `known`, and of all that its consecutive `blocks` make, by name.

    The blocks are executed with seeded inputs at the least, the usual and the largest of `shapes`, one block at a time,
    whose weights alone are in memory, and that twice, with other values. What each block took and made at the usual
    shapes is left in `arrays_file(work, index)`. Raises BuildError where the same shapes gave others the second time,
    where a block takes a shape from another, or where the model does not take the shapes; InputError where these do not
    fit its inputs.
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
    return {name: _range(name, runs) for name in runs[0].shapes}


def arrays_file(work: Path, index: int) -> Path:
    """Where `ranges` leaves two sets of named arrays, for `child.load_arrays`: what block `index` took and made."""
    return work / f"arrays-{index:03d}.npz"


def _runs(known: Sequence[Value], shapes: Mapping[str, ShapeRange]) -> list[_Run]:
    """Two for each of the three sets of shapes, but for those that equal the usual ones."""
    sets = {label: {name: getattr(span, label) for name, span in shapes.items()} for label in _LABELS}
    labels = [label for label in _LABELS if label == "opt" or sets[label] != sets["opt"]]
    runs = []
    for label in labels:
        for seed in _SEEDS:
            feeds = inputs.seeded(known, sets[label], seed)
            runs.append(_Run(label, seed, feeds, {name: array.shape for name, array in feeds.items()}))
    return runs


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
    usual = found["opt"]
    others = [found.get(label, usual) for label in _LABELS]
    least, most = (tuple(map(pick, *others)) for pick in (min, max))
    return Range(min=least, opt=usual, max=most)
