"""A model as consecutive windows that ONNX Runtime has optimised: what both backends prepare a model by.

May import the graph room, onnx, onnx-ir and onnxruntime. A graph that ONNX Runtime refuses raises BackendError.

Tables of which rows are gathered are left outside meanwhile, so that no fusion takes their Gathers in. A model too
large for the memory given is prepared with its large plain matrices left outside as well, which ONNX Runtime would not
change anyway, and if it is still too large, in several windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import pairwise
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.runtime import uncut_options
from trt_layering.backends.onnxruntime.session import learn_types, open_session
from trt_layering.graph.blocks import Cutter, extract
from trt_layering.graph.cuts import Cut, choose_cuts, find_cuts
from trt_layering.graph.model import normalise
from trt_layering.graph.tables import find_tables

LegalCuts = Callable[[ir.Graph], Sequence[Cut]]

_COPIES = 4  # of a window's weights that are in memory at worst: ours, the session's, reordered, on the way to the file
_WINDOWS = 16  # the part of the memory that one of several windows may have
_LEFT_OUT_FROM = 64 * 1024
_AS_THEY_ARE = {"MatMul": (1,), "Gemm": (1,), "Gather": (0,), "LSTM": (1, 2), "GRU": (1, 2)}
"""Inputs whose weights ONNX Runtime uses as they are."""


def is_small(model: ir.Model, memory: int, left_out: Set[str] = frozenset()) -> bool:
    """Whether `model` can be prepared as a whole in `memory` bytes. Weights in `left_out` count for nothing."""
    return sum(_sizes(model, left_out).values()) * _COPIES <= memory


def _sizes(model: ir.Model, left_out: Set[str]) -> dict[str, int]:
    values = model.graph.initializers.items()
    return {name: v.const_value.nbytes for name, v in values if v.const_value and name not in left_out}


def windows(
    model: ir.Model, size: int, left_out: Set[str] = frozenset(), legal: LegalCuts = find_cuts
) -> Iterator[ir.Model]:
    """Consecutive parts of `model`, sharing its tensors, with at most `size` bytes of weights where the graph allows.

    Weights in `left_out` count for nothing; `legal` says where a graph may be cut.
    """
    stops = choose_cuts(model.graph, legal(model.graph), size, _sizes(model, left_out))
    cutter = Cutter(model)
    bounds = [0, *stops, len(model.graph)]
    for start, stop in pairwise(bounds):
        yield cutter.extract(start, stop)


def prepared_windows(
    model: ir.Model,
    work: Path,
    memory: int,
    progress: Progress,
    level: ort.GraphOptimizationLevel,
    legal: LegalCuts = find_cuts,
) -> list[ir.Model]:
    """Windows of `model` as ONNX Runtime optimises them at `level`, typed; their folded weights are files in `work`,
    which must outlive them. `memory` is what preparing may take, in bytes; `legal` says where a graph may be cut."""
    tables = find_tables(model.graph)
    left_out = tables if is_small(model, memory, tables) else tables | _plain_matrices(model.graph)
    whole = is_small(model, memory, left_out)
    size = memory // _WINDOWS
    parts = [extract(model, 0, len(model.graph))] if whole else list(windows(model, size, left_out, legal))
    prepared = []
    for index, part in enumerate(parts):
        progress("prepare", index, len(parts))
        prepared.append(_prepare(part, work / f"window-{index}.onnx", left_out, level))
        if len(parts) > 1:
            _rename_inner(prepared[-1], f"window-{index}/", left_out)
    progress("prepare", len(parts), len(parts))
    return prepared


def _plain_matrices(graph: ir.Graph) -> frozenset[str]:
    """Large weights of which every use is one that takes them as they are."""
    names = set()
    for name, value in graph.initializers.items():
        uses = value.uses()
        large = value.const_value is not None and value.const_value.nbytes >= _LEFT_OUT_FROM
        if large and all(i in _AS_THEY_ARE.get(node.op_type, ()) and node.domain == "" for node, i in uses):
            names.add(name)
    return frozenset(names)


def _prepare(part: ir.Model, saved: Path, left_out: Set[str], level: ort.GraphOptimizationLevel) -> ir.Model:
    """`part` optimised; `left_out` weights are inputs meanwhile, so that nothing can depend on their values."""
    outside = {}
    for name in [name for name in part.graph.initializers if name in left_out]:
        value = part.graph.initializers.pop(name)
        tensor = value.const_value
        assert tensor is not None
        value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy()), None
        part.graph.inputs.append(value)
        outside[name] = tensor
    options = uncut_options(optimised=True)
    options.graph_optimization_level = level
    open_session(part, options, saved=saved)
    prepared = ir.load(saved)
    learn_types(prepared, saved)
    for value in [value for value in prepared.graph.inputs if value.name in outside]:
        prepared.graph.inputs.remove(value)
        value.const_value = outside[value.name or ""]
        prepared.graph.register_initializer(value)
    normalise(prepared)
    return prepared


def _rename_inner(window: ir.Model, prefix: str, left_out: Set[str]) -> None:
    """Make names unique among windows, except of what they share."""
    shared = {*window.graph.inputs, *window.graph.outputs}
    values = [value for node in window.graph for value in node.outputs]
    values += [value for name, value in window.graph.initializers.items() if name not in left_out]
    for value in values:
        if value not in shared and value.name:
            value.name = prefix + value.name
