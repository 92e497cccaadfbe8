"""Checks, how they went, and the report of them. Imports errors; a check that fails is a finding, nothing is raised."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trt_layering.errors import LayeringError

SCHEMA = 1
Numbers = dict[str, Any]


class Wrong(Exception):
    """What a check found is not as it must be; the words say what."""


@dataclass
class Check:
    """One finding. `numbers` bear their unit in their name: `_bytes`, `_seconds`, `_bytes_per_second`."""

    name: str
    ok: bool
    words: str
    seconds: float
    numbers: Numbers = field(default_factory=dict)


@dataclass
class Part:
    """All findings about one thing, such as "cuda" or "tensorrt"."""

    name: str
    ok: bool
    seconds: float
    checks: list[Check]


def carry_out(name: str, checks: Sequence[tuple[str, Callable[[], Numbers]]], say: Callable[[str], None]) -> Part:
    """Every check in turn, whatever the one before it found. A check returns its numbers, or raises."""
    begin, found = time.perf_counter(), []
    for title, check in checks:
        found.append(_carried_out(title, check))
        say(f"{name}: {title}: {'ok' if found[-1].ok else 'WRONG: ' + found[-1].words} ({found[-1].seconds:.1f} s)")
    return Part(name, all(check.ok for check in found), time.perf_counter() - begin, found)


def _carried_out(title: str, check: Callable[[], Numbers]) -> Check:
    begin = time.perf_counter()
    try:
        numbers, words = check(), "ok"
    except (Wrong, LayeringError) as error:
        return Check(title, False, str(error), time.perf_counter() - begin)
    except Exception:
        return Check(title, False, traceback.format_exc(limit=-4), time.perf_counter() - begin)
    return Check(title, True, words, time.perf_counter() - begin, numbers)


def write(path: Path, machine: dict[str, Any], parts: Sequence[Part]) -> bool:
    """Write the report, and say whether everything is as it must be."""
    ok = all(part.ok for part in parts)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = {"schema": SCHEMA, "made": made, "ok": ok, **machine, "parts": [asdict(part) for part in parts]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return ok
