"""Equal blocks have one form and one key, others have others, and the form computes what the block does."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.graph import strategies
from tests.graph.execution import Array, cut, from_proto
from trt_layering.assembly import Cutting, cut_windows
from trt_layering.backends.base import CutBlock
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, uncut_options
from trt_layering.backends.tensorrt.builder import TensorRtBuilder, Wanted
from trt_layering.backends.tensorrt.streamable import streamable
from trt_layering.graph.canonical import Canonical, as_inputs, canonical, save_with_weights, shaped
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.shapes import ShapeRange

FLOAT = TensorProto.FLOAT
info = helper.make_tensor_value_info
node = helper.make_node


def normal(proto: onnx.ModelProto) -> ir.Model:
    source = from_proto(proto)
    normalise(source)
    infer_shapes(source)
    return source


def form(block: ir.Model) -> Canonical:
    return canonical(block, streamable(block.graph))


def blocks_of(source: ir.Model, work: Path, size: int) -> list[CutBlock]:
    builder = TensorRtBuilder(Wanted("inputs", "staged", work))
    windows = builder.prepare(source, work, 1 << 30, lambda *_: None)
    return list(cut_windows(builder, windows, Cutting(size, {})))


def key(proto: onnx.ModelProto, ranges: Mapping[str, ShapeRange] | None = None) -> str:
    made = form(normal(proto))
    return made.key(ranges if ranges is not None else {name: ShapeRange((1,), (2,), (3,)) for name in made.inputs})


def run(model: ir.Model | Path, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """As in `execution`, but constants are taken as they lie, since reordered ones are summed up in another order."""
    options = uncut_options(optimised=False)
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(source, options, providers=PROVIDERS)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {i.name: feeds[i.name] for i in session.get_inputs()}), strict=True))


def answers(made: Canonical, live: Mapping[str, Array], folder: Path) -> dict[str, Array]:
    """Of both written forms, by the block's own names; they must not differ."""
    save_with_weights(made, folder / "block.onnx")
    feeds = {f"i{index}": live[name] for index, name in enumerate(made.inputs)}
    held = run(folder / "block.onnx", feeds)
    tensors = [made.model.graph.initializers[f"w{index}"].const_value for index in range(len(made.weights))]
    feeds |= {f"w{index}": tensor.numpy() for index, tensor in enumerate(tensors) if tensor is not None}
    bound = run(as_inputs(made), feeds)
    assert list(held) == list(bound) == [f"o{index}" for index in range(len(made.outputs))]
    for own in held:
        assert held[own].tobytes() == bound[own].tobytes()
    return dict(zip(made.outputs, held.values(), strict=True))


# ------------------------------------------------------------------------------------------------- the same function


