"""Splits a recurrent node whose weights are larger than a block into its two directions, which may be two blocks.

May import numpy, onnx_ir, normal_form and split. What cannot be split is left as it was; nothing raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from trt_layering.graph.normal_form import Names
from trt_layering.graph.split import Split

_OPERATORS = ("GRU", "LSTM", "RNN")
# Inputs that have one part for each direction, in front: W, R, B and P. Between them, the states have it elsewhere.
_WEIGHTS = (1, 2, 3, 7)
_STATES = (5, 6)
_DIRECTIONS = ("forward", "reverse")
_SPLIT_COUNTS_OUTPUTS = 18


def split_directions(model: ir.Model, limit: int) -> list[Split]:
    """Splits, in place, every bidirectional node of `model`'s main graph whose weights have more than `limit` bytes
    together; one entry for each of those weights.

    The model must be normalised. Results keep their names and their bits, since the two directions have nothing in
    common but what they read. Halves are sliced when read, from the file where the whole lies.
    """
    names = Names(model)
    splits = []
    for node in list(model.graph):
        weights = [value for index, value in enumerate(node.inputs) if index in _WEIGHTS and value is not None]
        if _divisible(node, weights) and sum(map(_nbytes, weights)) > limit:
            _Division(model, node, names).carry_out()
            splits += [Split(weight.name or "", 2, f"{node.op_type} has two directions") for weight in weights]
    return splits


def _divisible(node: ir.Node, weights: list[ir.Value]) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in _OPERATORS:
        return False
    # Which of these parameters belongs to which activation depends on the activations.
    if "activation_alpha" in node.attributes or "activation_beta" in node.attributes:
        return False
    direction = node.attributes.get("direction")
    if direction is None or direction.as_string() != "bidirectional":
        return False
    return all(
        weight.is_initializer() and not weight.is_graph_output() and len(weight.uses()) == 1 for weight in weights
    )


def _nbytes(weight: ir.Value) -> int:
    return weight.const_value.nbytes if weight.const_value is not None else 0


class _Division:
    """One node on its way to becoming two and what joins their results."""

    def __init__(self, model: ir.Model, node: ir.Node, names: Names) -> None:
        self._graph, self._node, self._names = model.graph, node, names
        self._opset = model.graph.opset_imports.get("", 0)
        self._batch_first = "layout" in node.attributes and node.attributes["layout"].as_int() == 1
        self._new: list[ir.Node] = []

    def carry_out(self) -> None:
        inputs: list[list[ir.Value | None]] = [list(self._node.inputs), list(self._node.inputs)]
        whole = []
        for index, value in enumerate(self._node.inputs):
            if value is None or index not in (*_WEIGHTS, *_STATES):
                continue
            halves = self._weight(value) if index in _WEIGHTS else self._state(value)
            for part, half in zip(inputs, halves, strict=True):
                part[index] = half
            whole += [value] if index in _WEIGHTS else []
        parts = [self._part(index, part) for index, part in enumerate(inputs)]
        self._new += parts
        joined = [
            self._join(index, [part.outputs[index] for part in parts]) for index in range(len(self._node.outputs))
        ]
        ir.convenience.replace_nodes_and_values(
            self._graph, self._node, [self._node], self._new, self._node.outputs, joined
        )
        for value in whole:
            del self._graph.initializers[value.name or ""]

    def _weight(self, value: ir.Value) -> list[ir.Value]:
        """The two halves of a weight."""
        halves = []
        for index, direction in enumerate(_DIRECTIONS):
            assert value.const_value is not None
            tensor = _half(value.const_value, index)
            half = ir.Value(
                name=self._names.fresh(f"{value.name}_{direction}"), type=ir.TensorType(tensor.dtype),
                shape=tensor.shape, const_value=tensor,
            )  # fmt: skip
            self._graph.register_initializer(half)
            halves.append(half)
        return halves

    def _state(self, value: ir.Value) -> list[ir.Value]:
        """The two halves of a state, which may be computed."""
        attributes = [ir.AttrInt64("axis", 1 if self._batch_first else 0)]
        if self._opset >= _SPLIT_COUNTS_OUTPUTS:
            attributes.append(ir.AttrInt64("num_outputs", 2))
        divide = ir.Node("", "Split", [value], attributes, num_outputs=2)
        for half, direction in zip(divide.outputs, _DIRECTIONS, strict=True):
            half.name, half.type = self._names.fresh(f"{value.name}_{direction}"), value.type
        self._new.append(divide)
        return list(divide.outputs)

    def _part(self, index: int, inputs: list[ir.Value | None]) -> ir.Node:
        """The node over again, for one direction."""
        node, direction = self._node, _DIRECTIONS[index]
        attributes = [
            attribute for name, attribute in node.attributes.items() if name not in ("direction", "activations")
        ]
        attributes.append(ir.AttrString("direction", direction))
        if "activations" in node.attributes:
            activations = list(node.attributes["activations"].as_strings())
            half = len(activations) // 2
            attributes.append(ir.AttrStrings("activations", activations[index * half : (index + 1) * half]))
        name = f"{node.name}_{direction}" if node.name else ""  # two nodes must not have one name
        part = ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=name)
        part.metadata_props.update(node.metadata_props)
        for output, of_whole in zip(part.outputs, node.outputs, strict=True):
            if of_whole.name:
                output.name, output.type = self._names.fresh(f"{of_whole.name}_{direction}"), of_whole.type
                output.shape = self._shape(of_whole)
            else:
                output.name = ""
        return part

    def _shape(self, whole: ir.Value) -> ir.Shape | None:
        if whole.shape is None:
            return None
        shape: ir.Shape = whole.shape.copy()
        shape[self._axis(self._node.outputs.index(whole))] = 1
        return shape

    def _axis(self, output: int) -> int:
        """Where an output has its directions: the sequence has one axis more than the states."""
        return (2 if self._batch_first else 1) if output == 0 else (1 if self._batch_first else 0)

    def _join(self, index: int, halves: list[ir.Value]) -> ir.Value:
        if not self._node.outputs[index].name:
            return ir.Value(name="")
        concat = ir.Node("", "Concat", halves, [ir.AttrInt64("axis", self._axis(index))])
        self._new.append(concat)
        return concat.outputs[0]


def _half(tensor: ir.TensorProtocol, index: int) -> ir.LazyTensor:
    """One direction's part of `tensor`, read from where it lies whenever somebody asks for it."""

    def read() -> ir.Tensor[Any]:
        return ir.Tensor(np.ascontiguousarray(tensor.numpy()[index : index + 1]), dtype=tensor.dtype)

    return ir.LazyTensor(read, tensor.dtype, ir.Shape((1, *tensor.shape.numpy()[1:]), frozen=True))
