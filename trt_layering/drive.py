"""How fast a drive reads, and how it is best asked: measured with the reads that chains make.

May import the store's reader and the arena. `measure` writes one temporary file, which is gone afterwards whatever
happens; the others only read. A folder that cannot be written, or a drive that fails, raises OSError or ReadError.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trt_layering.backends.arena import Arena
from trt_layering.store.reader import WeightFile

MIB = 1 << 20
FILE_BYTES = 128 * MIB
IN_FLIGHT = 32 * MIB
"""The most bytes that are asked for at once, and the memory that measuring takes."""
_THREADS = (1, 2, 4, 8)
_READ_BYTES = (2 * MIB, 4 * MIB, 8 * MIB)
_CHUNK = 4 * MIB
_NEARLY = 0.95
_GAIN = 1.05
_PATIENCE = 2
_CLOSE = 0.8
_ROUNDS = 3
_WRITE_SECONDS = 3.0
_MOST_BYTES = 4 << 30

Span = tuple[int, int]
"""Offset and length in bytes, both whole pages: what is read as one, as an extent is."""
Clock = Callable[[], float]


@dataclass(frozen=True)
class Rate:
    """`bytes_per_second` that `threads` parallel reads of at most `read_bytes` each got."""

    threads: int
    read_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Drive:
    """`direct` or not, and if not why; every combination that was measured, the least in flight first."""

    direct: bool
    fallback: str | None
    rates: Sequence[Rate]

    @property
    def best(self) -> Rate:
        """The fastest combination."""
        return max(self.rates, key=lambda rate: rate.bytes_per_second)

    @property
    def enough(self) -> Rate:
        """Of the combinations that come within a twentieth of the fastest the one with the fewest reads at once, and of
        these the one with the largest: each request costs the processor time that executing would have had."""
        fast = [rate for rate in self.rates if rate.bytes_per_second >= _NEARLY * self.best.bytes_per_second]
        return min(fast, key=lambda rate: (rate.threads, -rate.read_bytes))


class Reads:
    """Reads of `spans` of `file` as the loader makes them, but never waiting for an execution: one span after the
    other, round and round, several reads under way at once. Owns 32 MiB of memory until `close`; borrows `file`."""

    def __init__(self, file: WeightFile, spans: Sequence[Span], clock: Clock = time.perf_counter) -> None:
        self.spans = spans
        self._file, self._clock = file, clock
        self._memory = Arena(IN_FLIGHT)
        self._next_span = 0

    def rate(self, threads: int, read_bytes: int, seconds: float) -> float:
        """Bytes per second of `threads` parallel reads of at most `read_bytes`, each thread reading for at least
        `seconds` and at least once. Goes on in the file where the call before ended."""
        pieces, turn = self._pieces(read_bytes), threading.Lock()

        def work(index: int) -> float:
            places = itertools.cycle(self._places(index, threads, read_bytes))
            begin, done = self._clock(), 0
            while not done or self._clock() - begin < seconds:
                with turn:
                    offset, length = next(pieces)
                self._file.read_into(self._memory.view(next(places), length), offset)
                done += length
            return done / max(self._clock() - begin, 1e-9)

        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(work, range(threads)))

    def span_seconds(self, wanted: Sequence[int], threads: int, read_bytes: int) -> list[float]:
        """Seconds from asking for the first byte of a span until its last one is there, nothing else being read, for
        each of the spans whose indices are `wanted`."""
        places = [next(iter(self._places(index, threads, read_bytes))) for index in range(threads)]
        free = list(places)

        def read(piece: Span) -> None:
            place = free.pop()
            self._file.read_into(self._memory.view(place, piece[1]), piece[0])
            free.append(place)

        found, started = [], threading.Barrier(threads)
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda _: started.wait(), range(threads)):
                pass  # starting threads is no part of reading
            for index in wanted:
                begin = self._clock()
                for _ in pool.map(read, _cut(self.spans[index], read_bytes)):
                    pass
                found.append(self._clock() - begin)
        return found

    def _pieces(self, read_bytes: int) -> Iterator[Span]:
        while True:
            span = self.spans[self._next_span]
            self._next_span = (self._next_span + 1) % len(self.spans)
            yield from _cut(span, read_bytes)

    def _places(self, index: int, threads: int, read_bytes: int) -> range:
        """Where in memory the thread `index` reads to: other bytes each time, as in an arena, as far as there are."""
        share = IN_FLIGHT // threads
        return range(index * share, (index + 1) * share - read_bytes + 1, read_bytes)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def __enter__(self) -> Reads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cut(span: Span, read_bytes: int) -> Iterator[Span]:
    offset, length = span
    for start in range(0, length, read_bytes):
        yield offset + start, min(read_bytes, length - start)


def search(rate: Callable[[int, int, float], float], spans: Sequence[Span], seconds: float) -> list[Rate]:
    """What combinations of parallel reads and request sizes get on `spans`, in about `seconds`; `rate` is that of
    `Reads`. The least in flight comes first, and more is tried only as long as it gains. Those that are close to the
    fastest are measured again in turn, since drives drift, and the median counts."""
    choice = _combinations(spans)
    share = seconds / (_ROUNDS * len(choice))
    found: dict[tuple[int, int], list[float]] = {}
    fastest, idle = 0.0, 0
    for _, group in itertools.groupby(choice, key=lambda one: one[0] * one[1]):
        these = {one: rate(*one, share) for one in group}
        found.update({one: [got] for one, got in these.items()})
        idle = 0 if max(these.values()) > _GAIN * fastest else idle + 1
        fastest = max(fastest, *these.values())
        if idle == _PATIENCE:
            break
    for _ in range(_ROUNDS - 1):
        fastest = max(map(statistics.median, found.values()))
        for one in [one for one, got in found.items() if statistics.median(got) >= _CLOSE * fastest]:
            found[one].append(rate(*one, share))
    return [Rate(*one, statistics.median(got)) for one, got in found.items()]


def _combinations(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(parallel reads, request size), the least in flight first: at most 32 MiB, and no more than there is to read."""
    largest, total = max(length for _, length in spans), sum(length for _, length in spans)
    sizes = [size for before, size in zip((0, *_READ_BYTES), _READ_BYTES, strict=False) if before < largest]
    most = min(IN_FLIGHT, max(total, largest))
    pairs = [
        (threads, size)
        for size in sizes
        for threads in _THREADS
        if threads * min(size, largest) <= most and threads * size <= IN_FLIGHT
    ]
    return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[0]))


