"""Sizes, times and rates as people write and read them. Imports only errors and words; bad text raises UsageError."""

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
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_LONGEST = 24 * 3600.0
_SLOWEST, _QUICKEST = 1000, 10**12
_LIKE_TIMES, _LIKE_RATES = 'write it like "100ms" or "2s"', 'write it like "2GB" or "500MB/s"'
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


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


def parse_seconds(text: str, *, what: str = "time") -> float:
    """Seconds named by text such as "100ms" or "2s", above zero and at most a day. `what` names it in the error."""
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in _SECONDS:
        raise UsageError(f"{what} {quoted(text)} is not a time", remedy=_LIKE_TIMES)
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= _LONGEST:
        raise UsageError(f"{what} must be above zero and at most a day, not {quoted(text)}", remedy=_LIKE_TIMES)
    return seconds


def format_seconds(seconds: float) -> str:
    """`seconds` with about three significant figures: "1.53 ms", "131 ms", "2.10 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.2f} s" if seconds < 99.995 else f"{seconds:.0f} s"


def parse_rate(rate: float | str, *, what: str = "rate") -> float:
    """Bytes per second: a number, or text such as "2GB" or "500MB/s"; from 1 KB to 1 TB. `what` names it in the
    error."""
    if isinstance(rate, str):
        try:
            parsed: float = parse_size(rate.strip().removesuffix("/s"))
        except UsageError:
            raise UsageError(f"{what} {quoted(rate)} is not a rate", remedy=_LIKE_RATES) from None
    else:
        parsed = float(rate)
    if not _SLOWEST <= parsed <= _QUICKEST:
        raise UsageError(f"{what} must be from 1 KB to 1 TB a second, not {quoted(rate)}", remedy=_LIKE_RATES)
    return parsed


def format_rate(rate: float) -> str:
    """`rate` bytes per second in the decimal units in which drives are sold: "2.10 GB/s"."""
    for unit in ("B/s", "KB/s", "MB/s"):
        if abs(rate) < 999.5:
            return f"{rate:.0f} {unit}"
        rate /= 1000
    return f"{rate:.2f} GB/s" if abs(rate) < 99.995 else f"{rate:.0f} GB/s"
