"""The check by NVIDIA's parser, without NVIDIA's parser: what it asks, and what it says where something goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from tests import checkout
from tests.chains import layers, saved
from tests.test_scripts import stand_in
from trt_layering.backends.tensorrt import streamable as module
from trt_layering.backends.tensorrt.streamable import streamable

sys.path.append(str(checkout.ROOT / "scripts"))
import trt_parser_environment
import trt_parser_positions

SCRIPT = checkout.ROOT / "scripts" / "check_trt_parser.py"
TAKEN = {"stage": "", "words": "", "inputs": 2, "layers": 3, "plan": 4}


def networks() -> list[onnx.ModelProto]:
    return [trt_parser_positions.network(*text) for text in trt_parser_positions._NETWORKS.values()]


def test_every_position_whose_weights_are_streamed_is_asked_about() -> None:
    asked = {
        (step.op_type, index)
        for proto in networks()
        for step in proto.graph.node
        for index, name in enumerate(step.input)
        if name.startswith("w")
    }
    for op, indices in module._POSITIONS.items():
        wanted = (0, 1) if indices is module._ANY else indices
        assert {(op, index) for index in wanted} <= asked
    assert {op for op, _ in asked} == module._POSITIONS.keys()


def test_the_weights_that_are_asked_about_are_streamed() -> None:
    for proto in networks():
        weights = [value for value in proto.graph.input if value.name.startswith("w")]
        for value in weights:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            proto.graph.input.remove(value)
            proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), value.name))
        several = {tensor.name for tensor in proto.graph.initializer if tensor.name[0] == "w" and tensor.dims != [1]}
        assert several <= streamable(ir.from_proto(proto).graph).keys()


def check(environment: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(checkout.ROOT), "PATH": path or os.environ["PATH"]}
    command = [sys.executable, str(SCRIPT), "--environment", str(environment), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One that takes everything but files with "refused" in their names, and dies of those with "fatal"."""
    folder = tmp_path / "environment"
    refused = {**TAKEN, "stage": "parse", "words": "no such operator"}
    stand_in(
        folder / "venv" / "bin" / "python",
        'while read -r line; do case "$line" in\n'
        '*fatal*) echo "it hurts" >&2; exit 7;;\n'
        f"*refused*) echo '{json.dumps(refused)}';;\n"
        f"*) echo '{json.dumps(TAKEN)}';;\nesac; done",
    )
    (folder / "ready").write_text(trt_parser_environment._mark())
    return folder


def test_each_file_has_a_line_and_one_that_kills_the_library_is_only_one(environment: Path, tmp_path: Path) -> None:
    files = [saved(layers(1), tmp_path / f"{name}.onnx") for name in ("good", "fatal", "refused", "better")]
    done = check(environment, *map(str, files))
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "good.onnx: taken, 2 inputs, 3 layers" in lines[0]
    assert "fatal.onnx: REFUSED" in lines[1]
    assert "status 7: it hurts" in lines[1]
    assert "refused.onnx: REFUSED by the parse: no such operator" in lines[2]
    assert "better.onnx: taken" in lines[3]
    assert lines[4].startswith("2 of 4 taken")
    assert check(environment, str(files[0])).returncode == 0


def test_a_model_is_asked_about_block_by_block_in_two_forms(environment: Path, tmp_path: Path) -> None:
    path = saved(layers(4), tmp_path / "m.onnx")
    done = check(
        environment, "--model", str(path), "--block-size", "16KiB", "--shape", "x:1x64", "--max-shape", "x:9x64"
    )
    assert done.returncode == 0, done.stderr
    assert "m.onnx: 4 blocks, 1 different" in done.stdout
    assert "2 of 2 taken" in done.stdout


@pytest.mark.parametrize("words", [(), ("nowhere.onnx",), ("--model", "nowhere.onnx"), ("--model", str(SCRIPT))])
def test_what_cannot_be_checked_is_said(environment: Path, words: tuple[str, ...]) -> None:
    done = check(environment, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "to do:" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_compiler(tmp_path: Path) -> None:
    done = check(tmp_path / "new", "--positions", path="/nowhere")
    assert done.returncode == 2
    assert "apt install gcc" in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_python_without_the_packages() -> None:
    command = [sys.executable, "-S", str(SCRIPT), "x.onnx"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no onnx" in done.stderr
    assert "to do:" in done.stderr
