"""Normal form computes the same bits under the same names, from weights that all are the main graph's initializers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper, numpy_helper

from tests.graph import strategies
from tests.graph.execution import assert_same, from_proto, run
from trt_layering.errors import ModelError
from trt_layering.graph.model import normalise

Array = np.ndarray[Any, Any]


def normal(source: onnx.ModelProto | str) -> ir.Model:
    model = from_proto(source)
    normalise(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def operators(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in graph]


@settings(max_examples=50)
@given(proto=strategies.models())
def test_the_same_bits_under_the_same_names(proto: onnx.ModelProto) -> None:
    model = normal(proto)
    assert [v.name for v in model.graph.inputs] == [v.name for v in proto.graph.input]
    assert [v.name for v in model.graph.outputs] == [v.name for v in proto.graph.output]
    assert_same(run(proto, strategies.feeds()), run(model, strategies.feeds()))


@settings(max_examples=50)
@given(proto=strategies.models())
def test_every_large_weight_is_an_initializer_of_the_main_graph(proto: onnx.ModelProto) -> None:
    model = normal(proto)
    assert "Constant" not in operators(model.graph)
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            assert attribute.type != ir.AttributeType.TENSOR or attribute.as_tensor().nbytes < 1024
    for body in model.graph.subgraphs():
        assert all(v.const_value is not None and v.const_value.nbytes < 1024 for v in body.initializers.values())
    assert all(value.uses() for value in model.graph.initializers.values())


@settings(max_examples=50)
@given(proto=strategies.models())
def test_normal_form_is_its_own_normal_form(proto: onnx.ModelProto) -> None:
    model = normal(proto)
    before = ir.to_proto(model)
    normalise(model)
    assert ir.to_proto(model) == before


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("value_float", 1.5, np.array(1.5, np.float32)),
        ("value_floats", [1.5, 2.5], np.array([1.5, 2.5], np.float32)),
        ("value_int", 7, np.array(7)),
        ("value_ints", [7, 8], np.array([7, 8])),
        ("value_string", "héllo", np.array("héllo", object)),
        ("value_strings", ["a", ""], np.array(["a", ""], object)),
        ("value", numpy_helper.from_array(np.zeros((0, 3), np.float16)), np.zeros((0, 3), np.float16)),
    ],
)
def test_every_form_of_constant(attribute: str, value: object, expected: Array) -> None:
    kind = helper.np_dtype_to_tensor_dtype(expected.dtype)
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], **{attribute: value}), helper.make_node("Identity", ["c"], ["y"])],
        "constants",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", kind, expected.shape)],
    )
    model = normal(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert operators(model.graph) == ["Identity"]  # an output needs a node
    assert list(model.graph.initializers) == ["c"]
    got = run(model, {"x": np.zeros(1, np.float32)})["y"]
    assert got.shape == expected.shape
    assert got.tolist() == expected.tolist()


def test_outputs_that_are_constants_or_weights_keep_their_names() -> None:
    model = normal("""<ir_version: 8, opset_import: ["" : 17]>
    outputs (float[2] x) => (float[2] c, float[2] w, float[2] y) <float[2] w = {1, 2}> {
        c = Constant <value = float[2] {3, 4}> ()
        y = Add(x, w)
    }""")
    assert sorted(operators(model.graph)) == ["Add", "Identity", "Identity"]
    got = run(model, {"x": np.ones(2, np.float32)})
    assert {name: array.tolist() for name, array in got.items()} == {"c": [3, 4], "w": [1, 2], "y": [2, 3]}


def test_an_input_that_is_an_output_stays_so_and_outputs_are_listed_once() -> None:
    model = normal("""<ir_version: 8, opset_import: ["" : 17]>
    outputs (float[2] x) => (float[2] y, float[2] x, float[2] y) { y = Neg(x) }""")
    assert [value.name for value in model.graph.outputs] == ["y", "x"]
    assert_same({"y": -np.ones(2, np.float32), "x": np.ones(2, np.float32)}, run(model, {"x": np.ones(2, np.float32)}))


def test_inputs_with_a_default_are_weights() -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "old",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("w", "x")],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.array([1, 2], np.float32), "w")],
    )
    model = normal(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)], ir_version=3))
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert model.ir_version >= 4  # before, initializers had to be inputs
    assert run(model, {"x": np.ones(2, np.float32)})["y"].tolist() == [2, 3]


def test_identities_of_weights_are_seen_through_in_every_scope() -> None:
    model = normal("""<ir_version: 8, opset_import: ["" : 17]>
    identities (bool p, float[2] x) => (float[2] z) <float[2] w = {1, 2}> {
        i = Identity(w)
        j = Identity(i)
        a = Add(x, j)
        z = If (p) <
            then_branch = then () => (float[2] u) { k = Identity(j) u = Add(a, k) },
            else_branch = else () => (float[2] o) { o = Identity(j) }
        >
    }""")
    assert operators(model.graph) == ["Add", "If"]
    for condition, expected in ((True, [3, 5]), (False, [1, 2])):
        assert run(model, {"p": np.array(condition), "x": np.ones(2, np.float32)})["z"].tolist() == expected


def branch(name: str, seed: int, output: str = "result") -> onnx.GraphProto:
    """Puts out the sum of the captured `a` and a large weight that it calls `own`."""
    array = np.full((1, 512), seed, np.float32)
    nodes = [helper.make_node("Add", ["a", "own"], ["sum"]), helper.make_node("Identity", ["sum"], [output])]
    info = helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, 512])
    return helper.make_graph(nodes, name, [], [info], [numpy_helper.from_array(array, "own")])


def with_branches(
    then: onnx.GraphProto, other: onnx.GraphProto, nodes: list[onnx.NodeProto] | None = None
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            *(nodes or []),
            helper.make_node("If", ["p"], ["y"], then_branch=then, else_branch=other),
        ],
        "branching",
        [
            helper.make_tensor_value_info("p", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 512]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 512])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def both(model: onnx.ModelProto | ir.Model) -> list[Array]:
    x = np.linspace(-1, 1, 512, dtype=np.float32)[None]
    return [run(model, {"p": np.array(p), "x": x})["y"] for p in (True, False)]


def test_weights_of_branches_move_out_and_keep_apart() -> None:
    proto = with_branches(branch("then", 1), branch("else", 2))
    model = normal(proto)
    assert len(model.graph.initializers) == 2
    assert not any(body.initializers for body in model.graph.subgraphs())
    for expected, got in zip(both(proto), both(model), strict=True):
        np.testing.assert_array_equal(expected, got)


def test_a_weight_that_a_branch_puts_out_moves_out() -> None:
    weight = numpy_helper.from_array(np.ones((1, 512), np.float32), "result")
    info = helper.make_tensor_value_info("result", TensorProto.FLOAT, [1, 512])
    then = helper.make_graph([], "then", [], [info], [weight])
    other = helper.make_graph([helper.make_node("Constant", [], ["result"], value=weight)], "else", [], [info])
    model = normal(with_branches(then, other))
    assert [operators(body) for body in model.graph.subgraphs()] == [["Identity"], ["Identity"]]
    assert len(model.graph.initializers) == 2
    assert all((array == 1).all() for array in both(model))


def test_a_name_that_a_branch_hides_does_not_catch_what_is_captured() -> None:
    # "then" calls a result of its own "w"; the main graph's weight "w" is read there through an Identity.
    weight = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.full((1, 512), 5, np.float32)))
    seen = helper.make_node("Identity", ["w"], ["seen"])
    info = helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 512])
    nodes = [helper.make_node("Neg", ["a"], ["w"]), helper.make_node("Add", ["w", "seen"], ["r"])]
    model = from_proto(with_branches(helper.make_graph(nodes, "then", [], [info]), branch("else", 2), [weight, seen]))
    normalise(model)
    x = np.linspace(-1, 1, 512, dtype=np.float32)[None]
    np.testing.assert_array_equal(both(model)[0], 5 - np.maximum(x, 0))


def test_functions_are_inlined() -> None:
    model = normal("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
    calling (float[2] x) => (float[2] z) {
        inner = own.outer(x)
        y = own.outer(inner)
        z = own.scaled <factor = 3.0> (y)
    }
    <domain: "own", opset_import: ["" : 17, "own" : 1]>
    outer (a) => (c) { inner = own.step(a) c = own.step(inner) }
    <domain: "own", opset_import: ["" : 17]>
    step (a) => (b) { w = Constant <value = float[2] {1, 2}> () b = Add(a, w) }
    <domain: "own", opset_import: ["" : 17]>
    scaled <factor> (a) => (b) { w = Constant <value_float: float = @factor> () b = Mul(a, w) }""")
    assert not model.functions
    assert operators(model.graph) == ["Add"] * 4 + ["Mul"]
    assert run(model, {"x": np.zeros(2, np.float32)})["z"].tolist() == [12, 24]


