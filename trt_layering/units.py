"""Sizes as people write them and as people read them. Imports only errors and words; bad text raises UsageError."""

from __future__ import annotations

import re

from trt_layering.errors import UsageError
from trt_layering.words import quoted

_MOST = 1 << 62
_SCALE = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, *, what: str = "size") -> int:
    """Bytes named by `size`: an int, or text such as "96MiB", "1.5 GB", "4096". `what` names it in the error."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise UsageError(f"{what} must be a size, not {quoted(size)}", remedy='write it like "96MiB" or as bytes')
    parsed: float = size if isinstance(size, int) else _parsed(size, what)
    if parsed > _MOST:
        raise UsageError(f"{what} must be at most 4 EiB, not {quoted(size)}", remedy='write it like "96MiB"')
    if round(parsed) <= 0:
        raise UsageError(f"{what} must be above zero, not {quoted(size)}", remedy='write it like "96MiB" or as bytes')
    return round(parsed)


def _parsed(text: str, what: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _SCALE:
        raise UsageError(f"{what} {quoted(text)} is not a size", remedy='write it like "96MiB", "1.5GB" or as bytes')
    return float(match[1]) * _SCALE[match[2].lower()]


def format_size(size: float) -> str:
    """`size` bytes with three significant figures and a binary unit: "96.0 MiB"; "over 4 EiB" for no real size."""
    if size > _MOST:
        return "over 4 EiB"
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
