"""One budget divided among several models by what each would gain. Pure functions over numbers; imports only numpy.

A model's **curve** says how long a run takes with how much memory. What cannot be divided raises DoesNotFit, which the
caller turns into an error of ours; numbers that are none raise ValueError.

Division goes in three steps. Every model gets its floor, or its fixed share. Then deadlines are met: that of the higher
priority first, among equals that which costs the fewest bytes; one that does not fit leaves its bytes to the next.
What is left makes the sum of priority times seconds as small as it can be: one point of each curve is chosen (the
multiple-choice knapsack problem) by dynamic programming over bytes, in units that depend on the curves and not on the
budget. So more budget never makes it worse while the same deadlines are met; and more budget never gives up a deadline
but for one of higher priority, or as high and cheaper.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_UNITS = 16384
_COST_BITS = 48


class DoesNotFit(ValueError):
    """`needed` bytes are the least that all models together take, by model in `parts`."""

    def __init__(self, needed: int, parts: dict[str, int]) -> None:
        super().__init__(f"the models need {needed} bytes together")
        self.needed = needed
        self.parts = parts


@dataclass(frozen=True)
class Demand:
    """What one model asks for.

    `curve` is points (bytes, seconds), bytes rising and seconds falling strictly: with at least so many bytes, a run
    takes so long. The first is the floor. A run counts `priority` times its seconds, should take at most `deadline`
    seconds if that is given, and the model gets exactly `share` bytes if that is.
    """

    name: str
    curve: tuple[tuple[int, float], ...]
    priority: float = 1.0
    deadline: float | None = None
    share: int | None = None

    def __post_init__(self) -> None:
        if not self.curve:
            raise ValueError("a curve has at least one point")
        for (before, slower), (after, faster) in pairwise(self.curve):
            if not (before < after and slower > faster):
                raise ValueError("along a curve bytes rise and seconds fall")
        if self.curve[0][0] < 0 or not 0 <= self.curve[-1][1] <= self.curve[0][1] < math.inf:
            raise ValueError("bytes and seconds of a curve are finite and not negative")
        if not 0 < self.priority < math.inf:
            raise ValueError("a priority is above zero")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise ValueError("a deadline is above zero")

    @property
    def floor(self) -> int:
        """The fewest bytes with which the model can run."""
        return self.curve[0][0]

    def at(self, granted: int) -> int:
        """The index of the best point that `granted` bytes reach, -1 under the floor."""
        return bisect_right(self.curve, granted, key=lambda point: point[0]) - 1

    def in_time(self) -> int | None:
        """The index of the first point that meets the deadline, None where there is no deadline or no such point."""
        if self.deadline is None or self.curve[-1][1] > self.deadline:
            return None
        return next(index for index, (_, seconds) in enumerate(self.curve) if seconds <= self.deadline)


@dataclass(frozen=True)
class Share:
    """What one model gets: `budget_bytes`, with which a run takes `seconds`; `meets_deadline` None without one."""

    name: str
    budget_bytes: int
    seconds: float
    meets_deadline: bool | None


def divide(demands: Sequence[Demand], budget: int) -> tuple[Share, ...]:
    """Shares of `budget` bytes in the order of `demands`; together at most `budget`, what nobody gains by is left over.

    The same arguments always give the same shares, so when the budget or the set of models changes, call it again. Of
    several best ways to divide, it is the one where earlier models have more. Raises DoesNotFit where the floors and
    the fixed shares are more than `budget`, or a fixed share is under its model's floor.
    """
    granted = _least(demands, budget)
    left = budget - sum(granted)
    chosen = [demand.at(size) for demand, size in zip(demands, granted, strict=True)]
    free = [index for index, demand in enumerate(demands) if demand.share is None]
    for index in sorted(free, key=lambda i: (-demands[i].priority, _price(demands[i]), i)):
        target = demands[index].in_time()
        if target is not None and (price := demands[index].curve[target][0] - granted[index]) <= left:
            chosen[index], granted[index], left = target, granted[index] + price, left - price
    for index, point in zip(free, _improve([demands[i] for i in free], [chosen[i] for i in free], left), strict=True):
        chosen[index], granted[index] = point, demands[index].curve[point][0]
    return tuple(map(_share, demands, granted, chosen))


def _least(demands: Sequence[Demand], budget: int) -> list[int]:
    """Bytes that each must have."""
    granted = [demand.floor if demand.share is None else demand.share for demand in demands]
    needed = [max(demand.floor, size) for demand, size in zip(demands, granted, strict=True)]
    if needed != granted or sum(needed) > budget:
        raise DoesNotFit(sum(needed), {demand.name: size for demand, size in zip(demands, needed, strict=True)})
    return granted


def _price(demand: Demand) -> int:
    """Bytes above the floor that the deadline takes."""
    target = demand.in_time()
    return 0 if target is None else demand.curve[target][0] - demand.floor


def _share(demand: Demand, granted: int, point: int) -> Share:
    seconds = demand.curve[point][1]
    return Share(demand.name, granted, seconds, None if demand.deadline is None else seconds <= demand.deadline)


def _improve(demands: Sequence[Demand], start: Sequence[int], left: int) -> list[int]:
    """Indices of points from `start` on, which take at most `left` bytes more and have the least weighted sum of
    seconds, up to the unit: never more than what is best with one unit a model fewer."""
    prices = [
        [size - d.curve[first][0] for size, _ in d.curve[first:]] for d, first in zip(demands, start, strict=True)
    ]
    unit = _unit(prices)
    total = sum(demand.priority * demand.curve[0][1] for demand in demands) or 1.0
    units = min(left // unit, sum(-(-price[-1] // unit) for price in prices))
    least = np.zeros(units + 1, np.int64)  # cost of the models so far with at most so many units
    choices = []
    for demand, first, price in zip(demands, start, prices, strict=True):
        costs = [round(demand.priority * s / total * (1 << _COST_BITS)) for _, s in demand.curve[first:]]
        least, choice = _one_more(least, [-(-size // unit) for size in price], costs)
        choices.append(choice)
    chosen = list(start)
    for index in reversed(range(len(demands))):
        step = int(choices[index][units])
        chosen[index] += step
        units -= -(-prices[index][step] // unit)
    return chosen


def _unit(prices: Sequence[Sequence[int]]) -> int:
    """Bytes of one unit: a common divisor, if these are few units, and then nothing is rounded."""
    common = math.gcd(*(size for price in prices for size in price)) or 1
    return max(common, -(-sum(price[-1] for price in prices) // _UNITS))


def _one_more(
    least: np.ndarray[tuple[int], np.dtype[np.int64]], sizes: Sequence[int], costs: Sequence[int]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """`least` with a model more, whose points take `sizes` units and cost `costs`; and which point that takes."""
    best, choice = least + costs[0], np.zeros(len(least), np.intp)
    for point, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        if 0 < size < len(least):
            candidate = least[: len(least) - size] + cost
            better = candidate < best[size:]
            np.copyto(best[size:], candidate, where=better)
            np.copyto(choice[size:], point, where=better)
    return best, choice
