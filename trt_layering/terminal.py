"""What the command line prints and where: results, errors in words, the one object of --json, and progress.

May import errors and words; rich where progress is shown on a terminal. Errors that are none of ours become one. A
reader who has gone is no error, and nothing else about standard error is; a result that cannot be written is one. What
is printed may quote files of others: control characters are written out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from trt_layering.errors import BudgetError, LayeringError, MemoryLimitError
from trt_layering.words import printable

NOBODY_READS = 141
_SECONDS_BETWEEN_LINES = 3.0


@dataclass(frozen=True)
class Result:
    """What a verb found: `data` for --json, `lines` for people, and the exit status."""

    data: dict[str, Any]
    lines: Sequence[str]
    status: int = 0


def say(text: str, stream: TextIO) -> OSError | None:
    """Write `text` to `stream` now. What cannot be written goes nowhere, or the interpreter's last flush would fail at
    it again; why it cannot is returned."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return error
    return None


def explain(error: Exception) -> LayeringError:
    """Any error as one of ours, in words."""
    if isinstance(error, LayeringError):
        return error
    if isinstance(error, MemoryError):
        remedy = "lower the budget or the block size, or stop other programs"
        return MemoryLimitError("the machine did not give the memory that was needed", remedy=remedy)
    if isinstance(error, ModuleNotFoundError):
        return LayeringError(f"{error.name} is not installed", remedy=f"pip install {error.name}")
    if isinstance(error, FileNotFoundError) and not error.filename and _current_folder_is_gone():
        where = os.environ.get("PWD", "")
        return LayeringError("the current folder is gone", where=where, remedy="change to a folder that exists")
    if isinstance(error, OSError) and error.strerror:
        remedy = "free some disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check that path"
        return LayeringError(error.strerror, where=str(error.filename or ""), remedy=remedy if error.filename else "")
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    remedy = "please report it with the command; TRT_LAYERING_TRACEBACK=1 before the command shows more"
    return LayeringError(f"a fault of trt-layering itself: {type(error).__name__}: {error}", where=where, remedy=remedy)


def _current_folder_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


class Stop(Protocol):
    """What `Progress` needs of a threading.Event."""

    def set(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Progress:
    """Shows how far long work is, called with stage, done, total: bars on a terminal, else a line every few seconds,
    whether or not it is called meanwhile. The lines come from a thread of its own, from enter to exit."""

    def __init__(
        self, stream: TextIO, *, stop: Stop | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`stop` and `clock` are replaced by tests."""
        self._stream = stream
        self._stop = stop or threading.Event()
        self._clock = clock
        self._begin = clock()
        self._latest = ("at work", 0, 0)
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._start_bars()
        else:
            self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._latest = (stage, done, total)
        if self._bars is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total or None)
            self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _start_bars(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bars = Progress(*parts, console=Console(file=self._stream))
        self._bars.start()

    def _print_lines(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads them
            while not self._stop.wait(_SECONDS_BETWEEN_LINES):
                stage, done, total = self._latest
                share = f" {done / total:.0%}" if total else f" {done}" if done else ""
                print(f"{stage}:{share} after {self._clock() - self._begin:.0f} s", file=self._stream, flush=True)


class Steps:
    """Shows each step of the build of the model `name`, called with stage, done, total: as bars on a terminal, else a
    line for each."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = printable(name)
        self._bars = Progress(stream) if stream.isatty() else None
        self._told = ""

    def __enter__(self) -> Steps:
        if self._bars is not None:
            self._bars.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.__exit__()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bars is not None:
            self._bars(f"{self._name}: {stage}", done, total)
            return
        line = f"{self._name}: {printable(stage)} {f'{done} of {total}' if total else done or ''}".rstrip()
        if line != self._told:
            self._told = line
            say(f"{line}\n", self._stream)


class Terminal:
    """Where words go. With --json, standard output carries one object and nothing else, come what may."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        _open_closed_streams()
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

    def show(self, result: Result) -> int:
        """Print `result`; the status to leave with."""
        text = self._text(result.data, result.lines)
        return self.leave(say(text, sys.stdout), result.status)

    def leave(self, unwritten: OSError | None, status: int) -> int:
        """The status to leave with: `status`, unless standard output could not be written, for the reason given."""
        if unwritten is None:
            return status
        if isinstance(unwritten, BrokenPipeError):
            return NOBODY_READS
        what = f"the result cannot be written: {unwritten.strerror}"
        error = LayeringError(what, where="standard output", remedy="let it go to a file on a drive with free space")
        return self.failed(error, error.exit_status)

    def failed(self, error: LayeringError, status: int) -> int:
        """Print `error`; the status to leave with, which is `status` as long as somebody reads."""
        say("".join(f"{printable(line)}\n" for line in f"error: {error}".split("\n")), sys.stderr)
        told: dict[str, Any] = {
            "kind": type(error).__name__, "what": error.what, "where": error.where, "remedy": error.remedy
        }  # fmt: skip
        if isinstance(error, BudgetError):
            told |= {"floor_bytes": error.floor, "parts": error.parts}
        unwritten = say(self._text({"error": told, "status": status}, ()), sys.stdout)
        return NOBODY_READS if isinstance(unwritten, BrokenPipeError) else status

    def _text(self, data: Mapping[str, Any], lines: Sequence[str]) -> str:
        if self._as_json:
            return json.dumps(_plain(data), allow_nan=False) + "\n"
        return "".join(f"{printable(line)}\n" for line in lines)


def _open_closed_streams() -> None:
    """What was closed leads nowhere instead: the next file opened would get its number, and what libraries print there;
    and Python prints to standard output what was for a standard error that it lacks."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


@contextlib.contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """File descriptor 1 joined to 2 for a while."""
    kept = os.dup(1)
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
