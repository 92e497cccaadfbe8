"""Reads are right whatever the drive does in between, and what cannot be made right is one of our errors."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.samples import publish_tiny
from trt_layering.errors import ClosedError, CorruptError, ReadError
from trt_layering.store import reader as reader_module
from trt_layering.store.manifest import PAGE, WEIGHTS_FILE, Extent, Tensor, read_manifest
from trt_layering.store.reader import WeightFile, check_store, verify_extent

PAGES = 64
Mode = Literal["auto", "always", "never"]
MODES: tuple[Mode, Mode] = ("auto", "never")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / WEIGHTS_FILE
    path.write_bytes(np.random.default_rng(0).bytes(PAGES * PAGE))
    return path


def aligned(length: int) -> memoryview:
    return memoryview(mmap.mmap(-1, length))


class Drive:
    """A preadv that does `faults` in turn, one per call, and then behaves: an int reads only so many bytes, an error
    is raised, None reads all that is asked."""

    def __init__(self, *faults: int | OSError | None) -> None:
        self.faults: Iterator[int | OSError | None] = iter(faults)
        self.calls = 0

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        fault = next(self.faults, None)
        if isinstance(fault, OSError):
            raise fault
        if fault is None:
            return os.preadv(descriptor, buffers, offset)
        whole = aligned(-(-len(buffers[0]) // PAGE) * PAGE)
        start = offset - offset % PAGE
        got = os.preadv(descriptor, [whole], start) - (offset - start)
        count = min(fault, got, len(buffers[0]))
        buffers[0][:count] = whole[offset - start : offset - start + count]
        return count


class StrictDrive(Drive):
    """Refuses what a file system with direct reads refuses, also where the tests' own file system would not."""

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffers[0]))
            if offset % PAGE or len(buffers[0]) % PAGE or address % PAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
        return super().__call__(descriptor, buffers, offset)


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@settings(max_examples=80, deadline=None)
@given(
    span=st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)),
    faults=st.lists(
        st.one_of(st.integers(1, 3 * PAGE), st.just(None), st.builds(lambda: error(errno.EINTR))), max_size=12
    ),
    mode=st.sampled_from(MODES),
)
def test_short_and_interrupted_reads_are_made_whole(
    weights: Path, span: tuple[int, int], faults: list[Any], mode: Mode
) -> None:
    first, last = span[0], min(PAGES, span[0] + span[1])
    buffer = aligned((last - first) * PAGE)
    file = WeightFile(weights, direct=mode, preadv=StrictDrive(*faults))
    file.read_into(buffer, first * PAGE)
    file.close()
    assert bytes(buffer) == weights.read_bytes()[first * PAGE : last * PAGE]
    if all(fault is None or isinstance(fault, OSError) or fault >= PAGE for fault in faults):
        assert file.fallback is None, "short reads of whole pages are no reason to leave direct reads"


def test_a_short_direct_read_goes_on_from_a_page(weights: Path) -> None:
    file = WeightFile(weights, preadv=StrictDrive(PAGE + 100, 2 * PAGE + 1))
    direct = file.direct
    assert read_bytes(file, 0, 8 * PAGE) == weights.read_bytes()[: 8 * PAGE]
    assert file.direct == direct
    file.close()


def test_direct_reads_are_used_where_they_can_be(weights: Path) -> None:
    file = WeightFile(weights)
    flags = os.open(weights, os.O_RDONLY)
    try:
        fcntl.fcntl(flags, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        assert file.fallback is not None
        assert not file.direct
    else:
        assert file.fallback is None
        assert file.direct
    finally:
        os.close(flags)
        file.close()


def test_reads_leave_the_page_cache_as_it_was(weights: Path) -> None:
    for mode in MODES:
        with open(weights, "rb") as held:
            os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached_pages(held.fileno()):
                pytest.skip("this file system keeps its files in memory")
            file = WeightFile(weights, direct=mode)
            file.read_into(aligned(PAGES * PAGE), 0)
            file.close()
            assert cached_pages(held.fileno()) == 0


def cached_pages(descriptor: int) -> int:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = ctypes.create_string_buffer(PAGES)
        address, length = ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view))
        assert ctypes.CDLL(None).mincore(address, length, pages) == 0
        del view
        return sum(page & 1 for page in pages.raw)


