"""What the command line prints and where: results, errors in words, and the one object of --json.

May import errors. Errors that are none of ours become one; a reader who has gone is no error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_layering.errors import BudgetError, LayeringError, MemoryLimitError

NOBODY_READS = 141


@dataclass(frozen=True)
class Result:
    """What a verb found: `data` for --json, `lines` for people, and the exit status."""

    data: dict[str, Any]
    lines: Sequence[str]
    status: int = 0


def leave_quietly() -> int:
    """Standard output or error is a pipe whose reader has gone: let the interpreter's last flush go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())
    return NOBODY_READS


def explain(error: Exception) -> LayeringError:
    """Any error as one of ours, in words."""
    if isinstance(error, LayeringError):
        return error
    if isinstance(error, MemoryError):
        remedy = "lower the budget or the block size, or stop other programs"
        return MemoryLimitError("the machine did not give the memory that was needed", remedy=remedy)
    if isinstance(error, ModuleNotFoundError):
        return LayeringError(f"{error.name} is not installed", remedy=f"pip install {error.name}")
    if isinstance(error, OSError) and error.strerror:
        remedy = "free some disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check that path"
        return LayeringError(error.strerror, where=str(error.filename or ""), remedy=remedy if error.filename else "")
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    remedy = "please report it with the command; TRT_LAYERING_TRACEBACK=1 before the command shows more"
    return LayeringError(f"a fault of trt-layering itself: {type(error).__name__}: {error}", where=where, remedy=remedy)


class Terminal:
    """Where words go. With --json, standard output carries one object and nothing else, come what may."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    @contextlib.contextmanager
    def only_results_on_stdout(self) -> Iterator[None]:
        """While a verb works, what libraries print (Polygraphy, C code) goes to standard error."""
        if not self._as_json:
            yield
            return
        with contextlib.redirect_stdout(sys.stderr), _descriptor_redirected():
            yield

    def show(self, result: Result) -> None:
        self._print(result.data, result.lines)

    def failed(self, error: LayeringError, status: int) -> int:
        print(f"error: {error}", file=sys.stderr, flush=True)
        told: dict[str, Any] = {
            "kind": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy
        }  # fmt: skip
        if isinstance(error, BudgetError):
            told |= {"floor_bytes": error.floor, "parts": error.parts}
        self._print({"error": told, "status": status}, ())
        return status

    def _print(self, data: Mapping[str, Any], lines: Sequence[str]) -> None:
        text = json.dumps(_plain(data), allow_nan=False) if self._as_json else "\n".join(lines)
        if text:
            print(text, flush=True)


@contextlib.contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """File descriptor 1 joined to 2 for a while, where Python's own standard output is that descriptor."""
    if sys.__stdout__ is None or sys.__stderr__ is None:
        yield
        return
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _plain(value: Any) -> Any:
    """`value` with only what JSON has; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)
