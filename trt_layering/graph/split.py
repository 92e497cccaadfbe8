"""Splits a weight that is larger than a block: the node that reads it becomes several and a Concat.

May import numpy, onnx_ir, errors and normal_form. What cannot be split is left as it was and said so; nothing raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from trt_layering.graph.normal_form import Names

# Columns of a piece are a multiple of this where they can be: kernels, and layouts with channels in groups, like it so.
_GRAIN = 16


@dataclass(frozen=True)
class Split:
    """What became of the weight `tensor`: `pieces` is 1 where it was left whole, and `reason` says why."""

    tensor: str
    pieces: int
    reason: str


class _Whole(Exception):
    """Why a weight stays whole."""


class _Rule(NamedTuple):
    """How a result follows from a weight. `axes` gives, from node and weight's rank, the weight's axis of columns and
    the axis of the result that they become. `companion` is the input with a number for each column, or one for all."""

    axes: Callable[[ir.Node, int], tuple[int, int]]
    companion: int | None = None


class _Piece(NamedTuple):
    """Columns from `begin` on; `inputs` by index are those of the node that differ from the whole's."""

    inputs: dict[int, ir.Value]
    begin: int
    columns: int


def split_large(model: ir.Model, limit: int, kept: Collection[str] = ()) -> list[Split]:
    """Splits, in place, every weight of more than `limit` bytes in `model`'s main graph, but those in `kept`; one entry
    for each.

    Conv, ConvTranspose, Gemm and MatMul (and the Integer kinds) are split by output columns or channels, Gather by the
    columns of its table. The model must be normalised. Pieces, with their biases, are at most `limit` bytes and as even
    as may be; they are sliced when read, from the file where the whole lies. Results keep their names. Floating-point
    results may differ from the whole's in the last bits, since a kernel may add in another order for fewer columns.
    """
    names = Names(model)
    splits = []
    for name, weight in list(model.graph.initializers.items()):
        if weight.const_value is None or weight.const_value.nbytes <= limit or name in kept:
            continue
        try:
            pieces = _split(model.graph, weight, limit, names)
        except _Whole as why:
            splits.append(Split(name, 1, str(why)))
        else:
            splits.append(Split(name, pieces, f"{weight.const_value.nbytes} bytes are more than {limit}"))
    return splits


