"""Requests to a service at a fixed rate, or as fast as it answers, and how long each took.

The rate is kept whatever the service does: latency counts from the moment at which a request was due, so that one slow
answer cannot hide what those behind it would have waited. Imports numpy, and tritonclient where a client is made. A
request that fails is a reply with the kind of its error; nothing is tried twice.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]
NOT_SENT = "not sent"


class Failed(Exception):
    """A request without an answer: `kind` is "HTTP 503" or what the client's library called it."""

    def __init__(self, kind: str, words: str = "") -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind


class Client(Protocol):
    """One connection, used by the thread that made it."""

    def infer(self, model: str, feeds: Feeds) -> dict[str, Array]: ...

    def close(self) -> None: ...


class TritonClient:
    """NVIDIA's client, unchanged; tensors go and come in binary. `timeout` is in seconds."""

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 60.0) -> None:
        from tritonclient import http

        self._http = http
        self._headers = {"Authorization": f"Bearer {token}"} if token else None
        self._client = http.InferenceServerClient(url, connection_timeout=timeout, network_timeout=timeout)

    def infer(self, model: str, feeds: Feeds) -> dict[str, Array]:
        found = self._asked(lambda: self._client.infer(model, triton_inputs(self._http, feeds), headers=self._headers))
        return {output["name"]: found.as_numpy(output["name"]) for output in found.get_response()["outputs"]}

    def ready(self) -> bool:
        return bool(self._asked(lambda: self._client.is_server_ready(headers=self._headers)))

    def load(self, model: str) -> None:
        self._asked(lambda: self._client.load_model(model, headers=self._headers))

    def unload(self, model: str) -> None:
        self._asked(lambda: self._client.unload_model(model, headers=self._headers))

    def close(self) -> None:
        self._client.close()

    def _asked(self, work: Callable[[], Any]) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return work()
        except InferenceServerException as error:
            raise Failed(f"HTTP {error.status()}", error.message()) from error
        except Exception as error:
            raise Failed(type(error).__name__, str(error)) from error


