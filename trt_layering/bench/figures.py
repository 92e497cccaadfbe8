"""The pictures of a bench: latency over memory, and what drive and processor did in two inferences.

Drawn from the results as they are in bench.json, so also later and elsewhere. May import matplotlib, in functions, and
units. Where matplotlib is missing, `require` and drawing raise LayeringError; a file that cannot be written, too.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_layering.errors import LayeringError
from trt_layering.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1 << 20
_STYLE: dict[Any, Any] = {
    "font.size": 11.0, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 13.5,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "svg.hashsalt": "trt-layering", "figure.dpi": 110.0,
    "figure.facecolor": "white", "hatch.linewidth": 0.8,
}  # fmt: skip
_INK, _FAINT = "#1b1b1b", "#777777"
_LOGARITHMIC_FROM = 6.0
_DECADES = 20.0
_BANDED = "chain"
_SAME_MEMORY = 1.05  # at two budgets, or at all: one point
_TICK_GAP = 0.078  # of the axes' width
_LABEL_GAP = 0.062  # of the axes' height
_WAIT = "#D55E00"
_SHADES = (("#0072B2", "#8cc1e3"), ("#009E73", "#8fd6bf"))
"""For the blocks of one inference in turn, and of the next. These and the lines' are Okabe and Ito's colours, which
the colour-blind tell apart."""


@dataclass(frozen=True)
class _Look:
    label: str
    colour: str
    marker: str
    style: str = "-"
    width: float = 1.6


_LOOKS = {
    "chain": _Look("trt-layering", "#0072B2", "o", width=2.8),
    "double": _Look("double buffer", "#009E73", "s"),
    "sequential": _Look("sequential", "#E69F00", "v"),
    "mapped": _Look("ONNX Runtime,\nmapped", "#CC79A7", "D", "--"),
    "memory": _Look("ONNX Runtime,\nin memory", "#1b1b1b", "*"),
    "resident": _Look("trt-layering,\nall in memory", "#56B4E9", "P"),
}


def drawable() -> bool:
    """Whether pictures can be drawn: Matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def require() -> None:
    """Raise LayeringError unless pictures can be drawn."""
    if not drawable():
        what = "pictures need Matplotlib, which is not installed"
        raise LayeringError(what, where="bench", remedy="pip install 'matplotlib>=3.7', then bench again")


@contextlib.contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of `width` and `height` inches that is written to `path` at the end, in the form its name says."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            what = f"the picture cannot be written: {error.strerror or error}"
            raise LayeringError(what, where=str(path), remedy="free some disk space, or name another file") from error


def draw_curve(result: Mapping[str, Any], path: Path, title: str | None = None) -> Path:
    """Latency over memory: a line for each subject that was measured at several budgets, a point for the others.
    `path` ends in .svg or .png; it is returned. `title` replaces the plain one."""
    with _figure(path, 9.2, 5.6) as figure:
        axes = figure.add_axes((0.085, 0.125, 0.70, 0.665))
        ends = [_line(axes, name, _points(result, name)) for name in _LOOKS if _points(result, name)]
        _scale(axes, result)
        _mark_floor(axes, result)
        _label_ends(axes, ends)
        axes.set_xlabel("memory of the process beside its imported libraries, MiB (highest from opening on)")
        axes.set_ylabel("latency of one inference, ms")
        figure.text(0.02, 0.945, title or f"{result['name']}: latency by memory", weight="bold", size=14.5, color=_INK)
        runs = max((point["samples"] for point in _points(result, "chain")), default=0)
        words = f"medians of {runs} runs each; band: up to trt-layering's 99th percentile; {_machine(result)}"
        figure.text(0.02, 0.905, words, size=9.5, color=_FAINT)
    return path


