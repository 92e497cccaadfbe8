"""What the verb `schedule` says of a forecast and of a division: one object for programs, lines for people.

May import what `planning` and `sharing` return, table, terminal and units. Cannot fail.
"""

from __future__ import annotations

from dataclasses import asdict

from trt_layering.planning import Forecast
from trt_layering.sharing import Division, Portion
from trt_layering.table import columns
from trt_layering.terminal import Result
from trt_layering.units import format_rate, format_seconds, format_size

_DOES_NOT_FIT = 3


def forecast(told: Forecast) -> Result:
    """A verdict, what is behind it, and what less and more memory would do; status 3 where it does not fit."""
    more = ["", *columns(_facts(told))] if told.fits else [f"  to do: {told.remedy}"]
    lines = [_verdict(told), *more, "", *columns(_curve(told))]
    return Result(asdict(told), lines, 0 if told.fits else _DOES_NOT_FIT)


def _verdict(told: Forecast) -> str:
    if told.taken_bytes is None or told.predicted_ms is None:
        return f"does not fit: {told.refusal}"
    whole = _milliseconds(told.all_resident_ms)
    fits = f"fits: {format_size(told.taken_bytes)} of {format_size(told.budget_bytes)}"
    if not told.streamed_bytes:
        return f"{fits}; predicted {_milliseconds(told.predicted_ms)} per run, everything stays in memory"
    times = f", {told.predicted_ms / told.all_resident_ms:.2f} times" if told.all_resident_ms else ", not"
    return f"{fits}; predicted {_milliseconds(told.predicted_ms)} per run{times} everything in memory ({whole})"


def _facts(told: Forecast) -> list[tuple[str, str]]:
    names = told.resident_blocks or ()
    return [
        ("floor", format_size(told.floor_bytes)),
        ("stays in memory", f"{format_size(told.resident_bytes or 0)}, {len(names)} of {told.blocks} blocks whole"),
        ("read in every run", _streamed(told)),
        ("arena", format_size(told.arena_bytes or 0)),
        ("activations", format_size(told.activation_bytes)),
        ("drive", _drive(told)),
        ("to hide all reads", _required(told)),
        ("loading everything", _break_even(told)),
    ]


def _streamed(told: Forecast) -> str:
    if told.read_ahead is None:
        return "nothing"
    ahead = f"on average {told.read_ahead:.1f} blocks ahead" if told.read_ahead >= 0.05 else "one block after the other"
    return f"{format_size(told.streamed_bytes or 0)}, {ahead} ({told.mode})"


def _drive(told: Forecast) -> str:
    measured = f"{format_rate(told.measured_read_rate)} measured"
    return measured if told.assumed_read_rate is None else f"{format_rate(told.assumed_read_rate)} assumed, {measured}"


def _required(told: Forecast) -> str:
    if not told.streamed_bytes:
        return "there are none"
    if told.required_read_rate is None:
        return "no drive would do: reads wait for blocks to finish, or slow them down"
    rate = told.assumed_read_rate or told.measured_read_rate
    enough = "this drive does" if told.required_read_rate <= rate else "this drive does not"
    return f"{format_rate(told.required_read_rate)} would do; {enough}"


def _break_even(told: Forecast) -> str:
    if not told.streamed_bytes:
        return "is what this does"
    if told.break_even_runs is None:
        return f"would never be quicker, and takes {format_size(told.all_resident_bytes)}"
    runs = "the first run" if told.break_even_runs == 1 else f"{told.break_even_runs} consecutive runs"
    return f"would be quicker from {runs} on, and takes {format_size(told.all_resident_bytes)}"


def _curve(told: Forecast) -> list[tuple[str, ...]]:
    """Budgets around the one asked for, and what each would do."""
    rows: list[tuple[str, ...]] = [("budget", "predicted", "read per run", "")]
    named = {
        "the floor": told.floor_bytes,
        "this budget": min(told.budget_bytes, told.all_resident_bytes),
        "everything": told.all_resident_bytes,
    }
    for point in told.curve:
        size, predicted = format_size(point.budget_bytes), _milliseconds(point.predicted_ms)
        notes = ", ".join(words for words, known in named.items() if known == point.budget_bytes)
        rows.append((size, predicted, format_size(point.streamed_bytes), notes))
    return rows


def division(told: Division) -> Result:
    """A verdict and a line for each model; status 3 where the floors do not fit."""
    floors = format_size(told.floor_bytes)
    budget, count = format_size(told.budget_bytes), len(told.models)
    if told.left_bytes is None:
        verdict = f"does not fit: {budget} for {count} models that need {floors} together"
    else:
        shared = format_size(told.budget_bytes - told.left_bytes)
        verdict = f"fits: {count} models get {shared} of {budget}; they need {floors}"
    remedy = [] if told.fits else [f"  to do: give at least {floors}, or fewer models, or build with smaller blocks"]
    head = ("model", "share", "floor", "predicted", "in memory", "priority", "deadline")
    rows = [head, *map(_portion, told.models), _sum(told)]
    status = 0 if told.fits else _DOES_NOT_FIT
    return Result(asdict(told), [verdict, *remedy, "", *columns(rows)], status)


def _portion(portion: Portion) -> tuple[str, ...]:
    share = "-" if portion.share_bytes is None else format_size(portion.share_bytes)
    predicted = "-" if portion.predicted_ms is None else _milliseconds(portion.predicted_ms)
    deadline = "none" if portion.deadline_ms is None else _milliseconds(portion.deadline_ms)
    if portion.meets_deadline is not None:
        deadline += ", met" if portion.meets_deadline else ", NOT met"
    whole = _milliseconds(portion.all_resident_ms)
    return portion.name, share, format_size(portion.floor_bytes), predicted, whole, f"{portion.priority:g}", deadline


def _sum(told: Division) -> tuple[str, ...]:
    shares = "-" if told.left_bytes is None else format_size(told.budget_bytes - told.left_bytes)
    floors = format_size(sum(portion.floor_bytes for portion in told.models))
    every = [portion.predicted_ms for portion in told.models if portion.predicted_ms is not None]
    predicted = _milliseconds(sum(every)) if told.fits else "-"
    whole = _milliseconds(sum(portion.all_resident_ms for portion in told.models))
    return "all", shares, floors, predicted, whole, "", ""


def _milliseconds(milliseconds: float) -> str:
    return format_seconds(milliseconds / 1e3)
