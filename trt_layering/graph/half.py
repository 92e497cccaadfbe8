"""Makes a graph compute in float16 but for chosen nodes, and gives back what it was, with or without rounding.

May import numpy, onnx, onnx_ir and the other modules of graph. No weight is held in memory: one is rounded whenever
somebody asks for its elements. Raises only what reading a weight does.

A node computes in float16 where ONNX's schema of its operator allows it; all other nodes, and those that one asks for,
stay float32. Between two of these no value is rounded, else Casts stand between them: each value has at most one to
float16 and one to float32, right before the first node that reads it. Control flow stays float32 with all that is in
it, and so do nodes that read a weight outside float16's range, and those that only dequantized numbers go into: a
backend may execute them as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir

from trt_layering.graph.dataflow import outer_reads, own_values, subgraphs
from trt_layering.graph.narrow import NarrowTensor, fits
from trt_layering.graph.normal_form import Names

_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_INDIFFERENT = {"Cast", "Shape", "Size"}
"""Operators that read a float of either kind as it is."""
_INTEGERS = {"QuantizeLinear", "DequantizeLinear"}
"""Scales of few bits would move whole levels."""
_FIRST_ONLY = {"Resize", "Upsample"}
"""Operators whose other floats are sizes."""


@dataclass
class Halves:
    """What `halve` did: names of the values that were float32 and are float16; those of the Casts that it put in, and
    what they read by what they give; and by name, the nodes that read or give floats and stay float32, and why."""

    values: set[str] = field(default_factory=set)
    casts: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Use:
    """Which inputs and outputs of a node are to be float16."""

    inputs: Collection[int] = ()
    outputs: Collection[int] = ()


def name_nodes(windows: Sequence[ir.Model]) -> None:
    """Give every node of the main graphs of `windows` a name that no other has, in place."""
    taken: set[str] = set()
    for node in (node for window in windows for node in window.graph):
        base = name = node.name or node.op_type
        count = 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        node.name = name
        taken.add(name)


def outgrown(windows: Sequence[ir.Model]) -> set[str]:
    """Names of the float32 initializers whose values float16 cannot hold, see `narrow.fits`. Each is read once."""
    weights = {name: value.const_value for window in windows for name, value in window.graph.initializers.items()}
    return {name for name, tensor in weights.items() if tensor is not None and _outgrows(tensor)}


def _outgrows(tensor: ir.TensorProtocol) -> bool:
    return tensor.dtype == _FLOAT and not fits(tensor, _HALF)


def halve(
    windows: Sequence[ir.Model], full: Collection[str], large: Collection[str], outputs: Collection[str]
) -> Halves:
    """Let the main graphs of `windows`, in normal form and with types, compute in float16, in place; `windows` run one
    after the other, and their nodes have names of their own (`name_nodes`).

    The nodes that `full` names stay float32, and those that read one of the weights `large` (see `outgrown`). Inputs
    that no window makes, and those values that `outputs` names, keep their types. A value keeps its name, but for
    outputs that have to be cast.
    """
    work = _Work(windows, set(outputs), _plan(windows, full, large))
    for window in windows:
        work.convert(window)
    for name, reason in work.plan.kept.items():
        work.done.kept[name] = reason
    return work.done


@dataclass(frozen=True)
class _Plan:
    uses: dict[str, _Use]  # by node
    kept: dict[str, str]
    shared: set[str]  # weights that some read as float32, whatever others do


def _plan(windows: Sequence[ir.Model], full: Collection[str], large: Collection[str]) -> _Plan:
    plan = _Plan({}, {}, set())
    for window in windows:
        opset = window.graph.opset_imports.get("", 1)
        for node in window.graph:
            if not any(_is_float(value) for value in (*outer_reads(node, window.graph), *node.outputs)):
                continue
            name = node.name or ""
            use = _use(node, opset, full, large)
            if isinstance(use, str):
                plan.kept[name] = use
            else:
                plan.uses[name] = use
            plan.shared.update(_full_weights(node, window.graph, plan.uses.get(name, _Use())))
    return plan


def _full_weights(node: ir.Node, graph: ir.Graph, use: _Use) -> Iterator[str]:
    halves = {value for i, value in enumerate(node.inputs) if i in use.inputs}
    for value in outer_reads(node, graph):
        if value.is_initializer() and value not in halves:
            yield value.name or ""


def _is_float(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == _FLOAT and isinstance(value.type, ir.TensorType)


def is_half(node: ir.Node, halves: Halves) -> bool:
    """Whether `node`, of what `halve` made, computes in float16; the Casts that it put in do not count."""
    if node.name in halves.casts:
        return False
    ends = node.outputs if node.op_type in _INDIFFERENT else (*node.inputs, *node.outputs)
    return any(value is not None and value.name in halves.values for value in ends)


def _use(node: ir.Node, opset: int, full: Collection[str], large: Collection[str]) -> _Use | str:
    """How `node` computes in float16, or why it does not."""
    ends = [*node.inputs, *node.outputs]
    if node.domain not in ("", "ai.onnx") or any(True for _ in subgraphs(node)):
        return "control flow" if node.domain in ("", "ai.onnx") else "operator"
    if any(value is not None and value.name and not isinstance(value.type, ir.TensorType) for value in ends):
        return "type"
    if node.op_type in _INTEGERS or _on_integers(node):
        return "quantized"
    use = _by_schema(node, opset)
    if use is None:
        return "operator"
    if not use.inputs and not use.outputs:
        return use
    if any(value.name in large for i, value in enumerate(node.inputs) if value is not None and i in use.inputs):
        return "range"
    return "chosen" if node.name in full else use


def _on_integers(node: ir.Node) -> bool:
    first = [value.producer() for value in node.inputs[:2] if value is not None]
    return len(first) == 2 and all(maker is not None and maker.op_type == "DequantizeLinear" for maker in first)


def _by_schema(node: ir.Node, opset: int) -> _Use | None:
    """What of `node` may be float16 by ONNX's schema; None if floats that it gives must be float32."""
    outputs = [i for i, value in enumerate(node.outputs) if _is_float(value)]
    if node.op_type == "ConstantOfShape":
        filler = node.attributes.get("value")
        return _Use(outputs=outputs) if filler is None or not _outgrows(filler.as_tensor()) else None
    if node.op_type in _INDIFFERENT:
        return _Use(outputs=outputs)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    able = {c.type_param_str for c in schema.type_constraints if "tensor(float16)" in c.allowed_type_strs}
    inputs = [i for i, value in enumerate(node.inputs) if _is_float(value)]
    if node.op_type in _FIRST_ONLY:
        inputs = [i for i in inputs if i == 0]
    kinds = {i: _kind(schema.inputs, i) for i in inputs}
    halves = [i for i in inputs if kinds[i] in able]
    bound = {kinds[i] for i in halves}
    if not halves or any(_kind(schema.outputs, i) not in bound for i in outputs):
        return None
    return _Use(halves, outputs)


