"""Opens an ONNX model, brings it into the one form that cutting needs, and finds out types and shapes.

May import numpy, onnx, onnx_ir, errors and the other modules of graph. No weight is held in memory: large tensors stay
in their files, wherever in the model they are. What cannot be read or is not sound ONNX raises ModelError.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from trt_layering.errors import ModelError
from trt_layering.graph.dataflow import subgraphs
from trt_layering.graph.skeleton import INSIDE, LARGE, read_skeleton


def open_model(path: str | Path) -> ir.Model:
    """The model at `path`; large tensors are read from their files when somebody asks for them, never here.

    Weights in external data are `ir.ExternalTensor`, large ones inside the file `ir.LazyTensor`: both map the file anew
    on each `numpy()` of a lazy tensor, or on the first of an external one (`release()` gives the mapping back).
    Raises ModelError for what is no file, no ONNX, truncated, unsound, or lacks some of its external data.
    """
    path = Path(path).absolute()
    try:
        proto = read_skeleton(path)
    except OSError as error:
        raise ModelError(
            f"the model cannot be read: {error.strerror}", where=str(path), remedy="check the path and its permissions"
        ) from error
    _check_supported(proto, path)
    try:
        model = ir.serde.deserialize_model(proto)
    except Exception as error:  # the parser of another library on bytes of unknown origin
        raise ModelError(
            f"the model cannot be understood: {_root_cause(error)}",
            where=str(path),
            remedy="check it with onnx.checker, or export it again",
        ) from error
    _settle_tensors(model, path)
    _check_sound(model, path)
    _forget_negative_dims(model)
    return model


def _check_supported(proto: onnx.ModelProto, path: Path) -> None:
    graph = proto.graph
    if not proto.ir_version or not proto.opset_import or not graph.output:
        raise ModelError(
            "the file is not an ONNX model: it names no IR version, no opset or no output",
            where=str(path),
            remedy="give a .onnx file in binary form",
        )
    if graph.sparse_initializer:
        raise ModelError(
            "the model has sparse initializers",
            where=f"{path}: {graph.sparse_initializer[0].values.name!r}",
            remedy="export it with dense weights",
        )
    names = [value.name for value in graph.input]
    if len(set(names)) < len(names):
        raise ModelError("two of the model's inputs have the same name", where=str(path), remedy="export it again")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


class _TensorFiles:
    """Where the large tensors of the model at `path` lie: checks each one's place and makes it readable from there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[str, int] = {INSIDE: path.stat().st_size}

    def settle(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """`tensor`, or what replaces it; raises ModelError when its bytes are missing, elsewhere or too few or many."""
        if any(not isinstance(dim, int) or dim < 0 for dim in tensor.shape):
            raise self._unsound(tensor, f"has the shape {tensor.shape}")
        if isinstance(tensor, ir.serde.TensorProtoTensor):
            if tensor.raw.HasField("raw_data"):
                self._check_length(tensor, len(tensor.raw.raw_data))
            return tensor
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        location = os.fspath(tensor.location)
        offset = tensor.offset or 0
        self._check_length(tensor, tensor.nbytes if tensor.length is None else tensor.length)
        if offset < 0 or offset + tensor.nbytes > self._size(location, tensor):
            raise self._unsound(tensor, f"lies outside its data file {location!r}, which is too short")
        if location == INSIDE:
            return _read_from(self._path, offset, tensor)
        tensor.base_dir = self._path.parent
        return tensor

    def _check_length(self, tensor: ir.TensorProtocol, length: int) -> None:
        if tensor.dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or length != tensor.nbytes:
            raise self._unsound(tensor, f"has {length} bytes for {tensor.dtype.name} of shape {tensor.shape}")

    def _size(self, location: str, tensor: ir.TensorProtocol) -> int:
        if location not in self._sizes:
            self._sizes[location] = self._checked_size(location, tensor)
        return self._sizes[location]

    def _checked_size(self, location: str, tensor: ir.TensorProtocol) -> int:
        folder = self._path.parent
        file = folder / location
        try:
            status = file.stat()
            inside = file.resolve().is_relative_to(folder.resolve())
        except (OSError, ValueError) as error:
            raise self._unsound(tensor, f"lies in external data that cannot be read: {file}: {error}") from error
        if not inside or Path(location).is_absolute() or ".." in Path(location).parts:
            raise self._unsound(tensor, f"lies in external data outside the model's folder: {location!r}")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise self._unsound(tensor, f"lies in {file}, which is not a regular file with one hard link")
        return status.st_size

    def _unsound(self, tensor: ir.TensorProtocol, what: str) -> ModelError:
        return ModelError(
            f"tensor {tensor.name!r} {what}",
            where=str(self._path),
            remedy="copy the .onnx file together with its external data, as real files, into one folder",
        )


def _read_from(path: Path, offset: int, tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """`tensor` with its bytes at `offset` of the file `path`, mapped anew for each use."""
    dtype, shape, name = tensor.dtype, ir.Shape(tensor.shape.numpy(), frozen=True), tensor.name or ""

    def read() -> ir.ExternalTensor:
        return ir.ExternalTensor(path, offset, None, dtype, shape=shape, name=name)

    return ir.LazyTensor(read, dtype, shape, name=name, doc_string=tensor.doc_string)


def _scopes(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, the bodies of functions, and all subgraphs below these."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield graph
        yield from graph.subgraphs()


def _settle_tensors(model: ir.Model, path: Path) -> None:
    files = _TensorFiles(path)
    for graph in _scopes(model):
        for value in graph.initializers.values():
            assert value.const_value is not None
            value.const_value = files.settle(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.is_ref():
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    node.attributes[name] = ir.AttrTensor(name, files.settle(attribute.as_tensor()))
                elif attribute.type == ir.AttributeType.TENSORS:
                    node.attributes[name] = ir.AttrTensors(name, [files.settle(t) for t in attribute.as_tensors()])


def _check_sound(model: ir.Model, path: Path) -> None:
    """Refuses graphs in which something is read or put out that nothing makes."""
    for graph in _scopes(model):
        for node in graph:
            for value in node.inputs:
                if value is not None and value.graph is None:
                    raise ModelError(
                        f"node {node.name!r} ({node.op_type}) reads {value.name!r}, which nothing makes",
                        where=str(path),
                        remedy="check the model with onnx.checker, or export it again",
                    )
        for value in graph.outputs:
            if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
                raise ModelError(
                    f"graph {graph.name!r} puts out {value.name!r}, which it does not make",
                    where=str(path),
                    remedy="let an Identity node make it, or export the model again",
                )


def _forget_negative_dims(model: ir.Model) -> None:
    """Some exporters write -1 for a dim that is not known."""
    for graph in _scopes(model):
        for value in _values(graph):
            if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
                value.shape = ir.Shape(None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape)


def normalise(model: ir.Model) -> None:
    """Brings `model`, in place, into the form that cutting needs; what it computes stays the same to the bit.

    Local functions are inlined. Weights are initializers of the main graph and nothing else: not Constant nodes, not
    behind Identity, not inputs with a default, not inside If, Loop or Scan (but for small ones there). An output that
    is an initializer comes from an Identity node; one that is a graph input stays so, since both have one name. Nodes
    on which no output depends and unused initializers are gone; nodes are sorted. Names of inputs and outputs do not
    change, others only where two scopes share one. Raises ModelError for functions that cannot be inlined and cycles.
    """
    graph = model.graph
    try:
        InlinePass()(model)
        graph.sort()
    except Exception as error:  # the passes raise several kinds, none of them ours
        raise ModelError(
            f"the model's graph is not sound: {_root_cause(error)}",
            where=f"graph {graph.name!r}",
            remedy="inline its functions and check it with onnx.checker",
        ) from error
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    graph.inputs[:] = inputs
    graph.outputs[:] = list(dict.fromkeys(graph.outputs))
    names = Names(model)
    names.part_scopes()
    for scope in (graph, *graph.subgraphs()):
        _lift_constants(scope, at_least=0 if scope is graph else LARGE)
        _detach_outputs(scope, names)
        if scope is not graph:
            _hoist(scope, graph, names)
    _skip_identities(graph)
    _drop_unused(graph)


class Names:
    """All value names of a model, so that new ones clash with none in any scope."""

    def __init__(self, model: ir.Model) -> None:
        self._main = model.graph
        self._bodies = list(model.graph.subgraphs())
        self._uses = Counter(name for graph in (self._main, *self._bodies) for name in _value_names(graph))

    def fresh(self, base: str) -> str:
        """A name like `base` that no scope has."""
        name = base
        count = 0
        while self._uses[name]:
            count += 1
            name = f"{base}_{count}"
        self._uses[name] = 1
        return name

    def lone(self, name: str) -> str:
        """`name` itself when one scope alone has it, else a fresh one."""
        return name if self._uses[name] == 1 else self.fresh(name)

    def part_scopes(self) -> None:
        """Renames values of subgraphs that hide one of the main graph, so that subgraphs may capture any of those."""
        taken = set(_value_names(self._main))
        for body in self._bodies:
            for value in list(_values(body)):
                if value.name in taken:
                    value.name = self.fresh(value.name)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that `graph` itself defines, without those of its subgraphs."""
    yield from graph.inputs
    yield from (value for value in graph.initializers.values() if not value.is_graph_input())
    yield from (output for node in graph for output in node.outputs)


def _value_names(graph: ir.Graph) -> Iterator[str]:
    return (value.name for value in _values(graph) if value.name)


def _lift_constants(graph: ir.Graph, at_least: int) -> None:
    """Constant nodes of `graph` with a tensor of `at_least` bytes become its initializers."""
    for node in list(graph):
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
            continue
        tensor = _constant_tensor(node)
        if tensor.nbytes < at_least:
            continue
        output = node.outputs[0]
        weight = _as_value(tensor, output.name or "")
        output.replace_all_uses_with(weight, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        graph.register_initializer(weight)


def _as_value(tensor: ir.TensorProtocol, name: str) -> ir.Value:
    tensor.name = name
    shape = ir.Shape(tensor.shape.numpy(), frozen=True)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)


# How often Reshape may hide a rank from another Reshape; each time costs one more inference.
_ROUNDS = 8
_Dim = int | ir.SymbolicDim
_CONSTANT_FORMS: dict[str, Callable[[Any], ir.TensorProtocol]] = {
    "value": lambda tensor: tensor,
    "value_float": lambda number: ir.Tensor(np.array(number, np.float32)),
    "value_floats": lambda numbers: ir.Tensor(np.array(numbers, np.float32)),
    "value_int": lambda number: ir.Tensor(np.array(number, np.int64)),
    "value_ints": lambda numbers: ir.Tensor(np.array(numbers, np.int64)),
    "value_string": lambda text: ir.StringTensor([_encoded(text)], shape=ir.Shape(())),
    "value_strings": lambda texts: ir.StringTensor([_encoded(t) for t in texts], shape=ir.Shape((len(texts),))),
}


def _encoded(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _constant_tensor(node: ir.Node) -> ir.TensorProtocol:
    attributes = list(node.attributes.values())
    if len(attributes) != 1 or attributes[0].is_ref() or attributes[0].name not in _CONSTANT_FORMS:
        raise ModelError(
            f"Constant node {node.name!r} needs exactly one value",
            where=", ".join(node.attributes) or "no attribute",
            remedy="check the model with onnx.checker, or export it again",
        )
    return _CONSTANT_FORMS[attributes[0].name](attributes[0].value)


def _detach_outputs(graph: ir.Graph, names: Names) -> None:
    """Outputs of `graph` that are its initializers come from an Identity node instead; the weight gets another name."""
    for i, weight in enumerate(list(graph.outputs)):
        if not weight.is_initializer() or weight.is_graph_input():
            continue
        name = weight.name or ""
        weight.name = names.fresh(f"{name}_weight")
        node = ir.Node("", "Identity", [weight], num_outputs=1, name=name)
        output = node.outputs[0]
        output.name, output.type, output.shape = name, weight.type, weight.shape
        graph.append(node)
        graph.outputs[i] = output


def _hoist(body: ir.Graph, main: ir.Graph, names: Names) -> None:
    """Moves the large initializers of the subgraph `body` to the main graph, where they can be streamed."""
    for weight in list(body.initializers.values()):
        assert weight.const_value is not None
        assert weight.name is not None
        if weight.is_graph_input() or weight.const_value.nbytes < LARGE:
            continue
        del body.initializers[weight.name]
        weight.name = names.lone(weight.name)
        main.register_initializer(weight)


def _skip_identities(graph: ir.Graph) -> None:
    """Who reads an initializer through Identity, in any scope, reads the initializer itself."""
    for node in list(graph.all_nodes()):
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx") or node.outputs[0].is_graph_output():
            continue
        weight = node.inputs[0]
        if weight is not None and weight.is_initializer() and not weight.is_graph_input():
            node.outputs[0].replace_all_uses_with(weight)
            assert node.graph is not None
            node.graph.remove(node, safe=True)


def _drop_unused(graph: ir.Graph) -> None:
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
            _forget_captures(node)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def _forget_captures(node: ir.Node) -> None:
    """Takes the nodes inside a removed node off the users of what they captured."""
    for body in subgraphs(node):
        for inner in body.all_nodes():
            for i in range(len(inner.inputs)):
                inner.replace_input_with(i, None)


def infer_shapes(model: ir.Model) -> None:
    """Types and shapes onto the values of `model`'s main graph, in place, as far as ONNX's inference knows them.

    What inference finds wins over what the file declares, since declared ranks can be wrong; what only the file knows
    (custom domains) stays. Symbolic dims are kept, made-up ones become unknown. No weight is read: inference sees a
    copy with small tensors only, so it works for models of any size. A failed inference leaves the model as it was.
    """
    copy = _weightless(model)
    try:
        found = _infer(copy)
        for _ in range(_ROUNDS):
            if not _rank_from_length(copy, found):
                break
            found = _infer(copy)
    except Exception:  # inference over odd graphs raises many kinds; without it values are unknown, not wrong
        return
    symbols = {d.value for v in _values(model.graph) for d in v.shape or () if isinstance(d, ir.SymbolicDim)}
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
    copy.ir_version = max(copy.ir_version, 4)  # before, initializers had to be inputs too
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        assert tensor is not None
        if tensor.nbytes >= LARGE:
            del copy.graph.initializers[name]
            copy.graph.inputs.append(value)
        elif isinstance(tensor, (ir.ExternalTensor, ir.LazyTensor)):
            value.const_value = ir.Tensor(np.array(unmapped(tensor).numpy()), dtype=tensor.dtype, name=name)
    for node in copy.graph:
        if node.domain in ("", "ai.onnx"):
            for output in node.outputs:
                output.shape = None  # declared shapes can be wrong, and inference would believe them
    return copy


def unmapped(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor over the same bytes that shares no mapping with `tensor`: what reading it maps is gone when it is."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=tensor.base_dir,
    )


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
