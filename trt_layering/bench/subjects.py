"""What is compared: which subjects there are, and, in a process of its own, one of them opened and run.

May import the runtime, inputs' arrays and, through `plain`, onnxruntime. Raises what these raise.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trt_layering import child
from trt_layering.bench import plain
from trt_layering.runtime import meter

if TYPE_CHECKING:
    from trt_layering.runtime.trace import Event

_WARM_UPS = 2
_TRACED_AFTER = 3  # sweeps
_TRACED = 6
_TOLD = ("bytes_read", "stall_seconds", "mode", "fallbacks", "predicted_seconds")  # of a chain's stats


@dataclass(frozen=True)
class Subject:
    """`name` as in --against and in results, `label` for people. `for_each_budget`: it is opened anew with each budget;
    the others hold everything. `needs_model`: it runs the uncut model. `may_fail`: that it cannot run is a finding."""

    name: str
    label: str
    for_each_budget: bool
    needs_model: bool = False
    may_fail: bool = False


CHAIN = Subject("chain", "the chain", for_each_budget=True)
SUBJECTS = {
    subject.name: subject
    for subject in (
        CHAIN,
        Subject("sequential", "the chain in sequential mode", for_each_budget=True),
        Subject("double", "the chain with a double buffer", for_each_budget=True),
        Subject("mapped", "ONNX Runtime, model mapped", for_each_budget=True, needs_model=True, may_fail=True),
        Subject("memory", "ONNX Runtime in memory", for_each_budget=False, needs_model=True, may_fail=True),
        Subject("resident", "the chain, everything in memory", for_each_budget=False, may_fail=True),
    )
}
AGAINST = tuple(name for name in SUBJECTS if name != CHAIN.name)
MODES = {"chain": "auto", "sequential": "sequential", "double": "double", "resident": "auto"}


class _Running(Protocol):
    """One open subject."""

    def run(self) -> child.Feeds: ...
    def counters(self) -> dict[str, Any]:
        """`bytes_read` and `stall_seconds` since it was opened, and what it takes for weights."""
        ...

    def peak_bytes(self) -> int:
        """Its highest since the peak was reset, with what it has taken of a GPU's memory."""
        ...

    def settle(self) -> None:
        """Wait until it does nothing in the background."""
        ...


class _Chain:
    def __init__(self, task: Mapping[str, Any], feeds: child.Feeds) -> None:
        import trt_layering as tl

        tl.share_thread_pool()
        self._feeds = feeds
        self.chain = tl.open_chain(
            task["name"], repository=task["repository"], version=task["version"], budget=task["budget"],
            loader=tl.LoaderOptions(**task["loader"]), mode=task["mode"],
        )  # fmt: skip

    def run(self) -> child.Feeds:
        return self.chain.run(self._feeds)

    def counters(self) -> dict[str, Any]:
        stats = self.chain.stats()
        told = {key: stats[key] for key in _TOLD}
        return {**told, "weights_in_memory_bytes": max(stats["arena_bytes"], stats["resident_bytes"])}

    def peak_bytes(self) -> int:
        """A chain takes a GPU's memory when it is opened, and keeps it."""
        device_bytes: int = self.chain.stats()["device_bytes"]
        return meter.peak_rss_bytes() + device_bytes

    def settle(self) -> None:
        """The loader reads ahead for the next sweep."""
        self.chain.settle()


class _Session:
    def __init__(self, task: Mapping[str, Any], feeds: child.Feeds) -> None:
        self._feeds = feeds
        if task["kind"] == "memory":
            self._session = plain.in_memory(task["model"])
        else:
            self._session = plain.mapped_session(task["model"], "ORT_DISABLE_ALL")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self) -> child.Feeds:
        from trt_layering.backends.onnxruntime.runtime import reported, run_plainly

        with reported("the uncut model", "give the model that the chain was built from"):
            return run_plainly(self._session, self._outputs, self._feeds)

    def counters(self) -> dict[str, Any]:
        return {"bytes_read": _bytes_from_drives(), "stall_seconds": None, "mode": None, "fallbacks": [],
                "predicted_seconds": None, "weights_in_memory_bytes": None}  # fmt: skip

    def peak_bytes(self) -> int:
        """It has memory of the process alone."""
        return meter.peak_rss_bytes()

    def settle(self) -> None:
        """It works only when it is run."""


