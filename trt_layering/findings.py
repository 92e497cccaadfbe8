"""What `doctor` tells of: one thing that was looked at. Imports nothing of ours and cannot fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `numbers` are its measurements, in bytes, seconds and bytes per second."""

    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""
    numbers: Mapping[str, int | float] = field(default_factory=dict)
