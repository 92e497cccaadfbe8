"""What inference finds is true, whatever the file declares; what it cannot find is unknown, and no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from onnx import helper, parser

from tests import real_models
from tests.graph import strategies
from tests.graph.execution import Array, from_proto, run
from trt_layering.graph.model import infer_shapes, normalise, open_model


def inferred(source: onnx.ModelProto | str) -> ir.Model:
    model = from_proto(source)
    normalise(model)
    infer_shapes(model)
    return model


def shapes(model: ir.Model) -> dict[str, list[int | str | None] | None]:
    values = [output for node in model.graph for output in node.outputs]
    return {value.name or "": None if value.shape is None else dims(value.shape) for value in values}


def dims(shape: ir.Shape) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def exposed(model: ir.Model) -> onnx.ModelProto:
    """The model with every tensor that it makes for an output."""
    proto = ir.to_proto(model)
    known = {output.name for output in proto.graph.output}
    for node in model.graph:
        for value in node.outputs:
            if value.name and value.name not in known and isinstance(value.type, ir.TensorType):
                proto.graph.output.add(name=value.name)
    return proto


def assert_true(model: ir.Model, feeds: Mapping[str, Array]) -> None:
    """Every type and shape on the model's values holds for what they are when it runs."""
    symbols: dict[str, int] = {}
    for value in model.graph.inputs:
        for dim, size in zip(value.shape or (), feeds[value.name or ""].shape, strict=True):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                symbols[dim.value] = size
    made = run(exposed(model), feeds)
    for value in (output for node in model.graph for output in node.outputs):
        if value.name not in made or value.shape is None:
            continue
        array = made[value.name]
        assert value.dtype is not None
        assert array.dtype == value.dtype.numpy(), value.name
        assert len(value.shape) == array.ndim, value.name
        for dim, size in zip(value.shape, array.shape, strict=True):
            expected = dim if isinstance(dim, int) else symbols.get(dim.value or "", size)
            assert size == expected, (value.name, value.shape)


@given(proto=strategies.models())
def test_generated_models_are_inferred_truly(proto: onnx.ModelProto) -> None:
    model = inferred(proto)
    assert all(v.type is not None for node in model.graph for v in node.outputs if v.name)
    assert_true(model, strategies.feeds(batch=3))


@pytest.mark.parametrize("name", real_models.REAL_MODELS)
def test_real_models_are_inferred_truly_and_wholly(name: str, real_model: Callable[[str], Path]) -> None:
    model = open_model(real_model(name))
    normalise(model)
    infer_shapes(model)
    for value in (output for node in model.graph for output in node.outputs if output.name):
        assert value.shape is not None, value.name  # ranks hidden by Reshape included
    assert_true(model, real_models.feeds(name))


WRONG = """<ir_version: 8, opset_import: ["" : 17]>
wrong (float[N, 4] x) => (float[N, 4, 1, 1] z) <float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
    a = MatMul(x, w)
    z = Relu(a)
}"""


def test_declared_shapes_that_are_wrong_are_mended() -> None:
    proto = parser.parse_model(WRONG)
    proto.graph.value_info.append(helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [7, 7, 7]))
    assert shapes(inferred(proto)) == {"a": ["N", 3], "z": ["N", 3]}


def test_a_declared_size_counts_only_where_no_input_is_dynamic() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    counting (float[SIZE] x) => (int64[1, 5] y) { y = NonZero(x) }"""
    assert shapes(inferred(text.replace("SIZE", "8"))) == {"y": [1, 5]}
    assert shapes(inferred(text.replace("SIZE", "N"))) == {"y": [1, None]}
    named = text.replace("int64[1, 5]", "int64[1, found]").replace("SIZE", "N")
    assert shapes(inferred(named)) == {"y": [1, "found"]}


def test_symbols_that_inference_makes_up_are_not_taken_for_those_of_the_file() -> None:
    model = inferred("""<ir_version: 8, opset_import: ["" : 17]>
    making (float[N] x) => (int64[1, A] y, float[B] z) <int64[1, unk__1] n, float[unk__0] r> {
        y = NonZero(x)
        n = NonZero(x)
        m = Shape(n)
        one = Constant <value = int64 {1}> ()
        k = Gather(m, one)
        zero = Constant <value = int64 {0}> ()
        step = Range(zero, k, one)
        r = Cast <to = 1> (step)
        z = Relu(r)
    }""")
    assert shapes(model)["n"] == [1, "unk__1"]
    assert shapes(model)["r"] == ["unk__0"]
    assert shapes(model)["z"] == ["B"]
    assert shapes(model)["y"] == [1, "A"]


def test_ranks_behind_a_computed_reshape_are_found() -> None:
    model = inferred("""<ir_version: 8, opset_import: ["" : 17]>
    reshaping (float[N, M] x, int64[3] s) => (float[A, B] z) {
        a = Reshape(x, s)
        b = Relu(a)
        t = Shape(b)
        two = Constant <value = int64[1] {2}> ()
        zero = Constant <value = int64[1] {0}> ()
        u = Slice(t, zero, two)
        minus = Constant <value = int64[1] {-1}> ()
        v = Concat <axis = 0> (u, minus)
        z = Reshape(b, v)
    }""")
    found = shapes(model)
    assert found["a"] == [None, None, None]
    assert found["b"] == [None, None, None]
    assert len(found["z"] or ()) == 3


def test_values_of_other_domains_keep_what_the_file_declares() -> None:
    model = inferred("""<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
    foreign (float[N, 4] x) => (float[N, 2] z) <float[N, 5] a> {
        a = own.Strange(x)
        b = Neg(a)
        c = own.Stranger(b)
        z = own.Strangest(c)
    }""")
    assert shapes(model) == {"a": ["N", 5], "b": ["N", 5], "c": None, "z": ["N", 2]}


@pytest.mark.parametrize("written", [{"dim_value": -1}, {"dim_param": "?"}, {"dim_param": ""}, {}])
def test_dims_that_say_nothing_are_unknown(written: dict[str, int | str], tmp_path: Path) -> None:
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    unknown (float[N, 4] x) => (float[N, 4] z) { z = Neg(x) }""")
    for info in (*proto.graph.input, *proto.graph.output):
        dim = onnx.TensorShapeProto.Dimension(**written)
        info.type.tensor_type.shape.dim[0].CopyFrom(dim)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    model = open_model(tmp_path / "model.onnx")
    infer_shapes(model)
    assert dims(model.graph.inputs[0].shape or ir.Shape([])) == [None, 4]
    assert shapes(model) == {"z": [None, 4]}


def test_where_inference_fails_the_model_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise onnx.shape_inference.InferenceError("no")

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    assert shapes(inferred(WRONG)) == {"a": None, "z": ["N", 4, 1, 1]}
