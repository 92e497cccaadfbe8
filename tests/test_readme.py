"""The README keeps its promises: its commands, executed as written in a fresh copy, and what it says of YAML."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import checkout
from trt_layering.config import load

TEXT = (checkout.ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, real_model) -> Path:
    real_model("common")
    folder = checkout.copy(tmp_path_factory.mktemp("readme") / "clone")
    checkout.lend_environment(folder)
    return folder


@pytest.fixture(scope="module")
def done(clone):
    """Every command of the README in its order; the test run is held to one small file, or it would come here again."""
    results = {}
    for command in COMMANDS:
        results[command] = checkout.shell(command, clone, PYTEST_ADDOPTS="-k test_shapes -p no:cacheprovider")
    return results


def test_the_first_screen():
    first = TEXT.splitlines()[:24]
    assert [line for line in first if line in COMMANDS] == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert any("docs/pipeline.svg" in line for line in first)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_succeeds(done, command):
    result = done[command]
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_the_quick_start_reads_the_line_in_little_memory(done):
    result = done["scripts/quickstart.sh"]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["text"] == "streamed"
    assert found["budget_bytes"] <= found["weights_bytes"] / 2
    assert found["budget_bytes"] <= found["model_bytes"] / 2
    assert 0 < found["peak_bytes"] <= found["budget_bytes"] + (8 << 20)
    assert found["latency_ms"] > 0
    assert found["max_abs_diff"] <= 1e-5 * found["max_abs_output"]


def test_the_quick_start_builds_once(done, clone):
    assert done["scripts/quickstart.sh"].returncode == 0
    again = checkout.shell("scripts/quickstart.sh", clone)
    assert again.returncode == 0, again.stderr
    assert "building" not in again.stdout
    assert [folder.name for folder in (clone / "engines" / "ocr").iterdir()] == ["1"]


def test_the_test_command_ends_with_the_closing_line(done):
    last = done["scripts/test.sh"].stdout.splitlines()[-1]
    assert re.fullmatch(r"=+ \d+ passed.* in .*s.* =+", last)


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_python_examples(done, clone, program):
    (clone / "example.py").write_text(program)
    result = checkout.shell(".venv/bin/python example.py", clone)
    assert result.returncode == 0, result.stderr
    assert "bytes read" in result.stdout


def test_the_configuration_shown_has_every_key_and_the_defaults(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    shown, least = tmp_path / "shown.yaml", tmp_path / "least.yaml"
    shown.write_text(text, encoding="utf-8")
    least.write_text("models: [{name: ocr, onnx: models/ocr.onnx, shapes: {x: {min: 1x1x64x32, opt: 1x1x64x160, "
                     "max: 1x1x64x320}}}]\nmemory_budget: 96MiB\n")  # fmt: skip
    settings = load(shown).settings()
    assert [setting.field for setting in settings if setting.origin == "default"] == []
    assert [(setting.field, setting.value) for setting in settings] == [
        (setting.field, setting.value) for setting in load(least).settings()
    ]


PAGES = [checkout.ROOT / "README.md", checkout.ROOT / "engines" / "README.md", *checkout.ROOT.glob("docs/*.md")]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))


def test_pages_have_links():
    assert {"README.md", "architecture.md"} <= {page.name for page in PAGES if links(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(checkout.ROOT)))
def test_links_lead_somewhere(page):
    missing = [link for link in links(page) if "://" not in link and not (page.parent / link).exists()]
    assert missing == []