def _kind(formal: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
    return formal[min(index, len(formal) - 1)].type_str


class _Work:
    """Converts windows in their turn: what one passes on as float16, later ones take so."""

    def __init__(self, windows: Sequence[ir.Model], outputs: set[str], plan: _Plan) -> None:
        graphs = [graph for window in windows for graph in (window.graph, *window.graph.subgraphs())]
        self._taken = {value.name or "" for graph in graphs for value in own_values(graph)}
        self._taken |= {node.name or "" for window in windows for node in window.graph}
        self._outputs = outputs
        self._second: dict[str, str] = {}  # names of the float16 copies of weights that float32 nodes read, too
        self.plan = plan
        self.done = Halves()

    def convert(self, window: ir.Model) -> None:
        graph = window.graph
        casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        halves: dict[ir.Value, ir.Value] = {}
        for value in graph.inputs:
            if value.name in self.done.values:
                value.type = ir.TensorType(_HALF)
        for node in list(graph):
            use = self.plan.uses.get(node.name or "", _Use())
            for i, read in enumerate(node.inputs):
                if read is None:
                    continue
                if i in use.inputs and read.is_initializer():
                    node.replace_input_with(i, self._half_weight(graph, read, halves))
                elif i in use.inputs and read.dtype == _FLOAT:
                    node.replace_input_with(i, self._cast(node, read, _HALF, casts))
                elif i not in use.inputs and self._was_float(read) and node.op_type not in _INDIFFERENT:
                    node.replace_input_with(i, self._cast(node, read, _FLOAT, casts))
            self._widen_captures(node, graph, casts)
            self._halve_outputs(node, use, casts)
        for name in [name for name, value in graph.initializers.items() if not value.uses()]:
            del graph.initializers[name]

    def _was_float(self, value: ir.Value) -> bool:
        return value.dtype == _HALF and value.name in self.done.values

    def _fresh(self, base: str) -> str:
        name = base
        count = 0
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name

    def _half_weight(self, graph: ir.Graph, weight: ir.Value, halves: dict[ir.Value, ir.Value]) -> ir.Value:
        """`weight` as float16: itself where every node of every window reads it so, else a copy."""
        if weight in halves:
            return halves[weight]
        name = weight.name or ""
        half = weight
        tensor = NarrowTensor(_tensor(weight), _HALF)
        if name in self.plan.shared:
            if name not in self._second:
                self._second[name] = self._fresh(f"{name}_half")
            tensor.name = self._second[name]
            half = ir.Value(name=tensor.name, shape=weight.shape)
        half.const_value, half.type = tensor, ir.TensorType(_HALF)
        if half is not weight:
            graph.register_initializer(half)
        halves[weight] = halves[half] = half
        self.done.values.add(half.name or "")
        return half

    def _cast(
        self, reader: ir.Node, value: ir.Value, to: ir.DataType, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]
    ) -> ir.Value:
        """`value` as `to`, cast right before `reader` unless it has been before."""
        if (value, to) not in casts:
            cast = self._new_cast(value, to, self._fresh(f"{value.name}_{'half' if to == _HALF else 'full'}"))
            assert reader.graph is not None
            reader.graph.insert_before(reader, cast)
            casts[value, to] = cast.outputs[0]
        return casts[value, to]

    def _new_cast(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
        node = ir.Node(
            "", "Cast", [value], [ir.AttrInt64("to", to)], num_outputs=1, name=self._fresh(f"{value.name}_to_{to.name}")
        )
        result = node.outputs[0]
        result.name, result.type = name, ir.TensorType(to)
        result.shape = None if value.shape is None else value.shape.copy()
        self.done.casts.add(node.name or "")
        self.done.sources[name] = value.name or ""
        if to == _HALF:
            self.done.values.add(name)
        return node

    def _widen_captures(
        self, node: ir.Node, graph: ir.Graph, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]
    ) -> None:
        for body in subgraphs(node):
            for inner in body.all_nodes():
                for i, value in enumerate(inner.inputs):
                    if value is not None and value.graph is graph and self._was_float(value):
                        inner.replace_input_with(i, self._cast(node, value, _FLOAT, casts))

    def _halve_outputs(self, node: ir.Node, use: _Use, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]) -> None:
        for value in (node.outputs[i] for i in use.outputs):
            value.type = ir.TensorType(_HALF)
            if value.is_graph_output() and value.name in self._outputs:
                self._cast_back(node, value, casts)
            self.done.values.add(value.name or "")
        if use.outputs:
            _set_kind(node, _HALF)

    def _cast_back(self, node: ir.Node, value: ir.Value, casts: dict[tuple[ir.Value, ir.DataType], ir.Value]) -> None:
        """Let a Cast give the graph output `value`, as float32 and by its name."""
        name = value.name or ""
        value.name = self._fresh(f"{name}_half")
        graph = node.graph
        assert graph is not None
        cast = self._new_cast(value, _FLOAT, name)
        graph.insert_after(node, cast)
        _replace_output(graph, value, cast.outputs[0])
        casts[value, _FLOAT] = cast.outputs[0]


