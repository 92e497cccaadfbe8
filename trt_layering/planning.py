"""What a budget buys a chain, told before anything runs.

May import the store, the schedule, and of the runtime what reads no weights. Reads manifests and tables, opens no
engine. What is not built, was never timed or was timed elsewhere raises a StoreError; a budget or a rate that is none,
UsageError. A table that had to be made again is said in the log.
"""

from __future__ import annotations

import logging
import math
import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from msgspec import structs

from trt_layering.errors import StoreError
from trt_layering.runtime import schedules
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.origin import measured_elsewhere
from trt_layering.schedule.partition import Partition
from trt_layering.schedule.residency import Schedule
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import Choice, Table, best_choice, choose, table_of
from trt_layering.store.manifest import Chain, Profile, read_manifest, resolve
from trt_layering.units import parse_rate, parse_size

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
    `resident_blocks` are the names of blocks with weights of which all stay. `read_ahead` says how many blocks ahead of
    execution a read may begin, on average. `predicted_ms` is one run of many that follow each other. `all_resident_ms`
    is one with everything in memory, as it was measured, or else the executions alone of the schedule with the most
    memory. `required_read_rate` is the least rate at which the prediction comes
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
    wanted = None if budget is None else parse_size(budget, what="budget")
    outlook = Outlook.of(resolve(Path(repository), name, version), rate=rate)
    granted = outlook.needs.resident if wanted is None else wanted
    return (outlook if rate is None else outlook.at_rate(rate, granted)).forecast(granted)


@dataclass(frozen=True)
class Outcome:
    """A choice among `parts`, for which `taken` bytes of the budget are needed; `kept`: everything stays, beside the
    arena."""

    taken: int
    choice: Choice
    parts: Partition
    kept: bool = False


