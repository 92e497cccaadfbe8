"""Measuring drives: with reads that take known times, and with drives that are functions."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.drives import Faulty, failure
from trt_layering import drive
from trt_layering.drive import MIB, Rate, Reads, search, span_times
from trt_layering.errors import ReadError
from trt_layering.store.manifest import PAGE
from trt_layering.store.reader import WeightFile


class Virtual:
    """A drive that answers one read after the other, each taking `latency` and its bytes at `rate`, by its own clock.
    `slower` says how many times as long reads of an offset take."""

    def __init__(self, latency: float, rate: float, slower: dict[int, float] | None = None) -> None:
        self.latency, self.byte_time, self.slower = latency, 1 / rate, slower or {}
        self.asked: list[tuple[int, int]] = []
        self.now = 0.0
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with self._lock:
            self.asked.append((offset, len(buffers[0])))
            self.now += (self.latency + len(buffers[0]) * self.byte_time) * self.slower.get(offset, 1.0)
        return os.preadv(descriptor, buffers, offset)


@pytest.fixture
def file_of(tmp_path):
    opened = []

    def make(pages: int, preadv=os.preadv) -> WeightFile:
        path = tmp_path / f"weights-{len(opened)}.bin"
        path.write_bytes(os.urandom(PAGE) * pages)
        opened.append(WeightFile(path, direct="never", preadv=preadv))
        return opened[-1]

    yield make
    for file in opened:
        file.close()


# -------------------------------------------------------------------------------------------------------------- reads


@pytest.mark.parametrize("read_bytes", [PAGE, 2 * PAGE, MIB])
def test_the_rate_is_bytes_by_time(file_of, read_bytes):
    machine = Virtual(latency=1e-3, rate=1e6)
    spans = [(0, 4 * PAGE), (4 * PAGE, 8 * PAGE)]
    with Reads(file_of(12, machine), spans, machine.clock) as reads:
        lengths = [min(read_bytes, 4 * PAGE), *[min(read_bytes, 8 * PAGE)] * 2]
        expected = sum(lengths) / sum(machine.latency + length * machine.byte_time for length in lengths)
        assert reads.rate(1, read_bytes, 5.0) == pytest.approx(expected, rel=0.05)
        assert machine.now >= 5.0


def test_a_file_is_read_round_and_round_in_pieces(file_of):
    machine = Virtual(latency=1.0, rate=1e9)
    with Reads(file_of(6, machine), [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE), (5 * PAGE, PAGE)], machine.clock) as reads:
        reads.rate(1, 2 * PAGE, 6.5)
        pieces = [(0, 2), (2, 1), (3, 2), (5, 1), (0, 2), (2, 1), (3, 2)]
        assert machine.asked == [(offset * PAGE, pages * PAGE) for offset, pages in pieces]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_each_thread_reads_at_least_once_and_all_is_read_alike(file_of, threads):
    machine = Virtual(latency=1e-3, rate=1e9)
    with Reads(file_of(4, machine), [(0, 4 * PAGE)], machine.clock) as reads:
        reads.rate(threads, PAGE, 0.0)
        assert len(machine.asked) >= threads
        counts = Counter(offset for offset, _ in machine.asked)
        assert max(counts.values()) - min(counts.get(page * PAGE, 0) for page in range(4)) <= 1


def test_seconds_of_a_span_alone(file_of):
    machine = Virtual(latency=1e-3, rate=1e6, slower={4 * PAGE: 2.0})
    with Reads(file_of(6, machine), [(0, 4 * PAGE), (4 * PAGE, 2 * PAGE)], machine.clock) as reads:
        whole, slow = reads.span_seconds([0, 1], 1, 2 * PAGE)
        assert whole == pytest.approx(2e-3 + 4 * PAGE * 1e-6)
        assert slow == pytest.approx(2 * (1e-3 + 2 * PAGE * 1e-6))
        assert reads.span_seconds([1], 4, PAGE)[0] > 0


@pytest.mark.parametrize("number", [0, 3])
def test_a_drive_that_fails_raises_and_nothing_hangs(file_of, number):
    for ask in (lambda reads: reads.rate(4, PAGE, 0.05), lambda reads: reads.span_seconds([0], 4, PAGE)):
        faulty = Faulty({number: failure(errno.EIO)})
        with Reads(file_of(16, faulty), [(0, 16 * PAGE)]) as reads, pytest.raises(ReadError, match="Input/output"):
            ask(reads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


# ------------------------------------------------------------------------------------------------- times of all spans


def times_of(file: WeightFile, machine: Virtual, spans: list[tuple[int, int]], seconds: float) -> list[float]:
    with Reads(file, spans, machine.clock) as reads:
        return span_times(reads, Rate(1, 4 * PAGE, 1 / machine.byte_time), seconds)


def test_all_spans_are_timed_and_the_better_pass_counts(file_of):
    machine = Virtual(latency=1e-3, rate=1e6)
    spans = [(0, 4 * PAGE), (4 * PAGE, PAGE), (5 * PAGE, 8 * PAGE)]
    times = times_of(file_of(13, machine), machine, spans, 60.0)
    assert times == pytest.approx([-(-length // (4 * PAGE)) * 1e-3 + length * 1e-6 for _, length in spans])
    assert len(machine.asked) == 2 * 4


def test_of_many_spans_some_are_timed_and_the_others_count_at_their_rate(file_of):
    machine = Virtual(latency=0.0, rate=1e6)
    spans = [(index * PAGE, PAGE) for index in range(100)]
    times = times_of(file_of(100, machine), machine, spans, 20 * PAGE * 1e-6)
    assert len(machine.asked) == 2 * 10
    assert {offset // PAGE for offset, _ in machine.asked} == set(range(0, 100, 10)), "spread over the file"
    assert times == pytest.approx([PAGE * 1e-6] * 100)


# ------------------------------------------------------------------------------------------------------------- search


def saturating(latency: float, byte_time: float, cap: float):
    """Reads that each take a latency and their bytes, as many at once as asked, up to the drive's rate."""

    def rate(threads: int, size: int, seconds: float) -> float:
        return min(cap, threads * size / (latency + size * byte_time))

    return rate


