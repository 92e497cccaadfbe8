"""Sessions over graphs whose weights lie elsewhere: for preparing a window and for the uncut reference.

May import onnx, onnx-ir and onnxruntime. What ONNX Runtime raises passes through `runtime.reported` as BackendError.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.onnxruntime.runtime import PROVIDERS, reported, tensor_over, uncut_options

_INLINE_UNDER = 1024
_ELSEWHERE = "weights-given-in-memory"
_AHEAD_OF_ONNX = {"LayerNormFusionL1": 17, "LayerNormFusionL2": 17, "SimplifiedLayerNormFusion": 1000}
"""Fusions that make operators of ONNX's own domain, and the opset from which ONNX has them, if ever. In older models
they are left out, so that blocks are valid by themselves. What that costs was not measured on a quiet machine."""


def open_session(model: ir.Model, options: ort.SessionOptions, saved: Path | None = None) -> ort.InferenceSession:
    """A session over `model` with its weights, which are copied in; at most one tensor more than they is held.

    `options` say how far the graph is optimised, and are changed here; if `saved` is given, it is written there as it
    then is, its weights beside it as `<saved>.data`.
    """
    if saved is not None:
        options.optimized_model_filepath = str(saved)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{saved.name}.data"
        )
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_min_size_in_bytes", str(_INLINE_UNDER)
        )
    proto, weights = _apart(model)
    with reported(f"graph {model.graph.name!r}", "look for free disk space; check the model with plain ONNX Runtime"):
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        if arrays:
            options.add_external_initializers(list(arrays), [tensor_over(array) for array in arrays.values()])
        opset = model.graph.opset_imports.get("", 0)
        left_out = [fusion for fusion, since in _AHEAD_OF_ONNX.items() if opset < since]
        return ort.InferenceSession(
            proto.SerializeToString(), options, providers=PROVIDERS, disabled_optimizers=left_out
        )


def _apart(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """`model` with the names of its large weights only, and those weights; `model` itself stays as it is."""
    tensors = {n: v.const_value for n, v in model.graph.initializers.items() if v.const_value is not None}
    large = {n: t for n, t in tensors.items() if t.nbytes >= _INLINE_UNDER and t.dtype.bitwidth >= 8}
    try:
        for name, tensor in tensors.items():
            shape = ir.Shape(tensor.shape.numpy())
            model.graph.initializers[name].const_value = (
                ir.ExternalTensor(_ELSEWHERE, 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
                if name in large
                else inline(tensor)
            )
        return ir.to_proto(model), large
    finally:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor


def inline(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """`tensor` such that saving a model writes its bytes, not where they lie."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)


def learn_types(model: ir.Model, path: Path) -> None:
    """Give every value of the main graph of `model` the type and shape that ONNX Runtime infers; `path` is its file.

    ONNX's own inference does not know ONNX Runtime's operators. Weights are not read.
    """
    proto = onnx.load(path, load_external_data=False)
    named = {output.name for output in proto.graph.output}
    results = [name for node in proto.graph.node for name in node.output if name and name not in named]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    probe = path.with_name(f"typed-{path.name}")
    onnx.save(proto, probe)
    options = uncut_options(optimised=False)
    with reported(f"graph {model.graph.name!r}"):
        found = {o.name: o for o in ort.InferenceSession(str(probe), options, providers=PROVIDERS).get_outputs()}
    for node in model.graph:
        for value in node.outputs:
            if value.name in found:
                _set_type(value, found[value.name])


def _set_type(value: ir.Value, found: ort.NodeArg) -> None:
    kind, _, element = found.type.rstrip(")").partition("(")
    if kind != "tensor":
        value.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        return
    value.type = ir.TensorType(_ELEMENTS[element])
    # An empty list says scalar or unknown rank: unknown is right for both.
    value.shape = ir.Shape(dim if isinstance(dim, int) else dim or None for dim in found.shape) if found.shape else None


_ELEMENTS = {
    "float": ir.DataType.FLOAT, "double": ir.DataType.DOUBLE, "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16, "bool": ir.DataType.BOOL, "string": ir.DataType.STRING,
    "int8": ir.DataType.INT8, "int16": ir.DataType.INT16, "int32": ir.DataType.INT32, "int64": ir.DataType.INT64,
    "uint8": ir.DataType.UINT8, "uint16": ir.DataType.UINT16, "uint32": ir.DataType.UINT32,
    "uint64": ir.DataType.UINT64, "complex64": ir.DataType.COMPLEX64, "complex128": ir.DataType.COMPLEX128,
    "float8e4m3fn": ir.DataType.FLOAT8E4M3FN, "float8e4m3fnuz": ir.DataType.FLOAT8E4M3FNUZ,
    "float8e5m2": ir.DataType.FLOAT8E5M2, "float8e5m2fnuz": ir.DataType.FLOAT8E5M2FNUZ,
    "int4": ir.DataType.INT4, "uint4": ir.DataType.UINT4,
}  # fmt: skip
