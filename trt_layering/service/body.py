"""A request's body as it arrives. Imports numpy, encoding and refusals; a body that is longer than allowed or than it
was announced, or shorter, raises ProtocolError."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from trt_layering.service.encoding import Buffer
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.words import quoted

HEADER_LENGTH = "inference-header-content-length"
ALIGNMENT = 64
"""Bytes; of the first binary tensor's address."""
_DIGITS = re.compile(r"[0-9]{1,18}")


def length(headers: Mapping[str, str], name: str) -> int | None:
    """The number of bytes that the header `name` (in small letters) says; None where there is none. ProtocolError for
    anything but digits."""
    text = headers.get(name)
    if text is None:
        return None
    if not _DIGITS.fullmatch(text):
        raise ProtocolError("malformed", f"{quoted(text)} is no length", where=name, remedy="give a number of bytes")
    return int(text)


class Body:
    """Takes the pieces of one body, of up to `limits.max_body` bytes.

    Where its length was announced (Content-Length) the bytes are put once to where they stay, such that the binary
    tensors behind the JSON begin at a multiple of 64 and are used there. Memory is taken as bytes arrive, whatever was
    announced. `headers` has names in small letters, or takes names as they come, as starlette's do.
    """

    def __init__(self, headers: Mapping[str, str], limits: Limits) -> None:
        self._limit, self._announced = limits.max_body, length(headers, "content-length")
        self._size = 0
        if self._announced is not None and self._announced > self._limit:
            raise self._too_large(f"{self._announced} bytes")
        header = length(headers, HEADER_LENGTH) or 0
        self._grown = bytearray()
        if self._announced is not None:
            self._place = _aligned(self._announced, header)

    def add(self, piece: bytes) -> None:
        """The next bytes. Raises ProtocolError, without taking them, if that is more than announced or allowed."""
        end = self._size + len(piece)
        if end > self._limit:
            raise self._too_large(f"more than {self._limit} bytes")
        if self._announced is None:
            self._grown += piece
        elif end > self._announced:
            raise ProtocolError("malformed", f"more than the {self._announced} bytes announced", where="body",
                                remedy="let Content-Length be the body's length")  # fmt: skip
        else:
            self._place[self._size : end] = piece
        self._size = end

    def finish(self) -> Buffer:
        """The whole body, which keeps its own memory alive. ProtocolError if some of it has not come."""
        if self._announced is None:
            return self._grown
        if self._size < self._announced:
            raise ProtocolError("incomplete", f"{self._size} bytes of {self._announced} came", where="body",
                                remedy="send as many bytes as Content-Length says")  # fmt: skip
        return self._place

    def _too_large(self, size: str) -> ProtocolError:
        return ProtocolError("too large", f"a body of {size}, where {self._limit} are allowed", where="body",
                             remedy="send less at once, or raise service.max_body")  # fmt: skip


def _aligned(size: int, header: int) -> memoryview:
    """`size` bytes of new memory, of which byte `header` is at a multiple of ALIGNMENT."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -(memory.__array_interface__["data"][0] + header) % ALIGNMENT
    return memory.data[start : start + size]
