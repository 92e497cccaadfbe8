"""Puts memory of the process's own where a session has mapped a part of a file. Linux; imports nothing of ours.

ONNX Runtime maps `weights.bin` when it opens a model, copies what it prepacks, and keeps using the mapping for the
rest. A mapping can be evicted, which is slow and says nothing, and a drive that fails, or a file that shrinks, ends
the process by a signal. So what is still mapped once a session is open is read into anonymous memory, which then takes
the mapping's place, at the same addresses. What `read` raises passes; where the kernel refuses, MemoryError is raised.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

Read = Callable[[memoryview, int], None]
"""Fills a buffer with the bytes from an offset of the file on."""

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = _LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def take_over(path: Path, read: Read) -> None:
    """Replace every mapping of the file at `path` in this process, whose owner unmaps it as it would have anyway.

    The caller sees to it that nobody maps or unmaps this file meanwhile. The file's pages in the cache are let go.
    """
    for start, stop, offset in list(_mappings(path)):
        _replace(start, stop - start, offset, read)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _mappings(path: Path) -> Iterator[tuple[int, int, int]]:
    """First address, end address and file offset of each mapping of `path`."""
    inode = path.stat().st_ino
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, number, *name = line.split(maxsplit=5)
        if int(number) == inode and name and Path(name[0]).name == path.name:
            start, _, stop = span.partition("-")
            yield int(start, 16), int(stop, 16), int(offset, 16)


def _replace(start: int, size: int, offset: int, read: Read) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Not by the mmap module, whose object would later unmap addresses that by then are somebody else's.
    memory = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if memory == _FAILED:
        raise MemoryError(f"{size} bytes for resident weights")
    try:
        read(memoryview((ctypes.c_ubyte * size).from_address(memory)).cast("B"), offset)
    except BaseException:
        _LIBC.munmap(memory, size)
        raise
    if _LIBC.mremap(memory, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, start) == _FAILED:
        _LIBC.munmap(memory, size)
        raise MemoryError(f"the kernel did not move {size} bytes: {os.strerror(ctypes.get_errno())}")
