"""TensorRT's published Python interface, version by version, from `data/tensorrt_api`; imports no library.

`load("10.3")` gives the classes, members and functions of that version. A name that the tables do not hold does not
exist in that version.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "tensorrt_api"

# What a member is: an enum's value, "property ro", "property rw", "method" (signature unknown), or its signatures
# without `self`, several where it is overloaded: `["(name: str) -> int", "(name: str, profile_index: int) -> int"]`.
Fact = int | str | list[str]


@dataclass(frozen=True)
class Class:
    """A class of one version: the names of its bases and its members, inherited ones included."""

    bases: tuple[str, ...]
    members: dict[str, Fact]

    @property
    def is_enum(self) -> bool:
        return any(isinstance(fact, int) for fact in self.members.values())


@dataclass(frozen=True)
class Interface:
    """All that one version has; `release` is its full version, such as "10.13.3.9"."""

    release: str
    classes: dict[str, Class]
    functions: dict[str, list[str]]


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads((FOLDER / "tables.json").read_text(encoding="utf-8"))
    return tables


def versions() -> tuple[str, ...]:
    """The versions there are tables of, oldest first."""
    return tuple(_tables()["versions"])


def _covers(span: str, version: str) -> bool:
    first, last = span.split("-")[0], span.split("-")[-1]
    return versions().index(first) <= versions().index(version) <= versions().index(last)


def _at(said: Any, version: str) -> Any:
    """What is `said` of `version`: the same of all versions, or one thing for each span of them; None: nothing."""
    if not isinstance(said, dict):
        return said
    return next((fact for span, fact in said.items() if _covers(span, version)), None)


@cache
def load(version: str) -> Interface:
    """The interface of one of `versions()`."""
    tables = _tables()
    classes = {}
    for name, described in tables["classes"].items():
        if any(_covers(span, version) for span in described["in"]):
            facts = {member: _at(said, version) for member, said in described["members"].items()}
            there = {member: fact for member, fact in facts.items() if fact is not None}
            classes[name] = Class(tuple(_at(described["bases"], version)), there)
    functions = {name: _at(said, version) for name, said in tables["functions"].items()}
    return Interface(tables["versions"][version], classes, {name: fact for name, fact in functions.items() if fact})
