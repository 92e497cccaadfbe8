"""A split weight gives the whole's results, in pieces no larger than asked for, and is read only when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.graph import strategies
from tests.graph.execution import Array, assert_same, cut, from_proto, run, run_chain
from trt_layering.graph.cuts import choose_cuts, find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.split import Split, split_large


def of_node(op: str, x: Array, weights: Mapping[str, Array], *inputs: str, **attributes: Any) -> ir.Model:
    """A model of one node that reads "x" and the weights, ready to be split."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    result = TensorProto.INT32 if op.endswith("Integer") else TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), ["y:0"], name="node", **attributes)],
        "one",
        [helper.make_tensor_value_info("x", kind, ["N", *x.shape[1:]])],
        [helper.make_tensor_value_info("y:0", result, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    normalise(model)
    infer_shapes(model)
    return model


def assert_close(expected: Mapping[str, Array], got: Mapping[str, Array]) -> None:
    for name, array in expected.items():
        assert array.shape == got[name].shape
        assert np.abs(array - got[name]).max(initial=0) <= 1e-6 * np.abs(array).max(initial=0), name


def floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def integers(kind: type[np.integer[Any]], *shape: int) -> Array:
    return np.random.default_rng(sum(shape)).integers(0, 100, shape).astype(kind)


X = floats(5, 32)
IMAGE = floats(2, 8, 9, 9)
WORDS = integers(np.int64, 2, 7)
BYTES = integers(np.uint8, 1, 8, 9, 9)
W = floats(32, 100)
# Operator, x, weights, inputs, attributes.
Case = tuple[str, Array, dict[str, Array], str, dict[str, Any]]
NODES: dict[str, Case] = {
    "MatMul": ("MatMul", floats(3, 5, 32), {"w": W}, "xw", {}),
    "MatMul of a vector": ("MatMul", floats(32), {"w": W}, "xw", {}),
    "MatMul by a batch": ("MatMul", floats(3, 5, 32), {"w": floats(3, 32, 40)}, "xw", {}),
    "Gemm": ("Gemm", X, {"w": W, "c": floats(100)}, "xwc", {"alpha": 0.5}),
    "Gemm, transposed": ("Gemm", X, {"w": floats(100, 32), "c": floats(1, 100)}, "xwc", {"transB": 1, "beta": 2.0}),
    "Gemm with one bias for all": ("Gemm", X, {"w": W, "c": floats(5, 1)}, "xwc", {}),
    "Gemm with a scalar": ("Gemm", X, {"w": W, "c": np.array(3, np.float32)}, "xwc", {}),
    "Gemm, x transposed": ("Gemm", floats(32, 5), {"w": W, "c": floats(5, 100)}, "xwc", {"transA": 1}),
    "Gemm without bias": ("Gemm", X, {"w": W}, "xw", {}),
    "Conv": ("Conv", IMAGE, {"w": floats(40, 8, 3, 3), "b": floats(40)}, "xwb", {"strides": [2, 2]}),
    "Conv without bias": ("Conv", IMAGE, {"w": floats(37, 8, 3, 3)}, "xw", {"auto_pad": "SAME_UPPER"}),
    "ConvTranspose": ("ConvTranspose", IMAGE, {"w": floats(8, 40, 3, 3), "b": floats(40)}, "xwb", {}),
    "Gather": ("Gather", WORDS, {"w": floats(100, 50)}, "wx", {}),
    "Gather along the middle": ("Gather", WORDS, {"w": floats(1, 100, 50)}, "wx", {"axis": -2}),
    "MatMulInteger": (
        "MatMulInteger",
        integers(np.uint8, 3, 32),
        {"w": integers(np.int8, 32, 300), "a": integers(np.uint8), "b": integers(np.int8, 300)},
        "xwab",
        {},
    ),
    "ConvInteger": ("ConvInteger", BYTES, {"w": integers(np.uint8, 40, 8, 3, 3)}, "xw", {}),
}


@pytest.mark.parametrize("limit", [400, 2000, 2048])
@pytest.mark.parametrize("case", NODES)
def test_every_kind_of_node(case: str, limit: int) -> None:
    op, x, arrays, inputs, attributes = NODES[case]
    model = of_node(op, x, arrays, *inputs, **attributes)
    original = model.graph.initializers["w"].const_value
    assert original is not None
    expected = run(model, {"x": x})
    done = split_large(model, limit)
    weights = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    assert [split.tensor for split in done if split.pieces > 1] == ["w"]
    assert "w" not in model.graph.initializers
    assert done[0].pieces >= original.nbytes / limit
    assert done[0].pieces == len([n for n in model.graph if n.op_type != "Concat"])
    assert max(w.nbytes for w in weights) <= limit
    assert sum(w.nbytes for w in weights if (w.name or "").startswith("w")) == original.nbytes
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)  # the shapes written onto the pieces are those inferred
    got = run(model, {"x": x})
    if case.startswith(("Gather", "MatMulInteger", "ConvInteger")):
        assert_same(expected, got)
    else:
        assert_close(expected, got)


def test_pieces_are_even_and_in_sixteens() -> None:
    model = of_node("MatMul", floats(1, 4), {"w": floats(4, 1000)}, "x", "w")
    split_large(model, 4 * 4 * 400)
    assert [value.shape[1] for value in model.graph.initializers.values() if value.shape] == [336, 336, 328]


KEPT: dict[str, tuple[Case, str]] = {
    "groups": (("Conv", IMAGE, {"w": floats(40, 4, 3, 3)}, "xw", {"group": 2}), "Conv has groups"),
    "first factor": (("MatMul", floats(32, 5), {"w": floats(100, 32)}, "wx", {}), "MatMul reads it as input 0"),
    "vector": (("MatMul", floats(2, 1000), {"w": floats(1000)}, "xw", {}), "it is a vector"),
    "other operator": (("Add", floats(2, 1000), {"w": floats(1000)}, "xw", {}), "Add reads it as input 1"),
    "gathered columns": (("Gather", WORDS, {"w": floats(9, 101)}, "wx", {"axis": 1}), "gathered along its columns"),
    "computed bias": (("Gemm", floats(99, 99), {"w": floats(99, 99)}, "xwx", {}), "input 2 of Gemm is computed"),
    "long columns": (("MatMul", floats(2, 1000), {"w": floats(1000, 2)}, "xw", {}), "column alone has 4000 bytes"),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_cannot_be_split_is_left_and_said(case: str) -> None:
    (op, x, arrays, inputs, attributes), reason = KEPT[case]
    model = of_node(op, x, arrays, *inputs, **attributes)
    before = ir.to_proto(model)
    (split,) = split_large(model, 2000)
    assert (split.tensor, split.pieces) == ("w", 1)
    assert reason in split.reason
    assert ir.to_proto(model) == before


def test_a_tied_weight_is_left() -> None:
    model = from_proto("""<ir_version: 8, opset_import: ["" : 17]>
    tied (float[N, 4] x) => (float[N, 4] z)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}> { a = MatMul(x, w) z = MatMul(a, w) }""")
    assert split_large(model, 32) == [Split("w", 1, "2 nodes read it")]
    assert split_large(model, 64) == []


def test_names_of_pieces_clash_with_none() -> None:
    model = from_proto("""<ir_version: 8, opset_import: ["" : 17]>
    clashing (float[N, 4] x) => (float[N, 4] z, float[N, 4] y_0)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}, float[4] w_0 = {1, 2, 3, 4}> {
        y_0 = Add(x, w_0)
        z = MatMul(y_0, w)
    }""")
    expected = run(model, {"x": floats(3, 4)})
    split_large(model, 32)
    assert_close(expected, run(model, {"x": floats(3, 4)}))


def test_pieces_are_sliced_from_the_file_when_read(tmp_path: Path) -> None:
    model = of_node("MatMul", floats(1, 64), {"w": floats(64, 100)}, "x", "w")
    ir.save(model, tmp_path / "model.onnx", external_data="weights.bin")
    opened = open_model(tmp_path / "model.onnx")
    split_large(opened, 64 * 4 * 50)
    pieces = [value.const_value for value in opened.graph.initializers.values()]
    # Whoever reads later sees what is in the file then: nothing has been kept.
    (tmp_path / "weights.bin").write_bytes(np.arange(6400, dtype=np.float32).tobytes())
    whole = np.arange(6400, dtype=np.float32).reshape(64, 100)
    np.testing.assert_array_equal(np.concatenate([piece.numpy() for piece in pieces if piece], axis=1), whole)
    for piece in pieces:
        assert piece is not None
        assert piece.numpy().flags.c_contiguous
        with (tmp_path / "piece").open("wb") as file:
            piece.tofile(file)
        assert (tmp_path / "piece").read_bytes() == piece.numpy().tobytes() == piece.tobytes()


def test_nibbles_are_split_too() -> None:
    tensor = helper.make_tensor("w", TensorProto.INT4, [8, 64], bytes(range(256)), raw=True)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "nibbles",
        [helper.make_tensor_value_info("x", TensorProto.INT4, ["N", 8])],
        [helper.make_tensor_value_info("y", TensorProto.INT4, ["N", 64])],
        [tensor],
    )
    model = from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    split_large(model, 64)
    pieces = [value.const_value for value in model.graph.initializers.values() if value.const_value]
    assert [piece.nbytes for piece in pieces] == [64] * 4
    assert [len(piece.tobytes()) for piece in pieces] == [64] * 4
    whole = np.concatenate([piece.numpy() for piece in pieces], axis=1)
    np.testing.assert_array_equal(whole, ir.from_proto(tensor).numpy())


@settings(max_examples=40)
@given(proto=strategies.models(strategies.SMOOTH), limit=st.sampled_from([32, 64, 128]))
def test_generated_models_split_and_cut_stay_the_same(proto: onnx.ModelProto, limit: int) -> None:
    feeds = strategies.feeds()
    model = from_proto(proto)
    normalise(model)
    infer_shapes(model)
    split_large(model, limit)
    sizes = {name: v.const_value.nbytes for name, v in model.graph.initializers.items() if v.const_value}
    chosen = choose_cuts(model.graph, find_cuts(model.graph), limit, sizes)
    expected, got = run(proto, feeds), run_chain(cut(model, chosen), feeds)
    for name, array in expected.items():
        assert np.abs(array - got[name]).max() <= 1e-4 * max(1, np.abs(array).max()), name


@pytest.mark.parametrize("name", ["common", "minilm", "common_old"])
def test_real_models_are_split_and_cut_within_a_megabyte(name: str, real_model: Callable[[str], Path]) -> None:
    path, feeds = real_model(name), real_models.feeds(name)
    model = open_model(path)
    normalise(model)
    infer_shapes(model)
    left = {split.tensor for split in split_large(model, 1 << 20) if split.pieces == 1}
    sizes = {key: v.const_value.nbytes for key, v in model.graph.initializers.items() if v.const_value}
    assert {key for key, size in sizes.items() if size > 1 << 20} == left
    blocks = cut(model, choose_cuts(model.graph, find_cuts(model.graph), 1 << 20, sizes))
    for block in blocks:
        needed = [key for key in block.graph.initializers if sizes[key]]
        assert sum(sizes[key] for key in needed) <= 1 << 20 or left.intersection(needed)
    assert_close(run(path, feeds), run_chain(blocks, feeds))
