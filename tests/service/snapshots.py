"""Snapshots of models, their histories and sweeps, made up: what the metrics and the status page are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_layering.runtime.deployment import ModelSample, ModelState, Sample
from trt_layering.runtime.trace import Event, ReadEvent
from trt_layering.store.manifest import Value

MIB = 1 << 20


def state(name: str = "line", **changes: Any) -> ModelState:
    """A model that is ready and has served; `changes` are fields that differ."""
    fields: dict[str, Any] = {
        "name": name, "version": 3, "state": "ready", "reason": "", "backend": "onnxruntime",
        "inputs": (Value(name="input1", dtype="float32", shape=(1, 1, 64, "width")),),
        "outputs": (Value(name="output", dtype="float32", shape=(None, 8210)),),
        "queued": 2, "budget_bytes": 32 * MIB, "resident_bytes": 9 * MIB, "floor_bytes": 18 * MIB, "requests": 1234,
        "failures": 3, "deadline_misses": 5, "sweeps": 667, "wave_sizes": {1: 300, 2: 267, 4: 100},
        "stall_seconds": 6.5, "execute_seconds": 21.25, "bytes_read": 9_000 * MIB, "queue_seconds": 4.0,
        "latency_seconds": 60.5, "predicted_seconds": 0.041, "fallbacks": (), "last_sweep": sweep(),
    }  # fmt: skip
    return ModelState(**{**fields, **changes})


def idle(name: str = "line", **changes: Any) -> ModelState:
    """A model that has served nothing yet."""
    fields: dict[str, Any] = {
        "queued": 0, "requests": 0, "failures": 0, "deadline_misses": 0, "sweeps": 0, "wave_sizes": {},
        "stall_seconds": 0.0, "execute_seconds": 0.0, "bytes_read": 0, "queue_seconds": 0.0,
        "latency_seconds": 0.0, "last_sweep": (),
    }  # fmt: skip
    return state(name, **{**fields, **changes})


def unavailable(name: str = "line", **changes: Any) -> ModelState:
    fields: dict[str, Any] = {
        "version": None, "state": "unavailable", "reason": "weights.bin was truncated; build the chain again",
        "budget_bytes": 0, "resident_bytes": 0, "floor_bytes": 0, "predicted_seconds": None, "inputs": (),
        "outputs": (),
    }  # fmt: skip
    return idle(name, **{**fields, **changes})


def sweep(blocks: int = 12, threads: int = 2, number: int = 7, begin: float = 100.0) -> tuple[Event, ...]:
    """A sweep in which each block takes 2 ms to execute and each fourth one waits for 3 ms before; reads of 4 ms in
    turn by `threads` threads, from 6 ms before it on; two of the next sweep at its end."""
    events: list[Event] = []
    now = begin
    for block in range(blocks):
        if block % 4 == 3:
            events.append(Event("wait", block, number, now, now + 0.003, 0))
            now += 0.003
        events.append(Event("execute", block, number, now, now + 0.002, 0))
        now += 0.002
    when = begin - 0.006
    for block in range(blocks + 2):
        thread, turn = block % threads, block // threads
        start = when + turn * 0.0045 + thread * 0.001
        target, late = block % blocks, int(block >= blocks)
        events.append(
            ReadEvent(
                "read", target, number + late, start, start + 0.004, MIB, extent=target, length=MIB, thread=thread
            )
        )
    return tuple(sorted(events, key=lambda event: event.end))


def history(names: Sequence[str], seconds: int = 300, latency: float = 0.045) -> list[Sample]:
    """One sample a second; requests in all but each seventh minute's half, latency going up and down."""
    return [
        Sample(
            time=1000.0 + second, models={name: _sampled(second, place, latency) for place, name in enumerate(names)}
        )
        for second in range(seconds)
    ]


def _sampled(second: int, place: int, latency: float) -> ModelSample:
    if (second + place * 40) % 210 > 170:
        return ModelSample(requests=0, mean_seconds=None, stall_share=0.0, queued=0)
    wobble = ((second * 37 + place * 11) % 23) / 23
    return ModelSample(
        requests=20 + second % 5, mean_seconds=latency * (0.8 + wobble * (1 + place / 4)),
        stall_share=0.15 + 0.3 * wobble, queued=second % 3,
    )  # fmt: skip


@dataclass
class Snapshots:
    """Stands in for a deployment: what its snapshots say, and nothing that runs."""

    states: list[ModelState] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    budget_bytes: int = 96 * MIB
    pressure: str | None = None

    def models(self) -> list[ModelState]:
        return self.states

    def history(self) -> list[Sample]:
        return self.samples
