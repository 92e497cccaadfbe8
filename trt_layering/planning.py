"""What a budget buys, told before anything runs: for one chain, and for the models of a deployment that share one.

May import the store, the schedule, the runtime's footprint and the configuration. Reads manifests and tables, opens
no engine. What is not built, was never timed or was timed elsewhere raises a StoreError, a budget that is none a
UsageError.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from trt_layering.errors import BudgetError, ConfigError, NotBuiltError, StoreError
from trt_layering.runtime import schedules
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.origin import measured_elsewhere
from trt_layering.schedule.budget import Demand, DoesNotFit, Share, divide
from trt_layering.schedule.residency import Schedule
from trt_layering.schedule.table import Choice, Table, best_choice, choose
from trt_layering.store.manifest import Chain, Profile, finished_versions, read_manifest, resolve
from trt_layering.units import format_size, parse_rate, parse_size

if TYPE_CHECKING:
    from trt_layering.config import Config, Model

log = logging.getLogger("trt_layering")

_HIDDEN = 1.01
"""Reads count as hidden when a sweep takes at most so many times what its executions take."""
_LITTLE = 1e-3
_NOTHING = 1e-6
_RATES = (1e4, 1e12)
_EXACT = 1.01


@dataclass(frozen=True)
class Point:
    """With `budget_bytes` a run is predicted to take `predicted_ms` and to read `streamed_bytes`."""

    budget_bytes: int
    predicted_ms: float
    streamed_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What chain `name` does within `budget_bytes`, in bytes, milliseconds and bytes per second.

    Where it does not `fits`, what needs a fit is None. `taken_bytes` is what the schedule takes of the budget;
    `resident_blocks` are the names of blocks that stay. `read_ahead` says how many blocks ahead of execution a read may
    begin, on average. `predicted_ms` is one run of many that follow each other. `all_resident_ms` is the executions
    alone of the schedule with the most memory. `required_read_rate` is the least rate at which the prediction comes
    within 1 % of executing alone; None where no rate does. From `break_even_runs` runs on, it would have been quicker
    to load everything first and keep it; None where it never would.
    """

    name: str
    budget_bytes: int
    floor_bytes: int
    fits: bool
    blocks: int
    weights_bytes: int
    activation_bytes: int
    all_resident_bytes: int
    all_resident_ms: float
    measured_read_rate: float
    assumed_read_rate: float | None
    curve: tuple[Point, ...]
    refusal: str = ""
    remedy: str = ""
    taken_bytes: int | None = None
    arena_bytes: int | None = None
    resident_bytes: int | None = None
    streamed_bytes: int | None = None
    resident_blocks: tuple[str, ...] | None = None
    mode: str | None = None
    read_ahead: float | None = None
    predicted_ms: float | None = None
    required_read_rate: float | None = None
    break_even_runs: int | None = None


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


def forecast(
    name: str,
    *,
    repository: str | Path = "engines",
    budget: int | str | None = None,
    version: int | None = None,
    read_rate: float | str | None = None,
) -> Forecast:
    """What the newest finished version (or `version`) of chain `name` does within `budget`; None: as much as it needs
    to keep everything in memory. With `read_rate` ("2GB", or bytes per second), as if the drive read that fast.

    Takes what is measured at its word, so raises StoreError for a chain that was never timed, or on another machine or
    drive; NotBuiltError, CorruptError, ForeignError for the store; UsageError for sizes that are none. A budget under
    the floor is no error: the answer says so.
    """
    rate = None if read_rate is None else parse_rate(read_rate, what="read_rate")
    outlook = _Outlook.of(resolve(Path(repository), name, version), rate)
    granted = outlook.needs.resident if budget is None else parse_size(budget, what="budget")
    return outlook.forecast(granted)


def division(config: Config, *, repository: str | Path | None = None, budget: int | None = None) -> Division:
    """The deployment's memory budget (or `budget` bytes) divided among its models.

    Raises ConfigError where there is no budget or no model, NotBuiltError where models are not built, BudgetError where
    a fixed share is under its model's floor, and what `forecast` raises. Floors that do not fit together are no error.
    """
    deployment = config.deployment
    if budget is None and deployment.memory_budget is None:
        remedy = "add one, like memory_budget: 96MiB, or give --budget"
        raise ConfigError("there is no memory_budget to divide", where=str(config.path), remedy=remedy)
    if not deployment.models:
        raise ConfigError("there are no models", where=str(config.path), remedy="add some under models:")
    granted = int(deployment.memory_budget or 0) if budget is None else budget
    outlooks = _outlooks(config, Path(repository or deployment.repository))
    demands = [_demand(model, outlook) for model, outlook in zip(deployment.models, outlooks, strict=True)]
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
    """The bytes that model `name` of the deployment gets: all of the budget where it is alone or where the others
    cannot be asked, which the log says; None where there is no budget. BudgetError where the models do not fit."""
    deployment = config.deployment
    whole = None if deployment.memory_budget is None else int(deployment.memory_budget)
    if whole is None or len(deployment.models) < 2:
        return whole
    try:
        found = division(config, repository=repository)
    except StoreError as error:
        log.warning("the budget is not divided, %s gets all of it: %s; %s", name, error.what, error.remedy)
        return whole
    if not found.fits:
        raise BudgetError(
            f"a budget of {format_size(whole)} is under the {format_size(found.floor_bytes)} that all models need",
            floor=found.floor_bytes, parts={portion.name: portion.floor_bytes for portion in found.models},
            where=str(config.path), remedy="raise memory_budget, or give this model a --budget",
        )  # fmt: skip
    return next(portion.share_bytes for portion in found.models if portion.name == name)


