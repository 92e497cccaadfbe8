"""Programs that tests run in a process of their own, to look at its memory, threads and modules.

`python -m tests.runtime.measured PROGRAM ARGUMENTS`, the arguments as one JSON object; prints one JSON value. Imports
nothing that running a chain does not need.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import trt_layering as tl
from trt_layering.inputs import seeded
from trt_layering.runtime import meter, supply
from trt_layering.store.manifest import read_manifest, resolve
from trt_layering.store.reader import WeightFile

MIB = 1 << 20


def call(program: Callable[..., Any], **arguments: Any) -> Any:
    """What `program`, a function of this module, returns in a new process."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", __name__, program.__name__, json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def _budget(repository: str, name: str, mode: str) -> int:
    """In this process, where all engines share one thread pool."""
    tl.share_thread_pool()
    needs = tl.footprint(name, repository=repository)
    assert needs.floor < needs.fixed + needs.weights - 64 * 1024 < needs.resident
    return {"floor": needs.floor, "arena": needs.fixed + needs.weights - 64 * 1024, "resident": needs.resident}[mode]


def forked(repository: str, name: str) -> dict[str, Any]:
    """What a chain says in a forked process, and whether the parent's chain still runs. The child ends as those of
    multiprocessing do: at the interpreter's exit ONNX Runtime would wait for threads that a fork does not copy."""
    with tl.open_chain(name, repository=repository, budget=_budget(repository, name, "floor")) as chain:
        feeds = seeded(chain.inputs, {}, 0)
        chain.run(feeds)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, json.dumps(_in_the_child(chain, feeds)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as answer:
            found = json.loads(answer.read())
        _, status = os.waitpid(child, 0)
        chain.run(feeds)
        return {**found, "exit": os.waitstatus_to_exitcode(status), "parent": chain.stats()["sweeps"] == 2}


def _in_the_child(chain: Any, feeds: Any) -> dict[str, str]:
    try:
        chain.run(feeds)
        said = "ran"
    except tl.LayeringError as error:
        said = type(error).__name__
    chain.close()
    return {"run": said, "close": "returned"}


def peak(repository: str, name: str, mode: str, extra: int, runs: int) -> tuple[int, int, int]:
    """How far the peak lies above what the process had when it had imported everything, the budget, which is `extra`
    more than `mode` needs, and the arena that the chain took of it."""
    import trt_layering.backends.onnxruntime.runtime  # noqa: F401

    budget = _budget(repository, name, mode) + extra
    base = meter.current_rss_bytes()
    with tl.open_chain(name, repository=repository, budget=budget) as chain:
        for seed in range(runs):
            chain.run(seeded(chain.inputs, {}, seed))
        arena_bytes = chain.stats()["arena_bytes"]
    return meter.peak_rss_bytes() - base, budget, arena_bytes


def peak_of_waves(repository: str, name: str, room: int, asked: int) -> tuple[int, int, int]:
    """For waves of `asked` at the floor of a chain with room for `room`: how far the peak lies above what the process
    had when it had imported everything and made its feeds, the budget, and how many requests a wave had."""
    import trt_layering.backends.onnxruntime.runtime  # noqa: F401

    tl.share_thread_pool()
    budget = tl.footprint(name, repository=repository, wave=room).floor
    inputs = read_manifest(resolve(Path(repository), name)).inputs
    feeds = [seeded(inputs, {}, seed) for seed in range(asked)]
    base = meter.current_rss_bytes()
    with tl.open_chain(name, repository=repository, budget=budget, wave=room) as chain:
        for _ in range(2):
            chain.run_many(feeds, wave=asked)
        stats = chain.stats()
    return meter.peak_rss_bytes() - base, budget, stats["requests"] // stats["sweeps"]


def leak(repository: str, name: str, mode: str, rows: list[int], runs: int, cycles: int) -> dict[str, list[int]]:
    """Resident bytes at ten points of many runs, and of many times opening and closing."""
    feeds = [{"x": np.ones((count, 64), np.float32)} for count in rows]
    budget = _budget(repository, name, mode)
    while_running, while_opening = [], []
    with tl.open_chain(name, repository=repository, budget=budget) as chain:
        for number in range(runs):
            chain.run(feeds[number % len(feeds)])
            if number % (runs // 10) == runs // 10 - 1:
                while_running.append(meter.current_rss_bytes())
    for number in range(cycles):
        with tl.open_chain(name, repository=repository, budget=budget) as chain:
            chain.run(feeds[0])
        if number % (cycles // 10) == cycles // 10 - 1:
            while_opening.append(meter.current_rss_bytes())
    return {"runs": while_running, "cycles": while_opening}


def given_back(repository: str, name: str, mode: str) -> dict[str, int]:
    """Resident bytes before a chain was opened, while it was open, and after it was closed."""
    budget = _budget(repository, name, mode)
    feeds = {"x": np.ones((1, 512), np.float32)}
    with tl.open_chain(name, repository=repository, budget=budget) as chain:
        chain.run(feeds)
    before = meter.current_rss_bytes()
    chain = tl.open_chain(name, repository=repository, budget=budget)
    chain.run(feeds)
    during = meter.current_rss_bytes()
    chain.close()
    return {"before": before, "during": during, "after": meter.current_rss_bytes()}


def modules(repository: str, name: str, mode: str) -> list[str]:
    """What is imported once a chain has run."""
    budget = _budget(repository, name, mode)
    with tl.open_chain(name, repository=repository, budget=budget) as chain:
        chain.run({"x": np.ones((1, 64), np.float32)})
        chain.stats()
    return sorted({name.partition(".")[0] for name in sys.modules})


def threads(repository: str, name: str, shared: bool) -> tuple[int, int]:
    """How many threads the process has while a chain with the smallest arena is open, and how many after it."""
    if shared:
        tl.share_thread_pool()
    budget = tl.footprint(name, repository=repository).floor
    with tl.open_chain(name, repository=repository, budget=budget) as chain:
        chain.run({"x": np.ones((1, 512), np.float32)})
        assert chain.stats()["mode"] == "sequential"
        during = len(os.listdir("/proc/self/task"))
    return during, len(os.listdir("/proc/self/task"))


def public_modules() -> list[str]:
    """What `import trt_layering` alone imports."""
    code = "import sys; before = set(sys.modules); import trt_layering; print(*sorted(set(sys.modules) - before))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def collected_by_its_loader(repository: str, name: str, reads: int) -> list[str]:
    """Drops a chain, which only a cycle holds then, while its loader reads ahead after the `reads` reads of the first
    sweep; the loader's own thread finds it. Returns what threads are left."""
    chains: list[Any] = []
    dropped, gone = threading.Event(), threading.Event()
    count = 0

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal count
        done = os.preadv(descriptor, buffers, offset)
        if threading.current_thread() is not threading.main_thread():
            count += 1
            if count == reads + 1:
                assert dropped.wait(20)
                weakref.finalize(chains.pop(), gone.set)
                gc.collect()
        return done

    supply.WeightFile = partial(WeightFile, preadv=preadv)  # type: ignore[misc]
    options = tl.LoaderOptions(threads=1, verify="always")
    budget = _budget(repository, name, "floor")
    chain: Any = tl.open_chain(name, repository=repository, budget=budget, loader=options)
    chain.myself = chain
    chain.run({"x": np.ones((1, 64), np.float32)})
    chains.append(chain)
    del chain
    dropped.set()
    assert gone.wait(20)
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(20)
    return [thread.name for thread in threading.enumerate()]


def left_open(repository: str, name: str) -> str:
    """Ends the process with a chain open and its loader at work."""
    chain = tl.open_chain(name, repository=repository, budget=_budget(repository, name, "floor"))
    chain.run({"x": np.ones((1, 64), np.float32)})
    sys.modules["kept"] = chain  # type: ignore[assignment]
    return "ended"


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
