"""Engines compute over memory that is not theirs, write where they are told to, and keep nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.chains import assert_same, budgets, cut_by, feed, in_this_process, layers, model, opened, saved, uncut
from tests.store.samples import chain_of
from trt_layering import backends
from trt_layering.backends.onnxruntime import machine
from trt_layering.backends.onnxruntime import runtime as module
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, OnnxRuntime, reported, session_options, tensor_over
from trt_layering.building import build
from trt_layering.errors import BackendError, BuildError, ForeignError, MemoryLimitError, UsageError
from trt_layering.store.manifest import WEIGHTS_FILE, Backend, Block, Value
from trt_layering.store.reader import WeightFile

FLOAT = TensorProto.FLOAT
info = helper.make_tensor_value_info
Array = np.ndarray[Any, Any]


def block(folder: Path, proto: onnx.ModelProto, weight: Array | None = None) -> Block:
    """`proto` as a block file whose weight "w", if it has one, is external data in `weights.bin`."""
    for tensor in proto.graph.initializer:
        if tensor.name == "w" and weight is not None:
            (folder / WEIGHTS_FILE).write_bytes(weight.tobytes().ljust(4096, b"\0"))
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, text in (("location", WEIGHTS_FILE), ("offset", "0"), ("length", str(weight.nbytes))):
                tensor.external_data.add(key=key, value=text)
    onnx.save(proto, folder / "b.onnx")
    return Block(
        name="b",
        file="b.onnx",
        digest="0" * 32,
        extents=(0,) if weight is not None else (),
        inputs=tuple(map(_value, proto.graph.input)),
        outputs=tuple(map(_value, proto.graph.output)),
    )


def _value(proto: onnx.ValueInfoProto) -> Value:
    kind = proto.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
    name = {FLOAT: "float32", TensorProto.STRING: "string", TensorProto.BOOL: "bool"}[kind.elem_type]
    return Value(name=proto.name, dtype=name, shape=dims)


@pytest.fixture
def runtime() -> Iterator[OnnxRuntime]:
    opened = OnnxRuntime()
    yield opened
    opened.close()


W = np.arange(16, dtype=np.float32).reshape(4, 4)
X = np.ones((2, 4), np.float32)


def product(folder: Path, dim: int | str = "n") -> Block:
    proto = model(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Neg", ["h"], ["y"])],
        [info("x", FLOAT, [dim, 4])],
        [info("h", FLOAT, [dim, 4]), info("y", FLOAT, [dim, 4])],
        [numpy_helper.from_array(W, "w")],
    )
    return block(folder, proto, W)


# ------------------------------------------------------------------------------------------------------------ engines


def test_a_streamed_engine_reads_the_weights_where_they_lie_each_time(runtime: OnnxRuntime, tmp_path: Path) -> None:
    memory = np.zeros((4, 4), np.float32)
    engine = runtime.open_streamed(tmp_path, product(tmp_path), {"w": memory}, {})
    for weights in (W, W * 2, np.eye(4, dtype=np.float32)):
        memory[:] = weights
        results = engine.execute({"x": runtime.wrap(X)}, {})
        np.testing.assert_array_equal(runtime.unwrap(results["h"]), X @ weights)
        np.testing.assert_array_equal(runtime.unwrap(results["y"]), -(X @ weights))
    engine.close()


def test_a_resident_engine_has_its_weights_from_the_folder(runtime: OnnxRuntime, tmp_path: Path) -> None:
    made = product(tmp_path)
    with closing(WeightFile(tmp_path / WEIGHTS_FILE)) as file:
        engine = runtime.open_resident(tmp_path, made, {}, file.read_into)
    np.testing.assert_array_equal(runtime.unwrap(engine.execute({"x": runtime.wrap(X)}, {})["h"]), X @ W)
    engine.close()


@pytest.mark.parametrize("buffered", [(), ("h",), ("y",), ("h", "y")])
@pytest.mark.parametrize("into", [(), ("h",), ("y",)])
@pytest.mark.parametrize("given", [False, True])
def test_outputs_go_where_they_are_told_to(
    runtime: OnnxRuntime, tmp_path: Path, buffered: tuple[str, ...], into: tuple[str, ...], given: bool
) -> None:
    """Some to buffers known at open, some to places given with the call, the rest allocated; all mixed at will."""
    arrays = {name: np.full((2, 4), 99, np.float32) for name in ("x", "h", "y")}
    buffers = {name: runtime.wrap(arrays[name]) for name in buffered}
    if given:
        buffers["x"] = runtime.wrap(arrays["x"])
    memory = W.copy()
    engine = runtime.open_streamed(tmp_path, product(tmp_path, dim=2), {"w": memory}, buffers)
    for factor in (1, 2, 3):
        arrays["x"][:] = X * factor
        places = {name: np.full((2, 4), 77, np.float32) for name in into if name not in buffered}
        wrapped = {name: runtime.wrap(array) for name, array in places.items()}
        results = engine.execute({"x": runtime.wrap(arrays["x"])}, wrapped)
        wanted = {"h": X * factor @ W, "y": -(X * factor @ W)}
        for name, array in wanted.items():
            np.testing.assert_array_equal(runtime.unwrap(results[name]), array)
            place = places.get(name, arrays[name] if name in buffered else None)
            if place is not None:
                np.testing.assert_array_equal(place, array)
    engine.close()


def test_results_that_are_allocated_are_not_overwritten(runtime: OnnxRuntime, tmp_path: Path) -> None:
    buffers = {"y": runtime.wrap(np.zeros((2, 4), np.float32))}
    engine = runtime.open_streamed(tmp_path, product(tmp_path), {"w": W.copy()}, buffers)
    first = engine.execute({"x": runtime.wrap(X)}, {})["h"]
    second = engine.execute({"x": runtime.wrap(X * 5)}, {})["h"]
    np.testing.assert_array_equal(runtime.unwrap(first), X @ W)
    np.testing.assert_array_equal(runtime.unwrap(second), X * 5 @ W)
    engine.close()


def test_sizes_may_change_from_call_to_call(runtime: OnnxRuntime, tmp_path: Path) -> None:
    engine = runtime.open_streamed(tmp_path, product(tmp_path), {"w": W.copy()}, {})
    for rows in (1, 7, 2):
        x = np.ones((rows, 4), np.float32)
        assert runtime.unwrap(engine.execute({"x": runtime.wrap(x)}, {})["y"]).shape == (rows, 4)
    engine.close()


@pytest.mark.parametrize("into", [False, True])
def test_an_engine_holds_nothing_after_a_call_and_less_after_close(
    runtime: OnnxRuntime, tmp_path: Path, into: bool
) -> None:
    memory, x = W.copy(), X.copy()
    place = np.zeros((2, 4), np.float32)
    weights, fed = weakref.ref(memory), weakref.ref(x)
    engine = runtime.open_streamed(tmp_path, product(tmp_path), {"w": memory}, {})
    engine.execute({"x": runtime.wrap(x)}, {"y": runtime.wrap(place)} if into else {})
    del x
    gc.collect()
    assert fed() is None
    engine.close()
    del memory
    gc.collect()
    assert weights() is None
    with pytest.raises(BackendError, match="closed"):
        engine.execute({}, {})


def test_what_an_operator_refuses_names_the_block(runtime: OnnxRuntime, tmp_path: Path) -> None:
    engine = runtime.open_streamed(tmp_path, product(tmp_path), {"w": W.copy()}, {})
    with pytest.raises(BackendError, match="invalid dimensions") as caught:
        engine.execute({"x": runtime.wrap(np.ones((2, 5), np.float32))}, {})
    assert caught.value.where == "b (b.onnx)"
    np.testing.assert_array_equal(runtime.unwrap(engine.execute({"x": runtime.wrap(X)}, {})["h"]), X @ W)
    engine.close()


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08"])
def test_a_file_that_is_no_model(runtime: OnnxRuntime, tmp_path: Path, content: bytes) -> None:
    described = product(tmp_path)
    (tmp_path / "b.onnx").write_bytes(content)
    with pytest.raises(BackendError) as caught:
        runtime.open_streamed(tmp_path, described, {"w": W.copy()}, {})
    assert caught.value.where == f"b ({tmp_path / 'b.onnx'})"


def test_memory_that_is_not_to_be_had_is_told_as_such() -> None:
    for error in (MemoryError(), RuntimeError("Failed to allocate memory for requested buffer of size 9")):
        with pytest.raises(MemoryLimitError, match="memory") as caught, reported("there"):
            raise error
        assert caught.value.where == "there"


def test_text_and_numbers_in_one_block(runtime: OnnxRuntime, tmp_path: Path) -> None:
    text = TensorProto.STRING
    proto = model(
        [helper.make_node("Identity", ["t"], ["u"]), helper.make_node("Neg", ["x"], ["y"])],
        [info("t", text, [2]), info("x", FLOAT, [2, 4])],
        [info("u", text, [2]), info("y", FLOAT, [2, 4])],
    )
    words = np.array(["one", "zwölf"], object)
    place = np.zeros((2, 4), np.float32)
    engine = runtime.open_streamed(tmp_path, block(tmp_path, proto), {}, {})
    for into in ({}, {"y": runtime.wrap(place)}):
        results = engine.execute({"t": runtime.wrap(words), "x": runtime.wrap(X)}, into)
        assert list(runtime.unwrap(results["u"])) == ["one", "zwölf"]
        np.testing.assert_array_equal(runtime.unwrap(results["y"]), -X)
    np.testing.assert_array_equal(place, -X)
    engine.close()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"], object),
        np.array(True),
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.zeros((0, 3), np.int8),
    ],
)
def test_arrays_come_back_as_they_went(runtime: OnnxRuntime, array: Array) -> None:
    back = runtime.unwrap(runtime.wrap(array))
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tolist() == array.tolist()
    assert back is not array


def test_bfloat16_is_aliased_too() -> None:
    import ml_dtypes

    array = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    tensor = tensor_over(array)
    assert tensor.element_type() == TensorProto.BFLOAT16
    assert tensor.data_ptr() == array.ctypes.data


def test_closing_gives_scratch_back() -> None:
    """With the model of the module's own that does nothing else."""
    onnx.checker.check_model(onnx.load_from_string(module._IDENTITY), full_check=True)
    session = ort.InferenceSession(module._IDENTITY, session_options(shared_threads=False), providers=PROVIDERS)
    assert session.run(None, {"x": np.array([2.5], np.float32)})[0].tolist() == [2.5]
    runtime = OnnxRuntime()
    runtime.close()
    runtime.close()