BIG = [(0, 64 * MIB)]


@given(
    latency=st.floats(1e-6, 0.1),
    single=st.floats(1e7, 1e10),
    cap=st.floats(1e7, 1e10),
    lengths=st.lists(st.integers(1, 20_000).map(lambda pages: pages * PAGE), min_size=1, max_size=5),
)
def test_the_choice_is_nearly_the_fastest_with_the_fewest_reads_at_once(latency, single, cap, lengths):
    rate = saturating(latency, 1 / single, cap)
    spans = list(zip(itertools.accumulate([0, *lengths]), lengths, strict=False))
    asked: list[float] = []

    def counted(threads: int, size: int, seconds: float) -> float:
        asked.append(seconds)
        assert threads * size <= drive.IN_FLIGHT
        return rate(threads, size, seconds)

    rates = search(counted, spans, 2.0)
    chosen = drive.Drive(True, None, rates).enough
    assert sum(asked) <= 2.0 + 1e-9
    every = [rate(*one, 0.0) for one in drive._combinations(spans)]
    assert chosen.bytes_per_second >= 0.85 * max(every)
    for other in rates:
        if (other.threads, -other.read_bytes) < (chosen.threads, -chosen.read_bytes):
            assert other.bytes_per_second < 0.95 * max(one.bytes_per_second for one in rates)


def test_it_ends_when_nothing_is_gained():
    rates = search(lambda *_: 1e8, BIG, 2.0)
    assert {(rate.threads, rate.read_bytes // MIB) for rate in rates} == {
        (1, 2),
        (1, 4),
        (2, 2),
        (1, 8),
        (2, 4),
        (4, 2),
    }
    assert drive.Drive(True, None, rates).enough == Rate(1, 8 * MIB, 1e8)


def test_a_drive_that_gets_slower_all_the_time_does_not_favour_what_came_first():
    """All are as fast; the drive halves its rate while it is measured."""
    calls = itertools.count()
    rates = search(lambda threads, size, seconds: min(threads, 4) * 1e8 * (1 - 0.01 * next(calls)), BIG, 2.0)
    assert drive.Drive(True, None, rates).enough.threads == 4


def test_a_hiccup_does_not_decide():
    calls = itertools.count()

    def rate(threads: int, size: int, seconds: float) -> float:
        hiccup = next(calls) == 20
        return min(threads, 2) * (1e8 if not hiccup else 1e6)

    assert drive.Drive(True, None, search(rate, BIG, 2.0)).enough.threads == 2


@pytest.mark.parametrize(
    ("lengths", "most"),
    [([PAGE], (1, 2 * MIB)), ([PAGE] * 4, (4, 2 * MIB)), ([3 * MIB] * 9, (8, 4 * MIB)), ([1 << 40], (8, 4 * MIB))],
)
def test_no_more_is_asked_for_than_there_is(lengths, most):
    pairs = drive._combinations([(0, length) for length in lengths])
    assert pairs[0] == (1, 2 * MIB)
    assert most in pairs
    total = max(sum(lengths), 2 * MIB)
    assert all(threads * min(size, max(lengths)) <= total for threads, size in pairs)


# ------------------------------------------------------------------------------------------------ of the drive itself


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path):
    measured = drive.measure(tmp_path, file_bytes=8 << 20, seconds=0.05)
    assert measured.rates[0].read_bytes == 2 * MIB
    assert all(rate.threads * rate.read_bytes <= 8 << 20 for rate in measured.rates)
    assert measured.direct == (measured.fallback is None)
    assert measured.enough.threads <= measured.best.threads
    assert list(tmp_path.iterdir()) == []


def test_enough_is_the_fewest_reads_that_are_nearly_the_fastest():
    rates = [drive.Rate(1, 4, 50.0), drive.Rate(2, 4, 95.0), drive.Rate(4, 4, 100.0), drive.Rate(8, 4, 99.0)]
    measured = drive.Drive(True, None, rates)
    assert measured.best == rates[2]
    assert measured.enough == rates[1]