def _points(result: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    points = [point for point in result["points"] if point["subject"] == name]
    return sorted(points, key=lambda point: int(point["budget_bytes"] or 0))


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cores']} cores, ONNX Runtime {machine['onnxruntime']}"


def _line(axes: Axes, name: str, points: Sequence[Mapping[str, Any]]) -> tuple[_Look, float, float]:
    """Draw one subject; its look and where its label belongs, in MiB and milliseconds."""
    look, front = _LOOKS[name], 4 if name == "chain" else 3
    apart = _apart(points)
    xs = [statistics.median(point["peak_bytes"] / _MIB for point in same) for same in apart]
    medians = [statistics.median(point["median_ms"] for point in same) for same in apart]
    highest = [max(point["p99_ms"] for point in same) for same in apart]
    if len(apart) == 1:
        x, y = xs[0], medians[0]
        axes.plot(x, y, color=look.colour, marker=look.marker, ms=10, zorder=5)
        if name == "memory":
            axes.axhline(y, color=look.colour, lw=0.9, ls=(0, (2, 3)), zorder=1)
        return look, x, y
    if name == _BANDED:
        axes.fill_between(xs, medians, highest, color=look.colour, alpha=0.15, lw=0, zorder=1)
    axes.plot(xs, medians, color=look.colour, lw=look.width, ls=look.style, marker=look.marker, ms=5.5, zorder=front)
    return look, xs[-1], medians[-1]


def _apart(points: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """`points` in order; those that follow each other and take the same memory, to what can be seen, together."""
    groups: list[list[Mapping[str, Any]]] = []
    for point in points:
        sizes = sorted([point["peak_bytes"], groups[-1][0]["peak_bytes"]]) if groups else (0, 1)
        if sizes[1] <= sizes[0] * _SAME_MEMORY:
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _scale(axes: Axes, result: Mapping[str, Any]) -> None:
    """Logarithmic where a wide range asks for it, numbers written out; weights in percent along the top."""
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    sizes = [point["peak_bytes"] / _MIB for point in result["points"]]
    times = [point["median_ms"] for point in result["points"]]
    times += [point["p99_ms"] for point in _points(result, _BANDED)]
    if max(sizes) > _LOGARITHMIC_FROM * min(sizes):
        axes.set_xscale("log")
        ticks = _round_numbers(min(sizes) * 0.9, max(sizes) * 1.1)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.set_xticklabels([f"{tick:g}" for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(0, max(sizes) * 1.06)
    if max(times) > _LOGARITHMIC_FROM * min(times):
        axes.set_yscale("log")
        ticks = _round_numbers(min(times) * 0.9, max(times) * 1.1)
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.set_yticklabels([f"{tick:g}" for tick in ticks])
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, max(times) * 1.06)
    axes.grid(color="#e4e4e4", lw=0.8)
    axes.set_axisbelow(True)
    weights = result["weights_bytes"] / _MIB
    shares = _shares(axes, weights)
    top = axes.secondary_xaxis("top")
    top.xaxis.set_major_locator(FixedLocator([share / 100 * weights for share in shares]))
    top.xaxis.set_minor_locator(NullLocator())
    top.set_xticklabels([f"{share} %" for share in shares])
    top.tick_params(labelsize=9.5, colors=_FAINT)
    top.set_xlabel(f"of one copy of the weights ({format_size(result['weights_bytes'])})", size=9.5, color=_FAINT)


def _shares(axes: Axes, weights: float) -> list[int]:
    """Percentages of `weights` MiB that lie on the axis and leave each other room, the most telling ones first."""
    across = axes.transData + axes.transAxes.inverted()
    places: dict[int, float] = {}
    for share in (100, 50, 25, 10, 200, 5, 75, 150, 300):
        here = float(across.transform((share / 100 * weights, 1.0))[0])
        if 0.0 < here < 1.0 and all(abs(here - place) > _TICK_GAP for place in places.values()):
            places[share] = here
    return list(places)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … between `low` and `high`, more of them where these are close."""
    steps = (1, 2, 5) if high > _DECADES * low else (1, 1.5, 2, 3, 4, 5, 7)
    numbers = [step * 10.0**power for power in range(-3, 7) for step in steps]
    return [number for number in numbers if low <= number <= high]


def _mark_floor(axes: Axes, result: Mapping[str, Any]) -> None:
    floor = result["floor_bytes"] / _MIB
    axes.axvline(floor, color=_FAINT, lw=1.0, ls=":", zorder=1)
    place = axes.get_xaxis_transform()
    words, halo = f"floor {floor:.0f} MiB", {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.text(
        floor, 0.02, words, transform=place, size=9.5, color=_FAINT, rotation=90, ha="center", va="bottom", bbox=halo,
        zorder=1.5,
    )  # fmt: skip


def _label_ends(axes: Axes, ends: Sequence[tuple[_Look, float, float]]) -> None:
    """Each subject's name in the right margin, tied to its last point, kept apart from the others'."""
    into_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted(((*into_axes.transform((x, y)), look) for look, x, y in ends), key=lambda one: float(one[1]))
    heights = spread_out(
        [float(y) for _, y, _ in placed], [_LABEL_GAP * (1 + look.label.count("\n")) for *_, look in placed]
    )
    for (x, y, look), height in zip(placed, heights, strict=True):
        axes.annotate(
            look.label, (x, y), (1.025, height), xycoords="axes fraction", textcoords="axes fraction", va="center",
            color=_darker(look.colour), size=10.5, weight="bold" if look.width > 2 else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "lw": 0.8, "ls": ":", "relpos": (0.0, 0.5)},
        )  # fmt: skip


def _darker(colour: str) -> str:
    """`colour` as letters need it on white."""
    parts = (int(colour[start : start + 2], 16) * 3 // 4 for start in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


def spread_out(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Centres of things of these `sizes`, in the order given, near those `wanted` between 0 and 1 but not overlapping:
    first pushed up, then, where that leaves the top, down again."""
    placed: list[float] = []
    for centre, size in zip(wanted, sizes, strict=True):
        least = placed[-1] + (sizes[len(placed) - 1] + size) / 2 if placed else 0.0
        placed.append(max(centre, least))
    top = 1.0
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], top - (sizes[index] / 2 if index == len(placed) - 1 else 0.0))
        if index:
            top = placed[index] - (sizes[index] + sizes[index - 1]) / 2
    return placed


def draw_timeline(result: Mapping[str, Any], path: Path) -> Path:
    """Two consecutive inferences: which block was read and which executed when, where the processor waited, and how
    much of the arena held weights. `path` ends in .svg or .png; it is returned. The results must have a timeline."""
    timeline = result["timeline"]
    with _figure(path, 11.0, 4.9) as figure:
        rows = figure.subplots(3, 1, sharex=True, height_ratios=(1.0, 1.0, 1.25))
        figure.subplots_adjust(left=0.125, right=0.985, top=0.80, bottom=0.115, hspace=0.12)
        _boxes(rows[0], [event for event in timeline["events"] if event["kind"] == "read"], timeline["end"])
        _boxes(rows[1], [event for event in timeline["events"] if event["kind"] != "read"], timeline["end"])
        for axes, name in zip(rows, ("drive\nreads", "processor\nexecutes"), strict=False):
            axes.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=12)
        _arena(rows[2], timeline)
        rows[2].set_xlim(0, timeline["end"])
        rows[2].set_xlabel("time, ms")
        _mark_inferences(rows, timeline)
        title = f"{result['name']} within {format_size(timeline['budget_bytes'])}: two inferences in a row"
        figure.text(0.012, 0.935, title, weight="bold", size=14.5, color=_INK)
        words = f"{timeline['blocks']} blocks in alternating shades; green: the second inference's, some read ahead"
        figure.text(0.012, 0.885, words, size=10, color=_FAINT)
        waited = sum(event["end"] - event["begin"] for event in timeline["events"] if event["kind"] == "wait")
        share = f"hatched red: waiting for weights, {waited / timeline['end']:.0%} of the time"
        figure.text(0.985, 0.885, share, size=10, color=_WAIT, ha="right")
    return path


