"""Compressed bodies: inflating within a limit, and compressing what a client wants compressed. Imports refusals and
words; what cannot be inflated, or becomes too large, raises ProtocolError before more memory is taken."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Literal

from trt_layering.service.refusals import ProtocolError
from trt_layering.words import quoted

Buffer = bytes | bytearray | memoryview
Encoding = Literal["gzip", "deflate"]

WORTH_COMPRESSING = 1024
"""Bytes under which an answer is sent as it is."""
_WINDOW: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # deflate: as HTTP means it, so zlib's format
_SLICE, _STEP = 64 << 10, 256 << 10
_QUICKEST = 1
_OFFER = re.compile(r"([a-z0-9*-]+)\s*(?:;\s*q=([01](?:\.[0-9]{0,3})?))?")


def inflated(body: Buffer, encoding: str | None, limit: int) -> Buffer:
    """`body`, if `encoding` (a Content-Encoding) is none; otherwise what it holds, in new memory of up to `limit` bytes
    and 256 KiB on the way. Raises ProtocolError for other encodings, damaged or shortened bodies, bytes behind the end,
    and more than `limit` bytes."""
    word = (encoding or "").strip().lower()
    if word in ("", "identity"):
        return body
    if word not in _WINDOW:
        raise ProtocolError(
            "encoding", f"the body's encoding {quoted(word)} is unknown", where="Content-Encoding",
            remedy="send it as gzip, deflate, or as it is",
        )  # fmt: skip
    inflater = zlib.decompressobj(_WINDOW[word])
    view, made, start = memoryview(body), bytearray(), 0
    try:
        while start < len(view) and not inflater.eof:
            _inflate(inflater, view[start : start + _SLICE], made, limit)
            start += _SLICE
    except zlib.error as error:
        raise _damaged("malformed", f"the body is not {word}: {error}") from error
    if not inflater.eof:
        raise _damaged("incomplete", f"the {word} body ends too early")
    if inflater.unused_data or start < len(view):
        raise _damaged("malformed", f"bytes follow the end of the {word} body")
    return made


def _inflate(inflater: zlib._Decompress, piece: Buffer, made: bytearray, limit: int) -> None:
    """Adds to `made` what `piece` holds, in small steps."""
    while True:
        step = inflater.decompress(piece, _STEP)
        made += step
        if len(made) > limit:
            raise ProtocolError(
                "too large", f"the body inflates to more than {limit} bytes", where="body",
                remedy="send less at once, or raise service.max_body",
            )  # fmt: skip
        piece = inflater.unconsumed_tail
        if inflater.eof or (not piece and len(step) < _STEP):
            return


def _damaged(kind: Literal["malformed", "incomplete"], what: str) -> ProtocolError:
    return ProtocolError(kind, what, where="body", remedy="compress the whole body, once")


def accepted(accept_encoding: str | None) -> Encoding | None:
    """The compression that a client wants most, by its Accept-Encoding; None for an answer as it is."""
    best: tuple[float, Encoding | None] = (0.0, None)
    plain = -1.0
    for offer in (accept_encoding or "").lower().split(",", 16)[:16]:
        found = _OFFER.fullmatch(offer.strip())
        if not found:
            continue
        weight = float(found[2] or 1)
        if found[1] == "identity":
            plain = weight
        elif found[1] in ("gzip", "x-gzip", "deflate") and weight > best[0]:
            best = (weight, "deflate" if found[1] == "deflate" else "gzip")
    return best[1] if best[0] >= plain else None


def compressed(body: bytes, encoding: Encoding) -> bytes:
    """`body` compressed, quickly rather than well."""
    deflater = zlib.compressobj(_QUICKEST, zlib.DEFLATED, _WINDOW[encoding])
    return deflater.compress(body) + deflater.flush()
