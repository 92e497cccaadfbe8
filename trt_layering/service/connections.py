"""uvicorn as the service needs it: in the process, on sockets that listen already, and with no connection that lasts
longer than it may.

May import uvicorn. What is no HTTP gets 400 as JSON; a connection on which no request or reply moves on is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import Server

_NO_HTTP = b'{"error":"this is no HTTP request"}'
_KEEP_ALIVE = 5
_LONGEST_HEAD = 64 << 10
_GRACE = 2
"""Seconds in which, once the service ends, replies are sent."""


class Connection(H11Protocol):
    """One connection. While no request of it is being answered it has a limited time for the next one's head, or for
    taking in the reply to the one before, whatever arrives meanwhile."""

    idle_seconds = 60.0
    _cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow_to_idle()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete and self._cut is not None:
            self._cut.cancel()
            self._cut = None

    def on_response_complete(self) -> None:
        if self._cut is None:
            self._allow_to_idle()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """The reply to what is no HTTP: `{"error": …}`, like every other."""
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_NO_HTTP)),
                (b"connection", b"close")]  # fmt: skip
        events = (h11.Response(status_code=400, headers=head, reason=b"Bad Request"), h11.Data(data=_NO_HTTP),
                  h11.EndOfMessage())  # fmt: skip
        with contextlib.suppress(h11.LocalProtocolError):  # a reply is under way
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _allow_to_idle(self) -> None:
        self._cut = self.loop.call_later(self.idle_seconds, self.transport.abort)


class Listener(Server):
    """A uvicorn server that leaves signals to its caller and ends when told to."""

    def __init__(self, app: Callable[..., Any], listening: socket.socket, *, idle_seconds: float) -> None:
        """`app` answers at `listening`, which the server then owns."""
        connection = type("Connection", (Connection,), {"idle_seconds": idle_seconds})
        super().__init__(
            Config(
                app, http=connection, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
                proxy_headers=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_GRACE, h11_max_incomplete_event_size=_LONGEST_HEAD,
            )
        )  # fmt: skip
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield

    async def run_until_told(self) -> None:
        """Serve until `should_exit`; then no more connections, and those there are get a moment for their replies."""
        await self.serve([self._listening])
