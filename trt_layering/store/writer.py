"""Writes one version of a chain: streaming, in bounded memory, and published whole or not at all.

May import errors, the manifest and the reader's checks. Everything that fails raises; what was half-written is removed,
or, if the process itself is killed, left in a `.build-*` folder that the next build of the same chain removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from trt_layering.errors import BuildError, CorruptError, DiskError, ReadError
from trt_layering.store.manifest import (
    DTYPE_BITS,
    PAGE,
    SCHEDULES_FILE,
    VERSION_NAME,
    WEIGHTS_FILE,
    Chain,
    Extent,
    Tensor,
    check_name,
    plain_digest,
    sync_folder,
    tensor_nbytes,
    write_manifest,
)
from trt_layering.store.reader import check_store
from trt_layering.units import format_size

PIECE = 8 * 1024 * 1024
_ALIGNMENT = 256  # of tensors: what GPUs ask of addresses
_UNSYNCED = 64 * 1024 * 1024
_PAGEOUT = 21  # MADV_PAGEOUT, which the mmap module does not name

Array = npt.NDArray[Any]


@runtime_checkable
class HasNumpy(Protocol):
    """A tensor that gives its elements on demand, as onnx-ir's do; mapped files are welcome, they are let go again."""

    def numpy(self) -> Array: ...


ByteSource = Callable[[], Iterable[bytes | bytearray | memoryview]] | HasNumpy | Array
"""Where a weight's bytes come from, asked once: a function giving pieces, an array, or a tensor that has one."""