@dataclass(frozen=True)
class _Outcome:
    """One schedule of a chain, of which `taken` bytes of the budget are needed; `schedule` None: nothing streams."""

    taken: int
    choice: Choice
    schedule: Schedule | None

    @property
    def point(self) -> Point:
        return Point(self.taken, self.choice.seconds * 1e3, self.choice.streamed_bytes)


class _Outlook:
    """A built chain as what is known of it beforehand: its manifest, what it needs, and its table of schedules."""

    def __init__(self, manifest: Chain, table: Table, rate: float | None) -> None:
        self.manifest, self.needs, self._assumed = manifest, Footprint.of(manifest), rate
        self.parts, self._pace = schedules.partition(manifest), schedules.pace(manifest)
        if rate is not None:
            self._pace = replace(self._pace, byte_time=1 / rate)
            sizes = [choice.arena_bytes for choice in table]
            table = _improving([best_choice(self.parts, size, self._pace) for size in sizes])
        self.table = table

    @classmethod
    def of(cls, folder: Path, rate: float | None) -> _Outlook:
        """Of the chain in `folder`, whose times must be of this machine, and of this drive if `rate` is None."""
        manifest = read_manifest(folder)
        _require_times(folder, manifest.profile, rate)
        table, _ = schedules.read_table(folder, manifest)
        return cls(manifest, table, rate)

    @property
    def all_resident_seconds(self) -> float:
        """What executing takes alone, in the schedule with the most memory."""
        return self._alone(self.table[-1])

    def _alone(self, choice: Choice) -> float:
        return sum(self.parts.pieces[index].execute for index in choice.parts)

    def outcome(self, budget: int) -> _Outcome:
        """What happens within `budget`, which is at least the floor."""
        if self.manifest.optimised and budget >= self.needs.resident:
            weights, last = self.manifest.weights_bytes, self.table[-1]
            kept = replace(last, arena_bytes=0, seconds=self._alone(last), resident_bytes=weights, streamed_bytes=0)
            return _Outcome(self.needs.resident, kept, None)
        choice = choose(self.table, budget - self.needs.fixed)
        schedule = choice.schedule(self.parts.pieces, self.manifest.profile.read_size)
        return _Outcome(self.needs.fixed + choice.arena_bytes, choice, schedule)

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """Budgets, and the seconds that a run counts with them: see `Demand`. What predictions cannot tell apart is
        told apart by a little: hidden reads still take the drive from other models, and engines that keep all weights
        lay them out as they like best, which was not measured."""
        sizes = sorted({self.needs.fixed + choice.arena_bytes for choice in self.table} | {self.needs.resident})
        found: list[tuple[int, float]] = []
        for size in (self.needs.floor, *(size for size in sizes if size > self.needs.floor)):
            outcome = self.outcome(size)
            reading = outcome.choice.streamed_bytes * self._pace.byte_time
            better = outcome.choice.seconds if outcome.schedule is None else 0.0
            seconds = outcome.choice.seconds + _LITTLE * (reading - better)
            if not found or seconds < found[-1][1]:
                found.append((size, seconds))
        return tuple(found)

    def forecast(self, budget: int) -> Forecast:
        """All that is told of a budget; `forecast` of this module."""
        manifest, needs = self.manifest, self.needs
        around = (0, budget, 2 * budget, needs.resident)
        sizes = sorted({min(max(size, needs.floor), needs.resident) for size in around})
        told = Forecast(
            name=manifest.name, budget_bytes=budget, floor_bytes=needs.floor, fits=budget >= needs.floor,
            blocks=len(manifest.blocks), weights_bytes=manifest.weights_bytes, activation_bytes=needs.activations,
            all_resident_bytes=needs.resident, all_resident_ms=self.all_resident_seconds * 1e3,
            measured_read_rate=manifest.profile.read_rate, assumed_read_rate=self._assumed,
            curve=tuple(replace(self.outcome(size).point, budget_bytes=size) for size in sizes),
        )  # fmt: skip
        if not told.fits:
            refusal = needs.refusal(budget, manifest)
            return replace(told, refusal=refusal.what, remedy=refusal.remedy)
        outcome = self.outcome(budget)
        choice, schedule = outcome.choice, outcome.schedule
        return replace(
            told, taken_bytes=outcome.taken, arena_bytes=choice.arena_bytes, resident_bytes=choice.resident_bytes,
            streamed_bytes=choice.streamed_bytes, resident_blocks=self._kept(outcome),
            mode=schedule.mode if schedule else "resident", read_ahead=_read_ahead(schedule),
            predicted_ms=choice.seconds * 1e3, required_read_rate=self._required_rate(outcome, budget),
            break_even_runs=self._break_even(choice),
        )  # fmt: skip

    def _kept(self, outcome: _Outcome) -> tuple[str, ...]:
        """Names of the blocks of which nothing is read twice."""
        blocks, pieces = self.manifest.blocks, self.parts.pieces
        if outcome.schedule is None:
            return tuple(block.name for block in blocks)
        stays = [all(read.once for read in reads) for reads in outcome.schedule.reads]
        kept = (pieces[index] for index, stay in zip(outcome.choice.parts, stays, strict=True) if stay)
        return tuple(block.name for piece in kept for block in blocks[piece.first : piece.first + piece.count])

    def _required_rate(self, outcome: _Outcome, budget: int) -> float | None:
        """The least rate at which the best schedule for `budget` hides all reads, by bisection; 0 where there are
        none."""
        if not outcome.choice.streamed_bytes:
            return 0.0

        def hides(rate: float) -> bool:
            pace = replace(self._pace, byte_time=1 / rate)
            choice = best_choice(self.parts, budget - self.needs.fixed, pace)
            return choice.seconds <= _HIDDEN * self._alone(choice)

        slow, quick = _RATES
        if not hides(quick):
            return None
        while quick > slow * _EXACT:
            middle = math.sqrt(slow * quick)
            slow, quick = (slow, middle) if hides(middle) else (middle, quick)
        return quick

    def _break_even(self, choice: Choice) -> int | None:
        """The fewest runs n for which reading all weights and then n times executing takes less than reading what stays
        and then n predicted runs."""
        lost = choice.seconds - self.all_resident_seconds
        if lost <= _NOTHING * choice.seconds:
            return None
        return math.floor((self.manifest.weights_bytes - choice.resident_bytes) * self._pace.byte_time / lost) + 1