# ------------------------------------------------------------------------------------------------------------- builder


def test_blocks_are_models_by_themselves_and_together_the_model(tmp_path: Path) -> None:
    path = saved(layers(4), tmp_path / "m.onnx")
    for optimise in (False, True):
        with in_this_process():
            done = build(path, repository=tmp_path, block_size="16KiB", optimise=optimise)
        live = feed()
        for described in done.manifest.blocks:
            file = done.path / described.file
            onnx.checker.check_model(str(file), full_check=True)
            session = ort.InferenceSession(str(file), providers=PROVIDERS)
            names = [value.name for value in described.outputs]
            assert [output.name for output in session.get_outputs()] == names
            results = session.run(names, {value.name: live[value.name] for value in described.inputs})
            live.update(zip(names, results, strict=True))
        np.testing.assert_allclose(live["y"], uncut(path, feed())["y"], rtol=0, atol=1e-6)


def test_no_block_holds_its_weights(tmp_path: Path) -> None:
    with in_this_process():
        done = build(saved(layers(4), tmp_path / "m.onnx"), repository=tmp_path, block_size="16KiB")
    assert len(done.manifest.blocks) == 4
    for described in (*done.manifest.blocks, *done.manifest.whole):
        assert (done.path / described.file).stat().st_size < 2048


