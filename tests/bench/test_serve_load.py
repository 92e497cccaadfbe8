"""The bench's command line against services that it starts, and those it cannot start."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import checkout
from tests.chains import in_this_process, layers, saved
from trt_layering.building import build

pytest.importorskip("tritonclient.http", reason="NVIDIA's client is not installed; install the extra `test`")
pytest.importorskip("uvicorn", reason="the service's libraries are not installed; install the extra `serve`")
MODULES = ("serve_load", "serve_cases", "serving", "load", "chains", "models", "measure")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(checkout.ROOT / "scripts" / "bench"))
        yield importlib.import_module("serve_load")
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    path = saved(layers(4, batch="n"), folder / "layers.onnx")
    with in_this_process():
        for name in ("one", "two"):
            build(path, name=name, repository=folder / "engines", block_size="16KiB", optimise=False)
    return folder


@pytest.fixture
def config(bench: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, the first asked three times as often."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(checkout.ROOT))
    monkeypatch.setattr(bench.serving.chains, "REPOSITORY", repository / "engines")
    entries = [
        {"name": name, "onnx": str(repository / "layers.onnx"), "shapes": {"x": "3x64"}, "priority": weight,
         "deadline": "1us"}
        for name, weight in (("one", 3), ("two", 1))
    ]  # fmt: skip
    path: Path = bench.serving.write_config(tmp_path / "two.yaml", entries, 1 << 30)
    return path


def drive(bench: Any, config: Path, *options: str) -> int:
    arguments = ["--json", "drive", str(config), "--serve", "--rate", "50", "--count", "40", "--workers", "2", *options]
    return int(bench.main(arguments))


def test_a_service_that_answers_rightly(bench, config, capsys):
    assert drive(bench, config, "--compare") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["held"]
    assert found["all"]["answered"] == found["all"]["misses"] == 40
    assert (found["all"]["errors"], found["all"]["wrong"]) == ({}, 0)
    assert found["models"]["one"]["requests"] > found["models"]["two"]["requests"] > 0
    assert 0 < found["all"]["p50"] <= found["all"]["p99"] <= found["all"]["max"]
    assert found["waves"].keys() == {"one", "two"}
    assert found["peak_bytes"] > 1 << 20


def test_wrong_answers_are_found(bench, config, tmp_path, capsys):
    for name in ("one", "two"):
        np.savez(tmp_path / f"{name}.npz", **{f"out/{number}/y": np.ones((3, 64), np.float32) for number in range(4)})
    assert drive(bench, config, "--answers", str(tmp_path)) == 1
    assert json.loads(capsys.readouterr().out)["all"]["wrong"] == 40


def test_tables_for_people(bench, config, capsys):
    assert bench.main(["drive", str(config), "--serve", "--seconds", "60", "--count", "5", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "p99 ms" in out
    assert "peak memory of the service" in out


def test_a_deployment_that_makes_no_sense(bench, config, capsys):
    config.write_text(config.read_text().replace("name: two", "name: one"))
    assert bench.main(["drive", str(config), "--serve"]) == 2
    assert "two models are called 'one'" in capsys.readouterr().err


def test_a_service_that_ends_at_once(bench, config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert bench.main(["drive", str(config), "--serve", "--seconds", "1"]) == 1
    assert "the service ended with" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["drive"], ["drive", "x", "--rate", "0"], ["drive", "x", "--weight", "one"], ["trio", "--minutes", "-1"],
    ["drive", "x", "--serve", "--pid", "1"], ["other"],
])  # fmt: skip
def test_usage(bench, arguments):
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
