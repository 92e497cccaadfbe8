"""Types and shapes for the values of a model.

May import onnx, onnx_ir and the other modules of graph. Never raises: what cannot be inferred stays unknown.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from trt_layering.graph.dataflow import own_values
from trt_layering.graph.normal_form import FREE_INITIALIZERS
from trt_layering.graph.skeleton import LARGE

_Dim = int | ir.SymbolicDim
# How often Reshape may hide a rank from another Reshape; each time costs one more inference.
_ROUNDS = 8


def infer_shapes(model: ir.Model) -> None:
    """Types and shapes onto the values of `model`'s main graph, in place, as far as ONNX's inference knows them.

    What inference finds wins over what the file declares, since declared ranks can be wrong; what only the file knows
    (custom domains) stays. Symbolic dims are kept, made-up ones become unknown. No weight is read: inference sees a
    copy with small tensors only, so it works for models of any size. A failed inference leaves the model as it was.
    """
    copy = _weightless(model)
    # Only symbols that inference has seen: those that it makes up may bear the names of others in the file.
    symbols = {d.value for v in own_values(copy.graph) for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
    try:
        found = _infer(copy)
        for _ in range(_ROUNDS):
            if not _rank_from_length(copy, found):
                break
            found = _infer(copy)
    except Exception:  # inference over odd graphs raises many kinds; without it values are unknown, not wrong
        return
    fixed = all(value.shape is not None and value.shape.is_static() for value in model.graph.inputs)
    for node in model.graph:
        for value in node.outputs:
            if value.name in found:
                _learn(value, found[value.name], symbols, fixed)


def _infer(model: ir.Model) -> dict[str, onnx.TypeProto]:
    proto = onnx.shape_inference.infer_shapes(ir.serde.serialize_model(model), data_prop=True)
    return {info.name: info.type for info in (*proto.graph.value_info, *proto.graph.output)}


def _rank_from_length(model: ir.Model, found: dict[str, onnx.TypeProto]) -> bool:
    """Gives ranks that inference did not find to results of Reshape, from how long its second input is."""
    learned = False
    for node in model.graph:
        if node.op_type != "Reshape" or node.domain not in ("", "ai.onnx") or len(node.inputs) < 2:
            continue
        result, target = node.outputs[0], node.inputs[1]
        kind, length = found.get(result.name or ""), _length(target, found)
        if kind is not None and not kind.tensor_type.HasField("shape") and length is not None:
            result.type = ir.serde.deserialize_type_proto_for_type(kind)
            result.shape = ir.Shape([None] * length)
            learned = True
    return learned


def _length(value: ir.Value | None, found: dict[str, onnx.TypeProto]) -> int | None:
    """How many elements the vector `value` has, where that is known."""
    kind = found.get(value.name or "") if value is not None else None
    if kind is None or len(kind.tensor_type.shape.dim) != 1 or not kind.tensor_type.shape.dim[0].HasField("dim_value"):
        return None
    length: int = kind.tensor_type.shape.dim[0].dim_value
    return length


def _weightless(model: ir.Model) -> ir.Model:
    """A copy whose large initializers are inputs, so that it is small and inference sees only the tensors it needs."""
    copy = model.clone()
    copy.ir_version = max(copy.ir_version, FREE_INITIALIZERS)
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes >= LARGE:
            del copy.graph.initializers[name]
            copy.graph.inputs.append(value)
    for node in copy.graph:
        if node.domain in ("", "ai.onnx"):
            for output in node.outputs:
                output.shape = None  # declared shapes can be wrong, and inference would believe them
    return copy


def _learn(value: ir.Value, found: onnx.TypeProto, symbols: Collection[str | None], fixed: bool) -> None:
    """Type and shape that inference found onto `value`. `fixed`: all inputs of the model have static shapes."""
    if found.WhichOneof("value") == "map_type":
        return
    value.type = ir.serde.deserialize_type_proto_for_type(found) or value.type
    shape = ir.serde.deserialize_type_proto_for_shape(found)
    if shape is None:
        return
    declared = value.shape if value.shape is not None and len(value.shape) == len(shape) else [None] * len(shape)
    value.shape = ir.Shape(_dim(f, d, symbols, fixed) for f, d in zip(shape, declared, strict=True))


def _dim(found: _Dim, declared: _Dim | None, symbols: Collection[str | None], fixed: bool) -> _Dim | None:
    """One dim: what inference found, else what the file declares if that can be true for every input."""
    if isinstance(found, int) or (found.value is not None and found.value in symbols):
        return found
    return declared if fixed or not isinstance(declared, int) else None
