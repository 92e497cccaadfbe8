"""Recurrent nodes with two directions, split into one for each."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.graph.execution import assert_same, run
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.recurrent import split_directions

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, HIDDEN = 5, 2, 3, 4


def recurrent(operator: str, bias: bool, states: str, outputs: int, opset: int, direction: str, activations: list[str]):
    """A model of one node, and its feeds."""
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1
    rows = GATES[operator] * HIDDEN
    weights = {"w": (directions, rows, INPUTS), "r": (directions, rows, HIDDEN)}
    weights |= {"b": (directions, 2 * rows)} if bias else {}
    inputs, feeds = ["x", "w", "r", "b" if bias else "", ""], {"x": (STEPS, BATCH, INPUTS)}
    if states:
        state = {"h": (directions, BATCH, HIDDEN), "c": (directions, BATCH, HIDDEN)}
        names = ["h", "c"] if operator == "LSTM" else ["h"]
        inputs += names
        (feeds if states == "given" else weights).update({name: state[name] for name in names})
    every = ["y", "y_h", "y_c"] if operator == "LSTM" else ["y", "y_h"]
    made = every[:outputs]
    attributes = {
        "hidden_size": HIDDEN,
        "direction": direction,
        **({"activations": activations} if activations else {}),
    }
    shapes = {
        "y": (STEPS, directions, BATCH, HIDDEN),
        "y_h": (directions, BATCH, HIDDEN),
        "y_c": (directions, BATCH, HIDDEN),
    }
    graph = helper.make_graph(
        [helper.make_node(operator, inputs, made, name="rnn", **attributes)], "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in feeds.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in made],
        [numpy_helper.from_array(rng.standard_normal(s, np.float32), n) for n, s in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model, {name: rng.standard_normal(shape, np.float32) for name, shape in feeds.items()}


@settings(max_examples=40)
@given(
    st.sampled_from(["LSTM", "GRU", "RNN"]), st.booleans(), st.sampled_from(["", "given", "stored"]), st.integers(1, 3),
    st.sampled_from([12, 17, 18]), st.booleans(),
)  # fmt: skip
def test_halves_make_the_whole_bit_for_bit(operator, bias, states, outputs, opset, named):
    usual = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[operator]
    other = {"LSTM": ["Sigmoid", "Relu", "Tanh"], "GRU": ["Sigmoid", "Relu"], "RNN": ["Relu"]}[operator]
    proto, feeds = recurrent(operator, bias, states, outputs, opset, "bidirectional", usual + other if named else [])
    expected = run(proto, feeds)
    model = ir.from_proto(proto)
    splits = split_directions(model, 0)
    assert {split.pieces for split in splits} == {2}
    assert [split.tensor for split in splits] == ["w", "r", "b"][: 3 if bias else 2]
    assert sum(node.op_type == operator for node in model.graph) == 2
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert_same(expected, run(model, feeds))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_one_direction_is_left_alone(direction):
    proto, _ = recurrent("LSTM", True, "", 3, 17, direction, [])
    model = ir.from_proto(proto)
    assert split_directions(model, 0) == []
    assert len(model.graph) == 1


def test_small_ones_and_shared_weights_are_left_alone():
    proto, _ = recurrent("GRU", True, "", 2, 17, "bidirectional", [])
    assert split_directions(ir.from_proto(proto), 1 << 20) == []
    proto.graph.node.append(helper.make_node("Identity", ["w"], ["again"]))
    assert split_directions(ir.from_proto(proto), 0) == []


def test_a_real_reader_of_text(real_model):
    path = real_model("common")
    model = open_model(path)
    normalise(model)
    infer_shapes(model)
    splits = split_directions(model, 4 << 20)
    assert {split.pieces for split in splits} == {2}
    assert all(
        value.const_value.nbytes <= 4 << 20 for value in model.graph.initializers.values() if "_forward" in value.name
    )
    feeds = real_models.feeds("common")
    assert_same(run(path, feeds), run(model, feeds))
