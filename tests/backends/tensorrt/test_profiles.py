"""What shapes pass between blocks: found, not asked for; and refused where they do not follow from the inputs'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.chains import layers, model
from tests.graph.execution import cut, from_proto, run
from trt_layering import child
from trt_layering.backends.tensorrt import profiles
from trt_layering.backends.tensorrt.prepare import prepare
from trt_layering.backends.tensorrt.profiles import arrays_file, ranges
from trt_layering.backends.values import as_value
from trt_layering.errors import BuildError, InputError
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.shape_tensors import uncrossed
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import Range

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
info = helper.make_tensor_value_info
node = helper.make_node


def found(
    proto: onnx.ModelProto, shapes: Mapping[str, ShapeRange], work: Path, positions: Sequence[int] | None = None
) -> dict[str, Range]:
    source = from_proto(proto)
    normalise(source)
    infer_shapes(source)
    legal = [seam.position for seam in find_cuts(source.graph)]
    blocks = cut(source, legal if positions is None else positions)
    return ranges(blocks, tuple(map(as_value, source.graph.inputs)), shapes, work, lambda *_: None).ranges


def test_ranges_follow_from_those_of_the_inputs(tmp_path: Path) -> None:
    proto = model(
        [
            node("Conv", ["x", "w"], ["c"], strides=[2, 2]),
            node("Relu", ["c"], ["r"]),
            node("GlobalAveragePool", ["r"], ["p"]),
            node("Mul", ["r", "p"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 3, "h", "w"])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.ones((5, 3, 3, 3), np.float32), "w")],
    )
    span = ShapeRange((1, 3, 9, 11), (2, 3, 21, 11), (4, 3, 33, 65))
    got = found(proto, {"x": span}, tmp_path)
    assert got == {
        "x": Range(min=span.min, opt=span.opt, max=span.max),
        **{key: Range(min=(1, 5, 4, 5), opt=(2, 5, 10, 5), max=(4, 5, 16, 32)) for key in ("c", "r", "y")},
        "p": Range(min=(1, 5, 1, 1), opt=(2, 5, 1, 1), max=(4, 5, 1, 1)),
    }
    alike = found(proto, {"x": ShapeRange(span.opt, span.opt, span.opt)}, tmp_path)
    assert alike["y"] == Range(min=(2, 5, 10, 5), opt=(2, 5, 10, 5), max=(2, 5, 10, 5))


def test_sizes_have_one_name_if_they_are_always_the_same(tmp_path: Path) -> None:
    """Though batch, height and width have the same range, and one input gives no names."""
    source = from_proto(
        model(
            [
                node("Concat", ["x", "z"], ["c"], axis=1),
                node("Transpose", ["c"], ["t"], perm=[0, 1, 3, 2]),
                node("MatMul", ["c", "t"], ["y"]),
            ],
            [info("x", FLOAT, ["n", 3, "h", "w"]), info("z", FLOAT, ["n", 1, "h", "w"])],
            [info("y", FLOAT, None)],
        )
    )
    normalise(source)
    infer_shapes(source)
    span = ShapeRange((1, 3, 1, 1), (2, 3, 2, 2), (4, 3, 4, 4))
    other = ShapeRange(*((shape[0], 1, *shape[2:]) for shape in (span.min, span.opt, span.max)))
    blocks = cut(source, [1, 2])
    known = tuple(map(as_value, source.graph.inputs))
    dims = ranges(blocks, known, {"x": span, "z": other}, tmp_path, lambda *_: None).dims
    n, _, h, w = dims["x"]
    assert len({n, h, w}) == 3
    assert dims == {"x": (n, 3, h, w), "z": (n, 1, h, w), "c": (n, 4, h, w), "t": (n, 4, w, h), "y": (n, 4, h, h)}


def test_a_size_that_shrinks_as_another_grows(tmp_path: Path) -> None:
    """Padding up to a fixed length: the least size comes of the largest input."""
    proto = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Sub", ["full", "s"], ["rest"]),
            node("ConstantOfShape", ["rest"], ["y"]),
        ],
        [info("x", FLOAT, ["n"])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.array([9]), "full")],
    )
    got = found(proto, {"x": ShapeRange((2,), (4,), (8,))}, tmp_path, [])
    assert got["y"] == Range(min=(1,), opt=(5,), max=(7,))


def test_a_size_that_depends_on_values_is_refused_by_name(tmp_path: Path) -> None:
    proto = model(
        [
            node("Greater", ["x", "zero"], ["g"]),
            node("NonZero", ["g"], ["where"]),
            node("Cast", ["where"], ["y"], to=1),
        ],
        [info("x", FLOAT, [40])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.array(0, np.float32), "zero")],
    )
    with pytest.raises(BuildError, match="the size of 'where' depends on the values") as caught:
        found(proto, {}, tmp_path)
    assert "onnxruntime" in caught.value.remedy


def test_a_shape_that_comes_from_elsewhere_is_refused(tmp_path: Path) -> None:
    proto = model(
        [
            node("Relu", ["x"], ["r"]),
            node("Shape", ["r"], ["s"]),
            node("Neg", ["r"], ["n"]),
            node("Reshape", ["n", "s"], ["y"]),
        ],
        [info("x", FLOAT, [4])],
        [info("y", FLOAT, None)],
    )
    with pytest.raises(BuildError, match="'s' on the host") as caught:
        found(proto, {}, tmp_path, [2])
    assert caught.value.where == "block 1"
    assert found(proto, {}, tmp_path, [1])["y"].max == (4,)


def test_shapes_that_the_model_does_not_take(tmp_path: Path) -> None:
    proto = layers(2)
    with pytest.raises(InputError, match="x"):
        found(proto, {"x": ShapeRange((1, 5), (1, 5), (1, 5))}, tmp_path)
    narrow = model(
        [node("Conv", ["x", "w"], ["y"])],
        [info("x", FLOAT, ["n", 1, "h", 3])],
        [info("y", FLOAT, None)],
        [numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w")],
    )
    span = ShapeRange((1, 1, 1, 3), (1, 1, 5, 3), (1, 1, 5, 3))
    with pytest.raises(BuildError, match="its min shapes") as caught:
        found(narrow, {"x": span}, tmp_path)
    assert "--shape" in caught.value.remedy


def test_one_block_at_a_time_is_open_and_dead_arrays_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = profiles._execute
    lives: list[set[str]] = []

    def watched(block: ir.Model, index: int, runs: Any, work: Path) -> None:
        lives.append(set(runs[0].live))
        real(block, index, runs, work)

    monkeypatch.setattr(profiles, "_execute", watched)
    found(layers(3), {"x": ShapeRange((1, 64), (2, 64), (3, 64))}, tmp_path, [2, 4])
    assert lives == [{"x"}, {"h1"}, {"h2"}]


@pytest.mark.parametrize("name", ["common", "pp_rec", "minilm"])
def test_real_models(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_model(real_model(name))
    normalise(source)
    infer_shapes(source)
    known = tuple(map(as_value, source.graph.inputs))
    (window,) = prepare(source, tmp_path, 1 << 30, lambda *_: None)
    legal = [seam.position for seam in uncrossed(window.graph, find_cuts(window.graph))]
    blocks = cut(window, legal[len(legal) // 5 :: len(legal) // 4])
    opt = {key: array.shape for key, array in real_models.feeds(name).items()}
    spans = {key: ShapeRange(shape, shape, (shape[0] * 2, *shape[1:])) for key, shape in opt.items()}
    if name == "common":
        spans = {key: ShapeRange(shape, shape, (*shape[:-1], shape[-1] * 2)) for key, shape in opt.items()}
    got = ranges(blocks, known, spans, tmp_path, lambda *_: None).ranges
    assert {value.name for block in blocks for value in (*block.graph.inputs, *block.graph.outputs)} == set(got)
    assert all(
        np.all(np.array(span.min) <= span.opt) and np.all(np.array(span.opt) <= span.max) for span in got.values()
    )
    assert any(span.min != span.max for span in list(got.values())[len(known) :])
    for index, block in enumerate(blocks):
        took, made = child.load_arrays(arrays_file(tmp_path, index))
        assert {key: array.shape for key, array in took.items()} == {key: got[key].opt for key in took}
        for value in block.graph.initializers.values():
            assert value.const_value is not None
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype)
        for key, array in run(block, took).items():
            np.testing.assert_allclose(array, made[key], rtol=0, atol=1e-4 * max(1.0, float(np.abs(array).max())))
