"""How a chain's engines get their weights: streamed through the arena, or resident from the start.

May import the store, the schedule and the loader. What reading and checking raise (ReadError, CorruptError) comes from
`keep` at once, and with `stream` from the loader later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_layering.backends.arena import Arena as HostArena
from trt_layering.backends.base import Arena, Engine, Runtime
from trt_layering.runtime.gate import Lane
from trt_layering.runtime.loader import Loader, LoaderOptions
from trt_layering.runtime.rows import RowReader
from trt_layering.runtime.schedules import Scheduled
from trt_layering.runtime.trace import Trace
from trt_layering.schedule.residency import Schedule
from trt_layering.store.manifest import PAGE, WEIGHTS_FILE, Block, Chain
from trt_layering.store.reader import WeightFile, verify_stored

Turn = Callable[[], AbstractContextManager[Any]]
"""Makes what one read is done within."""
_CHECKED_AT_ONCE = 1 << 20
"""Bytes in memory while weights are only checked."""


@dataclass
class Supply:
    """A chain's engines, the loader that says when each may execute, and the memory and the file behind both; it owns
    all of them until `close`."""

    engines: list[Engine]
    loader: Loader
    arena: Arena
    file: WeightFile
    mode: str
    resident_bytes: int
    rows: RowReader | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes that came from the drive."""
        return self.loader.bytes_read + (self.rows.bytes_read if self.rows else 0)

    @property
    def row_counts(self) -> dict[str, int]:
        """For `Chain.stats`, where tables are read by rows: rows that came from the drive and their bytes, with the
        pages around them; and rows that were in memory."""
        rows = self.rows
        return {"rows_read": rows.rows_read, "row_bytes": rows.bytes_read, "row_hits": rows.row_hits} if rows else {}

    @property
    def awaits_drive(self) -> bool:
        """Whether a run waits for a read that the drive has not ended. Takes no lock."""
        return self.loader.awaits_drive or (self.rows is not None and self.rows.awaits_drive)

    def owns_this_thread(self) -> bool:
        """Whether the caller is one of the threads that `close` waits for."""
        return self.loader.owns_this_thread() or (self.rows is not None and self.rows.owns_this_thread())

    @property
    def fallbacks(self) -> list[str]:
        """What could not be had as asked, in words."""
        return [f"weights are read through the page cache: {self.file.fallback}"] if self.file.fallback else []

    def close(self) -> None:
        """Close everything; `loader.stop` comes first and may come from another thread."""
        self.loader.stop()
        for engine in self.engines:
            engine.close()
        self.engines.clear()
        if self.rows:
            self.rows.close()
        gc.collect()
        self.arena.close()
        self.file.close()


def stream(
    folder: Path,
    chain: Chain,
    scheduled: Scheduled,
    runtime: Runtime,
    buffers: Mapping[str, Any],
    options: LoaderOptions,
    trace: Trace | None,
    lane: Lane | None = None,
) -> Supply:
    """Engines over an arena through which the weights pass as `scheduled` says; those that read rows need none. `trace`
    gets the reads, which take their turn in `lane`."""
    schedule = scheduled.schedule
    blocks, threads = len(schedule.offsets), options.parallel_reads
    arena = runtime.arena(schedule.arena_bytes, blocks, threads, options.read_bytes)
    file = _open_file(folder, options, arena)
    loader = Loader(schedule, chain.extents, arena, file, options, profile=chain.profile, trace=trace, lane=lane)
    supply = Supply([], loader, arena, file, schedule.mode, schedule.resident_bytes)
    try:
        if schedule.arena_bytes:
            with closing(HostArena(PAGE)) as page:  # not the arena itself, of which a huge page would be taken
                file.read_into(page.view(0, PAGE), 0)  # shows whether direct reads work
        if any(part.block.rows is not None for part in scheduled.parts):
            supply.rows = RowReader(file)
        for part, offset in zip(scheduled.parts, schedule.offsets, strict=True):
            if part.block.rows is not None and supply.rows:
                supply.engines.append(supply.rows.open(chain, part.block, runtime, buffers, options.verify))
                continue
            weights = _views(chain, part.block.extents, arena, offset)
            supply.engines.append(runtime.open_streamed(folder, part.block, weights, buffers))
            weights.clear()
        runtime.ready()
    except BaseException:
        supply.close()
        raise
    return supply


def keep(
    folder: Path,
    chain: Chain,
    blocks: Sequence[Block],
    runtime: Runtime,
    buffers: Mapping[str, Any],
    options: LoaderOptions,
) -> Supply:
    """Engines of `blocks` that have all their weights, in whatever layout executes fastest."""
    arena = HostArena(0)
    file = _open_file(folder, options, arena)
    still = Schedule(0, (0,) * len(blocks), ((),) * len(blocks))
    supply = Supply(
        [], Loader(still, chain.extents, arena, file, options), arena, file, "resident", chain.weights_bytes
    )
    try:
        if options.verify != "never":
            _verify(chain, file, options.read_bytes)
        for block in blocks:
            supply.engines.append(runtime.open_resident(folder, block, buffers, file.read_into))
        runtime.ready()
    except BaseException:
        supply.close()
        raise
    supply.loader.bytes_read = chain.weights_bytes
    return supply


def check_weights(folder: Path, chain: Chain, options: LoaderOptions, turn: Turn) -> None:
    """Read all weights of the chain in `folder` once and compare their checksums, unless that is never to be done; each
    extent within a `turn`. Raises CorruptError and what reading raises."""
    if options.verify != "never":
        with closing(WeightFile(folder / WEIGHTS_FILE, direct=options.direct_io)) as file:
            _verify(chain, file, _CHECKED_AT_ONCE, turn)


def _open_file(folder: Path, options: LoaderOptions, arena: Arena) -> WeightFile:
    """The weight store; `arena` is closed where it cannot be opened."""
    try:
        return WeightFile(folder / WEIGHTS_FILE, direct=options.direct_io)
    except BaseException:
        arena.close()
        raise


def _verify(chain: Chain, file: WeightFile, memory: int, turn: Turn = nullcontext) -> None:
    """Compare the checksums of all extents, one after the other passing through so many bytes of memory."""
    with closing(HostArena(memory)) as staging:
        for index, extent in enumerate(chain.extents):
            with turn():
                verify_stored(file, extent, index, staging.view(0, staging.size))


def _views(chain: Chain, extents: Iterable[int], memory: Arena, offset: int) -> dict[str, Any]:
    """The tensors of `extents`, which begin at `offset` of `memory`, by name."""
    views = {}
    for index in extents:
        extent = chain.extents[index]
        for tensor in extent.tensors:
            views[tensor.name] = memory.weight(offset + tensor.offset, tensor.dtype, tensor.shape)
        offset += extent.length
    return views
