"""All models of a deployment: built once, built again for a reason, one that fails, and interrupted and resumed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

from tests import checkout
from tests.chains import in_this_process, layers, saved
from trt_layering import building, cli, deploying
from trt_layering.backends.onnxruntime.builder import OnnxRuntimeBuilder
from trt_layering.config import Model, Size
from trt_layering.errors import BuildError
from trt_layering.interrupts import interruptible
from trt_layering.terminal import Steps

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

SCRIPT = checkout.ROOT / "scripts" / "build-engines"


@pytest.fixture
def models(tmp_path: Path) -> list[Model]:
    files = [saved(layers(2, seed=seed), tmp_path / f"{name}.onnx") for seed, name in enumerate("abc")]
    return [Model(name=file.stem, onnx=str(file), block_size=Size(16 << 10)) for file in files]


class Builds:
    """`build_all` in this process, and what it told; `at` may raise before a stage of a model's build."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.lines: list[str] = []
        self.at: dict[tuple[str, str], BaseException] = {}

    def __call__(self, models: list[Model]) -> list[tuple[str, str, int | None]]:
        self.lines = []
        with in_this_process():
            self.outcomes = deploying.build_all(models, self.repository, self._progress, self.lines.append)
        return [(one.name, one.state, one.version) for one in self.outcomes]

    def _progress(self, name: str) -> Any:
        def step(stage: str, done: int, total: int) -> None:
            if (name, stage) in self.at:
                raise self.at.pop((name, stage))

        return nullcontext(step)


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    return Builds(tmp_path / "engines")


def test_all_are_built_once(builds: Builds, models: list[Model]) -> None:
    assert builds(models) == [("a", "built", 1), ("b", "built", 1), ("c", "built", 1)]
    assert builds.lines[0] == "a: building, since there is no finished version"
    assert builds(models) == [("a", "up to date", 1), ("b", "up to date", 1), ("c", "up to date", 1)]
    assert builds.lines == [f"{name}: up to date, version 1" for name in "abc"]
    assert deploying.told(builds.outcomes).status == 0


def test_one_that_fails_stops_no_other(builds: Builds, models: list[Model], tmp_path: Path) -> None:
    Path(models[1].onnx).write_bytes(b"no model")
    assert builds(models) == [("a", "built", 1), ("b", "failed", None), ("c", "built", 1)]
    told = deploying.told(builds.outcomes)
    assert told.status == 1
    assert told.lines[-1] == "2 built, 1 failed"
    assert any(line.startswith("b      failed  none") for line in told.lines)
    saved(layers(2, seed=1), Path(models[1].onnx))
    assert builds(models) == [("a", "up to date", 1), ("b", "built", 1), ("c", "up to date", 1)]


