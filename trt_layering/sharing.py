"""One memory budget for the models of a deployment: who gets how much of it, and how long each then takes.

May import planning, the schedule, the store and the configuration. Opens no engine. What cannot be divided is a
ConfigError, a NotBuiltError, a BudgetError, or what `planning` raises; floors that do not fit together are an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trt_layering.errors import BudgetError, ConfigError, NotBuiltError, StoreError
from trt_layering.planning import Outlook
from trt_layering.schedule.budget import Demand, DoesNotFit, Share, divide
from trt_layering.store.manifest import finished_versions, resolve
from trt_layering.units import format_size

if TYPE_CHECKING:
    from trt_layering.config import Config, Model

log = logging.getLogger("trt_layering")


@dataclass(frozen=True)
class Portion:
    """What one model of a deployment gets: `share_bytes` of the budget, with which a run is predicted to take
    `predicted_ms`; both None where the budget does not fit. `meets_deadline` is None without a deadline."""

    name: str
    share_bytes: int | None
    floor_bytes: int
    predicted_ms: float | None
    all_resident_ms: float
    priority: float
    deadline_ms: float | None
    meets_deadline: bool | None


@dataclass(frozen=True)
class Division:
    """`budget_bytes` divided among `models`; `floor_bytes` is the least that they can have together, `left_bytes` what
    none of them would gain by."""

    budget_bytes: int
    floor_bytes: int
    fits: bool
    left_bytes: int | None
    models: tuple[Portion, ...]


def division(config: Config, *, repository: str | Path | None = None, budget: int | None = None) -> Division:
    """The deployment's memory budget (or `budget` bytes) divided among its models.

    Raises ConfigError where there is no budget or no model, NotBuiltError where models are not built, BudgetError where
    a fixed share is under its model's floor, and what `planning.forecast` raises. Floors that do not fit together are
    no error.
    """
    deployment = config.deployment
    if budget is None and deployment.memory_budget is None:
        remedy = "add one, like memory_budget: 96MiB, or give --budget"
        raise ConfigError("there is no memory_budget to divide", where=str(config.path), remedy=remedy)
    if not deployment.models:
        raise ConfigError("there are no models", where=str(config.path), remedy="add some under models:")
    granted = int(deployment.memory_budget or 0) if budget is None else budget
    outlooks = _outlooks(config, Path(repository or deployment.repository))
    demands = [demand_of(model, outlook) for model, outlook in zip(deployment.models, outlooks, strict=True)]
    shares: Sequence[Share | None]
    try:
        shares = divide(demands, granted)
        needed = sum(demand.floor if demand.share is None else demand.share for demand in demands)
        left = granted - sum(share.budget_bytes for share in shares if share is not None)
    except DoesNotFit as error:
        shares, needed, left = [None] * len(demands), error.needed, None
    portions = tuple(map(_portion, demands, outlooks, shares))
    return Division(granted, needed, left is not None, left, portions)


def share_of(name: str, config: Config, *, repository: str | Path | None = None) -> int | None:
    """The bytes that model `name` of the deployment gets: its fixed share, or what dividing the budget gives. Where the
    others cannot be asked it is all of the budget, which the log says; None where there is no budget. BudgetError where
    the models do not fit."""
    deployment, model = config.deployment, config.model(name)
    whole = int(model.share) or (None if deployment.memory_budget is None else int(deployment.memory_budget))
    if deployment.memory_budget is None or (len(deployment.models) == 1 and not model.share):
        return whole
    try:
        found = division(config, repository=repository)
    except StoreError as error:
        log.warning(
            "the budget is not divided, %s gets %s: %s; %s", name, format_size(whole or 0), error.what, error.remedy
        )
        return whole
    if not found.fits:
        raise BudgetError(
            f"{format_size(found.budget_bytes)} is under the {format_size(found.floor_bytes)} that all models need",
            floor=found.floor_bytes, parts={portion.name: portion.floor_bytes for portion in found.models},
            where=str(config.path), remedy="raise memory_budget, or give this model a --budget",
        )  # fmt: skip
    return next(portion.share_bytes for portion in found.models if portion.name == name)


def _outlooks(config: Config, repository: Path) -> list[Outlook]:
    """Of every model of the deployment. NotBuiltError names all that are missing."""
    models = config.deployment.models
    missing = [model.name for model in models if not finished_versions(repository, model.name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise NotBuiltError(
            f"{', '.join(missing)} {verb} not built",
            where=str(repository), remedy=f"build what is missing: trt-layering build {config.path}",
        )  # fmt: skip
    return [Outlook.of(resolve(repository, model.name)) for model in models]


def demand_of(model: Model, outlook: Outlook) -> Demand:
    """What the model asks for. BudgetError where its share is fixed and under its floor."""
    if 0 < model.share < outlook.needs.floor:
        raise outlook.needs.refusal(int(model.share), outlook.manifest)
    share = int(model.share) or None
    deadline = None if model.deadline is None else float(model.deadline)
    return Demand(model.name, outlook.curve, model.priority, deadline, share)


def _portion(demand: Demand, outlook: Outlook, share: Share | None) -> Portion:
    seconds = None if share is None else outlook.outcome(share.budget_bytes).choice.seconds
    met = None if seconds is None or demand.deadline is None else seconds <= demand.deadline
    return Portion(
        name=demand.name, share_bytes=None if share is None else share.budget_bytes, floor_bytes=demand.floor,
        predicted_ms=None if seconds is None else seconds * 1e3,
        all_resident_ms=outlook.all_resident_seconds * 1e3, priority=demand.priority,
        deadline_ms=None if demand.deadline is None else demand.deadline * 1e3, meets_deadline=met,
    )  # fmt: skip
