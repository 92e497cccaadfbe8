"""The facts about the emulated version of TensorRT, from `tests/data/tensorrt_api/tables.json`; imports only
`emulated_device`. A version without facts is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from emulated_device import machine

_ALL = json.loads((Path(__file__).parents[2] / "data" / "tensorrt_api" / "tables.json").read_text())
_ORDER = list(_ALL["versions"])

VERSION: str = machine().version
if VERSION not in _ORDER:
    raise ImportError(f"EMULATED_TENSORRT={VERSION}: there are facts of {', '.join(_ORDER)} only")
FULL_VERSION: str = _ALL["versions"][VERSION]
NUMBERS = tuple(int(number) for number in (FULL_VERSION.split(".post")[0] + ".30").split(".")[:4])


def at_least(major: int, minor: int) -> bool:
    """Whether the emulated version is this one or a later one."""
    return NUMBERS[:2] >= (major, minor)


def _holds(span: str) -> bool:
    first, _, last = span.partition("-")
    return _ORDER.index(first) <= _ORDER.index(VERSION) <= _ORDER.index(last or first)


def _now(said: Any) -> Any:
    """The fact in this version (None: no such thing in it) of what is said once or for each span of versions."""
    if not isinstance(said, dict):
        return said
    return next((fact for span, fact in said.items() if _holds(span)), None)


def _members(described: dict[str, Any]) -> dict[str, Any]:
    found = {name: _now(said) for name, said in described["members"].items()}
    return {name: fact for name, fact in found.items() if fact is not None}


CLASSES: dict[str, dict[str, Any]] = {
    name: {"bases": _now(described["bases"]), "members": _members(described)}
    for name, described in _ALL["classes"].items()
    if any(map(_holds, described["in"]))
}
"""Class name → {"bases": names, "members": name → enum value, "property ro", "property rw", "method" or signatures}."""

FUNCTIONS: dict[str, list[str]] = {
    name: fact for name, said in _ALL["functions"].items() if (fact := _now(said)) is not None
}
