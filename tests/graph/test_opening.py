"""Opening reads no weights, and whatever is no sound model raises ModelError and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.graph import strategies
from tests.graph.execution import assert_same, cut, run
from trt_layering.errors import ModelError
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.stored import StoredTensor

Array = np.ndarray[Any, Any]


def linear(weight: TensorProto, **changes: Any) -> onnx.ModelProto:
    """y = x @ w."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="multiply")],
        "linear",
        [helper.make_tensor_value_info("x", weight.data_type, ["N", weight.dims[0]])],
        [helper.make_tensor_value_info("y", weight.data_type, ["N", weight.dims[1]])],
        [weight],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, **{"opset_imports": opsets, "ir_version": 8, **changes})


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert caught.value.remedy
    assert str(path) in caught.value.where
    return caught.value.what


# --------------------------------------------------------------------------------------------- weights stay in files


@given(proto=strategies.models())
def test_what_is_opened_is_what_was_saved(proto: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = saved(proto, tmp_path_factory.getbasetemp())
    assert_same(run(proto, strategies.feeds()), run(open_model(path), strategies.feeds()))


@pytest.mark.parametrize("name", real_models.REAL_MODELS)
def test_real_models_keep_their_large_tensors_in_the_file(name: str, real_model: Callable[[str], Path]) -> None:
    path = real_model(name)
    expected = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    for value in open_model(path).graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        assert isinstance(tensor, StoredTensor) == (tensor.nbytes >= 1024)
        np.testing.assert_array_equal(tensor.numpy(), numpy_helper.to_array(expected[tensor.name or ""]))


FORMS: dict[str, Callable[[], TensorProto]] = {
    "raw": lambda: numpy_helper.from_array(random(32, 16), "w"),
    "floats": lambda: helper.make_tensor("w", TensorProto.FLOAT, [32, 16], random(32, 16).ravel().tolist()),
    "doubles": lambda: helper.make_tensor("w", TensorProto.DOUBLE, [32, 16], random(32, 16).ravel().tolist()),
    "ints": lambda: helper.make_tensor("w", TensorProto.INT32, [32, 16], range(512)),
    "half": lambda: numpy_helper.from_array(random(32, 32).astype(np.float16), "w"),
    "bfloat16": lambda: helper.make_tensor(
        "w", TensorProto.BFLOAT16, [32, 32], random(32, 32).astype(ml_dtypes.bfloat16).tobytes(), raw=True
    ),
    "nibbles": lambda: helper.make_tensor("w", TensorProto.INT4, [64, 64], bytes(range(256)) * 8, raw=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_tensor_reads_as_it_was_written(form: str, tmp_path: Path) -> None:
    proto = FORMS[form]()
    tensor = open_model(saved(linear(proto), tmp_path)).graph.initializers["w"].const_value
    assert tensor is not None
    plain = ir.from_proto(proto)
    assert tensor.dtype == plain.dtype
    np.testing.assert_array_equal(tensor.numpy(), plain.numpy())
    assert tensor.tobytes() == plain.tobytes()
    assert isinstance(tensor, StoredTensor) == (form != "ints")  # varints have no bytes to map


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    encoded = bytearray([number << 3 | 2])
    length = len(payload)
    while length > 127:
        encoded.append(length & 127 | 128)
        length >>= 7
    return bytes([*encoded, length]) + payload


def test_a_tensor_in_two_pieces_is_read_as_one(tmp_path: Path) -> None:
    proto = linear(FORMS["floats"]())
    first, second = TensorProto(), TensorProto()
    first.CopyFrom(proto.graph.initializer[0])
    second.float_data.extend(first.float_data[256:])
    del first.float_data[256:], proto.graph.initializer[:]
    pieces = first.SerializeToString() + second.SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString() + field(7, field(5, pieces)))  # the graph is in two pieces, too
    tensor = open_model(path).graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), random(32, 16))


@pytest.mark.parametrize("shape", [(32, 32), (4, 4)])
def test_an_initializer_listed_twice_is_taken_once_and_two_of_one_name_are_refused(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    proto = linear(numpy_helper.from_array(random(*shape), "w"))
    feeds = {"x": random(3, shape[0])}
    expected = run(proto, feeds)
    proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
    assert_same(expected, run(open_model(saved(proto, tmp_path)), feeds))
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.eye(shape[0], dtype=np.float32), "w"))
    assert "two different initializers have the name 'w'" in refusal(saved(proto, tmp_path))


