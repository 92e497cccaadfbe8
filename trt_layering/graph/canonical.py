"""Blocks in a form in which equal ones are equal byte for byte, whatever their values, nodes and weights were called.

May import numpy, onnx_ir and the other modules of graph. Pure functions but for `save_with_weights`, which
raises OSError where the disk refuses; the block must be sorted (ModelError).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from trt_layering.graph.dataflow import outer_reads, own_values, subgraphs

_ALIGNED = 4096


class Span(Protocol):
    """Some range of shapes."""

    @property
    def min(self) -> tuple[int, ...]: ...

    @property
    def opt(self) -> tuple[int, ...]: ...

    @property
    def max(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Canonical:
    """A block renamed: its activation inputs are i0, i1, …, its outputs o0, o1, …, its streamed weights w0, w1, … and
    all other names follow from where they are used, too.

    `model` has the weights as initializers that lie where the block's do; nobody may change it. `inputs`, `outputs` and
    `weights` are the block's own names in canonical order.
    """

    model: ir.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]

    def key(self, ranges: Mapping[str, Span]) -> str:
        """A digest in hex that two blocks share if they compute the same function of inputs and weights by the same
        operators, up to the weights' values, for the same `ranges` of shapes of the block's inputs, by their own names.
        """
        digest = hashlib.blake2b(ir.to_proto(as_inputs(self)).SerializeToString(deterministic=True), digest_size=16)
        for name in self.inputs:
            span = ranges[name]
            digest.update(repr([list(shape) for shape in (span.min, span.opt, span.max)]).encode())
        return digest.hexdigest()


def canonical(block: ir.Model, weights: Iterable[str]) -> Canonical:
    """The canonical form of `block`, which stays as it is; `weights` names the initializers that are streamed, of which
    it need not have all.

    Nodes come in the order in which the outputs need them, and inputs, weights and constants as nodes first read them;
    only outputs keep the block's order. What the block says of shapes inside it is left out: who reads the form infers
    it. An output must be made by a node of the block.
    """
    streamed = set(weights)
    graph = block.clone().graph
    for node in graph.all_nodes():
        _settle_attributes(node)
    nodes = _ordered(graph)
    reads = list(dict.fromkeys(value for node in nodes for value in outer_reads(node, graph)))
    given = [value for value in reads if value.is_graph_input()]
    given += [value for value in graph.inputs if value not in set(given)]
    constants = [value for value in reads if value.is_initializer() and not value.is_graph_input()]
    constants.sort(key=lambda value: value.name not in streamed)
    outputs = list(graph.outputs)
    view = ir.GraphView(given, outputs, nodes=nodes, initializers=constants, opset_imports=_opsets(graph), name="block")
    model = ir.Model(view.clone(), ir_version=block.ir_version)
    names = [value.name or "" for value in constants if value.name in streamed]
    _rename(model.graph, len(names))
    return Canonical(
        model, tuple(value.name or "" for value in given), tuple(value.name or "" for value in outputs), tuple(names)
    )


def as_inputs(form: Canonical) -> ir.Model:
    """The form with its weights as inputs after the others, of fixed shapes; for engines that are given their weights
    like any other tensor."""
    model = form.model.clone()
    graph = model.graph
    for index in range(len(form.weights)):
        value = graph.initializers.pop(f"w{index}")
        tensor = value.const_value
        assert tensor is not None
        value.type, value.shape, value.const_value = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy()), None
        graph.inputs.append(value)
    return model


def save_with_weights(form: Canonical, path: Path) -> None:
    """Write the form with its weights to `path` and, for the bytes of these, `path` with ".data" added. One weight at a
    time is in memory."""
    model = form.model.clone()
    data = path.with_name(f"{path.name}.data")
    with data.open("wb") as file:
        for index in range(len(form.weights)):
            value = model.graph.initializers[f"w{index}"]
            tensor = value.const_value
            assert tensor is not None
            file.write(b"\0" * (-file.tell() % _ALIGNED))
            place = (file.tell(), tensor.nbytes)
            file.write(tensor.tobytes())
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(data.name, *place, tensor.dtype, shape=shape, name=value.name or "")
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def shaped(form: Canonical, dims: Mapping[str, Sequence[int | str]]) -> Canonical:
    """The form with the shapes of its inputs as `dims` gives them by the block's names: numbers, and names that sizes
    share if they are always the same, which TensorRT's builder makes use of."""
    model = form.model.clone()
    names: dict[str, str] = {}
    for value, name in zip(model.graph.inputs, form.inputs, strict=True):
        value.shape = ir.Shape(
            dim if isinstance(dim, int) else names.setdefault(dim, f"d{len(names)}") for dim in dims[name]
        )
    for value in model.graph.outputs:
        value.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
    return Canonical(model, form.inputs, form.outputs, form.weights)


