"""Verification finds what differs and passes what does not, whatever the outputs are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from polygraphy.logger import logger as polygraphy_logger

from tests.chains import budgets, feed, in_this_process, layers, saved
from trt_layering.building import Built, build
from trt_layering.errors import InputError, ModelError, NotBuiltError
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.verification import verify

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(4), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def exact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    with in_this_process():
        return build(source, repository=tmp_path_factory.mktemp("exact"), block_size="16KiB", optimise=False)


@pytest.fixture(scope="module")
def optimised(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    with in_this_process():
        return build(source, repository=tmp_path_factory.mktemp("optimised"), block_size="16KiB")


def where(built: Built) -> dict[str, Any]:
    return {"name": built.path.parent.name, "repository": built.path.parent.parent}


@pytest.mark.parametrize("mode", ["floor", "middle", "resident"])
def test_a_chain_passes_beside_its_model(source: Path, exact: Built, optimised: Built, mode: str) -> None:
    result = verify(**where(exact), onnx=source, budget=budgets(exact)[mode], tolerance=0.0)
    assert (result.passed, result.max_abs_diff, result.per_output) == (True, 0.0, {"y": 0.0})
    assert 0 < result.max_abs_output <= 1
    result = verify(**where(optimised), onnx=source, budget=budgets(optimised)[mode])
    assert result.passed
    assert result.max_abs_diff <= 1e-5 * result.max_abs_output


def test_other_inputs_other_shapes_other_seeds(source: Path, exact: Built) -> None:
    first = verify(**where(exact), onnx=source, feeds=feed(7))
    second = verify(**where(exact), onnx=source, shapes={"x": (7, 64)})
    third = verify(**where(exact), onnx=source, shapes={"x": (7, 64)}, seed=1)
    assert first.passed
    assert second.passed
    assert third.passed
    assert len({first.max_abs_output, second.max_abs_output, third.max_abs_output}) == 3


def test_another_model_does_not_pass(tmp_path: Path, exact: Built) -> None:
    other = saved(layers(4, seed=1), tmp_path / "other.onnx")
    result = verify(**where(exact), onnx=other)
    assert not result.passed
    assert result.max_abs_diff > 0.01
    assert verify(**where(exact), onnx=other, tolerance=10.0).passed


def test_a_model_with_other_outputs_or_inputs_is_refused(tmp_path: Path, exact: Built) -> None:
    renamed = layers(4)
    renamed.graph.node[-1].output[0] = renamed.graph.output[0].name = "z"
    with pytest.raises(ModelError, match="only the chain has the output 'y'") as caught:
        verify(**where(exact), onnx=saved(renamed, tmp_path / "renamed.onnx"))
    assert "layers.onnx" in caught.value.remedy
    fed = layers(4)
    fed.graph.node[0].input[0] = fed.graph.input[0].name = "input"
    with pytest.raises(ModelError, match="only the model has the input 'input'"):
        verify(**where(exact), onnx=saved(fed, tmp_path / "fed.onnx"))
    wider = layers(4, width=32)
    with pytest.raises(ModelError, match="does not run as the chain did") as caught:
        verify(**where(exact), onnx=saved(wider, tmp_path / "wider.onnx"))
    assert "layers.onnx" in caught.value.remedy


@pytest.mark.parametrize("content", [None, b"", b"words"])
def test_a_model_that_is_none_is_refused_before_the_chain_runs(
    tmp_path: Path, exact: Built, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr("trt_layering.verification.open_chain", lambda *_, **__: pytest.fail("it was opened"))
    if content is not None:
        (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        verify(**where(exact), onnx=tmp_path / "model.onnx")
    assert str(tmp_path / "model.onnx") in caught.value.where


def test_the_version_and_the_loader_are_those_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 is of the model, version 2 of another one."""
    from trt_layering import verification

    place = {"name": "chain", "repository": tmp_path}
    with in_this_process():
        for path in (source, saved(layers(4, seed=1), tmp_path / "other.onnx")):
            build(path, **place)
    assert verify(**place, onnx=source, version=1).passed
    assert not verify(**place, onnx=source).passed
    real, options = verification.open_chain, LoaderOptions(threads=3, verify="always")
    asked: list[object] = []
    monkeypatch.setattr(verification, "open_chain", lambda *a, **k: asked.append(k["loader"]) or real(*a, **k))
    assert verify(**place, onnx=source, version=1, loader=options).passed
    assert asked == [options]


