"""Prepares a model for TensorRT: windows of plain ONNX operators with constants folded, to be cut into blocks.

May import the graph room, the windows of the ONNX Runtime backend, numpy and onnx-ir; nothing of TensorRT. A model that
TensorRT cannot have, on any version, raises ModelError that names the operator or the dtype.

Shapes are computed anew wherever they are needed, since no seam may be crossed by one: TensorRT has them on the host.

ONNX Runtime rewrites the graph at its basic level, which has none of its own operators: constants are folded and batch
normalisation goes into the convolutions before it. What of it is left becomes a Mul and an Add, whose weights keep
their names in TensorRT. A model that computes in 16 bits is taken as it is: ONNX Runtime would make float32 of it,
since its CPU provider has no other kernels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.windows import prepared_windows
from trt_layering.errors import ModelError
from trt_layering.graph.blocks import extract
from trt_layering.graph.cuts import Cut, find_cuts
from trt_layering.graph.dataflow import Dataflow
from trt_layering.graph.normal_form import Names
from trt_layering.graph.shape_chains import localise
from trt_layering.graph.shape_tensors import uncrossed

log = logging.getLogger("trt_layering")

_OURS = ("", "ai.onnx")
_REFUSED = {
    "AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "DFT", "DeformConv", "Det",
    "DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix",
    "Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv",
    "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat",
    "StringNormalizer", "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique",
}  # fmt: skip
"""ONNX's operators that the parser of TensorRT 11.4 says it does not have. Older ones have fewer, and say so when a
block is built."""
_QUANTIZED = {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_DTYPES = {
    ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8, ir.DataType.UINT8,
    ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.FLOAT8E4M3FN, ir.DataType.INT4,
}  # fmt: skip
"""What a TensorRT tensor can be of."""
_MOST_DIMS = 8


def prepare(model: ir.Model, work: Path, memory: int, progress: Progress) -> list[ir.Model]:
    """Windows of `model`, which is normalised and typed, together computing what it computes within 1e-5 of the largest
    output, in the operators of ONNX's own domain; typed.

    Their folded weights are files in `work`, an empty folder that must outlive them; `memory` is what preparing may
    take, in bytes. Raises ModelError for what no version of TensorRT takes, BackendError for what ONNX Runtime refuses.
    """
    _check_operators([model])
    if _computes_in_halves(model.graph):
        log.info("the model computes in 16 bits and is taken as it is, its constants unfolded")
        windows = [extract(model, 0, len(model.graph))]
    else:
        source = extract(model, 0, len(model.graph))
        localise(source)
        level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        windows = prepared_windows(source, work, memory, progress, level, _legal_cuts)
    for window in windows:
        localise(window)
        _spell_out_norms(window)
        _forget_unused_domains(window)
    _check_operators(windows)
    _check_dtypes(windows)
    _check_dims(windows)
    return windows


def _legal_cuts(graph: ir.Graph) -> list[Cut]:
    return uncrossed(graph, find_cuts(graph))


def _computes_in_halves(graph: ir.Graph) -> bool:
    flow = Dataflow(graph)
    placed = (node for i, node in enumerate(flow.nodes) if flow.placed(i))
    return any(output.dtype in _HALVES for node in placed for output in node.outputs)


def _forget_unused_domains(window: ir.Model) -> None:
    used = {node.domain for node in window.graph.all_nodes()}
    for domain in [domain for domain in window.graph.opset_imports if domain not in used and domain]:
        del window.graph.opset_imports[domain]


def _check_operators(windows: Sequence[ir.Model]) -> None:
    nodes = [node for window in windows for node in window.graph.all_nodes()]
    foreign = Counter(f"{n.domain}.{n.op_type}" for n in nodes if n.domain not in _OURS)
    refused = Counter(n.op_type for n in nodes if n.domain in _OURS and n.op_type in _REFUSED)
    found = foreign + refused
    if not found:
        return
    first = next(n for n in nodes if n.domain not in _OURS or n.op_type in _REFUSED)
    names = ", ".join(f"{name} ({count})" for name, count in sorted(found.items()))
    quantized = _QUANTIZED.intersection(refused)
    raise ModelError(
        f"TensorRT has no operator for {names}",
        where=f"node {first.name!r}, which makes {first.outputs[0].name!r}",
        remedy="use --backend onnxruntime, or "
        + (
            "export the model with floats, or quantised with QuantizeLinear and DequantizeLinear"
            if quantized
            else "export the model in operators that TensorRT has"
        ),
    )


def _check_dtypes(windows: Sequence[ir.Model]) -> None:
    for window in windows:
        values = [*window.graph.inputs, *(value for node in window.graph for value in node.outputs)]
        for value in values:
            if value.dtype is not None and value.dtype not in _DTYPES:
                raise ModelError(
                    f"TensorRT has no tensors of {value.dtype.name.lower()}",
                    where=repr(value.name),
                    remedy="use --backend onnxruntime, or export the model with float32, int64 or int32 there",
                )


def _check_dims(windows: Sequence[ir.Model]) -> None:
    for window in windows:
        made = [value for node in window.graph for value in node.outputs]
        for value in (*window.graph.inputs, *window.graph.initializers.values(), *made):
            if value.shape is not None and len(value.shape) > _MOST_DIMS:
                raise ModelError(
                    f"TensorRT has no tensors of {len(value.shape)} dimensions, only of up to {_MOST_DIMS}",
                    where=repr(value.name),
                    remedy="use --backend onnxruntime, or export the model with fewer dimensions there",
                )


def _spell_out_norms(window: ir.Model) -> None:
    """BatchNormalization with constant weights becomes a Mul and an Add."""
    names = Names(window)
    for node in [node for node in window.graph if node.op_type == "BatchNormalization" and node.domain in _OURS]:
        values = [value for value in node.inputs[:5] if value is not None]
        constant = all(value.const_value is not None and not value.is_graph_input() for value in values[1:])
        if constant and values[0].shape is not None and not any(output.uses() for output in node.outputs[1:]):
            _spell_out(window.graph, node, values, len(values[0].shape), names)


def _spell_out(graph: ir.Graph, node: ir.Node, values: Sequence[ir.Value], rank: int, names: Names) -> None:
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    scale, bias, mean, variance = (v.const_value.numpy().astype(np.float64) for v in values[1:] if v.const_value)
    factor = scale / np.sqrt(variance + epsilon)
    dims, result = [-1, *[1] * (rank - 2)], node.outputs[0]
    weights = {"factor": factor.reshape(dims), "offset": (bias - mean * factor).reshape(dims)}
    factors, offsets = (
        _weight(graph, array, result.dtype, names.fresh(f"{values[1].name}_{kind}")) for kind, array in weights.items()
    )
    mul = ir.Node("", "Mul", [values[0], factors], name=f"{node.name}_mul" if node.name else "")
    add = ir.Node("", "Add", [mul.outputs[0], offsets], name=node.name)
    middle = mul.outputs[0]
    middle.name, middle.type = names.fresh(f"{result.name}_scaled"), result.type
    middle.shape = result.shape.copy() if result.shape is not None else None
    ir.convenience.replace_nodes_and_values(graph, node, [node], [mul, add], [result], [add.outputs[0]])
    for value in dict.fromkeys(values[1:]):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[value.name or ""]


def _weight(graph: ir.Graph, array: np.ndarray[Any, Any], dtype: ir.DataType | None, name: str) -> ir.Value:
    dtype = dtype or ir.DataType.FLOAT
    tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