def _ordered(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that the outputs need, each after those that it reads, in an order that depends on nothing else."""
    done: dict[ir.Node, None] = {}
    pending: list[tuple[ir.Node, bool]] = [(n, False) for n in reversed([v.producer() for v in graph.outputs]) if n]
    while pending:
        node, ready = pending.pop()
        if node in done:
            continue
        if ready:
            done[node] = None
            continue
        pending.append((node, True))
        makers = [value.producer() for value in outer_reads(node, graph)]
        pending.extend((maker, False) for maker in reversed(makers) if maker is not None)
    return list(done)


def _opsets(graph: ir.Graph) -> dict[str, int]:
    used = {"", *(node.domain for node in graph.all_nodes())}
    return {domain: graph.opset_imports[domain] for domain in sorted(used) if domain in graph.opset_imports}


def _rename(graph: ir.Graph, weights: int) -> None:
    """Canonical names for everything in `graph`, whose first `weights` initializers are the streamed ones."""
    dims: dict[str, str] = {}
    inner, scopes = (f"v{number}" for number in count()), (f"s{number}" for number in count())
    for index, value in enumerate(graph.inputs):
        _describe(value, f"i{index}", dims)
    held = list(graph.initializers.values())
    graph.initializers.clear()
    for index, value in enumerate(held):
        if index < weights:
            _describe(value, f"w{index}", dims)
        else:
            _settle(value, f"c{index - weights}")
        graph.register_initializer(value)
    for index, value in enumerate(graph.outputs):
        _describe(value, f"o{index}", dims)
    _rename_nodes(graph, inner, scopes, dims)


def _rename_nodes(graph: ir.Graph, inner: Iterator[str], scopes: Iterator[str], dims: dict[str, str]) -> None:
    kept = set(graph.outputs)
    for index, node in enumerate(graph):
        node.name, node.doc_string = f"n{index}", None
        node.metadata_props.clear()
        for value in node.outputs:
            if value not in kept and value.name:
                _forget(value)
                value.name, value.type, value.shape = next(inner), None, None
        for body in subgraphs(node):
            _rename_body(body, inner, scopes, dims)


def _rename_body(body: ir.Graph, inner: Iterator[str], scopes: Iterator[str], dims: dict[str, str]) -> None:
    body.name, body.doc_string = next(scopes), None
    body.metadata_props.clear()
    for value in body.inputs:
        _describe(value, next(inner), dims)
    held = list(body.initializers.values())
    body.initializers.clear()
    for value in held:
        _settle(value, next(inner))
        body.register_initializer(value)
    own = set(own_values(body))
    for value in dict.fromkeys(body.outputs):
        if value in own and not value.is_graph_input() and not value.is_initializer():
            _describe(value, next(inner), dims)
    _rename_nodes(body, inner, scopes, dims)


def _describe(value: ir.Value, name: str, dims: dict[str, str]) -> None:
    """Name `value`, and call its unknown dims after where they come first."""
    _forget(value)
    value.name = name
    if value.shape is not None:
        value.shape = ir.Shape(_dim(dim, dims) for dim in value.shape)


def _dim(dim: int | ir.SymbolicDim, dims: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return dims.setdefault(dim.value, f"d{len(dims)}")


def _settle(value: ir.Value, name: str) -> None:
    """Name the initializer `value`, whose elements are part of the form."""
    tensor = value.const_value
    assert tensor is not None
    _forget(value)
    value.name, value.const_value = name, _plain(tensor, name)
    value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())


def _forget(value: ir.Value) -> None:
    value.doc_string = None
    value.metadata_props.clear()


def _settle_attributes(node: ir.Node) -> None:
    """Attributes by name, their tensors in one form."""
    attributes = sorted(node.attributes.values(), key=lambda attribute: attribute.name)
    node.attributes.clear()
    for attribute in attributes:
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = _plain(attribute.as_tensor(), "")
        elif attribute.type == ir.AttributeType.TENSORS:
            value = [_plain(tensor, "") for tensor in attribute.as_tensors()]
        node.attributes[attribute.name] = ir.Attr(attribute.name, attribute.type, value)


def _plain(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """`tensor` in memory, such that equal ones are serialised alike wherever they lay."""
    shape = ir.Shape(tensor.shape.numpy())
    if tensor.dtype == ir.DataType.STRING:
        texts: Sequence[bytes] = tensor.numpy().reshape(-1).tolist()
        return ir.StringTensor(texts, shape=shape, name=name)
    return ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, shape=shape, name=name)