def triton_inputs(http: Any, feeds: Feeds) -> list[Any]:
    """`feeds` as the inputs of a request, in binary."""
    from tritonclient.utils import np_to_triton_dtype

    made = []
    for name, array in feeds.items():
        made.append(http.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        made[-1].set_data_from_numpy(array, binary_data=True)
    return made


@dataclass(frozen=True)
class Subject:
    """A model that is asked: how often, against the others' `weight`; with which inputs; what is expected for each of
    them, if that is to be compared, within `tolerance` of the largest value of an output; its deadline in seconds."""

    name: str
    inputs: Sequence[Feeds]
    expected: Sequence[Feeds] | None = None
    weight: float = 1.0
    deadline: float | None = None
    tolerance: float = 1e-5


@dataclass(frozen=True)
class Load:
    """What is asked: `rate` requests a second, or None for as many as `workers` clients get answered; for `seconds`,
    and not more than `count`. A request that cannot be sent within `patience` seconds after the end is not sent."""

    subjects: Sequence[Subject]
    rate: float | None
    seconds: float
    workers: int = 8
    count: int = 1_000_000
    patience: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """What became of a request; times by the monotonic clock. `error` is empty where there is an answer; `deviation`:
    how far it is from what was expected, by the largest value, infinite where it has another form."""

    model: str
    due: float
    sent: float
    done: float
    error: str = ""
    deviation: float = 0.0
    wrong: bool = False

    @property
    def latency(self) -> float:
        return self.done - self.due


@dataclass(frozen=True)
class _Arrival:
    due: float
    subject: Subject
    number: int


@dataclass
class _Arrivals:
    """The requests in their order, each to be taken by whichever worker is free."""

    load: Load
    clock: Callable[[], float]
    stop: threading.Event
    _taken: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.begin = self.clock()
        self.end = self.begin + self.load.seconds
        self._random = random.Random(self.load.seed)
        self._weights = [subject.weight for subject in self.load.subjects]

    def take(self) -> _Arrival | None:
        with self._lock:
            due = self.clock() if self.load.rate is None else self.begin + self._taken / self.load.rate
            if due >= self.end or self._taken >= self.load.count or self.stop.is_set():
                return None
            self._taken += 1
            [subject] = self._random.choices(self.load.subjects, self._weights)
            return _Arrival(due, subject, self._random.randrange(len(subject.inputs)))


def drive(
    load: Load,
    connect: Callable[[], Client],
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], Any] = time.sleep,
    stop: threading.Event | None = None,
) -> list[Reply]:
    """All replies to `load`, whose workers each use a client of their own. Returns when all have ended, which is
    bounded by the load and the clients' timeouts; no request becomes due once `stop` is set. An error of the bench
    itself is raised."""
    arrivals = _Arrivals(load, clock, stop or threading.Event())
    replies: list[Reply] = []
    faults: list[Exception] = []

    def work() -> None:
        try:
            client = connect()
            try:
                while (arrival := arrivals.take()) is not None:
                    replies.append(_sent(client, arrival, arrivals.end + load.patience, clock, wait))
            finally:
                client.close()
        except Exception as error:
            faults.append(error)

    workers = [threading.Thread(target=work, name=f"client-{index}") for index in range(load.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    return replies


def _sent(
    client: Client, arrival: _Arrival, latest: float, clock: Callable[[], float], wait: Callable[[float], Any]
) -> Reply:
    """One request when it is due, or at once where that is over."""
    subject, now = arrival.subject, clock()
    if now > latest:
        return Reply(subject.name, arrival.due, now, now, NOT_SENT)
    if arrival.due > now:
        wait(arrival.due - now)
    sent = clock()
    try:
        answer = client.infer(subject.name, subject.inputs[arrival.number])
    except Failed as failure:
        return Reply(subject.name, arrival.due, sent, clock(), failure.kind)
    done = clock()
    if subject.expected is None:
        return Reply(subject.name, arrival.due, sent, done)
    off = deviation(answer, subject.expected[arrival.number])
    return Reply(subject.name, arrival.due, sent, done, deviation=off, wrong=off > subject.tolerance)


def deviation(answer: Feeds, expected: Feeds) -> float:
    """The largest difference of any output, by that output's largest value; infinite where names, shapes, dtypes or
    places of what is no number differ."""
    if answer.keys() != expected.keys():
        return float("inf")
    return max((_difference(answer[name], expected[name]) for name in expected), default=0.0)


def _difference(got: Array, wanted: Array) -> float:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if got.tobytes() == wanted.tobytes() or not got.size:
        return 0.0
    if not np.issubdtype(wanted.dtype, np.number):
        return float("inf")
    one, other = got.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    finite = np.isfinite(other)
    largest = float(np.abs(other[finite]).max(initial=0.0))
    off = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
    return off / largest if largest else (float("inf") if off else 0.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of `values` that `percent` of them do not exceed; nan of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1]


def summary(replies: Sequence[Reply], deadlines: Mapping[str, float | None]) -> dict[str, Any]:
    """Counts, requests a second, and latencies in seconds of those that were answered. The rate counts from the first
    that was due to the last answer. A request that failed is no miss of a deadline but an error."""
    answered = [reply for reply in replies if not reply.error]
    latencies = [reply.latency for reply in answered]
    span = max((reply.done for reply in replies), default=0.0) - min((reply.due for reply in replies), default=0.0)
    return {
        "requests": len(replies), "answered": len(answered),
        "errors": dict(Counter(reply.error for reply in replies if reply.error)),
        "wrong": sum(reply.wrong for reply in answered),
        "largest_deviation": max((reply.deviation for reply in answered), default=0.0),
        "misses": sum(_missed(reply, deadlines.get(reply.model)) for reply in answered),
        "per_second": len(answered) / span if span > 0 else 0.0,
        **{f"p{percent}": percentile(latencies, percent) for percent in (50, 90, 99)},
        "max": max(latencies, default=float("nan")),
    }  # fmt: skip


def _missed(reply: Reply, deadline: float | None) -> bool:
    return deadline is not None and reply.latency > deadline
