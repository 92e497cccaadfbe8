"""Small pictures for the status page as inline SVG: bars, curves and a sweep's timeline, without a word in them.

May import the trace's events. Shapes only: they are stretched to the width that the page gives them, so all text stands
beside them, in HTML. Colours are classes that the page's style sheet defines, those of `bench.figures`. Cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trt_layering.runtime.trace import Event

WIDTH = 1000
_HEIGHT = 100
_SHADES = ("odd", "even")

PATTERN = (
    '<svg class="defs" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="16" height="40" patternUnits="userSpaceOnUse">'
    '<path class="hatch" d="M-4 50L20 -10M-4 10L4 -10M12 50L20 30"/></pattern></defs></svg>'
)
"""What `boxes` of waits are filled with; stands once on a page, before them."""


@dataclass(frozen=True)
class Box:
    """From `begin` to `end`, as parts of the picture's width, in lane `lane` from below, with a colour's class."""

    begin: float
    end: float
    lane: int
    style: str


def picture(shapes: str, said: str, style: str) -> str:
    """The SVG element around `shapes`, of class `style`; `said` is what a screen reader says, escaped already."""
    return (
        f'<svg class="{style}" viewBox="0 0 {WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{said}">{shapes}</svg>'
    )


def boxes(drawn: Iterable[Box], lanes: int = 1) -> str:
    """Boxes in `lanes` lanes, one path for each colour."""
    paths: dict[str, list[str]] = {}
    height = _HEIGHT / max(1, lanes)
    for box in drawn:
        left = round(min(max(box.begin, 0.0), 1.0) * WIDTH)
        width = max(1, round(min(max(box.end, 0.0), 1.0) * WIDTH) - left)
        top, tall = round(_HEIGHT - height * (box.lane + 1)), max(1, round(height * 0.94))
        paths.setdefault(box.style, []).append(f"M{left} {top}h{width}v{tall}h-{width}z")
    return "".join(f'<path class="{style}" d="{"".join(parts)}"/>' for style, parts in paths.items())


def mark(place: float, style: str) -> str:
    """A line from top to bottom at a part of the width."""
    return f'<path class="{style}" d="M{round(min(max(place, 0.0), 1.0) * WIDTH)} 0v{_HEIGHT}"/>'


def level(height: float, style: str) -> str:
    """A line from side to side at a part of the height."""
    return f'<path class="{style}" d="M0 {_y(height)}h{WIDTH}"/>'


def curve(points: Sequence[tuple[float, float | None]], style: str) -> str:
    """A line through `points`, parts of width and height, in order; None is a gap, and what stands alone is a dot."""
    parts = []
    for run in _runs(points):
        first, *others = (f"{round(x * WIDTH)} {_y(y)}" for x, y in run)
        parts.append(f"M{first}" + ("L" + " ".join(others) if others else "h0"))
    return f'<path class="{style}" d="{"".join(parts)}"/>' if parts else ""


def area(points: Sequence[tuple[float, float | None]], style: str) -> str:
    """The same, filled down to the ground."""
    parts = []
    for run in _runs(points):
        left, right = round(run[0][0] * WIDTH), round(run[-1][0] * WIDTH)
        line = "L".join(f"{round(x * WIDTH)} {_y(y)}" for x, y in run)
        parts.append(f"M{left} {_HEIGHT}L{line}L{max(right, left + 2)} {_HEIGHT}z")
    return f'<path class="{style}" d="{"".join(parts)}"/>' if parts else ""


def _y(height: float) -> int:
    return round(_HEIGHT - min(max(height, 0.0), 1.0) * _HEIGHT)


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """`points` cut at their gaps, without these."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


@dataclass(frozen=True)
class Timeline:
    """One sweep to draw: the boxes of its reads and of waits and executions, as parts of its `seconds`; `waited` are
    seconds waited for weights, `ahead` blocks that had arrived when it began, `next_reads` reads for later sweeps."""

    reads: tuple[Box, ...]
    executions: tuple[Box, ...]
    lanes: int
    seconds: float
    waited: float
    blocks: int
    bytes_read: int
    ahead: int
    next_reads: int


