"""The arena is whole pages of zeroed memory that go back when it is closed."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from trt_layering.backends.arena import Arena
from trt_layering.errors import MemoryLimitError
from trt_layering.runtime import meter

MIB = 1 << 20


def test_views_and_arrays_are_the_same_aligned_bytes() -> None:
    arena = Arena(3 * 4096)
    view = arena.view(4096, 4096)
    assert ctypes.addressof(ctypes.c_char.from_buffer(view)) % mmap.PAGESIZE == 0
    assert bytes(view) == bytes(4096)
    array = arena.array(4096 + 64, np.dtype(np.float32), (3, 5))
    array[:] = np.arange(15).reshape(3, 5)
    assert bytes(view[64 : 64 + 60]) == np.arange(15, dtype=np.float32).tobytes()
    assert arena.array(8192, np.dtype(np.int64), ()).shape == ()
    assert arena.array(8192, np.dtype(np.int64), (0, 4)).size == 0
    arena.close()


def test_memory_goes_back_even_while_views_are_about() -> None:
    before = meter.current_rss_bytes()
    arena = Arena(64 * MIB)
    view = arena.view(0, 64 * MIB)
    array = np.frombuffer(view, np.uint8)
    array[:: mmap.PAGESIZE] = 1  # type: ignore[index]
    assert meter.current_rss_bytes() - before > 60 * MIB
    arena.close()
    arena.close()
    assert meter.current_rss_bytes() - before < 4 * MIB


def test_an_empty_arena_is_no_trouble() -> None:
    arena = Arena(0)
    assert arena.size == 0
    assert len(arena.view(0, 0)) == 0
    arena.close()


@pytest.mark.parametrize("size", [1 << 60, 1 << 70])
def test_what_the_machine_cannot_give_is_an_error_of_ours(size: int) -> None:
    with pytest.raises(MemoryLimitError, match="for the arena") as caught:
        Arena(size)
    assert "budget" in caught.value.remedy


def test_memory_is_private_and_huge_pages_are_asked_for() -> None:
    """Shared memory gets none, and direct reads into scattered small pages take twice as long."""
    arena = Arena(4 * MIB)
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= arena._address < end
        elif inside and first == "VmFlags:":
            flags = line.split()[1:]
    arena.close()
    assert "rd" in flags
    assert "sh" not in flags
    assert "hg" in flags