def test_weights_in_constants_functions_and_branches_stay_in_the_file(tmp_path: Path) -> None:
    weight = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(random(32, 32)))
    use = helper.make_node("MatMul", ["a", "w"], ["b"])
    function = helper.make_function("own", "layer", ["a"], ["b"], [weight, use], [helper.make_opsetid("", 17)])
    result = helper.make_tensor_value_info("w", TensorProto.FLOAT, None)
    branch = helper.make_graph([weight], "branch", [], [result])
    proto = linear(
        numpy_helper.from_array(random(32, 32), "w"),
        functions=[function],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("own", 1)],
    )
    proto.graph.node.add().CopyFrom(helper.make_node("layer", ["x"], ["l"], domain="own"))
    proto.graph.node.add().CopyFrom(helper.make_node("If", ["c"], ["i"], then_branch=branch, else_branch=branch))
    proto.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.array(True), "c"))
    model = open_model(saved(proto, tmp_path))
    (inlined,) = model.functions.values()
    branches = [graph for node in model.graph for graph in (a.value for a in node.attributes.values()) if graph]
    for constant in (inlined[0], branches[0][0], branches[1][0]):
        tensor = constant.attributes["value"].as_tensor()
        assert isinstance(tensor, StoredTensor)
        np.testing.assert_array_equal(tensor.numpy(), random(32, 32))


