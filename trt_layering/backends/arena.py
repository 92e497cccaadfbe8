"""Host memory that streamed weights pass through: one page-aligned mapping, given back as a whole.

May import errors. A mapping the kernel refuses raises MemoryLimitError.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_layering.errors import MemoryLimitError
from trt_layering.units import format_size


def dtype_of(word: str) -> np.dtype[Any]:
    """The numpy dtype of weights that the manifest calls `word`."""
    if word != "bfloat16":
        return np.dtype(word)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


@dataclass(frozen=True)
class InPlace:
    """A landing at the very place in the arena; see `backends.base.Landing`."""

    memory: memoryview

    def put(self) -> None:
        """It is there."""


class Arena:
    """`size` bytes of anonymous memory, zero until written, aligned to a page; see `backends.base.Arena`.

    The kernel is asked for huge pages, which it gives to private memory only: they make direct reads cheaper (fewer
    pieces for the drive to fill, fewer pages to pin). Pages are taken when first written. Views do not keep the memory:
    whoever closes the arena sees to it that nothing uses one any more, neither an engine nor a read under way. (A view
    that did, in the traceback of some error, would keep the arena from closing.)
    """

    staged = False

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self._map = mmap.mmap(-1, max(size, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise MemoryLimitError(
                f"the machine did not give {format_size(size)} for the arena",
                remedy="lower the budget, stop other programs, or raise the process's memory limit",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _advise(self, advice: int) -> None:
        try:
            self._map.madvise(advice)
        except OSError:
            return

    def view(self, offset: int, length: int) -> memoryview:
        """Writable bytes [offset, offset + length); valid until `close`."""
        return memoryview((ctypes.c_ubyte * length).from_address(self._address + offset)).cast("B")

    def landing(self, thread: int, target: int, length: int) -> InPlace:
        """The place itself, whichever thread asks."""
        return InPlace(self.view(target, length))

    def publish(self, block: int) -> None:
        """What was put is where it belongs."""

    def arrive(self, block: int) -> None:
        """What was put is where it belongs."""

    def pieces(self, target: int, length: int) -> Iterator[memoryview]:
        """All `length` bytes at `target` as one piece."""
        yield self.view(target, length)

    def weight(self, offset: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The bytes at `offset` as an array; valid until `close`."""
        return self.array(offset, dtype_of(dtype), shape)

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The bytes at `offset` as an array; valid until `close`."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.view(offset, count * dtype.itemsize), dtype=dtype).reshape(shape)

    def close(self) -> None:
        """Give the memory back to the system. May be called twice."""
        self._map.close()
