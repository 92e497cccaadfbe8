"""What a bench found: numbers for JSON made of samples, and the table people read. Pure functions; imports units."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_layering.bench.subjects import SUBJECTS
from trt_layering.table import columns
from trt_layering.units import format_size

Point = dict[str, Any]


@dataclass
class Samples:
    """All turns of one subject at one budget: seconds of each run; bytes read and seconds waited over all of them;
    memory, less that of the imported libraries, at its highest from opening on and while running."""

    seconds: list[float] = field(default_factory=list)
    bytes_read: int = 0
    stall_seconds: float | None = None
    peak_bytes: int = 0
    running_bytes: int = 0
    weights_in_memory_bytes: int | None = None
    mode: str | None = None
    predicted_seconds: float | None = None
    fallbacks: list[str] = field(default_factory=list)

    def add(self, turn: Mapping[str, Any], libraries: int) -> None:
        """Take in what one turn of a subject's process told; its libraries alone take `libraries` bytes."""
        self.seconds += turn["seconds"]
        self.bytes_read += turn["bytes_read"]
        if turn["stall_seconds"] is not None:
            self.stall_seconds = (self.stall_seconds or 0.0) + turn["stall_seconds"]
        self.running_bytes = max(self.running_bytes, turn["running_bytes"] - libraries)
        self.peak_bytes = max(self.peak_bytes, self.running_bytes)
        self.weights_in_memory_bytes, self.mode = turn["weights_in_memory_bytes"], turn["mode"]
        self.predicted_seconds = turn["predicted_seconds"]
        self.fallbacks = list(turn["fallbacks"])


def percentile(samples: Sequence[float], part: float) -> float:
    """The smallest of `samples` that at least `part` of them do not exceed: always one that was measured."""
    return sorted(samples)[max(0, math.ceil(part * len(samples)) - 1)]


def point(subject: str, budget: int | None, samples: Samples, weights: int, baseline: Sequence[float] | None) -> Point:
    """One row of the results. `weights` is what all weights take; `baseline` what the subject that everything is
    compared with took in the same rounds, in seconds. `prediction_error` is by how much the predicted time exceeds the
    median, as a part of this; both are None where nothing was predicted."""
    median = statistics.median(samples.seconds)
    stalled, predicted = samples.stall_seconds, samples.predicted_seconds
    return {
        "subject": subject, "budget_bytes": budget, "mode": samples.mode, "samples": len(samples.seconds),
        "median_ms": median * 1e3, "p99_ms": percentile(samples.seconds, 0.99) * 1e3,
        "min_ms": min(samples.seconds) * 1e3, "ratio": median / statistics.median(baseline) if baseline else None,
        "predicted_ms": None if predicted is None else predicted * 1e3,
        "prediction_error": None if predicted is None else predicted / median - 1,
        "bytes_read_per_inference": samples.bytes_read // len(samples.seconds),
        "stall_share": None if stalled is None else min(1.0, stalled / sum(samples.seconds)),
        "peak_bytes": samples.peak_bytes, "running_bytes": samples.running_bytes,
        **reductions("peak", samples.peak_bytes, weights),
        "weights_in_memory_bytes": samples.weights_in_memory_bytes,
        **reductions("weights", samples.weights_in_memory_bytes, weights), "fallbacks": samples.fallbacks,
    }  # fmt: skip


def reductions(what: str, taken: int | None, weights: int) -> dict[str, float | None]:
    """How much less `taken` is than all weights, once, and twice as where host and device have a copy each."""
    return {
        f"{what}_reduction_{words}": None if taken is None or not weights else 1 - taken / (copies * weights)
        for words, copies in (("one_copy", 1), ("two_copies", 2))
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """The results as lines for a person."""
    header = ("budget", "what", "median", "p99", "predicted", "ratio", "memory", "under weights once", "twice", "read")
    points = sorted(result["points"], key=lambda p: (p["budget_bytes"] or math.inf, list(SUBJECTS).index(p["subject"])))
    lines = columns([header, *(_row(one) for one in points)])
    weights, against = format_size(result["weights_bytes"]), SUBJECTS[result["baseline"]].label
    return [
        *lines,
        "predicted: what the profile says of a run, and by how much that exceeds the median",
        f"memory: the process's highest beside its imported libraries; weights once: {weights}; twice: as where host",
        f"and device have a copy each; in ratio to: {against}",
        *(f"note: {note}" for note in [*result["notes"], *_fallbacks(points)]),
    ]


def _fallbacks(points: Sequence[Point]) -> list[str]:
    """What the subjects could not have as asked; once for each of them what differs in numbers only."""
    kinds: dict[tuple[str, str], str] = {}
    for one in points:
        for words in one["fallbacks"]:
            label = SUBJECTS[one["subject"]].label
            kinds.setdefault((label, re.sub(r"[\d.]+", "", words)), f"{label}: {words}")
    return list(kinds.values())


def _predicted(one: Point) -> str:
    if one["predicted_ms"] is None:
        return ""
    return f"{one['predicted_ms']:.2f} ms ({one['prediction_error']:+.1%})"


def _row(one: Point) -> tuple[str, ...]:
    def percent(key: str) -> str:
        return "" if one[key] is None else f"{one[key]:.1%}"

    return (
        "" if one["budget_bytes"] is None else format_size(one["budget_bytes"]),
        SUBJECTS[one["subject"]].label,
        f"{one['median_ms']:.2f} ms",
        f"{one['p99_ms']:.2f} ms",
        _predicted(one),
        "" if one["ratio"] is None else f"x {one['ratio']:.3f}",
        format_size(one["peak_bytes"]),
        percent("peak_reduction_one_copy"),
        percent("peak_reduction_two_copies"),
        format_size(one["bytes_read_per_inference"]),
    )
