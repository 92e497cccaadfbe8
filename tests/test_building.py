"""Whatever the model, a build gives a chain that answers as it does, or says why not and publishes nothing."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from tests.chains import (
    assert_close,
    assert_same,
    budgets,
    cut_by,
    feed,
    in_this_process,
    layers,
    model,
    opened,
    saved,
    uncut,
)
from trt_layering import building, child
from trt_layering.backends.onnxruntime import builder as onnxruntime_builder
from trt_layering.building import Built, build
from trt_layering.errors import BuildError, InputError, LayeringError, ModelError, UsageError
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import read_manifest
from trt_layering.store.writer import StoreWriter

FLOAT = TensorProto.FLOAT
info = helper.make_tensor_value_info
node = helper.make_node
Array = np.ndarray[Any, Any]


pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


def weight(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    array = np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(shape[0] ** 0.5)
    return numpy_helper.from_array(array, name)


def built(proto: onnx.ModelProto | Path, folder: Path, **options: Any) -> tuple[Path, Built]:
    path = proto if isinstance(proto, Path) else saved(proto, folder / "model.onnx")
    with in_this_process():
        return path, build(path, repository=folder / "engines", **options)


def assert_answers(path: Path, done: Built, feeds: dict[str, Any], *, exact: bool) -> None:
    """At every kind of budget."""
    wanted = uncut(path, feeds, optimised=done.manifest.optimised)
    for budget in budgets(done).values():
        with opened(done, budget) as chain:
            for _ in range(2):
                if exact:
                    assert_same(wanted, chain.run(feeds))
                else:
                    assert_close(wanted, chain.run(feeds))


BOTH = pytest.mark.parametrize("optimise", [False, True])


# ------------------------------------------------------------------------------------------------------ what is built


def test_what_was_built_is_what_was_published(tmp_path: Path) -> None:
    """By child processes, as users build."""
    path = saved(layers(4), tmp_path / "four.onnx")
    stages: list[tuple[str, int, int]] = []
    done = build(
        path,
        name="four",
        repository=tmp_path / "engines",
        block_size="16KiB",
        progress=lambda *stage: stages.append(stage),
    )
    assert done.path == tmp_path / "engines" / "four" / "1"
    manifest = read_manifest(done.path)
    assert manifest == done.manifest
    assert (manifest.name, manifest.source, manifest.precision, manifest.block_size) == (
        "four",
        "four.onnx",
        "fp32",
        16384,
    )
    assert len(manifest.profile.execute_seconds) == len(manifest.parts)
    assert len(manifest.blocks) == 4
    assert all(0 < seconds < 1 for seconds in manifest.profile.execute_seconds)
    assert manifest.profile.read_rate > 0
    assert manifest.memory.shapes == {"x": (1, 64)}
    assert manifest.memory.engines > 0
    assert manifest.check.max_abs_output > 0
    assert manifest.check.max_abs_diff <= 1e-5 * manifest.check.max_abs_output
    for stage in ("prepare", "write", "check"):
        ours = [(count, total) for name, count, total in stages if name == stage]
        assert ours == sorted(ours)
        assert ours[-1][0] == ours[-1][1] > 0
    files = {file.name for file in done.path.iterdir()}
    engines = {block.file for block in (*(part.block for part in manifest.parts), *manifest.whole)}
    assert files == {"chain.json", "weights.bin", "schedules.json", *engines}
    assert_answers(path, done, feed(), exact=False)


def test_each_build_is_a_version(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        path, done = built(layers(2, seed=version), tmp_path, optimise=False)
        assert done.path.name == str(version)
        assert_answers(path, done, feed(), exact=True)


@pytest.mark.parametrize("size", ["16KiB", "32KiB", "64KiB", "1GiB"])
@BOTH
def test_blocks_hold_as_much_as_was_asked_for(tmp_path: Path, size: str, optimise: bool) -> None:
    path, done = built(layers(8), tmp_path, block_size=size, optimise=optimise)
    assert len(done.manifest.blocks) == {"16KiB": 8, "32KiB": 4, "64KiB": 2, "1GiB": 1}[size]
    assert_answers(path, done, feed(), exact=not optimise)


@BOTH
def test_a_tied_weight_is_stored_once(tmp_path: Path, optimise: bool) -> None:
    nodes = [node("MatMul", [f"h{i}", "w"], [f"m{i}"]) for i in range(3)]
    nodes += [node("Tanh", [f"m{i}"], [f"h{i + 1}"]) for i in range(3)]
    nodes.append(node("MatMul", ["h3", "v"], ["y"]))
    proto = model(
        nodes, [info("h0", FLOAT, ["n", 64])], [info("y", FLOAT, ["n", 64])], [weight("w", 64, 64), weight("v", 64, 64)]
    )
    with cut_by(lambda legal: legal):
        path, done = built(proto, tmp_path, optimise=optimise)
    manifest = done.manifest
    assert len(manifest.blocks) >= 4
    assert manifest.weights_bytes == 2 * 64 * 64 * 4
    assert sum(len(block.extents) for block in manifest.blocks) == 4
    assert_answers(path, done, {"h0": feed()["x"]}, exact=not optimise)


@BOTH
def test_weights_larger_than_a_block_are_divided(tmp_path: Path, optimise: bool) -> None:
    proto = model(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Relu", ["h"], ["r"]),
            node("Gemm", ["r", "v", "c"], ["y"], transB=1, alpha=0.5),
        ],
        [info("x", FLOAT, ["n", 64])],
        [info("y", FLOAT, ["n", 96])],
        [weight("w", 64, 512), weight("v", 96, 512), weight("c", 96)],
    )
    path, whole = built(proto, tmp_path, block_size="32KiB", split=False, optimise=optimise)
    assert Footprint.of(whole.manifest).largest_block > 65536
    path, divided = built(proto, tmp_path, block_size="32KiB", optimise=optimise)
    assert Footprint.of(divided.manifest).largest_block <= 32768 + 8192
    assert len(divided.manifest.blocks) > len(whole.manifest.blocks)
    assert_answers(path, whole, feed(), exact=not optimise)
    wanted = uncut(path, feed(), optimised=optimise)
    for budget in budgets(divided).values():
        with opened(divided, budget) as chain:
            assert_close(wanted, chain.run(feed()), 1e-6)


def test_what_stays_whole_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "scale"], ["y"])],
        [info("x", FLOAT, [1, 64])],
        [info("y", FLOAT, [64, 64])],
        [weight("w", 64, 64), weight("scale", 64, 64)],
    )
    with caplog.at_level(logging.INFO, logger="trt_layering"):
        built(proto, tmp_path, block_size="8KiB")
    said = [record.getMessage() for record in caplog.records]
    assert any("w divided into 2" in line for line in said)
    assert any("scale is larger than the block size and stays whole: Mul" in line for line in said)


# ------------------------------------------------------------------------------------------------------- odd models


@BOTH
def test_dims_stay_free(tmp_path: Path, optimise: bool) -> None:
    path, done = built(layers(3), tmp_path, block_size="16KiB", optimise=optimise)
    for rows in (1, 2, 33):
        assert_answers(path, done, feed(rows), exact=not optimise)


@BOTH
def test_fixed_dims_have_buffers(tmp_path: Path, optimise: bool) -> None:
    path, done = built(layers(6, batch=5), tmp_path, block_size="16KiB", optimise=optimise)
    assert_answers(path, done, feed(5), exact=not optimise)
    with opened(done) as chain, pytest.raises(InputError, match="must be 5"):
        chain.run(feed(4))


WRONG = {
    "rank": lambda proto: _declare(proto.graph.output[0], [1, 2, 3, "n"]),
    "dims": lambda proto: _declare(proto.graph.output[0], ["n", 7]),
    "batch": lambda proto: _declare(proto.graph.output[0], [9, 64]),
    "inside": lambda proto: proto.graph.value_info.append(info("h1", FLOAT, [1, 2])),
    "inside and rank": lambda proto: proto.graph.value_info.append(info("h2", FLOAT, [1, 2, 3])),
    "read inside": lambda proto: proto.graph.output.append(info("h1", FLOAT, [3, 7, "q"])),
}


@pytest.mark.parametrize("wrong", WRONG)
@BOTH
def test_wrongly_declared_shapes_are_survived(tmp_path: Path, wrong: str, optimise: bool) -> None:
    """ONNX Runtime runs such models, with a warning."""
    proto = layers(4)
    WRONG[wrong](proto)
    path, done = built(proto, tmp_path, block_size="16KiB", optimise=optimise)
    assert len(done.manifest.blocks) == 4
    for rows in (1, 4):
        assert_answers(path, done, feed(rows), exact=not optimise)


def _declare(value: onnx.ValueInfoProto, dims: list[int | str]) -> None:
    value.CopyFrom(info(value.name, FLOAT, dims))


@BOTH
def test_a_loop_and_an_if_with_their_weights(tmp_path: Path, optimise: bool) -> None:
    """Weights of the main graph that only bodies read, and weights inside the bodies: all of them streamed."""
    body = helper.make_graph(
        [
            node("MatMul", ["carried", "outer"], ["a"]),
            node("MatMul", ["a", "inner"], ["b"]),
            node("Tanh", ["b"], ["next"]),
            node("Identity", ["go"], ["goes"]),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("carried", FLOAT, ["n", 64])],
        [info("goes", TensorProto.BOOL, []), info("next", FLOAT, ["n", 64])],
        [weight("inner", 64, 64, seed=1)],
    )
    branches = [
        helper.make_graph(
            [node("MatMul", ["looped", name], ["result"])], "branch", [], [info("result", FLOAT, ["n", 64])], inside
        )
        for name, inside in (("outer", []), ("own", [weight("own", 64, 64, seed=2)]))
    ]
    proto = model(
        [
            node("MatMul", ["x", "w"], ["h"]),
            node("Loop", ["trips", "", "h"], ["looped"], body=body),
            node("ReduceSum", ["looped"], ["total"], keepdims=0),
            node("Greater", ["total", "zero"], ["positive"]),
            node("If", ["positive"], ["chosen"], then_branch=branches[0], else_branch=branches[1]),
            node("MatMul", ["chosen", "w"], ["y"]),
        ],
        [info("x", FLOAT, ["n", 64])],
        [info("y", FLOAT, ["n", 64])],
        [
            weight("w", 64, 64),
            weight("outer", 64, 64, seed=3),
            numpy_helper.from_array(np.array(3), "trips"),
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
        ],
    )
    with cut_by(lambda legal: legal):
        path, done = built(proto, tmp_path, optimise=optimise)
    assert len(done.manifest.blocks) > 2
    assert done.manifest.weights_bytes >= 4 * 64 * 64 * 4
    for seed in range(6):
        assert_answers(path, done, feed(seed=seed), exact=not optimise)


ODD = {
    "an input that nothing reads": """(float[n, 4] x, float[n, 9] unused) => (float[n, 4] y)
        { y = Neg(x) }""",
    "an output that is an input": """(float[n, 4] x) => (float[n, 4] x, float[n, 4] y)
        { y = Neg(x) }""",
    "an output that is a weight": """(float[n, 4] x) => (float[n, 4] y, float[2] w) <float[2] w = {1, 2}>
        { y = Neg(x) }""",
    "one node, no weights": """(float[n, 4] x) => (float[n, 4] y)
        { y = Neg(x) }""",
    "no weights": """(float[n, 4] x) => (float[n, 4] y)
        { a = Neg(x)  b = Exp(a)  c = Add(a, b)  y = Sigmoid(c) }""",
    "one output twice": """(float[n, 4] x) => (float[n, 4] y)
        { y = Neg(x)  z = Exp(y) }""",
    "an output that is read inside": """(float[n, 4] x) => (float[n, 4] a, float[n, 4] y)
        { a = Neg(x)  y = Exp(a) }""",
    "names with everything in them": """(float[n, 4] x) => (float[n, 4] y)
        { a = Neg(x)  y = Exp(a) }""",
    "text": """(string[n, 4] x) => (string[n, 4] y)
        { y = Identity(x) }""",
    "half precision": """(float[n, 4] x) => (float[n, 4] y)
        { a = Cast <to = 10> (x)  b = Cast <to = 1> (a)  c = Cast <to = 16> (b)  y = Cast <to = 1> (c) }""",
    "infinite and undefined results": """(float[n, 4] x) => (float[n, 4] y, float[n, 4] z)
        { a = Sub(x, x)  y = Div(x, a)  z = Log(x) }""",
    "results as large as they get": """(float[n, 4] x) => (float[n, 4] y, double[n, 4] z)
        <float least = {-3.4028234e38}, double most = {1.7976931348623157e308}>
        { y = Min(x, least)  a = Cast <to = 11> (x)  z = Max(a, most) }""",
    "integers and truth": """(int64[n, 4] x) => (bool[n, 4] y, int64[n, 4] z)
        { y = Equal(x, x)  a = Neg(x)  z = Mul(a, x) }""",
}


@pytest.mark.parametrize("what", ODD)
@BOTH
def test_odd_models(tmp_path: Path, what: str, optimise: bool) -> None:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {ODD[what]}')
    if what.startswith("names"):
        proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = "a b:0/ü\\x.../../etc"
    path = saved(proto, tmp_path / "model.onnx")
    feeds = _random_feeds(proto)
    wanted = uncut(path, feeds, optimised=optimise)
    with cut_by(lambda legal: legal):
        _, done = built(path, tmp_path, optimise=optimise)
    for budget in budgets(done).values():
        with opened(done, budget) as chain:
            got = chain.run(feeds)
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(got[name], array)


def _random_feeds(proto: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for value in proto.graph.input:
        shape = [dim.dim_value or 3 for dim in value.type.tensor_type.shape.dim]
        numbers = rng.standard_normal(shape, np.float32) * 3
        kind = value.type.tensor_type.elem_type
        feeds[value.name] = numbers.astype({FLOAT: np.float32, TensorProto.INT64: np.int64}.get(kind, object))
        if kind == TensorProto.STRING:
            feeds[value.name] = numbers.astype(str).astype(object)
    return feeds


@BOTH
def test_external_data(tmp_path: Path, optimise: bool) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(layers(4), path, save_as_external_data=True, location="weights of it.bin", size_threshold=0)
    _, done = built(path, tmp_path, block_size="16KiB", optimise=optimise)
    assert len(done.manifest.blocks) == 4
    assert_answers(path, done, feed(), exact=not optimise)
    wanted = uncut(path, feed(), optimised=optimise)
    (tmp_path / "weights of it.bin").unlink()
    with opened(done, budgets(done)["floor"]) as chain:  # the store stands by itself
        assert_close(wanted, chain.run(feed()))


@pytest.mark.parametrize("memory", ["1MiB", "64KiB", "4KiB"])
@BOTH
def test_preparing_in_many_windows(tmp_path: Path, memory: str, optimise: bool) -> None:
    """A model that is much larger than the memory there is to prepare it: convolutions, which are laid out anew, large
    matrices, which stay outside, a tied weight across windows, and something to fuse at every seam."""
    nodes, weights, last = [], [], "x"
    for index in range(6):
        weights += [weight(f"k{index}", 16, 16, 3, 3, seed=index), weight(f"b{index}", 16, seed=index)]
        nodes.append(node("Conv", [last, f"k{index}", f"b{index}"], [f"c{index}"], pads=[1] * 4))
        nodes.append(node("Relu", [f"c{index}"], [f"r{index}"]))
        nodes.append(node("MatMul", [f"r{index}", "tied" if index % 2 else f"m{index}"], [f"p{index}"]))
        nodes.append(node("Add", [f"p{index}", last if index else f"r{index}"], [f"s{index}"]))
        weights += [] if index % 2 else [weight(f"m{index}", 128, 128, seed=index)]
        last = f"s{index}"
    nodes.append(node("Identity", [last], ["y"]))
    weights.append(weight("tied", 128, 128, seed=9))
    proto = model(nodes, [info("x", FLOAT, ["n", 16, "h", 128])], [info("y", FLOAT, ["n", 16, "h", 128])], weights)
    with pytest.MonkeyPatch.context() as patch:
        prepared: list[int] = []
        real = onnxruntime_builder.OnnxRuntimeBuilder.prepare

        def prepare(*arguments: Any) -> Any:
            windows = real(*arguments)
            prepared.append(len(windows))
            return windows

        patch.setattr(onnxruntime_builder.OnnxRuntimeBuilder, "prepare", prepare)
        path, done = built(
            proto, tmp_path, memory=memory, block_size="100KiB", optimise=optimise, shapes={"x": (1, 16, 8, 128)}
        )
    assert not optimise or memory != "4KiB" or prepared[0] > 3
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 16, 4, 128), np.float32)}
    assert_answers(path, done, feeds, exact=not optimise)
    names = [tensor.name for extent in done.manifest.extents for tensor in extent.tensors]
    assert sum(name.endswith("tied") for name in names) == 1


# ------------------------------------------------------------------------------------------------------------- shapes


def test_the_check_runs_at_usual_and_largest_shapes(tmp_path: Path) -> None:
    shapes = {"x": {"min": "1x64", "opt": "2x64", "max": "9x64"}}
    path, done = built(layers(2), tmp_path, shapes=shapes)
    assert done.manifest.memory.shapes == {"x": (9, 64)}
    _, done = built(path, tmp_path, shapes={"x": (4, 64)})
    assert done.manifest.memory.shapes == {"x": (4, 64)}


@pytest.mark.parametrize(
    ("shapes", "kind", "said"),
    [
        ({"x": "4x65"}, InputError, "64"),
        ({"x": "4"}, InputError, "rank"),
        ({"z": "4x64"}, InputError, "z"),
        ({"x": "fourxsixty"}, UsageError, "four"),
        ({"x": {"min": "2x64", "opt": "1x64", "max": "3x64"}}, UsageError, "order"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path: Path, shapes: Any, kind: type[LayeringError], said: str) -> None:
    with pytest.raises(kind, match=said):
        built(layers(2), tmp_path, shapes=shapes)
    assert not (tmp_path / "engines").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "tpu"}, "tpu"),
        ({"precision": "fp8"}, "fp8"),
        ({"block_size": "much"}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"memory": "none"}, "memory"),
        ({"name": "../m"}, "../m"),
        ({"name": ""}, "''"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace(".", r"\.")):
        built(layers(2), tmp_path, **options)
    assert not list((tmp_path / "engines").glob("*/*"))


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def earlier(tmp_path: Path) -> Iterator[Path]:
    """Version 1 of `model`, which every test here must leave as it is and be alone with."""
    path, done = built(layers(4), tmp_path, block_size="16KiB", optimise=False)
    before = {file.name: file.read_bytes() for file in done.path.iterdir()}
    yield path
    assert [entry.name for entry in done.path.parent.iterdir()] == ["1"]
    assert {file.name: file.read_bytes() for file in done.path.iterdir()} == before
    assert_answers(path, done, feed(), exact=True)


def test_a_file_that_is_no_model(tmp_path: Path, earlier: Path) -> None:
    for content in (b"", b"words", earlier.read_bytes()[:-100]):
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(content)
        with pytest.raises(ModelError):
            built(bad, tmp_path, name="model")
    with pytest.raises(ModelError):
        built(tmp_path / "none.onnx", tmp_path, name="model")


@pytest.mark.parametrize("stage", ["prepare", "write", "check"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error"), MemoryError()])
def test_an_interruption_at_any_stage(tmp_path: Path, earlier: Path, stage: str, error: BaseException) -> None:
    def progress(name: str, done: int, total: int) -> None:
        if name == stage:
            raise error

    with pytest.raises(BuildError if isinstance(error, OSError) else type(error)):
        built(earlier, tmp_path, progress=progress)


def test_a_child_that_is_killed(tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "rehearse", lambda *_: child.call(die, {}))
    with pytest.raises(BuildError, match="signal 9") as caught:
        build(earlier, repository=tmp_path / "engines")
    assert "memory" in caught.value.remedy


def die(_: dict[str, Any]) -> None:
    signal.raise_signal(signal.SIGKILL)


def test_what_a_killed_build_left_is_removed_and_said(
    tmp_path: Path, earlier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = tmp_path / "engines" / "model" / ".build-1-dead"
    leftover.mkdir()
    (leftover / "weights.bin").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, logger="trt_layering"), pytest.raises(KeyboardInterrupt):
        built(earlier, tmp_path, progress=_interrupt)
    assert any(".build-1-dead" in record.getMessage() for record in caplog.records)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# -------------------------------------------------------------------------------------------------------- wrong answers


def scrambled_when_stored(patch: pytest.MonkeyPatch, name: str) -> None:
    """The writer stores other numbers than the model has."""
    real = StoreWriter.add_extent

    def add_extent(self: StoreWriter, tensors: Any) -> int:
        return real(self, [(n, d, s, _reversed(t) if n == name else t) for n, d, s, t in tensors])

    patch.setattr(StoreWriter, "add_extent", add_extent)


def scrambled_when_bound(patch: pytest.MonkeyPatch, name: str) -> None:
    """The chain takes the weights from elsewhere than its engines' files say."""
    real = building.Chain

    def chain(**fields: Any) -> Any:
        made = real(**fields)
        extents = tuple(
            type(extent)(
                offset=extent.offset,
                length=extent.length,
                checksum=extent.checksum,
                tensors=tuple(
                    type(t)(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset + 64, nbytes=t.nbytes)
                    if t.name == name
                    else t
                    for t in extent.tensors
                ),
            )
            for extent in made.extents
        )
        return real(**{**fields, "extents": extents})

    patch.setattr(building, "Chain", chain)