def _replace_output(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    for i, output in enumerate(list(graph.outputs)):
        if output is old:
            graph.outputs[i] = new


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value


def _set_kind(node: ir.Node, to: ir.DataType) -> None:
    """What `node` makes by its attributes, if that is a float, is of `to`."""
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", to)
    elif node.op_type == "ConstantOfShape":
        attribute = node.attributes.get("value")
        number = np.zeros(1) if attribute is None else attribute.as_tensor().numpy()
        node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(number.astype(to.numpy())))


def as_it_was(block: ir.Model, halves: Halves) -> ir.Model:
    """A copy of `block`, cut out of what `halve` made, that computes as it did before, in float32; all its values and
    nodes are there, by the same names, Casts included. Weights are shared, not copied."""
    copy = block.clone()
    graph = copy.graph
    for name, value in graph.initializers.items():
        if name in halves.values:
            tensor = _tensor(value)
            assert isinstance(tensor, NarrowTensor)
            value.const_value, value.type = tensor.wide, ir.TensorType(_FLOAT)
    for value in own_values(graph):
        if value.name in halves.values:
            value.type = ir.TensorType(_FLOAT)
    for node in graph:
        if any(value.name in halves.values for value in node.outputs):
            _set_kind(node, _FLOAT)
    return copy


def rounded(
    block: ir.Model, halves: Halves, full: Collection[str] = (), unrounded: Collection[str] = ()
) -> tuple[ir.Model, dict[str, tuple[str, str]]]:
    """`as_it_was(block, halves)` with every value rounded that is float16 in `block`, and the names of what was
    rounded, before and after; as if the nodes `full` were float32, too, and the values `unrounded` of the model were
    never rounded.

    This is how float16 is executed where ONNX Runtime's CPU provider has no kernel for it, except that this provider
    leaves the rounding out between two such nodes, and with it infinities; a pair of Casts in a graph of float32 is
    executed as it stands. Sums are of float32, rounded at the end. Inputs are taken to be rounded.
    """
    copy = as_it_was(block, halves)
    graph = copy.graph
    full = {*full, *halves.casts}
    names = Names(copy)
    places: dict[str, tuple[str, str]] = {}
    for node in list(graph):
        for value in node.outputs:
            name = value.name or ""
            source = halves.sources.get(name, name)
            if name in halves.values and source not in unrounded:
                place = _round(graph, node, value, full, names)
                if place is not None:
                    places[name] = place
    for name, value in list(graph.initializers.items()):
        if name in halves.values:
            _round_weight(graph, value, full, names)
    return copy, places


