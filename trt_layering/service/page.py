"""The status page, for people: which models serve, who has the memory, how long answers take and why.

Pure functions from snapshots to HTML; may import the deployment's types, charts, units, shapes and words. Cannot fail
on what a model or a tensor is called: every text is escaped. The page has no scripts and needs nothing from elsewhere;
HEADERS, which go with it, forbid both.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass

from trt_layering.runtime.deployment import Deployment, ModelState, Sample
from trt_layering.service import charts
from trt_layering.service.style import STYLE
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Value
from trt_layering.units import format_seconds, format_size
from trt_layering.words import printable

REFRESH = 10
"""Seconds after which a browser asks for the page again."""
_SPAN, _LEAST_SPAN = 300.0, 60.0
"""Seconds that the curves show, at most and at least."""
_POINTS, _BOXES = (30, 100, 480), (48, 240, 900)
"""Of each curve, and of each row of a timeline: at least, at most, and of all models together."""
_LONG = 600
_MANY = 8
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""What a reply with the page says beside it."""


@dataclass(frozen=True)
class _Point:
    """What one model did in some seconds: when, counted back from now, how many requests ended after how long on
    average, and which share of the time it waited for weights."""

    ago: float
    requests: int
    latency: float | None
    stall: float


def page(deployment: Deployment) -> str:
    """The page of a deployment as it is now, some 30 KB of HTML."""
    return render(
        deployment.models(), deployment.history(), budget_bytes=deployment.budget_bytes, pressure=deployment.pressure
    )


def render(models: Sequence[ModelState], history: Sequence[Sample], *, budget_bytes: int, pressure: str | None) -> str:
    """The page of these snapshots; `pressure` says, in words, that the machine is short of memory."""
    summary = _summary(models)
    cards = "".join(_card(state, history, len(models)) for state in models) or "<p>The deployment has none.</p>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="refresh" content="{REFRESH}"><title>trt-layering: {_text(summary)}</title>'
        f"<style>{STYLE}</style></head>\n<body>{charts.PATTERN}<header><h1>trt-layering</h1><p>{_text(summary)}</p>"
        f"{_alert(pressure)}</header>\n<main>{_memory(models, budget_bytes)}"
        f'\n<section><h2>Models</h2><div class="cards">{cards}</div></section></main>\n'
        f"<footer>Refreshed every {REFRESH} seconds.</footer></body></html>\n"
    )


def _text(text: str) -> str:
    """`text` as HTML shows it, cut short where it is very long."""
    return html.escape(printable(text if len(text) <= _LONG else text[:_LONG] + " …"))


def _summary(models: Sequence[ModelState]) -> str:
    if not models:
        return "no models"
    ready = sum(state.state == "ready" for state in models)
    parts = [f"{ready} of {_count(len(models), 'model')} ready", _requests_wait(sum(state.queued for state in models))]
    missed = sum(state.deadline_misses for state in models)
    return "; ".join([*parts, f"{_count(missed, 'deadline')} missed"] if missed else parts)


def _requests_wait(queued: int) -> str:
    return (
        "no request waits" if not queued else "1 request waits" if queued == 1 else f"{_number(queued)} requests wait"
    )


def _count(count: int, thing: str) -> str:
    return f"{_number(count)} {thing}" + ("" if count == 1 else "s")


def _number(count: int) -> str:
    return f"{count:,}"


def _alert(pressure: str | None) -> str:
    return f'<p class="alert">{_text(pressure)}</p>' if pressure else ""


def _memory(models: Sequence[ModelState], budget_bytes: int) -> str:
    """The budget, who has how much of it, and what of that stays in memory."""
    total = max(budget_bytes, sum(state.budget_bytes for state in models), 1)
    words = _budget_words(budget_bytes, sum(state.budget_bytes for state in models))
    bar = charts.picture(charts.boxes(_shares(models, total)), _text(words), "bar")
    rows = "".join(_share_row(state, place, total) for place, state in enumerate(models) if state.budget_bytes)
    legend = (
        '<p class="legend"><span><i class="key odd"></i><i class="key next-odd"></i>resident: stays in memory</span> '
        '<span><i class="key even"></i><i class="key next-even"></i>the rest: streamed through</span> '
        '<span><i class="key floor"></i>floor: the least it runs in</span></p>'
    )
    shares = f'{legend}<ul class="shares">{rows}</ul>' if rows else ""
    return f"<section><h2>Memory</h2><p>{_text(words)}</p>{bar}{shares}</section>"


def _budget_words(budget_bytes: int, given: int) -> str:
    if not given:
        return f"Budget {format_size(budget_bytes)}, none of it in use."
    words = f"Budget {format_size(budget_bytes)}: {format_size(given)} given to models"
    return f"{words}, {format_size(budget_bytes - given)} free." if budget_bytes > given else f"{words}."


