"""What computes in float16, what stays float32, and that both say what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, numpy_helper, parser

from tests import real_models
from tests.chains import assert_close
from tests.graph import strategies
from tests.graph.execution import Array, assert_same, cut, from_proto, run, run_chain
from trt_layering import backends
from trt_layering.assembly import Cutting, cut_windows
from trt_layering.backends.onnxruntime.runtime import run_plainly, uncut_options
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.backends.tensorrt.precision import Converted, in_fp16
from trt_layering.backends.tensorrt.prepare import prepare
from trt_layering.compare import relative
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.half import as_it_was, halve, is_half, name_nodes, outgrown, rounded
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.narrow import NarrowTensor

RNG = np.random.default_rng(0)
HALF, FLOAT = ir.DataType.FLOAT16, ir.DataType.FLOAT


def prepared(source: ModelProto | Path) -> ir.Model:
    model = open_model(source) if isinstance(source, Path) else from_proto(source)
    normalise(model)
    infer_shapes(model)
    return model


def text(graph: str, **weights: Array) -> ir.Model:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return prepared(proto)


def everywhere(windows: Sequence[ir.Model]) -> list[ir.Model]:
    """Cut at every seam."""
    return [block for window in windows for block in cut(window, [c.position for c in find_cuts(window.graph)])]


def whole(windows: Sequence[ir.Model]) -> list[ir.Model]:
    return [window.clone() for window in windows]


def converted(model: ir.Model, feeds: dict[str, Array], by: Any = whole, **options: Any) -> Converted:
    """`model` in float16, which ONNX's checker passes and which answers as `model` does, types included."""
    windows = [model]
    told: list[tuple[str, int, int]] = []
    names = [value.name or "" for value in model.graph.outputs]
    before = ir.to_proto(model).SerializeToString()
    found = in_fp16(windows, names, by, [feeds], lambda *step: told.append(step), **options)
    assert ir.to_proto(model).SerializeToString() == before
    assert told[-1][1] == told[-1][2] == len(found.costs) == len(by(found.windows))
    for window in found.windows:
        onnx.checker.check_model(ir.to_proto(window), full_check=True)
    wanted, got = run(model, feeds), run_chain(by(found.windows), feeds)
    assert_close(wanted, {name: got[name] for name in wanted}, 5e-2)
    assert found.max_rel_diff <= options.get("chain_tolerance", 5e-2)
    return found


def kept(found: Converted) -> dict[str, set[str]]:
    """Operators that stay float32, by reason."""
    pairs = [(node.reason, node.op_type) for cost in found.costs for node in cost.kept]
    return {reason: {kind for why, kind in pairs if why == reason} for reason, _ in pairs}


def dtypes(found: Converted) -> dict[str, ir.DataType | None]:
    return {name: value.dtype for window in found.windows for name, value in window.graph.initializers.items()}


def matrix(scale: float = 1.0, width: int = 16) -> Array:
    array: Array = RNG.standard_normal((width, width), np.float32) * np.float32(scale / width**0.5)
    return array


def feed(scale: float = 1.0, rows: int = 3) -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal((rows, 16), np.float32) * np.float32(scale)}


FINE = """g (float[n, 16] x) => (float[n, 16] y) {
    a = MatMul(x, w)
    b = Relu(a)
    c = MatMul(b, v)
    y = Softmax(c)
}"""


@pytest.mark.parametrize("by", [whole, everywhere])
def test_what_is_fine_is_all_float16(by: Any) -> None:
    found = converted(text(FINE, w=matrix(), v=matrix()), feed(), by)
    assert kept(found) == {}
    assert sum(cost.halved for cost in found.costs) == 4
    assert dtypes(found) == {"w": HALF, "v": HALF}
    assert sum(cost.saved_bytes for cost in found.costs) == 2 * 16 * 16 * 2
    assert [node.op_type for node in found.windows[0].graph] == ["Cast", "MatMul", "Relu", "MatMul", "Softmax", "Cast"]
    assert 0 < max(cost.max_rel_diff for cost in found.costs) <= 1e-2


