"""A narrowed graph computes, bit for bit, what the graph computes over the rounded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn
from onnx import ModelProto, numpy_helper, parser

from tests import real_models
from tests.chains import uncut
from tests.graph import strategies
from tests.graph.execution import Array, assert_same, cut, from_proto, run, run_chain
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.dataflow import Dataflow
from trt_layering.graph.model import normalise, open_model
from trt_layering.graph.narrow import KINDS, NarrowTensor, candidates, fits, narrow, narrow_names, widen

NUMPYS = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
BOTH = pytest.mark.parametrize("kind", KINDS)


def normal(proto: ModelProto) -> ir.Model:
    model = from_proto(proto)
    normalise(model)
    return model


def with_weights(text: str, **weights: Array) -> ir.Model:
    """A graph of opset 17 with these initializers."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return ir.from_proto(proto)


def over_rounded_weights(model: ir.Model, names: list[str], kind: str) -> ir.Model:
    """The same graph, its weights rounded and still float32."""
    copy = model.clone()
    for name in names:
        value = copy.graph.initializers[name]
        assert value.const_value is not None
        rounded = value.const_value.numpy().astype(NUMPYS[kind]).astype(np.float32)
        value.const_value = ir.Tensor(rounded, name=name)
    return copy


def narrowed(model: ir.Model, names: list[str], kind: str) -> ir.Model:
    copy = model.clone()
    narrow(copy, names, KINDS[kind])
    return copy


@settings(max_examples=60)
@given(proto=strategies.models(), kind=st.sampled_from(sorted(KINDS)))
def test_generated_models(proto: ModelProto, kind: str) -> None:
    model = normal(proto)
    names = candidates(model.graph, 1)
    wanted = run(over_rounded_weights(model, names, kind), strategies.feeds())
    narrow_model = narrowed(model, names, kind)
    assert set(narrow_names(narrow_model)) == set(names)
    assert_same(wanted, run(narrow_model, strategies.feeds()))
    blocks = cut(narrow_model, [seam.position for seam in find_cuts(narrow_model.graph)])
    assert_same(wanted, run_chain(blocks, strategies.feeds()))


@settings(max_examples=40)
@given(proto=strategies.models(), chosen=st.randoms(use_true_random=False), kind=st.sampled_from(sorted(KINDS)))
def test_what_is_widened_again_is_as_before(proto: ModelProto, chosen: Any, kind: str) -> None:
    model = normal(proto)
    names = candidates(model.graph, 1)
    back = [name for name in names if chosen.random() < 0.5]
    wanted = run(over_rounded_weights(model, [name for name in names if name not in back], kind), strategies.feeds())
    again = narrowed(model, names, kind)
    widen(again, back)
    assert_same(wanted, run(again, strategies.feeds()))


@settings(max_examples=30)
@given(proto=strategies.models())
def test_narrowing_makes_decoders_that_stand_before_all_else(proto: ModelProto) -> None:
    model = normal(proto)
    copy = narrowed(model, candidates(model.graph, 1), "fp16")
    added = len(copy.graph) - len(model.graph)
    flow = Dataflow(copy.graph)
    assert all(flow.nodes[index].op_type == "Cast" and flow.decodes[index] for index in range(added))
    assert [node.op_type for node in flow.nodes[added:]] == [node.op_type for node in model.graph]


GATHERED = """g (int64[n] ids, float[n, 4] x) => (float[n, 4] rows, float[n, 4] y, float[9, n] z) {
    rows = Gather(table, ids)
    more = Gather <axis = 0> (table, ids)
    y = Add(more, x)
    turned = Transpose(x)
    z = MatMul(table, turned)
}"""


@BOTH
def test_rows_are_widened_not_their_table(kind: str) -> None:
    model = with_weights(GATHERED, table=np.random.default_rng(0).standard_normal((9, 4), np.float32))
    normalise(model)
    feeds = {"ids": np.array([0, 8, 3]), "x": np.ones((3, 4), np.float32)}
    wanted = run(over_rounded_weights(model, ["table"], kind), feeds)
    copy = narrowed(model, ["table"], kind)
    assert_same(wanted, run(copy, feeds))
    read = {(node.op_type, index) for node, index in copy.graph.initializers["table"].uses()}
    assert read == {("Gather", 0), ("Cast", 0)}
    assert [value.name for value in copy.graph.outputs] == ["rows", "y", "z"]
    assert sum(node.op_type == "Cast" for node in copy.graph) == 3
    widen(copy, ["table"])
    assert_same(run(model, feeds), run(copy, feeds))


