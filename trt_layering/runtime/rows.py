"""Rows of tables, read from the drive when an inference names them, in the place of engines that hold whole tables.

May import the store, the arena and the backends' protocols. Indices outside their table raise InputError. What reading
raises (ReadError, CorruptError, ClosedError) comes from `RowsEngine.execute`, and from `RowReader.open` for a table
whose checksum is wrong.

The rows that one execution names are read as whole pages, those near each other as one piece, several pieces at once.
The rows used last stay in a small cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trt_layering.backends.arena import Arena, dtype_of
from trt_layering.backends.base import Runtime
from trt_layering.errors import BackendError, InputError, LayeringError, MemoryLimitError
from trt_layering.store.manifest import PAGE, Block, Chain, Extent
from trt_layering.store.reader import WeightFile, verify_stored

Array = np.ndarray[Any, Any]

CACHE_BYTES = 512 * 1024
"""Of rows that stay in memory, for each table."""
_AT_ONCE = 8  # pieces under way, one of them in the thread that asks
_PIECE = 64 * 1024
_GAP = 32 * 1024
"""Bytes between rows up to which they are one piece: about what a drive reads in the time of another request."""


class Piece(NamedTuple):
    """`length` bytes from byte `offset` of the file, whole pages; in them are those numbered first to last - 1 of the
    rows that are read, or parts of these."""

    offset: int
    length: int
    first: int
    last: int


Deliver = Callable[[Piece, memoryview], None]


class _Request:
    """Pieces in shares, one for each thread that can be had; those that nobody has begun yet are in `shares`."""

    def __init__(self, pieces: Sequence[Piece], deliver: Deliver) -> None:
        self.shares = [pieces[n::_AT_ONCE] for n in range(min(_AT_ONCE, len(pieces)))]
        self.deliver = deliver
        self.under_way = 0
        self.error: Exception | None = None


class RowReader:
    """Reads pieces of `file` for one thread at a time, several at once, through memory of its own.

    Owns its threads and the tables that it opened, until `close`; borrows `file`, which is to be closed after it. May
    be closed only when no table of it is being read. `rows_read` counts rows that came from the drive, `row_hits` those
    that were in memory; a row that one execution names twice counts once.
    """

    def __init__(self, file: WeightFile) -> None:
        """Raises MemoryLimitError where the machine has no memory or no threads to give."""
        self._file = file
        self._staging = Arena(_AT_ONCE * _PIECE)
        # Taken now, so that a chain's memory is known when it is open.
        self._staging.array(0, np.dtype(np.uint8), (self._staging.size,)).fill(0)
        self._tables: dict[int, Table] = {}
        self._lock = threading.Lock()
        self._begun, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._request: _Request | None = None
        self._stopping = False
        self.bytes_read = 0
        self.rows_read = self.row_hits = 0
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"trt-layering-rows-{n}", daemon=True)
            for n in range(1, _AT_ONCE)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self.close()
            raise MemoryLimitError(
                f"no thread for reading rows: {error}", remedy="raise the limits on threads and memory (ulimit -u, -v)"
            ) from error

    def open(self, chain: Chain, block: Block, runtime: Runtime, buffers: Mapping[str, Any], verify: str) -> RowsEngine:
        """The engine of a `block` that gathers rows. Unless `verify` is "never", the whole table passes through memory
        once, to compare its checksum; rows that are read later are not checked."""
        (index,) = block.extents
        if index not in self._tables:
            extent = chain.extents[index]
            if verify != "never":
                verify_stored(self._file, extent, index, self._staging.view(0, self._staging.size))
            self._tables[index] = Table(self, extent)
        return RowsEngine(self._tables[index], block, runtime, buffers)

    def read(self, pieces: Sequence[Piece], deliver: Deliver) -> None:
        """Read `pieces`, calling `deliver` with each and its bytes, from several threads. Raises the first error, and
        what interrupts it; in both cases some pieces may still be delivered later."""
        request = _Request(pieces, deliver)
        with self._lock:
            self._request = request
            self._begun.notify(len(request.shares) - 1)
        try:
            while (share := self._take(request)) is not None:
                self._carry_out(request, share, 0)
            with self._lock:
                self._ended.wait_for(lambda: request.under_way == 0)
        finally:
            with self._lock:
                self._request = None
                request.shares.clear()
        if request.error is not None:
            raise request.error

    @property
    def awaits_drive(self) -> bool:
        """Whether rows are being read. Takes no lock."""
        return self._request is not None

    def _take(self, request: _Request) -> Sequence[Piece] | None:
        with self._lock:
            if not request.shares:
                return None
            request.under_way += 1
            return request.shares.pop()

    def _carry_out(self, request: _Request, share: Sequence[Piece], place: int) -> None:
        """Read a share into the part of the staging memory that belongs to the caller's thread, piece by piece."""
        error: Exception | None = None
        staging = self._staging.view(place * _PIECE, _PIECE)
        done = 0
        try:
            for piece in share:
                if request.error is not None:
                    break
                part = staging[: piece.length]
                self._file.read_into(part, piece.offset)
                request.deliver(piece, part)
                done += piece.length
        except LayeringError as failure:
            error = failure
        except Exception as failure:  # in the caller's thread it may be of a signal handler
            fault = LayeringError(f"reading rows failed: {failure!r}", remedy="report this as a fault")
            error = fault if self.owns_this_thread() else failure
        with self._lock:
            request.under_way -= 1
            self.bytes_read += done
            request.error = request.error or error
            if request.under_way == 0 and not request.shares:
                self._ended.notify_all()

    def _work(self, place: int) -> None:
        while (request := self._wait()) is not None:
            while (share := self._take(request)) is not None:
                self._carry_out(request, share, place)
            del request

    def _wait(self) -> _Request | None:
        """A request of which shares are left; None when the reader stops."""
        with self._lock:
            while not self._stopping:
                if self._request is not None and self._request.shares:
                    return self._request
                self._begun.wait()
            return None

    def owns_this_thread(self) -> bool:
        """Whether the caller is one of the reader's threads, which cannot wait for itself."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End all threads and give memory back. May be called twice."""
        with self._lock:
            self._stopping = True
            self._begun.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._tables.clear()
        self._staging.close()


