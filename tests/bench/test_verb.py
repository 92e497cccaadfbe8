"""`trt-layering bench` as people call it: on a small chain with real processes, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import chains
from tests.bench import found
from tests.bench.test_figures import assert_picture
from trt_layering import building, cli
from trt_layering.bench import command
from trt_layering.runtime.footprint import footprint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chains.saved(chains.layers(16, width=256), tmp_path_factory.mktemp("bench") / "layers.onnx")


@pytest.fixture(scope="module")
def repository(model: Path) -> Path:
    """Where the chain "layers" of eight blocks of 512 KiB is built."""
    folder = model.parent / "engines"
    with chains.in_this_process():
        building.build(model, name="layers", repository=folder, block_size="512KiB", shapes={"x": (3, 256)})
    return folder


def as_json(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    status = cli.main(["bench", *map(str, words), "--json"])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return status, json.loads(out)


def test_a_small_chain_at_two_budgets(
    capfd: pytest.CaptureFixture[str], model: Path, repository: Path, tmp_path: Path
) -> None:
    floor = footprint("layers", repository=repository).floor
    status, told = as_json(
        capfd, "layers", "--repository", repository, "--onnx", model, "--budgets", f"{floor},64MiB", "--iterations", 3,
        "--rounds", 1, "--against", "double,sequential,memory", "--output", tmp_path / "new" / "folder",
        "--plot", tmp_path / "curve.svg",
    )  # fmt: skip
    assert (status, told.get("error")) == (0, None)
    assert told == json.loads((tmp_path / "new" / "folder" / "bench.json").read_text())
    by = {(point["subject"], point["budget_bytes"]): point for point in told["points"]}
    assert set(by) == {(n, b) for n in ("chain", "sequential", "double") for b in (floor, 64 << 20)} | {
        ("memory", None)
    }
    for point in told["points"]:
        assert 0 < point["min_ms"] <= point["median_ms"] <= point["p99_ms"]
        assert point["ratio"] > 0
    assert by["chain", floor]["bytes_read_per_inference"] == pytest.approx(4 << 20, rel=0.5)
    assert by["chain", 64 << 20]["bytes_read_per_inference"] == 0
    for path in (*(tmp_path / "new" / "folder").glob("*.[sp]*g"), tmp_path / "curve.svg"):
        assert_picture(path)
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    pictures = ["curve.png", "curve.svg", "timeline.png", "timeline.svg"]
    assert names == ["bench.json", *pictures]
    timeline = told["timeline"]
    executed = [(event["sweep"], event["block"]) for event in timeline["events"] if event["kind"] == "execute"]
    assert executed == [(sweep, block) for sweep in (0, 1) for block in range(timeline["blocks"])]
    assert any(event["kind"] == "read" for event in timeline["events"])
    assert all(0 <= event["begin"] <= event["end"] <= timeline["end"] for event in timeline["events"])
    assert all(0 <= held <= timeline["arena_bytes"] for _, held in timeline["arena"])


def test_without_the_uncut_model_its_subjects_are_left_out_in_words(
    capfd: pytest.CaptureFixture[str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "sweep", lambda request, _: asked.append(request) or found.result(found.everything()))
    assert cli.main(["bench", "layers", "--repository", str(repository)]) == 0
    out = capfd.readouterr().out
    assert asked[0].against == ["sequential", "double", "resident"]
    assert len(asked[0].budgets) >= 2
    assert out.count("--onnx does not name the uncut model") == 2
    assert "the chain with a double buffer" in out


def test_a_deployment_names_the_model_and_the_reads(
    capfd: pytest.CaptureFixture[str], model: Path, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "sweep", lambda request, _: asked.append(request) or found.result(found.everything()))
    file = tmp_path / "deploy.yaml"
    file.write_text(
        f"repository: {repository}\nloader: {{direct_io: never}}\nmodels: [{{name: layers, onnx: {model}}}]\n"
    )
    assert as_json(capfd, file)[0] == 0
    assert (asked[0].model, asked[0].loader["direct_io"]) == (model, "never")
    assert asked[0].against == list(command.AGAINST)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--budgets", "1KiB"], 3, "under the floor"),
        (["--budgets", "64MiB,1KiB"], 3, "under the floor"),
        (["--budgets", "plenty"], 2, "'plenty' is not a size"),
        (["--budgets", ""], 2, "is not a size"),
        (["--budgets", "64MiB,,65MiB"], 2, "is not a size"),
        (["--budgets", "-5"], 2, ""),
        (["--iterations", "0"], 2, "must be 1 or more"),
        (["--rounds", "-1"], 2, "must be 1 or more"),
        (["--iterations", "many"], 2, "invalid int"),
        (["--against", "mmap"], 2, "'mmap' is nothing to compare with"),
        (["--against", "memory"], 2, "needs the uncut model"),
        (["--plot", "curve.pdf"], 2, "cannot draw into 'curve.pdf'"),
        (["--plot", "nowhere/curve.svg"], 2, "there is no folder"),
        (["--output", "/dev/null"], 2, "is no folder"),
        (["--onnx", "package:none/none.onnx"], 1, "no installed package"),
        (["--shape", "y:3x256"], 2, "no input 'y'"),
        (["--budget", "64MiB"], 2, "unrecognized"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    capfd: pytest.CaptureFixture[str], repository: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
    status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "sweep", lambda *_: pytest.fail("it was measured"))
    got, told = as_json(capfd, "layers", "--repository", repository, *words)
    assert got == status
    assert said in told["error"]["what"]


def test_no_chain(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert as_json(capfd, "none", "--repository", tmp_path)[0] == 4


def test_without_matplotlib_the_numbers_are_written_all_the_same(
    capfd: pytest.CaptureFixture[str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "sweep", lambda *_: found.result(found.everything()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, told = as_json(capfd, "layers", "--repository", repository, "--output", tmp_path)
    assert status == 0
    assert any("pip install" in note for note in told["notes"])
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert as_json(capfd, "layers", "--repository", repository, "--plot", tmp_path / "c.svg")[0] == 1


def test_a_folder_that_takes_no_files(
    capfd: pytest.CaptureFixture[str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "sweep", lambda *_: found.result(found.everything()))
    (tmp_path / "bench.json").mkdir()
    status, told = as_json(capfd, "layers", "--repository", repository, "--output", tmp_path)
    assert status == 1
    assert told["error"]["where"].endswith("bench.json")


def test_nothing_is_left_in_the_repository(repository: Path) -> None:
    assert os.listdir(repository) == ["layers"]