def _split(graph: ir.Graph, weight: ir.Value, limit: int, names: Names) -> int:
    """Splits `weight` and gives the number of pieces; raises _Whole, before any change, where it cannot."""
    uses = list(weight.uses())
    if len(uses) != 1 or weight.is_graph_output():
        raise _Whole(f"{len(uses)} nodes read it")
    node, index = uses[0]
    rule = _RULES.get((node.op_type, index)) if node.domain in ("", "ai.onnx") else None
    if rule is None or node.graph is not graph:
        raise _Whole(f"{node.op_type} reads it as input {index}")
    axis, result_axis = rule.axes(node, len(_dims(weight)))
    columns = _dims(weight)[axis]
    sliced = {index: (weight, axis), **_companion(node, rule, columns)}
    bounds = _bounds(columns, sum(-(-_tensor(value).nbytes // columns) for value, _ in sliced.values()), limit)
    pieces = [_piece(sliced, begin, end) for begin, end in bounds]
    _replace(graph, node, result_axis, pieces, names)
    return len(pieces)


def _last_axes(_node: ir.Node, rank: int) -> tuple[int, int]:
    if rank < 2:
        raise _Whole("it is a vector")
    return rank - 1, -1


def _gather_axes(node: ir.Node, rank: int) -> tuple[int, int]:
    if _attribute(node, "axis", 0) in (rank - 1, -1):
        raise _Whole("it is gathered along its columns")
    return _last_axes(node, rank)


def _gemm_axes(node: ir.Node, _rank: int) -> tuple[int, int]:
    return (0 if _attribute(node, "transB", 0) else 1), 1


def _conv_axes(node: ir.Node, _rank: int) -> tuple[int, int]:
    if _attribute(node, "group", 1) != 1:
        raise _Whole(f"{node.op_type} has groups")
    return (1 if node.op_type == "ConvTranspose" else 0), 1


# By operator and by which of its inputs the weight is.
_RULES = {
    ("Conv", 1): _Rule(_conv_axes, companion=2),
    ("ConvInteger", 1): _Rule(_conv_axes, companion=3),
    ("ConvTranspose", 1): _Rule(_conv_axes, companion=2),
    ("Gather", 0): _Rule(_gather_axes),
    ("Gemm", 1): _Rule(_gemm_axes, companion=2),
    ("MatMul", 1): _Rule(_last_axes),
    ("MatMulInteger", 1): _Rule(_last_axes, companion=3),
}


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _tensor(weight: ir.Value) -> ir.TensorProtocol:
    assert weight.const_value is not None
    return weight.const_value


def _dims(weight: ir.Value) -> tuple[int, ...]:
    return tuple(_tensor(weight).shape.numpy())


def _bounds(columns: int, column_bytes: int, limit: int) -> list[tuple[int, int]]:
    """[begin, end) of each piece, as even as may be."""
    if column_bytes > limit:
        raise _Whole(f"one output column alone has {column_bytes} bytes")
    fitting = limit // column_bytes
    grain = _GRAIN if fitting >= _GRAIN else 1
    units = -(-columns // grain)
    pieces = -(-units // (fitting // grain))
    edges = [min(units * i // pieces * grain, columns) for i in range(pieces + 1)]
    return list(pairwise(edges))


def _companion(node: ir.Node, rule: _Rule, columns: int) -> dict[int, tuple[ir.Value, int]]:
    """The input that goes with the weight, and its axis of columns; nothing where each piece can have all of it."""
    if rule.companion is None or rule.companion >= len(node.inputs):
        return {}
    value = node.inputs[rule.companion]
    if value is None:
        return {}
    if not value.is_initializer() or value.is_graph_input():
        raise _Whole(f"input {rule.companion} of {node.op_type} is computed")
    dims = _dims(value)
    if not dims or (dims[-1] == 1 and columns != 1):
        return {}
    return {rule.companion: (value, len(dims) - 1)}


def _piece(sliced: dict[int, tuple[ir.Value, int]], begin: int, end: int) -> _Piece:
    inputs = {}
    for index, (value, axis) in sliced.items():
        name = f"{value.name}_{begin}"
        tensor = _slice(_tensor(value), axis, begin, end, name)
        inputs[index] = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    return _Piece(inputs, begin, end - begin)


def _slice(tensor: ir.TensorProtocol, axis: int, begin: int, end: int, name: str) -> ir.LazyTensor:
    """[begin, end) of `tensor` along `axis`, read from where it lies whenever somebody asks for it."""
    index = (*[slice(None)] * axis, slice(begin, end))
    dims = list(tensor.shape.numpy())
    dims[axis] = end - begin

    def read() -> ir.Tensor[Any]:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy()[index]), dtype=tensor.dtype)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape(dims, frozen=True), name=name)


def _replace(graph: ir.Graph, node: ir.Node, axis: int, pieces: Sequence[_Piece], names: Names) -> None:
    """A node for each piece, and a Concat along `axis` of what they make, in the place of `node`."""
    whole = [node.inputs[index] for index in pieces[0].inputs]
    parts = [_part(graph, node, axis, piece, names) for piece in pieces]
    outputs = [part.outputs[0] for part in parts]
    concat = ir.Node("", "Concat", outputs, [ir.AttrInt64("axis", axis)], name=node.name)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [*parts, concat], node.outputs, concat.outputs)
    for value in whole:
        if value is not None and not value.uses() and not value.is_graph_output():
            del graph.initializers[value.name or ""]


def _part(graph: ir.Graph, node: ir.Node, axis: int, piece: _Piece, names: Names) -> ir.Node:
    """`node` over again, with the inputs of `piece`."""
    inputs = list(node.inputs)
    for index, value in piece.inputs.items():
        value.name = names.fresh(value.name or "")
        graph.register_initializer(value)
        inputs[index] = value
    name = f"{node.name}_{piece.begin}" if node.name else ""  # two nodes must not have one name
    part = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=name)
    part.metadata_props.update(node.metadata_props)
    result, output = node.outputs[0], part.outputs[0]
    output.name, output.type = names.fresh(f"{result.name}_{piece.begin}"), result.type
    if result.shape is not None:
        output.shape = result.shape.copy()
        output.shape[axis] = piece.columns
    return part
