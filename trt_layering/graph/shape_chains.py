"""Computations of shapes brought to where they are used, so that no shape crosses a seam.

May import numpy, onnx_ir and the other modules of graph. Works in place on a sorted graph; what it computes
stays the same to the bit. Shapes that follow from more than shapes and constants stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import onnx_ir as ir

from trt_layering.graph.dataflow import subgraphs
from trt_layering.graph.normal_form import Names
from trt_layering.graph.shape_tensors import shape_values

_LEAVES = ("Shape", "Size")
_WORTH_PARTING = 64 * 1024
"""Bytes of weights between a tensor and who asks for its shape, from which a seam may be wanted there."""
_SLICE_TAKES_INPUTS = 10  # the opset from which it does


def localise(model: ir.Model) -> None:
    """Give each node of `model`'s main graph that is told a shape a computation of its own of it, directly before it.

    Where that would keep a large tensor alive over weights only for its shape, the tensor is stood in for by vectors,
    one for each of its sizes that is not known, which are cut out of it where it is made.
    """
    _Localiser(model).run()


class _Localiser:
    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._names = Names(model)
        self._opset = model.graph.opset_imports.get("", 0)
        self._position = {node: index for index, node in enumerate(model.graph)}
        self._computes = self._shape_nodes()
        self._weights = [0, *accumulate(_weight_bytes(node) for node in model.graph)]
        self._parts: dict[ir.Value, list[ir.Value]] = {}

    def run(self) -> None:
        for node in [node for node in self._graph if node not in self._computes]:
            made: dict[ir.Value, ir.Value] = {}
            for index, value in enumerate(node.inputs):
                if value is not None and value.producer() in self._computes:
                    node.replace_input_with(index, self._copied(value, node, made))
        for node in reversed([node for node in self._graph if node in self._computes]):
            if not any(output.uses() or output.is_graph_output() for output in node.outputs):
                self._graph.remove(node, safe=True)

    def _shape_nodes(self) -> set[ir.Node]:
        """The nodes that compute shapes from nothing but shapes and constants."""
        shapes = shape_values(self._graph)
        found: set[ir.Node] = set()
        for node in self._graph:
            if shapes.isdisjoint(node.outputs) or node.domain not in ("", "ai.onnx") or any(subgraphs(node)):
                continue
            sources = [value for value in node.inputs if value is not None]
            if node.op_type in _LEAVES or all(v.is_initializer() or v.producer() in found for v in sources):
                found.add(node)
        return found

    def _copied(self, value: ir.Value, reader: ir.Node, made: dict[ir.Value, ir.Value]) -> ir.Value:
        """A value equal to `value`, computed before `reader` by nodes of its own; `made` are those that it has."""
        if value in made:
            return made[value]
        node = value.producer()
        assert node is not None
        if node.op_type == "Shape" and self._is_far(node.inputs[0], reader):
            made[value] = self._gathered(node, reader)
            return made[value]
        inputs = [
            self._copied(source, reader, made) if source is not None and source.producer() in self._computes else source
            for source in node.inputs
        ]
        copy = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=len(node.outputs))
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            self._describe(new, old.name or "shape", old.dtype or ir.DataType.INT64, old.shape)
            made[old] = new
        self._graph.insert_before(reader, copy)
        return made[value]

    def _is_far(self, value: ir.Value | None, reader: ir.Node) -> bool:
        """Whether `reader` alone would keep `value` alive over weights of size."""
        maker = value.producer() if value is not None else None
        if value is None or maker is None or value.shape is None or len(value.shape) < 2:
            return False
        if self._opset < _SLICE_TAKES_INPUTS or value.dtype is None:
            return False
        at, since = self._position[reader], self._position[maker]
        needed = (self._position.get(user, 0) for user, _ in value.uses() if user not in self._computes)
        return max(needed, default=0) < at and self._weights[at] - self._weights[since + 1] >= _WORTH_PARTING

    def _gathered(self, node: ir.Node, reader: ir.Node) -> ir.Value:
        """What the Shape `node` makes, of the vectors that stand in for its input."""
        value = node.inputs[0]
        assert value is not None
        assert value.shape is not None
        start, end = (_number(node, name, default) for name, default in (("start", 0), ("end", len(value.shape))))
        parts = []
        for part in self._stand_ins(value)[start:end]:
            if part.is_initializer():
                parts.append(part)
                continue
            size = ir.Node("", "Shape", [part], num_outputs=1)
            self._describe(size.outputs[0], f"{part.name}_size", ir.DataType.INT64, ir.Shape([1]))
            self._graph.insert_before(reader, size)
            parts.append(size.outputs[0])
        joined = ir.Node("", "Concat", parts, [ir.AttrInt64("axis", 0)], num_outputs=1)
        self._describe(joined.outputs[0], f"{value.name}_shape", ir.DataType.INT64, ir.Shape([len(parts)]))
        self._graph.insert_before(reader, joined)
        return joined.outputs[0]

    def _stand_ins(self, value: ir.Value) -> list[ir.Value]:
        """For each axis of `value` its size as a constant, or else a vector of as many elements."""
        if value not in self._parts:
            assert value.shape is not None
            dims = list(value.shape)
            self._parts[value] = [
                self._constant(f"{value.name}_size_{axis}", [dim])
                if isinstance(dim, int)
                else self._vector(value, axis, len(dims))
                for axis, dim in enumerate(dims)
            ]
        return self._parts[value]

    def _vector(self, value: ir.Value, axis: int, rank: int) -> ir.Value:
        maker = value.producer()
        assert maker is not None
        others = [other for other in range(rank) if other != axis]
        bounds = [
            self._constant(f"{value.name}_{word}_{axis}", numbers)
            for word, numbers in (("from", [0] * len(others)), ("to", [1] * len(others)), ("along", others))
        ]
        dim = (value.shape or ())[axis]
        piece = ir.Node("", "Slice", [value, *bounds], num_outputs=1)
        thin = ir.Shape(dim if other == axis else 1 for other in range(rank))
        self._describe(piece.outputs[0], f"{value.name}_along_{axis}", value.dtype, thin)
        flat = ir.Node("", "Reshape", [piece.outputs[0], self._constant(f"{value.name}_flat", [-1])], num_outputs=1)
        self._describe(flat.outputs[0], f"{value.name}_axis_{axis}", value.dtype, ir.Shape([dim]))
        self._graph.insert_after(maker, [piece, flat])
        return flat.outputs[0]

    def _constant(self, name: str, numbers: Sequence[int]) -> ir.Value:
        name = self._names.fresh(name)
        tensor = ir.Tensor(np.array(numbers, np.int64), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _describe(self, value: ir.Value, name: str, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
        value.name = self._names.fresh(name)
        value.type = ir.TensorType(dtype or ir.DataType.FLOAT)
        value.shape = shape.copy() if shape is not None else None


def _number(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _weight_bytes(node: ir.Node) -> int:
    return sum(value.const_value.nbytes for value in _constants(node) if value.const_value is not None)


def _constants(node: ir.Node) -> Iterator[ir.Value]:
    return (value for value in node.inputs if value is not None and value.is_initializer())