class StoreWriter:
    """One version of chain `name` in the making. A context manager: entering makes `folder` beside the finished
    versions and removes what killed builds left (`cleaned` names it), leaving without `publish` removes `folder`.

    Any number of writers may work on one chain at once, in any number of processes. A writer serves one thread.
    Everything here raises BuildError where the disk refuses, with the bytes needed and free where it is full.
    """

    def __init__(self, repository: Path, name: str) -> None:
        """Touches nothing yet. Raises UsageError if no chain can have that name."""
        self._home = Path(repository) / check_name(name)
        self.folder = self._home / f".build-{os.getpid()}-{secrets.token_hex(4)}"
        self.cleaned: list[str] = []
        self._extents: list[Extent] = []
        self._weights: _Output
        self._open: contextlib.ExitStack

    def __enter__(self) -> StoreWriter:
        with contextlib.ExitStack() as stack, disk_errors(self._home):
            self._home.mkdir(parents=True, exist_ok=True)
            with locked(self._home.resolve(), fcntl.LOCK_EX):
                self.cleaned = remove_abandoned(self._home, ".build-*")
                self.folder.mkdir()
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
                stack.enter_context(locked(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
            self._weights = _Output(self.folder / WEIGHTS_FILE)
            stack.callback(self._weights.close)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(self._extents)

    def add_extent(self, tensors: Iterable[tuple[str, str, Sequence[int], ByteSource]]) -> int:
        """Appends an extent of the (name, dtype, shape, source) given, in their order, and returns its index. Holds
        one piece of `PIECE` bytes at a time, or one that a source gives if that is larger. Raises BuildError if a
        source gives other than what its dtype and shape need; what the source raises passes, and nothing is added."""
        asked = list(tensors)
        laid, length = _lay_out([(name, dtype, tuple(shape)) for name, dtype, shape, _ in asked])
        start = self._extents[-1].offset + self._extents[-1].length if self._extents else 0
        output = _ExtentOutput(self._weights, start, length)
        for tensor, (_, _, _, source) in zip(laid, asked, strict=True):
            output.pad(tensor.offset)
            for piece in _pieces(source, tensor.dtype):
                if output.filled + len(piece) > tensor.offset + tensor.nbytes:
                    raise _wrong_length(tensor, "more")
                output.write(piece)
            if output.filled != tensor.offset + tensor.nbytes:
                raise _wrong_length(tensor, f"{output.filled - tensor.offset}")
        output.pad(length)
        self._extents.append(Extent(offset=start, length=length, checksum=output.checksum(), tensors=tuple(laid)))
        return len(self._extents) - 1

    def engine_file(self, block_name: str, suffix: str) -> Path:
        """Where the engine of `block_name` is to be written; `suffix` is like ".onnx"."""
        return self.folder / check_name(block_name + suffix)

    def digest(self, path: Path) -> str:
        """What `Block.digest` is to be for the engine now at `path`: its xxh3-128 (hex)."""
        with _as_build_error():
            return plain_digest(path)

    def publish(self, chain: Chain) -> Path:
        """Makes `folder` the next version of the chain and returns its new path. Everything `chain` names is on the
        disk before the manifest is, and the manifest before the version appears; files it does not name are removed.
        Raises BuildError for a chain whose files are not as it says; then nothing is published."""
        if chain.extents != self.extents:
            raise BuildError("the chain has other extents than were written", where=str(self.folder))
        engines = {block.file for block in (*(part.block for part in chain.parts), *chain.whole)}
        files = {WEIGHTS_FILE, SCHEDULES_FILE, *engines}
        with disk_errors(self.folder):
            self._weights.finish(chain.weights_bytes)
            with _as_build_error():
                check_store(self.folder, chain)
            self._sync(files)
            write_manifest(self.folder, chain)
            for parent in (self._home.parent, self._home.parent.parent):
                with contextlib.suppress(OSError):  # not always ours to open
                    sync_folder(parent)
            published = self._rename()
            sync_folder(self._home)
        return published

    def _sync(self, files: set[str]) -> None:
        with os.scandir(self.folder) as entries:
            found = list(entries)
        for entry in found:
            if entry.name in files:
                _sync_file(Path(entry.path))
            elif entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def _rename(self) -> Path:
        """Another build may take the number meanwhile: renaming onto its folder fails, and the next is tried."""
        while True:
            taken = [int(entry) for entry in os.listdir(self._home) if VERSION_NAME.fullmatch(entry)]
            target = self._home / str(max(taken, default=0) + 1)
            try:
                os.rename(self.folder, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            else:
                return target


class _Output:
    """A file being written by offset, whose bytes do not pile up in the page cache. Owns its descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._unsynced = 0

    def write(self, data: memoryview, offset: int, *, needed: int) -> None:
        """`needed`: bytes that must still fit on the disk, told to the user if they do not."""
        with disk_errors(self.path, needed):
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], offset + done)
            self._unsynced += done
            if self._unsynced >= _UNSYNCED:
                os.fdatasync(self._descriptor)
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self._unsynced = 0

    def finish(self, length: int) -> None:
        os.ftruncate(self._descriptor, length)
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


class _ExtentOutput:
    """One extent being written from `start` on: counts what is filled and sums it up as it goes by."""

    def __init__(self, output: _Output, start: int, length: int) -> None:
        self._output = output
        self._start = start
        self._length = length
        self._digest = xxhash.xxh3_64()
        self.filled = 0

    def write(self, piece: memoryview) -> None:
        for at in range(0, len(piece), PIECE):
            part = piece[at : at + PIECE]
            self._output.write(part, self._start + self.filled, needed=self._length - self.filled)
            self._digest.update(part)
            self.filled += len(part)

    def pad(self, offset: int) -> None:
        self.write(memoryview(bytes(offset - self.filled)))

    def checksum(self) -> str:
        return self._digest.hexdigest()


def _lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[list[Tensor], int]:
    laid = []
    end = 0
    for name, dtype, shape in tensors:
        nbytes = tensor_nbytes(dtype, shape)
        if nbytes is None:
            raise BuildError(f"weight {name!r} has the dtype {dtype!r}, which cannot be stored")
        offset = _round_up(end, _ALIGNMENT)
        laid.append(Tensor(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes))
        end = offset + nbytes
    return laid, max(PAGE, _round_up(end, PAGE))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _wrong_length(tensor: Tensor, got: str) -> BuildError:
    return BuildError(
        f"weight {tensor.name!r} gave {got} bytes; {tensor.dtype} of shape {tensor.shape} needs {tensor.nbytes}"
    )


# ----------------------------------------------------------------------------------------------- bytes out of sources


def _pieces(source: ByteSource, dtype: str) -> Iterator[memoryview]:
    if isinstance(source, np.ndarray):
        return _array_pieces(source, dtype)
    if isinstance(source, HasNumpy):
        return _array_pieces(source.numpy(), dtype)
    return (memoryview(piece).cast("B") for piece in source())


def _array_pieces(array: Array, dtype: str) -> Iterator[memoryview]:
    """The bytes of `array` in C order and little-endian, sub-byte elements packed, the array never copied whole."""
    bits = DTYPE_BITS[dtype]
    if bits < 8:
        array = array.reshape(-1)  # so that every part but the last fills its bytes
    mapping = _mapping_under(array)
    for part in _parts(array):
        flat = np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        yield (flat if bits >= 8 else _pack(flat, bits)).data
        if mapping is not None:
            _let_go(mapping, part)


def _parts(array: Array) -> Iterator[Array]:
    """Views of at most `PIECE` bytes that follow each other in C order."""
    if array.nbytes <= PIECE:
        yield array
    elif array[0].nbytes > PIECE:
        for row in array:
            yield from _parts(row)
    else:
        rows = PIECE // array[0].nbytes
        for first in range(0, len(array), rows):
            yield array[first : first + rows]


def _pack(elements: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    each = 8 // bits
    padded = np.zeros(_round_up(len(elements), each), np.uint8)
    padded[: len(elements)] = elements & (2**bits - 1)
    packed = np.zeros(len(padded) // each, np.uint8)
    for place in range(each):
        packed |= padded[place::each] << (bits * place)
    return packed


def _mapping_under(array: Array) -> mmap.mmap | None:
    base: object = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def _let_go(mapping: mmap.mmap, part: Array) -> None:
    """Pages of a mapped file count as this process's memory until they are given back. Never loses what is in them."""
    spans = [(length - 1) * stride for length, stride in zip(part.shape, part.strides, strict=True) if length > 1]
    start = part.ctypes.data + sum(span for span in spans if span < 0) - np.frombuffer(mapping, np.uint8).ctypes.data
    stop = start + sum(map(abs, spans)) + part.itemsize
    first = start - start % mmap.PAGESIZE
    with contextlib.suppress(OSError):  # kernels before 5.4 have no such advice
        mapping.madvise(_PAGEOUT, first, min(stop, len(mapping)) - first)


# ------------------------------------------------------------------------------------------------------ disk and locks


@contextlib.contextmanager
def disk_errors(where: Path, needed: int | None = None) -> Iterator[None]:
    """Turns what the disk refuses inside into DiskError; `needed` are bytes that must still fit, for its words."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"cannot write the chain: {error.strerror or error}",
                where=str(error.filename or where),
                remedy="check that the folder is there and can be written, or name another --repository",
            ) from error
        free = format_size(shutil.disk_usage(next(parent for parent in where.parents if parent.exists())).free)
        need = "" if needed is None else f": {format_size(needed)} more needed for one extent"
        raise DiskError(
            f"the disk is full{need}, {free} free",
            where=str(where), remedy="free some space, or name a --repository on another drive",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _as_build_error() -> Iterator[None]:
    try:
        yield
    except (CorruptError, ReadError) as error:
        raise BuildError(f"the chain cannot be published: {error.what}", where=error.where) from error


@contextlib.contextmanager
def locked(folder: Path, how: int) -> Iterator[bool]:
    """Holds the lock of `folder` itself, which the kernel lets go when its process dies, however it dies. Gives False
    where another holds it or the file system has no locks: then no build is ever taken for dead."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, how)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def remove_abandoned(parent: Path, pattern: str) -> list[str]:
    """Removes the folders in `parent` that are called like `pattern` and whose lock nobody holds, as whoever works in
    one does; their names. What is no folder or cannot be removed stays. The caller holds the lock of `parent`, so that
    nobody makes one meanwhile."""
    removed = []
    for leftover in sorted(parent.glob(pattern)):
        with contextlib.suppress(OSError), locked(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held:
                shutil.rmtree(leftover)
                removed.append(leftover.name)
    return removed


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
