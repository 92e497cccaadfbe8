"""The models of a deployment as its threads share them: queues, chains and counts, all under one lock.

May import the chain, queues, the gate and parts. Nothing here waits or fails; what one thread changes, it tells the
others by `Fleet.changed`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, Literal

from trt_layering.config import Model
from trt_layering.errors import ClosedError, CorruptError, LayeringError, UnavailableError
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.gate import Gate, Lane
from trt_layering.runtime.parts import Candidate, Part
from trt_layering.runtime.queues import Request, most_urgent, urgency
from trt_layering.runtime.trace import Event, Trace
from trt_layering.store.manifest import WEIGHTS_FILE, Value, rebuild_remedy

log = logging.getLogger("trt_layering")

State = Literal["loading", "ready", "unloaded", "unavailable"]
_EVENTS = 2000
"""Of one sweep, kept for each model: some 300 bytes each."""
_SUMS = ("sweeps", "stall_seconds", "execute_seconds", "bytes_read")


@dataclass(frozen=True)
class ModelState:
    """A model as it was at one moment. `reason` says in words why it is unavailable, `version` is the one that serves;
    `budget_bytes` is its part of the memory budget, `resident_bytes` those of its weights that stay. Counts, seconds
    and bytes are since the deployment started, over all versions: `requests` were answered and `failures` were not,
    `queue_seconds` they waited together, `latency_seconds` they took from when they came. `wave_sizes` counts sweeps by
    how many requests they served; `last_sweep` is the timeline of the last that ended, with the reads for the next."""

    name: str
    version: int | None
    state: State
    reason: str
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    backend: str = ""
    queued: int = 0
    budget_bytes: int = 0
    resident_bytes: int = 0
    floor_bytes: int = 0
    requests: int = 0
    failures: int = 0
    deadline_misses: int = 0
    sweeps: int = 0
    wave_sizes: Mapping[int, int] = field(default_factory=dict)
    stall_seconds: float = 0.0
    execute_seconds: float = 0.0
    bytes_read: int = 0
    queue_seconds: float = 0.0
    latency_seconds: float = 0.0
    predicted_seconds: float | None = None
    fallbacks: tuple[str, ...] = ()
    last_sweep: tuple[Event, ...] = ()


class Recent(Trace):
    """What one chain did in its last sweep, and what it does in the next. `beat` is called as the chain gets on, by the
    thread that runs it."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__(1)
        self._sweeps: defaultdict[int, list[Event]] = defaultdict(list)
        self._ended = -1
        self._beat = beat

    @property
    def events(self) -> list[Event]:
        """Those that are kept, by sweep: a list of the caller's own."""
        return [event for events in list(self._sweeps.values()) for event in list(events)]

    def add(self, event: Event) -> None:
        """Keep `event`, and forget the sweeps before the last that ended."""
        events = self._sweeps[event.sweep]
        if len(events) < _EVENTS:
            events.append(event)
        if event.kind == "read":
            return
        self._beat()
        if event.sweep > self._ended and event.kind == "execute" and event.block == len(self.blocks) - 1:
            self._ended = event.sweep
            for sweep in [sweep for sweep in list(self._sweeps) if sweep < event.sweep]:
                del self._sweeps[sweep]

    def last_sweep(self) -> tuple[Event, ...]:
        """Of the last sweep that came to its end, with the reads for the next."""
        following = list(self._sweeps.get(self._ended + 1, ())) if self._ended >= 0 else []
        return (*self._sweeps.get(self._ended, ()), *(event for event in following if event.kind == "read"))


@dataclass(frozen=True)
class Store:
    """The weight store of a chain, as it was when the chain was opened."""

    file: Path
    mark: tuple[int, ...] | None

    @classmethod
    def of(cls, folder: Path) -> Store:
        """Of the chain in `folder`, as it is now."""
        file = folder / WEIGHTS_FILE
        return cls(file, _mark(file))

    @property
    def version(self) -> int:
        """The chain's."""
        return int(self.file.parent.name)

    def is_mended(self) -> bool:
        """Whether there is something else now."""
        return _mark(self.file) not in (None, self.mark)

    def fault(self) -> CorruptError | None:
        """What has become of it since; None while it is as it was."""
        now = _mark(self.file)
        if now == self.mark:
            return None
        what = f"{WEIGHTS_FILE} is gone" if now is None else f"{WEIGHTS_FILE} was changed while it was in use"
        return CorruptError(what, where=str(self.file), remedy=rebuild_remedy(self.file.parent))


