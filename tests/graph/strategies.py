"""Random small models with everything that makes cutting hard, and what they are fed.

Every value is [N, C, 4, 4] with a dynamic N and some C, so that any operator can follow any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
SIDE = 4
OPSETS = [helper.make_opsetid("", 17)]


@dataclass
class Maker:
    """A graph in the making. `values` are the activations so far with their channels; `draw` makes every choice."""

    draw: Callable[[Any], Any]
    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    values: list[tuple[str, int]] = field(default_factory=list)
    ready: dict[tuple[int, ...], list[str]] = field(default_factory=dict)
    count: int = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}/{self.count}:0"

    def node(self, op: str, inputs: list[str], outputs: int = 1, **attributes: Any) -> list[str]:
        names = [self.name(op.lower()) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"/{op}_{self.count}", **attributes))
        return names

    def add(self, op: str, inputs: list[str], channels: int, **attributes: Any) -> None:
        self.values.append((self.node(op, inputs, **attributes)[0], channels))

    def pick(self) -> tuple[str, int]:
        return self.draw(st.sampled_from(self.values))  # type: ignore[no-any-return]

    def weight(self, *shape: int) -> str:
        """A weight of `shape`: new or used before, and behind one of the things that weights hide behind."""
        same = self.ready.setdefault(shape, [])
        if not same or self.draw(st.booleans()):
            array = self.rng.standard_normal(shape).astype(np.float32)
            same.append(self.draw(st.sampled_from(_HIDDEN))(self, array))
        return self.draw(st.sampled_from(same))  # type: ignore[no-any-return]

    def initializer(self, array: Array) -> str:
        name = self.name("weight")
        self.weights[name] = array
        return name


def _plain(maker: Maker, array: Array) -> str:
    return maker.initializer(array)


def _constant(maker: Maker, array: Array) -> str:
    return maker.node("Constant", [], value=numpy_helper.from_array(array))[0]


def _identity(maker: Maker, array: Array) -> str:
    return maker.node("Identity", [maker.initializer(array)])[0]


def _cast(maker: Maker, array: Array) -> str:
    return maker.node("Cast", [maker.initializer(array.astype(np.float16))], to=TensorProto.FLOAT)[0]


def _dequantized(maker: Maker, array: Array) -> str:
    levels = maker.initializer(np.clip(array * 50, -127, 127).astype(np.int8))
    scale = maker.initializer(np.array(0.02, np.float32))
    return maker.node("DequantizeLinear", [levels, scale])[0]


_HIDDEN = [_plain, _plain, _constant, _identity, _cast, _dequantized]


def _conv(maker: Maker) -> None:
    value, channels = maker.pick()
    kernel = maker.draw(st.sampled_from([1, 3]))
    result = maker.draw(st.sampled_from([2, 4, 8]))
    inputs = [value, maker.weight(result, channels, kernel, kernel)]
    if maker.draw(st.booleans()):
        inputs.append(maker.weight(result))
    maker.add("Conv", inputs, result, pads=[kernel // 2] * 4)


def _matmul(maker: Maker) -> None:
    value, channels = maker.pick()
    maker.add("MatMul", [value, maker.weight(SIDE, SIDE)], channels)


def _gemm(maker: Maker) -> None:
    value, channels = maker.pick()
    (mean,) = maker.node("ReduceMean", [value], axes=[2, 3], keepdims=0)
    weight = maker.weight(channels, channels)
    transposed = int(maker.draw(st.booleans()))
    (scores,) = maker.node("Gemm", [mean, weight, maker.weight(channels)], transB=transposed, alpha=0.5)
    (spread,) = maker.node("Unsqueeze", [scores, maker.initializer(np.array([2, 3]))])
    maker.add("Mul", [value, spread], channels)


def _elementwise(maker: Maker) -> None:
    value, channels = maker.pick()
    maker.add(maker.draw(st.sampled_from(["Relu", "Sigmoid", "Tanh", "Neg"])), [value], channels)


def _clip(maker: Maker) -> None:
    value, channels = maker.pick()
    maker.add("Clip", [value, "", maker.initializer(np.array(0.75, np.float32))], channels)


def _add(maker: Maker) -> None:
    value, channels = maker.pick()
    other = maker.draw(st.sampled_from([name for name, c in maker.values if c == channels]))
    maker.add("Add", [value, other], channels)


def _concat(maker: Maker) -> None:
    (one, channels), (other, more) = maker.pick(), maker.pick()
    if channels + more <= 16:
        maker.add("Concat", [one, other], channels + more, axis=1)


def _split(maker: Maker) -> None:
    value, channels = maker.pick()
    sizes = maker.initializer(np.array([1, channels - 1]))
    parts = maker.node("Split", [value, sizes], outputs=2, axis=1)
    kept = maker.draw(st.sampled_from([0, 1, 2]))  # the other part is often read by nothing
    maker.values += [(name, c) for name, c in zip(parts, (1, channels - 1), strict=True) if c > 1][: kept + 1]


def _quantized(maker: Maker) -> None:
    value, channels = maker.pick()
    scale, zero = maker.initializer(np.array(0.05, np.float32)), maker.initializer(np.array(3, np.int8))
    (levels,) = maker.node("QuantizeLinear", [value, scale, zero])
    _elementwise(maker)  # in between, so that a wrong cut has a place
    maker.add("DequantizeLinear", [levels, scale, zero], channels)


def _sequence(maker: Maker) -> None:
    value, channels = maker.pick()
    (parts,) = maker.node("SplitToSequence", [value, maker.initializer(np.array(1))], axis=1)
    _elementwise(maker)
    maker.add("ConcatFromSequence", [parts], channels, axis=1)


def _shared_decoder(maker: Maker) -> None:
    """A mask that follows from weights alone and is read in many places."""
    value, channels = maker.pick()
    if "mask" not in maker.weights:
        maker.weights["mask"] = maker.rng.standard_normal((SIDE, SIDE)).astype(np.float16)
        maker.nodes.append(helper.make_node("Cast", ["mask"], ["mask:32"], to=TensorProto.FLOAT))
        maker.nodes.append(helper.make_node("Transpose", ["mask:32"], ["mask:T"]))
    maker.add("Mul", [value, "mask:T"], channels)


def _if(maker: Maker) -> None:
    """Branches that read an activation, a weight of the main graph and weights of their own, under clashing names."""
    value, channels = maker.pick()
    captured, _ = maker.draw(st.sampled_from([v for v in maker.values if v[1] == channels]))
    outer = maker.weight(SIDE, SIDE)
    (total,) = maker.node("ReduceSum", [value], keepdims=0)
    (condition,) = maker.node("Greater", [total, maker.initializer(np.array(0, np.float32))])
    branches = []
    for _ in range(2):
        inner = numpy_helper.from_array(maker.rng.standard_normal((32, SIDE, SIDE)).astype(np.float32)[:1], "own")
        large = maker.rng.standard_normal((SIDE, 300)).astype(np.float32)
        nodes = [
            helper.make_node("Constant", [], ["large"], value=numpy_helper.from_array(large)),
            helper.make_node("ReduceMean", ["large"], ["scale"], keepdims=1, axes=[1]),
            helper.make_node("MatMul", [captured, outer], ["product"]),
            helper.make_node("Mul", ["product", "own"], ["scaled"]),
            helper.make_node("Add", ["scaled", "scale"], ["result"]),
        ]
        output = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
        branches.append(helper.make_graph(nodes, "branch", [], [output], [inner]))
    maker.add("If", [condition], channels, then_branch=branches[0], else_branch=branches[1])


def _loop(maker: Maker) -> None:
    """A body that carries a value, with a weight inside that is large enough to be streamed."""
    value, channels = maker.pick()
    large = numpy_helper.from_array(maker.rng.standard_normal((100, SIDE)).astype(np.float32), "own")
    body = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["own"], ["row"], axes=[0], keepdims=1),
            helper.make_node("Add", ["carried", "row"], ["next"]),
            helper.make_node("Identity", ["go"], ["goes"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
        [large],
    )
    trips = maker.initializer(np.array(maker.draw(st.integers(0, 3))))
    maker.add("Loop", [trips, "", value], channels, body=body)


OPERATORS = [
    _conv, _conv, _matmul, _gemm, _elementwise, _clip, _add, _concat, _split, _quantized, _sequence, _shared_decoder,
    _if, _loop,
]  # fmt: skip
# Without those where a last bit turns a comparison or a rounding, after which everything may differ, rightly.
SMOOTH = [make for make in OPERATORS if make not in (_quantized, _if)]


@st.composite
def models(draw: Callable[[Any], Any], operators: Sequence[Callable[[Maker], None]] = OPERATORS) -> onnx.ModelProto:
    """A valid model: inputs "x" and "y/2:0", and a random DAG from them to its outputs, some of them read inside."""
    maker = Maker(draw, np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    maker.values = [("x", 2), ("y/2:0", 3)]
    for make in draw(st.lists(st.sampled_from(operators), min_size=3, max_size=14)):
        make(maker)
    _add(maker)
    inside = maker.values[2:]
    read = {name for node in maker.nodes for name in node.input}
    leaves = [value for value in inside if value[0] not in read]
    # Most leaves are outputs, so that little is dead; and some values that are read inside are outputs too.
    more = draw(st.lists(st.sampled_from(inside), max_size=2))
    outputs = dict([*leaves[draw(st.integers(0, 1)) :], inside[-1], *more])
    graph = helper.make_graph(
        maker.nodes,
        "generated",
        [_info("x", 2), _info("y/2:0", 3)],
        [_info(name, channels) for name, channels in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in maker.weights.items()],
    )
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=8)


def _info(name: str, channels: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", channels, SIDE, SIDE])


def feeds(batch: int = 2, seed: int = 0) -> dict[str, Array]:
    """Inputs for any generated model."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((batch, 2, SIDE, SIDE), np.float32),
        "y/2:0": rng.standard_normal((batch, 3, SIDE, SIDE), np.float32),
    }
