"""The one form that cutting needs: every weight an initializer of the main graph, nodes sorted, nothing unused.

May import numpy, onnx_ir, errors, dataflow and skeleton. Works in place; a graph that is not sound raises ModelError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from trt_layering.errors import ModelError
from trt_layering.graph.dataflow import own_values, subgraphs
from trt_layering.graph.skeleton import LARGE

FREE_INITIALIZERS = 4  # the IR version from which initializers need not be inputs


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
            f"the model's graph is not sound: {root_cause(error)}",
            where=f"graph {graph.name!r}",
            remedy="inline its functions and check it with onnx.checker",
        ) from error
    graph.name = graph.name or "graph"  # the checker wants one
    graph.inputs[:] = [value for value in graph.inputs if not value.is_initializer()]
    model.ir_version = max(model.ir_version, FREE_INITIALIZERS)
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
        self._uses = Counter(name for graph in (self._main, *self._bodies) for name in _names(graph))

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
        taken = set(_names(self._main))
        for body in self._bodies:
            for value in list(own_values(body)):
                if value.name in taken:
                    value.name = self.fresh(value.name)


def _names(graph: ir.Graph) -> list[str]:
    return [value.name for value in own_values(graph) if value.name]


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


def root_cause(error: BaseException) -> str:
    """What the first of a chain of errors says."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return str(error) or type(error).__name__