def _shares(models: Sequence[ModelState], total: int) -> list[charts.Box]:
    drawn, begin = [], 0.0
    for place, state in enumerate(models):
        parts = _share(state, place, total, begin)
        drawn += parts
        begin = parts[-1].end
    return drawn


def _share(state: ModelState, place: int, total: int, begin: float) -> list[charts.Box]:
    """A model's part of `total` bytes from `begin` on: what is resident, what is left to stream through."""
    resident = begin + min(state.resident_bytes, state.budget_bytes) / total
    end = begin + state.budget_bytes / total
    turn = "next-" if place % 2 else ""
    parts = [charts.Box(begin, resident, 0, f"{turn}odd"), charts.Box(resident, end, 0, f"{turn}even")]
    return [part for part in parts if part.end > part.begin] or [charts.Box(begin, begin, 0, "none")]


def _share_row(state: ModelState, place: int, total: int) -> str:
    words = (
        f"{format_size(state.budget_bytes)}, {format_size(state.resident_bytes)} of it resident; "
        f"floor {format_size(state.floor_bytes)}"
    )
    shapes = charts.boxes(_share(state, place, total, 0.0)) + charts.mark(state.floor_bytes / total, "floor")
    return (
        f'<li><span class="name">{_text(state.name)}</span> <span class="faint">{words}</span>'
        f"{charts.picture(shapes, words, 'bar thin')}</li>"
    )


def _card(state: ModelState, history: Sequence[Sample], count: int) -> str:
    """All there is to say of one model; `count` models share the page's size."""
    version = "" if state.version is None else f"version {state.version}"
    built = ", ".join(part for part in (version, state.backend) if part)
    reason = f'<p class="reason">{_text(state.reason)}</p>' if state.reason else ""
    points = _points(history, state.name, _detail(_POINTS, count))
    parts = [reason]
    if state.state == "ready" or state.requests or state.failures:
        parts += [
            _numbers(state, points),
            _curves(points, state.predicted_seconds, _span(history)),
            _timeline(state, _detail(_BOXES, count)),
        ]
    parts += [_fallbacks(state.fallbacks), _signature(state)]
    return (
        f'<article><h3><span class="name">{_text(state.name)}</span> '
        f'<span class="state {_text(state.state)}">{_text(state.state)}</span></h3>'
        f"{_faint(built)}{''.join(parts)}</article>"
    )


def _faint(words: str) -> str:
    return f'<p class="faint">{_text(words)}</p>' if words else ""


