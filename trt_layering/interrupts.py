"""Long work that a signal may end: what asks a process to end interrupts it as Ctrl-C does. Imports nothing of ours.

Where signals cannot be handled, in a thread or for a signal that is ignored, all stays as it was.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """While inside, the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread. The next one ends
    the process at once, with status 130: what it leaves is what a killed one would, and its children go with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in _SIGNALS}
    taken = {one: handler for one, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def first(_number: int, _frame: FrameType | None) -> NoReturn:
        for one in taken:
            signal.signal(one, _second)
        raise KeyboardInterrupt

    for one in taken:
        signal.signal(one, first)
    try:
        yield
    finally:
        for one, handler in taken.items():
            signal.signal(one, handler)


def _second(_number: int, _frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, b"error: interrupted again\n")
    finally:
        os._exit(_INTERRUPTED)
