"""Reads of `weights.bin` straight into the caller's memory, and the checks of what was read and of what is there.

May import errors and the manifest. What the drive refuses is a ReadError, what is missing or changed a CorruptError;
a file system without direct reads is no error: the reader falls back to buffered reads and says so in `fallback`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import xxhash

from trt_layering.errors import ClosedError, CorruptError, ReadError
from trt_layering.store.manifest import (
    PAGE,
    WEIGHTS_FILE,
    Chain,
    Extent,
    open_plain,
    plain_digest,
    rebuild_remedy,
)

Preadv = Callable[[int, list[memoryview], int], int]

_REFUSALS = {
    errno.EINVAL: "the file system refused a direct read",
    errno.EFAULT: "drives cannot read directly into this memory",  # a driver's memory may be none that the kernel pins
}


class WeightFile:
    """An open `weights.bin`. Any number of threads may read at once; `close` may come from any of them at any moment.

    Direct reads leave nothing in the page cache. Where the file system has none, reads are buffered and what they left
    in the page cache is dropped after each. `direct` says which it is now, `fallback` why it is not what was asked for.
    """

    def __init__(
        self,
        path: Path,
        *,
        direct: Literal["auto", "always", "never"] = "auto",
        preadv: Preadv = os.preadv,
    ) -> None:
        """Raises CorruptError if `path` is no file by itself, ReadError if `direct` is "always" and cannot be."""
        self.path = Path(path)
        self.direct = False
        self.fallback: str | None = None
        self._required = direct == "always"
        self._preadv = preadv
        self._lock = threading.Lock()
        self._readers = 0
        self._closed = False
        self._descriptor = open_plain(self.path)
        if direct != "never":
            try:
                self._switch(os.O_DIRECT)
                self.direct = True
            except OSError as error:
                if self._required:
                    self.close()
                self._fall_back(f"the file system has no direct reads ({error.strerror})")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills the whole writable, contiguous, one-byte-per-item `buffer` with the bytes from `offset` on. For direct
        reads the caller keeps `offset`, the buffer's length and its address multiples of 4096. The buffer's contents
        are undefined when this raises: ReadError (the drive), CorruptError (the file ends), ClosedError."""
        with self._open_descriptor() as descriptor:
            done = 0
            while done < len(buffer):
                if self._closed:
                    raise ClosedError("the weight store was closed during a read", where=str(self.path))
                done += self._read_once(descriptor, buffer[done:], offset + done)
            if not self.direct:
                with suppress(OSError):  # advice: a file system may not take it
                    os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Reads under way end with ClosedError; the file is closed when the last of them has. May be called twice."""
        with self._lock:
            last = not self._closed and self._readers == 0
            self._closed = True
        if last:
            os.close(self._descriptor)

    @contextmanager
    def _open_descriptor(self) -> Iterator[int]:
        # A descriptor closed under a running read could by then be another file's: so the last reader closes it.
        with self._lock:
            if self._closed:
                raise ClosedError("the weight store is closed", where=str(self.path))
            self._readers += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._readers -= 1
                last = self._closed and self._readers == 0
            if last:
                os.close(self._descriptor)

    def _read_once(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """One call; the bytes of `buffer` that are good after it, which can be none."""
        direct = self.direct
        try:
            count = self._preadv(descriptor, [buffer], offset)
        except InterruptedError:
            return 0
        except OSError as error:
            if direct and error.errno in _REFUSALS:
                self._fall_back(_REFUSALS[error.errno])
                return 0
            raise ReadError(
                f"the drive failed: {error.strerror or error}",
                where=f"{self.path}, {len(buffer)} bytes from byte {offset}",
                remedy="look at the drive's health (dmesg, smartctl); if the file is lost, build the chain again",
            ) from error
        if count == 0:
            raise CorruptError(
                f"{self.path.name} ends at byte {offset}, before the weights do",
                where=str(self.path), remedy=rebuild_remedy(self.path.parent),
            )  # fmt: skip
        if direct and count < len(buffer):
            # The next direct read must begin on a page again.
            count -= count % PAGE
            if count == 0:
                self._fall_back("direct reads come back in parts of less than a page")
        return count

    def _fall_back(self, reason: str) -> None:
        # Harmless when several threads come here at once.
        if self._required:
            raise ReadError(
                reason, where=str(self.path), remedy="set direct_io to auto, or move the repository to another drive"
            )
        self._switch(0)
        self.direct = False
        self.fallback = reason

    def _switch(self, flag: int) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag)


def check_store(folder: Path, chain: Chain) -> None:
    """Checks that the files `chain` names are in `folder` and are files by themselves, `weights.bin` by its length and
    every engine by its digest. Reads the engines, no weights. Raises CorruptError naming the file."""
    folder = Path(folder)
    weights = folder / WEIGHTS_FILE
    descriptor = open_plain(weights)
    try:
        length = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if length != chain.weights_bytes:
        raise CorruptError(
            f"{WEIGHTS_FILE} has {length} bytes instead of {chain.weights_bytes}",
            where=str(weights), remedy=rebuild_remedy(folder),
        )  # fmt: skip
    for file, digest in {
        block.file: block.digest for block in (*(part.block for part in chain.parts), *chain.whole)
    }.items():
        if plain_digest(folder / file) != digest:
            raise CorruptError(
                f"{file} was changed after it was written: its digest does not match",
                where=str(folder / file), remedy=rebuild_remedy(folder),
            )  # fmt: skip


def verify_extent(extent: Extent, index: int, pieces: Iterable[memoryview], *, path: Path | None = None) -> None:
    """Checks `pieces`, which are all bytes of extent `index` as read, in order, against its checksum, without the GIL.
    `path` is the `weights.bin` they came from, for the error. Raises CorruptError naming the extent and its tensors."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    _compare(extent, index, digest.hexdigest(), path)


def verify_stored(file: WeightFile, extent: Extent, index: int, staging: memoryview) -> None:
    """Checks extent `index` of `file` against its checksum, its bytes passing through `staging`: page-aligned memory of
    whole pages. Raises CorruptError naming the extent and its tensors, and what reading raises."""
    digest = xxhash.xxh3_64()
    for start in range(0, extent.length, len(staging)):
        part = staging[: extent.length - start]
        file.read_into(part, extent.offset + start)
        digest.update(part)
    _compare(extent, index, digest.hexdigest(), file.path)


def _compare(extent: Extent, index: int, checksum: str, path: Path | None) -> None:
    if checksum == extent.checksum:
        return
    names = [repr(tensor.name) for tensor in extent.tensors[:3]]
    more = f" and {len(extent.tensors) - 3} more" if len(extent.tensors) > 3 else ""
    raise CorruptError(
        f"extent {index} of {WEIGHTS_FILE} was changed after it was written: its checksum does not match",
        where=f"{path or WEIGHTS_FILE}, bytes {extent.offset} to {extent.offset + extent.length}, "
        f"tensors {', '.join(names)}{more}",
        remedy=rebuild_remedy(path.parent) if path else "build the chain again: trt-layering build MODEL.onnx",
    )