def _boxes(axes: Axes, events: Sequence[Mapping[str, Any]], end: float) -> None:
    """A row of boxes, as many lanes high as there are events at once; numbers where there is room."""
    shown = [event for event in events if event["end"] > event["begin"]]
    lanes = _lanes(shown)
    count = max(lanes, default=0) + 1
    for event, lane in zip(shown, lanes, strict=True):
        waits = event["kind"] == "wait"
        colour = _WAIT if waits else _SHADES[event["sweep"] % 2][event["block"] % 2]
        place = (lane / count, 0.94 / count)
        box = [(event["begin"], event["end"] - event["begin"])]
        axes.broken_barh(
            box, place, facecolor="#ffffff" if waits else colour, edgecolor=_WAIT if waits else "#ffffff",
            hatch="/////" if waits else None, lw=0.0 if waits else 0.3,
        )  # fmt: skip
        number = str(event["block"] + 1)
        if not waits and event["end"] - event["begin"] > end * 0.009 * (1 + len(number)):
            middle = (event["begin"] + event["end"]) / 2
            dark = event["block"] % 2 == 0
            axes.text(middle, place[0] + place[1] / 2, number, size=9, ha="center", va="center",
                      color="#ffffff" if dark else _INK, clip_on=True)  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", length=0)


def _lanes(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each event, in order of their begin, the lowest lane that is free then; in the order given."""
    free: list[float] = []
    lanes = [0] * len(events)
    for index in sorted(range(len(events)), key=lambda index: float(events[index]["begin"])):
        begin, end = events[index]["begin"], events[index]["end"]
        lane = next((lane for lane, until in enumerate(free) if until <= begin + 1e-9), len(free))
        free[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def _arena(axes: Axes, timeline: Mapping[str, Any]) -> None:
    size = timeline["arena_bytes"] / _MIB
    times = [when for when, _ in timeline["arena"]] + [timeline["end"]]
    held = [count / _MIB for _, count in timeline["arena"]]
    held.append(held[-1] if held else 0.0)
    axes.fill_between(times, held, step="post", color="#56B4E9", alpha=0.45, lw=0)
    axes.step(times, held, where="post", color="#0072B2", lw=1.0)
    axes.axhline(size, color=_FAINT, lw=1.0, ls="--")
    axes.text(timeline["end"], size * 1.03, f"arena {size:.1f} MiB ", size=9.5, color=_FAINT, ha="right", va="bottom")
    axes.set_ylim(0, size * 1.28)
    axes.set_ylabel("weights in\nthe arena,\nMiB", rotation=0, ha="right", va="center", labelpad=12)


def _mark_inferences(rows: Sequence[Axes], timeline: Mapping[str, Any]) -> None:
    own = [event for event in timeline["events"] if event["kind"] != "read"]
    for sweep in range(timeline["sweeps"]):
        begin = min((event["begin"] for event in own if event["sweep"] == sweep), default=0.0)
        last = max((event["end"] for event in own if event["sweep"] == sweep), default=timeline["end"])
        for axes in rows if sweep else ():
            axes.axvline(begin, color=_INK, lw=1.2)
        place = rows[0].get_xaxis_transform()
        colour = _darker(_SHADES[sweep % 2][0])
        rows[0].text(
            (begin + last) / 2, 1.05, f"inference {sweep + 1}", transform=place, ha="center", weight="bold",
            color=colour,
        )  # fmt: skip
