"""What a deployment did in the last minutes, one sample a second. Imports the fleet; nothing here fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from trt_layering.runtime.fleet import Fleet

SECONDS = 300


@dataclass(frozen=True)
class ModelSample:
    """One model in the time since the sample before: how many `requests` ended, in how many seconds on average from
    when they came (None where there were none), which share of the time it waited for the drive, and how many requests
    wait now."""

    requests: int
    mean_seconds: float | None
    stall_share: float
    queued: int


@dataclass(frozen=True)
class Sample:
    """The models at `time`, in seconds of the deployment's clock, by name."""

    time: float
    models: Mapping[str, ModelSample]


@dataclass(frozen=True)
class _Sums:
    ended: int = 0
    latency: float = 0.0
    stall: float = 0.0


class History:
    """The last five minutes of `fleet`. One thread takes samples, any may look."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._samples: deque[Sample] = deque(maxlen=SECONDS)
        self._before: dict[str, _Sums] = {}
        self._taken = fleet.clock()

    def samples(self) -> list[Sample]:
        """Oldest first: a list of the caller's own."""
        return list(self._samples)

    def take(self, now: float) -> None:
        """Take a sample."""
        passed, self._taken = max(now - self._taken, 1e-9), now
        models = {}
        with self._fleet.changed:
            for served in self._fleet:
                stall = served.past["stall_seconds"] + (served.open.chain.stall_seconds if served.open else 0.0)
                sums = _Sums(served.ended, served.latency_seconds, stall)
                last = self._before.get(served.name, _Sums())
                self._before[served.name] = sums
                count = sums.ended - last.ended
                mean = (sums.latency - last.latency) / count if count else None
                share = min(max(0.0, sums.stall - last.stall) / passed, 1.0)
                models[served.name] = ModelSample(count, mean, share, len(served.waiting))
        self._samples.append(Sample(now, models))
