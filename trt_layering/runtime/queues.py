"""Which waiting request is served next. Pure: no threads and no clock of its own; imports nothing of ours.

The most urgent request has the earliest deadline, then the highest priority, then the greatest age. One that has waited
`PATIENCE` seconds goes before all that have not, the oldest first: so nothing that comes later can keep it waiting for
ever. Nothing here fails.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from math import inf
from typing import Any

PATIENCE = 5.0
"""Seconds that a request waits for more urgent ones, at most."""

Feeds = Mapping[str, Any]


@dataclass(eq=False)
class Request:
    """What somebody asked for at `arrived`: to be answered by `deadline`, and not at all after `expires`. `number`
    counts requests in the order in which they came."""

    feeds: Feeds
    arrived: float
    number: int
    deadline: float = inf
    priority: float = 1.0
    expires: float = inf
    future: Future[Any] = field(default_factory=Future)
    ended: bool = False
    """Whether somebody has counted how it ends, and ends it."""


def urgency(request: Request, now: float) -> tuple[float, float, float, int]:
    """Smaller is more urgent."""
    if now - request.arrived >= PATIENCE:
        return (-inf, 0.0, request.arrived, request.number)
    return (request.deadline, -request.priority, request.arrived, request.number)


def most_urgent(waiting: Iterable[Request], now: float) -> Request | None:
    """The request to serve next; None where none waits."""
    return min(waiting, key=lambda request: urgency(request, now), default=None)


def wave(waiting: Iterable[Request], now: float, most: int) -> list[Request]:
    """Up to `most` requests of one model that are served together, the most urgent first."""
    return heapq.nsmallest(most, waiting, key=lambda request: urgency(request, now))


def end(request: Request, answer: object) -> bool:
    """Give `request` its answer, or the exception that it ends with; False if it had ended already."""
    try:
        if isinstance(answer, BaseException):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)
    except InvalidStateError:
        return False
    return True
