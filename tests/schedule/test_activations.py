"""Activations that live at the same time never share a byte, and the buffer is not needlessly large."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trt_layering.schedule.activations import Lifetime, pack


@st.composite
def lifetimes(draw: Any) -> Lifetime:
    first = draw(st.integers(0, 12))
    return Lifetime(draw(st.integers(1, 700)), first, first + draw(st.integers(0, 6)))


@given(st.lists(lifetimes(), max_size=14))
def test_no_two_that_live_together_share_bytes(lives: list[Lifetime]) -> None:
    offsets, size = pack(lives)
    for block in range(20):
        taken: set[int] = set()
        for life, offset in zip(lives, offsets, strict=True):
            if life.first <= block <= life.last:
                bytes_of = set(range(offset, offset + life.nbytes))
                assert not taken & bytes_of
                taken |= bytes_of
        assert all(0 <= byte < size for byte in taken)


@given(st.lists(lifetimes(), max_size=14))
def test_offsets_suit_any_dtype_and_the_buffer_is_no_larger_than_all_of_them(lives: list[Lifetime]) -> None:
    offsets, size = pack(lives)
    assert all(offset % 256 == 0 for offset in offsets)
    assert size <= sum(-(-life.nbytes // 256) * 256 for life in lives)
    ends = [offset + life.nbytes for life, offset in zip(lives, offsets, strict=True)]
    assert size - 256 < max(ends, default=0) <= size


def test_a_line_of_layers_needs_two_of_them() -> None:
    """Each activation lives from the block that makes it to the next: input and output of one block at a time."""
    offsets, size = pack([Lifetime(2560, block, block + 1) for block in range(10)])
    assert size == 2 * 2560
    assert len(set(offsets)) == 2


def test_a_small_one_goes_into_a_hole() -> None:
    lives = [Lifetime(2560, 0, 0), Lifetime(25600, 0, 9), Lifetime(2560, 5, 9), Lifetime(256, 0, 9)]
    offsets, size = pack(lives)
    assert offsets[0] == offsets[2]
    assert size == 25600 + 2560 + 256


def test_nothing_to_place() -> None:
    assert pack([]) == ([], 0)
