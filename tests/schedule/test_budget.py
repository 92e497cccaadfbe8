"""Dividing one budget: against every way there is, and what more budget, priorities and deadlines do."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.schedule.budget import Demand, DoesNotFit, Share, divide

PAGE = 4096


def weighted(demands: list[Demand], shares: tuple[Share, ...]) -> float:
    return sum(demand.priority * share.seconds for demand, share in zip(demands, shares, strict=True))


def least(demands: list[Demand]) -> int:
    return sum(demand.floor if demand.share is None else demand.share for demand in demands)


def most(demands: list[Demand]) -> int:
    return sum(demand.curve[-1][0] if demand.share is None else demand.share for demand in demands)


def best_of_all(demands: list[Demand], budget: int) -> float:
    """The least weighted sum of all ways to divide."""
    ways = product(*(demand.curve for demand in demands))
    return min(
        sum(demand.priority * seconds for demand, (_, seconds) in zip(demands, way, strict=True))
        for way in ways
        if sum(size for size, _ in way) <= budget
    )


@st.composite
def curves(draw, step: int = 1) -> tuple[tuple[int, float], ...]:
    count = draw(st.integers(1, 5))
    gaps = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    drops = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    seconds, points, size = sum(drops) / 1000 + draw(st.sampled_from((0.0, 0.5))), [], 0
    for gap, drop in zip(gaps, drops, strict=True):
        size += gap * step
        points.append((size, seconds))
        seconds -= drop / 1000
    return tuple(points)


@st.composite
def models(draw, deadlines: bool = False, step: int = 1, most_models: int = 4) -> list[Demand]:
    """A few models; with `step` 1 all sizes are exact, whatever the unit."""
    found = []
    for index in range(draw(st.integers(1, most_models))):
        curve = draw(curves(step))
        priority = draw(st.sampled_from((0.5, 1.0, 1.0, 3.0)))
        deadline = draw(st.none() | st.floats(0.001, 3)) if deadlines else None
        found.append(Demand(f"m{index}", curve, priority, deadline))
    return found


def budget_of(data: st.DataObject, demands: list[Demand]) -> int:
    return data.draw(st.integers(least(demands), most(demands) + 5))


@given(models(), st.data())
def test_no_way_to_divide_is_better(demands, data):
    budget = budget_of(data, demands)
    shares = divide(demands, budget)
    assert [share.name for share in shares] == [demand.name for demand in demands]
    assert sum(share.budget_bytes for share in shares) <= budget
    for demand, share in zip(demands, shares, strict=True):
        assert (share.budget_bytes, share.seconds) in demand.curve
        assert share.meets_deadline is None
    assert weighted(demands, shares) == pytest.approx(best_of_all(demands, budget), rel=1e-9)


@given(models(step=10_007 * PAGE, most_models=3), models(step=9_973 * 4099, most_models=2), st.data())
def test_sizes_that_have_to_be_rounded(some, others, data):
    """Within what is best with a few ten thousandths less: one unit a model."""
    demands = [replace(demand, name=f"m{index}") for index, demand in enumerate([*some, *others])]
    budget = budget_of(data, demands)
    span = most(demands) - least(demands)
    shares = divide(demands, budget)
    assert sum(share.budget_bytes for share in shares) <= budget
    lost = math.ceil(span / 16384) * len(demands)
    if budget - lost >= least(demands):
        assert weighted(demands, shares) <= best_of_all(demands, budget - lost) * (1 + 1e-9)


@given(models(step=3 * PAGE), st.data())
def test_more_budget_never_makes_it_worse(demands, data):
    budgets = sorted(budget_of(data, demands) for _ in range(4))
    sums = [weighted(demands, divide(demands, budget)) for budget in budgets]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(sums))


@given(models(deadlines=True), st.data())
def test_deadlines_come_before_the_sum_and_by_priority(demands, data):
    """More budget meets more: what is met, most important first, only ever grows as words in a lexicon do; and while
    that stays, the sum falls."""
    budgets = sorted(budget_of(data, demands) for _ in range(4))
    order = sorted(range(len(demands)), key=lambda i: (-demands[i].priority, price(demands[i]), i))
    before: tuple[list[bool], float] | None = None
    for budget in budgets:
        shares = divide(demands, budget)
        assert sum(share.budget_bytes for share in shares) <= budget
        met = [bool(shares[index].meets_deadline) for index in order]
        now = (met, weighted(demands, shares))
        if before is not None:
            assert met >= before[0]
            assert met > before[0] or now[1] <= before[1] * (1 + 1e-12)
        before = now


def price(demand: Demand) -> float:
    if demand.deadline is None:
        return 0
    return min((size - demand.floor for size, s in demand.curve if s <= demand.deadline), default=0)


@given(models(deadlines=True), st.data())
def test_every_deadline_that_can_be_met_alone_is_met_with_room_for_all(demands, data):
    for demand, share in zip(demands, divide(demands, most(demands)), strict=True):
        assert share.budget_bytes == demand.curve[-1][0]
        assert share.meets_deadline == (None if demand.deadline is None else demand.curve[-1][1] <= demand.deadline)


SLOW = ((10, 1.0), (20, 0.9))
STEEP = ((10, 1.0), (20, 0.1))


def sizes(demands: list[Demand], budget: int) -> list[int]:
    return [share.budget_bytes for share in divide(demands, budget)]


def test_bytes_go_where_they_gain_most():
    assert sizes([Demand("a", SLOW), Demand("b", STEEP)], 30) == [10, 20]
    assert sizes([Demand("a", SLOW, priority=10), Demand("b", STEEP)], 30) == [20, 10]


def test_one_large_step_against_two_small_ones():
    """The steepest step first would take the small one and leave no room for the large one."""
    large, small = ((10, 1.0), (30, 0.2)), ((10, 1.0), (19, 0.5))
    assert sizes([Demand("a", large), Demand("b", small)], 40) == [30, 10]


def test_a_deadline_takes_bytes_from_where_they_gain_more():
    shares = divide([Demand("a", SLOW, deadline=0.95), Demand("b", STEEP)], 30)
    assert [share.budget_bytes for share in shares] == [20, 10]
    assert [share.meets_deadline for share in shares] == [True, None]


def test_the_cheapest_deadline_of_a_priority_is_met_first():
    dear = ((10, 1.0), (21, 0.5))
    demands = [Demand("a", dear, deadline=0.6), Demand("b", SLOW, deadline=0.95)]
    assert [share.meets_deadline for share in divide(demands, 31)] == [False, True]
    demands[0] = replace(demands[0], priority=2)
    assert [share.meets_deadline for share in divide(demands, 31)] == [True, False]


def test_a_deadline_out_of_reach_costs_nothing():
    shares = divide([Demand("a", SLOW, deadline=0.01, priority=0.001), Demand("b", STEEP)], 30)
    assert [(share.budget_bytes, share.meets_deadline) for share in shares] == [(10, False), (20, None)]


def test_fixed_shares_are_kept_whatever_others_gain():
    shares = divide([Demand("a", SLOW, share=15, deadline=0.95), Demand("b", STEEP)], 35)
    assert shares == (Share("a", 15, 1.0, False), Share("b", 20, 0.1, None))
    assert divide([Demand("a", SLOW, share=500)], 500) == (Share("a", 500, 0.9, None),)


def test_ties_go_to_the_earlier_model():
    for count in (2, 3, 7):
        demands = [Demand(f"m{index}", ((10, 0.7), (20, 0.4), (30, 0.1))) for index in range(count)]
        assert sizes(demands, 10 * count + 30) == [30, 20, *[10] * (count - 2)]


def test_what_nobody_gains_by_is_left_over():
    assert sizes([Demand("a", SLOW)], 1 << 40) == [20]


def test_a_model_more_and_a_model_less():
    demands = [Demand("a", SLOW), Demand("b", STEEP)]
    before = divide(demands, 40)
    with_another = divide([*demands, Demand("c", SLOW, share=10)], 40)
    assert [share.budget_bytes for share in with_another] == [10, 20, 10]
    assert divide(demands, 40) == before
    assert divide([], 5) == ()


def test_floors_that_do_not_fit_are_told():
    with pytest.raises(DoesNotFit) as caught:
        divide([Demand("a", SLOW), Demand("b", STEEP, share=12)], 21)
    assert (caught.value.needed, caught.value.parts) == (22, {"a": 10, "b": 12})
    with pytest.raises(DoesNotFit) as caught:
        divide([Demand("a", SLOW, share=5)], 100)
    assert caught.value.parts == {"a": 10}


@pytest.mark.parametrize(
    "wrong",
    [
        {"curve": ()}, {"curve": ((2, 1.0), (1, 0.5))}, {"curve": ((1, 1.0), (2, 1.0))}, {"curve": ((1, math.nan),)},
        {"curve": ((1, math.inf),)}, {"curve": ((-1, 1.0),)}, {"curve": ((1, -1.0),)},
        {"curve": ((1, 2.0), (2, math.nan))},
        {"priority": 0.0}, {"priority": math.nan}, {"priority": math.inf}, {"deadline": 0.0}, {"deadline": math.nan},
    ],
)  # fmt: skip
def test_numbers_that_are_none(wrong):
    with pytest.raises(ValueError, match=r"curve|priority|deadline"):
        Demand(**{"name": "a", "curve": SLOW, **wrong})


def test_large_demands_divide_alike_each_time():
    curve = tuple(((index + 1) * 37 * PAGE, 1.0 / (index + 1)) for index in range(64))
    demands = [Demand(f"m{index}", curve, 1 + index % 3) for index in range(16)]
    budget = (least(demands) + most(demands)) // 2
    assert divide(demands, budget) == divide(list(demands), budget)
    by_priority = [sum(s.budget_bytes for s, d in zip(divide(demands, budget), demands, strict=True) if d.priority == p)
                   for p in (1, 2, 3)]  # fmt: skip
    assert by_priority[0] // 6 < by_priority[1] // 5 < by_priority[2] // 5