def test_seams_are_float16_and_ends_are_not() -> None:
    found = converted(text(FINE, w=matrix(), v=matrix()), feed(), everywhere)
    blocks = everywhere(found.windows)
    assert len(blocks) > 2
    assert {value.dtype for block in blocks[:-1] for value in block.graph.outputs} == {HALF}
    assert (blocks[0].graph.inputs[0].dtype, blocks[-1].graph.outputs[0].dtype) == (FLOAT, FLOAT)


NORM = """g (float[n, 16] x) => (float[n, 16] y) {
    a = MatMul(x, w)
    mean = ReduceMean <axes = [-1]> (a)
    centred = Sub(a, mean)
    squares = Pow(centred, two)
    variance = ReduceMean <axes = [-1]> (squares)
    safe = Add(variance, eps)
    deviation = Sqrt(safe)
    even = Div(centred, deviation)
    y = MatMul(even, v)
}"""


def norm(eps: float = 2.0**-10) -> ir.Model:
    small = {"two": np.array(2, np.float32), "eps": np.array(eps, np.float32)}
    return text(NORM, w=matrix(), v=matrix(), **small)


@pytest.mark.parametrize("by", [whole, everywhere])
def test_a_norm_that_overflows_stays_float32_and_the_products_around_it_do_not(by: Any) -> None:
    """Squares of 1000 are beyond float16; `Cost.kept` says which nodes that is."""
    found = converted(norm(), feed(1000), by)
    assert {"Pow", "ReduceMean"} <= kept(found)["compared"]
    assert "MatMul" not in kept(found)["compared"]
    assert dtypes(found)["w"] == dtypes(found)["v"] == HALF
    products = [node for window in found.windows for node in window.graph if node.op_type == "MatMul"]
    assert [node.outputs[0].dtype for node in products] == [HALF, HALF]
    assert kept(converted(norm(), feed(1), by)) == {}


def test_no_cast_stands_between_two_nodes_that_stay_float32() -> None:
    """A value rounded there would be infinite whatever computed it."""
    found = converted(norm(), feed(1000))
    squares = next(node for node in found.windows[0].graph if node.op_type == "Pow").outputs[0]
    assert {node.op_type for node in squares.consumers()} == {"ReduceMean"}
    assert squares.dtype == FLOAT


def test_a_constant_that_float16_loses_keeps_who_reads_it() -> None:
    found = converted(norm(1e-12), feed(1))
    assert kept(found)["range"] == {"Add"}
    assert found.windows[0].graph.initializers["eps"].dtype == FLOAT


def test_softmax_over_large_logits() -> None:
    """Logits of 2e5 are infinite in float16: who makes and who reads them stays."""
    graph = """g (float[n, 16] x) => (float[n, 16] y) {
        a = MatMul(x, w)
        logits = Mul(a, scale)
        p = Softmax(logits)
        y = MatMul(p, v)
    }"""
    for by in (whole, everywhere):
        model = text(graph, w=np.eye(16, dtype=np.float32), v=matrix(), scale=np.array(5e4, np.float32))
        found = converted(model, {"x": np.round(feed(4)["x"])}, by)
        assert {"Mul", "Softmax"} <= kept(found)["compared"]
        nodes = list(found.windows[0].graph)
        [logits] = next(node for node in nodes if node.op_type == "Softmax").inputs
        assert logits is not None
        assert logits.dtype == FLOAT
        assert [node.outputs[0].dtype for node in nodes if node.op_type == "MatMul"][-1] == HALF


def test_what_cancels_is_traced_to_who_rounds_it() -> None:
    graph = """g (float[n, 16] x) => (float[n, 16] y) {
        a = Mul(x, x)
        b = Add(a, one)
        c = Transpose(b)
        d = Transpose(c)
        y = Sub(d, one)
    }"""
    found = converted(text(graph, one=np.array(1000, np.float32)), feed(0.5))
    assert {"Add", "Transpose", "Sub"} <= kept(found)["compared"]


def test_a_weight_out_of_range_stays_float32() -> None:
    weight = matrix()
    weight[0, 0] = 1e6
    found = converted(text(FINE, w=weight, v=matrix(1e-3)), feed(1e-3))
    assert dtypes(found) == {"w": FLOAT, "v": HALF}
    assert kept(found)["range"] == {"MatMul"}


