"""The forms in which code may not use TensorRT, since no type checker sees what they ask; imports no library.

A member named by a string, a hushed error, a version test that is not one of `versions.py`'s constants, a flag that is
a number: each would let a call slip past the tables. Every finding is a line of text that says where and what instead.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

_BY_STRING = {"getattr", "hasattr", "setattr", "delattr", "vars", "eval", "exec", "__import__", "import_module"}
_INSIDES = {"__dict__", "__getattribute__", "__getattr__"}
_FLAGS = {"flags", "tempfile_control_flags", "quantization_flags", "allowed_formats"}
_TAKE_FLAGS = {"create_network", "set_tactic_sources"}
_TENSORRT = {"trt", "tensorrt"}
_HUSHED = ("type: ignore", "mypy:")


def _name(node: ast.expr) -> str:
    """The last name of a dotted one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_flags(node: ast.expr) -> bool:
    """Whether `node` names its flags: `1 << int(trt.Enum.MEMBER) | …`, or the flags of something else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_flags(node.left) and _is_flags(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        value = node.right
        return isinstance(value, ast.Call) and _name(value.func) == "int" and isinstance(value.args[0], ast.Attribute)
    return isinstance(node, ast.Attribute) and node.attr in _FLAGS


def _of_call(node: ast.Call) -> Iterator[str]:
    name = _name(node.func)
    if name in _BY_STRING:
        yield f"{name}() names what it asks for by a string: write the member itself, under a constant of versions.py"
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if name in _TAKE_FLAGS and not all(map(_is_flags, given)):
        yield f"{name}() takes flags by their names, as in 1 << int(trt.{{Enum}}.{{MEMBER}}): versions number them anew"


def _of_assignment(node: ast.Assign | ast.AugAssign) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.attr for target in targets if isinstance(target, ast.Attribute) and target.attr in _FLAGS]
    if names and not _is_flags(node.value):
        yield f"{names[0]} takes flags by their names, as in 1 << int(trt.{{Enum}}.{{MEMBER}})"


def _of_condition(node: ast.If | ast.IfExp | ast.While | ast.Assert, constants: set[str]) -> Iterator[str]:
    names = {_name(part) for part in ast.walk(node.test) if isinstance(part, ast.Name | ast.Attribute)}
    if "TYPE_CHECKING" in names and not (isinstance(node, ast.If) and _name(node.test) and not node.orelse):
        yield "TYPE_CHECKING stands alone, without an else"
    test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
    if names & constants and not (isinstance(node, ast.If) and _name(test) in constants):
        yield "a version is tested by `if versions.{CONSTANT}:` or `if not …:` alone, which type checkers understand"


def _tests_elsewhere(tree: ast.Module, constants: set[str]) -> Iterator[tuple[int, str]]:
    """Uses of a version's constant as a value: kept in a variable, it is a test that nobody understands."""
    tested = {id(part) for node in ast.walk(tree) if isinstance(node, ast.If) for part in ast.walk(node.test)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and _name(node) in constants and id(node) not in tested:
            yield node.lineno, "a version's constant is used in the test of an `if` only"


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
        yield "names are imported one by one"
    elif isinstance(node, ast.ImportFrom) and node.module == "tensorrt":
        yield "tensorrt is imported whole, as trt"
    elif any(one.name == "tensorrt" and (one.asname or one.name) not in _TENSORRT for one in node.names):
        yield "tensorrt is called trt"


def _found(node: ast.AST, constants: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Assign | ast.AugAssign):
        yield from _of_assignment(node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        yield from _of_condition(node, constants)
    elif isinstance(node, ast.Attribute) and node.attr in _INSIDES:
        yield f"{node.attr} shows members by their strings"
    elif isinstance(node, ast.Attribute) and node.attr == "__version__" and _name(node.value) in _TENSORRT:
        yield "the version is asked for in versions.py alone"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from _of_import(node)
    elif isinstance(node, ast.Name | ast.Attribute) and _name(node) == "no_type_check":
        yield "types are checked everywhere"


def refused(file: Path, constants: set[str]) -> list[str]:
    """What `file` says in a refused form; `constants` are the names of the version's constants."""
    source = file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = [
        (node.lineno, text) for node in ast.walk(tree) if hasattr(node, "lineno") for text in _found(node, constants)
    ]
    found += _tests_elsewhere(tree, constants)
    comments = (
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    )
    found += [
        (token.start[0], "no error is hushed") for token in comments if any(one in token.string for one in _HUSHED)
    ]
    return [f"{file.name}:{line}: {text}" for line, text in sorted(found)]
