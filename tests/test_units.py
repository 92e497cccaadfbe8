"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from trt_layering.errors import UsageError
from trt_layering.units import format_size, parse_size

HUGE = pytest.param(10**5000, id="huge")


@pytest.mark.parametrize(
    ("size", "parsed"),
    [(1, 1), ("4096", 4096), ("96MiB", 96 << 20), (" 1.5 GB ", 1_500_000_000), ("2k", 2000), (1 << 62, 1 << 62)],
)
def test_sizes(size, parsed):
    assert parse_size(size) == parsed


@pytest.mark.parametrize("size", ["", "MiB", "4 parsecs", "-1", "1e3", 0, -1, "0.4", True, None, 1.5, [1]])
def test_what_is_no_size(size):
    with pytest.raises(UsageError, match="--budget"):
        parse_size(size, what="--budget")


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000, 10**400, HUGE, (1 << 62) + 1, "5000000000GiB"])
def test_what_no_machine_has(size):
    with pytest.raises(UsageError, match="at most 4 EiB") as caught:
        parse_size(size)
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (96 << 20, "96.0 MiB"),
        (3 << 29, "1.50 GiB"),
        (10**400, "over 4 EiB"),
    ],
)
def test_written(size, words):
    assert format_size(size) == words