def test_a_weight_that_both_kinds_read_is_there_twice() -> None:
    graph = """g (float[n, 16] x, int64[k] ids) => (float[n, 16] y, float[k, 16] z) {
        y = MatMul(x, w)
        z = If(on) <then_branch = t () => (float[k, 16] p) { p = Gather(w, ids) },
                    else_branch = e () => (float[k, 16] q) { r = Gather(w, ids) q = Neg(r) }>
    }""".replace("If(on) <", "If <").replace("}>\n", "}> (on)\n")
    model = text(graph, w=matrix(), on=np.array(True))
    found = converted(model, {**feed(), "ids": np.array([0, 5])})
    kinds = dtypes(found)
    assert kinds["w"] == FLOAT
    assert kinds["w_half"] == HALF


def test_control_flow_stays_float32_with_casts_around() -> None:
    graph = """g (float[n, 16] x, int64 m) => (float[n, 16] y) {
        a = MatMul(x, w)
        b = Relu(a)
        l = Loop <body = f (int64 i, bool c, float[n, 16] s) => (bool d, float[n, 16] t) {
            d = Identity(c)
            t = Add(s, a)
        }> (m, on, b)
        y = MatMul(l, v)
    }"""
    model = text(graph, w=matrix(), v=matrix(), on=np.array(True))
    found = converted(model, {**feed(), "m": np.array(3)})
    assert kept(found) == {"control flow": {"Loop"}}
    assert sum(cost.halved for cost in found.costs) == 3
    assert dtypes(found)["w"] == dtypes(found)["v"] == HALF


def test_quantized_nodes_are_left_to_integer_kernels() -> None:
    graph = """g (float[n, 16] x) => (float[n, 16] y) {
        levels = QuantizeLinear(x, scale, zero)
        a = DequantizeLinear(levels, scale, zero)
        b = DequantizeLinear(q, scale, zero)
        c = MatMul(a, b)
        d = DequantizeLinear(r, scale, zero)
        y = MatMul(c, d)
    }"""
    levels = {name: RNG.integers(-90, 90, (16, 16), np.int8) for name in "qr"}
    model = text(graph, scale=np.array(0.03, np.float32), zero=np.array(0, np.int8), **levels)
    found = converted(model, feed())
    assert kept(found) == {"quantized": {"QuantizeLinear", "DequantizeLinear", "MatMul"}}
    assert sum(cost.halved for cost in found.costs) == 1
    assert dtypes(found)["scale"] == FLOAT


def test_graphs_of_integers_are_untouched() -> None:
    graph = """g (int64[n, 16] x) => (int64[n, 16] y) {
        a = Add(x, w)
        s = Shape(a)
        y = Reshape(a, s)
    }"""
    model = text(graph, w=np.ones(16, np.int64))
    feeds = {"x": np.arange(32).reshape(2, 16)}
    found = converted(model, feeds)
    assert [node.op_type for node in found.windows[0].graph] == ["Add", "Shape", "Reshape"]
    assert [(cost.halved, cost.kept, cost.saved_bytes) for cost in found.costs] == [(0, (), 0)]


def test_sizes_of_resize_stay_float32() -> None:
    graph = """g (float[1, 2, 4, 4] x) => (float[1, 2, 8, 8] y) { y = Resize(x, , scales) }"""
    model = text(graph, scales=np.array([1, 1, 2, 2], np.float32))
    found = converted(model, {"x": RNG.standard_normal((1, 2, 4, 4)).astype(np.float32)})
    assert dtypes(found) == {"scales": FLOAT}
    assert sum(cost.halved for cost in found.costs) == 1


def test_a_mask_beyond_the_range_passes_seams_as_float32() -> None:
    graph = """g (float[n, 16] x, float[n, 16] given) => (float[n, 16] y) {
        mask = Mul(given, least)
        a = MatMul(x, w)
        b = Add(a, mask)
        p = Softmax(b)
        c = MatMul(p, v)
        d = Add(c, mask)
        y = Softmax(d)
    }"""
    model = text(graph, w=matrix(), v=matrix(), least=np.array(-3e38, np.float32))
    mask = np.zeros((3, 16), np.float32)
    mask[:, 9:] = 1
    found = converted(model, {**feed(), "given": mask}, everywhere)
    assert kept(found)["range"] == {"Mul"}
    seams = {value.name: value.dtype for block in everywhere(found.windows) for value in block.graph.outputs}
    assert seams["mask"] == FLOAT
    assert HALF in seams.values()


