"""What each model of a deployment gets of its memory budget, and for how many requests at once.

May import planning, the schedule, sharing and the configuration. Opens no engine. What a store lacks is a StoreError;
models that do not fit together, or into the share that is fixed for one, are a BudgetError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_layering.config import Model
from trt_layering.errors import BudgetError
from trt_layering.planning import Outlook
from trt_layering.schedule.budget import Demand, DoesNotFit, divide
from trt_layering.sharing import demand_of
from trt_layering.store.manifest import Chain, read_manifest
from trt_layering.units import format_size

_USUAL_RATE = 1e9
"""Bytes per second that a chain which was never timed is taken to be read at."""


@dataclass(frozen=True)
class Candidate:
    """A version of a model that may be opened: its `folder`, `<repository>/<name>/<version>`, and what is known of
    it."""

    model: Model
    folder: Path
    outlook: Outlook

    @classmethod
    def of(cls, model: Model, folder: Path) -> Candidate:
        """Of the finished version in `folder`. Raises StoreError."""
        return cls(model, folder, Outlook.trusting(folder, read_manifest(folder)))

    @property
    def manifest(self) -> Chain:
        """What was built."""
        return self.outlook.manifest

    @property
    def version(self) -> int:
        """Its number."""
        return int(self.folder.name)

    @property
    def floor(self) -> int:
        """The least that it takes, in bytes: its share, if that is fixed."""
        return int(self.model.share) or self.outlook.needs.floor

    @property
    def resident(self) -> int:
        """The most that it can use, in bytes."""
        return self.outlook.needs.resident


@dataclass(frozen=True)
class Part:
    """`budget` bytes, None for as much as there is use for, which leave room for waves of `wave` requests."""

    budget: int | None = None
    wave: int = 1


def divided(candidates: Sequence[Candidate], budget: int | None) -> dict[str, Part]:
    """The part of each of `candidates` by name. Their waves are as large as the models want them; where the floors do
    not fit then, half of that, and so on. Raises BudgetError where they do not fit at all."""
    if budget is None:
        return {one.model.name: Part(int(one.model.share) or None) for one in candidates}
    waves = [one.model.wave for one in candidates]
    while True:
        waves = [_within_share(one, wave) for one, wave in zip(candidates, waves, strict=True)]
        try:
            shares = divide([_demand(one, wave) for one, wave in zip(candidates, waves, strict=True)], budget)
        except DoesNotFit as error:
            if max(waves, default=1) == 1:
                raise _refusal(budget, error.needed, error.parts) from None
            waves = [max(1, wave // 2) for wave in waves]
            continue
        return {
            share.name: Part(max(share.budget_bytes, 1), wave) for share, wave in zip(shares, waves, strict=True)
        }  # fmt: skip


def together(candidates: Iterable[Candidate]) -> int:
    """The least that `candidates` take together, in bytes."""
    return sum(one.floor for one in candidates)


def require_fit(candidates: Sequence[Candidate], budget: int | None) -> None:
    """Raise BudgetError unless `candidates` fit into `budget` together."""
    if budget is not None and together(candidates) > budget:
        raise _refusal(budget, together(candidates), {one.model.name: one.floor for one in candidates})


def _within_share(one: Candidate, wave: int) -> int:
    """`wave`, or as many requests as the model's share has room for, where that is fixed."""
    share = int(one.model.share)
    while share and wave > 1 and one.outlook.for_waves(wave).needs.floor > share:
        wave //= 2
    return wave


def _demand(one: Candidate, wave: int) -> Demand:
    outlook = one.outlook.for_waves(wave)
    if one.manifest.profile.execute_seconds:
        return demand_of(one.model, outlook)
    needs, seconds = outlook.needs, 1e-6 + one.manifest.weights_bytes / _USUAL_RATE
    curve = [(needs.floor, seconds)]
    if needs.resident > needs.floor:
        curve.append((needs.resident, seconds / 2))
    return Demand(one.model.name, tuple(curve), one.model.priority, share=int(one.model.share) or None)


def _refusal(budget: int, floor: int, parts: Mapping[str, int]) -> BudgetError:
    return BudgetError(
        f"{format_size(budget)} is under the {format_size(floor)} that the models need: "
        + ", ".join(f"{name} {format_size(size)}" for name, size in parts.items()),
        floor=floor, parts=dict(parts), where="memory_budget", remedy="give more, or unload a model",
    )  # fmt: skip