@settings(max_examples=25)
@given(proto=strategies.models(), data=st.data())
def test_forms_of_blocks_answer_as_the_blocks_do(
    proto: onnx.ModelProto, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = normal(proto)
    legal = [seam.position for seam in find_cuts(source.graph)]
    positions = data.draw(st.lists(st.sampled_from(legal), unique=True, max_size=3)) if legal else []
    live = dict(strategies.feeds())
    for block in cut(source, sorted(positions)):
        made = form(block)
        onnx.checker.check_model(ir.to_proto(as_inputs(made)))
        expected = run(block, live)
        got = answers(made, live, tmp_path_factory.getbasetemp())
        assert expected.keys() == got.keys()
        for name, array in expected.items():
            assert (array.dtype, array.shape) == (got[name].dtype, got[name].shape)
            assert array.tobytes() == got[name].tobytes()
        live.update(expected)


@pytest.mark.parametrize("name", ["common", "common_det", "pp_rec", "pp_cls", "minilm"])
def test_real_models(
    name: str, real_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(real_model(name))
    normalise(source)
    infer_shapes(source)
    live: dict[str, Array] = dict(real_models.feeds(name))
    monkeypatch.chdir(tmp_path)  # where the window's weights lie
    for block in blocks_of(source, tmp_path, 2 << 20):
        made = canonical(block.graph, block.weights)
        expected = run(block.graph, live)
        got = answers(made, live, tmp_path)
        assert all(expected[key].tobytes() == got[key].tobytes() for key in expected)
        assert set(made.weights) == block.weights.keys() == streamable(block.graph.graph).keys()
        live.update(expected)


# ---------------------------------------------------------------------------------------------- equal and other blocks


def renamed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with other names for everything, dims included."""
    made = copy.deepcopy(proto)
    _rename(made.graph)
    return made


def _rename(graph: onnx.GraphProto) -> None:
    graph.name = f"{graph.name}!"
    for index, step in enumerate(graph.node):
        step.name, step.doc_string = f"step {index}", "said"
        step.input[:] = [name and f"{name}/other" for name in step.input]
        step.output[:] = [name and f"{name}/other" for name in step.output]
        for attribute in step.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g)
            if attribute.type == onnx.AttributeProto.TENSOR:
                attribute.t.name = "told"
    for named in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        named.name = f"{named.name}/other"
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_param = f"{dim.dim_param}'"


@settings(max_examples=40)
@given(proto=strategies.models(), data=st.data())
def test_names_and_order_do_not_matter(proto: onnx.ModelProto, data: st.DataObject) -> None:
    other = renamed(proto)
    tensors = list(other.graph.initializer)
    order = data.draw(st.permutations(range(len(tensors))))
    del other.graph.initializer[:]
    other.graph.initializer.extend(tensors[index] for index in order)
    for step in other.graph.node:
        attributes = sorted(step.attribute, key=lambda attribute: attribute.name, reverse=True)
        del step.attribute[:]
        step.attribute.extend(attributes)
    assert key(proto) == key(other)


@settings(max_examples=30)
@given(proto=strategies.models())
def test_values_of_streamed_weights_do_not_matter(proto: onnx.ModelProto) -> None:
    streamed = set(form(normal(proto)).weights)
    other = copy.deepcopy(proto)
    changed = False
    for index, tensor in enumerate(other.graph.initializer):
        if tensor.name in streamed:
            array = numpy_helper.to_array(tensor)
            other.graph.initializer[index].CopyFrom(numpy_helper.from_array(array + array.dtype.type(1), tensor.name))
            changed = True
    assert changed <= (other != proto)
    assert key(proto) == key(other)


def test_the_order_of_nodes_does_not_matter() -> None:
    ends = [info("x", FLOAT, ["n", 4])], [info("y", FLOAT, ["n", 4])]
    steps = [
        node("Relu", ["x"], ["a"]),
        node("Tanh", ["x"], ["b"]),
        node("Neg", ["b"], ["c"]),
        node("Add", ["a", "c"], ["y"]),
    ]
    keys = set()
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [1, 2, 0, 3]):
        graph = helper.make_graph([steps[index] for index in order], "g", *ends)
        keys.add(key(helper.make_model(graph, opset_imports=strategies.OPSETS, ir_version=8)))
    assert len(keys) == 1


@settings(max_examples=40)
@given(proto=strategies.models(), data=st.data())
def test_any_change_gives_another_key(proto: onnx.ModelProto, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from([_attribute, _constant, _dim, _dtype, _operator]))(proto)
    if other is None:
        return
    assert key(proto) != key(other)


def _attribute(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    other = copy.deepcopy(proto)
    for step in other.graph.node:
        if step.op_type == "Gemm":
            for attribute in step.attribute:
                if attribute.name == "alpha":
                    attribute.f = 0.25
                    return other if _alive(proto, step.output[0]) else None
    return None


def _alive(proto: onnx.ModelProto, name: str) -> bool:
    return any(value.name == name for step in normal(proto).graph for value in step.outputs)


def _constant(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    """The limit of a Clip, which is one element and so no streamed weight."""
    limits = {step.input[2] for step in proto.graph.node if step.op_type == "Clip" and _alive(proto, step.output[0])}
    other = copy.deepcopy(proto)
    for tensor in other.graph.initializer:
        if tensor.name in limits:
            tensor.CopyFrom(numpy_helper.from_array(np.array(0.5, np.float32), tensor.name))
            return other
    return None


def _dim(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    other = copy.deepcopy(proto)
    other.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7
    return other


def _dtype(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    other = copy.deepcopy(proto)
    other.graph.input[1].type.tensor_type.elem_type = TensorProto.FLOAT16
    return other


def _operator(proto: onnx.ModelProto) -> onnx.ModelProto | None:
    other = copy.deepcopy(proto)
    for step in other.graph.node:
        if step.op_type == "Tanh" and _alive(proto, step.output[0]):
            step.op_type = "Softsign"
            return other
    return None


def single(op: str = "Conv", *, shape: Sequence[Any] = (4, 4, 3, 3), dtype: Any = np.float32, **attributes: Any) -> str:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = numpy_helper.from_array(np.ones(shape, dtype), "w")
    graph = helper.make_graph(
        [node(op, ["x", "w"], ["y"], **attributes)],
        "g",
        [info("x", kind, ["n", 4, 9, 9])],
        [info("y", kind, None)],
        [weight],
    )
    return key(helper.make_model(graph, opset_imports=strategies.OPSETS, ir_version=8))


def test_attributes_shapes_dtypes_operators_and_ranges_matter() -> None:
    keys = [
        single(),
        single(strides=[2, 2]),
        single(shape=(4, 4, 1, 1)),
        single(shape=(6, 4, 3, 3)),
        single(dtype=np.float16),
        single("ConvTranspose"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == single()
    proto = strategies_free()
    spans = [ShapeRange((1, 4), (2, 4), (3, 4)), ShapeRange((1, 4), (2, 4), (4, 4)), ShapeRange((2, 4), (2, 4), (3, 4))]
    assert len({key(proto, {"x": span}) for span in spans}) == len(spans)


def strategies_free() -> onnx.ModelProto:
    graph = helper.make_graph(
        [node("Relu", ["x"], ["y"])], "g", [info("x", FLOAT, ["n", 4])], [info("y", FLOAT, ["n", 4])]
    )
    return helper.make_model(graph, opset_imports=strategies.OPSETS, ir_version=8)


def test_shapes_that_are_known_better() -> None:
    graph = helper.make_graph(
        [node("Add", ["a", "b"], ["y"])],
        "g",
        [info("a", FLOAT, ["n", 4, "m"]), info("b", FLOAT, [None, 4, 1])],
        [info("y", FLOAT, None)],
    )
    made = form(normal(helper.make_model(graph, opset_imports=strategies.OPSETS, ir_version=8)))
    better = shaped(made, {"a": ("s7", 4, 3), "b": ("s7", 4, 1)})
    assert [str(value.shape) for value in better.model.graph.inputs] == ["[d0,4,3]", "[d0,4,1]"]
    assert [str(value.shape) for value in made.model.graph.inputs] == ["[d0,4,d1]", "[None,4,1]"]
    spans = dict.fromkeys("ab", ShapeRange((1,), (1,), (2,)))
    assert better.key(spans) == shaped(made, {"a": ("s1", 4, 3), "b": ("s1", 4, 1)}).key(spans)
    assert better.key(spans) != shaped(made, {"a": ("s1", 4, 3), "b": ("s2", 4, 1)}).key(spans)


# ------------------------------------------------------------------------------------------- networks that repeat


class Network:
    """A model in the making, as exporters write them."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def weight(self, name: str, *shape: int) -> str:
        array = self.rng.standard_normal(shape, np.float32) * np.float32(0.1)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.array(value), name))
        return name

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"/{op}_{len(self.nodes)}_output"
        self.nodes.append(node(op, inputs, [name], name=name[:-7], **attributes))
        return name

    def model(self, x: onnx.ValueInfoProto, result: str) -> onnx.ModelProto:
        self.nodes.append(node("Identity", [result], ["y"]))
        graph = helper.make_graph(self.nodes, "g", [x], [info("y", FLOAT, None)], self.weights)
        return helper.make_model(graph, opset_imports=strategies.OPSETS, ir_version=8)


