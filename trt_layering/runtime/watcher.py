"""The thread that looks after a deployment: requests whose time is over, memory pressure, stores, samples.

May import the fleet, the history, pressure and the store. What it finds to be done it asks `Changes` for, and never
waits for it. Whatever goes wrong in it is logged, and it goes on.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from math import inf
from pathlib import Path

from trt_layering.errors import LayeringError, StoreError, TimedOutError
from trt_layering.runtime.changes import Changes
from trt_layering.runtime.fleet import Fleet, Served
from trt_layering.runtime.history import History
from trt_layering.runtime.pressure import Pressure, Relief
from trt_layering.runtime.queues import Request, end
from trt_layering.store.manifest import finished_versions

log = logging.getLogger("trt_layering")

_SECOND = 1.0
_STORES = 5.0
"""Seconds between looks at the stores."""
_AGAIN = 30.0
"""Seconds after which a model is loaded again that could not be for another reason than its store."""


class Watcher:
    """Owns its thread from `start` to `stop`; borrows the others."""

    def __init__(self, fleet: Fleet, changes: Changes, repository: Path, history: History, pressure: Pressure) -> None:
        self._fleet, self._changes, self._repository = fleet, changes, repository
        self._history, self._pressure = history, pressure
        self.relief = Relief()
        self._sampled = self._looked = fleet.clock()
        self._recovering: dict[str, Future[None]] = {}
        self._thread = threading.Thread(target=self._watch, name="trt-layering-watcher", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Once the fleet is stopping: wait so long for the thread to end; whether it has."""
        self._fleet.expiring.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _watch(self) -> None:
        fleet = self._fleet
        while not fleet.stopping:
            try:
                self.tick(fleet.clock())
            except Exception:
                log.exception("the watcher failed")
            with fleet.changed:
                fleet.expiring.clear()
                wait = min(_SECOND, self._next_expiry() - fleet.clock())
                fleet.watch_at = fleet.clock() + wait
                if fleet.stopping:
                    return
            fleet.expiring.wait(max(wait, 0.0))

    def _next_expiry(self) -> float:
        requests = (request for served in self._fleet for request in (*served.waiting, *(served.running or ())))
        return min((request.expires for request in requests if not request.ended), default=inf)

    def tick(self, now: float) -> None:
        """Look after what is due at `now`."""
        self._expire(now)
        if now - self._sampled >= _SECOND:
            self._sampled = now
            self._history.take(now)
            self._relieve(now)
        if now - self._looked >= _STORES:
            self._looked = now
            self._look_at_stores(now)

    def _expire(self, now: float) -> None:
        """End requests whose time is over, also those that a sweep is under way for, whose answer nobody gets."""
        expired: list[tuple[Served, Request]] = []
        with self._fleet.changed:
            for served in self._fleet:
                over = [r for r in (*served.waiting, *(served.running or ())) if r.expires <= now and not r.ended]
                served.waiting = [request for request in served.waiting if request not in over]
                self._fleet.count_failed(served, over)
                expired += [(served, request) for request in over]
            if expired:
                self._fleet.changed.notify_all()
        for served, request in expired:
            end(request, timed_out(served, request))

    def _relieve(self, now: float) -> None:
        """Follow the memory pressure."""
        relief = self.relief
        before = relief.level
        if not relief.update(self._pressure.look(), now):
            return
        level = relief.level
        if level == 0:
            log.warning("memory is short: %s; the models shrink to their floors", relief.words)
        elif before == 0:
            log.info("memory is not short any more: the models grow back")
        self._changes.ask(lambda: self._changes.set_level(level))

    def _look_at_stores(self, now: float) -> None:
        with self._fleet.changed:
            models = [(served, served.open) for served in self._fleet]
        for served, opened in models:
            pending = self._recovering.get(served.name)
            if pending is not None and not pending.done():
                continue
            fault = None if opened is None else opened.fault()
            if opened is not None and fault is not None:
                if self._is_newer(served.name, opened.candidate.version):
                    self._recover(served)
                else:
                    self._changes.lose(served, opened, fault)
            elif served.state == "unavailable" and self._may_recover(served, now):
                self._recover(served)

    def _may_recover(self, served: Served, now: float) -> bool:
        if isinstance(served.failure, StoreError):
            store = served.failed_store
            mended = store is not None and store.is_mended()
            return mended or self._is_newer(served.name, store.version if store else 0)
        return now - served.failed_at >= _AGAIN

    def _is_newer(self, name: str, version: int) -> bool:
        """Whether there is a finished version of the model after `version`."""
        try:
            return max(finished_versions(self._repository, name), default=0) > version
        except LayeringError:
            return False

    def _recover(self, served: Served) -> None:
        name = served.name
        self._recovering[name] = self._changes.ask(lambda: self._changes.load(name, None))


def timed_out(served: Served, request: Request) -> TimedOutError:
    """What a request ends with whose time is over."""
    seconds = request.expires - request.arrived
    return TimedOutError(
        f"the model {served.name!r} had no answer within {seconds:g} s",
        remedy="give requests more time, send fewer, or give the model more memory",
    )