# ------------------------------------------------------------------------------------------------------------ fallback


def refuse_direct(descriptor: int, command: int, argument: int = 0) -> int:
    if command == fcntl.F_SETFL and argument & os.O_DIRECT:
        raise error(errno.EINVAL)
    return original_fcntl(descriptor, command, argument)


original_fcntl = fcntl.fcntl


def test_a_file_system_without_direct_reads(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module.fcntl, "fcntl", refuse_direct)
    file = WeightFile(weights)
    assert not file.direct
    assert file.fallback == "the file system has no direct reads (Invalid argument)"
    file.read_into(buffer := aligned(PAGE), PAGE)
    assert bytes(buffer) == weights.read_bytes()[PAGE : 2 * PAGE]
    file.close()
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ReadError, match="has no direct reads") as caught:
        WeightFile(weights, direct="always")
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert "direct_io" in caught.value.remedy


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EINVAL, "the file system refused a direct read"),
        (errno.EFAULT, "drives cannot read directly into this memory"),
    ],
)
def test_only_the_first_direct_read_is_refused(weights: Path, number: int, words: str) -> None:
    for mode in ("auto", "always"):
        file = WeightFile(weights, direct=mode, preadv=Drive(error(number)))
        if not file.direct:
            pytest.skip("no direct reads here to fall back from")
        buffer = aligned(2 * PAGE)
        if mode == "always":
            with pytest.raises(ReadError, match=words):
                file.read_into(buffer, 0)
        else:
            file.read_into(buffer, 0)
            assert bytes(buffer) == weights.read_bytes()[: 2 * PAGE]
            assert file.fallback == words
            assert not original_fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
        file.close()


def test_threads_refused_together_all_read_on(weights: Path) -> None:
    """Each was under way, direct, when another's refusal ended direct reads."""
    count = 4
    together = threading.Barrier(count)
    local = threading.local()

    def refuse_each_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not hasattr(local, "refused"):
            local.refused = True
            together.wait(10)
            raise error(errno.EINVAL)
        return os.preadv(descriptor, buffers, offset)

    file = WeightFile(weights, preadv=refuse_each_once)
    if not file.direct:
        pytest.skip("no direct reads here to fall back from")
    results = in_threads(count, lambda index: read_bytes(file, index * PAGE, PAGE))
    file.close()
    assert results == [weights.read_bytes()[i * PAGE : (i + 1) * PAGE] for i in range(count)]


def test_no_direct_reads_wanted(weights: Path) -> None:
    file = WeightFile(weights, direct="never")
    assert (file.direct, file.fallback) == (False, None)
    assert read_bytes(file, 0, PAGE) == weights.read_bytes()[:PAGE]
    file.close()


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_drive_is_a_read_error_and_later_reads_work(weights: Path, mode: Mode) -> None:
    file = WeightFile(weights, direct=mode, preadv=Drive(2 * PAGE, error(errno.EIO)))
    with pytest.raises(ReadError, match="Input/output error") as caught:
        file.read_into(aligned(4 * PAGE), 8 * PAGE)
    assert f"{weights}, {2 * PAGE} bytes from byte {10 * PAGE}" in caught.value.where
    assert read_bytes(file, 8 * PAGE, PAGE) == weights.read_bytes()[8 * PAGE : 9 * PAGE]
    file.close()


def test_an_error_of_buffered_reads_is_not_taken_for_a_refusal(weights: Path) -> None:
    file = WeightFile(weights, direct="never", preadv=Drive(error(errno.EINVAL)))
    with pytest.raises(ReadError, match="Invalid argument"):
        file.read_into(aligned(PAGE), 0)
    file.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [0, 1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 512])