def test_functions_that_call_themselves_are_refused() -> None:
    model = from_proto("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
    calling (float[2] x) => (float[2] z) { z = own.round(x) }
    <domain: "own", opset_import: ["" : 17, "own" : 1]>
    round (a) => (b) { c = Neg(a) b = own.round(c) }""")
    with pytest.raises(ModelError, match="not sound"):
        normalise(model)


def test_nodes_are_sorted_and_cycles_refused() -> None:
    proto = with_branches(branch("then", 1), branch("else", 2))
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = from_proto(proto)
    normalise(model)
    assert operators(model.graph) == ["Relu", "If"]
    proto.graph.node[1].input[0] = "y"
    with pytest.raises(ModelError, match="cycle"):
        normalise(from_proto(proto))


def test_what_no_output_needs_is_dropped() -> None:
    dead = branch("dead", 3)
    extra = [helper.make_node("If", ["p"], ["unread"], then_branch=dead, else_branch=dead)]
    model = normal(with_branches(branch("then", 1), branch("else", 2), extra))
    assert operators(model.graph) == ["Relu", "If"]
    assert len(model.graph.initializers) == 2
    assert {node.op_type for value in model.graph[0].outputs for node in value.consumers()} == {"Add"}
    assert len(model.graph[0].outputs[0].uses()) == 2  # those in the dead branches are forgotten


def test_omitted_outputs_and_inputs_stay_omitted() -> None:
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", "w", "r", "", "", "h"], ["", "y"], hidden_size=2)],
        "omitting",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5, 1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 2])],
        [
            numpy_helper.from_array(np.ones((1, 8, 2), np.float32), name) if name != "h" else
            numpy_helper.from_array(np.ones((1, 1, 2), np.float32), name)
            for name in "wrh"
        ],
    )  # fmt: skip
    model = normal(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    (node,) = ir.to_proto(model).graph.node
    assert list(node.input) == ["x", "w", "r", "", "", "h"]
    assert list(node.output) == ["", "y"]


def test_a_constant_without_a_value_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["y"], name="odd")],
        "odd",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    with pytest.raises(ModelError, match="'odd' needs exactly one value"):
        normalise(from_proto(helper.make_model(graph)))
