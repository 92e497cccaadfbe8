"""Writes a typed `tensorrt` for mypy from the tables of one version; imports nothing of the package.

An argument takes what the bindings convert (a shape may be any sequence of integers), a result is what they give. What
is not in the tables is not in the stub. What the tables do not tell (types of properties) is in `supplement.pyi`.
"""

import ast
from functools import cache
from pathlib import Path

from tests.tensorrt_tables import FOLDER, Class, Interface

_PREAMBLE = """
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, overload
import numpy
from typing_extensions import Buffer, CapsuleType, Never
__version__: str
"""
_ENUM = """
    __members__: ClassVar[dict[str, {name}]]
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
"""
_ARRAY = "numpy.ndarray[Any, Any]"
_BOTH = {
    "buffer": "Buffer",
    "capsule": "CapsuleType",
    "function": "Callable[..., object]",
    "Callable": "Callable[..., object]",
}
_ARGUMENT = {**_BOTH, "List": "Sequence", "Tuple": "tuple", "Dims": "Dims | Sequence[int]", "list": "Sequence[int]"}
_ARGUMENT |= {"tuple": "tuple[int, ...]", "Iterable": "Iterable[object]"}
_RESULT = {**_BOTH, "List": "list", "Tuple": "tuple", "list": "list[object]", "tuple": "tuple[object, ...]"}
_KNOWN = {"None", "bool", "bytes", "float", "int", "memoryview", "object", "str"}


class _Types(ast.NodeTransformer):
    """Types as docstrings spell them, into Python's."""

    def __init__(self, spelt: dict[str, str], classes: set[str]):
        self._spelt, self._classes = spelt, classes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self._classes | _KNOWN | set(self._spelt):
            return ast.Name("object")
        return ast.parse(self._spelt.get(node.id, node.id), mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        assert isinstance(node.value, ast.Name)
        outer = {"List": "Sequence" if self._spelt is _ARGUMENT else "list"}.get(node.value.id, node.value.id.lower())
        return ast.Subscript(ast.Name(outer), self.visit(node.slice))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        dotted = ast.unparse(node)
        known = {"numpy.ndarray": _ARRAY, "ILogger.Severity": dotted, "collections.abc.Iterable": "Iterable[object]"}
        return ast.parse(known.get(dotted, "object"), mode="eval").body


@cache
def _supplement() -> dict[str, ast.ClassDef]:
    tree = ast.parse((FOLDER / "supplement.pyi").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def supplemented(name: str) -> dict[str, str]:
    """The types in the supplement of the properties of class `name`, and `OrNone` of methods."""
    body = _supplement()[name].body if name in _supplement() else []
    typed = [node for node in body if isinstance(node, ast.AnnAssign) and not ast.unparse(node).count("ClassVar")]
    return {ast.unparse(node.target): ast.unparse(node.annotation) for node in typed}


def _function(name: str, signature: str, classes: set[str], extra: str, *, method: bool) -> str:
    """One signature as a definition. A default says only that the argument may be left out."""
    signature = signature.replace("(in:", "(in_:")  # which no caller can name, either
    text = f"def {name}{signature}: ..."
    try:
        node = ast.parse(text).body[0]
    except SyntaxError:  # a parameter without a default after one that has one: none of them can be left out
        node = ast.parse(f"def {name}{signature.replace(' = None', '')}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    arguments, without_default = node.args.args, len(node.args.args) - len(node.args.defaults)
    for index, argument in enumerate(arguments):
        assert argument.annotation is not None
        typed = ast.unparse(_Types(_ARGUMENT, classes).visit(argument.annotation))
        default = node.args.defaults[index - without_default] if index >= without_default else None
        nullable = " | None" if default is not None and ast.unparse(default) == "None" else ""
        argument.annotation = ast.parse(typed + nullable, mode="eval").body
    node.args.defaults = [ast.Constant(...) for _ in node.args.defaults]
    node.args.args = [ast.arg("self"), *arguments] if method else arguments
    assert node.returns is not None
    node.returns = ast.parse(ast.unparse(_Types(_RESULT, classes).visit(node.returns)) + extra, mode="eval").body
    return " ".join(ast.unparse(ast.fix_missing_locations(node)).split())


def _functions(name: str, signatures: list[str], classes: set[str], extra: str = "", *, method: bool) -> list[str]:
    overload = ["@overload"] if len(signatures) > 1 else []
    return [line for one in signatures for line in (*overload, _function(name, one, classes, extra, method=method))]


def _property(name: str, typed: str, classes: set[str], *, writable: bool) -> list[str]:
    lines = ["@property", f"def {name}(self) -> {typed}: ..."]
    if writable:
        taken = ast.unparse(_Types(_ARGUMENT, classes).visit(ast.parse(typed, mode="eval").body))
        taken = typed if typed.startswith("ILogger.") or "[" in typed else taken
        lines += [f"@{name}.setter", f"def {name}(self, value: {taken}) -> None: ..."]
    return lines


def _members(name: str, described: Class, inherited: dict[str, object], classes: set[str]) -> list[str]:
    typed = supplemented(name)
    lines = []
    for member, fact in described.members.items():
        if isinstance(fact, int):
            lines.append(f"{member}: ClassVar[{name}]")
        elif inherited.get(member) == fact and member != "__init__":
            continue
        elif isinstance(fact, list):
            extra = " | None" if typed.get(member) == "OrNone" else ""
            lines += _functions(member, fact, classes, extra, method=True)
        elif fact.startswith("property"):
            lines += _property(member, typed.get(member, "object"), classes, writable=fact.endswith("rw"))
        elif member == "__init__":
            lines.append("def __init__(self, cannot_be_made: Never) -> None: ...")
    own = _supplement()[name].body if name in _supplement() else []
    special = [node for node in own if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node)]
    return lines + [line for node in special for line in ast.unparse(node).splitlines()]


def _class(name: str, interface: Interface) -> str:
    described, known = interface.classes[name], set(interface.classes)
    inherited = {m: fact for base in described.bases for m, fact in interface.classes[base].members.items()}
    enum = _ENUM.format(name=name).strip("\n").splitlines() if described.is_enum else []
    lines = _members(name, described, dict(inherited), known)
    bases = f"({', '.join(described.bases)})" if described.bases else ""
    return "\n".join([f"class {name}{bases}:", "    ...", *("    " + line for line in lines), *enum])


def stub(interface: Interface) -> str:
    """The text of `tensorrt/__init__.pyi`."""
    classes = [_class(name, interface) for name in interface.classes]
    functions = [
        line
        for name, signatures in interface.functions.items()
        for line in _functions(name, signatures, set(interface.classes), method=False)
    ]
    return "\n".join([_PREAMBLE, *classes, *functions, ""])


def write(interface: Interface, folder: Path) -> None:
    """Writes the stub package into `folder`, which belongs on mypy's path; leaves alone what is right already."""
    package = folder / "tensorrt"
    package.mkdir(parents=True, exist_ok=True)
    file, text = package / "__init__.pyi", stub(interface)
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
