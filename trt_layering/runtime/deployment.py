"""A deployment at work: several chains on one memory budget, one drive and one device, and requests for them.

May import all of the runtime and the configuration. Whatever a request or a change meets is one of our errors; models
that cannot be served do not keep the others from being.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trt_layering import config
from trt_layering.errors import QueueFullError, StoreError, UnavailableError, UsageError
from trt_layering.runtime.changes import Changes, unknown
from trt_layering.runtime.executor import Executor
from trt_layering.runtime.feeds import checked
from trt_layering.runtime.fleet import Fleet, ModelState, Served, closed, not_loaded
from trt_layering.runtime.history import History, ModelSample, Sample
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.parts import Candidate
from trt_layering.runtime.pressure import Pressure
from trt_layering.runtime.queues import Request, end
from trt_layering.runtime.watcher import Watcher
from trt_layering.store.manifest import finished_chains

__all__ = ["Deployment", "ModelSample", "ModelState", "Sample"]

log = logging.getLogger("trt_layering")

_CLOSE_SECONDS = 20.0
"""How long closing waits for a drive that does not answer."""
Answer = dict[str, np.ndarray[Any, Any]]


class Deployment:
    """Several chains on one memory budget, one drive and one device. Owns its chains, one thread that runs them, one
    that opens and closes them and one that watches, from `start` to `close`. Any thread may call anything."""

    def __init__(
        self,
        deployment: config.Deployment,
        *,
        clock: Callable[[], float] = time.monotonic,
        pressure: Pressure | None = None,
    ) -> None:
        """Of the models in `deployment`; nothing is opened before `start`. `clock` and `pressure` are replaced by
        tests."""
        repository = Path(deployment.repository)
        budget = None if deployment.memory_budget is None else int(deployment.memory_budget)
        self._fleet = Fleet(clock, deployment.service.max_queue)
        self._repository = repository
        for model in deployment.models:
            self._fleet.add(model).state = "loading"
        self._changes = Changes(self._fleet, repository, _loader_options(deployment.loader), budget, self._beat)
        self._executor = Executor(self._fleet, self._changes.lose)
        self._history = History(self._fleet)
        self._watcher = Watcher(self._fleet, self._changes, repository, self._history, pressure or Pressure())
        self._number = 0

    def start(self) -> None:
        """Open and load the models in the background, in order; each serves as soon as it is open."""
        self._executor.start()
        self._changes.start()
        self._watcher.start()

    def submit(
        self, model: str, feeds: Mapping[str, Any], *, timeout: float | None = None, priority: float | None = None
    ) -> Future[Answer]:
        """Ask `model` for an inference. Its answer, arrays for all outputs that are the caller's, or one of our errors
        comes by the future, which may be cancelled while the request waits. `timeout`, in seconds, ends it with
        TimedOutError; `priority` takes the place of the model's. The arrays of `feeds` must not change until then.

        Raises InputError for feeds that do not fit, QueueFullError, UnavailableError, UnknownModelError, ClosedError.
        """
        fleet = self._fleet
        with fleet.changed:
            fleet.require_open()
            served = fleet.models.get(model)
        if served is None:
            self.model(model)
            raise not_loaded(model)
        candidate = self._require_ready(served)
        manifest = candidate.manifest
        arrays = checked(feeds, manifest.inputs, manifest.tensorrt.ranges if manifest.tensorrt else {})
        with fleet.changed:
            fleet.require_open()
            self._require_ready(served)
            served.waiting = [request for request in served.waiting if not request.future.cancelled()]
            if len(served.waiting) >= fleet.max_queue:
                raise QueueFullError(
                    f"{len(served.waiting)} requests wait for the model {model!r}, which is as many as may",
                    remedy="try again later, or raise max_queue",
                )
            request = self._request(served, arrays, timeout, priority)
            served.waiting.append(request)
            if len(served.waiting) == 1:
                fleet.order_reads(request.arrived)
            if request.expires < fleet.watch_at:
                fleet.expiring.set()
            fleet.changed.notify_all()
        return request.future

    def _require_ready(self, served: Served) -> Candidate:
        """What serves the model."""
        with self._fleet.changed:
            if served.state != "ready" or served.candidate is None:
                raise served.unavailable()
            if self._fleet.draining:
                raise UnavailableError("the service is about to end", remedy="try again in a moment")
            return served.candidate

    def _request(
        self, served: Served, arrays: Mapping[str, Any], timeout: float | None, priority: float | None
    ) -> Request:
        now, model = self._fleet.clock(), served.model
        self._number += 1
        return Request(
            arrays, now, self._number,
            deadline=inf if model.deadline is None else now + float(model.deadline),
            priority=model.priority if priority is None else priority,
            expires=inf if timeout is None else now + timeout,
        )  # fmt: skip

    def model(self, name: str) -> ModelState:
        """The model `name` as it is now. UnknownModelError if neither the deployment nor the repository has it."""
        with self._fleet.changed:
            served = self._fleet.models.get(name)
        if served is not None:
            return self._snapshot(served)
        if name not in self._built():
            raise unknown(name)
        return ModelState(name, None, "unloaded", "")

    def models(self) -> list[ModelState]:
        """All models of the deployment as they are now, then those that only the repository has."""
        with self._fleet.changed:
            known = list(self._fleet)
        names = {served.name for served in known}
        others = [name for name in self._built() if name not in names]
        return [*map(self._snapshot, known), *(ModelState(name, None, "unloaded", "") for name in others)]

    def _built(self) -> list[str]:
        """Names of the chains in the repository; none while it cannot be looked at."""
        try:
            return finished_chains(self._repository)
        except StoreError as error:
            log.warning("%s", error.what)
            return []

    def _snapshot(self, served: Served) -> ModelState:
        with self._fleet.changed:
            opened = served.open
            return served.snapshot(opened, opened.counts() if opened else {})

    def load(self, name: str, version: int | None = None) -> None:
        """Serve the newest finished version of `name`, or `version`; returns when it does. What the model had served
        before goes on until then, and if the new version cannot be opened; requests are not lost.

        Raises UnknownModelError, StoreError and its kinds, BudgetError, ReadError, MemoryLimitError, ClosedError.
        """
        self._changes.ask(lambda: self._changes.load(name, version)).result()

    def unload(self, name: str) -> None:
        """Take no more requests for `name`, answer those that wait, and give its memory back; returns then. Raises
        UnknownModelError, ClosedError."""
        self._changes.ask(lambda: self._changes.unload(name)).result()

    def set_budget(self, nbytes: int) -> None:
        """Divide `nbytes` of memory among the models from now on. Sweeps under way end first; when this returns, memory
        is within it. Raises BudgetError under the sum of floors, and then nothing has changed; UsageError and
        ClosedError."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
            raise UsageError(f"a budget is 1 byte or more, not {nbytes!r}", remedy="give whole bytes")
        self._changes.ask(lambda: self._changes.set_budget(nbytes)).result()

    @property
    def budget_bytes(self) -> int:
        """What the models may take together now: less than was given while memory is short."""
        return self._changes.budget_bytes

    @property
    def pressure(self) -> str | None:
        """In words, why less than the budget is used; None while it is all used."""
        return self._watcher.relief.words

    @property
    def heartbeat(self) -> float:
        """When the thread that runs the chains last showed that it lives, in seconds of the clock. Waiting for the
        drive is no fault of it, and counts as life."""
        return self._executor.heartbeat

    def history(self) -> list[Sample]:
        """One sample a second of the last five minutes, oldest first."""
        return self._history.samples()

    def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait up to `seconds` for those there are; whether all have ended."""
        fleet = self._fleet
        with fleet.changed:
            fleet.draining = True
            return fleet.changed.wait_for(
                lambda: all(not served.waiting and served.running is None for served in fleet), seconds
            )

    def close(self) -> None:
        """End all requests with ClosedError, and give all memory back. May be called twice. A drive that does not
        answer is waited for a while, then its chain is left to the end of the process, which the log says."""
        fleet = self._fleet
        with fleet.changed:
            fleet.stopping = True
            refused = [request for served in fleet for request in fleet.refuse(served)]
            opened = [served.open for served in fleet if served.open is not None]
            fleet.changed.notify_all()
        for request in refused:
            end(request, closed())
        closing = [threading.Thread(target=one.chain.close, name="trt-layering-close", daemon=True) for one in opened]
        for thread in closing:
            thread.start()
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))
        stops = (self._executor.stop, self._changes.stop, self._watcher.stop)
        ended = [stop(max(0.0, until - time.monotonic())) for stop in stops]
        if any(thread.is_alive() for thread in closing) or not all(ended):
            log.error("the drive has not answered within %g s: what waits for it ends with the process", _CLOSE_SECONDS)

    def __enter__(self) -> Deployment:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _beat(self) -> None:
        self._executor.beat()


def _loader_options(section: config.Loader) -> LoaderOptions:
    """The section `loader:` of a deployment as options."""
    return LoaderOptions(
        direct_io=section.direct_io, threads=int(section.threads) or "auto",
        read_size=int(section.read_size) or "auto", verify=section.verify,
    )  # fmt: skip
