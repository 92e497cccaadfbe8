"""How far two outputs are apart. Imports numpy; never raises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TOLERANCE = 1e-5
"""Largest difference from the uncut model that a chain may have, as a part of the largest absolute output."""


def difference(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Largest absolute difference, and largest absolute value of `wanted`; the difference is infinite where shapes,
    dtypes, text, or what is not finite do not agree."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return float("inf"), 0.0
    if wanted.dtype.kind in "OUS":
        return (0.0 if np.array_equal(wanted, got) else float("inf")), 0.0
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    a, b = wanted.astype(wide), got.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return float("inf"), 0.0
    largest = float(np.abs(a[finite]).max(initial=0.0))
    apart = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    if wanted.dtype.kind in "iu" and not np.array_equal(wanted, got):
        apart = max(apart, 1.0)  # float64 does not tell large integers apart
    return apart, largest


def relative(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    """The largest difference as a part of the largest element; infinite where there is no such part."""
    diff, largest = difference(wanted, got)
    return diff / largest if largest else 0.0 if diff == 0 else math.inf