def _improving(choices: Sequence[Choice]) -> Table:
    """Those choices, of more and more memory, that are quicker than all before."""
    found: list[Choice] = []
    for choice in choices:
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return tuple(found)


def _read_ahead(schedule: Schedule | None) -> float | None:
    """How many blocks ahead of execution reads may begin, averaged over their bytes; None without reads."""
    if schedule is None or not schedule.streamed_bytes:
        return None
    return schedule.read_ahead / schedule.streamed_bytes


def _require_times(folder: Path, profile: Profile, rate: float | None) -> None:
    """Raise StoreError unless `profile` was measured, on this machine and, if `rate` is None, on this drive."""
    if not profile.execute_seconds:
        home = folder.absolute().parent
        remedy = f"run trt-layering profile {shlex.quote(home.name)} --repository {shlex.quote(str(home.parent))}"
        raise StoreError("the chain was never timed", where=str(folder), remedy=remedy)
    asked = profile if rate is None else structs.replace(profile, drive="")
    for sentence in measured_elsewhere(asked, folder):
        what, _, command = sentence.rpartition(": run ")
        raise StoreError(what, where=str(folder), remedy=f"run {command}")


# ---------------------------------------------------------------------------------------------------- several models


def _outlooks(config: Config, repository: Path) -> list[_Outlook]:
    """Of every model of the deployment. NotBuiltError names all that are missing."""
    models = config.deployment.models
    missing = [model.name for model in models if not finished_versions(repository, model.name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise NotBuiltError(
            f"{', '.join(missing)} {verb} not built",
            where=str(repository), remedy=f"build what is missing: trt-layering build {config.path}",
        )  # fmt: skip
    return [_Outlook.of(resolve(repository, model.name), None) for model in models]


def _demand(model: Model, outlook: _Outlook) -> Demand:
    """What the model asks for. BudgetError where its share is fixed and under its floor."""
    if 0 < model.share < outlook.needs.floor:
        raise outlook.needs.refusal(int(model.share), outlook.manifest)
    share = int(model.share) or None
    deadline = None if model.deadline is None else float(model.deadline)
    return Demand(model.name, outlook.curve, model.priority, deadline, share)


def _portion(demand: Demand, outlook: _Outlook, share: Share | None) -> Portion:
    seconds = None if share is None else outlook.outcome(share.budget_bytes).choice.seconds
    met = None if seconds is None or demand.deadline is None else seconds <= demand.deadline
    return Portion(
        name=demand.name, share_bytes=None if share is None else share.budget_bytes, floor_bytes=demand.floor,
        predicted_ms=None if seconds is None else seconds * 1e3,
        all_resident_ms=outlook.all_resident_seconds * 1e3, priority=demand.priority,
        deadline_ms=None if demand.deadline is None else demand.deadline * 1e3, meets_deadline=met,
    )  # fmt: skip
