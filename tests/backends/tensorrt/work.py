"""Stand-ins for what the child does: they fail, die or wait as a test wants, without TensorRT."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import xxhash

PLAN = b"ftrt and some bytes"


def _note(task: dict[str, Any]) -> None:
    with open(os.environ["TRIED"], "a") as file:
        file.write(f"{task['refit']} {task['workspace']}\n")


def built(task: dict[str, Any]) -> dict[str, Any]:
    _note(task)
    Path(task["draft"]).write_bytes(PLAN)
    weights = [] if task["refit"] == "none" else task["weights"]
    return {
        "digest": xxhash.xxh3_128_hexdigest(PLAN), "nbytes": len(PLAN), "seconds": 0.25, "scratch_bytes": 77,
        "refit_weights": weights, "said": [], "lines": [],
    }  # fmt: skip


def fits(task: dict[str, Any]) -> bool:
    return bool(task["workspace"] <= int(os.environ["FITS"]))


def killed(task: dict[str, Any]) -> dict[str, Any]:
    if fits(task):
        return built(task)
    _note(task)
    signal.raise_signal(signal.SIGKILL)
    return {}


def without_memory(task: dict[str, Any]) -> dict[str, Any]:
    if fits(task):
        return built(task)
    _note(task)
    raise MemoryError


def no_implementation(task: dict[str, Any]) -> dict[str, Any]:
    if fits(task):
        return built(task)
    _note(task)
    lines = ["E Error Code 10: Could not find any implementation for node /conv1."]
    return {"reason": "memory", "words": "Invalid Engine", "said": [], "lines": lines}


def refused(task: dict[str, Any]) -> dict[str, Any]:
    built(task)
    return {"reason": "refused", "words": "Could not parse", "said": ["heed this"], "lines": ["E no importer for Foo"]}


def not_identical(task: dict[str, Any]) -> dict[str, Any]:
    if task["refit"] == "individual":
        return built(task)
    _note(task)
    return {"reason": "weights", "words": "would have to give c0, c1", "said": [], "lines": []}


def no_weights(task: dict[str, Any]) -> dict[str, Any]:
    _note(task)
    return {"reason": "weights", "words": f"{task['refit']} would not reach w1", "said": [], "lines": []}


def ends_the_build(task: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of the process that builds, at the third block."""
    answer = built(task)
    if len(Path(os.environ["TRIED"]).read_text().splitlines()) == 3:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    return answer


def waits(task: dict[str, Any]) -> dict[str, Any]:
    """Until something is written to the FIFO."""
    Path(os.environ["FIFO"]).read_text()
    return built(task)


def disk_is_full(task: dict[str, Any]) -> dict[str, Any]:
    raise OSError(28, "No space left on device", task["draft"])


def broken(task: dict[str, Any]) -> dict[str, Any]:
    raise ZeroDivisionError("oops")