def test_what_cannot_be_narrow_is_no_candidate() -> None:
    """Too small, another dtype, an output, an input, a table that is fused with what reads it."""
    model = with_weights(
        """g (float[n, 4] x, float[4] given, int32[n, 2] ids) => (float[n, 4] y, float[4] out, float[n, 2, 4] e) {
            a = MatMul(x, large)
            b = Add(a, small)
            c = Cast <to = 1> (wide)
            d = MatMul(b, c)
            y = Add(d, given)
            e, m = com.microsoft.EmbedLayerNormalization(ids, , table, table, , ones, zeros)
        }""",
        large=np.ones((4, 4), np.float32),
        wide=np.ones((4, 4)),
        table=np.ones((9, 4), np.float32),
        **{name: np.ones(4, np.float32) for name in ("small", "given", "out", "ones", "zeros")},
    )
    assert candidates(model.graph, 64) == ["large"]
    assert candidates(model.graph, 1) == ["large", "small"]


def test_no_weight_is_read_before_somebody_asks() -> None:
    def never() -> ir.TensorProtocol:
        raise AssertionError

    model = with_weights("g (float[n, 4] x) => (float[n, 4] y) { y = MatMul(x, w) }", w=np.ones((4, 4), np.float32))
    weight = model.graph.initializers["w"]
    weight.const_value = ir.LazyTensor(never, ir.DataType.FLOAT, ir.Shape([4, 4]), name="w")
    narrow(model, candidates(model.graph, 1), ir.DataType.FLOAT16)
    tensor = weight.const_value
    assert isinstance(tensor, NarrowTensor)
    assert (tensor.dtype, tensor.nbytes, tensor.shape) == (ir.DataType.FLOAT16, 32, [4, 4])
    with pytest.raises(AssertionError):
        tensor.numpy()


@BOTH
@given(data=st.data())
def test_what_fits_is_rounded_within_the_digits(kind: str, data: st.DataObject) -> None:
    numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
    array = data.draw(drawn.arrays(np.float32, st.integers(1, 20), elements=numbers))
    if not fits(ir.Tensor(array), KINDS[kind]):
        return
    finite = np.isfinite(array)
    rounded = NarrowTensor(ir.Tensor(array), KINDS[kind]).numpy().astype(np.float32)
    np.testing.assert_array_equal(array[~finite], rounded[~finite])
    exact, got = array[finite].astype(np.float64), rounded[finite].astype(np.float64)
    unit = {"fp16": 2.0**-11, "bf16": 2.0**-8}[kind]
    assert np.linalg.norm(got - exact) <= unit * np.linalg.norm(exact) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("number", "fp16", "bf16"),
    [(1.0, True, True), (65504.0, True, True), (65520.0, False, True), (-1e38, False, True), (3.4e38, False, False),
     (6.1e-5, True, True), (1e-7, False, True), (1e-40, False, False), (0.0, True, True), (np.inf, True, True)],
)  # fmt: skip
def test_what_the_range_holds(number: float, fp16: bool, bf16: bool) -> None:
    tensor = ir.Tensor(np.full((3, 5), number, np.float32))
    assert (fits(tensor, ir.DataType.FLOAT16), fits(tensor, ir.DataType.BFLOAT16)) == (fp16, bf16)


@pytest.mark.parametrize("name", ["minilm", "pp_rec"])
def test_real_models(name: str, real_model: Callable[[str], Path]) -> None:
    """Tables of one, convolutions and weights behind Identity of the other."""
    feeds = real_models.feeds(name)
    model = open_model(real_model(name))
    normalise(model)
    names = [n for n in candidates(model.graph, 4096) if fits(_tensor(model, n), ir.DataType.FLOAT16)]
    assert len(names) > 10
    wanted: dict[str, Array] = uncut(ir.to_proto(over_rounded_weights(model, names, "fp16")), feeds)
    assert_same(wanted, uncut(ir.to_proto(narrowed(model, names, "fp16")), feeds))


def _tensor(model: ir.Model, name: str) -> ir.TensorProtocol:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor
