"""Feeds that fit are passed on as they are; others are refused in words that say what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.errors import InputError
from trt_layering.runtime import feeds as module
from trt_layering.store.manifest import Range, Value


def checked(feeds: Any, inputs: Sequence[Value]) -> dict[str, Any]:
    """Where no input has a range."""
    return module.checked(feeds, inputs, {})


def value(name: str = "x", dtype: str = "float32", shape: Any = ("n", 4)) -> Value:
    return Value(name=name, dtype=dtype, shape=shape)


DIMS = st.one_of(st.none(), st.integers(0, 4), st.sampled_from(["n", "m"]))


@given(st.lists(st.lists(DIMS, max_size=4), min_size=1, max_size=3), st.data())
def test_a_shape_fits_if_numbers_and_symbols_agree_and_not_otherwise(
    shapes: list[list[Any]], data: st.DataObject
) -> None:
    values = [value(f"x{index}", shape=tuple(shape)) for index, shape in enumerate(shapes)]
    symbols = {"n": data.draw(st.integers(0, 4)), "m": data.draw(st.integers(0, 4))}
    sizes = [[symbols[dim] if isinstance(dim, str) else 3 if dim is None else dim for dim in shape] for shape in shapes]
    feeds = {f"x{index}": np.zeros(size, np.float32) for index, size in enumerate(sizes)}
    assert list(checked(feeds, values)) == list(feeds)
    used = [dim for shape in shapes for dim in shape]
    places = [(i, axis) for i, shape in enumerate(shapes) for axis, dim in enumerate(shape) if dim is not None]
    if not places:
        return
    index, axis = data.draw(st.sampled_from(places))
    dim = shapes[index][axis]
    sizes[index][axis] += 1
    feeds[f"x{index}"] = np.zeros(sizes[index], np.float32)
    if isinstance(dim, str) and used.count(dim) == 1:
        checked(feeds, values)
        return
    with pytest.raises(InputError) as caught:
        checked(feeds, values)
    assert caught.value.where.startswith("input 'x")
    assert caught.value.remedy


def test_arrays_that_fit_are_not_copied() -> None:
    array = np.zeros((2, 4), np.float32)
    assert checked({"x": array}, [value()])["x"] is array
    scalar = np.array(3.0, np.float32)
    assert checked({"x": scalar}, [value(shape=())])["x"] is scalar


def test_others_are_made_contiguous() -> None:
    array = np.arange(16, dtype=np.float32).reshape(4, 4).T
    got = checked({"x": array}, [value()])["x"]
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("text", [np.array(["a", "bc"]), np.array(["a", "bc"], object), ["a", "bc"]])
def test_text_comes_in_any_form(text: Any) -> None:
    got = checked({"x": text}, [value(dtype="string", shape=(2,))])["x"]
    assert got.dtype == object
    assert list(got) == ["a", "bc"]


@pytest.mark.parametrize(
    "text", [np.array([1, 2]), np.array([None, "a"], object), np.array(["a", 1], object), np.array([b"a", b"b"])]
)
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match=r"text|dtype"):
        checked({"x": text}, [value(dtype="string", shape=(2,))])


@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (1, 2, 3)])
def test_an_unknown_rank_takes_any_shape(shape: tuple[int, ...]) -> None:
    checked({"x": np.zeros(shape, np.float32)}, [value(shape=None)])


@pytest.mark.parametrize("shape", [(), (2,), (2, 4, 1), (9, 4)])
def test_a_shape_of_another_rank_is_outside_a_range(shape: tuple[int, ...]) -> None:
    span = Range(min=(1, 4), opt=(2, 4), max=(3, 4))
    with pytest.raises(InputError, match="1x4 to 3x4"):
        module.checked({"x": np.zeros(shape, np.float32)}, [value(shape=None)], {"x": span})


def test_bfloat16_is_taken_as_such() -> None:
    import ml_dtypes

    array = np.zeros((2, 4), ml_dtypes.bfloat16)
    assert checked({"x": array}, [value(dtype="bfloat16")])["x"] is array
    with pytest.raises(InputError, match="float32"):
        checked({"x": array.astype(np.float32)}, [value(dtype="bfloat16")])


def test_things_that_are_no_arrays_are_refused() -> None:
    for thing in (object(), {"a": 1}, [[1.0], [1.0, 2.0]], {1, 2}):
        with pytest.raises(InputError):
            checked({"x": thing}, [value()])


def test_every_input_is_asked_for_and_no_other_is_taken() -> None:
    values = [value("images"), value("mask")]
    array = np.zeros((1, 4), np.float32)
    with pytest.raises(InputError, match="'mask' is missing") as missing:
        checked({"images": array}, values)
    assert "float32 of shape nx4" in missing.value.remedy
    with pytest.raises(InputError, match="no input 'image'") as renamed:
        checked({"image": array, "mask": array}, values)
    assert "'images'" in renamed.value.remedy
    with pytest.raises(InputError, match="no input 'zzz'") as extra:
        checked({"images": array, "mask": array, "zzz": array}, values)
    assert "'images', 'mask'" in extra.value.remedy
    with pytest.raises(InputError):
        checked({"images": array, "mask": array, 5: array}, values)  # type: ignore[dict-item]
