"""Each command on a TensorRT chain, on the emulated GPU: it works, and what is told is of this chain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chains import layers, saved
from tests.emulation.install import environment


def command(*words: object, status: int = 0, version: str = "11.4") -> Any:
    """What the command tells with --json."""
    line = [sys.executable, "-m", "trt_layering", *map(str, words), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(tensorrt=version), timeout=200)
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(4, width=256), tmp_path_factory.mktemp("model") / "m.onnx")


@pytest.fixture(scope="module")
def repository(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the chain `m`, of the binding that streams its weights into shared engines."""
    home = tmp_path_factory.mktemp("repository")
    told = command(
        "build", model, "--name", "m", "--repository", home, "--backend", "tensorrt", "--binding", "inputs",
        "--placement", "staged", "--block-size", "256KiB", "--shape", "x:3x256",
    )  # fmt: skip
    assert told["models"][0]["backend"] == "tensorrt"
    return home


def test_every_command_takes_the_chain(model: Path, repository: Path, tmp_path: Path) -> None:
    home = ("--repository", repository)
    chain = command("inspect", "m", *home)
    assert chain["tensorrt"]["binding"] == "inputs"
    assert len({block["file"] for block in chain["blocks"]}) == 1
    floor = chain["floor_bytes"]
    ran = command("run", "m", *home, "--budget", floor, "--iterations", 2, "--trace", tmp_path / "t.json")
    assert ran["outputs"]["y"]["shape"] == [3, 256]  # the usual shape, of which none was given
    assert ran["stats"]["mode"] != "resident"
    assert ran["stats"]["device_bytes"] > 0
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"read block-000", "block-000", "loaded"} <= names
    waves = command("run", "m", *home, "--budget", floor + (1 << 20), "--wave", 3, "--iterations", 6)
    assert waves["iterations"] == 6
    assert command("verify", "m", *home, "--onnx", model, "--budget", floor)["passed"]
    assert command("schedule", "m", *home, "--budget", floor)["fits"]
    command("schedule", "m", *home, "--budget", floor - 4096, status=3)
    assert len(command("profile", "m", *home)["execute_seconds"]) == 4
    assert {one["name"] for one in command("doctor", *home)["findings"]} >= {"TensorRT backend", "weights' placement"}


def test_a_bench_has_all_its_subjects(model: Path, repository: Path, tmp_path: Path) -> None:
    floor = command("inspect", "m", "--repository", repository)["floor_bytes"]
    told = command(
        "bench", "m", "--repository", repository, "--onnx", model, "--budgets", floor, "--iterations", 1,
        "--rounds", 1, "--output", tmp_path / "bench", "--against", "sequential,double,memory,resident",
    )  # fmt: skip
    assert {point["subject"] for point in told["points"]} == {"chain", "sequential", "double", "memory", "resident"}
    assert any("on the processor, not on the GPU" in note for note in told["notes"])
    chain = next(point for point in told["points"] if point["subject"] == "chain")
    assert chain["peak_bytes"] > told["weights_bytes"] // 4  # of the GPU, at least a block


def test_what_is_not_for_tensorrt_is_refused_in_words(model: Path, tmp_path: Path) -> None:
    words = ("build", model, "--repository", tmp_path, "--backend", "tensorrt", "--shape", "x:3x256")
    for more, remedy in ((["--no-optimise"], "onnxruntime"), (["--precision", "fp16", "--weights", "fp16"], "weights")):
        assert remedy in command(*words, *more, status=2)["error"]["remedy"]


def test_a_real_model_in_float16(tmp_path: Path, real_model: Callable[[str], Path]) -> None:
    model = real_model("pp_cls")
    words = ("--repository", tmp_path, "--backend", "tensorrt", "--binding", "inputs", "--placement", "staged")
    words += ("--block-size", "64KiB", "--shape", "x:1x3x48x192")
    told = command("build", model, "--name", "fp16", "--precision", "fp16", *words)["models"][0]
    assert told["max_abs_diff"] <= 5e-2 * told["max_abs_output"]
    assert told["weights_bytes"] < 0.55 * model.stat().st_size
    chain = command("inspect", "fp16", "--repository", tmp_path)
    seams = [value["dtype"] for block in chain["blocks"][:-1] for value in block["outputs"]]
    assert seams
    assert seams.count("float16") > len(seams) / 2
    assert [one["block"] for one in chain["halved"]] == [block["name"] for block in chain["blocks"]]
    assert sum(one["halved"] for one in chain["halved"]) > sum(len(one["kept"]) for one in chain["halved"])
    assert command("verify", "fp16", "--repository", tmp_path, "--onnx", model)["passed"]
