"""What is installed: few dependencies, all declared, and nothing loaded before it is needed."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trt_layering
from tests import checkout

PACKAGE = checkout.ROOT / "trt_layering"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {
    "numpy",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "polygraphy",
    "yaml",
    "rich",
    "PIL",
    "msgspec",
    "xxhash",
    "ml_dtypes",
    "matplotlib",
    "pycuda",
    "tensorrt",
}
# Modules that are not called what their distribution is called, or come with another one.
DISTRIBUTIONS = {"yaml": "pyyaml", "onnx_ir": "onnx-ir", "PIL": "pillow", "google": "onnx"}


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(checkout.ROOT / "setup.cfg", encoding="utf-8")
    return config


def names(requirements: str) -> set[str]:
    return {re.split(r"[<>=! ;\[]", line)[0] for line in requirements.split("\n") if line}


def imports(path: Path) -> set[str]:
    """The packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"trt_layering"}


def test_every_import_is_declared(metadata):
    declared = names(metadata["options"]["install_requires"])
    extras = metadata["options.extras_require"]
    optional = names(extras["tensorrt"]) | names(extras["models"]) | names(extras["report"])
    for path in MODULES:
        for module in imports(path):
            assert DISTRIBUTIONS.get(module, module) in declared | optional, f"{path}: {module}"


def test_dependencies_are_few(metadata):
    assert names(metadata["options"]["install_requires"]) == {
        "numpy", "onnx", "onnx-ir", "onnxruntime", "polygraphy", "pyyaml", "msgspec", "xxhash", "rich",
        "ml_dtypes",
    }  # fmt: skip
    assert set(metadata["options.extras_require"]) == {"tensorrt", "jetson", "serve", "report", "models", "test"}


def test_the_terminals_library_is_the_command_lines():
    assert [path.name for path in MODULES if "rich" in imports(path)] == ["terminal.py"]


def test_pictures_are_the_benchs():
    assert [path.name for path in MODULES if "matplotlib" in imports(path)] == ["figures.py"]


def test_versions_agree(metadata):
    assert metadata["metadata"]["version"] == trt_layering.__version__


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, trt_layering; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout.ROOT, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stdout.split())


def test_every_public_name_is_there():
    assert sorted(trt_layering.__all__) == list(trt_layering.__all__)
    for name in trt_layering.__all__:
        assert getattr(trt_layering, name) is not None
    with pytest.raises(AttributeError):
        _ = trt_layering.nothing


def test_the_entry_point_is_there(metadata):
    [line] = metadata["options.entry_points"]["console_scripts"].split("\n")[1:]
    name, target = (part.strip() for part in line.split("="))
    module, _, function = target.partition(":")
    assert name == "trt-layering"
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_the_wheel_has_everything(tmp_path):
    clone = checkout.copy(tmp_path / "clone")
    command = f"{sys.executable} -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir {tmp_path} ."
    done = checkout.shell(command, clone)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {f"trt_layering/{path.relative_to(PACKAGE)}" for path in MODULES} <= files
    assert "trt_layering/py.typed" in files
    assert any(file.endswith("LICENSE") for file in files)
    assert not {file for file in files if file.startswith(("tests", "scripts"))}
