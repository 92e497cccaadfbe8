"""Work in a process of its own: where memory can be measured, and where running out of it ends only that process.

May import errors. What the child raises of ours is raised here; a child that dies otherwise raises Died, a BuildError.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trt_layering import errors

Feeds = dict[str, np.ndarray[Any, Any]]
Work = Callable[[dict[str, Any]], Any]
_M_MMAP_THRESHOLD = -3
_PR_SET_PDEATHSIG = 1
_WHERE = "a process of its own"


class Died(errors.BuildError):
    """A child ended without an answer; `status` is its exit status, negative for the signal that ended it."""

    status = 0


def call(work: Work, task: Mapping[str, Any]) -> Any:
    """`work(task)` in a new Python process that the kernel would end before this one.

    `work` is a function of a module; `task` and what it returns must be plain JSON.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, f"{work.__module__}:{work.__qualname__}"],
        input=json.dumps(task), capture_output=True, text=True, check=False,
        env=environment(),
    )  # fmt: skip
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if "error" in answer:
        raise as_raised(answer)
    if done.returncode == 0 and "result" in answer:
        return answer["result"]
    died = Died(
        f"a process of its own {how_it_ended(done.returncode)}: {done.stderr.strip()[-2000:] or 'it said nothing'}",
        where=work.__module__,
        remedy="signal 9 mostly means that memory ran out: stop other programs; a build can do with less --memory",
    )
    died.status = done.returncode
    raise died


def environment() -> dict[str, str]:
    """That of this process, in which a child finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def how_it_ended(status: int) -> str:
    """A process's exit status, negative for the signal that ended it, in words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def as_raised(answer: Mapping[str, str]) -> errors.LayeringError:
    """The error that `as_told` told."""
    raised: errors.LayeringError = getattr(errors, answer["error"])(
        answer["what"], where=answer["where"], remedy=answer["remedy"]
    )
    return raised


def as_told(error: errors.LayeringError | OSError | MemoryError) -> dict[str, str]:
    """`error` as plain JSON; one that is none of ours becomes one."""
    if not isinstance(error, errors.LayeringError):
        return _as_ours(error)
    known = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
    kind = "BuildError" if known == "BudgetError" else known
    return {"error": kind, "what": error.what, "where": error.where, "remedy": error.remedy}


def main() -> None:
    """The child: a task on standard input, the answer on standard output, alone there: what else is printed goes to
    standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    end_with_the_parent()
    offer_to_the_kernel()
    _return_memory_at_once()
    module, _, name = sys.argv[1].partition(":")
    work = getattr(importlib.import_module(module), name)
    gc.freeze()  # closing a chain collects garbage, which imported modules are not
    try:
        print(json.dumps({"result": work(json.load(sys.stdin))}), file=answer)
    except (OSError, MemoryError, errors.LayeringError) as error:
        print(json.dumps(as_told(error)), file=answer)
        sys.exit(error.exit_status if isinstance(error, errors.LayeringError) else 1)


def _as_ours(error: OSError | MemoryError) -> dict[str, str]:
    if isinstance(error, MemoryError):
        remedy = "stop other programs; a build can do with less --memory"
        return {"error": "MemoryLimitError", "what": "memory ran out", "where": _WHERE, "remedy": remedy}
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space, or" if full else "check that the folder is there and can be written, or"
    remedy += " name a --repository on another drive"
    what, where = f"the disk refused: {error.strerror or error}", str(error.filename or _WHERE)
    return {"error": "DiskError", "what": what, "where": where, "remedy": remedy}


def end_with_the_parent() -> None:
    """For a child. Nobody would take the answer, and the folder would be in the way of the next build."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def offer_to_the_kernel() -> None:
    """For a child: where memory runs out, it goes before its parent and other programs."""
    try:
        Path("/proc/self/oom_score_adj").write_text("800")
    except OSError:
        return


def _return_memory_at_once() -> None:
    """glibc keeps what is freed in pieces of less than 32 MiB, which are most weights; here they go back to the
    kernel."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def save_arrays(file: Path, trials: Sequence[Feeds]) -> None:
    """Write named arrays, any number of sets of them; strings and dtypes that numpy lacks included."""
    names = [[[name, array.dtype.name] for name, array in feeds.items()] for feeds in trials]
    arrays = [_plain(array) for feeds in trials for array in feeds.values()]
    named: dict[str, Any] = {f"a{n}": array for n, array in enumerate(arrays)}
    np.savez(file, names=np.array(json.dumps(names)), **named)


def load_arrays(file: Path) -> list[Feeds]:
    """What `save_arrays` wrote."""
    with np.load(file) as archive:
        arrays = (archive[f"a{n}"] for n in range(len(archive.files) - 1))
        return [
            {name: _restored(next(arrays), dtype) for name, dtype in feeds}
            for feeds in json.loads(str(archive["names"]))
        ]


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind == "O":
        return array.astype(str)
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _restored(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "object":
        return array.astype(object)
    if array.dtype.name == dtype or array.dtype.kind == "U":
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))


if __name__ == "__main__":
    main()
