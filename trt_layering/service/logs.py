"""The service's log: one line an event on standard error, as the journal, a person or a program wants to read it.

May import errors and words. What is logged may quote names and errors of others: line ends and control characters are
written out, tensors are told by dtype and shape, and what a field called token or a bearer header holds is left out.
Logging never raises: an event that does not fit its own message is told as it is; one that cannot be written is lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

from trt_layering.errors import LayeringError
from trt_layering.words import printable

Form = Literal["text", "json"]

_LONGEST = 8192
"""Characters of a line; the journal would break one of 48 KiB in two."""
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7
_FRAMES = 8
_SECRET_NAMES = re.compile(r"token|password|secret|authorization|credential|api.?key", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\bbearer\s+[^\s\"',;]+")
_HIDDEN = "(hidden)"
_PLAIN_WORD = re.compile(r"[^\s\"=]+")


def event(logger: logging.Logger, level: int, what: str, /, **fields: object) -> None:
    """Log `what` happened, in words that are the same each time, with what belongs to it as `fields`.

    Numbers, text, booleans and None are told as they are; of anything else its type, of an array its dtype and shape.
    """
    logger.log(level, "%s", what, extra={"fields": fields})


@contextlib.contextmanager
def logging_to(
    stream: TextIO | None = None,
    *,
    form: Form = "text",
    level: int = logging.INFO,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """While it lasts, all that this process logs goes to `stream` (None: standard error): ours from `level` on, what
    libraries say and Python's warnings from WARNING on.

    With `form` "text" lines are for people, with "json" each is one object. A line begins with its priority, as `<6>`,
    where the stream leads to the journal, which takes it off again. For the main thread; what was set before is set
    again afterwards.
    """
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines(form, priorities=is_journal(stream, environment)))
    root, ours = logging.getLogger(), logging.getLogger("trt_layering")
    before = root.handlers[:], root.level, ours.level, logging.raiseExceptions
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(level)
    logging.raiseExceptions = False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root_level, our_level, logging.raiseExceptions = before
        root.setLevel(root_level)
        ours.setLevel(our_level)


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether `stream` is the one that JOURNAL_STREAM says leads to the journal."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class Lines(logging.Formatter):
    """Makes one line of each record, in `form`, with its priority before it if `priorities` are wanted."""

    def __init__(self, form: Form = "text", *, priorities: bool = False) -> None:
        super().__init__()
        self._form = form
        self._priorities = priorities

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        prefix = f"<{_priority(record.levelno)}>" if self._priorities else ""
        return prefix + (self._json(record) if self._form == "json" else self._text(record))

    def _text(self, record: logging.LogRecord) -> str:
        parts = [] if self._priorities else [_time(record), record.levelname.lower()]
        parts.append(_message(record))
        parts += [f"{key}={_word(value)}" for key, value in _fields(record).items()]
        if record.exc_info and record.exc_info[1] is not None:
            parts.append(f"error={_word(_error(record.exc_info[1]))}")
        return _cut(printable(" ".join(parts)))

    def _json(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name, "message": _message(record)
        }  # fmt: skip
        if record.exc_info and record.exc_info[1] is not None:
            told["error"] = _error(record.exc_info[1])
        told |= {key: value for key, value in _fields(record).items() if key not in told}
        return json.dumps({key: _cut(value) if isinstance(value, str) else value for key, value in told.items()})


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    arguments = record.args
    if isinstance(arguments, Mapping):
        arguments = {key: _argument(value) for key, value in arguments.items()}
    elif arguments:
        arguments = tuple(_argument(value) for value in arguments)
    try:
        message = str(record.msg) % arguments if arguments else str(record.msg)
    except (TypeError, ValueError, KeyError):
        message = f"{record.msg} {arguments}"
    return _safe(message)


def _argument(value: object) -> object:
    """`value` for a message: errors and paths as text, numbers as they are, tensors and the like by their type."""
    if isinstance(value, (numbers.Number, str)) or value is None:
        return value
    if isinstance(value, BaseException):
        return _words(value)
    return str(value) if isinstance(value, os.PathLike) else _described(value)


def _words(error: BaseException) -> str:
    """What an error says; of ours, what, where and remedy."""
    if not isinstance(error, LayeringError):
        return str(error)
    parts = (error.what, error.where and f"where: {error.where}", error.remedy and f"to do: {error.remedy}")
    return "; ".join(part for part in parts if part)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return {key: _told(key, value) for key, value in fields.items()} if isinstance(fields, Mapping) else {}


def _told(name: str, value: object) -> object:
    """The value of a field as JSON has it."""
    if _SECRET_NAMES.search(name):
        return _HIDDEN
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return _safe(str(_argument(value)))


def _described(value: object) -> str:
    """The type of a value, and of a tensor its dtype and shape; nothing of what is in it."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if dtype is not None and isinstance(shape, tuple):
        return f"({type(value).__name__} {dtype} {'x'.join(map(str, shape)) or 'scalar'})"
    return f"({type(value).__name__})"


def _safe(text: str) -> str:
    return _BEARER.sub(f"Bearer {_HIDDEN}", text)


def _word(value: object) -> str:
    """The value of a field in a line for people: in quotes where it would not be one word."""
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    return text if _PLAIN_WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _error(error: BaseException) -> str:
    """An error and where it came from, innermost first, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return _safe(f"{type(error).__name__}: {_words(error)}" + (f" at {places}" if places else ""))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} (cut)"
