"""The binding taken is the quickest that is right, and what is said of the others is true."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.backends.tensorrt.candidates import Attempt, Measured, choose, sweep_seconds
from trt_layering.errors import BuildError
from trt_layering.store.manifest import Binding

_times = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8)


def attempt(binding: Binding, times: list[tuple[float, float]], diff: float = 0.0) -> Attempt:
    return Attempt(
        binding, [Measured(f"block-{n:03d}", bind, run, diff, 1 << 20) for n, (bind, run) in enumerate(times)]
    )


def in_two_slots(times: list[tuple[float, float]]) -> float:
    """A run played: an engine is brought up to date when its slot's last execution and the one before are done."""
    bound = executed = 0.0
    ends = [0.0, 0.0]
    for bind, run in times:
        bound = max(bound, ends[-2]) + bind
        executed = max(bound, executed) + run
        ends.append(executed)
    return executed


@given(_times)
def test_a_sweep_takes_what_playing_it_takes(times: list[tuple[float, float]]) -> None:
    assert math.isclose(sweep_seconds(attempt("refit", times)), in_two_slots(times), abs_tol=1e-9)
    assert math.isclose(sweep_seconds(attempt("inputs", times)), sum(run for _, run in times), abs_tol=1e-9)


@given(st.permutations(["inputs", "refit", "swap"]), st.lists(_times, min_size=3, max_size=3))
def test_the_quickest_is_taken(order: list[Binding], times: list[list[tuple[float, float]]]) -> None:
    attempts = [attempt(binding, measured) for binding, measured in zip(order, times, strict=True)]
    choice = choose(attempts, 1e-3)
    seconds = {candidate.binding: candidate.seconds for candidate in choice.candidates}
    assert [candidate.binding for candidate in choice.candidates] == order
    assert seconds[choice.binding] == min(seconds.values())
    assert [one.binding for one in choice.candidates if one.words.startswith("taken: ")] == [choice.binding]


@pytest.mark.parametrize("diff", [1.1e-3, math.nan, math.inf])
def test_a_wrong_one_is_out_however_quick(diff: float) -> None:
    quick, slow = attempt("inputs", [(0, 1e-3)], diff), attempt("swap", [(1.0, 1.0)], 1e-3)
    choice = choose([quick, slow], 1e-3)
    assert choice.binding == "swap"
    assert choice.candidates[0].seconds == 0
    assert "block-000 differs from ONNX Runtime by" in choice.candidates[0].words


def test_one_wrong_block_is_enough_and_is_named() -> None:
    blocks = [Measured("block-000", 0, 1, 0, 1), Measured("block-001", 0, 1, 0.5, 1), Measured("block-002", 0, 1, 0, 1)]
    with pytest.raises(
        BuildError, match=r"block-001 differs from ONNX Runtime by 0.5 of its largest output, over 0.001"
    ):
        choose([Attempt("inputs", blocks)], 1e-3)


def test_a_failed_one_is_out_with_its_reason() -> None:
    choice = choose([Attempt("refit", failure="a refit would not reach w3"), attempt("inputs", [(0, 2)])], 1e-3)
    assert choice.binding == "inputs"
    assert choice.candidates[0].words == "a refit would not reach w3"


def test_none_left_is_told_with_every_reason() -> None:
    attempts = [Attempt("inputs", failure="memory ran out"), attempt("swap", [(1, 1)], 2.0)]
    with pytest.raises(BuildError) as caught:
        choose(attempts, 1e-3)
    assert "inputs: memory ran out" in caught.value.where
    assert "swap: block-000 differs" in caught.value.where
    assert caught.value.remedy


def test_of_equals_the_first() -> None:
    assert choose([attempt("swap", [(0, 1)]), attempt("inputs", [(0, 1)])], 1.0).binding == "swap"


def test_the_words_have_all_that_was_measured() -> None:
    choice = choose([attempt("refit", [(0.25, 1.0), (1.5, 0.5)], 2e-4)], 1e-3)
    assert choice.candidates[0].seconds == 2.25
    assert choice.candidates[0].words == (
        "taken: 2.25 s a run: executing 1.50 s; refitting 1.75 s, of which 750 ms are waited for; plans of 2.0 MiB; "
        "differs by at most 0.0002"
    )
