"""A subject's process: it answers, its errors come back, and it never outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chains
from trt_layering import child
from trt_layering.bench.worker import EndedError, Worker
from trt_layering.errors import NotBuiltError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The uncut model in memory, the quickest of all subjects to open."""
    folder = tmp_path_factory.mktemp("worker")
    model = chains.saved(chains.layers(), folder / "layers.onnx")
    child.save_arrays(folder / "feeds.npz", [chains.feed()])
    return {"kind": "memory", "model": str(model), "feeds": str(folder / "feeds.npz")}


@pytest.fixture
def worker(task: dict[str, Any]) -> Iterator[Worker]:
    with Worker("the model", task) as held:
        yield held


def turn(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"iterations": 4, "seconds": 60.0, "answers": str(folder / "answers.npz"), **changes}


def test_a_turn_gives_times_memory_and_answers(worker: Worker, task: dict[str, Any], tmp_path: Path) -> None:
    assert worker.opened["peak_bytes"] > 0
    assert {"numpy", "onnxruntime"} <= set(worker.opened["modules"])
    for iterations in (4, 1):
        told = worker.ask(turn(tmp_path, iterations=iterations))
        assert len(told["seconds"]) == iterations
        assert told["running_bytes"] > 10 << 20
        assert (told["bytes_read"], told["stall_seconds"]) == (0, None)
    [answers] = child.load_arrays(tmp_path / "answers.npz")
    chains.assert_same(chains.uncut(Path(task["model"]), chains.feed(), optimised=True), answers)


def test_a_turn_ends_when_its_time_is_over(worker: Worker, tmp_path: Path) -> None:
    assert len(worker.ask(turn(tmp_path, iterations=1_000_000, seconds=0.01))["seconds"]) < 1_000_000


def test_our_errors_come_back(task: dict[str, Any], tmp_path: Path) -> None:
    chain = {"kind": "chain", "name": "none", "repository": str(tmp_path), "version": 1, "budget": None, "loader": {}}
    with pytest.raises(NotBuiltError, match="none"):
        Worker("the chain", {**chain, "mode": "auto", "feeds": task["feeds"]})


def test_a_process_that_is_ended_is_told_in_words(worker: Worker, tmp_path: Path) -> None:
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(EndedError, match="its process was ended by signal 9: it said nothing") as caught:
        worker.ask(turn(tmp_path))
    assert caught.value.where == "the model"
    assert "memory ran out" in caught.value.remedy


def test_a_crash_is_told_with_its_last_words(task: dict[str, Any]) -> None:
    with pytest.raises(EndedError, match="ended with status 1: KeyError: 'model'"):
        Worker("the model", {"kind": "memory", "feeds": task["feeds"]})


def test_one_that_does_not_answer_is_ended(task: dict[str, Any], tmp_path: Path) -> None:
    with Worker("the model", task) as worker:
        os.kill(worker._process.pid, signal.SIGSTOP)
        worker._patience = 0.05
        with pytest.raises(EndedError, match="did not answer within"):
            worker.ask(turn(tmp_path))
        assert worker._process.wait() == -signal.SIGKILL


def test_it_ends_with_its_parent(task: dict[str, Any]) -> None:
    program = (
        "from trt_layering.bench.worker import Worker\n"
        f"worker = Worker('m', {task!r})\n"
        "print(worker._process.pid, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child.environment(),
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert running(process)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while running(process) and time.monotonic() < deadline:
        os.sched_yield()
    assert not running(process)


def running(process: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