class Table:
    """The one tensor of `extent`, by rows; the rows used last stay in memory. One thread at a time may gather."""

    def __init__(self, reader: RowReader, extent: Extent) -> None:
        (self._tensor,) = extent.tensors
        self._reader = reader
        self._begin = extent.offset + self._tensor.offset
        self._row_bytes = self._tensor.nbytes // max(1, self._tensor.shape[0])
        self._cache = _Cache(min(CACHE_BYTES // self._row_bytes, self._tensor.shape[0]), self._row_bytes)

    def gather(self, indices: Array, where: str) -> Array:
        """The row for each of `indices` (int32 or int64, of any shape, below zero counted from the end), in memory of
        the caller's: `indices.shape` and then the shape of a row. `where` says in errors whose indices these are."""
        shape = (*indices.shape, *self._tensor.shape[1:])
        numbers = self._checked(indices.reshape(-1).astype(np.int64), where)
        out = np.empty((numbers.size, self._row_bytes), np.uint8)
        rows, places, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        self._fill(rows.tolist(), places.tolist(), out)
        sources = places[inverse.reshape(-1)]
        for place in np.flatnonzero(sources != np.arange(numbers.size)).tolist():
            out[place] = out[sources[place]]
        return out.reshape(-1).view(dtype_of(self._tensor.dtype)).reshape(shape)

    def _checked(self, numbers: Array, where: str) -> Array:
        """`numbers` counted from the front."""
        count = self._tensor.shape[0]
        wrong = numbers[(numbers < -count) | (numbers >= count)]
        if wrong.size:
            raise InputError(
                f"row {wrong[0]} is asked for of {self._tensor.name!r}, which has {count} rows",
                where=where, remedy=f"give numbers from {-count} to {count - 1}",
            )  # fmt: skip
        return np.where(numbers < 0, numbers + count, numbers)

    def _fill(self, rows: list[int], places: list[int], out: Array) -> None:
        """Put each of `rows`, which ascend, to its place in `out`."""
        missing = [i for i, row in enumerate(rows) if not self._cache.copy(row, out[places[i]])]
        wanted, targets = [rows[i] for i in missing], [places[i] for i in missing]
        if wanted:
            self._read(wanted, targets, out)
        for row, place in zip(wanted, targets, strict=True):
            self._cache.keep(row, out[place])
        self._reader.rows_read += len(wanted)
        self._reader.row_hits += len(rows) - len(wanted)

    def _read(self, rows: list[int], places: list[int], out: Array) -> None:
        size, flat = self._row_bytes, out.reshape(-1).data
        begins = [self._begin + row * size for row in rows]

        def deliver(piece: Piece, data: memoryview) -> None:
            for i in range(piece.first, piece.last):
                begin = max(begins[i], piece.offset)
                end = min(begins[i] + size, piece.offset + piece.length)
                target = places[i] * size + begin - begins[i]
                flat[target : target + end - begin] = data[begin - piece.offset : end - piece.offset]

        self._reader.read(pieces_of(begins, size), deliver)


class _Cache:
    """The `count` rows of `size` bytes that were used last."""

    def __init__(self, count: int, size: int) -> None:
        self._memory = np.empty((count, size), np.uint8)
        self._memory.fill(0)  # taken now, so that a chain's memory is known when it is open
        self._slots: OrderedDict[int, int] = OrderedDict()

    def copy(self, row: int, target: Array) -> bool:
        """Copy `row` to `target`, if it is here."""
        slot = self._slots.get(row)
        if slot is None:
            return False
        self._slots.move_to_end(row)
        target[:] = self._memory[slot]
        return True

    def keep(self, row: int, source: Array) -> None:
        """Take in a row that is not here, in the place of the one that was not used for longest."""
        if not len(self._memory):
            return
        full = len(self._slots) == len(self._memory)
        slot = self._slots.popitem(last=False)[1] if full else len(self._slots)
        self._memory[slot] = source
        self._slots[row] = slot


class RowsEngine:
    """Executes a block that only gathers rows; see `backends.base.Engine`. Borrows the table and the buffers."""

    def __init__(self, table: Table, block: Block, runtime: Runtime, buffers: Mapping[str, Any]) -> None:
        assert block.rows is not None
        self._table: Table | None = table
        self._where, self._rows, self._output = block.name, block.rows, block.outputs[0].name
        self._runtime, self._buffer = runtime, buffers.get(self._output)

    def execute(self, live: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Read the rows that the block's input names."""
        if self._table is None:
            raise BackendError("the engine is closed", where=self._where)
        where = f"{self._where}, the numbers in {self._rows!r}"
        rows = self._table.gather(self._runtime.unwrap(live[self._rows]), where)
        tensor = into.get(self._output, self._buffer)
        if tensor is None:
            tensor = self._runtime.wrap(rows)
        else:
            self._runtime.fill(tensor, rows)
        return {self._output: tensor}

    def close(self) -> None:
        """Let the table and the buffer go."""
        self._table = self._buffer = None


def pieces_of(begins: Sequence[int], size: int) -> list[Piece]:
    """The pieces to read for rows of `size` bytes that begin at the bytes `begins` of the file, ascending."""
    pieces = []
    first = 0
    while first < len(begins):
        begin, last = begins[first] // PAGE * PAGE, first
        end = begin
        while last < len(begins) and (last == first or begins[last] // PAGE * PAGE - end <= _GAP):
            end = -(-(begins[last] + size) // PAGE) * PAGE
            last += 1
        pieces += _cut(begins, size, (begin, end), (first, last))
        first = last
    return pieces


def _cut(begins: Sequence[int], size: int, span: tuple[int, int], rows: tuple[int, int]) -> list[Piece]:
    """The pieces of a `span` of the file in which `rows` lie near each other; none where there are no rows."""
    first, last = rows
    pieces = []
    for offset in range(*span, _PIECE):
        end = min(offset + _PIECE, span[1])
        while begins[first] + size <= offset:
            first += 1
        stop = first
        while stop < last and begins[stop] < end:
            stop += 1
        if stop > first:
            pieces.append(Piece(offset, end - offset, first, stop))
    return pieces