@dataclass(frozen=True)
class Outlook:
    """A built chain as what is known of it beforehand: its manifest, what it needs, its table of schedules and how fast
    machine and drive are; the drive as `assumed`, in bytes per second, if not as measured."""

    manifest: Chain
    needs: Footprint
    parts: Partition
    table: Table
    pace: Pace
    assumed: float | None = None

    @classmethod
    def of(cls, folder: Path, *, rate: float | None = None) -> Outlook:
        """Of the chain in `folder`, whose times must be of this machine, and of this drive unless its rate is given."""
        manifest = read_manifest(folder)
        _require_times(folder, manifest.profile, rate)
        return cls.trusting(folder, manifest)

    @classmethod
    def trusting(cls, folder: Path, manifest: Chain) -> Outlook:
        """Of the chain in `folder`, whichever machine and drive its times are of, if there are any."""
        table, note = schedules.read_table(folder, manifest)
        if note is not None:
            log.warning("chain %s: %s", manifest.name, note)
        return cls(manifest, Footprint.of(manifest), schedules.partition(manifest), table, schedules.pace(manifest))

    def for_waves(self, wave: int) -> Outlook:
        """The same, opened for waves of `wave` requests."""
        return replace(self, needs=Footprint.of(self.manifest, wave))

    def at_rate(self, rate: float, budget: int) -> Outlook:
        """The same with a drive that reads so fast, as far as is told of `budget`."""
        pace = replace(self.pace, byte_time=1 / rate)
        arenas = (self._arena(size) for size in self._around(budget))
        sizes = sorted({*arenas, self.table[0].arena_bytes, self.table[-1].arena_bytes})
        return replace(self, table=table_of(self.parts, sizes, pace), pace=pace, assumed=rate)

    def _around(self, budget: int) -> list[int]:
        """The floor, the budget, twice as much, and everything."""
        least, most = self.needs.floor, self.needs.resident
        return sorted({min(max(size, least), most) for size in (least, budget, 2 * budget, most)})

    @property
    def all_resident_seconds(self) -> float:
        """What a run takes with everything in memory."""
        return self._everything.choice.seconds

    @cached_property
    def _everything(self) -> Outcome:
        """What happens with a budget that holds everything."""
        manifest, last = self.manifest, self.table[-1]
        if manifest.optimised:
            seconds = manifest.profile.whole_seconds or last.seconds
            weights = manifest.weights_bytes
            choice = replace(last, arena_bytes=0, seconds=seconds, resident_bytes=weights, streamed_bytes=0)
            return Outcome(self.needs.resident, choice, self.parts, kept=True)
        if schedules.loads_tables(manifest):
            loaded = schedules.all_loaded(manifest, manifest.profile.read_size)
            return Outcome(self.needs.resident, loaded.choice, loaded.partition)
        return Outcome(self.needs.fixed + last.arena_bytes, last, self.parts)

    def _alone(self, choice: Choice) -> float:
        return sum(self.parts.pieces[index].execute for index in choice.parts)

    def outcome(self, budget: int) -> Outcome:
        """What happens within `budget`, which is at least the floor."""
        if budget >= self.needs.resident:
            return self._everything
        choice = choose(self.table, self._arena(budget))
        return Outcome(self.needs.fixed + choice.arena_bytes, choice, self.parts)

    def _arena(self, budget: int) -> int:
        """The bytes that `budget` leaves for the arena. Where all weights fit, requests run one by one."""
        room = budget - self.needs.fixed
        return room if room >= self.needs.weights else room - self.needs.waves

    def _budget(self, arena: int) -> int:
        """The smallest budget that leaves `arena` bytes for it."""
        waves = min(self.needs.waves, max(0, self.needs.weights - arena))
        return self.needs.fixed + arena + waves

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        """Budgets, and the seconds that a run counts with them: see `Demand`. What predictions cannot tell apart is
        told apart by a little: hidden reads still take the drive from other models, and engines that keep all weights
        lay them out as they like best, where that was not measured."""
        unmeasured = not self.manifest.profile.whole_seconds
        sizes = sorted({self._budget(choice.arena_bytes) for choice in self.table} | {self.needs.resident})
        found: list[tuple[int, float]] = []
        for size in (self.needs.floor, *(size for size in sizes if size > self.needs.floor)):
            outcome = self.outcome(size)
            reading = outcome.choice.streamed_bytes * self.pace.byte_time
            better = outcome.choice.seconds if outcome.kept and unmeasured else 0.0
            seconds = outcome.choice.seconds + _LITTLE * (reading - better)
            if not found or seconds < found[-1][1]:
                found.append((size, seconds))
        return tuple(found)

    def forecast(self, budget: int) -> Forecast:
        """All that is told of a budget; `forecast` of this module."""
        manifest, needs = self.manifest, self.needs
        told = Forecast(
            name=manifest.name, budget_bytes=budget, floor_bytes=needs.floor, fits=budget >= needs.floor,
            blocks=len(manifest.blocks), weights_bytes=manifest.weights_bytes, activation_bytes=needs.activations,
            all_resident_bytes=needs.resident, all_resident_ms=self.all_resident_seconds * 1e3,
            measured_read_rate=manifest.profile.read_rate, assumed_read_rate=self.assumed,
            curve=tuple(self._point(size) for size in self._around(budget)),
        )  # fmt: skip
        if not told.fits:
            refusal = needs.refusal(budget, manifest)
            return replace(told, refusal=refusal.what, remedy=refusal.remedy)
        outcome = self.outcome(budget)
        choice = outcome.choice
        schedule = choice.schedule(outcome.parts.pieces, manifest.profile.read_size)
        return replace(
            told, taken_bytes=outcome.taken, arena_bytes=choice.arena_bytes, resident_bytes=choice.resident_bytes,
            streamed_bytes=choice.streamed_bytes, resident_blocks=self._resident(outcome, schedule),
            mode="resident" if outcome.kept else schedule.mode,
            read_ahead=schedule.read_ahead / choice.streamed_bytes if choice.streamed_bytes else None,
            predicted_ms=choice.seconds * 1e3, required_read_rate=self._required_rate(choice, budget),
            break_even_runs=self._break_even(choice),
        )  # fmt: skip

    def _point(self, budget: int) -> Point:
        choice = self.outcome(budget).choice
        return Point(budget, choice.seconds * 1e3, choice.streamed_bytes)

    def _resident(self, outcome: Outcome, schedule: Schedule) -> tuple[str, ...]:
        """Names of the blocks that have weights, of which all are in memory and none is read twice."""
        blocks, pieces = self.manifest.blocks, outcome.parts.pieces
        if outcome.kept:
            return tuple(block.name for block in blocks if block.extents)
        stays = [all(read.once for read in reads) for reads in schedule.reads]
        kept = (pieces[index] for index, stay in zip(outcome.choice.parts, stays, strict=True) if stay)
        return tuple(
            blocks[index].name
            for piece in kept
            for index in range(piece.first, piece.first + piece.count)
            if pieces[index].nbytes  # as of a block by itself
        )

    def _required_rate(self, choice: Choice, budget: int) -> float | None:
        """The least rate at which the best schedule for `budget` hides all reads, by bisection; 0 where there are
        none."""
        if not choice.streamed_bytes:
            return 0.0

        def hides(rate: float) -> bool:
            pace = replace(self.pace, byte_time=1 / rate)
            best = best_choice(self.parts, self._arena(budget), pace)
            return best.seconds <= _HIDDEN * self._alone(best)

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
        missing = max(0, self.manifest.weights_bytes - choice.resident_bytes)  # shared ones may stay in several places
        return math.floor(missing * self.pace.byte_time / lost) + 1


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
