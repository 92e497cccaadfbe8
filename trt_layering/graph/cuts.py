"""Where a model may be cut, how wide each cut is, and which cuts to take for a block size.

May import onnx_ir, errors and dataflow. Pure functions over a sorted graph; one that is not sorted raises ModelError.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import onnx_ir as ir

from trt_layering.graph.dataflow import Dataflow

BLOCK_COST = 1 << 20  # bytes of cut width that one block fewer is worth
_QUANTIZERS = {"QuantizeLinear", "DynamicQuantizeLinear"}
_LONGEST_EXPRESSION = 200
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "max": max,
    "min": min,
    "mod": operator.mod,
}


@dataclass(frozen=True)
class Cut:
    """A seam before node `position` of the graph. `live` are the activations that cross it, in the order in which they
    are made; graph inputs and weights reach every block anyhow and do not count. `width_bytes` is their size."""

    position: int
    live: tuple[ir.Value, ...]
    width_bytes: int


def find_cuts(graph: ir.Graph, dims: Mapping[str, int] | None = None) -> list[Cut]:
    """Every legal cut of a sorted `graph`, by position.

    `dims` gives numbers for symbolic dims; dims that neither it nor the graph knows count as 1. Nothing crosses a legal
    cut but tensors of numbers, of known type and rank; none parts a quantizer from the DequantizeLinear that reads it.
    Between any two legal cuts lies at least one node that executes there. Linear in nodes plus the sum of widths.
    """
    flow = Dataflow(graph)
    blocked = _blocked(flow)
    cuts = []
    started = False
    for position, live, width in _seams(flow, dims or {}):
        started = started or flow.placed(position - 1)
        if started and flow.placed(position) and not blocked[position]:
            cuts.append(Cut(position, live, width))
    return cuts


def _seams(flow: Dataflow, dims: Mapping[str, int]) -> Iterator[tuple[int, tuple[ir.Value, ...], int]]:
    """Position, crossing values and their bytes, for every place between two nodes."""
    live: dict[ir.Value, int] = {}
    for position in range(1, len(flow.nodes)):
        for value in _passed_on(flow, position - 1):
            live[value] = value_bytes(value, dims)
        for value in flow.reads[position - 1]:
            if flow.last_read.get(value) == position - 1:
                live.pop(value, None)
        yield position, tuple(live), sum(live.values())


def _passed_on(flow: Dataflow, index: int) -> list[ir.Value]:
    """Results of node `index` that later nodes read as activations."""
    if not flow.placed(index):
        return []
    return [value for value in flow.nodes[index].outputs if value in flow.last_read]


def _blocked(flow: Dataflow) -> list[bool]:
    """Per position, whether a cut there is illegal because of a value that would cross it."""
    steps = [0] * (len(flow.nodes) + 1)
    for index in range(len(flow.nodes)):
        for value in _passed_on(flow, index):
            bound = _bound_until(flow, value)
            if bound > index:
                steps[index + 1] += 1
                steps[bound + 1] -= 1
    return [count > 0 for count in accumulate(steps)]


def _bound_until(flow: Dataflow, value: ir.Value) -> int:
    """The last position that must stay in one block with the node that makes `value`; 0 when none must."""
    if not may_cross(value):
        return flow.last_read[value]
    producer = value.producer()
    if producer is None or producer.op_type not in _QUANTIZERS:
        return 0
    readers = (node for node in value.consumers() if node.op_type == "DequantizeLinear")
    return max((flow.position.get(node, 0) for node in readers), default=0)


def may_cross(value: ir.Value) -> bool:
    """Whether `value` can be a block's input: a tensor of numbers whose type and rank are known."""
    known = type(value.type) is ir.TensorType and value.shape is not None
    return known and value.dtype not in (ir.DataType.UNDEFINED, ir.DataType.STRING)