def scrambled_in_the_graph(patch: pytest.MonkeyPatch, name: str) -> None:
    """The builder writes another graph than it was given."""
    real = onnxruntime_builder.write_model

    def write_model(block: Any, path: Path, places: Any) -> None:
        real(block, path, places)
        if name in places and path.name.startswith("block-"):
            proto = onnx.load(path, load_external_data=False)
            for other in proto.graph.node:
                if other.op_type == "Tanh":
                    other.op_type = "Sigmoid"
            onnx.save(proto, path)

    patch.setattr(onnxruntime_builder, "write_model", write_model)


def _reversed(tensor: Any) -> Array:
    return np.ascontiguousarray(tensor.numpy()[::-1])


FAULTS: dict[str, Callable[[pytest.MonkeyPatch, str], None]] = {
    "stored": scrambled_when_stored,
    "bound": scrambled_when_bound,
    "written": scrambled_in_the_graph,
}


@pytest.mark.parametrize("fault", FAULTS)
@BOTH
def test_a_wrong_answer_is_refused_and_names_the_block(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch, fault: str, optimise: bool
) -> None:
    FAULTS[fault](monkeypatch, "w2")
    with pytest.raises(BuildError, match="'y' differs by") as caught:
        built(earlier, tmp_path, block_size="16KiB", optimise=optimise)
    assert "block-002" in caught.value.where
    assert caught.value.remedy


