"""What users and files give: whether it is text, how messages quote it, and what of it reaches a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.words import is_text, printable, quoted

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(), st.builds(lambda: 10**5000)),
    lambda part: st.one_of(st.lists(part), st.dictionaries(st.text(), part)),
)


@given(VALUES)
def test_whatever_it_is_it_can_be_quoted(value):
    assert 0 < len(quoted(value)) < 1000


@pytest.mark.parametrize("value", ["4 parsecs", 5000, 1.5, [1], None, "it's"])
def test_what_is_short_is_as_written(value):
    assert quoted(value) == repr(value)


@given(st.text(st.characters(exclude_categories=[])))
def test_text_is_what_can_name_a_file(word):
    try:
        named = b"\0" not in word.encode()
    except UnicodeEncodeError:
        named = False
    assert is_text(word) == named


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_reaches_a_terminal_as_a_command(text):
    assert printable(text).isprintable()
    assert printable(text) == text or not text.isprintable()


def test_what_is_written_out_can_be_read():
    assert printable("a\x1b[2Jb\n→ é") == r"a\x1b[2Jb\n→ é"
