"""Stores weights of float32 in 16 bits: each becomes a narrow initializer and a Cast that widens it again.

May import numpy, onnx_ir and the other modules of graph. No weight is held in memory: one is rounded whenever somebody
asks for its elements. Raises only what reading a weight does.

A Cast of a weight is a decoder, see `dataflow`: each block that needs it has it. All of them stand before every other
node, since ONNX Runtime executes first, of what a node reads, what stands last. So each weight is widened right before
the node that reads it, and scratch holds the widened weights of one node, not of a block. Where Gather reads a table,
not the table is widened but the rows that it gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from trt_layering.graph.normal_form import Names
from trt_layering.graph.stored import unmapped

KINDS = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
"""What weights can be stored as beside float32, by the words of the command line."""

_DIGITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}
_PIECE = 1 << 20  # elements looked at together
_FUSED_TABLES = {"EmbedLayerNormalization"}
"""Operators that read rows of a table and make other things of them: all of the table would have to be widened."""

Floats = npt.NDArray[np.float32]


class NarrowTensor(ir.LazyTensor):
    """`wide`, a tensor of float32, rounded to the nearest number of `dtype`, anew for everybody who asks."""

    def __init__(self, wide: ir.TensorProtocol, dtype: ir.DataType) -> None:
        self.wide = unmapped(wide)
        super().__init__(self._rounded, dtype, ir.Shape(wide.shape.numpy(), frozen=True), name=wide.name)

    def _rounded(self) -> ir.TensorProtocol:
        return ir.Tensor(_as(self.wide.numpy(), self.dtype), self.dtype)


def candidates(graph: ir.Graph, at_least: int) -> list[str]:
    """Names of the float32 initializers of `graph` that have `at_least` bytes and could be stored narrow, if their
    values allow it (see `fits`). `graph` must be in normal form."""
    return [name for name, value in graph.initializers.items() if _could_be_narrow(value, at_least)]


def _could_be_narrow(value: ir.Value, at_least: int) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and tensor.nbytes >= at_least
        and not value.is_graph_input()
        and not value.is_graph_output()
        and not any(node.op_type in _FUSED_TABLES for node in value.consumers())
    )


def fits(tensor: ir.TensorProtocol, dtype: ir.DataType) -> bool:
    """Whether the range of `dtype` is enough for `tensor`, a float32: nothing finite becomes infinite, and not so much
    is lost near zero that the rounding error, as a whole, is larger than the digits of `dtype` alone could cause."""
    error = total = 0.0
    for part in _parts(unmapped(tensor).numpy()):
        narrow = _as(part, dtype).astype(np.float32)
        finite = np.isfinite(part)
        if not np.isfinite(narrow[finite]).all():
            return False
        error += float(np.square(narrow[finite] - part[finite], dtype=np.float64).sum())
        total += float(np.square(part[finite], dtype=np.float64).sum())
    return error <= total * 4.0 ** -_DIGITS[dtype]


def _parts(array: Floats) -> Iterator[Floats]:
    flat = array.reshape(-1)
    return (flat[begin : begin + _PIECE] for begin in range(0, flat.size, _PIECE))


def _as(array: Floats, dtype: ir.DataType) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(dtype.numpy())


def narrow(model: ir.Model, names: Collection[str], dtype: ir.DataType) -> None:
    """Store the initializers `names` of `model` as `dtype`, in place. They keep their names, what is made of them gets
    others; all other values keep theirs. Sums are as before, over the rounded weights."""
    graph = model.graph
    fresh = Names(model)
    casts = []
    for name in [name for name in graph.initializers if name in names]:
        weight = graph.initializers[name]
        assert weight.const_value is not None
        weight.const_value, weight.type = NarrowTensor(weight.const_value, dtype), ir.TensorType(dtype)
        others = []
        for node, index in list(weight.uses()):
            if _gathers(node):
                _widen_rows(node, dtype, fresh)
            else:
                others.append((node, index))
        if others:
            casts.append(_widening([weight], fresh.fresh(f"{name}_wide"), weight.shape))
            for node, index in others:
                node.replace_input_with(index, casts[-1].outputs[0])
    if casts:
        graph.insert_before(next(iter(graph)), casts)


def _gathers(node: ir.Node) -> bool:
    return node.op_type == "Gather" and node.domain in ("", "ai.onnx")


def _widening(inputs: list[ir.Value | None], name: str, shape: ir.Shape | None) -> ir.Node:
    cast = ir.Node("", "Cast", inputs, [ir.AttrInt64("to", ir.DataType.FLOAT)], num_outputs=1)
    result = cast.outputs[0]
    result.name, result.type = name, ir.TensorType(ir.DataType.FLOAT)
    result.shape = None if shape is None else shape.copy()
    return cast


def _widen_rows(gather: ir.Node, dtype: ir.DataType, fresh: Names) -> None:
    """Let `gather` give narrow rows, and a Cast after it those that it gave."""
    rows = gather.outputs[0]
    name = rows.name or fresh.fresh("rows")
    cast = _widening([None], name, rows.shape)
    rows.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    rows.name, rows.type = fresh.fresh(f"{name}_narrow"), ir.TensorType(dtype)
    cast.replace_input_with(0, rows)
    assert gather.graph is not None
    gather.graph.insert_after(gather, cast)


def narrow_names(model: ir.Model) -> list[str]:
    """Names of the initializers of `model` that `narrow` has made narrow."""
    return [name for name, value in model.graph.initializers.items() if isinstance(value.const_value, NarrowTensor)]


def widen(model: ir.Model, names: Collection[str]) -> None:
    """Give `names` of what is narrow in `model` their float32 back, in place; their Casts stay and change nothing."""
    for name in narrow_names(model):
        weight = model.graph.initializers[name]
        if name in names and isinstance(weight.const_value, NarrowTensor):
            weight.const_value, weight.type = weight.const_value.wide, ir.TensorType(ir.DataType.FLOAT)
            for node in weight.consumers():
                if _gathers(node):
                    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
