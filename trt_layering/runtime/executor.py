"""The thread that runs the chains of a deployment, one wave after the other, the most urgent first.

May import the fleet, queues and the chain. What a sweep raises goes to the requests that it was for; a drive that fails
is asked again twice, and what one request of a wave did wrong, the others are spared. A store that is not what it was
makes its model unavailable. Nothing ends this thread but `stop`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trt_layering.errors import ClosedError, CorruptError, LayeringError, ReadError, UnavailableError
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.fleet import Fleet, Open, Served
from trt_layering.runtime.queues import Feeds, Request, end, wave

log = logging.getLogger("trt_layering")

_TRIES = 3
_BEAT_SECONDS = 1.0
"""How often the thread shows that it lives while there is nothing to do."""

Answer = dict[str, Any] | LayeringError


class Executor:
    """Owns its thread from `start` to `stop`; borrows `fleet`. `lost` is called, in its thread, with a model whose
    store is not what it was, and why."""

    def __init__(self, fleet: Fleet, lost: Callable[[Served, Open, LayeringError], None]) -> None:
        self._fleet, self._lost = fleet, lost
        self._running: Chain | None = None
        self._beaten = fleet.clock()
        self._thread = threading.Thread(target=self._work, name="trt-layering-executor", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Wait so long for the thread to end, which it does once the fleet is stopping; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def beat(self) -> None:
        """A sign of life, by the thread itself."""
        self._beaten = self._fleet.clock()

    @property
    def heartbeat(self) -> float:
        """When it last showed that it lives; now, while it waits for a read that the drive has not ended: it can act,
        and a new process would wait for the same drive."""
        running = self._running
        return self._fleet.clock() if running is not None and running.awaits_drive else self._beaten

    def _work(self) -> None:
        while (picked := self._next()) is not None:
            served, opened, requests = picked
            try:
                self._serve(served, opened, requests)
            except Exception as error:
                log.exception("the executor failed")
                fault = LayeringError(f"the executor failed: {error!r}", remedy="report this as a fault")
                self._settle(served, requests, [fault] * len(requests))
            finally:
                with self._fleet.changed:
                    served.running = None
                    self._fleet.changed.notify_all()

    def _next(self) -> tuple[Served, Open, list[Request]] | None:
        """The next wave, once there is one; None when the deployment closes."""
        fleet = self._fleet
        with fleet.changed:
            while not fleet.stopping:
                self.beat()
                picked = self._pick(fleet.clock())
                if picked is not None:
                    return picked
                fleet.changed.wait(_BEAT_SECONDS)
        return None

    def _pick(self, now: float) -> tuple[Served, Open, list[Request]] | None:
        """The wave to run now. Its chain's reads go first from here on."""
        picked = self._fleet.next_served(now)
        if picked is None or picked[1].open is None:
            self._fleet.gate.prefer(())
            return None
        served, opened = picked[1], picked[1].open
        taken = wave(served.waiting, now, opened.chain.room(served.model.wave))
        served.waiting = [request for request in served.waiting if request not in taken]
        requests = [request for request in taken if request.future.set_running_or_notify_cancel()]
        served.running = requests
        self._fleet.order_reads(now)
        served.queue_seconds += sum(now - request.arrived for request in requests)
        return served, opened, requests

    def _serve(self, served: Served, opened: Open, requests: list[Request]) -> None:
        if not requests:  # all were cancelled
            return
        fault = opened.fault()
        if fault is None:
            self._running = opened.chain
            try:
                found = answers(opened.chain, [request.feeds for request in requests], self.beat)
            finally:
                self._running = None
            fault = opened.fault() or next((one for one in found if isinstance(one, CorruptError)), None)
        if fault is not None:
            refusal = UnavailableError(
                f"the model {served.name!r} cannot be served: {fault.what}", where=fault.where, remedy=fault.remedy
            )
            found = [refusal] * len(requests)
            self._lost(served, opened, fault)
        self._settle(served, requests, found)

    def _settle(self, served: Served, requests: Sequence[Request], found: Sequence[Answer]) -> None:
        """Count the answers, and give them."""
        now = self._fleet.clock()
        with self._fleet.changed:
            served.wave_sizes[len(requests)] += 1
            pairs = [(request, answer) for request, answer in zip(requests, found, strict=True) if not request.ended]
            for request, answer in pairs:
                request.ended = True
                served.requests += not isinstance(answer, LayeringError)
                served.failures += isinstance(answer, LayeringError)
                served.ended += 1
                served.latency_seconds += now - request.arrived
                served.deadline_misses += now > request.deadline
        for request, answer in pairs:
            end(request, answer)


def answers(chain: Chain, feeds: Sequence[Feeds], beat: Callable[[], None] = lambda: None) -> list[Answer]:
    """What `chain` answers to each of `feeds`, run as one wave, or the error that it ends with."""
    beat()
    try:
        return list(_tried(chain, feeds))
    except (ReadError, CorruptError, ClosedError) as error:
        return [error] * len(feeds)
    except LayeringError as error:
        if len(feeds) == 1:
            return [error]
    return [answer for one in feeds for answer in answers(chain, [one], beat)]


def _tried(chain: Chain, feeds: Sequence[Feeds]) -> list[dict[str, Any]]:
    """`feeds` run as one wave, again if the drive fails."""
    for _ in range(_TRIES - 1):
        try:
            return chain.run_many(feeds, wave=len(feeds))
        except ReadError as error:
            log.warning("chain %s: %s; trying again", chain.manifest.name, error.what)
    return chain.run_many(feeds, wave=len(feeds))
