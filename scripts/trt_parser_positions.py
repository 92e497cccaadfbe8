"""A network for each position in which a weight is streamed, the weight being an input: what check_trt_parser.py
--positions asks. Imports onnx.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import onnx

_IMAGE, _ROWS, _TIMES = "float[n,4,h,l] x", "float[n,10,16] x", "float[t,n,8] x"
_OPSET = 17
_NEWER = {"RMSNormalization": 23}
_NETWORKS = {
    "Conv": (f"{_IMAGE}, float[6,4,3,3] w, float[6] w2", "Conv(x, w, w2)"),
    "Conv, constant bias": (f"{_IMAGE}, float[6,4,3,3] w", "Conv(x, w, six)"),
    "Conv, constant kernel": (f"{_IMAGE}, float[1] w", "Conv(x, kernel, w)"),
    "Conv in groups": (f"{_IMAGE}, float[8,1,3,3] w", "Conv <group = 4>(x, w)"),
    "Conv, one axis": ("float[n,4,h] x, float[6,4,3] w, float[6] w2", "Conv(x, w, w2)"),
    "Conv, three axes": ("float[n,4,h,l,m] x, float[6,4,3,3,3] w, float[6] w2", "Conv(x, w, w2)"),
    "ConvTranspose": (f"{_IMAGE}, float[4,6,2,2] w, float[6] w2", "ConvTranspose <strides = [2, 2]>(x, w, w2)"),
    "ConvTranspose in groups": (f"{_IMAGE}, float[4,1,2,2] w", "ConvTranspose <strides = [2, 2], group = 4>(x, w)"),
    "ConvTranspose, one axis": ("float[n,4,h] x, float[4,6,3] w", "ConvTranspose(x, w)"),
    "MatMul": (f"{_ROWS}, float[16,5] w", "MatMul(x, w)"),
    "MatMul, first": (f"{_ROWS}, float[5,10] w", "MatMul(w, x)"),
    "Gemm": ("float[n,16] x, float[16,5] w, float[5] w2", "Gemm(x, w, w2)"),
    "Gemm, transposed": ("float[n,16] x, float[5,16] w, float[5] w2", "Gemm <transB = 1>(x, w, w2)"),
    "Gemm, first": ("float[16,n] x, float[5,16] w", "Gemm(w, x)"),
    "Einsum": (f"{_ROWS}, float[16,3] w", 'Einsum <equation = "abc,cd->abd">(x, w)'),
    "Einsum, first": (f"{_ROWS}, float[16,3] w", 'Einsum <equation = "cd,abc->abd">(w, x)'),
    "PRelu": (f"{_IMAGE}, float[4,1,1] w", "PRelu(x, w)"),
    "LayerNormalization": (f"{_ROWS}, float[16] w, float[16] w2", "LayerNormalization(x, w, w2)"),
    "RMSNormalization": (f"{_ROWS}, float[16] w", "RMSNormalization(x, w)"),
    "Where": ("bool[n,4,h,l] x, float[4,1,1] w, float[4,1,1] w2", "Where(x, w, w2)"),
    "Concat": ("float[1,4,h] x, float[1,2,64] w", "Concat <axis = 1>(x, w)"),
    "Concat, first": ("float[1,4,h] x, float[1,2,64] w", "Concat <axis = 1>(w, x)"),
    "Gather": ("int64[n,3] x, float[10,16] w", "Gather(w, x)"),
    "GatherElements": ("int64[n,16] x, float[10,16] w", "GatherElements <axis = 0>(w, x)"),
    "GatherND": ("int64[n,1] x, float[10,16] w", "GatherND(w, x)"),
    **{
        f"{op}{', first' * first}": (f"{_IMAGE}, float[4,1,1] w", f"{op}({'w, x' if first else 'x, w'})")
        for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean")
        for first in (False, True)
    },
    "LSTM": (
        f"{_TIMES}, float[1,24,8] w, float[1,24,6] w2, float[1,48] w3, float[1,64,6] w4, float[1,64,6] w5, "
        "float[1,18] w6",
        "LSTM <hidden_size = 6>(x, w, w2, w3, , w4, w5, w6)",
    ),
    "LSTM, both ways": (
        f"{_TIMES}, float[2,24,8] w, float[2,24,6] w2, float[2,48] w3",
        'LSTM <hidden_size = 6, direction = "bidirectional">(x, w, w2, w3)',
    ),
    "GRU": (
        f"{_TIMES}, float[1,18,8] w, float[1,18,6] w2, float[1,36] w3, float[1,64,6] w4",
        "GRU <hidden_size = 6>(x, w, w2, w3, , w4)",
    ),
    "RNN": (
        f"{_TIMES}, float[1,6,8] w, float[1,6,6] w2, float[1,12] w3, float[1,64,6] w4",
        "RNN <hidden_size = 6>(x, w, w2, w3, , w4)",
    ),
}
_CONSTANTS = "float[6] six = {1, 2, 3, 4, 5, 6}, float[1,4,1,1] kernel = {1, 2, 3, 4}"


def positions(folder: Path) -> Iterator[tuple[str, Path]]:
    """What each network is called, and the file in `folder` that it is written to."""
    for number, (name, (inputs, call)) in enumerate(_NETWORKS.items()):
        file = folder / f"position-{number}.onnx"
        onnx.save(network(inputs, call), file)
        yield name, file


def network(inputs: str, call: str) -> onnx.ModelProto:
    """`call` of one operator over `inputs`, those called w, w2, ... being the weights."""
    opset = _NEWER.get(re.split(r"\W", call)[0], _OPSET)
    outputs = "y, " if call.startswith(("LSTM", "GRU", "RNN")) else "y"
    constants = f"<{_CONSTANTS}>" if re.search(r"\b(six|kernel)\b", call) else ""
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g ({inputs}) => (float[] y) {constants} {{ {outputs.rstrip(", ")} = {call} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(proto)
