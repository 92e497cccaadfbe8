"""Checks, how they went, and the report of them. Imports errors; a check that fails is a finding, nothing is raised."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trt_layering.errors import LayeringError
from trt_layering.table import columns

SCHEMA = 2
Numbers = dict[str, Any]
Say = Callable[[str], None]

_ROOT = Path(__file__).resolve().parents[2]
_PATH = re.compile(r"(?<![\w.~/])(?:/[^\s/:'\"`,;()]+)+/([^\s/:'\"`,;()]+)")
_ONLY_IN_THE_REPORT = ("build_seconds", "plan_bytes", "placement")
_POST = "post the report: this may be a fault of ours"


class Wrong(Exception):
    """What a check found is not as it must be: the words say what, and `to_do` what to do about it."""

    def __init__(self, words: str, to_do: str = _POST) -> None:
        super().__init__(words)
        self.to_do = to_do


class LeftOut(Exception):
    """A check cannot be made here, which is no fault: the words say why."""


@dataclass
class Check:
    """One finding. `numbers` bear their unit in their name: `_bytes`, `_seconds`, `_bytes_per_second`."""

    name: str
    ok: bool
    words: str
    seconds: float
    numbers: Numbers = field(default_factory=dict)
    to_do: str = ""
    left_out: bool = False


@dataclass
class Part:
    """All findings about one thing, such as "cuda" or "tensorrt"; or in words what it `lacks` to be carried out."""

    name: str
    ok: bool
    seconds: float
    checks: list[Check]
    lacks: str = ""


def carry_out(name: str, checks: Sequence[tuple[str, Callable[[], Numbers]]], say: Say) -> Part:
    """Every check in turn, whatever the one before it found. A check returns its numbers, or raises."""
    begin, found = time.perf_counter(), []
    for title, check in checks:
        found.append(attempted(title, check))
        say(f"{name}: {title}: {_verdict(found[-1])} ({found[-1].seconds:.1f} s)")
    return Part(name, all(check.ok for check in found), time.perf_counter() - begin, found)


def not_carried_out(name: str, lacks: str, say: Say) -> Part:
    """A part that nothing can be said of on this machine."""
    say(f"{name}: not checked: {lacks}")
    return Part(name, True, 0.0, [], lacks)


def attempted(title: str, check: Callable[[], Numbers]) -> Check:
    """What `check` found, or what it raised."""
    begin = time.perf_counter()
    try:
        numbers = check()
    except LeftOut as why:
        return Check(title, True, str(why), time.perf_counter() - begin, left_out=True)
    except Wrong as wrong:
        return Check(title, False, str(wrong), time.perf_counter() - begin, to_do=wrong.to_do)
    except LayeringError as error:
        where = f" ({error.where})" if error.where else ""
        return Check(title, False, f"{error.what}{where}", time.perf_counter() - begin, to_do=error.remedy or _POST)
    except Exception:
        return Check(title, False, traceback.format_exc(limit=-4), time.perf_counter() - begin, to_do=_POST)
    return Check(title, True, "ok", time.perf_counter() - begin, numbers)


def _verdict(check: Check) -> str:
    if check.left_out:
        return f"left out: {check.words}"
    return "ok" if check.ok else f"WRONG: {check.words}"


def write(path: Path, machine: dict[str, Any], parts: Sequence[Part]) -> bool:
    """Write the report, and say whether everything is as it must be."""
    ok = all(part.ok for part in parts)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = {"schema": SCHEMA, "made": made, "ok": ok, **machine, "parts": [asdict(part) for part in parts]}
    path.write_text(json.dumps(private(report), indent=2) + "\n", encoding="utf-8")
    return ok


def private(found: Any) -> Any:
    """`found` with every absolute path in its texts cut down: within the repository to where it lies there, else to the
    file's name. So a report tells nobody's name."""
    if isinstance(found, str):
        return _PATH.sub(lambda match: f"…/{match[1]}", found.replace(f"{_ROOT}/", ""))
    if isinstance(found, Mapping):
        return {key: private(value) for key, value in found.items()}
    return [private(value) for value in found] if isinstance(found, (list, tuple)) else found


def table(parts: Sequence[Part]) -> list[str]:
    """The parts for people: a row for each check, and below what went wrong with what to do."""
    rows = [("part", "check", "", "took", "")]
    for part in parts:
        if part.lacks:
            rows.append((part.name, "", "not checked", "", private(part.lacks)))
        for check in part.checks:
            word = "left out" if check.left_out else ("ok" if check.ok else "WRONG")
            rows.append((part.name, check.name, word, f"{check.seconds:.1f} s", _told(check)))
    wrong = [(part, check) for part in parts for check in part.checks if not check.ok]
    faults = [f"{part.name}, {check.name}: {private(check.words)}\n  to do: {check.to_do}" for part, check in wrong]
    return [*columns(rows), *(["", *faults] if faults else [])]


def _told(check: Check) -> str:
    """The numbers of a check that fit into a line."""
    if check.left_out:
        return str(private(check.words))
    return ", ".join(_pairs(check.numbers))


def _run(found: Mapping[str, Any]) -> str:
    taken, given = (found[key] / (1 << 20) for key in ("device_bytes", "budget_bytes"))
    return f"{found['run_seconds'] * 1e3:.3g} ms in {taken:.3g} of {given:.3g} MiB"


def _pairs(numbers: Mapping[str, Any]) -> Iterator[str]:
    for key, value in numbers.items():
        name = key.replace("_", " ")
        if key == "budgets":
            yield from (f"{words} {_run(found)}" for words, found in value.items())
        elif isinstance(value, Mapping) or key in _ONLY_IN_THE_REPORT:
            continue
        elif key.endswith("_bytes_per_second") and value:
            yield f"{name.removesuffix(' bytes per second')} {value / 1e9:.3g} GB/s"
        elif key.endswith("_seconds") and value is not None:
            yield f"{name.removesuffix(' seconds')} {value * 1e3:.3g} ms"
        elif key.endswith("_bytes"):
            yield f"{name.removesuffix(' bytes')} {value / (1 << 20):.3g} MiB"
        elif isinstance(value, float):
            yield f"{name} {value:.2g}"
        elif not isinstance(value, (list, tuple)) and value is not None:
            yield f"{name} {value}"