def _detail(limits: tuple[int, int, int], count: int) -> int:
    """How much one of `count` models may draw: the page stays small."""
    least, most, together = limits
    return min(most, max(least, together // count))


def _numbers(state: ModelState, points: Sequence[_Point]) -> str:
    """What was counted since the model was loaded, and the mean latency of late."""
    shown = [("requests", _number(state.requests)), ("waiting", _number(state.queued))]
    latency = _mean_latency(points)
    if latency is not None:
        shown.append(("mean latency", format_seconds(latency)))
    if state.predicted_seconds is not None:
        shown.append(("predicted", format_seconds(state.predicted_seconds)))
    busy = state.stall_seconds + state.execute_seconds
    if busy > 0:
        shown.append(("waiting in sweeps", f"{state.stall_seconds / busy:.0%}"))
    if sum(state.wave_sizes) > 1:
        shown.append(("in a wave", _waves(state)))
    shown += [("read", format_size(state.bytes_read)), ("deadlines missed", _number(state.deadline_misses))]
    shown.append(("failed", _number(state.failures)))
    bad = {"deadlines missed": state.deadline_misses, "failed": state.failures}
    items = (_item(name, value, "bad" if bad.get(name) else "usual") for name, value in shown)
    return f"<dl>{''.join(items)}</dl>"


def _item(name: str, value: str, style: str) -> str:
    return f'<div class="{style}"><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>'


def _waves(state: ModelState) -> str:
    sweeps = sum(state.wave_sizes.values())
    mean = sum(size * count for size, count in state.wave_sizes.items()) / sweeps
    return f"{mean:.1f}, at most {max(state.wave_sizes)}"


def _points(history: Sequence[Sample], name: str, most: int) -> list[_Point]:
    """What `history` tells of a model, at most `most` points: neighbours are taken together."""
    if not history:
        return []
    now, step = history[-1].time, _span(history) / most
    groups: dict[int, list[Sample]] = {}
    for sample in history:
        if name in sample.models and now - sample.time < _SPAN:
            groups.setdefault(int((now - sample.time) / step), []).append(sample)
    return [_taken_together(groups[place], name, now) for place in sorted(groups, reverse=True)]


def _span(history: Sequence[Sample]) -> float:
    """Seconds that the curves show of `history`."""
    return min(max(history[-1].time - history[0].time, _LEAST_SPAN), _SPAN) if history else _SPAN


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _taken_together(samples: Sequence[Sample], name: str, now: float) -> _Point:
    parts = [sample.models[name] for sample in samples]
    requests = sum(part.requests for part in parts)
    seconds = sum(part.requests * (part.mean_seconds or 0.0) for part in parts)
    stall = sum(part.stall_share for part in parts) / len(parts)
    middle = sum(sample.time for sample in samples) / len(samples)
    return _Point(now - middle, requests, seconds / requests if requests else None, stall)


def _mean_latency(points: Sequence[_Point]) -> float | None:
    requests = sum(point.requests for point in points)
    return sum(point.requests * (point.latency or 0.0) for point in points) / requests if requests else None


def _curves(points: Sequence[_Point], predicted: float | None, span: float) -> str:
    """Latency and stalls over the last minutes, or that there is nothing to show."""
    slowest = max((point.latency for point in points if point.latency is not None), default=None)
    if slowest is None:
        return _faint(f"No requests in the last {_minutes(_SPAN)}.")
    top = max(slowest, predicted or 0.0) * 1.05 or 1.0
    latency = [(1 - point.ago / span, None if point.latency is None else point.latency / top) for point in points]
    stall: list[tuple[float, float | None]] = [(1 - point.ago / span, point.stall) for point in points]
    dashed = charts.level(predicted / top, "predicted") if predicted else ""
    told = f"up to {format_seconds(slowest)}" + ("; dashed: predicted" if predicted else "")
    most = max(point.stall for point in points)
    return (
        '<div class="curves">'
        + _figure("latency", told, dashed + charts.curve(latency, "line"), span)
        + _figure("waiting for weights", f"up to {most:.0%} of all time", charts.area(stall, "stall"), span)
        + "</div>"
    )


def _figure(name: str, told: str, shapes: str, span: float) -> str:
    said = _text(f"{name} over the last {_minutes(span)}, {told}")
    return (
        f"<figure><figcaption><b>{_text(name)}</b> {_text(told)}</figcaption>{charts.picture(shapes, said, 'curve')}"
        f'<p class="ends"><span>{_minutes(span)} ago</span><span>now</span></p></figure>'
    )


def _timeline(state: ModelState, most: int) -> str:
    """What drive and processor did in the last sweep."""
    drawn = charts.timeline(state.last_sweep, most)
    if drawn is None:
        return ""
    waited = f"{format_seconds(drawn.waited)} ({drawn.waited / drawn.seconds:.0%}) of it waiting for weights"
    told = f"{format_seconds(drawn.seconds)}, {waited if drawn.waited else 'no waiting for weights'}"
    reads = charts.picture(charts.boxes(drawn.reads, drawn.lanes), _text(_read_words(drawn)), "reads")
    work = charts.picture(charts.boxes(drawn.executions), _text(told), "work")
    return (
        f'<figure><figcaption><b>last sweep</b> {_text(told)}</figcaption><div class="timeline">'
        f"<span>reads</span>{reads}<span>executes</span>{work}</div>"
        f'<p class="ends inset"><span>0</span><span>{format_seconds(drawn.seconds)}</span></p>'
        f"{_faint(_read_words(drawn))}</figure>"
    )


def _read_words(drawn: charts.Timeline) -> str:
    read = f"{format_size(drawn.bytes_read)} read meanwhile" if drawn.bytes_read else "nothing read meanwhile"
    parts = [_count(drawn.blocks, "block") + " in alternating shades", read]
    if drawn.ahead:
        parts.append(f"{_count(drawn.ahead, 'block')} had been read ahead")
    if drawn.waited:
        parts.append("hatched: waiting")
    if drawn.next_reads:
        parts.append("green: reads for the next sweep")
    return "; ".join(parts) + "."


def _fallbacks(fallbacks: Sequence[str]) -> str:
    if not fallbacks:
        return ""
    items = "".join(f"<li>{_text(words)}</li>" for words in fallbacks[:_MANY])
    return f'{_faint("Fallbacks")}<ul class="fallbacks">{items}{_more(len(fallbacks))}</ul>'


def _signature(state: ModelState) -> str:
    if not state.inputs and not state.outputs:
        return ""
    return (
        f"<details><summary>inputs and outputs</summary><ul>{_values('in', state.inputs)}"
        f"{_values('out', state.outputs)}</ul></details>"
    )


def _values(way: str, values: Sequence[Value]) -> str:
    items = "".join(
        f'<li><span class="faint">{way}</span> {_text(value.name)}: {_text(value.dtype)} {_text(_shape(value))}</li>'
        for value in values[:_MANY]
    )
    return items + _more(len(values))


def _more(count: int) -> str:
    return f"<li>and {_number(count - _MANY)} more</li>" if count > _MANY else ""


def _shape(value: Value) -> str:
    return "of any rank" if value.shape is None else format_shape(value.shape)
