"""What the service tells systemd: that it is ready, reloads, stops, how it is, and that the executing thread is alive.

May import words. Without NOTIFY_SOCKET everything here does nothing. A message that cannot be sent is a warning in the
log, once until one arrives again, and never an error: the service serves whether or not systemd listens.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from trt_layering.words import printable

log = logging.getLogger("trt_layering")

_SEND_SECONDS = 5.0
_STATUS_BYTES = 1024
_BEATS = 4
"""Messages to the watchdog in the time that it waits for one."""


class Notifier:
    """Sends messages to systemd, from any thread, each as one datagram to the socket `address`; None: to nobody.

    A path, or the name of an abstract socket after an `@`. Holds nothing open between messages.
    """

    def __init__(self, address: str | None, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._address = address
        self._clock = clock
        self._failed = False

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Notifier:
        """The one that NOTIFY_SOCKET asks for."""
        return cls(environment.get("NOTIFY_SOCKET") or None)

    @property
    def heard(self) -> bool:
        """Whether there is a socket to send to."""
        return self._address is not None

    def ready(self, status: str = "") -> None:
        """The service serves: at the start, and again when a reload has ended."""
        self._send("READY=1", *_status(status))

    def reloading(self, status: str = "") -> None:
        """A reload begins; `ready` must follow, whether or not it succeeds."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={self._clock() // 1000}", *_status(status))

    def stopping(self, status: str = "", *, seconds: float | None = None) -> None:
        """The service ends; with `seconds`, it may take so long, whatever the unit's TimeoutStopSec."""
        extension = () if seconds is None else (_extension(seconds),)
        self._send("STOPPING=1", *extension, *_status(status))

    def status(self, status: str) -> None:
        """One line for `systemctl status`, cut where it is long."""
        self._send(*_status(status))

    def extend(self, seconds: float) -> None:
        """What is under way, a start or a stop, may take `seconds` from now."""
        self._send(_extension(seconds))

    def alive(self) -> None:
        """Feeds the watchdog."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._address is None or not lines:
            return
        target = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.sendto("\n".join(lines).encode(), target)
        except (OSError, ValueError) as error:
            if not self._failed:
                log.warning("systemd cannot be told %s: %s", lines[0], error)
            self._failed = True
        else:
            self._failed = False


def _status(text: str) -> tuple[str, ...]:
    """The line that sets the status; short enough, with the others, for the 4096 bytes that systemd reads."""
    return (f"STATUS={printable(text).encode()[:_STATUS_BYTES].decode(errors='ignore')}",) if text else ()


def _extension(seconds: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={max(1, round(seconds * 1e6))}"


class Extension:
    """Keeps systemd from ending a start that builds or loads: to be called with each step of it, from one thread.

    Each step gives the start `seconds` more from then on; no more than ten messages are sent in that time.
    """

    def __init__(
        self, notifier: Notifier, seconds: float = 600.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notifier = notifier
        self._seconds = seconds
        self._clock = clock
        self._sent: float | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if self._sent is not None and now - self._sent < self._seconds / 10:
            return
        self._sent = now
        self._notifier.extend(self._seconds)
        self._notifier.status(f"{stage}: {done} of {total}" if total else stage)


class Stop(Protocol):
    """What `Watchdog` needs of a threading.Event."""

    def set(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Watchdog:
    """Feeds systemd's watchdog as long as the thread that executes shows signs of life, from `start` to `close`.

    `heartbeat` tells when it last did, by `clock`, in seconds. Once that is more than half of `seconds` ago, the time
    within which systemd wants a message, nothing is sent until there is a newer one: systemd then ends the service.
    Owns one thread, which reads `heartbeat` and does nothing else. With `seconds` None there is none.
    """

    def __init__(
        self,
        notifier: Notifier,
        seconds: float | None,
        heartbeat: Callable[[], float],
        *,
        clock: Callable[[], float] = time.monotonic,
        stop: Stop | None = None,
    ) -> None:
        """`clock` and `stop` are replaced by tests."""
        self._notifier = notifier
        self._seconds = seconds
        self._heartbeat = heartbeat
        self._clock = clock
        self._stop = stop or threading.Event()
        self._thread: threading.Thread | None = None
        self._starved = False

    def start(self) -> None:
        """Begin to feed; to be called once."""
        if self._seconds is not None and self._notifier.heard:
            self._thread = threading.Thread(
                target=self._feed, args=(self._seconds,), name="trt-layering-watchdog", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Feed no more; the thread has ended. May be called at any time, and again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _feed(self, seconds: float) -> None:
        while True:
            self._beat(seconds)
            if self._stop.wait(seconds / _BEATS):
                return

    def _beat(self, seconds: float) -> None:
        age = self._clock() - self._heartbeat()
        if age > seconds / 2:
            if not self._starved:
                log.error("no sign of life from the executing thread for %.0f s: the watchdog is not fed", age)
            self._starved = True
            return
        if self._starved:
            log.warning("the executing thread is alive again: the watchdog is fed")
        self._starved = False
        self._notifier.alive()


def watchdog_seconds(environment: Mapping[str, str] = os.environ, pid: int | None = None) -> float | None:
    """The seconds within which systemd wants each message of the process `pid` (None: of this one), by WATCHDOG_USEC
    and WATCHDOG_PID; None where it wants none."""
    try:
        wanted = int(environment.get("WATCHDOG_USEC", ""))
        who = int(environment.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return wanted / 1e6 if wanted > 0 and who == (os.getpid() if pid is None else pid) else None
