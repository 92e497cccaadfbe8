"""Sizes as people write them and as people read them. Imports only errors; bad text raises UsageError."""

from __future__ import annotations

import re

from trt_layering.errors import UsageError

_SCALE = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, *, what: str = "size") -> int:
    """Bytes named by `size`: an int, or text such as "96MiB", "1.5 GB", "4096". `what` names it in the error."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(f"{what} must be a size, not {size!r}", remedy='write it like "96MiB" or as bytes')
    if isinstance(size, int):
        number, scale = float(size), 1
    else:
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _SCALE:
            raise UsageError(f"{what} {size!r} is not a size", remedy='write it like "96MiB", "1.5GB" or as bytes')
        number, scale = float(match[1]), _SCALE[match[2].lower()]
    parsed = int(size) if isinstance(size, int) else round(number * scale)
    if parsed <= 0:
        raise UsageError(f"{what} must be above zero, not {size!r}", remedy='write it like "96MiB" or as bytes')
    return parsed


def format_size(size: float) -> str:
    """`size` bytes with three significant figures and a binary unit: "96.0 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
