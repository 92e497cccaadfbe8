"""A built chain at work: engines executed in turn over weights that the loader brings.

May import the store, the schedule and, through `backends`, one backend. Every failure is one of our errors; after an
error the chain can be used again, unless its store is corrupt or it was closed.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args

import numpy as np

from trt_layering import backends
from trt_layering.backends.base import Buffers, Mark, Runtime
from trt_layering.errors import ClosedError, ForeignError, InputError, MemoryLimitError, UsageError
from trt_layering.runtime.activations import Packing, empty, last_uses, static_outputs
from trt_layering.runtime.feeds import checked
from trt_layering.runtime.footprint import USUAL_WAVE, Footprint, checked_wave
from trt_layering.runtime.gate import Lane
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.origin import measured_elsewhere
from trt_layering.runtime.schedules import Mode, Scheduled, scheduled
from trt_layering.runtime.supply import Supply, keep, stream
from trt_layering.runtime.trace import Event, Trace
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import Chain as Manifest
from trt_layering.store.manifest import Value, read_manifest, rebuild_remedy, resolve
from trt_layering.units import format_size, parse_size

log = logging.getLogger("trt_layering")

_UNPLANNED_PERCENT, _UNPLANNED = 5, 8 << 20
"""How much more than planned a device may give before that is told."""

Array = np.ndarray[Any, Any]
Found = TypeVar("Found")
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
    wave: int = 1,
    trace: Trace | None = None,
    lane: Lane | None = None,
) -> Chain:
    """Open the newest finished version (or `version`) of chain `name`, ready to run within `budget` bytes.

    The budget covers weights, activations, scratch and engines, as measured when the chain was built; None keeps
    everything in memory. Loading begins at once, in the background; with a budget that holds everything, it is done
    when this returns. Each engine has a thread pool of its own, unless the process asked for one with
    `share_thread_pool`. The arena leaves room in the budget for waves of `wave` requests, see `Chain.run_many`, which
    raises the floor. `trace` records what the chain does. `mode` is for comparisons: "sequential" loads each block when
    the one before it has executed, "double" is the fixed double buffer, two halves of the arena in turn. `lane`: reads
    take turns with those of other chains, see `gate`.

    Raises NotBuiltError, CorruptError or ForeignError for the store, ReadError for the drive, BudgetError under the
    floor, MemoryLimitError, UsageError for sizes and waves that are none, or a trace that records another chain.
    """
    for what, value, kind in (("loader", loader, LoaderOptions), ("trace", trace, Trace), ("lane", lane, Lane)):
        if value is not None and not isinstance(value, kind):
            raise UsageError(f"{what} cannot be {value!r}", remedy=f"give a {kind.__name__}, or leave it out")
    folder = resolve(Path(repository), name, version)
    with _memory_errors(name):
        options = loader or LoaderOptions()
        manifest = read_manifest(folder)
        chain = Chain(
            folder, manifest, budget=budget, loader=options, mode=mode, wave=wave, trace=trace, lane=lane
        )  # fmt: skip
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


@dataclass
class _Request:
    """One of the requests that a sweep serves: what is alive of it, what its caller gets, and its memory for
    activations."""

    live: dict[str, Any]
    results: dict[str, Array]
    buffers: Buffers


@dataclass
class _Asked:
    """Block number `g` executes, or is to, since `begin`, for the request at `place` in its wave; when `mark` has come,
    it has, and if it `frees` its weights, no other request needs them."""

    g: int
    place: int
    begin: float
    mark: Mark
    frees: bool = False


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
        wave: int = 1,
        trace: Trace | None = None,
        lane: Lane | None = None,
    ) -> None:
        """Opens everything but reads nothing ahead before `start`; `open_chain` is the way in."""
        self.manifest = manifest
        self.footprint = Footprint.of(manifest, wave)
        self._budget = self.footprint.resident if budget is None else parse_size(budget, what="budget")
        arena_bytes = self.footprint.arena(self._budget, manifest)
        backends.check(folder, manifest)
        self._runtime = backends.runtime(manifest)
        with _closed_on_failure(self._runtime):
            _require_fit(folder, manifest, self._runtime)
            scheduled = self._open_engines(folder, arena_bytes, loader.resolved(manifest.profile), mode, trace, lane)
        self._loader = self._supply.loader
        self._trace = trace
        self._turn = threading.RLock()  # a signal handler may close the chain while its thread takes the turn
        self._runner = 0
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _close_behind, self._supply, self._runtime, self._turn, self._process)
        self._notes = {}
        for note in measured_elsewhere(manifest.profile, folder):
            self._notes["profile"] = note
        if scheduled and scheduled.fallback:
            self._notes["schedule"] = scheduled.fallback
        self._predicted = scheduled.choice.seconds if scheduled else manifest.profile.whole_seconds or None
        self._logged: set[str] = set()
        self._asked: deque[_Asked] = deque()
        self._finished_at = 0.0
        self._closing = self._release_after_run = False
        self._closed = False
        self._next = 0
        self._unfinished = False
        self._sweeps = self._requests = 0
        self._stall_seconds = self._execute_seconds = 0.0
        self._compare_with_driver()
        self._tell()
        if trace is not None:
            self._open_trace(trace)

    def _open_engines(
        self,
        folder: Path,
        arena_bytes: int,
        loader: LoaderOptions,
        mode: Mode,
        trace: Trace | None,
        lane: Lane | None,
    ) -> Scheduled | None:
        """Open what executes, and the memory for it."""
        manifest = self.manifest
        if manifest.memory.staging:
            loader = loader.within(manifest.memory.staging)
        scheduled = self._schedule(folder, arena_bytes, loader, mode)
        self._blocks = tuple(part.block for part in scheduled.parts) if scheduled else manifest.whole or manifest.blocks
        # Of known size, so that arrays for the caller can be made before they are written.
        self._static = static_outputs(manifest.inputs, self._blocks) if self._runtime.in_host_memory else {}
        self._ranges = manifest.tensorrt.ranges if manifest.tensorrt else {}
        self._outputs = {value.name for value in manifest.outputs}
        self._drops = last_uses(self._blocks)
        self._made = [[v for v in block.outputs if v.name in self._outputs] for block in self._blocks]
        self._packing = Packing.of(manifest, self._blocks)
        # Of the chain, then of further requests of a wave; a device's memory is taken before the first run.
        self._buffers = [self._new_buffers() for _ in range(1 if self._runtime.in_host_memory else self.footprint.wave)]
        buffers = self._buffers[0].tensors
        if scheduled:
            self._supply = stream(folder, manifest, scheduled, self._runtime, buffers, loader, trace, lane)
        else:
            self._supply = keep(folder, manifest, self._blocks, self._runtime, buffers, loader)
        return scheduled

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

    def _new_buffers(self) -> Buffers:
        packing = self._packing
        return self._runtime.buffers(packing.places, packing.nbytes, packing.ends)

    def start(self) -> None:
        """Begin to load the first blocks."""
        self._loader.start()

    def await_weights(self, block: int) -> None:
        """For an observer: wait until block number `block` of the sweep under way (or the last one, counting on into
        the next) has its weights. Raises what loading raises."""
        self._loader.wait_loaded(self._next - len(self._blocks) + block)

    def pause_reads(self) -> None:
        """For an observer: let the loader read nothing until `resume_reads`; returns when nothing is under way."""
        self._loader.pause()

    def resume_reads(self) -> None:
        """Let the loader read again."""
        self._loader.resume()

    def settle(self) -> None:
        """Between runs: wait until the loader has read ahead as far as it can."""
        self._loader.settle()

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Array]:
        """One inference: arrays for all inputs in, arrays for all outputs out, which the caller owns.

        Raises InputError before any work, ReadError, CorruptError, BackendError or MemoryLimitError from the sweep, and
        ClosedError when the chain is or gets closed.
        """
        return self.observe(feeds, None)

    def observe(self, feeds: Mapping[str, Any], observer: Observer | None) -> dict[str, Array]:
        """`run`, calling `observer` after each block, in this thread."""
        arrays = checked(feeds, self.manifest.inputs, self._ranges)
        self._note_size(arrays)
        [results] = self._in_turn(lambda: self._whole_sweep([arrays], observer))
        return results

    def run_many(self, feeds: Sequence[Mapping[str, Any]], *, wave: int = USUAL_WAVE) -> list[dict[str, Array]]:
        """An inference for each of `feeds`, in waves of up to `wave`, 64 at most: each block executes for all requests
        of a wave while its weights are there, so that these are read once a wave. Returns what `run` returns for each,
        in order and bit for bit; shapes may differ from request to request.

        A wave's activations must fit the budget beside the arena: where that leaves room for fewer, since
        `open_chain(wave=...)` asked for less, waves are smaller, which the log and `stats` say. Answers are the
        caller's from the end of their wave on. Where nothing is streamed, requests run one by one. Other threads get
        their turn between waves.

        Raises UsageError for a wave or a list that is none, and InputError, which names the request, before any work;
        what `run` raises from a sweep ends the whole call.
        """
        asked = _requests(feeds)
        size = min(checked_wave(wave), len(asked))
        for number, one in enumerate(asked):
            self._note_size(self._checked_request(number, one))
        size = min(size, self._room_for(size))
        results: list[dict[str, Array]] = []
        for begin in range(0, len(asked), max(size, 1)):
            numbered = enumerate(asked[begin : begin + size], begin)
            arrays = [self._checked_request(number, one) for number, one in numbered]
            results += self._in_turn(partial(self._whole_sweep, arrays, None))
        return results

    def _checked_request(self, number: int, feeds: Mapping[str, Any]) -> dict[str, Array]:
        try:
            return checked(feeds, self.manifest.inputs, self._ranges)
        except InputError as error:
            where = f"request {number}, {error.where}" if error.where else f"request {number}"
            raise InputError(error.what, where=where, remedy=error.remedy) from error

    def room(self, wanted: int) -> int:
        """How many of `wanted` requests a wave of `run_many` can have: 1 where nothing is streamed."""
        if self._supply.mode == "resident":
            return 1
        spare = self._budget - self.footprint.fixed - self._supply.arena.size
        each = max(self.footprint.request, self._packing.nbytes + self._packing.output_bytes)
        return min(wanted, 1 + spare // each) if each else wanted

    def _room_for(self, wanted: int) -> int:
        """How many requests a wave may have, of `wanted`; says, once, if it is fewer where weights are streamed."""
        room = self.room(wanted)
        if room < wanted and self._supply.mode != "resident":
            self._note(
                "wave",
                f"waves of {wanted} requests were asked for and the budget leaves room for {room}: open the chain with "
                f"wave={wanted}, or give it a larger budget",
            )
        return room

    def _in_turn(self, work: Callable[[], Found]) -> Found:
        """`work`, which makes one sweep, when it is this thread's turn."""
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
                    return work()
            except BaseException:
                self._recover()
                raise
            finally:
                self._runner = 0
                if self._release_after_run:
                    self._release()
                self._tell()

    def _whole_sweep(self, wave: Sequence[dict[str, Array]], observer: Observer | None) -> list[dict[str, Array]]:
        self._unfinished = True
        first, self._next = self._next, self._next + len(self._blocks)
        results = self._sweep(first, wave, observer)
        self._sweeps += 1
        self._requests += len(wave)
        self._unfinished = False
        if self._sweeps == 1:  # engines that come with their weights are there now
            self._compare_with_driver()
        return results

    def _recover(self) -> None:
        """Let the loader leave what the last sweep did not get to, if it did not end, once nothing of it uses weights
        any more: neither what the sweep has marks of, nor what failed before there was one."""
        if self._unfinished:
            self._asked.clear()
            self._runtime.settle()
            self._loader.abandon(self._next)
            self._unfinished = False

    def _sweep(self, first: int, wave: Sequence[dict[str, Array]], observer: Observer | None) -> list[dict[str, Array]]:
        """All blocks in order, each for all requests of `wave`; block numbers begin with `first`."""
        requests = self._begin(wave)
        for index, made in enumerate(self._made):
            fresh = [{v.name: empty(v) for v in made if v.name in self._static} for _ in requests]
            self._await(first + index)
            for place, request in enumerate(requests):
                before = self._execute_seconds
                produced = self._execute(first + index, place, request, fresh[place])
                self._asked[-1].frees = place == len(requests) - 1
                self._finish_all_but(self._runtime.ahead if observer is None else 0)
                request.live.update(produced)
                if observer is not None:
                    observer(index, self._execute_seconds - before, request.live)
                self._settle(index, request, fresh[place], produced)
        self._finish_all_but(0)
        return [{value.name: one.results[value.name] for value in self.manifest.outputs} for one in requests]

    def _finish_all_but(self, newest: int) -> None:
        """Wait for what was asked for, but for so many of the `newest`, and let the loader know."""
        while len(self._asked) > newest:
            asked = self._asked.popleft()
            asked.mark.wait()
            begin, end = max(asked.begin, self._finished_at), time.perf_counter()
            self._finished_at = end
            self._execute_seconds += end - begin
            if asked.frees:
                self._loader.finish(asked.g)
            if self._trace is not None:
                sweep, block = divmod(asked.g, len(self._blocks))
                self._trace.add(Event("execute", block, sweep, begin, end, 0, asked.place))

    def _settle(self, index: int, request: _Request, fresh: Mapping[str, Array], produced: Mapping[str, Any]) -> None:
        """Keep what the caller gets of what block `index` made, and drop what nothing needs after it."""
        for value in self._made[index]:
            name = value.name
            request.results[name] = fresh[name] if name in fresh else self._runtime.unwrap(produced[name])
        for name in self._drops[index]:
            request.live.pop(name, None)

    def _begin(self, wave: Sequence[dict[str, Array]]) -> list[_Request]:
        """The requests of `wave`, each but the first with buffers of its own, which are kept for the next wave."""
        while len(self._buffers) < len(wave):
            self._buffers.append(self._new_buffers())
        requests = []
        for place, arrays in enumerate(wave):
            live = self._runtime.feed(arrays, self._buffers[place])
            results = {name: np.array(array) for name, array in arrays.items() if name in self._outputs}
            requests.append(_Request(live, results, self._buffers[place]))
        return requests

    def _await(self, g: int) -> None:
        """Wait for the weights of block number `g`. What was asked for before may be what they wait for."""
        if not self._loader.has_loaded(g):
            self._finish_all_but(0)
        stall = self._loader.wait_loaded(g)
        self._supply.arena.arrive(g % len(self._blocks))
        self._stall_seconds += stall
        if stall and self._trace is not None:
            now = time.perf_counter()
            sweep, block = divmod(g, len(self._blocks))
            self._trace.add(Event("wait", block, sweep, now - stall, now, 0))

    def _execute(self, g: int, place: int, request: _Request, fresh: Mapping[str, Array]) -> dict[str, Any]:
        """Ask for block number `g` for the request at `place` in the wave; `fresh` are arrays for some outputs."""
        if self._closing:
            raise ClosedError(f"the chain {self.manifest.name!r} was closed while it ran", remedy="open it again")
        index = g % len(self._blocks)
        into = {name: self._runtime.wrap(array) for name, array in fresh.items()}
        if place:  # the first request has the memory that engines were opened with
            own = request.buffers.tensors
            into.update({v.name: own[v.name] for v in self._blocks[index].outputs if v.name in own})
        begin = time.perf_counter()
        produced: dict[str, Any] = self._supply.engines[index].execute(request.live, into)
        self._asked.append(_Asked(g, place, begin, self._runtime.mark()))
        return produced

    @property
    def awaits_drive(self) -> bool:
        """Whether a run waits for a read that the drive has not ended. Takes no lock."""
        return self._supply.awaits_drive

    @property
    def stall_seconds(self) -> float:
        """Seconds that execution has waited for weights."""
        return self._stall_seconds

    def stats(self) -> dict[str, Any]:
        """What happened since open, in counts, seconds and bytes, and what the chain takes. A new dict each time."""
        loaded, read_seconds = self._loader.bytes_read, self._loader.read_seconds
        return {
            "requests": self._requests,
            "sweeps": self._sweeps,
            "bytes_read": self._supply.bytes_read,
            "stall_seconds": self._stall_seconds,
            "execute_seconds": self._execute_seconds,
            "read_seconds": read_seconds,
            "read_rate": loaded / read_seconds if read_seconds else 0.0,
            "slow_reads": self._loader.slow_reads,
            "arena_bytes": self._supply.arena.size,
            "resident_bytes": self._supply.resident_bytes,
            "activation_bytes": self.footprint.activations,
            "scratch_bytes": self.footprint.scratch,
            "engine_bytes": self.footprint.engines,
            "device_bytes": 0 if self._closed else self._runtime.device_bytes(),
            "budget_bytes": self._budget,
            "floor_bytes": self.footprint.floor,
            "blocks": len(self._blocks),
            "mode": self._supply.mode,
            "predicted_seconds": self._predicted,
            "fallbacks": self._fallbacks(),
            **self._supply.row_counts,
        }

    def close(self) -> None:
        """Stop the loader, let a running inference end with ClosedError, and give all memory back. May be called from
        any thread, more than once; when it returns, nothing of the chain is in memory. Called by the thread that runs
        an inference, from a signal handler, it returns at once and the inference gives the memory back as it ends; in a
        forked process it does nothing."""
        self._closing = True
        if os.getpid() != self._process:
            return
        self._loader.interrupt()
        if self._runner == threading.get_ident():
            self._release_after_run = True
            return
        self._loader.stop()  # before the turn, or a drive that hangs would keep it from those who are to be told
        with self._turn:
            self._release()

    def _release(self) -> None:
        """Give everything back; the caller has the turn."""
        if self._closed:
            return
        self._closed = True
        self._recover()  # from a run whose recovery was interrupted
        self._finalizer.detach()
        self._supply.close()
        self._buffers.clear()
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
            if "size" in self._notes or array is None or all(a <= b for a, b in zip(array.shape, shape, strict=False)):
                continue
            self._note(
                "size",
                f"the input {name!r} of {format_shape(array.shape)} is larger than {format_shape(shape)}, at which "
                f"memory was measured: the budget may be exceeded; build with --max-shape {name}:...",
            )

    def _compare_with_driver(self) -> None:
        """Say, once, that a device gave noticeably more than was planned."""
        taken, planned = self._runtime.device_bytes(), self._planned_bytes()
        if taken > planned + max(planned * _UNPLANNED_PERCENT // 100, _UNPLANNED):
            self._note(
                "device",
                f"the GPU gave {format_size(taken)} since the chain began to open, where {format_size(planned)} were "
                "planned: the budget is exceeded, unless other programs took the rest; build the chain again on this "
                "machine",
            )

    def _planned_bytes(self) -> int:
        """What the chain may have taken by now."""
        further = (len(self._buffers) - 1) * self.footprint.request
        if self._supply.mode == "resident":
            return self.footprint.resident + further
        return self.footprint.fixed + self._supply.arena.size + further

    def _note(self, kind: str, words: str) -> None:
        """Keep the first fallback of each `kind`, and say it."""
        self._notes.setdefault(kind, words)
        self._tell()

    def _fallbacks(self) -> list[str]:
        recorded = [self._trace.note] if self._trace is not None and self._trace.note else []
        return [
            *self._runtime.fallbacks,
            *self._supply.fallbacks,
            *self._notes.values(),
            *self._loader.fallbacks,
            *recorded,
        ]

    def _tell(self) -> None:
        """Say in the log what was not said yet."""
        for fallback in self._fallbacks():
            if fallback not in self._logged:
                self._logged.add(fallback)
                log.warning("chain %s: %s", self.manifest.name, fallback)

    def _open_trace(self, trace: Trace) -> None:
        try:
            trace.open(self.manifest.name, [block.name for block in self._blocks], self._supply.arena.size)
        except BaseException:
            self.close()
            raise


@contextmanager
def _closed_on_failure(runtime: Runtime) -> Iterator[None]:
    try:
        yield
    except BaseException:
        runtime.close()
        raise


def _close_behind(supply: Supply, runtime: Runtime, turn: AbstractContextManager[Any], process: int) -> None:
    """Close what a chain owned that nobody holds any more, or that is open as the interpreter ends: then a thread that
    still runs it is waited for. One of the loader's own threads may have found it, in the middle of a read. A forked
    process has none of these threads, and leaves it to its parent."""
    if os.getpid() != process:
        return
    if supply.owns_this_thread():
        arguments = (supply, runtime, turn, process)
        threading.Thread(target=_close_behind, args=arguments, name="trt-layering-close").start()
        return
    supply.loader.stop()
    with turn:
        runtime.settle()  # a run, and its recovery, may have been interrupted
        supply.close()
        runtime.close()


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


def _requests(feeds: Any) -> list[Mapping[str, Any]]:
    """`feeds` as a list; UsageError if they are no sequence of requests."""
    if isinstance(feeds, Sequence) and not isinstance(feeds, (str, bytes, bytearray, memoryview)):
        return list(feeds)
    remedy = "give a list of feeds, [{name: array, ...}, ...]; for one request there is run"
    raise UsageError(f"the feeds of several requests are a list, not {type(feeds).__name__}", remedy=remedy)
