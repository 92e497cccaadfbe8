"""What Prometheus scrapes: a deployment's numbers under Triton's names and under ours, read when they are asked for.

May import prometheus-client, starlette, the deployment and the meter. Nothing is counted per request: a scrape takes a
snapshot of each model. A scrape that fails is an answer with status 500 and no numbers; serving goes on.
"""

from __future__ import annotations

import logging
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from trt_layering.runtime.deployment import Deployment, ModelState
from trt_layering.runtime.meter import peak_rss_bytes
from trt_layering.runtime.trace import Event

log = logging.getLogger("trt_layering")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("loading", "ready", "unloaded", "unavailable")
_LABELS = ("model", "version")
_LOAD_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_WAVE_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_TOTAL = re.compile(rb"^(# (?:HELP|TYPE) nv_inference_\w+)_total ", re.MULTILINE)
"""The ending that prometheus-client gives every counter's name in its head lines, and that Triton's do not have."""


@dataclass(frozen=True)
class _Number:
    """One metric of each model: its name, what it says, and where it comes from, None where there is none."""

    name: str
    help: str
    value: Callable[[ModelState], float | None]


_TRITON = (
    _Number(
        "nv_inference_request_success", "Requests answered", lambda state: state.requests
    ),
    _Number("nv_inference_request_failure", "Requests accepted that failed", lambda state: state.failures),
    _Number("nv_inference_count", "Inferences performed, one for each request", lambda state: state.requests),
    _Number("nv_inference_exec_count", "Sweeps, each of which serves a wave of requests", lambda state: state.sweeps),
    _Number(
        "nv_inference_request_duration_us",
        "Time of requests from coming to their end",
        lambda state: _microseconds(state.latency_seconds),
    ),
    _Number(
        "nv_inference_queue_duration_us", "Time requests waited in the queue",
        lambda state: _microseconds(state.queue_seconds),
    ),
    _Number(
        "nv_inference_compute_infer_duration_us", "Time of sweeps, stalls among it, once for all requests of a wave",
        lambda state: _microseconds(state.execute_seconds + state.stall_seconds),
    ),
)  # fmt: skip
_COUNTERS = (
    _Number("trt_layering_stall_seconds", "Time execution waited for weights", lambda state: state.stall_seconds),
    _Number("trt_layering_execute_seconds", "Time blocks executed", lambda state: state.execute_seconds),
    _Number("trt_layering_read_bytes", "Bytes of weights read from the drive", lambda state: state.bytes_read),
    _Number(
        "trt_layering_deadline_misses", "Requests answered after their deadline", lambda state: state.deadline_misses
    ),
)
_GAUGES = (
    _Number("nv_inference_pending_request_count", "Requests waiting in the queue", lambda state: state.queued),
    _Number("trt_layering_queue_depth", "Requests waiting in the queue", lambda state: state.queued),
    _Number("trt_layering_model_budget_bytes", "The model's part of the budget", lambda state: state.budget_bytes),
    _Number("trt_layering_resident_bytes", "Weights that stay in memory", lambda state: state.resident_bytes),
    _Number("trt_layering_floor_bytes", "The least memory the model runs in", lambda state: state.floor_bytes),
    _Number("trt_layering_fallbacks", "Fallbacks in use, see the status page", lambda state: len(state.fallbacks)),
    _Number(
        "trt_layering_predicted_latency_seconds", "What the schedule is predicted to take for one request",
        lambda state: state.predicted_seconds,
    ),
)  # fmt: skip


class DeploymentCollector(Collector):
    """A deployment's metrics, for a registry of prometheus-client. The deployment stays its owner's; it is only looked
    at, in whichever thread scrapes. The only labels are the names of its models, their versions and states."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._loads: dict[tuple[str, str], _Loads] = {}
        self._one_scrape = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        states = self._deployment.models()
        for number in _TRITON + _COUNTERS:
            yield _filled(CounterMetricFamily(number.name, number.help, labels=_LABELS), number, states)
        for number in _GAUGES:
            yield _filled(GaugeMetricFamily(number.name, number.help, labels=_LABELS), number, states)
        yield _states(states)
        yield _waves(states)
        yield self._block_loads(states)
        yield from _process(self._deployment)

    def _block_loads(self, states: Sequence[ModelState]) -> Metric:
        """How long blocks took to arrive in those sweeps that were a model's last one when it was scraped."""
        words = "From asking for a block's first byte to having its last, in the last sweep at each scrape"
        family = HistogramMetricFamily("trt_layering_block_load_seconds", words, labels=_LABELS)
        with self._one_scrape:
            for state in states:
                loads = self._loads.setdefault(_labels(state), _Loads())
                loads.look_at(state.last_sweep)
                family.add_metric(_labels(state), _cumulative(_LOAD_BOUNDS, loads.counts), loads.seconds)
        return family


