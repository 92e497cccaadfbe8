"""Which request is served next: by deadline, priority and age, and none waits for ever."""

from __future__ import annotations

import random
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from trt_layering.runtime.queues import PATIENCE, Request, end, most_urgent, urgency, wave

ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 3, width=16),  # seconds after the one before
        st.integers(0, 3),  # model
        st.sampled_from([inf, 0.1, 1.0, 8.0]),  # deadline
        st.sampled_from([0.5, 1.0, 10.0]),  # priority
    ),
    min_size=1,
    max_size=60,
)


def requests(arrivals: list[tuple[float, int, float, float]]) -> list[tuple[int, Request]]:
    """By model, in the order of arrival."""
    found, now = [], 0.0
    for number, (after, model, deadline, priority) in enumerate(arrivals):
        now += after
        found.append((model, Request({}, now, number, now + deadline, priority)))
    return found


@settings(max_examples=200)
@given(arrivals=ARRIVALS, most=st.integers(1, 4), seed=st.integers(0, 99))
def test_every_order_of_arrivals(arrivals: list[tuple[float, int, float, float]], most: int, seed: int) -> None:
    """Sweeps of random lengths over four models: who is late goes first by age, else the earliest deadline does, then
    the highest priority, then the oldest; nobody is passed by what came after it once it has waited long enough."""
    rng, coming = random.Random(seed), requests(arrivals)
    queues: dict[int, list[Request]] = {model: [] for model in range(4)}
    now, begun = 0.0, {}
    while coming or any(queues.values()):
        if not any(queues.values()):
            now = max(now, coming[0][1].arrived)
        while coming and coming[0][1].arrived <= now:
            model, request = coming.pop(0)
            queues[model].append(request)
        heads = {model: head for model, queue in queues.items() if (head := most_urgent(queue, now))}
        first = most_urgent(heads.values(), now)
        assert first is not None
        model = next(model for model, head in heads.items() if head is first)
        taken = wave(queues[model], now, most)
        waiting = [request for queue in queues.values() for request in queue]
        aged = [request for request in waiting if now - request.arrived >= PATIENCE]
        if aged:
            assert taken[0] is min(aged, key=lambda request: request.number)
        else:
            assert taken[0] is min(waiting, key=lambda r: (r.deadline, -r.priority, r.number))
        assert len(taken) == min(most, len(queues[model]))
        rest = [request for request in queues[model] if request not in taken]
        assert all(urgency(a, now) < urgency(b, now) for a in taken for b in rest)
        queues[model] = rest
        begun.update({request.number: now for request in taken})
        now += rng.uniform(0, 2)
    assert len(begun) == len(arrivals)


@given(st.floats(0.01, 2), st.integers(1, 5))
def test_a_stream_of_urgent_requests_does_not_starve_one_that_is_not(length: float, each: int) -> None:
    """However many come in each sweep, the one without a deadline and with the least priority is served as soon as it
    has waited long enough and the sweep under way has ended."""
    victim = Request({}, 0.0, 0, inf, 1e-6)
    waiting, now, number = [victim], 0.0, 0
    while victim in waiting:
        for _ in range(each):
            number += 1
            waiting.append(Request({}, now, number, now + 1e-3, 1e6))
        [first] = wave(waiting, now, 1)
        waiting.remove(first)
        now += length
    assert now <= PATIENCE + 2 * length


def test_a_request_ends_once() -> None:
    request = Request({}, 0.0, 0)
    assert end(request, {"y": 1})
    assert not end(request, ValueError())
    assert request.future.result() == {"y": 1}
    cancelled = Request({}, 0.0, 1)
    cancelled.future.cancel()
    assert not end(cancelled, {})
    failed = Request({}, 0.0, 2)
    assert end(failed, error := ValueError())
    assert failed.future.exception() is error