def test_what_is_allowed_follows_the_build(source: Path, tmp_path: Path, exact: Built, optimised: Built) -> None:
    """A model of which one weight is a few millionths larger: the exact chain was promised bit for bit."""
    nudged = onnx.load(source)
    weight = nudged.graph.initializer[1]
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1 + 2e-6), weight.name))
    other = saved(nudged, tmp_path / "nudged.onnx")
    assert (exact.manifest.check.tolerance, optimised.manifest.check.tolerance) == (0.0, 1e-5)
    result = verify(**where(exact), onnx=other)
    assert not result.passed
    assert 0 < result.max_abs_diff <= 1e-5 * result.max_abs_output
    assert verify(**where(exact), onnx=other, tolerance=1e-5).passed
    assert verify(**where(optimised), onnx=other).passed
    assert not verify(**where(optimised), onnx=other, tolerance=0.0).passed


def test_each_output_by_its_own_measure(tmp_path: Path) -> None:
    """The small output is a hundredth off, which is nothing beside the large one."""

    def model(part: float) -> onnx.ModelProto:
        text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] large, float[n, 4] small)
            <float one = {{1e6}}, float part = {{{part}}}> {{ large = Mul(x, one)  small = Mul(x, part) }}"""
        return parser.parse_model(text)

    with in_this_process():
        built = build(saved(model(1e-3), tmp_path / "m.onnx"), repository=tmp_path)
    result = verify(**where(built), onnx=saved(model(1.01e-3), tmp_path / "other.onnx"))
    assert not result.passed
    assert result.per_output["large"] == 0.0
    assert 0 < result.max_abs_diff < 1e-5 * result.max_abs_output
    assert verify(**where(built), onnx=tmp_path / "other.onnx", tolerance=0.02).passed


def test_nothing_is_printed(
    source: Path, exact: Built, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Polygraphy's log is silent, and as it was afterwards."""
    monkeypatch.setattr(polygraphy_logger, "COLORED_MODULE_PRESENT", None)
    before = polygraphy_logger.G_LOGGER.module_severity.get()
    assert verify(**where(exact), onnx=source).passed
    assert capfd.readouterr() == ("", "")
    assert polygraphy_logger.G_LOGGER.module_severity.get() == before


def test_what_is_not_there_or_does_not_fit(source: Path, exact: Built) -> None:
    with pytest.raises(NotBuiltError):
        verify("nobody", onnx=source, repository=exact.path.parent.parent)
    with pytest.raises(InputError):
        verify(**where(exact), onnx=source, feeds={"x": np.zeros((1, 5), np.float32)})


MODELS = {
    "truth and integers": """(float[n, 4] x) => (bool[n, 4] a, int64[n, 4] b)
        { a = Greater(x, x)  b = Cast <to = 7> (x) }""",
    "text": """(float[n, 4] x) => (string[n, 4] a, float[n, 4] b)
        { b = Neg(x)  a = Cast <to = 8> (b) }""",
    "what is not finite": """(float[n, 4] x) => (float[n, 4] a, float[n, 4] b)
        { z = Sub(x, x)  a = Div(x, z)  b = Log(x) }""",
    "nothing but zeros": """(float[n, 4] x) => (float[n, 4] a)
        { a = Sub(x, x) }""",
    "an output that is an input": """(float[n, 4] x) => (float[n, 4] x, float[n, 4] a)
        { a = Neg(x) }""",
    "half precision": """(float[n, 4] x) => (float16[n, 4] a)
        { a = Cast <to = 10> (x) }""",
}


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("tolerance", [0.0, 1e-5])
def test_outputs_of_every_kind(tmp_path: Path, what: str, tolerance: float) -> None:
    path = saved(parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {MODELS[what]}'), tmp_path / "m.onnx")
    with in_this_process():
        done = build(path, repository=tmp_path, optimise=False)
    result = verify(**where(done), onnx=path, tolerance=tolerance)
    assert (result.passed, result.max_abs_diff) == (True, 0.0)


def test_an_empty_output(source: Path, exact: Built) -> None:
    result = verify(**where(exact), onnx=source, feeds={"x": np.zeros((0, 64), np.float32)})
    assert (result.passed, result.max_abs_diff, result.max_abs_output) == (True, 0.0, 0.0)