def test_a_wrong_answer_with_everything_in_memory_is_refused(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnxruntime_builder.write_model

    def write_model(block: Any, path: Path, places: Any) -> None:
        real(block, path, places)
        if path.name.startswith("whole-"):
            proto = onnx.load(path, load_external_data=False)
            proto.graph.node[1].op_type = "Sigmoid"
            onnx.save(proto, path)

    monkeypatch.setattr(onnxruntime_builder, "write_model", write_model)
    with pytest.raises(BuildError, match="'y' differs by") as caught:
        built(earlier, tmp_path, block_size="16KiB")
    assert "whole" in caught.value.where


def test_sixteen_bit_activations_that_seams_round_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """ONNX Runtime computes these in 32 bits and, uncut, does not round in between."""
    half = TensorProto.FLOAT16
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float16), f"w{i}") for i in range(3)]
    nodes = [node("MatMul", ["x", "w0"], ["a"]), node("Tanh", ["a"], ["b"]), node("MatMul", ["b", "w1"], ["c"])]
    nodes += [node("Tanh", ["c"], ["d"]), node("MatMul", ["d", "w2"], ["y"])]
    proto = model(nodes, [info("x", half, ["n", 64])], [info("y", half, ["n", 64])], weights)
    with pytest.raises(BuildError, match="'y' differs by") as caught:
        built(proto, tmp_path, block_size="8KiB", optimise=False)
    assert "float32" in caught.value.remedy
    path, whole = built(proto, tmp_path, optimise=False)  # nothing passes between blocks
    assert_answers(path, whole, {"x": rng.standard_normal((3, 64)).astype(np.float16)}, exact=True)


def test_shapes_that_do_not_hold_are_forgotten_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing infers shapes behind ONNX Runtime's own operators: what the file declares is all there is."""
    nodes = [node("MatMul", ["x", "w0"], ["h"]), node("Tanh", ["h"], ["t"])]
    nodes.append(helper.make_node("FusedMatMul", ["t", "w1"], ["y"], domain="com.microsoft"))
    ends = [info("x", FLOAT, [1, 64])], [info("y", FLOAT, [2, 64])]
    proto = model(nodes, *ends, [weight("w0", 64, 64), weight("w1", 64, 64)])
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path, done = built(proto, tmp_path, block_size="16KiB", optimise=False)
    assert len(done.manifest.blocks) == 2
    assert done.manifest.blocks[1].outputs[0].shape is None
    assert "shapes do not hold" in caplog.text
    assert_answers(path, done, feed(1), exact=True)


def test_a_wrong_answer_is_refused_by_child_processes_too(
    tmp_path: Path, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scrambled_when_stored(monkeypatch, "w2")
    with pytest.raises(BuildError, match="'y' differs by"):
        build(earlier, repository=tmp_path / "engines", block_size="16KiB")
