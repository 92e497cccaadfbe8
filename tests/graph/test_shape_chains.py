"""Shapes are computed where they are needed: every seam that weights want is free of them, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper, numpy_helper

from tests.graph import strategies
from tests.graph.execution import assert_same, cut, from_proto, run, run_chain
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import infer_shapes, normalise
from trt_layering.graph.shape_chains import localise
from trt_layering.graph.shape_tensors import shape_inputs, uncrossed

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
info = helper.make_tensor_value_info
node = helper.make_node
WIDTH = 160  # a weight of WIDTH² floats is worth a seam


def local(proto: onnx.ModelProto) -> ir.Model:
    source = from_proto(proto)
    normalise(source)
    infer_shapes(source)
    localise(source)
    return source


def reshaping(between: int, *, reads_again: bool = False, opset: int = 17, **attributes: Any) -> onnx.ModelProto:
    """A tensor's shape, asked for before `between` MatMuls and used after them, twice."""
    rng = np.random.default_rng(0)
    nodes = [node("Relu", ["x"], ["r"]), node("Shape", ["r"], ["s"], **attributes)]
    nodes.append(node("Gather", ["s", "chosen"], ["some"]))
    nodes.append(node("Concat", ["some", "rest"], ["target"], axis=0))
    value = "r"
    for index in range(between):
        nodes.append(node("MatMul", [value, f"w{index}"], [f"m{index}"]))
        value = f"m{index}"
    nodes.append(node("Reshape", [value, "target"], ["a"]))
    nodes.append(node("Tanh", ["a"], ["b"]))
    nodes.append(node("Reshape", ["b", "target"], ["c"]))
    nodes.append(node("ReduceMean", ["r"], ["mean"], keepdims=0) if reads_again else node("Neg", ["c"], ["mean"]))
    nodes.append(node("Add", ["c", "mean"], ["y"]))
    weights = [
        numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH), np.float32) / 16, f"w{index}")
        for index in range(between)
    ]
    weights += [numpy_helper.from_array(np.array(numbers), name) for name, numbers in _NUMBERS.items()]
    graph = helper.make_graph(
        nodes, "g", [info("x", FLOAT, ["n", "t", WIDTH])], [info("y", FLOAT, None), info("target", INT, None)], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


_NUMBERS = {"chosen": [1, 0], "rest": [WIDTH]}
FEEDS = {"x": np.random.default_rng(1).standard_normal((2, 3, WIDTH), np.float32)}


@pytest.mark.parametrize("reads_again", [False, True])
@pytest.mark.parametrize("opset", [9, 11, 13, 17])
@pytest.mark.parametrize("between", [0, 1, 4])
def test_the_answer_is_the_same_and_weights_can_be_parted(between: int, opset: int, reads_again: bool) -> None:
    proto = reshaping(between, opset=opset, reads_again=reads_again)
    source = local(proto)
    onnx.checker.check_model(ir.to_proto(source))
    assert_same(run(proto, FEEDS), run(source, FEEDS))
    cuts = uncrossed(source.graph, find_cuts(source.graph))
    blocks = cut(source, [seam.position for seam in cuts])
    assert_same(run(proto, FEEDS), run_chain(blocks, FEEDS))
    assert not any(shape_inputs(block.graph) for block in blocks)
    if between == 4:
        assert max(sum(n.op_type == "MatMul" for n in block.graph) for block in blocks) == 1


def test_a_tensor_is_stood_in_for_only_where_it_would_be_kept_for_its_shape() -> None:
    def crossing(proto: onnx.ModelProto) -> int:
        """Bytes, for 8 rows of 8, of what crosses beside one activation between two MatMuls."""
        graph = local(proto).graph
        kinds = [n.op_type for n in graph]
        seams = uncrossed(graph, find_cuts(graph, {"n": 8, "t": 8}))
        inside = [seam for seam in seams if kinds[seam.position - 1] == kinds[seam.position] == "MatMul"]
        (width,) = {seam.width_bytes for seam in inside}
        return width - 8 * 8 * WIDTH * 4

    assert crossing(reshaping(4)) == (8 + 8) * 4
    assert crossing(reshaping(4, reads_again=True)) == 8 * 8 * WIDTH * 4
    assert not any(n.op_type == "Slice" for n in local(reshaping(0)).graph)
    assert not any(n.op_type == "Slice" for n in local(reshaping(4, reads_again=True)).graph)


@pytest.mark.parametrize(("start", "end"), [(0, 2), (-3, -1), (0, 3), (None, 2)])
def test_parts_of_shapes(start: int | None, end: int) -> None:
    attributes = {"end": end} if start is None else {"start": start, "end": end}
    proto = reshaping(2, **attributes)
    assert_same(run(proto, FEEDS), run(local(proto), FEEDS))


def test_shapes_of_inputs_are_asked_of_them() -> None:
    proto = reshaping(3)
    proto.graph.node[1].input[0] = "x"
    source = local(proto)
    assert not any(n.op_type == "Slice" for n in source.graph)
    assert_same(run(proto, FEEDS), run(source, FEEDS))
    assert sum(n.op_type == "Shape" for n in source.graph) == 3  # one for each Reshape, and for the output


@settings(max_examples=30)
@given(proto=strategies.models())
def test_graphs_without_shapes_stay_as_they_are(proto: onnx.ModelProto) -> None:
    source = from_proto(proto)
    normalise(source)
    before = [n.op_type for n in source.graph]
    localise(source)
    assert [n.op_type for n in source.graph] == before
    assert_same(run(proto, strategies.feeds()), run(source, strategies.feeds()))
