"""The set-up scripts where something is missing, and when they are called again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import checkout

SCRIPTS = ["scripts/quickstart.sh", "scripts/test.sh", ".ci/run"]


@pytest.fixture
def clone(tmp_path) -> Path:
    return checkout.copy(tmp_path / "clone")


def stand_in(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_old_python_is_refused(clone, tmp_path, script):
    old = 'case "$1" in --version) echo Python 3.9.18;; *) exit 1;; esac'
    stand_in(tmp_path / "bin" / "python3", old)
    result = checkout.shell(script, clone, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", PYTHON="")
    assert result.returncode == 1
    assert "Python 3.9.18, and Python 3.10 or newer is needed" in result.stderr
    assert "to do:" in result.stderr
    assert not (clone / ".venv").exists()


def test_no_python_at_all(clone):
    result = checkout.shell("scripts/test.sh", clone, PYTHON="/nowhere/python3")
    assert result.returncode == 1
    assert "there is no /nowhere/python3" in result.stderr


def test_a_python_without_venv(clone, tmp_path):
    python = stand_in(tmp_path / "python", 'case "$*" in *venv*) mkdir .venv; exit 1;; *) echo Python 3.12.0;; esac')
    result = checkout.shell("scripts/quickstart.sh", clone, PYTHON=str(python))
    assert result.returncode == 1
    assert "apt install python3-venv" in result.stderr
    assert not (clone / ".venv").exists()


class TestInstalling:
    """A .venv whose python only writes down what it was asked for."""

    @pytest.fixture
    def calls(self, clone, tmp_path):
        log = tmp_path / "calls"
        real = f'if [ "$1" = - ]; then exec {os.path.realpath("/proc/self/exe")} -; fi'
        stand_in(clone / ".venv" / "bin" / "python", f'{real}\necho "$*" >>{log}')

        def install(words: str = "models") -> list[str]:
            log.write_text("")
            result = checkout.shell(f"source scripts/environment.sh; environment {words}", clone)
            assert result.returncode == 0, result.stderr
            assert result.stdout == ""
            return [line for line in log.read_text().splitlines() if "install" in line]

        return install

    def test_once_and_again(self, calls):
        package, models = calls()
        assert package.endswith("--editable .")
        assert "--no-deps ddddocr==1.6.1" in models
        assert "rapidocr==3.10.0" in models
        assert calls() == []
        [test] = calls("test models")
        assert test.endswith(".[test]")

    def test_again_when_the_requirements_change(self, calls, clone):
        calls()
        with (clone / "setup.cfg").open("a") as file:
            file.write("\n# changed\n")
        assert len(calls()) == 2

    def test_again_when_the_folder_has_moved(self, calls, clone):
        calls()
        (clone / "sub").mkdir()
        moved = clone.with_name("moved")
        clone.rename(moved)
        moved.joinpath("here").touch()
        result = checkout.shell("source scripts/environment.sh; environment models", moved)
        assert "installing trt-layering" in result.stderr
        moved.rename(clone)

    def test_a_failed_install_is_not_remembered(self, clone):
        stand_in(clone / ".venv" / "bin" / "python", 'case "$*" in *install*) echo no network >&2; exit 1;; esac')
        for _ in range(2):
            result = checkout.shell("scripts/test.sh", clone)
            assert result.returncode == 1
            assert "no network" in result.stderr
            assert "pip could not install" in result.stderr
