"""Shapes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.errors import UsageError
from trt_layering.shapes import format_shape, parse_named, parse_shape

HUGE = pytest.param(10**5000, id="huge")
DIMS = st.lists(st.integers(1, 10**6), max_size=6).map(tuple)
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters=","), min_size=1)


@given(DIMS)
def test_shapes_survive_writing(shape):
    assert parse_shape("x".join(map(str, shape))) == shape
    assert parse_shape(str(list(shape))) == shape
    assert parse_shape(list(shape)) == shape
    assert format_shape(shape) == ("x".join(map(str, shape)) or "scalar")


@given(NAMES, DIMS)
def test_the_last_colon_divides(name, shape):
    """Names may hold colons, brackets and anything else; a comma as long as what is before it is no shape."""
    assert parse_named(f"{name}:{'x'.join(map(str, shape))}") == {name: shape}


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("a:1x3,b:0:2", {"a": (1, 3), "b:0": (2,)}),
        ("a:[1,3],b:[2]", {"a": (1, 3), "b": (2,)}),
        ("a,b:1x2", {"a,b": (1, 2)}),
        ("s:", {"s": ()}),
        ("x:1X3", {"x": (1, 3)}),
    ],
)
def test_several_at_once(text, shapes):
    assert parse_named(text) == shapes


@pytest.mark.parametrize(
    "text", ["x", ":1x3", "x:1x", "x:axb", "x:1x-3", "x:1.5", "x:0", "a:1,a:2", "x:٣", "x:[1,,2]", "x:" + "9" * 400]
)
def test_what_is_no_shape(text):
    with pytest.raises(UsageError):
        parse_named(text)


@pytest.mark.parametrize("value", [None, 1.5, True, [True], ["a"], {"a": 1}, [1.0], [[1]], HUGE, [-1], [10**18]])
def test_what_is_no_shape_in_yaml(value):
    with pytest.raises(UsageError):
        parse_shape(value)


def test_what_is_nested_is_not_written_out():
    value: list[object] = ["x"]
    for _ in range(100):
        value = [value] * 10
    with pytest.raises(UsageError, match="is not a shape") as caught:
        parse_shape(value)
    assert len(caught.value.what) < 200


@pytest.mark.parametrize("text", ["axb", "-1x3", "[1, y]"])
def test_what_is_no_shape_is_quoted_as_it_was_written(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shape(text)
    assert caught.value.what == f"'{text}' is not a shape"
