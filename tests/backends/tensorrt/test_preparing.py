"""What TensorRT's blocks are cut from: plain operators, the same answers, and weights that may be streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.chains import Feeds, assert_close, model, uncut
from tests.graph.execution import from_proto
from trt_layering.backends.onnxruntime.runtime import uncut_options
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.backends.tensorrt.prepare import prepare
from trt_layering.backends.tensorrt.streamable import streamable
from trt_layering.errors import ModelError
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.shape_tensors import shape_inputs, shape_values, uncrossed

FLOAT, HALF, INT = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
info = helper.make_tensor_value_info
node = helper.make_node


def weight(name: str, *shape: int, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(len(name) + sum(shape))
    return numpy_helper.from_array((1 + 0.1 * rng.standard_normal(shape)).astype(dtype), name)


def windows(source: ir.Model, work: Path, memory: int = 1 << 30) -> list[ir.Model]:
    normalise(source)
    infer_shapes(source)
    return prepare(source, work, memory, lambda *_: None)


def answers(parts: list[ir.Model], feeds: Feeds) -> Feeds:
    live = dict(feeds)
    for part in parts:
        session = open_session(part, uncut_options(optimised=False))
        names = [output.name for output in session.get_outputs()]
        live.update(zip(names, session.run(names, {i.name: live[i.name] for i in session.get_inputs()}), strict=True))
    return live


def domains(parts: list[ir.Model]) -> set[str]:
    return {n.domain for part in parts for n in part.graph.all_nodes()}.union(*(p.graph.opset_imports for p in parts))


# --------------------------------------------------------------------------------------------------------- preparing


@pytest.mark.parametrize("memory", [1 << 30, 1 << 24])
@pytest.mark.parametrize("name", ["common", "common_det", "pp_rec", "pp_det", "pp_cls", "minilm"])
def test_real_models_answer_as_before(
    name: str, memory: int, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    parts = windows(open_model(real_model(name)), tmp_path, memory)
    assert (len(parts) > 1) == (memory < 1 << 30 and name in ("common_det", "pp_rec", "pp_det"))
    assert domains(parts) == {""}
    assert not any(n.op_type == "BatchNormalization" for part in parts for n in part.graph)
    assert all(value.dtype is not None for part in parts for n in part.graph for value in n.outputs)
    expected = uncut(real_model(name), real_models.feeds(name))
    got = answers(parts, real_models.feeds(name))
    assert_close(expected, {key: got[key] for key in expected})


@pytest.mark.parametrize("name", ["common", "common_det", "pp_rec", "pp_det", "pp_cls", "minilm"])
def test_nearly_all_of_real_models_may_be_streamed(
    name: str, real_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (window,) = windows(open_model(real_model(name)), tmp_path)
    tensors = {key: value.const_value for key, value in window.graph.initializers.items() if value.const_value}
    sizes = streamable(window.graph)
    assert sizes == {key: tensors[key].nbytes for key in sizes}
    assert sum(sizes.values()) > 0.999 * sum(tensor.nbytes for tensor in tensors.values())


def test_what_tensorrt_cannot_have_is_refused_by_name(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"ConvInteger \(21\).*DynamicQuantizeLSTM") as caught:
        windows(open_model(real_model("common_old")), tmp_path)
    assert "QuantizeLinear" in caught.value.remedy


def test_an_operator_inside_a_loop_is_found_too(tmp_path: Path) -> None:
    body = helper.make_graph(
        [node("Identity", ["go"], ["goes"]), node("BitwiseNot", ["carried"], ["next"])],
        "body",
        [info("i", INT, []), info("go", TensorProto.BOOL, []), info("carried", INT, [2])],
        [info("goes", TensorProto.BOOL, []), info("next", INT, [2])],
    )
    trips = numpy_helper.from_array(np.array(2), "trips")
    loop = node("Loop", ["trips", "", "x"], ["y"], body=body)
    proto = model([loop], [info("x", INT, [2])], [info("y", INT, [2])], [trips])
    proto.opset_import[0].version = 18
    with pytest.raises(ModelError, match="BitwiseNot"):
        windows(from_proto(proto), tmp_path)


@pytest.mark.parametrize("kind", [TensorProto.DOUBLE, TensorProto.STRING, TensorProto.UINT16])
def test_tensors_that_tensorrt_does_not_have_are_refused(tmp_path: Path, kind: int) -> None:
    proto = model([node("Identity", ["x"], ["y"])], [info("x", kind, [2])], [info("y", kind, [2])])
    with pytest.raises(ModelError, match=f"no tensors of {TensorProto.DataType.Name(kind).lower()}") as caught:
        windows(from_proto(proto), tmp_path)
    assert caught.value.where == "'x'"


def test_more_dimensions_than_tensorrt_has_are_refused(tmp_path: Path) -> None:
    shape = [1] * 8
    proto = model(
        [node("Add", ["x", "w"], ["y"])], [info("x", FLOAT, shape)], [info("y", FLOAT, None)], [weight("w", *shape)]
    )
    assert windows(from_proto(proto), tmp_path)
    proto.graph.initializer[0].CopyFrom(weight("w", 2, *shape))
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(ModelError, match="9 dimensions, only of up to 8") as caught:
        windows(from_proto(proto), again)
    assert caught.value.where == "'w'"


NORM = [weight("scale", 4), weight("bias", 4), weight("mean", 4), weight("var", 4)]


def test_a_norm_that_no_convolution_takes_becomes_mul_and_add(tmp_path: Path) -> None:
    proto = model(
        [
            node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["n"], name="norm", epsilon=0.01),
            node("Relu", ["n"], ["r"]),
            node("Conv", ["r", "w"], ["c"]),
            node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 4, "h", 5])],
        [info("n", FLOAT, ["n", 4, "h", 5]), info("y", FLOAT, ["n", 4, "h", 5])],
        [*NORM, weight("w", 4, 4, 1, 1)],
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4, 3, 5), np.float32)}
    parts = windows(from_proto(proto), tmp_path)
    assert [n.op_type for n in parts[0].graph] == ["Mul", "Add", "Relu", "Conv"]
    assert set(streamable(parts[0].graph)) == set(parts[0].graph.initializers)
    assert_close(uncut(proto, feeds), {key: answers(parts, feeds)[key] for key in ("n", "y")})


def test_a_model_in_sixteen_bits_stays_in_sixteen_bits(tmp_path: Path) -> None:
    halves = [numpy_helper.from_array(numpy_helper.to_array(w).astype(np.float16), w.name) for w in NORM]
    proto = model(
        [
            node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["n"]),
            node("MatMul", ["n", "m"], ["p"]),
            node("Softmax", ["p"], ["y"]),
        ],
        [info("x", HALF, ["n", 4, 3, 5])],
        [info("y", HALF, ["n", 4, 3, 5])],
        [*halves, weight("m", 5, 5, dtype=np.float16)],
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 4, 3, 5)).astype(np.float16)}
    (window,) = windows(from_proto(proto), tmp_path)
    assert [n.op_type for n in window.graph] == ["Mul", "Add", "MatMul", "Softmax"]
    assert all(value.dtype == ir.DataType.FLOAT16 for n in window.graph for value in n.outputs)
    assert set(streamable(window.graph)) == set(window.graph.initializers)
    assert_close(uncut(proto, feeds), {"y": answers([window], feeds)["y"]}, tolerance=2e-3)


def test_onnx_runtime_has_no_operators_of_its_own_at_this_level(tmp_path: Path) -> None:
    """A graph full of what its other levels fuse."""
    proto = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Add", ["a", "b"], ["c"]),
            node("Div", ["c", "root"], ["d"]),
            node("Erf", ["d"], ["e"]),
            node("Add", ["e", "one"], ["f"]),
            node("Mul", ["c", "f"], ["g"]),
            node("Mul", ["g", "half"], ["h"]),
            node("Add", ["h", "x"], ["i"]),
            node("ReduceMean", ["i"], ["mean"], axes=[-1]),
            node("Sub", ["i", "mean"], ["j"]),
            node("Pow", ["j", "two"], ["k"]),
            node("ReduceMean", ["k"], ["l"], axes=[-1]),
            node("Add", ["l", "tiny"], ["m"]),
            node("Sqrt", ["m"], ["n"]),
            node("Div", ["j", "n"], ["o"]),
            node("Mul", ["o", "b"], ["p"]),
            node("Add", ["p", "b"], ["q"]),
            node("Sigmoid", ["q"], ["s"]),
            node("Mul", ["q", "s"], ["t"]),
            node("Transpose", ["t"], ["u"], perm=[0, 2, 1]),
            node("MatMul", ["q", "u"], ["v"]),
            node("Softmax", ["v"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 3, 8])],
        [info("y", FLOAT, ["n", 3, 3])],
        [
            weight("w", 8, 8),
            weight("b", 8),
            *(
                numpy_helper.from_array(np.array(number, np.float32), name)
                for name, number in {"root": 2**0.5, "one": 1, "half": 0.5, "two": 2, "tiny": 1e-5}.items()
            ),
        ],
    )
    for opset in (13, 17):
        proto.opset_import[0].version = opset
        (tmp_path / str(opset)).mkdir()
        parts = windows(from_proto(proto), tmp_path / str(opset))
        assert domains(parts) == {""}
        feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 8), np.float32)}
        assert_close(uncut(proto, feeds), {"y": answers(parts, feeds)["y"]})
        assert any(n.op_type == "LayerNormalization" for n in parts[0].graph) == (opset == 17)


# -------------------------------------------------------------------------------------------------------- streamable


def sizes(*nodes: Any, weights: Any, outputs: Any = ("y",), inputs: Any = ()) -> dict[str, int]:
    given = inputs or [info("x", FLOAT, ["n", 4, 8, 8])]
    proto = model(list(nodes), given, [info(name, FLOAT, None) for name in outputs], weights)
    source = from_proto(proto)
    normalise(source)
    return streamable(source.graph)


def test_only_floats_of_more_than_one_element_are_streamed() -> None:
    weights = [weight("a", 4, 1, 1), weight("b", 1), numpy_helper.from_array(np.array(2.0, np.float32), "c")]
    nodes = [node("Mul", ["x", name], [f"y{name}"]) for name in "abc"]
    assert sizes(*nodes, weights=weights, outputs=["ya", "yb", "yc"]) == {"a": 16}


def test_one_use_that_wants_a_constant_keeps_a_weight_back(caplog: pytest.LogCaptureFixture) -> None:
    scales = weight("s", 4)
    plain = node("Mul", ["x", "s"], ["y"])
    resize = node("Resize", ["x", "", "s"], ["z"])
    assert sizes(plain, weights=[scales], inputs=[info("x", FLOAT, [4, 4, 4, 4])]) == {"s": 16}
    both = sizes(plain, resize, weights=[scales], outputs=["y", "z"], inputs=[info("x", FLOAT, [4, 4, 4, 4])])
    assert both == {}
    assert not caplog.records
    large = node("Clip", ["x", "", "w"], ["y"])
    assert sizes(large, weights=[weight("w", 200, 200)]) == {}
    assert "TensorRT wants a constant as input 2 of Clip" in caplog.text


def test_floats_that_a_shape_follows_from_stay() -> None:
    assert (
        sizes(
            node("Shape", ["x"], ["shape"]),
            node("Cast", ["shape"], ["floats"], to=FLOAT),
            node("Mul", ["floats", "f"], ["more"]),
            node("Cast", ["more"], ["sizes"], to=INT),
            node("Resize", ["x", "", "", "sizes"], ["y"]),
            weights=[weight("f", 4)],
        )
        == {}
    )


def test_a_weight_inside_a_branch_stays() -> None:
    branch = helper.make_graph([node("Mul", ["x", "w"], ["b"])], "branch", [], [info("b", FLOAT, None)])
    condition = numpy_helper.from_array(np.array(True), "yes")
    choice = node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    assert sizes(choice, weights=[weight("w", 8, 8), condition]) == {}


# ------------------------------------------------------------------------------------------------------ shape tensors


def test_no_seam_is_crossed_by_a_shape() -> None:
    proto = model(
        [
            node("Relu", ["x"], ["r"]),
            node("Shape", ["r"], ["shape"]),
            node("Tanh", ["r"], ["t"]),
            node("Gather", ["shape", "zero"], ["rows"]),
            node("Neg", ["t"], ["m"]),
            node("Concat", ["rows", "rest"], ["target"], axis=0),
            node("Reshape", ["m", "target"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 4, 2])],
        [info("y", FLOAT, ["n", 8])],
        [numpy_helper.from_array(np.array(value), name) for name, value in {"zero": [0], "rest": [8]}.items()],
    )
    source = from_proto(proto)
    normalise(source)
    infer_shapes(source)
    graph = source.graph
    assert {value.name for value in shape_values(graph)} == {"shape", "rows", "target", "zero", "rest"}
    assert [cut.position for cut in find_cuts(graph)] == [1, 2, 3, 4, 5, 6]
    assert [cut.position for cut in uncrossed(graph, find_cuts(graph))] == [1]
    assert shape_inputs(graph) == []


def test_an_input_that_says_a_shape_is_told() -> None:
    proto = model(
        [node("Reshape", ["x", "s"], ["y"])], [info("x", FLOAT, [4]), info("s", INT, [2])], [info("y", FLOAT, None)]
    )
    assert shape_inputs(from_proto(proto).graph) == ["s"]