class _Loads:
    """The loads of one model's blocks, counted by how long they took."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_LOAD_BOUNDS) + 1)
        self.seconds = 0.0
        self._seen: tuple[int, float] | None = None

    def look_at(self, sweep: Sequence[Event]) -> None:
        """Count the blocks that arrived for `sweep`, unless it was looked at before."""
        ended, when = max(((one.sweep, one.end) for one in sweep if one.kind != "read"), default=(0, 0.0))
        if (ended, when) == self._seen:
            return
        self._seen = (ended, when)
        for seconds in load_seconds(event for event in sweep if event.sweep == ended):
            self.counts[bisect_left(_LOAD_BOUNDS, seconds)] += 1
            self.seconds += seconds


def load_seconds(events: Iterable[Event]) -> list[float]:
    """For each block of each sweep that `events` has reads of, seconds from asking for its first byte to having its
    last."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for event in events:
        if event.kind == "read" and event.bytes:
            begin, end = spans.get((event.sweep, event.block), (event.begin, event.end))
            spans[event.sweep, event.block] = min(begin, event.begin), max(end, event.end)
    return [end - begin for begin, end in spans.values()]


def exposition(deployment: Deployment) -> Callable[[], bytes]:
    """A function that writes out the deployment's metrics as they are then, in Prometheus' text format (CONTENT_TYPE).
    The registry is its own: metrics of the process that other code has are not in it."""
    registry = CollectorRegistry()
    registry.register(DeploymentCollector(deployment))
    return lambda: _TOTAL.sub(rb"\1 ", generate_latest(registry))


def metrics_app(deployment: Deployment) -> Starlette:
    """An ASGI application with one route, GET /metrics, for a port of its own."""
    written = exposition(deployment)

    def scrape(_: Request) -> Response:
        try:
            return Response(written(), media_type=CONTENT_TYPE)
        except Exception:
            log.exception("the metrics could not be collected")
            return PlainTextResponse("the metrics could not be collected; the log says why\n", status_code=500)

    return Starlette(routes=[Route("/metrics", scrape, methods=["GET"])])


def _labels(state: ModelState) -> tuple[str, str]:
    return state.name, "" if state.version is None else str(state.version)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, number: _Number, states: Sequence[ModelState]
) -> CounterMetricFamily | GaugeMetricFamily:
    """`family` with a sample for each model that has this number. The samples of Triton's have the family's name."""
    bare = number.name.startswith("nv_")
    for state in states:
        value = number.value(state)
        if value is None:
            continue
        if bare:
            family.add_sample(number.name, dict(zip(_LABELS, _labels(state), strict=True)), value)
        else:
            family.add_metric(_labels(state), value)
    return family


def _states(states: Sequence[ModelState]) -> Metric:
    family = GaugeMetricFamily(
        "trt_layering_model_state", "1 for the state the model is in, 0 for the others", labels=("model", "state")
    )
    for state in states:
        for word in STATES:
            family.add_metric((state.name, word), float(state.state == word))
    return family


def _waves(states: Sequence[ModelState]) -> Metric:
    family = HistogramMetricFamily("trt_layering_wave_size", "Requests that a sweep served", labels=_LABELS)
    for state in states:
        counts = [0] * (len(_WAVE_BOUNDS) + 1)
        for size, sweeps in state.wave_sizes.items():
            counts[bisect_left(_WAVE_BOUNDS, size)] += sweeps
        served = sum(size * sweeps for size, sweeps in state.wave_sizes.items())
        family.add_metric(_labels(state), _cumulative(_WAVE_BOUNDS, counts), served)
    return family


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """A histogram's buckets as Prometheus has them; `counts` has one more than `bounds`, for what is over all."""
    names = [*(repr(bound) for bound in bounds), "+Inf"]
    return [(name, float(sum(counts[: place + 1]))) for place, name in enumerate(names)]


def _process(deployment: Deployment) -> Iterator[Metric]:
    pressed = float(deployment.pressure is not None)
    if deployment.budget_bytes is not None:
        yield GaugeMetricFamily(
            "trt_layering_budget_bytes", "The budget that all models share", deployment.budget_bytes
        )
    yield GaugeMetricFamily("trt_layering_memory_pressure", "1 while the machine is short of memory, else 0", pressed)
    yield GaugeMetricFamily(
        "trt_layering_peak_rss_bytes", "Most memory of the process so far, libraries among it", peak_rss_bytes()
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
