"""Tables of which only rows are gathered: an inference reads the rows that it names instead of the whole table.

May import onnx_ir, errors, dataflow and cuts. Nothing raises but a graph that is not sorted (ModelError); a weight that
is no such table, or whose Gather no seam can part from its neighbours, is a weight like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import onnx_ir as ir

from trt_layering.graph.cuts import may_cross
from trt_layering.graph.dataflow import Dataflow

TABLE_FROM = 1 << 20
"""Bytes from which a table is worth an engine of its own."""
_ROW_FROM = 64  # bytes: shorter rows would be read a page each
_HEAVY_FROM = 64 * 1024  # bytes of a weight that is not needed just to have the indices
_INDICES = (ir.DataType.INT32, ir.DataType.INT64)
_DTYPES = {
    ir.DataType.BOOL, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT32,
    ir.DataType.UINT32, ir.DataType.INT64, ir.DataType.UINT64, ir.DataType.FLOAT16, ir.DataType.BFLOAT16,
    ir.DataType.FLOAT, ir.DataType.DOUBLE,
}  # fmt: skip


def find_tables(graph: ir.Graph) -> frozenset[str]:
    """Names of the initializers of at least `TABLE_FROM` bytes of which every use is a Gather of rows, in `graph`
    itself and by indices that are not constant."""
    return _tables(Dataflow(graph))


def bring_forward(graph: ir.Graph) -> None:
    """Put the Gathers of rows, with what their indices need, before everything else in the sorted `graph`, so that the
    seams around them cost no others. One whose indices need weights of size stays where it is."""
    flow = Dataflow(graph)
    gathers = _gathers(flow)
    needs = {i: _ancestors(flow, i) for i in gathers}
    light = [i for i in gathers if not any(_is_heavy(flow, j) for j in needs[i] if j not in needs)]
    early = {j for i in light for j in (i, *needs[i])}
    depth: dict[int, int] = {}  # Gathers of rows on the way to each
    for i in sorted(early):
        makers = [j for j in _makers(flow, i) if j in early]
        depth[i] = max((depth[j] + (j in needs) for j in makers), default=0)
    moved = [flow.nodes[i] for i in sorted(early, key=lambda i: (depth[i], i in needs, i))]
    rest = next((node for i, node in enumerate(flow.nodes) if i not in early), None)
    if moved and rest is not None:
        graph.remove(moved)
        graph.insert_before(rest, moved)


def seams(graph: ir.Graph, legal: Iterable[int]) -> frozenset[int]:
    """Those of the `legal` cuts that make each Gather of rows a block by itself, where there are such."""
    flow, known = Dataflow(graph), set(legal)
    placed = [i for i in range(len(flow.nodes)) if flow.placed(i)]
    gathers = set(_gathers(flow))
    chosen: set[int] = set()
    for at, i in enumerate(placed):
        around = {*placed[at : at + 2]} - {placed[0]}
        if i in gathers and around <= known:
            chosen |= around
    return frozenset(chosen)


def rows_input(block: ir.Graph) -> str | None:
    """The input of `block` that chooses rows, if all it does is to gather these from a table."""
    if len(block) != 1 or len(block.inputs) != 1 or not find_tables(block):
        return None
    return block.inputs[0].name


def _tables(flow: Dataflow) -> frozenset[str]:
    return frozenset(name for name, value in flow.graph.initializers.items() if _is_table(flow, value))


def _gathers(flow: Dataflow) -> list[int]:
    """Positions of the nodes that gather rows of tables."""
    tables = _tables(flow)
    return sorted({flow.position[node] for name in tables for node, _ in flow.graph.initializers[name].uses()})


def _is_table(flow: Dataflow, value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.nbytes < TABLE_FROM or tensor.dtype not in _DTYPES or not len(tensor.shape):
        return False
    if value.is_graph_input() or value.is_graph_output() or not value.uses():
        return False
    row = math.prod(tensor.shape.numpy()[1:]) * tensor.dtype.itemsize
    return row >= _ROW_FROM and all(_gathers_rows(flow, node, i, len(tensor.shape)) for node, i in value.uses())


def _gathers_rows(flow: Dataflow, node: ir.Node, index: int, rank: int) -> bool:
    """Whether `node` reads its input `index`, of `rank` dims, by rows that differ from one inference to the next."""
    if node.graph is not flow.graph or (node.op_type, index) != ("Gather", 0):
        return False
    if node.domain not in ("", "ai.onnx"):
        return False
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    rows = node.inputs[1]
    if axis not in (0, -rank) or rows is None or rows.dtype not in _INDICES or flow.is_constant(rows):
        return False
    # ONNX Runtime does not tell a scalar from an unknown rank, which no seam may part.
    crosses = may_cross(rows) and rows.shape is not None and len(rows.shape) > 0
    return flow.placed(flow.position[node]) and (rows.is_graph_input() or crosses) and may_cross(node.outputs[0])


def _makers(flow: Dataflow, index: int) -> list[int]:
    """Positions of the nodes whose results node `index` reads."""
    producers = (value.producer() for value in flow.reads[index])
    return [flow.position[producer] for producer in producers if producer is not None]


def _ancestors(flow: Dataflow, index: int) -> set[int]:
    found: set[int] = set()
    pending = [index]
    while pending:
        makers = [i for i in _makers(flow, pending.pop()) if i not in found]
        found.update(makers)
        pending.extend(makers)
    return found


def _is_heavy(flow: Dataflow, index: int) -> bool:
    tensors: Sequence[ir.TensorProtocol | None] = [v.const_value for v in flow.reads[index] if v.is_initializer()]
    return any(tensor is not None and tensor.nbytes >= _HEAVY_FROM for tensor in tensors)