def _bytes_from_drives() -> int:
    """What the kernel has fetched from storage for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def opened(task: Mapping[str, Any]) -> tuple[Turns, dict[str, Any]]:
    """Open, in this process, the subject of `task` and run it until it is warm; with it what there is to tell."""
    feeds = child.load_arrays(Path(task["feeds"]))[0]
    if task["kind"] in MODES:
        import onnxruntime  # noqa: F401

        import trt_layering as tl

        tl.open_chain  # noqa: B018 - imported before memory is looked at
    meter.reset_peak()
    running: _Running = (_Chain if task["kind"] in MODES else _Session)(task, feeds)
    for _ in range(_WARM_UPS):
        running.run()
    told = {"peak_bytes": running.peak_bytes(), "modules": sorted(sys.modules)}
    meter.reset_peak()
    return Turns(running), told


class Turns:
    """An open subject, of which each request is one turn."""

    def __init__(self, running: _Running) -> None:
        self._running = running

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds of each of up to `iterations` runs, at least one, begun within `seconds`; their last outputs go to
        the file `answers`. A first run is not counted, since it meets what others left in the caches, and what was
        read ahead meanwhile."""
        iterations, most_seconds, answers = request["iterations"], request["seconds"], Path(request["answers"])
        self._running.run()
        before = self._running.counters()
        seconds: list[float] = []
        while not seconds or (len(seconds) < iterations and sum(seconds) < most_seconds):
            begin = time.perf_counter()
            outputs = self._running.run()
            seconds.append(time.perf_counter() - begin)
        after = self._running.counters()
        child.save_arrays(answers, [outputs])
        self._running.settle()
        stalled = None if after["stall_seconds"] is None else after["stall_seconds"] - before["stall_seconds"]
        return {
            **after, "seconds": seconds, "bytes_read": after["bytes_read"] - before["bytes_read"],
            "stall_seconds": stalled, "running_bytes": self._running.peak_bytes(),
        }  # fmt: skip


def traced(task: Mapping[str, Any]) -> dict[str, Any]:
    """Child function of `child.call`: what happened when in two consecutive sweeps, of the pairs that a chain runs
    after a while the one of median length.

    `begin` and `end` of `events` are in milliseconds from the first of the two on, `arena` holds pairs of such a time
    and the bytes of weights that the arena holds from there on.
    """
    import trt_layering as tl
    from trt_layering.runtime.trace import Trace

    trace, feeds = Trace(), child.load_arrays(Path(task["feeds"]))[0]
    tl.share_thread_pool()
    with tl.open_chain(
        task["name"], repository=task["repository"], version=task["version"], budget=task["budget"],
        loader=tl.LoaderOptions(**task["loader"]), trace=trace,
    ) as chain:  # fmt: skip
        for _ in range(_TRACED_AFTER + _TRACED):
            chain.run(feeds)
    events = trace.events
    origin = min(event.begin for event in events)
    first, begin, end = _usual_pair([event for event in events if event.kind != "read"])
    counted = [
        ((one["ts"] / 1e6 + origin - begin) * 1e3, one["args"]["bytes"])
        for one in trace.chrome()["traceEvents"]
        if one["ph"] == "C"
    ]
    return {
        "arena_bytes": trace.arena_bytes, "blocks": len(trace.blocks), "sweeps": 2, "end": (end - begin) * 1e3,
        "events": [
            {"kind": event.kind, "block": event.block, "sweep": event.sweep - first, "bytes": event.bytes,
             "begin": max(0.0, event.begin - begin) * 1e3, "end": (min(event.end, end) - begin) * 1e3}
            for event in events
            if event.end > begin and event.begin < end
        ],
        "arena": [[max(0.0, when), held] for when, held in counted if when < (end - begin) * 1e3],
    }  # fmt: skip


def _usual_pair(events: Sequence[Event]) -> tuple[int, float, float]:
    """The first of two consecutive sweeps whose length together is the median one, when it begins and the other ends;
    `events` are waits and executions."""
    pairs = []
    for first in range(_TRACED_AFTER, _TRACED_AFTER + _TRACED - 1):
        both = [event for event in events if event.sweep in (first, first + 1)]
        pairs.append((first, min(event.begin for event in both), max(event.end for event in both)))
    return sorted(pairs, key=lambda pair: pair[2] - pair[1])[len(pairs) // 2]


def imported(task: Mapping[str, Any]) -> int:
    """Child function of `child.call`: the resident bytes of a process that has imported `task["modules"]` and done
    nothing else."""
    for name in task["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return meter.current_rss_bytes()


def prepare_mapped(task: Mapping[str, Any]) -> None:
    """Child function of `child.call`: `plain.optimise`."""
    plain.optimise(task["model"], task["target"])
