"""What a bench might have found, made up: for the tests that draw it or tell it."""

from __future__ import annotations

from typing import Any

MIB = 1 << 20


def point(subject: str, budget: int | None, memory: float, median: float, **changes: Any) -> dict[str, Any]:
    """A row of results; `budget` and `memory` in MiB, `median` in milliseconds."""
    return {
        "subject": subject, "budget_bytes": None if budget is None else budget * MIB, "mode": "ring", "samples": 30,
        "median_ms": median, "p99_ms": median * 1.2, "min_ms": median * 0.9, "ratio": 1.5,
        "bytes_read_per_inference": 5 * MIB, "stall_share": 0.25, "peak_bytes": int(memory * MIB),
        "running_bytes": int(memory * MIB), "peak_reduction_one_copy": 0.5, "peak_reduction_two_copies": 0.75,
        "weights_in_memory_bytes": None, "weights_reduction_one_copy": None, "weights_reduction_two_copies": None,
        "fallbacks": [], "predicted_ms": None, "prediction_error": None,
        **changes,
    }  # fmt: skip


def result(points: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "name": "made-up", "version": 1, "weights_bytes": 100 * MIB, "stored_as": "fp32", "floor_bytes": 20 * MIB,
        "everything_bytes": 120 * MIB, "budgets": [20 * MIB, 60 * MIB], "baseline": "memory", "iterations": 10,
        "rounds": 3, "machine": {"cpu": "any", "cores": 2, "kernel": "6", "python": "3.11", "onnxruntime": "1.32"},
        "points": points, "timeline": timeline(), "notes": ["a note"], **changes,
    }  # fmt: skip


def timeline() -> dict[str, Any]:
    """Two blocks, two inferences, two loader threads; the second block is waited for."""
    events = []
    for sweep in (0, 1):
        start = sweep * 10.0
        for block in (0, 1):
            for thread in (0, 1):
                begin = start + block * 4 + thread
                events.append(event("read", block, sweep, begin, begin + 3, 4096))
        events += [
            event("execute", 0, sweep, start, start + 4),
            event("wait", 1, sweep, start + 4, start + 8),
            event("execute", 1, sweep, start + 8, start + 10),
        ]
    return {
        "budget_bytes": 60 * MIB, "arena_bytes": 40 * MIB, "blocks": 2, "sweeps": 2, "end": 20.0, "events": events,
        "arena": [[0.0, 10 * MIB], [4.0, 40 * MIB], [11.0, 30 * MIB]],
    }  # fmt: skip


def event(kind: str, block: int, sweep: int, begin: float, end: float, size: int = 0) -> dict[str, Any]:
    return {"kind": kind, "block": block, "sweep": sweep, "begin": begin, "end": end, "bytes": size}


def everything() -> list[dict[str, Any]]:
    """Every subject, at two budgets where it has them."""
    return [
        *(point(name, budget, budget - 1, 40.0) for name in ("chain", "double", "mapped") for budget in (20, 60)),
        *(point("sequential", budget, 19, 55.0) for budget in (20, 60)),
        point("memory", None, 210, 12.0),
        point("resident", None, 118, 13.0),
    ]
