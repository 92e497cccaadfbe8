"""A built chain at work: engines executed in turn over weights that the loader brings.

May import the store, the schedule and, through `backends`, one backend. Every failure is one of our errors; after an
error the chain can be used again, unless its store is corrupt or it was closed.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import numpy as np

from trt_layering import backends
from trt_layering.backends.base import Runtime
from trt_layering.errors import ClosedError, ForeignError, MemoryLimitError, UsageError
from trt_layering.runtime.feeds import checked
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.schedules import Mode, Scheduled, scheduled
from trt_layering.runtime.supply import Supply, keep, stream
from trt_layering.schedule.activations import Lifetime, pack
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Block, Value, read_manifest, rebuild_remedy, resolve
from trt_layering.store.manifest import Chain as Manifest
from trt_layering.store.reader import check_store
from trt_layering.units import parse_size

log = logging.getLogger("trt_layering")

Array = np.ndarray[Any, Any]
Observer = Callable[[int, float, Mapping[str, Any]], None]
"""Called after each block with its index, the seconds it executed, and the activations that are alive."""


def open_chain(
    name: str,
    *,
    repository: str | Path = "engines",
    budget: int | str | None = None,
    version: int | None = None,
    loader: LoaderOptions | None = None,
    mode: Mode = "auto",
) -> Chain:
    """Open the newest finished version (or `version`) of chain `name`, ready to run within `budget` bytes.

    The budget covers weights, activations, scratch and engines, as measured when the chain was built; None keeps
    everything in memory. Loading begins at once, in the background; with a budget that holds everything, it is done
    when this returns. Each engine has a thread pool of its own, unless the process asked for one with
    `share_thread_pool`. `mode` is for comparisons: "sequential" loads each block when the one before it has executed,
    "double" is the fixed double buffer, two halves of the arena in turn.

    Raises NotBuiltError, CorruptError or ForeignError for the store, ReadError for the drive, BudgetError under the
    floor, MemoryLimitError, UsageError for sizes that are none.
    """
    folder = resolve(Path(repository), name, version)
    with _memory_errors(name):
        options = loader or LoaderOptions()
        chain = Chain(folder, read_manifest(folder), budget=budget, loader=options, mode=mode)
    try:
        chain.start()
    except RuntimeError as error:
        chain.close()
        remedy = "raise the limits on threads and memory (ulimit -u, -v), or give the loader fewer threads"
        raise MemoryLimitError(f"no thread for the loader: {error}", where=f"chain {name!r}", remedy=remedy) from error
    return chain


@contextmanager
def _memory_errors(name: str) -> Iterator[None]:
    """Turns what Python and numpy raise where memory runs out into ours."""
    try:
        yield
    except MemoryError as error:
        remedy = "lower the budget or the input's size, stop other programs, or raise the process's memory limit"
        raise MemoryLimitError(f"memory ran out: {error}", where=f"chain {name!r}", remedy=remedy) from error


class Chain:
    """An open chain. It owns its memory, engines and loader threads until `close`, or until nobody holds it any more.
    `run` may be called from any thread; calls take turns."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        budget: int | str | None,
        loader: LoaderOptions,
        mode: Mode = "auto",
    ) -> None:
        """Opens everything but reads nothing ahead before `start`; `open_chain` is the way in."""
        self.manifest = manifest
        self.footprint = Footprint.of(manifest)
        self._budget = self.footprint.resident if budget is None else parse_size(budget, what="budget")
        arena_bytes = self.footprint.arena(self._budget, manifest)
        check_store(folder, manifest)
        self._runtime = backends.runtime(manifest.backend.name)
        _require_fit(folder, manifest, self._runtime)
        scheduled = self._schedule(folder, arena_bytes, loader, mode)
        self._notes = [scheduled.fallback] if scheduled and scheduled.fallback else []
        self._blocks = tuple(part.block for part in scheduled.parts) if scheduled else manifest.whole or manifest.blocks
        self._static = _static_outputs(manifest.inputs, self._blocks)
        self._outputs = {value.name for value in manifest.outputs}
        self._drops = _last_uses(self._blocks)
        memory, buffers = self._place_activations()
        self._activations: Array | None = memory
        if scheduled:
            self._supply = stream(folder, manifest, scheduled, self._runtime, buffers, loader)
        else:
            self._supply = keep(folder, manifest, self._blocks, self._runtime, buffers, loader)
        self._loader = self._supply.loader
        self._turn = threading.RLock()  # a signal handler may close the chain while its thread takes the turn
        self._runner = 0
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close_behind, self._supply, self._turn, self._process)
        self._oversize: list[str] = []
        self._closing = self._release_after_run = False
        self._closed = False
        self._next = 0
        self._unfinished = False
        self._sweeps = 0
        self._stall_seconds = self._execute_seconds = 0.0
        for fallback in self._fallbacks():
            log.warning("chain %s: %s", manifest.name, fallback)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """What `run` is fed."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """What `run` returns."""
        return self.manifest.outputs

    def _schedule(self, folder: Path, arena_bytes: int, loader: LoaderOptions, mode: Mode) -> Scheduled | None:
        """What streams and how; None where everything stays, laid out as executes fastest."""
        if mode not in get_args(Mode):
            remedy = f"use {', '.join(get_args(Mode))}"
            raise UsageError(f"mode cannot be {mode!r}", where=f"chain {self.manifest.name!r}", remedy=remedy)
        if mode == "auto" and self.manifest.optimised and self._budget >= self.footprint.resident:
            return None
        return scheduled(folder, self.manifest, arena_bytes, loader.read_bytes, mode)

    def start(self) -> None:
        """Begin to load the first blocks."""
        self._loader.start()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """One inference: arrays for all inputs in, arrays for all outputs out, which the caller owns.

        Raises InputError before any work, ReadError, CorruptError, BackendError or MemoryLimitError from the sweep, and
        ClosedError when the chain is or gets closed.
        """
        return self.observe(feeds, None)

    def observe(self, feeds: Mapping[str, Any], observer: Observer | None) -> dict[str, Array]:
        """`run`, calling `observer` after each block, in this thread."""
        arrays = checked(feeds, self.manifest.inputs)
        self._note_size(arrays)
        if os.getpid() != self._process:
            raise ClosedError(
                f"the chain {self.manifest.name!r} was opened by the process that this one was forked from",
                remedy="open it again in this process; with multiprocessing, open it after the fork, or use spawn",
            )
        with self._turn:
            if self._closing:
                raise ClosedError(f"the chain {self.manifest.name!r} is closed", remedy="open it again")
            if self._runner:
                raise UsageError(
                    f"the chain {self.manifest.name!r} was run within a run of its own",
                    remedy="run it after the first has ended; a signal handler may only close it",
                )
            try:
                self._runner = threading.get_ident()
                if self._unfinished:  # a run was interrupted, and then its recovery, too
                    self._recover()
                with _memory_errors(self.manifest.name):
                    return self._whole_sweep(arrays, observer)
            except BaseException:
                self._recover()
                raise
            finally:
                self._runner = 0
                if self._release_after_run:
                    self._release()

    def _whole_sweep(self, arrays: dict[str, Array], observer: Observer | None) -> dict[str, Array]:
        self._unfinished = True
        first, self._next = self._next, self._next + len(self._blocks)
        results = self._sweep(first, arrays, observer)
        self._sweeps += 1
        self._unfinished = False
        return results

    def _recover(self) -> None:
        """Let the loader leave what the last sweep did not get to, if it did not end."""
        if self._unfinished:
            self._loader.abandon(self._next)
            self._unfinished = False

    def _sweep(self, first: int, arrays: dict[str, Array], observer: Observer | None) -> dict[str, Array]:
        live = {name: self._runtime.wrap(array) for name, array in arrays.items()}
        results = {name: np.array(array) for name, array in arrays.items() if name in self._outputs}
        for index, block in enumerate(self._blocks):
            if self._closing:
                raise ClosedError(f"the chain {self.manifest.name!r} was closed while it ran", remedy="open it again")
            fresh = {v.name: _empty(v) for v in block.outputs if v.name in self._outputs and v.name in self._static}
            into = {name: self._runtime.wrap(array) for name, array in fresh.items()}
            self._stall_seconds += self._loader.wait_loaded(first + index)
            begin = time.perf_counter()
            produced = self._supply.engines[index].execute(live, into)
            seconds = time.perf_counter() - begin
            self._loader.finish(first + index)
            self._execute_seconds += seconds
            live.update(produced)
            if observer is not None:
                observer(index, seconds, live)
            results.update(fresh)
            results.update(
                {n: self._runtime.unwrap(t) for n, t in produced.items() if n in self._outputs and n not in fresh}
            )
            for name in self._drops[index]:
                live.pop(name, None)
        return {value.name: results[value.name] for value in self.manifest.outputs}

    def stats(self) -> dict[str, Any]:
        """What happened since open, in counts, seconds and bytes, and what the chain takes. A new dict each time."""
        return {
            "sweeps": self._sweeps,
            "bytes_read": self._loader.bytes_read,
            "stall_seconds": self._stall_seconds,
            "execute_seconds": self._execute_seconds,
            "read_seconds": self._loader.read_seconds,
            "arena_bytes": self._supply.arena.size,
            "resident_bytes": self._supply.resident_bytes,
            "activation_bytes": self.footprint.activations,
            "scratch_bytes": self.footprint.scratch,
            "engine_bytes": self.footprint.engines,
            "budget_bytes": self._budget,
            "floor_bytes": self.footprint.floor,
            "blocks": len(self._blocks),
            "mode": self._supply.mode,
            "fallbacks": self._fallbacks(),
        }

    def close(self) -> None:
        """Stop the loader, let a running inference end with ClosedError, and give all memory back. May be called from
        any thread, more than once; when it returns, nothing of the chain is in memory. Called by the thread that runs
        an inference, from a signal handler, it returns at once and the inference gives the memory back as it ends; in a
        forked process it does nothing."""
        self._closing = True
        if os.getpid() != self._process:
            return
        self._loader.stop()
        if self._runner == threading.get_ident():
            self._release_after_run = True
            return
        with self._turn:
            self._release()

    def _release(self) -> None:
        """Give everything back; the caller has the turn."""
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        self._supply.close()
        self._activations = None
        gc.collect()
        self._runtime.close()

    def __enter__(self) -> Chain:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note_size(self, arrays: Mapping[str, Array]) -> None:
        """Say, once, that an input is larger than those at which memory was measured."""
        for name, shape in self.manifest.memory.shapes.items():
            array = arrays.get(name)
            if self._oversize or array is None or all(a <= b for a, b in zip(array.shape, shape, strict=False)):
                continue
            self._oversize.append(
                f"the input {name!r} of {format_shape(array.shape)} is larger than {format_shape(shape)}, at which "
                f"memory was measured: the budget may be exceeded; build with --max-shape {name}:..."
            )
            log.warning("chain %s: %s", self.manifest.name, self._oversize[0])

    def _fallbacks(self) -> list[str]:
        return [*self._notes, *self._runtime.fallbacks, *self._supply.fallbacks, *self._oversize]

    def _place_activations(self) -> tuple[Array, dict[str, Any]]:
        """One buffer for all activations of known size, and the backend's tensors over it by name."""
        last = {name: index for index, names in enumerate(self._drops) for name in names}
        produced = [
            (value, index)
            for index, block in enumerate(self._blocks)
            for value in block.outputs
            if value.name in self._static and value.name not in self._outputs
        ]
        lifetimes = [Lifetime(_nbytes(v) or 0, index, last.get(v.name, index)) for v, index in produced]
        offsets, size = pack(lifetimes)
        memory = np.zeros(size, np.uint8)
        buffers = {}
        for (value, _), offset in zip(produced, offsets, strict=True):
            array = memory[offset : offset + (_nbytes(value) or 0)].view(value.dtype).reshape(_shape(value))
            buffers[value.name] = self._runtime.wrap(array)
        return memory, buffers


