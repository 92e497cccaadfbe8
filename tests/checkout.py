"""Fresh copies of the repository, as a newcomer would have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NOT_IN_GIT = (
    ".git", ".venv", ".bench", ".*_cache", "__pycache__", "*.egg-info", ".hypothesis", "build", "dist", "[1-9]*",
    ".build-*"
)  # fmt: skip


def copy(folder: Path) -> Path:
    """A copy without anything that was built or installed."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_NOT_IN_GIT))
    for built in (folder / "engines").iterdir():
        if built.is_dir():
            shutil.rmtree(built)
    return folder


def lend_environment(folder: Path) -> None:
    """Give the copy a .venv of its own that has what this process's environment has, as if it had been installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    [packages] = (folder / ".venv" / "lib").glob("python3.*/site-packages")
    lent = [path for path in sys.path if Path(path).is_dir() and Path(path) != ROOT]
    (packages / "lent.pth").write_text("\n".join([str(folder), *lent]) + "\n")
    program = folder / ".venv" / "bin" / "trt-layering"
    program.write_text(
        f"#!{folder}/.venv/bin/python\nimport sys\nfrom trt_layering.cli import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    extras = "package models report serve test"
    marks = f'source scripts/environment.sh; for x in {extras}; do fingerprint >".venv/.has-$x"; done'
    subprocess.run(["bash", "-euc", marks], cwd=folder, check=True)


def shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in the copy, as a newcomer's terminal would."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env={**environment, **variables}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