def test_windows_pass_float16_on_and_share_their_weights() -> None:
    model = text(FINE.replace("MatMul(b, v)", "MatMul(b, w)"), w=matrix())
    windows = cut(model, [2])
    found = in_fp16(windows, ["y"], whole, [feed()], lambda *_: None)
    assert [value.dtype for window in found.windows for value in (*window.graph.inputs, *window.graph.outputs)] == [
        FLOAT, HALF, HALF, FLOAT,
    ]  # fmt: skip
    assert [window.graph.initializers["w"].dtype for window in found.windows] == [HALF, HALF]
    assert_close(run(model, feed()), {"y": run_chain(found.windows, feed())["y"]}, 5e-2)


def test_an_output_that_others_read_keeps_its_type_and_name() -> None:
    graph = """g (float[n, 16] x) => (float[n, 16] a, float[n, 16] y) {
        a = MatMul(x, w)
        y = MatMul(a, v)
    }"""
    found = converted(text(graph, w=matrix(), v=matrix()), feed(), everywhere)
    assert [(value.name, value.dtype) for value in found.windows[0].graph.outputs] == [("a", FLOAT), ("y", FLOAT)]


def test_no_tolerance_keeps_everything() -> None:
    found = converted(text(FINE, w=matrix(), v=matrix()), feed(), everywhere, tolerance=0.0)
    assert set(dtypes(found).values()) == {FLOAT}
    assert found.max_rel_diff == 0
    assert all(node.reason == "compared" for cost in found.costs for node in cost.kept)


def test_the_chains_end_tightens_its_blocks() -> None:
    loose = converted(text(FINE, w=matrix(), v=matrix()), feed(), everywhere, tolerance=1.0)
    tight = converted(
        text(FINE, w=matrix(), v=matrix()), feed(), everywhere, tolerance=1.0, chain_tolerance=loose.max_rel_diff / 50
    )
    assert tight.max_rel_diff <= loose.max_rel_diff / 50


def test_what_is_random_ends_as_float32() -> None:
    model = text("""g (float[n, 16] x) => (float[n, 16] y) {
        a = RandomNormalLike(x)
        b = Add(a, x)
        y = Relu(b)
    }""")
    found = in_fp16([model], ["y"], whole, [feed()], lambda *_: None)
    assert sum(cost.halved for cost in found.costs) == 0


def test_indices_made_of_what_is_infinite_are_kept_and_end_nothing() -> None:
    graph = """g (float[n, 16] x) => (float[n, 16] y) {
        big = Mul(x, large)
        low = Div(big, large)
        lower = Clip(low, zero, zero)
        ids = Cast <to = 7> (lower)
        y = GatherElements(x, ids)
    }"""
    model = text(graph, large=np.array(60000, np.float32), zero=np.array(0, np.float32))
    found = converted(model, feed(10))
    assert sum(cost.halved for cost in found.costs) > 0


def test_weights_are_rounded_when_somebody_asks() -> None:
    model = text(FINE, w=matrix(), v=matrix())
    found = in_fp16([model], ["y"], whole, [feed()], lambda *_: None)
    for name, value in found.windows[0].graph.initializers.items():
        tensor = value.const_value
        assert isinstance(tensor, NarrowTensor)
        assert tensor.wide is model.graph.initializers[name].const_value
        np.testing.assert_array_equal(tensor.numpy(), tensor.wide.numpy().astype(np.float16))


def rounding_by_hand(exact: Array) -> Array:
    with np.errstate(over="ignore"):
        return exact.astype(np.float16).astype(np.float32)


