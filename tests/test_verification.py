"""Verification finds what differs and passes what does not, whatever the outputs are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from tests.chains import budgets, feed, in_this_process, layers, saved
from trt_layering.building import Built, build
from trt_layering.errors import BackendError, InputError, ModelError, NotBuiltError
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
    with pytest.raises(ModelError, match="output 'y'") as caught:
        verify(**where(exact), onnx=saved(renamed, tmp_path / "renamed.onnx"))
    assert "layers.onnx" in caught.value.remedy
    fed = layers(4)
    fed.graph.node[0].input[0] = fed.graph.input[0].name = "input"
    with pytest.raises((ModelError, BackendError)):
        verify(**where(exact), onnx=saved(fed, tmp_path / "fed.onnx"))
    for content in (b"", b"words"):
        (tmp_path / "words.onnx").write_bytes(content)
        with pytest.raises((ModelError, BackendError)):
            verify(**where(exact), onnx=tmp_path / "words.onnx")
    with pytest.raises((ModelError, BackendError)):
        verify(**where(exact), onnx=tmp_path / "none.onnx")


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