def timeline(events: Sequence[Event], most: int) -> Timeline | None:
    """The last sweep that `events` tell of, from its first wait or execution to its last; at most `most` boxes a row,
    drawn in as many columns where there are more. None where nothing executed."""
    last = max((event.sweep for event in events if event.kind != "read"), default=None)
    work = sorted((one for one in events if one.kind != "read" and one.sweep == last), key=lambda one: one.begin)
    if last is None or work[-1].end <= work[0].begin:
        return None
    begin, end = work[0].begin, max(event.end for event in work)
    reads = [event for event in events if event.kind == "read" and event.sweep >= last]
    shown = [event for event in reads if event.end > begin and event.begin < end]
    arrived = {event.block for event in reads if event.sweep == last and event.end <= begin}
    drawn = _stacked([_box(event, begin, end, 0, last) for event in shown])
    lanes = max((box.lane for box in drawn), default=0) + 1
    return Timeline(
        reads=tuple(_coarse(drawn, most, lanes)),
        executions=tuple(_coarse(_joined([_box(event, begin, end, 0, last) for event in work]), most, 1)),
        lanes=lanes,
        seconds=end - begin,
        waited=sum(event.end - event.begin for event in work if event.kind == "wait"),
        blocks=len({event.block for event in work}),
        bytes_read=sum(event.bytes for event in shown),
        ahead=len(arrived - {event.block for event in shown if event.sweep == last}),
        next_reads=sum(event.sweep > last for event in shown),
    )


def _stacked(drawn: Sequence[Box]) -> list[Box]:
    """`drawn` by their begin, each in the lowest lane that is free then."""
    free: list[float] = []
    stacked = []
    for box in sorted(drawn, key=lambda box: box.begin):
        lane = next((lane for lane, until in enumerate(free) if until <= box.begin), len(free))
        free[lane : lane + 1] = [box.end]
        stacked.append(replace(box, lane=lane))
    return stacked


def _box(event: Event, begin: float, end: float, lane: int, sweep: int) -> Box:
    """One event as a part of what goes on from `begin` to `end`."""
    style = "wait" if event.kind == "wait" else _SHADES[event.block % 2]
    left, right = ((when - begin) / (end - begin) for when in (event.begin, event.end))
    return Box(left, right, lane, style if event.sweep == sweep else f"next-{style}")


def _joined(drawn: Sequence[Box]) -> list[Box]:
    """Neighbours of one colour as one box: a block executes for each request of a wave."""
    joined: list[Box] = []
    for box in drawn:
        if joined and joined[-1].style == box.style:
            joined[-1] = replace(joined[-1], end=max(joined[-1].end, box.end))
        else:
            joined.append(box)
    return joined


def _coarse(drawn: list[Box], most: int, lanes: int) -> list[Box]:
    """`drawn` if it is few enough, else as columns: in each, the colour that fills most of it."""
    if len(drawn) <= most:
        return drawn
    columns = max(1, most // max(1, lanes))
    covered: dict[tuple[int, int], dict[str, float]] = {}
    for box in drawn:
        for column in range(max(0, int(box.begin * columns)), min(columns - 1, int(box.end * columns)) + 1):
            here = min(box.end, (column + 1) / columns) - max(box.begin, column / columns)
            styles = covered.setdefault((box.lane, column), {})
            styles[box.style] = styles.get(box.style, 0.0) + max(here, 0.0)
    return _joined_lanes(
        [
            Box(column / columns, (column + 1) / columns, lane, max(styles, key=styles.__getitem__))
            for (lane, column), styles in sorted(covered.items())
        ]
    )


def _joined_lanes(drawn: Sequence[Box]) -> list[Box]:
    """Boxes of one lane and colour that touch, as one."""
    joined: list[Box] = []
    for box in drawn:
        before = joined[-1] if joined else None
        if before and (before.lane, before.style) == (box.lane, box.style) and box.begin - before.end < 1e-9:
            joined[-1] = replace(before, end=box.end)
        else:
            joined.append(box)
    return joined
