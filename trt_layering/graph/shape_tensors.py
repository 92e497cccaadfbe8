"""Values that other values' shapes are made of, which TensorRT computes on the host: what Reshape is told, and why.

May import onnx_ir and cuts. Never raises.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from trt_layering.graph.cuts import Cut

_SHAPES = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "NonMaxSuppression": (2,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
"""By operator, the inputs that say what shape its result has or where in another tensor it lies."""
_FROM_SHAPES = {"Shape", "Size"}
"""What needs of its input only the shape, never the elements."""


def shape_values(graph: ir.Graph) -> frozenset[ir.Value]:
    """The values of `graph` of which some shape follows: what an operator is given as a shape, and all that this is
    computed from, as far as the operators that ask a tensor for its shape."""
    found: set[ir.Value] = set()
    pending = [value for node in graph.all_nodes() for value in _shapes_of(node)]
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        maker = value.producer()
        if maker is not None and maker.op_type not in _FROM_SHAPES:
            pending.extend(source for source in maker.inputs if source is not None)
    return frozenset(found)


def shape_inputs(graph: ir.Graph) -> list[str]:
    """Names of the inputs of `graph` that TensorRT must have on the host, in order."""
    found = shape_values(graph)
    return [value.name or "" for value in graph.inputs if value in found]


def uncrossed(graph: ir.Graph, cuts: Iterable[Cut]) -> list[Cut]:
    """Those of the `cuts` of `graph` that no shape crosses, so that none has to go from one engine to another through
    the host."""
    found = shape_values(graph)
    return [cut for cut in cuts if found.isdisjoint(cut.live)]


def _shapes_of(node: ir.Node) -> Iterable[ir.Value]:
    if node.domain not in ("", "ai.onnx"):
        return
    for index in _SHAPES.get(node.op_type, ()):
        if index < len(node.inputs) and (value := node.inputs[index]) is not None:
            yield value
