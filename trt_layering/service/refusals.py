"""What the protocol refuses: how much a request may ask for, and the error with its HTTP status. Imports only errors
and words; nothing here fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from trt_layering.errors import UsageError
from trt_layering.words import printable

Kind = Literal["malformed", "incomplete", "contradictory", "unsupported", "too large", "encoding"]

STATUS: Mapping[Kind, int] = {
    "malformed": 400,
    "incomplete": 400,
    "contradictory": 400,
    "unsupported": 400,
    "too large": 413,
    "encoding": 415,
}
"""The HTTP status of each kind of refusal: bytes that are not in the protocol's form; bytes that are missing; a request
that says two things; what the protocol has and this service has not; more than the limits; an unknown compression."""


class ProtocolError(UsageError):
    """A request that cannot be read, or an answer that cannot be given in the form asked for. `kind` gives `status`."""

    def __init__(self, kind: Kind, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.kind: Kind = kind

    @property
    def status(self) -> int:
        return STATUS[self.kind]


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for. `max_body` is bytes, as sent and again once inflated. `max_elements` is of one
    tensor. `max_objects` is of numbers and texts in JSON (its commas are counted, in texts too), and of elements of
    BYTES: what becomes Python objects takes up to some 100 bytes each. `max_text` is characters of an id or a name."""

    max_body: int = 64 << 20
    max_tensors: int = 256
    max_rank: int = 32
    max_elements: int = 1 << 28
    max_objects: int = 1 << 20
    max_json_depth: int = 48
    max_text: int = 1024

    def __post_init__(self) -> None:
        if self.max_rank > 32:  # numpy 1 has no more
            raise ValueError("max_rank is 32 at most")


def error_body(error: Exception) -> bytes:
    """`{"error": "..."}`, as clients of the protocol expect; `error` in one line, safe for a terminal."""
    return msgspec.json.encode({"error": printable("; ".join(line.strip() for line in str(error).splitlines()))})
