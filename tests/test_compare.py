"""How far outputs are apart: zero only where they agree, infinite where no number could say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from trt_layering.compare import difference

INF = float("inf")
KINDS = ["float32", "float16", "float64", "int64", "uint64", "int8", "bool", "complex64"]
SHAPES = st_numpy.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)


@given(st.data(), st.sampled_from(KINDS), SHAPES)
def test_nothing_is_apart_from_itself_and_what_differs_is_apart(data: st.DataObject, kind: str, shape: Any) -> None:
    array, other = (data.draw(st_numpy.arrays(kind, shape)) for _ in range(2))
    assert difference(array, array.copy())[0] == 0
    same = np.array_equal(array, other, equal_nan=array.dtype.kind in "fc")
    assert (difference(array, other)[0] == 0) == same
    assert (difference(other, array)[0] == 0) == same


def test_the_largest_difference_and_the_largest_value() -> None:
    wanted, got = np.array([1.0, -8.0, 3.0], np.float32), np.array([1.5, -8.25, 3.0], np.float32)
    assert difference(wanted, got) == (0.5, 8.0)
    assert difference(np.array([-3, 2]), np.array([-3, 4])) == (2.0, 3.0)
    assert difference(np.array([True]), np.array([False])) == (1.0, 1.0)


def test_large_integers_are_told_apart() -> None:
    assert difference(np.array([2**60]), np.array([2**60 + 1]))[0] >= 1
    assert difference(np.array([2**64 - 1], np.uint64), np.array([2**64 - 2], np.uint64))[0] >= 1


def test_half_precision_does_not_overflow() -> None:
    assert difference(np.array([60000], np.float16), np.array([-60000], np.float16)) == (120000.0, 60000.0)


def test_what_is_not_finite_must_agree_in_place_and_kind() -> None:
    nan, inf = np.nan, np.inf
    wanted = np.array([nan, inf, -inf, 1.0], np.float32)
    assert difference(wanted, wanted.copy()) == (0.0, 1.0)
    for place, value in ((0, 1.0), (1, nan), (1, -inf), (2, 5.0), (3, nan), (3, inf)):
        other = wanted.copy()
        other[place] = value
        assert difference(wanted, other)[0] == INF
        assert difference(other, wanted)[0] == INF


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (np.zeros(3, np.float32), np.zeros(3, np.float64)),
        (np.zeros((3, 1), np.float32), np.zeros(3, np.float32)),
        (np.zeros(0, np.float32), np.zeros((0, 2), np.float32)),
        (np.array(["a", "b"], object), np.array(["a", "c"], object)),
    ],
)
def test_other_shapes_dtypes_and_text_are_infinitely_apart(wanted: Any, got: Any) -> None:
    assert difference(wanted, got)[0] == INF


def test_text_and_nothing_agree_with_themselves() -> None:
    assert difference(np.array(["a"], object), np.array(["a"], object)) == (0.0, 0.0)
    assert difference(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32)) == (0.0, 0.0)