def value_bytes(value: ir.Value, dims: Mapping[str, int]) -> int:
    """Bytes of `value`, unknown dims counted as 1 and an unknown type as four bytes."""
    elements = math.prod(dim_size(dim, dims) for dim in value.shape) if value.shape is not None else 1
    bits = value.dtype.bitwidth if value.dtype is not None and value.dtype != ir.DataType.STRING else 32
    return -(-elements * bits // 8)


def dim_size(dim: int | ir.SymbolicDim, dims: Mapping[str, int]) -> int:
    """The number that `dim` stands for: itself, its entry in `dims`, or what its expression over `dims` gives; else 1.

    Expressions are those of exporters: "2*batch + 1", "floor(width/4)", "max(1, s0)".
    """
    if isinstance(dim, int):
        return max(dim, 0)
    text = dim.value
    if text is None or len(text) > _LONGEST_EXPRESSION:
        return 1
    if text in dims:
        return dims[text]
    try:
        return max(int(_evaluate(ast.parse(text, mode="eval").body, dims)), 0)
    except (SyntaxError, LookupError, ArithmeticError, TypeError, ValueError, RecursionError, MemoryError):
        return 1


def _evaluate(node: ast.expr, dims: Mapping[str, int]) -> float:
    """Arithmetic on numbers and names, and nothing that could take long; anything else raises LookupError."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, dims)
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATIONS[type(operation)](_evaluate(left, dims), _evaluate(right, dims))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name.lower()](*(_evaluate(a, dims) for a in arguments))
    raise LookupError(ast.dump(node))


def choose_cuts(
    graph: ir.Graph,
    cuts: Sequence[Cut],
    block_size: int,
    sizes: Mapping[str, int],
    required: Collection[int] = (),
) -> list[int]:
    """Positions, ascending, of those of the legal `cuts` that make the best blocks of at most `block_size` bytes,
    and of all those in `required`.

    `sizes` gives the bytes of each streamed initializer by name; others count as nothing. A block's bytes are those of
    its distinct initializers. Only a block in which a single uncuttable run of nodes has weights may exceed
    `block_size`. Of all such choices this one minimises the sum of widths plus `BLOCK_COST` per block, in linear time.
    """
    flow = Dataflow(graph)
    bounds = [0, *sorted({cut.position for cut in cuts}), len(flow.nodes)]
    width = {cut.position: cut.width_bytes for cut in cuts}
    runs = [_run_weights(flow, begin, end, sizes) for begin, end in pairwise(bounds)]
    cost = [0]
    previous = [0]
    candidates: deque[int] = deque()  # starts that the next blocks may have, by ascending cost
    wall = 0  # the last required seam before the block's end
    for end, first in enumerate(_earliest_starts(runs, sizes, block_size), start=1):
        while candidates and cost[candidates[-1]] >= cost[end - 1]:
            candidates.pop()
        candidates.append(end - 1)
        wall = end - 1 if bounds[end - 1] in required else wall
        while candidates[0] < max(first, wall):
            candidates.popleft()
        previous.append(candidates[0])
        cost.append(cost[candidates[0]] + BLOCK_COST + width.get(bounds[end], 0))
    chosen = []
    at = previous[-1]
    while at > 0:
        chosen.append(bounds[at])
        at = previous[at]
    return chosen[::-1]


def _run_weights(flow: Dataflow, begin: int, end: int, sizes: Mapping[str, int]) -> list[str]:
    """Names of the streamed initializers that nodes [begin, end) need, each once."""
    names = (v.name or "" for i in range(begin, end) if flow.placed(i) for v in flow.weights(i))
    return list(dict.fromkeys(name for name in names if sizes.get(name, 0) > 0))


def _earliest_starts(runs: Sequence[Sequence[str]], sizes: Mapping[str, int], block_size: int) -> Iterator[int]:
    """For a block that ends with each run in turn, the first run with which it may begin."""
    uses: Counter[str] = Counter()
    total = 0
    weighted = 0  # runs with weights from `first` on
    first = 0
    for run in runs:
        total += sum(sizes[name] for name in run if not uses[name])
        uses.update(run)
        weighted += bool(run)
        while total > block_size and weighted > 1:
            uses.subtract(runs[first])
            total -= sum(sizes[name] for name in runs[first] if not uses[name])
            weighted -= bool(runs[first])
            first += 1
        yield first
