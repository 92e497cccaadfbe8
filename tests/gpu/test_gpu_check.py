"""The checks for a GPU, on the emulated one: the report, and what is said where something is missing or wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.install import environment, installed
from tests.gpu.__main__ import main
from tests.gpu.cuda_check import titles

ROOT = Path(__file__).resolve().parents[2]


def _carry_out(path: Path, **switches: str) -> tuple[int, Any]:
    with installed(**switches) as machine:
        status = main(["--small", "--report", str(path)])
        assert not machine.allocations()
        machine.assert_clean()
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("integrated", ["0", "1"])
def test_everything_is_well_on_the_emulated_gpu(tmp_path: Path, integrated: str) -> None:
    status, report = _carry_out(tmp_path / "report.json", integrated=integrated, seed="7")
    assert (status, report["ok"], report["emulated"], report["schema"]) == (0, True, True, 1)
    assert report["machine"]["integrated"] == (integrated == "1")
    (part,) = [part for part in report["parts"] if part["name"] == "cuda"]
    assert [check["name"] for check in part["checks"]] == list(titles().values())
    assert all(check["ok"] for check in part["checks"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_what_is_wrong_is_told_and_the_other_checks_go_on(tmp_path: Path) -> None:
    status, report = _carry_out(tmp_path / "report.json", fail="cuMemcpyDtoDAsync=an illegal instruction")
    assert (status, report["ok"]) == (1, False)
    found = {check["name"]: check for check in report["parts"][0]["checks"]}
    assert "an illegal instruction" in found["overlap"]["words"]
    assert found["threads"]["ok"]


def _script(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/gpu_check.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env | {"PYTHON": sys.executable}, timeout=120)


def test_the_script_writes_a_report(tmp_path: Path) -> None:
    result = _script("--small", "--report", str(tmp_path / "r.json"), env=environment())
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "r.json").read_text())["ok"]


def test_a_dry_run_does_nothing(tmp_path: Path) -> None:
    result = _script("--dry-run", "--report", str(tmp_path / "r.json"), env=dict(os.environ))
    assert result.returncode == 0
    assert "cuda: three stages" in result.stdout
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    result = _script("--report", str(tmp_path / "r.json"), env=environment(cuinit="100"))
    assert result.returncode == 1
    assert "no CUDA-capable device" in result.stderr
    assert "to do:" in result.stderr
    assert not list(tmp_path.iterdir())
