"""Bodies of requests as they arrive: no more bytes than are allowed, of one and of all together, and not for longer.

May import what the protocol says of a body, and replies. A body that is too large, too slow or cut off raises
ProtocolError, Refusal or Gone; nothing is read after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trt_layering.service.body import Body
from trt_layering.service.encoding import Buffer
from trt_layering.service.refusals import Limits
from trt_layering.service.replies import SOON, Refusal
from trt_layering.units import format_size

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Gone(Exception):
    """The client has gone; nobody reads a reply."""


@dataclass
class Hold:
    """The bytes that one request has in memory, until it is answered."""

    bodies: Bodies
    nbytes: int = 0

    def take(self, nbytes: int) -> None:
        """`nbytes` more. Refusal, 503, where all requests together would hold more than they may."""
        held, together = self.bodies.held, self.bodies.together
        if held + nbytes > together:
            words = f"requests under way hold {format_size(held)} of the {format_size(together)} that are allowed"
            raise Refusal(503, words, retry_after=SOON)
        self.bodies.held += nbytes
        self.nbytes += nbytes


class Bodies:
    """All requests' bodies, which together hold at most `together` bytes. Of one event loop."""

    def __init__(self, together: int) -> None:
        self.together = together
        self.held = 0

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        """What a request holds; it is given back when this ends."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self.held -= hold.nbytes

    async def read(
        self, hold: Hold, headers: Mapping[str, str], receive: Receive, limits: Limits, seconds: float
    ) -> Buffer:
        """The whole body, which came within `seconds`. Raises ProtocolError where it is, or is announced, longer than
        allowed, before more of it is read; Refusal, 408, where it does not come, and 503, where there is no room;
        Gone."""
        body = Body(headers, limits)
        try:
            return await asyncio.wait_for(self._read(body, hold, receive), seconds)
        except asyncio.TimeoutError:
            raise Refusal(408, f"the body did not come within {seconds:.3g} s") from None

    async def _read(self, body: Body, hold: Hold, receive: Receive) -> Buffer:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            piece = message.get("body", b"")
            hold.take(len(piece))
            body.add(piece)
            if not message.get("more_body", False):
                return body.finish()


async def gone(receive: Receive) -> None:
    """Returns when the client of a request, whose body has been read, has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
