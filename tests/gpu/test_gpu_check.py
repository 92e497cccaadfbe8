"""The checks for a GPU, on the emulated one: the report, and what is said where something is missing or wrong."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.install import environment, installed
from tests.gpu import report, tensorrt_check
from tests.gpu.__main__ import main
from tests.gpu.cuda_check import titles
from trt_layering.backends.tensorrt import present

ROOT = Path(__file__).resolve().parents[2]


def _carry_out(path: Path, **switches: str) -> tuple[int, Any]:
    with installed(**switches) as machine:
        status = main(["--small", "--only", "cuda", "--report", str(path)])
        assert not machine.allocations()
        machine.assert_clean()
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("integrated", ["0", "1"])
def test_everything_is_well_on_the_emulated_gpu(tmp_path: Path, integrated: str) -> None:
    status, found = _carry_out(tmp_path / "report.json", integrated=integrated, seed="7")
    assert (status, found["ok"], found["emulated"], found["schema"]) == (0, True, True, 2)
    assert found["machine"]["integrated"] == (integrated == "1")
    (part,) = [part for part in found["parts"] if part["name"] == "cuda"]
    assert [check["name"] for check in part["checks"]] == list(titles().values())
    assert all(check["ok"] for check in part["checks"])
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_what_is_wrong_is_told_and_the_other_checks_go_on(tmp_path: Path) -> None:
    status, found = _carry_out(tmp_path / "report.json", fail="cuMemcpyDtoDAsync=an illegal instruction")
    assert (status, found["ok"]) == (1, False)
    checks = {check["name"]: check for check in found["parts"][0]["checks"]}
    assert "an illegal instruction" in checks["overlap"]["words"]
    assert checks["threads"]["ok"]


def _script(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/gpu_check.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env | {"PYTHON": sys.executable}, timeout=120)


def test_chains_of_tensorrt_are_checked_and_the_report_tells_nobody_s_name(tmp_path: Path) -> None:
    titles = ("layers with refit", "layers with swap", "layers in fp16")
    chosen = [word for title in titles for word in ("--check", title)]
    result = _script("--small", *chosen, "--report", str(tmp_path / "r.json"), env=environment(tensorrt="11.4"))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "r.json").read_text()
    found = json.loads(text)
    assert (found["ok"], found["emulated"]) == (True, True)
    assert not {str(tmp_path), str(ROOT), platform.node()} & set(re.findall(r'[^"\s]+', text))
    (part,) = found["parts"]
    refit, swap, fp16 = (check["numbers"] for check in part["checks"])
    assert (refit["plans"], refit["blocks"], swap["plans"]) == (1, 2, 2)
    assert min(refit["bind_seconds"], swap["bind_seconds"]) > 0
    assert set(swap["budgets"]) == {"floor", "middle", "all"}
    assert {
        "open_seconds",
        "first_run_seconds",
        "device_bytes",
        "budget_bytes",
        "both_seconds",
        "max_rel_diff",
    } <= swap["budgets"]["floor"].keys()
    assert 0 < fp16["budgets"]["middle"]["max_rel_diff"] < 5e-2
    assert fp16["weights_bytes"] < 0.6 * refit["weights_bytes"]
    rows = [line for line in result.stdout.splitlines() if line.startswith("tensorrt ")]
    assert [" ok " in row and "MiB" in row for row in rows] == [True] * 3


def test_without_tensorrt_that_part_is_not_checked_and_the_other_is(tmp_path: Path) -> None:
    env = environment(tensorrt="10.3")
    del env["TRT_LAYERING_ANY_NUMPY"]
    result = _script("--small", "--report", str(tmp_path / "r.json"), env=env)
    assert result.returncode == 0, result.stderr
    cuda, tensorrt = json.loads((tmp_path / "r.json").read_text())["parts"]
    assert cuda["ok"]
    assert tensorrt["checks"] == []
    assert "numpy" in tensorrt["lacks"]
    assert "not checked" in result.stdout


def test_a_check_that_does_not_end_is_stopped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present, "missing", lambda: None)
    monkeypatch.setattr(tensorrt_check, "_LIMIT", 0.01)
    title = tensorrt_check.titles()[0]
    late = tensorrt_check.part([title], tmp_path, True, time.monotonic() + 100, print)
    never = tensorrt_check.part([title], tmp_path, True, time.monotonic(), print)
    assert [late.ok, never.ok] == [False, False]
    assert "was stopped" in late.checks[0].words
    assert f"--check '{title}'" in never.checks[0].to_do
    assert "to do: run it again" in report.table([late])[-1]


def test_what_a_report_says_of_files_names_no_folder_of_the_machine() -> None:
    said = f'File "/home/ann/work/x.py", line 3: {ROOT}/tests/gpu/models.py: cannot open /home/ann: 1/2 of a/b'
    assert report.private({"a": [said]}) == {
        "a": ['File "…/x.py", line 3: tests/gpu/models.py: cannot open …/ann: 1/2 of a/b']
    }


def test_a_dry_run_does_nothing(tmp_path: Path) -> None:
    result = _script("--dry-run", "--report", str(tmp_path / "r.json"), env=dict(os.environ))
    assert result.returncode == 0
    assert "cuda: three stages" in result.stdout
    assert "tensorrt: layers with refit" in result.stdout
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    result = _script("--report", str(tmp_path / "r.json"), env=environment(cuinit="100"))
    assert result.returncode == 1
    assert "no CUDA-capable device" in result.stderr
    assert "to do:" in result.stderr
    assert not list(tmp_path.iterdir())