def _mark(file: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(eq=False)
class Open:
    """A chain that serves, with `part` of the budget, as which version, and what is recorded of it."""

    chain: Chain
    candidate: Candidate
    part: Part
    recent: Recent
    store: Store

    def counts(self) -> dict[str, Any]:
        """What the chain says of itself."""
        return self.chain.stats()

    def fault(self) -> CorruptError | None:
        """What has become of the store that the chain goes on reading; None while it is as it was."""
        return self.store.fault() if self.reads else None

    @cached_property
    def reads(self) -> bool:
        """Whether runs go on reading from the drive once all that stays has been read."""
        counts = self.counts()
        return counts["mode"] != "resident" or "rows_read" in counts


@dataclass(eq=False)
class Served:
    """One model: what waits for it and what serves it. The executor begins no sweep of it while it is `held`, and is in
    one while it is `running`. `candidate` is what the budget counts with, also while nothing is open."""

    model: Model
    lane: Lane
    state: State = "unloaded"
    reason: str = ""
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] | None = None
    open: Open | None = None
    candidate: Candidate | None = None
    held: bool = False
    requests: int = 0
    failures: int = 0
    deadline_misses: int = 0
    queue_seconds: float = 0.0
    ended: int = 0
    latency_seconds: float = 0.0
    failure: LayeringError | None = None
    failed_store: Store | None = None
    failed_at: float = 0.0
    wave_sizes: Counter[int] = field(default_factory=Counter)
    past: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """As the deployment calls it."""
        return self.model.name

    @property
    def can_run(self) -> bool:
        """Whether a sweep of it may begin."""
        return self.open is not None and not self.held

    def unavailable(self) -> UnavailableError:
        """What to say to those who ask for it while it is not ready."""
        if self.state == "loading":
            return UnavailableError(f"the model {self.name!r} is being loaded", remedy="try again in a moment")
        if self.state == "unloaded":
            return not_loaded(self.name)
        return UnavailableError(f"the model {self.name!r} cannot be served: {self.reason}", remedy="load it again")

    def fail(self, error: LayeringError, store: Store | None, now: float) -> UnavailableError:
        """It is not served any more, or could not be from `store`; returns what those get who wait for it."""
        self.open, self.held = None, False
        self.state = "unavailable"
        self.reason = f"{error.what} ({error.where})" if error.where else error.what
        self.failure, self.failed_store, self.failed_at = error, store, now
        return self.unavailable()

    def remember(self, counts: Mapping[str, Any]) -> None:
        """Keep the counts of a chain that goes."""
        self.past.update({key: counts[key] for key in _SUMS})

    def snapshot(self, opened: Open | None, counts: Mapping[str, Any]) -> ModelState:
        """As it is now, while `opened` serves, whose counts are `counts`."""
        known = self.candidate
        manifest = known.manifest if known else None
        sums: dict[str, Any] = {key: self.past[key] + counts.get(key, 0) for key in _SUMS}
        serves = opened.candidate if opened else known if self.state == "ready" else None
        return ModelState(
            name=self.name, version=serves.version if serves else None, state=self.state, reason=self.reason,
            inputs=manifest.inputs if manifest else (), outputs=manifest.outputs if manifest else (),
            backend=manifest.backend.name if manifest else "", queued=len(self.waiting),
            budget_bytes=counts.get("budget_bytes", 0), resident_bytes=counts.get("resident_bytes", 0),
            floor_bytes=known.floor if known else 0, requests=self.requests, failures=self.failures,
            deadline_misses=self.deadline_misses, wave_sizes=dict(self.wave_sizes), queue_seconds=self.queue_seconds,
            latency_seconds=self.latency_seconds,
            predicted_seconds=counts.get("predicted_seconds"), fallbacks=tuple(counts.get("fallbacks", ())),
            last_sweep=opened.recent.last_sweep() if opened else (), **sums,
        )  # fmt: skip


class Fleet:
    """All models of a deployment. `changed` guards everything in it and in them, and tells of changes."""

    def __init__(self, clock: Callable[[], float], max_queue: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.clock, self.max_queue = clock, max_queue
        self.gate = Gate()
        self.models: dict[str, Served] = {}
        self.draining = self.stopping = False
        self.expiring, self.watch_at = threading.Event(), inf
        """Set when a request came that expires before `watch_at`, when the watcher looks next."""

    def add(self, model: Model) -> Served:
        """A model more, of which nothing is open."""
        served = self.models[model.name] = Served(model, self.gate.lane())
        return served

    def __iter__(self) -> Iterator[Served]:
        return iter(self.models.values())

    def next_served(self, now: float) -> tuple[Request, Served] | None:
        """The most urgent request of those that can be served, and its model; None where there is none."""
        heads = [(head, one) for one in self if one.can_run and (head := most_urgent(one.waiting, now))]
        return min(heads, key=lambda pair: urgency(pair[0], now), default=None)

    def order_reads(self, now: float) -> None:
        """Let the drive serve the chain that executes first, then the one that would be next."""
        following = self.next_served(now)
        lanes = [served.lane for served in self if served.running is not None]
        self.gate.prefer([*lanes, following[1].lane] if following and following[1].lane not in lanes else lanes)

    def refuse(self, served: Served) -> list[Request]:
        """Take all requests that wait for a model from its queue, for the caller to end without the lock."""
        refused, served.waiting = served.waiting, []
        self.count_failed(served, refused)
        self.changed.notify_all()
        return refused

    def count_failed(self, served: Served, requests: Iterable[Request]) -> None:
        """Requests have ended without an answer; whoever counts them ends them."""
        for request in requests:
            request.ended = True
            served.failures += 1

    def require_open(self) -> None:
        """Raise ClosedError once the deployment closes."""
        if self.stopping:
            raise closed()


def not_loaded(name: str) -> UnavailableError:
    """What to say to those who ask for a model that is there and was not loaded."""
    return UnavailableError(f"the model {name!r} is not loaded", remedy="load it")


def closed() -> ClosedError:
    """What whoever still asks of a deployment gets."""
    return ClosedError("the deployment is closed", remedy="start it again")