def test_weights_that_only_one_of_two_outputs_is_in_a_buffer_of(tmp_path: Path) -> None:
    """A block with one result of fixed and one of free size: each block after it must find both."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node("Cast", ["positive"], ["sign"], to=FLOAT),
        helper.make_node("MatMul", ["h", "w1"], ["g"]),
        helper.make_node("Mul", ["g", "sign"], ["y"]),
    ]
    weights = [numpy_helper.from_array(rng.standard_normal((64, 64), np.float32), f"w{index}") for index in (0, 1)]
    proto = model(
        nodes,
        [info("x", FLOAT, ["n", 64])],
        [info("y", FLOAT, ["n", 64]), info("total", FLOAT, []), info("positive", TensorProto.BOOL, [])],
        [*weights, numpy_helper.from_array(np.array(0, np.float32), "zero")],
    )
    path = saved(proto, tmp_path / "m.onnx")
    for positions in ([2], [2, 3], [1, 2, 3, 4, 5]):
        with in_this_process(), cut_by(lambda legal, wanted=positions: [p for p in legal if p in wanted]):
            done = build(path, repository=tmp_path, optimise=False)
        assert len(done.manifest.blocks) == len(positions) + 1
        with opened(done, budgets(done)["floor"]) as chain:
            for seed in range(4):
                assert_same(uncut(path, feed(seed=seed)), chain.run(feed(seed=seed)))


@pytest.mark.parametrize("optimise", [True, False])
def test_what_onnx_runtime_does_not_have_is_refused(tmp_path: Path, optimise: bool) -> None:
    proto = model(
        [helper.make_node("Frobnicate", ["x"], ["y"], domain="nowhere")],
        [info("x", FLOAT, [1])],
        [info("y", FLOAT, [1])],
    )
    proto.opset_import.add(domain="nowhere", version=1)
    with in_this_process(), pytest.raises((BackendError, BuildError), match="Frobnicate"):
        build(saved(proto, tmp_path / "m.onnx"), repository=tmp_path / "engines", optimise=optimise)
    assert not list((tmp_path / "engines" / "m").iterdir())


# ------------------------------------------------------------------------------------------------------------- machine


def test_a_fingerprint_is_always_the_same_and_names_the_machine() -> None:
    assert machine.fingerprint() == machine.fingerprint()
    assert set(machine.fingerprint()) == {"machine", "instructions"}
    assert machine.version() == ort.__version__


@pytest.mark.parametrize(
    ("cpuinfo", "instructions"),
    [
        ("processor: 0\nflags\t\t: fpu avx sse avx2 fma\n", "avx avx2 fma"),
        ("processor\t: 0\nFeatures\t: fp asimd evtstrm i8mm asimddp\n", "asimd asimddp i8mm"),
        ("no such line\n", ""),
    ],
)
def test_instruction_sets_come_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, instructions: str
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "Path", lambda text: tmp_path / "cpuinfo")
    assert machine.fingerprint()["instructions"] == instructions


# ------------------------------------------------------------------------------------------------------------ backends


def test_backends_by_name() -> None:
    assert backends.builder("auto").name == backends.builder("onnxruntime").name == "onnxruntime"
    with pytest.raises(UsageError, match="'tpu'"):
        backends.builder("tpu")
    with pytest.raises(ForeignError, match="'tpu'"):
        backends.runtime(chain_of((), (), backend=Backend(name="tpu", version="1", fingerprint={})))


def test_what_a_signal_handler_raises_passes() -> None:
    """As a caller's own deadline does, at any moment of an execution."""
    with pytest.raises(TimeoutError, match="my deadline"), reported("block"):
        raise TimeoutError("my deadline")

    class Deadline(Exception):
        pass

    with pytest.raises(Deadline), reported("block"):
        raise Deadline
    for error in (RuntimeError("no such shape"), KeyError("no such shape"), FileNotFoundError(2, "no such shape")):
        with pytest.raises(BackendError, match="no such shape"), reported("block"):
            raise error