def _close_behind(supply: Supply, turn: AbstractContextManager[Any], process: int) -> None:
    """Close what a chain owned that nobody holds any more, or that is open as the interpreter ends: then a thread that
    still runs it is waited for. One of the loader's own threads may have found it, in the middle of a read. A forked
    process has none of these threads, and leaves it to its parent."""
    if os.getpid() != process:
        return
    if supply.loader.owns_this_thread():
        arguments = (supply, turn, process)
        threading.Thread(target=_close_behind, args=arguments, name="trt-layering-close").start()
        return
    supply.loader.stop()
    with turn:
        supply.close()


def _require_fit(folder: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Raise ForeignError unless the chain's engines were prepared for this library and this machine."""
    built, here = manifest.backend, runtime.version()
    if built.version != here:
        raise ForeignError(
            f"the chain was built by {built.name} {built.version} and this machine has {here}",
            where=str(folder), remedy=rebuild_remedy(folder),
        )  # fmt: skip
    fingerprint = runtime.fingerprint()
    if manifest.optimised and built.fingerprint != fingerprint:
        theirs = ", ".join(f"{key} {value}" for key, value in built.fingerprint.items())
        ours = ", ".join(f"{key} {value}" for key, value in fingerprint.items())
        raise ForeignError(
            f"the chain was built for another machine ({theirs}); this one has {ours}",
            where=str(folder), remedy=rebuild_remedy(folder),
        )  # fmt: skip


def _static_outputs(inputs: Sequence[Value], blocks: Sequence[Block]) -> dict[str, Value]:
    """Activations of known size by name. Where an input's size varies there are none: what a file declares of values
    behind it need not hold for the next input."""
    if any(_nbytes(value) is None for value in inputs):
        return {}
    return {value.name: value for block in blocks for value in block.outputs if _nbytes(value) is not None}


def _last_uses(blocks: Sequence[Block]) -> list[list[str]]:
    """For each block the names that nothing uses after it."""
    last: dict[str, int] = {}
    for index, block in enumerate(blocks):
        last.update({value.name: index for value in (*block.outputs, *block.inputs)})
    drops: list[list[str]] = [[] for _ in blocks]
    for name, index in last.items():
        drops[index].append(name)
    return drops


def _nbytes(value: Value) -> int | None:
    """Bytes of a value whose shape is known and whose dtype numpy has; None for others."""
    if value.shape is None or not all(isinstance(dim, int) for dim in value.shape):
        return None
    try:
        dtype = np.dtype(value.dtype)
    except TypeError:
        return None
    return math.prod(_shape(value)) * dtype.itemsize or None if dtype.isbuiltin == 1 else None


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(dim for dim in value.shape or () if isinstance(dim, int))


def _empty(value: Value) -> Array:
    return np.empty(_shape(value), value.dtype)
