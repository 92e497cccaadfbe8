"""Checks files against the interface of a version of TensorRT with mypy; imports the package's `versions.py` alone.

For every version, mypy sees a `tensorrt` made from its tables, the constants of `versions.py` as that version has them,
and PyCUDA and Polygraphy as `data/stubs` describes them. What mypy finds is a finding, and so is an attribute or a call
of a value whose type it does not know, since it would accept anything of such a value.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import ModuleType
from unittest import mock

from tests import tensorrt_stubs, tensorrt_tables

ROOT = Path(__file__).parents[1]
VERSIONS_FILE = ROOT / "trt_layering" / "backends" / "tensorrt" / "versions.py"
DESCRIBED = ROOT / "tests" / "data" / "stubs"
CHECKED = ("10.3", "10.7", "10.13", "10.16", "11.0", "11.4")

_SECONDS = 300
# A library whose own functions are of unknown type, too. What they give is annotated, as any value is.
_UNTYPED = "onnxruntime"
# The bindings' classes do not all fit their bases, and some of their overloads are never reached.
_SECTIONS = f"""[mypy-{_UNTYPED}.*]
ignore_missing_imports = True
[mypy-tensorrt.*]
disable_error_code = override, overload-cannot-match
"""
_LINE = re.compile(r"(?P<file>.+?):(?P<line>\d+):(?P<column>\d+):(?P<end>\d+):(?P<to>\d+): error: (?P<text>.*)")
_UNREACHED = "[unreachable]"
_ANY = "Expression has type "

Span = tuple[int, int, int, int]  # first line, first column, last line, last column, columns from one


@dataclass(frozen=True)
class Error:
    file: Path
    span: Span
    text: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.span[0]}: {self.text}"


def constants(release: str) -> dict[str, bool]:
    """The constants of `versions.py` as they are under the TensorRT of that full version."""
    spec = util.spec_from_file_location("versions_of_" + re.sub(r"\W", "_", release), VERSIONS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module, installed = util.module_from_spec(spec), ModuleType("tensorrt")
    vars(installed)["__version__"] = release
    with mock.patch.dict(sys.modules, tensorrt=installed):
        spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if isinstance(value, bool)}


def _configuration(files: Sequence[Path], base: Path, version: str, cache: Path, option: str) -> str:
    found = constants(tensorrt_tables.load(version).release)
    true, false = (", ".join(name for name, value in found.items() if value is which) for which in (True, False))
    path = [cache / "tensorrt" / version, DESCRIBED, base, ROOT]
    modules = ",".join(module(file, base) for file in files)
    return f"""[mypy]
strict = True
python_version = 3.10
explicit_package_bases = True
follow_imports = silent
show_error_end = True
cache_dir = {cache / "mypy"}
mypy_path = {os.pathsep.join(map(str, dict.fromkeys(path)))}
{_SECTIONS}[mypy-{modules}]
always_true = {true}
always_false = {false}
{option} = True
"""


def module(file: Path, base: Path) -> str:
    """The name under which `file` is imported, where `base` is on the path."""
    return ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__")


def _untyped(tree: ast.Module) -> set[str]:
    """The names under which a module imports parts of the untyped library."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [(getattr(node, "module", None) or alias.name, alias) for node in imports for alias in node.names]
    return {alias.asname or alias.name for module, alias in names if module.split(".")[0] == _UNTYPED}


def _asked(file: Path) -> dict[Span, str]:
    """Where in `file` the values stand of which something is asked: an attribute, or to be called."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    asked, untyped = {}, _untyped(tree)
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Attribute) else node.func if isinstance(node, ast.Call) else None
        root = next((one.id for one in ast.walk(value or node) if isinstance(one, ast.Name)), "")
        if (
            value is not None
            and root not in untyped
            and value.end_lineno is not None
            and value.end_col_offset is not None
        ):
            span = (value.lineno, value.col_offset + 1, value.end_lineno, value.end_col_offset)
            asked[span] = ast.unparse(node if isinstance(node, ast.Attribute) else value)
    return asked


def _errors(files: Sequence[Path], base: Path, version: str, cache: Path, option: str) -> Iterator[Error]:
    """What mypy tells of `files` with the option."""
    configuration = cache / f"{version}-{option}.ini"
    configuration.write_text(_configuration(files, base, version, cache, option), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--config-file",
        str(configuration),
        *map(str, files),
    ]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode not in (0, 1) or done.stderr:
        raise AssertionError(f"mypy could not check: {done.stdout}{done.stderr}")
    for line in done.stdout.splitlines():
        found = _LINE.match(line)
        if found is not None:
            span = (int(found["line"]), int(found["column"]), int(found["end"]), int(found["to"]))
            yield Error((base / found["file"]).resolve(), span, found["text"])
        elif ": note: " not in line:
            raise AssertionError(f"mypy could not check: {line}")


def check(files: Sequence[Path], base: Path, version: str, cache: Path) -> list[str]:
    """What in `files`, imported from the folder `base`, does not hold with this version; `cache` is kept between calls.

    The first check with a `cache` takes many times as long as those after it. Of what is Any, mypy is asked on its own:
    with that option it finds no overload for some calls that have one.
    """
    tensorrt_stubs.write(tensorrt_tables.load(version), cache / "tensorrt" / version)
    asked = {file.resolve(): _asked(file) for file in files}
    found = {str(error): None for error in _errors(files, base, version, cache, "warn_unreachable")}
    for error in _errors(files, base, version, cache, "disallow_any_expr"):
        what = asked.get(error.file, {}).get(error.span)
        if what is not None and error.text.startswith(_ANY):
            words = f"{what} is asked of a value of unknown type: annotate the value with its class"
            found[str(Error(error.file, error.span, words))] = None
    return list(found)


def check_all(files: Sequence[Path], base: Path, cache: Path) -> list[str]:
    """What in `files` does not hold with some version of `CHECKED`, and which versions those are.

    What no version reaches has been checked with none: that is a finding, while what some versions do not reach is not.
    """
    found: dict[str, list[str]] = {}
    for version in CHECKED:
        for finding in check(files, base, version, cache):
            found.setdefault(finding, []).append(version)
    everywhere = [
        finding for finding, where in found.items() if len(where) == len(CHECKED) or _UNREACHED not in finding
    ]
    return [f"{finding} (with {', '.join(found[finding])})" for finding in everywhere]
