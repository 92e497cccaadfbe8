"""docs/operations.md keeps its promises: its commands in their order against a service that runs, and the names that it
quotes of metrics and of the log."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests import checkout

TEXT = (checkout.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
[PROGRAM] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
[SERVE] = [command for command in COMMANDS if " serve " in command]
PATIENCE = 120.0


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Page:
    """A copy of the repository in which what the page says was done: commands and results, the service with its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {"8000": free_port(), "8002": free_port()}
        config = folder / "configs" / "service.yaml"
        here = f"service:\n  port: {self.ports['8000']}\n  metrics_port: {self.ports['8002']}\n"
        config.write_text(config.read_text().replace("service:\n", here))
        self.results: dict[str, subprocess.CompletedProcess[str]] = {}
        self.log = folder / "service.log"

    def there(self, words: str) -> str:
        """`words` with the ports of this copy."""
        return re.sub(r"(127\.0\.0\.1:)(8000|8002)", lambda found: found[1] + self.ports[found[2]], words)

    def do(self, command: str) -> None:
        self.results[command] = checkout.shell(self.there(command), self.folder)

    def serve(self) -> subprocess.Popen[bytes]:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with open(self.log, "wb") as log:
            service = subprocess.Popen(f"exec {SERVE}", shell=True, cwd=self.folder, env=environment, stdout=log,
                                       stderr=log)  # fmt: skip
        end = time.monotonic() + PATIENCE
        ready = self.there("curl -sf http://127.0.0.1:8000/v2/health/ready")
        while checkout.shell(ready, self.folder).returncode:
            assert service.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
        return service


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, real_model) -> Page:
    real_model("common")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed, by which the page asks the service")
    folder = checkout.copy(tmp_path_factory.mktemp("operations") / "clone")
    checkout.lend_environment(folder)
    page = Page(folder)
    at = COMMANDS.index(SERVE)
    for command in COMMANDS[:at]:
        page.do(command)
    service = page.serve()
    try:
        (folder / "example.py").write_text(page.there(PROGRAM))
        page.do(".venv/bin/python example.py")
        for command in COMMANDS[at + 1 :]:
            page.do(command)
        service.terminate()
        page.results[SERVE] = subprocess.CompletedProcess(SERVE, service.wait(PATIENCE), "", page.log.read_text())
    finally:
        service.kill()
        service.wait()
    return page


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_succeeds(page, command):
    result = page.results[command]
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_nvidias_client_gets_an_answer(page):
    result = page.results[".venv/bin/python example.py"]
    assert result.returncode == 0, result.stderr
    assert "(" in result.stdout


def test_the_budget_and_the_model_are_changed(page):
    [answer] = [result for command, result in page.results.items() if "memory_budget" in command]
    assert json.loads(answer.stdout) == {"memory_budget": 40 << 20}
    log = page.log.read_text()
    assert "the memory budget is 40.0 MiB" in log
    assert "reader: unloaded" in log
    assert log.count("reader: version 1 serves") == 2


def test_the_load_is_answered_rightly(page):
    [result] = [result for command, result in page.results.items() if "serve_load" in command]
    assert "requests/s" in result.stdout
    assert "peak memory" in result.stdout or "no --pid" in result.stdout


def test_every_metric_that_is_named_is_there(page):
    [scraped] = [result.stdout for command, result in page.results.items() if command.endswith("/metrics")]
    there = set(re.findall(r"^(\w+)(?:\{| )", scraped, re.MULTILINE))
    named = set(re.findall(r"(?:nv_inference|trt_layering)_\w*[a-z]", TEXT))
    assert named
    assert {name for name in named if not name.endswith("_")} <= there


LINES = re.findall(r"^\| `([^`]+)` \|", TEXT.partition("line of the log")[2], re.MULTILINE)


@pytest.mark.parametrize("line", LINES)
def test_lines_of_the_log_are_those_of_the_program(line):
    source = "\n".join(path.read_text(encoding="utf-8") for path in (checkout.ROOT / "trt_layering").rglob("*.py"))
    words = re.sub(r'%s|%\.0f|"\s*f?"', " ", re.sub(r"\{[^}]*\}", " ", source))
    pieces = [piece.strip(" :") for piece in re.split(r"\bNAME\b|\b[NXYZ]\b|\.\.\.|;", line)]
    missing = [piece for piece in pieces if len(piece) > 3 and piece not in re.sub(r"\s+", " ", words)]
    assert missing == []


def test_the_page_is_found():
    assert "docs/operations.md" in (checkout.ROOT / "README.md").read_text(encoding="utf-8")
