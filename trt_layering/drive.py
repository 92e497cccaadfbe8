"""How fast the drive under a folder reads, measured with the reads that chains make.

May import the store's reader. Writes one temporary file, which is gone afterwards whatever happens; a folder that
cannot be written, or a drive that fails, raises OSError or ReadError.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trt_layering.store.reader import WeightFile

MIB = 1 << 20
FILE_BYTES = 128 * MIB
_THREADS = (1, 2, 4, 8)
_READ_BYTES = (MIB, 4 * MIB, 16 * MIB)
_BUFFER_BYTES = 64 * MIB
_CHUNK = 4 * MIB
_NEARLY = 0.9
_WRITE_SECONDS = 3.0


@dataclass(frozen=True)
class Rate:
    """`bytes_per_second` that `threads` parallel reads of `read_bytes` each got."""

    threads: int
    read_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Drive:
    """`direct` or not, and if not why; every combination that was measured, in the order of the sweep."""

    direct: bool
    fallback: str | None
    rates: Sequence[Rate]

    @property
    def best(self) -> Rate:
        """The fastest combination."""
        return max(self.rates, key=lambda rate: rate.bytes_per_second)

    @property
    def enough(self) -> Rate:
        """The combination with the least in flight that comes within a tenth of the fastest."""
        fast = [rate for rate in self.rates if rate.bytes_per_second >= _NEARLY * self.best.bytes_per_second]
        return min(fast, key=lambda rate: (rate.threads * rate.read_bytes, rate.threads))


def measure(folder: Path, *, file_bytes: int = FILE_BYTES, seconds: float = 1.5) -> Drive:
    """Write a file of up to `file_bytes` (less on a slow drive) into `folder` and read it for about `seconds`, in turn
    with each number of parallel reads and each request size. Takes up to 64 MiB of memory."""
    descriptor, name = tempfile.mkstemp(prefix=".trt-layering-doctor-", dir=folder)
    try:
        size = _fill(descriptor, file_bytes)
        file = WeightFile(Path(name))
    finally:
        os.unlink(name)
        os.close(descriptor)
    try:
        rates = _sweep(file, size, seconds)
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


def _sweep(file: WeightFile, size: int, seconds: float) -> list[Rate]:
    combinations = [
        (threads, read_bytes)
        for read_bytes in _READ_BYTES
        for threads in _THREADS
        if threads * read_bytes <= min(_BUFFER_BYTES, size)
    ]
    with mmap.mmap(-1, _BUFFER_BYTES) as memory, memoryview(memory) as buffer:
        share = seconds / len(combinations)
        return [_rate(file, size, buffer, threads, read_bytes, share) for threads, read_bytes in combinations]


def _rate(file: WeightFile, size: int, buffer: memoryview, threads: int, read_bytes: int, seconds: float) -> Rate:
    begin = time.perf_counter()
    end = begin + seconds

    def read(index: int) -> int:
        done, position = 0, index * (size // threads)
        with buffer[index * read_bytes : (index + 1) * read_bytes] as part:
            while done == 0 or time.perf_counter() < end:
                position = 0 if position + read_bytes > size else position // mmap.PAGESIZE * mmap.PAGESIZE
                file.read_into(part, position)
                position += read_bytes
                done += read_bytes
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(read, range(threads)))
    return Rate(threads, read_bytes, done / (time.perf_counter() - begin))