def test_rounding_is_executed_where_onnx_runtime_would_leave_it_out() -> None:
    """Of two nodes without a float16 kernel, its CPU provider rounds nothing in between; a `rounded` graph does."""
    model = text("g (float[n, 16] x) => (float[n, 16] y) { a = Mul(x, x) y = Sqrt(a) }")
    name_nodes([model])
    copy = model.clone()
    halves = halve([copy], (), (), ["y"])
    x = np.full((1, 16), 300, np.float32)
    assert np.isfinite(run(copy, {"x": x})["y"]).all()
    assert np.isinf(run(rounded(copy, halves)[0], {"x": x})["y"]).all()
    y = run(rounded(copy, halves)[0], {"x": x / 7})["y"]
    x = rounding_by_hand(x / 7)
    np.testing.assert_array_equal(y, rounding_by_hand(np.sqrt(rounding_by_hand(x * x))))


@settings(max_examples=40)
@given(proto=strategies.models(), random=st.randoms(use_true_random=False))
def test_generated_models_are_valid_and_give_back_what_they_were(proto: ModelProto, random: Any) -> None:
    """Whatever is kept: types agree, float32 comes back bit for bit, and so it does if nothing is to be rounded."""
    model = prepared(proto)
    name_nodes([model])
    full = {node.name or "" for node in model.graph if random.random() < 0.4}
    outputs = [value.name or "" for value in model.graph.outputs]
    half = model.clone()
    halves = halve([half], full, outgrown([model]), outputs)
    onnx.checker.check_model(ir.to_proto(half), full_check=True)
    assert not any(is_half(node, halves) for node in half.graph if node.name in full)
    assert [(v.name, v.dtype) for v in half.graph.outputs] == [(v.name, v.dtype) for v in model.graph.outputs]
    wanted = run(model, strategies.feeds())
    assert_same(wanted, run(as_it_was(half, halves), strategies.feeds()))
    nothing = {value.name or "" for node in half.graph for value in node.outputs}
    every = {node.name or "" for node in half.graph}
    assert_same(wanted, run(rounded(half, halves, every, nothing)[0], strategies.feeds()))
    assert list(run(half, strategies.feeds())) == outputs


@settings(max_examples=12)
@given(proto=strategies.models(), scale=st.sampled_from([1e-3, 1.0, 1e3, 1e6]))
def test_generated_models_convert_within_tolerance(proto: ModelProto, scale: float) -> None:
    model = prepared(proto)
    feeds = {name: (array * scale).astype(array.dtype) for name, array in strategies.feeds().items()}
    names = [value.name or "" for value in model.graph.outputs]
    found = in_fp16([model], names, everywhere, [feeds], lambda *_: None)
    assert all(cost.max_rel_diff <= 1e-2 for cost in found.costs)
    assert found.max_rel_diff <= 5e-2
    onnx.checker.check_model(ir.to_proto(found.windows[0]), full_check=True)


@pytest.mark.parametrize(("name", "most"), [("minilm", 6), ("pp_cls", 0), ("common_det", 0), ("pp_rec", 20)])
def test_real_models(name: str, most: int, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As TensorRT gets them: `most` nodes stay float32, and weights take half."""
    model = prepared(real_model(name))
    feeds = real_models.feeds(name)
    wanted, names = run(model, feeds), [value.name or "" for value in model.graph.outputs]
    windows = prepare(model, tmp_path, 1 << 30, lambda *_: None)
    builder, cutting = backends.builder("onnxruntime"), Cutting(2 << 20, {})

    def blocks(drafts: Sequence[ir.Model]) -> list[ir.Model]:
        return [block.graph for block in cut_windows(builder, drafts, cutting)]

    found = in_fp16(windows, names, blocks, [feeds], lambda *_: None)
    assert sum(len(cost.kept) for cost in found.costs) <= most
    assert all(cost.max_rel_diff <= 1e-2 for cost in found.costs)
    tensors = [value.const_value for window in windows for value in window.graph.initializers.values()]
    floats = sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.dtype == FLOAT)
    assert sum(cost.saved_bytes for cost in found.costs) >= 0.49 * floats
    live: dict[str, Array] = dict(feeds)
    for block in blocks(found.windows):
        session = open_session(block, uncut_options(optimised=False))
        inputs, outputs = ([value.name or "" for value in ends] for ends in (block.graph.inputs, block.graph.outputs))
        live.update(run_plainly(session, outputs, {key: live[key] for key in inputs}))
    assert max(relative(array, live[key]) for key, array in wanted.items()) <= 5e-2