def test_more_tensors_than_a_process_may_open_files(tmp_path: Path) -> None:
    count = 1500
    proto = linear(numpy_helper.from_array(random(32, 32), "w"))
    for i in range(count):
        proto.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.full((16, 16), i, np.float32), f"w{i}"))
    model = open_model(saved(proto, tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    arrays = [v.const_value.numpy() for v in model.graph.initializers.values() if v.const_value is not None]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert [array[0, 0] for array in arrays[1:]] == list(range(count))
    del arrays
    assert len(os.listdir("/proc/self/fd")) == before  # nothing stays mapped when nobody reads


MEMORY = """
import json, sys
from trt_layering.graph.blocks import Cutter
from trt_layering.graph.cuts import choose_cuts, find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.split import split_large

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

before = peak()
model = open_model(sys.argv[1])
normalise(model)
infer_shapes(model)
split_large(model, 16 << 20)
sizes = {name: value.const_value.nbytes for name, value in model.graph.initializers.items()}
positions = choose_cuts(model.graph, find_cuts(model.graph), 16 << 20, sizes)
cutter = Cutter(model)
bounds = [0, *positions, len(model.graph)]
blocks = [cutter.extract(a, b) for a, b in zip(bounds, bounds[1:])]
print(json.dumps({"grown": peak() - before, "blocks": len(blocks), "largest": max(sizes.values())}))
"""


def memory(path: Path) -> dict[str, int]:
    """What opening, normalising, inferring, splitting, cutting and extracting take in a process of their own."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_model_of_fifty_megabytes_takes_a_few(real_model: Callable[[str], Path]) -> None:
    found = memory(real_model("common"))
    assert found["grown"] < 12 << 20
    assert found["blocks"] >= 4
    assert found["largest"] <= 16 << 20


def test_a_model_of_more_than_two_gigabytes_takes_no_time_and_no_memory(tmp_path: Path) -> None:
    layers, side = 24, 5120  # 24 weights of 100 MiB: 2.5 GB, sparse on the disk
    nodes = [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(layers)]
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", side]) for name in ("v0", f"v{layers}")]
    weights = [outside(f"w{i}", [side, side], i * side * side * 4, side * side * 4) for i in range(layers)]
    graph = helper.make_graph(nodes, "large", info[:1], info[1:], weights)
    path = saved(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path)
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(layers * side * side * 4)
    start = time.monotonic()
    found = memory(path)
    assert found["blocks"] == layers * 7  # each in seven pieces of 15 MB
    assert found["grown"] < 32 << 20
    assert time.monotonic() - start < 15


# ------------------------------------------------------------------------------------------------------ external data


def outside(name: str, dims: list[int], offset: int, length: int | None, location: str = "weights.bin") -> TensorProto:
    """A float tensor in external data."""
    proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": length}
    for key, value in entries.items():
        if value is not None:
            proto.external_data.add(key=key, value=str(value))
    return proto


def external(folder: Path, size: int = 2048, **changes: Any) -> Path:
    """A model with a weight of 2048 bytes in external data, in a folder of its own, the data `size` bytes long."""
    entries = {"name": "w", "dims": [16, 32], "offset": 0, "length": 2048, **changes}
    (folder / "weights.bin").write_bytes(random(16, 32).tobytes()[:size].ljust(size, b"\0"))
    return saved(linear(outside(**entries)), folder)


@pytest.mark.parametrize("length", [2048, None])
def test_external_data_is_read_where_it_lies(length: int | None, tmp_path: Path) -> None:
    tensor = open_model(external(tmp_path, length=length)).graph.initializers["w"].const_value
    assert isinstance(tensor, StoredTensor)
    np.testing.assert_array_equal(tensor.numpy(), random(16, 32))
    assert tensor.tobytes() == random(16, 32).tobytes()


def test_a_model_named_from_its_own_folder_finds_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    external(tmp_path)
    monkeypatch.chdir(tmp_path)
    model = open_model("model.onnx")
    monkeypatch.chdir("/")
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    assert tensor.numpy()[0, 0] == random(16, 32)[0, 0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"size": 2047}, "which has 2047"),
        ({"size": 1}, "which has 1"),
        ({"size": 0}, "which has 0"),
        ({"offset": 4}, "ends at byte 2052"),
        ({"offset": -4}, "offset"),
        ({"offset": 2**62}, "which has 2048"),
        ({"length": 2044}, "has 2044 bytes for FLOAT"),
        ({"length": 4096}, "has 4096 bytes for FLOAT"),
        ({"dims": [2**31, 2**31]}, "has 2048 bytes"),
        ({"dims": [-16, -32]}, "has the shape"),
        ({"location": "gone.bin"}, "cannot be read"),
        ({"location": "../weights.bin"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": "inner/../weights.bin"}, "outside the model's folder"),
        ({"location": "."}, "not a regular file"),
        ({"location": "a\0b"}, "cannot be read"),
        ({"location": "link.bin"}, "outside the model's folder"),
        ({"location": "twin.bin"}, "one hard link"),
        ({"location": ""}, ""),
    ],
)
def test_external_data_that_is_not_as_named_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "weights.bin").write_bytes(bytes(2048))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    (folder / "first.bin").write_bytes(bytes(2048))
    (folder / "twin.bin").hardlink_to(folder / "first.bin")
    message = refusal(external(folder, **changes))
    assert what in message
    assert "'w'" in message


# ------------------------------------------------------------------------------------------------ files that are none


@given(garbage=st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.onnx"
    path.write_bytes(garbage)
    refusal(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = saved(linear(numpy_helper.from_array(random(32, 32), "w")), tmp_path)
    whole = path.read_bytes()
    for length in [*range(0, 200), *range(200, len(whole), 97), *range(len(whole) - 120, len(whole))]:
        path.write_bytes(whole[:length])
        refusal(path)


@given(data=st.data())
def test_a_damaged_file_is_cut_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    damaged = bytearray(data.draw(strategies.models()).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.onnx"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        model = open_model(path)
        normalise(model)
        infer_shapes(model)
        cut(model, [seam.position for seam in find_cuts(model.graph)])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.write_text('{"irVersion": 8}'), "not an ONNX model"),
        (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100)), "not an ONNX model"),
    ],
)
def test_what_is_no_file_or_no_model_is_refused(make: Callable[[Path], object], what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    make(path)
    assert what in refusal(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        open_model("nul\0byte.onnx")


# --------------------------------------------------------------------------------------------------- unsound models


def changed(change: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    proto = linear(numpy_helper.from_array(random(32, 32), "w"))
    change(proto)
    return proto


def nested(proto: onnx.ModelProto, depth: int) -> None:
    graph = proto.graph
    for _ in range(depth):
        attribute = graph.node.add(op_type="If", output=["i"]).attribute.add(name="then_branch")
        attribute.type = onnx.AttributeProto.GRAPH
        graph = attribute.g
    graph.initializer.add().CopyFrom(numpy_helper.from_array(random(32, 32), "deep"))


def _set(obj: Any, name: str, value: Any) -> None:
    setattr(obj, name, value)


UNSOUND: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "no opset": (lambda m: m.ClearField("opset_import"), "no opset"),
    "no IR version": (lambda m: m.ClearField("ir_version"), "no IR version"),
    "no output": (lambda m: m.graph.ClearField("output"), "no output"),
    "unknown input": (lambda m: m.graph.node[0].input.__setitem__(0, "gone"), "reads 'gone', which nothing makes"),
    "unknown output": (lambda m: _set(m.graph.output[0], "name", "gone"), "puts out 'gone'"),
    "made twice": (lambda m: m.graph.node.add().CopyFrom(m.graph.node[0]), "redeclared"),
    "input twice": (lambda m: m.graph.input.add().CopyFrom(m.graph.input[0]), "same name"),
    "nothing": (
        lambda m: [m.graph.ClearField(f) for f in ("node", "initializer")] and _set(m.graph.output[0], "name", "x"),
        "computes nothing",
    ),
    "sparse": (lambda m: m.graph.sparse_initializer.add(), "sparse"),
    "unknown dtype": (lambda m: _set(m.graph.initializer[0], "data_type", 999), "999"),
    "no dtype": (lambda m: m.graph.initializer[0].ClearField("data_type"), "UNDEFINED"),
    "too few bytes": (lambda m: m.graph.initializer[0].dims.append(2), "4096 bytes for FLOAT"),
    "small and too few": (
        lambda m: m.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=1, dims=[9, 9], raw_data=b"1234")),
        "4 bytes for FLOAT",
    ),
    "map": (lambda m: _set(m.graph.output[0].type.map_type, "key_type", 7), "Map types"),
    "very deep": (lambda m: nested(m, 2000), "ONNX model"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_models_are_refused(case: str, tmp_path: Path) -> None:
    change, what = UNSOUND[case]
    assert what in refusal(saved(changed(change), tmp_path))


def test_a_branch_that_puts_out_an_outer_value_is_refused(tmp_path: Path) -> None:
    branch = helper.make_graph([], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)])

    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node.add().CopyFrom(helper.make_node("If", ["c"], ["i"], then_branch=branch, else_branch=branch))
        proto.graph.initializer.add().CopyFrom(numpy_helper.from_array(np.array(True), "c"))

    assert "puts out 'x', which it does not make" in refusal(saved(changed(change), tmp_path))
