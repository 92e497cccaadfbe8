"""The facts about TensorRT's Python interface in `tables.json`; imports nothing of the package.

    python collect.py describe > 10.3.json                 # on a machine with TensorRT: the facts of the one installed
    python collect.py merge 10.3.json 10.7.json … > tables.json

Every fact is read from the docstrings and properties of the Python bindings that NVIDIA publishes with each version
(the packages `tensorrt` and `tensorrt_bindings`, or `python3-libnvinfer` of JetPack): which classes there are, their
bases, members, enum values and signatures. Nothing here is NVIDIA's code or text of its documentation. A dump is
`{"version", "classes": {name: {"bases", "members": {name: fact}}}, "functions": {name: [signature]}}`, where a fact is
"enum N", "property ro", "property rw", "method" (no signature known) or a list of signatures.

Merging spells the same thing the same way in all versions (newer pybind11 writes `typing.SupportsInt` for `int`),
leaves out the first parameter `self`, and says a fact once for the span of versions it holds in.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

SPELLINGS = (
    (r"typing\.SupportsInt", "int"),
    (r"typing\.SupportsFloat", "float"),
    (r"typing_extensions\.CapsuleType", "capsule"),
    (r"typing_extensions\.Buffer", "buffer"),
    (r"collections\.abc\.(Sequence|Iterable)\[", "List["),
    (r"collections\.abc\.Callable", "Callable"),
    (r"\b(list|tuple|dict)\[", lambda found: found.group(1).capitalize() + "["),
    (r"\bnvinfer1::|\bnvonnxparser::", ""),
    (r"\bIParserError\b", "ParserError"),
    (r"detail::accessor<detail::accessor_policies::str_attr>", "IPluginRegistry"),
    (r"<([\w.]+): -?\d+>", r"\1"),
)
NOT_FACTS = {"_pybind11_conduit_v1_"}
OF_EVERY_ENUM = {"__init__", "name", "value"}


def signature(text: str) -> str:
    """A docstring's signature as in the tables: `(name: str, index: int = 0) -> bool`."""
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return re.sub(r"\(self: .*?(, (?=\w+:)|(?=\)))", "(", text[text.index("(") :], count=1)


def fact(found: Any) -> Any:
    """The fact of a dump as it stands in the tables."""
    if isinstance(found, str):
        return int(found.removeprefix("enum ")) if found.startswith("enum ") else found
    return [signature(text) for text in found if "(*args, **kwargs)" not in text]


def members(described: dict[str, Any]) -> dict[str, Any]:
    facts = {name: fact(found) for name, found in described["members"].items() if name not in NOT_FACTS}
    if any(isinstance(found, int) for found in facts.values()):
        facts = {name: found for name, found in facts.items() if name not in OF_EVERY_ENUM}
    return facts


def spans(versions: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """`found` (version → fact) said once for each run of versions: `{"10.3-10.7": fact, "11.4": fact}`."""
    runs: list[list[str]] = []
    for before, version in zip([None, *versions[:-1]], versions, strict=True):
        if version in found:
            if before in found and found[before] == found[version]:
                runs[-1].append(version)
            else:
                runs.append([version])
    return {"-".join(dict.fromkeys((run[0], run[-1]))): found[run[0]] for run in runs}


def said(versions: list[str], found: dict[str, Any], among: list[str]) -> Any:
    """The fact alone where it is the same in all versions `among`, else the fact of each span of versions."""
    by_span = spans(versions, found)
    return (
        next(iter(by_span.values()))
        if list(found) == among and len({str(one) for one in found.values()}) == 1
        else by_span
    )


def merge(dumps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The tables of all `dumps` (version → dump, oldest first)."""
    versions = list(dumps)
    classes = {}
    for name in sorted({name for dump in dumps.values() for name in dump["classes"]}):
        there = {version: dump["classes"][name] for version, dump in dumps.items() if name in dump["classes"]}
        facts = {version: members(described) for version, described in there.items()}
        by_member = by_name(facts)
        classes[name] = {
            "in": [*spans(versions, dict.fromkeys(there))],
            "bases": said(versions, {version: one["bases"] for version, one in there.items()}, list(there)),
            "members": {member: said(versions, found, list(there)) for member, found in by_member.items()},
        }
    called = {version: {n: fact(one) for n, one in dump["functions"].items() if one} for version, dump in dumps.items()}
    return {
        "versions": {version: dump["version"] for version, dump in dumps.items()},
        "classes": classes,
        "functions": {name: said(versions, found, versions) for name, found in by_name(called).items()},
    }


def by_name(facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Version → name → fact turned into name → version → fact."""
    names = sorted({name for found in facts.values() for name in found})
    return {name: {version: found[name] for version, found in facts.items() if name in found} for name in names}


def described_member(value: object) -> Any:
    if isinstance(value, property):
        return "property ro" if value.fset is None else "property rw"
    lines = [line.strip() for line in (value.__doc__ or "").splitlines()]
    signatures = [re.sub(r"^\d+\. ", "", line) for line in lines if re.match(r"^(\d+\. )?\w+\(.*\) -> ", line)]
    return [re.sub(r"\btensorrt(_bindings)?\.(tensorrt\.)?", "", line) for line in signatures] or "method"


def described_class(cls: type) -> dict[str, Any]:
    values = getattr(cls, "__members__", {})
    seen = [name for name in dir(cls) if name == "__init__" or not name.startswith("__")]
    facts = {n: f"enum {int(values[n])}" if n in values else described_member(getattr(cls, n)) for n in seen}
    return {"bases": [base.__name__ for base in cls.__mro__[1:-2]], "members": facts}


def describe(module: ModuleType) -> dict[str, Any]:
    """The dump of an imported `tensorrt`."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    classes = {name: described_class(value) for name, value in public.items() if isinstance(value, type)}
    functions = {n: described_member(v) for n, v in public.items() if callable(v) and not isinstance(v, type)}
    called = {name: found for name, found in functions.items() if isinstance(found, list)}
    return {"version": module.__version__, "classes": classes, "functions": called}


def lines(tables: dict[str, Any]) -> Iterable[str]:
    """`tables` as JSON, one member a line."""
    yield "{" + f'"versions": {json.dumps(tables["versions"])},'
    yield '"classes": {'
    for name, one in tables["classes"].items():
        yield f'"{name}": {{"in": {json.dumps(one["in"])}, "bases": {json.dumps(one["bases"])}, "members": {{'
        yield ",\n".join(f' "{member}": {json.dumps(found)}' for member, found in one["members"].items())
        yield "}}" + ("," if name != list(tables["classes"])[-1] else "")
    yield "},"
    yield '"functions": {'
    yield ",\n".join(f' "{name}": {json.dumps(found)}' for name, found in tables["functions"].items())
    yield "}}"


def main(arguments: list[str]) -> None:
    if arguments == ["describe"]:
        import tensorrt

        print(json.dumps(describe(tensorrt), indent=1))
    elif arguments[:1] == ["merge"]:
        files = sorted(map(Path, arguments[1:]), key=lambda file: tuple(map(int, file.stem.split("."))))
        print("\n".join(lines(merge({file.stem: json.loads(file.read_text()) for file in files}))))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
