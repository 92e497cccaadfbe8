"""A model as cutting needs it: opened lazily, brought into normal form, with types and shapes.

May import onnx, onnx_ir, errors and the other modules of graph. No weight is held in memory: large tensors stay in
their files, wherever in the model they are. What cannot be read or is not sound ONNX raises ModelError.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from trt_layering.errors import ModelError
from trt_layering.graph.dataflow import own_values
from trt_layering.graph.inference import infer_shapes
from trt_layering.graph.normal_form import normalise, root_cause
from trt_layering.graph.skeleton import INSIDE, read_skeleton
from trt_layering.graph.stored import MappedFile, StoredTensor

__all__ = ["infer_shapes", "normalise", "open_model"]


def open_model(path: str | Path) -> ir.Model:
    """The model at `path`; large tensors are read from their files when somebody asks for them, never here.

    Tensors in external data, and large ones inside the file, are `StoredTensor`s: their arrays are views of the mapped
    files, which must not change while the model is used. Raises ModelError for what is no file, no ONNX, truncated,
    unsound, or lacks some of its external data.
    """
    path = Path(path).absolute()
    try:
        proto = read_skeleton(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the model cannot be read: {error}", where=str(path), remedy="check the path and its permissions"
        ) from error
    _check_supported(proto, path)
    try:
        model = ir.serde.deserialize_model(proto)
    except Exception as error:  # the parser of another library on bytes of unknown origin
        raise ModelError(
            f"the model cannot be understood: {root_cause(error)}",
            where=str(path),
            remedy="check it with onnx.checker, or export it again",
        ) from error
    files = _TensorFiles(path)
    _settle_tensors(model, files)
    _check_duplicates(proto.graph, files, path)
    _check_sound(model, path)
    _forget_unknown_dims(model)
    return model


def _check_supported(proto: onnx.ModelProto, path: Path) -> None:
    graph = proto.graph
    if not proto.ir_version or not proto.opset_import or not graph.output:
        raise ModelError(
            "the file is not an ONNX model: it names no IR version, no opset or no output",
            where=str(path),
            remedy="give a .onnx file in binary form",
        )
    if not graph.node and not graph.initializer:
        raise ModelError(
            "the model computes nothing: it has neither nodes nor weights",
            where=str(path),
            remedy="export it again",
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


class _TensorFiles:
    """The files in which the tensors of the model at `path` lie, each mapped at most once, all in its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = {INSIDE: (MappedFile(path), path.stat().st_size)}

    def settle(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """`tensor`, ready to be read; raises ModelError when its bytes are missing, elsewhere, too few or too many."""
        if any(not isinstance(dim, int) or dim < 0 for dim in tensor.shape):
            raise self._unsound(tensor, f"has the shape {tensor.shape}")
        if isinstance(tensor, ir.serde.TensorProtoTensor) and tensor.raw.HasField("raw_data"):
            self._check_length(tensor, len(tensor.raw.raw_data))
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        offset = tensor.offset or 0
        self._check_length(tensor, tensor.nbytes if tensor.length is None else tensor.length)
        location = os.fspath(tensor.location)
        if location not in self._files:
            self._files[location] = self._outside(location, tensor)
        file, size = self._files[location]
        if offset < 0 or offset + tensor.nbytes > size:
            raise self._unsound(tensor, f"ends at byte {offset + tensor.nbytes} of {file.path}, which has {size}")
        return StoredTensor(file, offset, tensor.dtype, ir.Shape(tensor.shape.numpy(), frozen=True), tensor.name)

    def same(self, one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
        """Whether two tensors of numbers have the same elements, wherever they lie."""
        first, second = (self.settle(ir.serde.deserialize_tensor(proto)) for proto in (one, other))
        if ir.DataType.STRING in (first.dtype, second.dtype):
            return False
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()

    def _check_length(self, tensor: ir.TensorProtocol, length: int) -> None:
        if tensor.dtype in (ir.DataType.UNDEFINED, ir.DataType.STRING) or length != tensor.nbytes:
            raise self._unsound(tensor, f"has {length} bytes for {tensor.dtype.name} of shape {tensor.shape}")

    def _outside(self, location: str, tensor: ir.TensorProtocol) -> tuple[MappedFile, int]:
        """External data: a regular file in the model's folder, so that no model can reach for others' files."""
        folder = self._path.parent
        file = folder / location
        try:
            status = file.stat()
            inside = file.resolve().is_relative_to(folder.resolve())
        except (OSError, ValueError) as error:
            raise self._unsound(tensor, f"lies in external data that cannot be read: {error}") from error
        if not inside or Path(location).is_absolute() or ".." in Path(location).parts:
            raise self._unsound(tensor, f"lies in external data outside the model's folder: {location!r}")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise self._unsound(tensor, f"lies in {file}, which is not a regular file with one hard link")
        return MappedFile(file), status.st_size

    def _unsound(self, tensor: ir.TensorProtocol, what: str) -> ModelError:
        return ModelError(
            f"tensor {tensor.name!r} {what}",
            where=str(self._path),
            remedy="copy the .onnx file together with its external data, as real files, into one folder",
        )


def _scopes(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph, the bodies of functions, and all subgraphs below these."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield graph
        yield from graph.subgraphs()


def _settle_tensors(model: ir.Model, files: _TensorFiles) -> None:
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


def _check_duplicates(graph: onnx.GraphProto, files: _TensorFiles, path: Path) -> None:
    """Refuses two different initializers of one name: which of them counts is not the same for all who read it."""
    seen: dict[str, onnx.TensorProto] = {}
    for proto in graph.initializer:
        first = seen.setdefault(proto.name, proto)
        if first is not proto and first != proto and not files.same(first, proto):
            raise ModelError(
                f"two different initializers have the name {proto.name!r}",
                where=str(path),
                remedy="remove one of them, or export the model again",
            )


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


def _forget_unknown_dims(model: ir.Model) -> None:
    """Some exporters write -1 for a dim that is not known, and some "?", which is then no symbol."""
    for graph in _scopes(model):
        for value in own_values(graph):
            if value.shape is not None and any(map(_is_unknown, value.shape)):
                value.shape = ir.Shape(None if _is_unknown(dim) else dim for dim in value.shape)


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    return dim < 0 if isinstance(dim, int) else dim.value in (None, "", "?")