def transformer(layers: int, width: int = 32, heads: int = 4) -> onnx.ModelProto:
    net, x = Network(), "x"
    for layer in range(layers):
        base = f"layers.{layer}"
        split = net.constant(f"{base}.split", np.array([0, -1, heads, width // heads]))
        join = net.constant(f"{base}.join", np.array([0, -1, width]))
        scale = net.constant(f"{base}.scale", np.float32(0.35))
        parts = []
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            product = net.add("MatMul", [x, net.weight(f"{base}.{name}.w", width, width)])
            biased = net.add("Add", [product, net.weight(f"{base}.{name}.b", width)])
            parts.append(net.add("Transpose", [net.add("Reshape", [biased, split])], perm=perm))
        scores = net.add("Mul", [net.add("MatMul", parts[:2]), scale])
        mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), parts[2]])
        joined = net.add("Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), join])
        x = net.add("Add", [net.add("MatMul", [joined, net.weight(f"{base}.o.w", width, width)]), x])
        norm = [net.weight(f"{base}.norm.{part}", width) for part in "wb"]
        x = net.add("LayerNormalization", [x, *norm], axis=-1)
        inner = net.add("Relu", [net.add("MatMul", [x, net.weight(f"{base}.up", width, 4 * width)])])
        x = net.add("Add", [net.add("MatMul", [inner, net.weight(f"{base}.down", 4 * width, width)]), x])
    return net.model(info("x", FLOAT, ["batch", "length", width]), x)


def residual(stages: int, width: int = 16) -> onnx.ModelProto:
    net, x = Network(), "x"
    for stage in range(stages):
        base, y = f"layer{stage}", x
        for part in (1, 2):
            y = net.add("Conv", [y, net.weight(f"{base}.conv{part}", width, width, 3, 3)], pads=[1] * 4)
            norm = [net.weight(f"{base}.bn{part}.{name}", width) for name in ("scale", "bias", "mean")]
            variance = net.constant(f"{base}.bn{part}.var", np.ones(width, np.float32))
            y = net.add("BatchNormalization", [y, *norm, variance])
            y = net.add("Relu", [y]) if part == 1 else y
        x = net.add("Relu", [net.add("Add", [y, x])])
    return net.model(info("x", FLOAT, ["n", width, "h", "w"]), x)


@pytest.mark.parametrize(
    ("proto", "layer_bytes"), [(transformer(6), 50 << 10), (residual(6), 19 << 10)], ids=["transformer", "residual"]
)
def test_repeated_layers_share_a_key(proto: onnx.ModelProto, layer_bytes: int, tmp_path: Path) -> None:
    forms = [canonical(block.graph, block.weights) for block in blocks_of(normal(proto), tmp_path, layer_bytes)]
    ranges = ShapeRange((1,), (2,), (3,))
    keys = Counter(made.key(dict.fromkeys(made.inputs, ranges)) for made in forms)
    assert len(forms) >= 6
    assert max(keys.values()) >= 4
    assert len(keys) <= 3