@pytest.mark.parametrize(
    "error",
    [BuildError("no space"), MemoryError(), ZeroDivisionError("a fault")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_fails_a_build_is_told_and_leaves_the_version_before(
    builds: Builds, models: list[Model], error: Exception
) -> None:
    builds(models[:2])
    changed = [msgspec.structs.replace(model, block_size=Size(32 << 10)) for model in models]
    builds.at["a", "check"] = error
    assert builds(changed) == [("a", "failed", 1), ("b", "built", 2), ("c", "built", 1)]
    assert builds.outcomes[0].why
    assert sorted(os.listdir(builds.repository / "a")) == ["1"]
    assert builds(changed)[0] == ("a", "built", 2)


def test_interrupted_and_resumed(builds: Builds, models: list[Model]) -> None:
    builds.at["b", "write"] = KeyboardInterrupt()
    assert builds(models) == [("a", "built", 1), ("b", "interrupted", None), ("c", "not begun", None)]
    assert deploying.told(builds.outcomes).status == 130
    assert os.listdir(builds.repository / "b") == []
    assert builds(models) == [("a", "up to date", 1), ("b", "built", 1), ("c", "built", 1)]


@pytest.fixture
def again(builds: Builds, models: list[Model]) -> Callable[..., str]:
    """The words for why a model that was built is built again, after some of its settings have changed."""

    def ask(**changes: Any) -> str:
        assert builds([msgspec.structs.replace(models[0], **changes)]) == [("a", "built", 2)]
        [line, _] = builds.lines
        assert builds([msgspec.structs.replace(models[0], **changes)]) == [("a", "up to date", 2)]
        return line.removeprefix("a: building, since ")

    assert builds(models[:1]) == [("a", "built", 1)]
    return ask


class TestBuiltAgain:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"block_size": Size(32 << 10)}, "block_size"),
            ({"optimise": False, "split": False}, "optimise, split"),
            ({"build_memory": Size(2 << 30), "weights": "fp16"}, "build_memory, weights"),
        ],
    )
    def test_with_other_settings(self, again: Callable[..., str], changes: dict[str, Any], named: str) -> None:
        assert again(**changes) == f"it was built with another {named}"

    def test_not_for_what_builds_do_not_depend_on(self, builds: Builds, models: list[Model], tmp_path: Path) -> None:
        builds(models[:1])
        (tmp_path / "moved").mkdir()
        moved = Path(models[0].onnx).rename(tmp_path / "moved" / "a.onnx")
        other = msgspec.structs.replace(models[0], onnx=str(moved), priority=7.0, share=Size(1 << 20))
        assert builds([other]) == [("a", "up to date", 1)]

    def test_another_model_in_its_place(self, again: Callable[..., str], models: list[Model]) -> None:
        saved(layers(2, seed=9), Path(models[0].onnx))
        assert again() == "the model has changed"

    def test_other_weights_beside_the_model(self, builds: Builds, models: list[Model]) -> None:
        file = Path(models[0].onnx)
        onnx.save(layers(2), file, save_as_external_data=True, location="a.data", size_threshold=0)
        assert builds(models[:1]) == [("a", "built", 1)]
        weights = np.fromfile(file.with_suffix(".data"), np.float32)
        (weights / 2).tofile(file.with_suffix(".data"))
        assert builds(models[:1]) == [("a", "built", 2)]
        assert builds.lines[0] == "a: building, since the model has changed"

    def test_another_library(self, builds: Builds, models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
        builds(models[:1])
        monkeypatch.setattr(OnnxRuntimeBuilder, "version", lambda self: "0.1")
        why = deploying.stale(models[0], builds.repository) or ""
        assert why.startswith("it was built by onnxruntime ")
        assert why.endswith(", and this machine has 0.1")

    def test_another_machine(self, builds: Builds, models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
        builds(models[:1])
        monkeypatch.setattr(OnnxRuntimeBuilder, "fingerprint", lambda self: {"machine": "m68k"})
        why = deploying.stale(models[0], builds.repository)
        assert why == "it was built on a machine with another instructions, machine"

    def test_another_backend(self, builds: Builds, models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
        builds(models[:1])
        better = SimpleNamespace(name="better", version=lambda: "1", fingerprint=dict)
        monkeypatch.setattr("trt_layering.backends.builder", lambda name: better)
        why = deploying.stale(models[0], builds.repository)
        assert why == "it was built for onnxruntime, and this machine has better"

    def test_damaged(self, again: Callable[..., str], builds: Builds) -> None:
        (builds.repository / "a" / "1" / "weights.bin").unlink()
        assert again() == "the one there cannot be used: weights.bin is missing"

    def test_built_by_somebody_else(self, again: Callable[..., str], builds: Builds, models: list[Model]) -> None:
        (builds.repository / deploying.NOTES / "a.json").write_text("[]")
        assert again() == "nothing is known of how version 1 was built"

    def test_built_by_somebody_else_as_the_same_version(self, builds: Builds, models: list[Model]) -> None:
        builds(models[:1])
        (builds.repository / "a" / "1").rename(builds.repository / "old")
        with in_this_process():
            building.build(models[1].onnx, name="a", repository=builds.repository)
        assert deploying.stale(models[0], builds.repository) == "nothing is known of how version 1 was built"

    def test_not_after_it_was_measured_again(self, builds: Builds, models: list[Model]) -> None:
        from trt_layering.profiling import profile

        builds(models[:1])
        with in_this_process():
            profile("a", repository=builds.repository)
        assert builds(models[:1]) == [("a", "up to date", 1)]


def test_a_note_that_cannot_be_written_is_told(
    builds: Builds, models: list[Model], caplog: pytest.LogCaptureFixture
) -> None:
    builds.repository.mkdir()
    (builds.repository / deploying.NOTES).write_text("in the way")
    assert builds(models[:1]) == [("a", "built", 1)]
    assert "will be built again" in caplog.text
    assert builds(models[:1]) == [("a", "built", 2)]


class TestTheVerb:
    @pytest.fixture
    def config(self, models: list[Model], tmp_path: Path) -> Path:
        file = tmp_path / "deployment.yaml"
        text = "".join(f"  - {{name: {m.name}, onnx: {m.onnx}, block_size: 16KiB}}\n" for m in models)
        file.write_text(f"repository: {tmp_path / 'engines'}\nmodels:\n{text}")
        return file

    def test_lines_for_people(self, config: Path, models: list[Model], capsys: pytest.CaptureFixture[str]) -> None:
        Path(models[1].onnx).write_bytes(b"no model")
        with in_this_process(streamed_from=0):
            assert cli.main(["build", str(config), "--all"]) == 1
        out, err = capsys.readouterr()
        assert out.splitlines()[-1] == "2 built, 1 failed"
        assert [line.split()[:3] for line in out.splitlines()[1:4]] == [
            ["a", "built", "1"], ["b", "failed", "none"], ["c", "built", "1"]
        ]  # fmt: skip
        blocks = [line for line in err.splitlines() if line.startswith("a: write ")]
        assert blocks == ["a: write 0 of 2", "a: write 1 of 2", "a: write 2 of 2"]
        assert "b: failed: " in err
        assert "to do:" in err

    def test_one_object_for_programs(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with in_this_process():
            assert cli.main(["build", str(config), "--all", "--json"]) == 0
            capsys.readouterr()
            assert cli.main(["build", str(config), "--all", "--json", "--no-split"]) == 0
        told = json.loads(capsys.readouterr().out)["models"]
        assert [(one["name"], one["state"], one["version"]) for one in told] == [
            ("a", "built", 2), ("b", "built", 2), ("c", "built", 2)
        ]  # fmt: skip
        assert {one["why"] for one in told} == {"it was built with another split"}

    def test_what_a_plain_build_has_built_is_up_to_date(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with in_this_process():
            assert cli.main(["build", str(config), "--name", "b"]) == 0
            capsys.readouterr()
            assert cli.main(["build", str(config), "--all"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "2 built, 1 up to date"

    @pytest.mark.parametrize("words", [["m.onnx", "--all"], ["CONFIG", "--all", "--name", "a"]])
    def test_is_for_deployments(self, config: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
        assert cli.main(["build", *(str(config) if word == "CONFIG" else word for word in words)]) == 2
        assert "--all is for every model of CONFIG.yaml" in capsys.readouterr().err


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_on_a_terminal() -> None:
    screen = Screen()
    with Steps(screen, "reader") as steps:
        steps("write", 1, 2)
        steps("write", 2, 2)
    assert "reader: write" in screen.getvalue()


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_the_first_interrupts(self, number: int) -> None:
        before = signal.getsignal(number)
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
        assert signal.getsignal(number) is before

    def test_what_is_ignored_stays_so(self) -> None:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with interruptible():
                signal.raise_signal(signal.SIGHUP)
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_the_second_ends_at_once(self) -> None:
        program = (
            "import signal\nfrom trt_layering.interrupts import interruptible\n"
            "with interruptible():\n"
            "    try:\n        signal.raise_signal(signal.SIGTERM)\n"
            "    except KeyboardInterrupt:\n        signal.raise_signal(signal.SIGTERM)\n"
            "    print('still here')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60,
            cwd=checkout.ROOT,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted again\n")


class TestTheScript:
    """As it is called, without a terminal, on real models."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
        started: list[subprocess.Popen[str]] = []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout.ROOT), *filter(None, sys.path)])}

        def begin(*words: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [SCRIPT, *map(str, words)], cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env={**environment, "PYTHON": sys.executable},
            )  # fmt: skip
            started.append(process)
            return process

        yield begin
        for process in started:
            process.kill()
            process.communicate()

    def test_interrupted_and_resumed(
        self, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, real_model: Callable[[str], Path]
    ) -> None:
        small, large = real_model("pp_cls"), real_model("common_old")
        (tmp_path / "d.yaml").write_text(
            "repository: built here\nmodels:\n"
            f"  - {{name: small, onnx: {small}, shapes: {{x: 1x3x48x192}}}}\n"
            f"  - {{name: large, onnx: {large}, block_size: 1MiB, shapes: {{input1: 1x1x64x96}}}}\n"
        )
        first = start("d.yaml")
        assert first.stderr is not None
        seen = []
        while line := first.stderr.readline():
            seen.append(line.strip())
            if line.startswith("large: write 1 of"):
                first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 130, seen
        assert first.stdout is not None
        assert "small: built version 1" in " ".join(seen)
        assert first.stdout.read().splitlines()[-1] == "1 built, 1 interrupted"
        assert os.listdir(tmp_path / "built here" / "large") == []
        out, err = start("d.yaml").communicate(timeout=120)
        assert out.splitlines()[-1] == "1 up to date, 1 built", err
        assert "small: up to date, version 1" in err.splitlines()
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        ("words", "status", "said"),
        [([], 2, "usage:"), (["--help"], 0, "usage:"), (["none.yaml"], 2, "cannot read the configuration")],
    )
    def test_mistakes(
        self, start: Callable[..., subprocess.Popen[str]], words: list[str], status: int, said: str
    ) -> None:
        process = start(*words)
        out, err = process.communicate(timeout=60)
        assert process.returncode == status
        assert said in out + err

    def test_nothing_is_installed(self, tmp_path: Path) -> None:
        clone = checkout.copy(tmp_path / "clone")
        done = checkout.shell("scripts/build-engines configs/quickstart.yaml", clone, PYTHON="")
        assert done.returncode == 1
        assert "scripts/bootstrap-jetson.sh" in done.stderr