def span_times(reads: Reads, chosen: Rate, seconds: float) -> list[float]:
    """Seconds to read each span by itself with the settings `chosen`, the better of two passes.

    Where two passes over all of them would take much longer than `seconds`, or read over 4 GiB, only each n-th span is
    read; the others are taken to be read at the rate that these had together.
    """
    total = sum(length for _, length in reads.spans)
    once = min(chosen.bytes_per_second * seconds, _MOST_BYTES) / 2
    sample = range(0, len(reads.spans), max(1, round(total / max(once, 1))) if total > once else 1)
    passes = [reads.span_seconds(sample, chosen.threads, chosen.read_bytes) for _ in range(2)]
    best = dict(zip(sample, map(min, *passes), strict=True))
    byte_time = sum(best.values()) / sum(reads.spans[index][1] for index in sample)
    return [best.get(index, length * byte_time) for index, (_, length) in enumerate(reads.spans)]


def measure(folder: Path, *, file_bytes: int = FILE_BYTES, seconds: float = 1.5) -> Drive:
    """Write a file of up to `file_bytes` (less on a slow drive) into `folder` and read it for about `seconds`, with
    several numbers of parallel reads and request sizes. Takes up to 32 MiB of memory."""
    descriptor, name = tempfile.mkstemp(prefix=".trt-layering-doctor-", dir=folder)
    try:
        size = _fill(descriptor, file_bytes)
        file = WeightFile(Path(name))
    finally:
        os.unlink(name)
        os.close(descriptor)
    try:
        with Reads(file, [(0, size)]) as reads:
            rates = search(reads.rate, reads.spans, seconds)
        return Drive(file.direct, file.fallback, rates)
    finally:
        file.close()


def _fill(descriptor: int, file_bytes: int) -> int:
    """Bytes written, at least one chunk: random ones, which no drive can compress, for a few seconds at most."""
    end = time.monotonic() + _WRITE_SECONDS
    written = 0
    while written < file_bytes and (written == 0 or time.monotonic() < end):
        chunk = memoryview(os.urandom(_CHUNK))
        while chunk:
            chunk = chunk[os.write(descriptor, chunk) :]
        written += _CHUNK
        os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return written
