"""What a service says when it refuses: each error's status, and its words as `{"error": …}`.

May import errors, refusals, msgspec and starlette's responses. What is no error of ours is a fault of the service: it
is logged with its traceback, of which the client gets nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from trt_layering.errors import (
    BudgetError,
    ClosedError,
    LayeringError,
    NotBuiltError,
    QueueFullError,
    StoreError,
    TimedOutError,
    UnavailableError,
    UnknownModelError,
    UsageError,
)
from trt_layering.service.refusals import ProtocolError
from trt_layering.words import printable

log = logging.getLogger("trt_layering")

JSON = "application/json"
SOON, LATER = 1, 5
"""Seconds after which it is worth to ask again: when a queue is full, and when a model is not ready."""
_STATUSES: Sequence[tuple[type[LayeringError], int, int | None]] = (
    (UnknownModelError, 404, None),
    (NotBuiltError, 404, None),
    (QueueFullError, 503, SOON),
    (UnavailableError, 503, LATER),
    (ClosedError, 503, LATER),
    (StoreError, 503, LATER),
    (TimedOutError, 504, None),
    (UsageError, 400, None),
    (BudgetError, 400, None),
)


class Refusal(Exception):
    """A request that is not served: its HTTP status, why, in words, and when to come again, in seconds."""

    def __init__(
        self, status: int, words: str, *, retry_after: int | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(words)
        self.status = status
        self.words = words
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    def reply(self) -> Response:
        return as_json({"error": self.words}, self.status, self.headers)


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content`, of what msgspec encodes, as a reply."""
    return Response(msgspec.json.encode(content), status, dict(headers or {}), JSON)


def refusal(error: Exception) -> Refusal:
    """What a client is told of `error`; what is no refusal is logged."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ProtocolError):
        return Refusal(error.status, words(error))
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, error.detail, headers=error.headers)
    for kind, status, retry_after in _STATUSES:
        if isinstance(error, kind):
            return Refusal(status, words(error), retry_after=retry_after)
    if isinstance(error, LayeringError):
        log.error("a request failed: %s", words(error))
        return Refusal(500, words(error))
    log.error("a request failed by a fault of trt-layering itself", exc_info=error)
    return Refusal(500, "a fault of the service itself; its log tells more")


def words(error: LayeringError) -> str:
    """What, where and remedy of `error` on one line."""
    where = f" ({error.where})" if error.where else ""
    return printable(f"{error.what}{where}{'; ' if error.remedy else ''}{error.remedy}")
