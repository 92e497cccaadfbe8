"""Which weights may be streamed under TensorRT: those that its parser takes as inputs of an engine.

May import onnx_ir and the graph room; nothing of TensorRT. Never raises.
"""

from __future__ import annotations

import logging
import math

import onnx_ir as ir

from trt_layering.graph.shape_tensors import shape_values

log = logging.getLogger("trt_layering")

_LARGE = 64 * 1024
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_ANY = range(256)
_POSITIONS: dict[str, tuple[int, ...] | range] = {
    "Add": _ANY,
    "Concat": _ANY,
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "Div": _ANY,
    "Einsum": _ANY,
    "GRU": (1, 2, 3, 5),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Gemm": _ANY,
    "LSTM": (1, 2, 3, 5, 6, 7),
    "LayerNormalization": (1, 2),
    "MatMul": _ANY,
    "Max": _ANY,
    "Mean": _ANY,
    "Min": _ANY,
    "Mul": _ANY,
    "PRelu": (1,),
    "Pow": _ANY,
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3, 5),
    "Sub": _ANY,
    "Sum": _ANY,
    "Where": (1, 2),
}
"""By operator, the inputs that NVIDIA's parser and builder took as an input of the network, with fixed and with dynamic
shapes: `scripts/check_trt_parser.py --positions` asks them. Operators that only move data are left out, though they are
taken, since TensorRT's parser computes them for constants and refitting would then miss the weight's name."""


def streamable(graph: ir.Graph) -> dict[str, int]:
    """Bytes of the initializers of `graph` that may be streamed, by name: floats of more than one element of which
    every use is one that takes an engine's input. The others are constants of their block."""
    shapes = shape_values(graph)
    sizes = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        reason = _why_not(graph, value, tensor, value in shapes)
        if reason is None:
            sizes[name] = tensor.nbytes
        elif tensor.nbytes >= _LARGE:
            log.warning("%s stays in its engine and so in memory: %s", name, reason)
    return sizes


def _why_not(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, is_shape: bool) -> str | None:
    if tensor.dtype not in _FLOATS:
        return f"weights of {tensor.dtype.name.lower()} cannot be streamed"
    if math.prod(tensor.shape.numpy()) < 2:
        return "it is a single number"
    if is_shape:
        return "a shape depends on it"
    for node, index in value.uses():
        if node.graph is not graph:
            return f"{node.op_type} reads it inside another operator"
        if node.domain not in ("", "ai.onnx") or index not in _POSITIONS.get(node.op_type, ()):
            return f"TensorRT wants a constant as input {index} of {node.op_type}"
    return None
