"""The bench's client: when requests are due, what counts as latency, what is an error, a miss and a wrong answer."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import checkout


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(checkout.ROOT / "scripts" / "bench"))
        yield importlib.import_module("load")
        for name in ("load", "measure"):
            sys.modules.pop(name, None)


class Clock:
    """Time that passes only when someone waits or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Served:
    """A client whose service takes `seconds[n]` for the n-th request, and fails those in `failing`."""

    def __init__(self, load: Any, clock: Clock, seconds: Any, failing: Any = ()) -> None:
        self.load, self.clock, self.seconds, self.failing = load, clock, seconds, failing
        self.asked: list[str] = []
        self.closed = False

    def infer(self, model: str, feeds: Any) -> Any:
        number = len(self.asked)
        self.asked.append(model)
        self.clock.now += self.seconds(number)
        if number in self.failing:
            raise self.load.Failed("HTTP 503")
        return {"y": feeds["x"] * 2}

    def close(self) -> None:
        self.closed = True


def subject(load: Any, name: str = "m", **more: Any) -> Any:
    return load.Subject(name, [{"x": np.full(3, value, np.float32)} for value in (1, 2)], **more)


def driven(load: Any, work: Any, served: Served, **more: Any) -> list[Any]:
    return list(load.drive(work, lambda: served, clock=served.clock, wait=served.clock.wait, **more))


def test_at_a_fixed_rate_latency_counts_from_when_a_request_was_due(load):
    clock = Clock()
    served = Served(load, clock, lambda number: 1.0 if number == 0 else 0.01)
    replies = driven(load, load.Load([subject(load)], 10, 2.0, workers=1), served)
    assert [reply.due for reply in replies] == pytest.approx([100 + number / 10 for number in range(20)])
    assert replies[0].latency == pytest.approx(1.0)
    # Those that came due while the first one took its second waited for what was left of it.
    for number, reply in enumerate(replies[1:10], 1):
        assert reply.latency == pytest.approx(1.0 - number / 10 + 0.01 * number)
    assert replies[-1].latency == pytest.approx(0.01)
    assert served.closed


def test_at_saturation_the_next_is_asked_when_one_is_answered(load):
    clock = Clock()
    replies = driven(load, load.Load([subject(load)], None, 1.0, workers=1), Served(load, clock, lambda _: 0.25))
    assert len(replies) == 4
    assert {reply.latency for reply in replies} == {0.25}


def test_what_cannot_be_sent_in_time_is_counted(load):
    clock = Clock()
    work = load.Load([subject(load)], 10, 1.0, workers=1, patience=5.0)
    replies = driven(load, work, Served(load, clock, lambda _: 3.0))
    assert len(replies) == 10
    assert [reply.error for reply in replies] == [""] * 3 + [load.NOT_SENT] * 7


def test_bounds_on_count_and_by_stop(load):
    clock, stop = Clock(), threading.Event()
    replies = driven(load, load.Load([subject(load)], 10, 60, count=7, workers=1), Served(load, clock, lambda _: 0.01))
    assert len(replies) == 7
    stop.set()
    assert driven(load, load.Load([subject(load)], 10, 60), Served(load, clock, lambda _: 0.01), stop=stop) == []


def test_models_are_asked_by_their_weights_and_the_same_every_time(load):
    def asked(seed: int) -> list[str]:
        served = Served(load, Clock(), lambda _: 0.001)
        subjects = [subject(load, "often", weight=3), subject(load, "seldom", weight=1)]
        driven(load, load.Load(subjects, 100, 10, workers=1, seed=seed), served)
        return served.asked

    assert asked(0) == asked(0) != asked(1)
    assert asked(0).count("often") == pytest.approx(750, abs=60)


def test_errors_misses_and_wrong_answers(load):
    expected = [{"y": np.full(3, 2, np.float32)}, {"y": np.full(3, 5, np.float32)}]
    clock = Clock()
    served = Served(load, clock, lambda number: 0.5 if number == 3 else 0.01, failing={1})
    replies = driven(load, load.Load([subject(load, expected=expected)], 1, 20.0, workers=1), served)
    found = load.summary(replies, {"m": 0.1})
    assert found["requests"] == 20
    assert found["answered"] == 19
    assert found["errors"] == {"HTTP 503": 1}
    assert found["misses"] == 1
    assert 0 < found["wrong"] < 19
    assert found["largest_deviation"] == pytest.approx(0.2)
    assert found["max"] == pytest.approx(0.5)
    assert found["p50"] == pytest.approx(0.01)


def test_every_worker_has_a_client_of_its_own_and_faults_of_the_bench_are_raised(load):
    clients, lock = [], threading.Lock()

    def connect() -> Served:
        with lock:
            clients.append(Served(load, Clock(), lambda _: 0.0))
            if len(clients) == 3:
                raise KeyError("a fault")
            return clients[-1]

    with pytest.raises(KeyError, match="a fault"):
        load.drive(load.Load([subject(load)], None, 3600, workers=3, count=50), connect)
    assert len(clients) == 3


@pytest.mark.parametrize(("got", "off"), [
    ({"y": np.array([1, 2], np.float32)}, 0.0), ({"y": np.array([1, 2.2], np.float32)}, 0.1),
    ({"y": np.array([1, 2], np.float64)}, math.inf), ({"y": np.array([[1, 2]], np.float32)}, math.inf),
    ({"z": np.array([1, 2], np.float32)}, math.inf), ({}, math.inf),
    ({"y": np.array([1, np.nan], np.float32)}, math.inf),
])  # fmt: skip
def test_deviation(load, got, off):
    assert load.deviation(got, {"y": np.array([1, 2], np.float32)}) == pytest.approx(off)


def test_deviation_of_what_has_no_largest_value(load):
    zeros, texts = {"y": np.zeros(2)}, {"y": np.array(["a", "b"], object)}
    assert load.deviation({"y": np.array([0, 1e-9])}, zeros) == math.inf
    assert load.deviation(zeros, zeros) == load.deviation({"y": np.zeros((0, 3))}, {"y": np.zeros((0, 3))}) == 0
    assert load.deviation({"y": np.array(["a", "c"], object)}, texts) == math.inf


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=50), percent=st.sampled_from([50, 90, 99, 100]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(load, values, percent):
    found = load.percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


def test_no_replies(load):
    assert math.isnan(load.percentile([], 50))
    assert load.summary([], {})["per_second"] == 0