def _round(
    graph: ir.Graph, node: ir.Node, value: ir.Value, full: Collection[str], names: Names
) -> tuple[str, str] | None:
    """Let those read `value` rounded who have to, if any; its names before and after."""
    readers = [(q, i) for q, i in value.uses() if not (node.name in full and q.name in full)]
    if not readers and not value.is_graph_output():
        return None
    name = value.name or ""
    down = ir.Node("", "Cast", [value], [ir.AttrInt64("to", _HALF)], num_outputs=1)
    up = ir.Node("", "Cast", [down.outputs[0]], [ir.AttrInt64("to", _FLOAT)], num_outputs=1)
    again = up.outputs[0]
    down.outputs[0].name, again.name = names.fresh(f"{name}_down"), names.fresh(f"{name}_rounded")
    again.type, again.shape = ir.TensorType(_FLOAT), value.shape
    graph.insert_after(node, (down, up))
    for reader, i in readers:
        reader.replace_input_with(i, again)
    if value.is_graph_output():
        _replace_output(graph, value, again)
        value.name, again.name = again.name, name
    return value.name or "", again.name or ""


def _round_weight(graph: ir.Graph, weight: ir.Value, full: Collection[str], names: Names) -> None:
    readers = [(q, i) for q, i in weight.uses() if q.name not in full]
    if not readers:
        return
    tensor = _tensor(weight)
    again = ir.Value(name=names.fresh(f"{weight.name}_rounded"), type=ir.TensorType(_FLOAT), shape=weight.shape)
    again.const_value = ir.LazyTensor(
        _rounding(tensor), _FLOAT, ir.Shape(tensor.shape.numpy(), frozen=True), name=again.name
    )
    graph.register_initializer(again)
    for reader, i in readers:
        reader.replace_input_with(i, again)
    if not weight.uses():
        del graph.initializers[weight.name or ""]


def _rounding(tensor: ir.TensorProtocol) -> Callable[[], ir.TensorProtocol]:
    return lambda: ir.Tensor(NarrowTensor(tensor, _HALF).numpy().astype(np.float32))
