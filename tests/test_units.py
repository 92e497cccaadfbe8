"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from trt_layering.errors import UsageError
from trt_layering.units import (
    format_rate,
    format_seconds,
    format_size,
    parse_rate,
    parse_seconds,
    parse_size,
)

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


@pytest.mark.parametrize(
    ("text", "seconds"), [("100ms", 0.1), (" 2 s", 2.0), ("1.5min", 90.0), ("250us", 250e-6), ("1440min", 86400.0)]
)
def test_times(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "ms", "100", "-1ms", "0s", "2 weeks", "100MS", "1e3ms", "1441min", 5, None, [1], HUGE]
)
def test_what_is_no_time(text):
    with pytest.raises(UsageError, match="deadline") as caught:
        parse_seconds(text, what="deadline")
    assert "100ms" in caught.value.remedy
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2GB", 2 * 10**9), ("500MB/s", 5 * 10**8), (" 1.5 GiB/s ", 3 << 29), ("1000", 1000), ("1000GB", 10**12)],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "/s", "fast", "-1GB", "0", "999", "1001GB/s", "2GB/min", "2 GB / s", "nan", "inf", "9" * 400]
)
def test_what_is_no_rate(text):
    with pytest.raises(UsageError, match="--read-rate") as caught:
        parse_rate(text, what="--read-rate")
    assert "2GB" in caught.value.remedy
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (12e-6, "0.012 ms"),
        (0.001534, "1.53 ms"),
        (0.1314, "131 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (2.1, "2.10 s"),
        (100, "100 s"),
    ],
)
def test_times_written(seconds, words):
    assert format_seconds(seconds) == words


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0, "0 B/s"), (1500, "2 KB/s"), (5.12e8, "512 MB/s"), (9.996e8, "1.00 GB/s"), (2.1e9, "2.10 GB/s")],
)
def test_rates_written(rate, words):
    assert format_rate(rate) == words