def test_a_file_that_ends_early_is_corrupt(tmp_path: Path, mode: Mode, length: int) -> None:
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(b"a" * length)
    file = WeightFile(path, direct=mode, preadv=StrictDrive())
    with pytest.raises(CorruptError, match=f"ends at byte {length}, before the weights do"):
        file.read_into(aligned(3 * PAGE), 0)
    with pytest.raises(CorruptError):
        file.read_into(aligned(PAGE), 16 * PAGE)
    file.close()


# ------------------------------------------------------------------------------------------------------------- closing


def test_a_closed_file_reads_no_more(weights: Path) -> None:
    file = WeightFile(weights)
    descriptor = file._descriptor
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(ClosedError):
        file.read_into(aligned(PAGE), 0)


def test_closing_during_a_read_never_lets_it_read_another_file(weights: Path) -> None:
    reading, closed = threading.Event(), threading.Event()

    def hold(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reading.set()
        assert closed.wait(10)
        os.fstat(descriptor)  # raises if the descriptor was closed under the read
        return os.preadv(descriptor, [buffers[0][:PAGE]], offset)

    file = WeightFile(weights, preadv=hold)
    outcome: list[BaseException] = []

    def read() -> None:
        try:
            file.read_into(aligned(2 * PAGE), 0)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(10)
    file.close()
    closed.set()
    thread.join(10)
    assert [type(error) for error in outcome] == [ClosedError]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._descriptor)


def test_threads_read_at_once(weights: Path) -> None:
    faults = [n for n in (PAGE, 3 * PAGE, 2 * PAGE) for _ in range(20)]
    file = WeightFile(weights, preadv=Drive(*faults))
    results = in_threads(8, lambda index: read_bytes(file, index * 8 * PAGE, 8 * PAGE))
    file.close()
    assert b"".join(results) == weights.read_bytes()


def read_bytes(file: WeightFile, offset: int, length: int) -> bytes:
    buffer = aligned(length)
    file.read_into(buffer, offset)
    return bytes(buffer)


def in_threads(count: int, work: Callable[[int], bytes]) -> list[bytes]:
    results = [b""] * count

    def one(index: int) -> None:
        results[index] = work(index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


# -------------------------------------------------------------------------------------------------------------- checks


def extent_of(data: bytes, *names: str) -> Extent:
    tensors = tuple(Tensor(name=name, dtype="uint8", shape=(0,), offset=0, nbytes=0) for name in names)
    return Extent(offset=PAGE, length=len(data), checksum=xxhash.xxh3_64_hexdigest(data), tensors=tensors)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), bit=st.integers(0, PAGE * 8 - 1))
def test_any_flipped_bit_of_an_extent_is_found(seed: int, bit: int) -> None:
    data = bytearray(np.random.default_rng(seed).bytes(PAGE))
    extent = extent_of(bytes(data), "w")
    verify_extent(extent, 0, [memoryview(data)])
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        verify_extent(extent, 0, [memoryview(data)])


def test_a_wrong_extent_is_told_with_its_tensors_and_the_way_out() -> None:
    extent = extent_of(bytes(PAGE), "a:0", "b/w", "c", "d", "e")
    with pytest.raises(CorruptError, match=r"extent 3 of weights\.bin was changed") as caught:
        verify_extent(extent, 3, [memoryview(bytes(PAGE - 1))])
    assert caught.value.where == "weights.bin, bytes 4096 to 8192, tensors 'a:0', 'b/w', 'c' and 2 more"
    with pytest.raises(CorruptError) as caught:
        verify_extent(extent, 3, [memoryview(b"\1" * PAGE)], path=Path("engines/m/1/weights.bin"))
    assert caught.value.where.startswith("engines/m/1/weights.bin, bytes 4096")
    assert "--name m --repository" in caught.value.remedy


def test_a_whole_store_passes(tmp_path: Path) -> None:
    folder = publish_tiny(tmp_path)
    chain = read_manifest(folder)
    check_store(folder, chain)
    file = WeightFile(folder / WEIGHTS_FILE)
    for index, extent in enumerate(chain.extents):
        file.read_into(buffer := aligned(extent.length), extent.offset)
        verify_extent(extent, index, [buffer])
    file.close()
