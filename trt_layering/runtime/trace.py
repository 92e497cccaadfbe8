"""A recording of what an open chain does: each read, wait and execution, to be drawn or looked at in ui.perfetto.dev.

May import errors, the pace and the manifest's constants. Recording takes no lock and never fails; one that is full
drops what comes later and says so. A file that cannot be written raises UsageError or LayeringError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trt_layering.errors import LayeringError, UsageError
from trt_layering.runtime.pace import Stretch
from trt_layering.store.manifest import PAGE

_PROCESS = 1
_EXECUTION = 0
"""The track of waits and executions; loader thread n has track n + 1."""


@dataclass(frozen=True, slots=True)
class Event:
    """`Event(kind, block, sweep, begin, end, bytes)`: one read, wait or execution, from `begin` to `end` in seconds of
    `time.perf_counter`.

    `kind` is "read", "wait" (for weights) or "execute"; `block` is the index of the block as the chain executes them,
    `sweep` the number of the sweep that it is for, counted from 0; `bytes` are those that a read brought, else 0.
    `request` is the place in the wave of what is executed.
    """

    kind: Literal["read", "wait", "execute"]
    block: int
    sweep: int
    begin: float
    end: float
    bytes: int
    request: int = 0


@dataclass(frozen=True, slots=True)
class ReadEvent(Event):
    """A read by loader thread number `thread` of `length` bytes at `offset` of extent `extent`, to byte `target` of the
    arena. `completes`: the block could execute once it had arrived. One that failed has brought 0 bytes."""

    extent: int = 0
    offset: int = 0
    target: int = 0
    length: int = 0
    thread: int = 0
    completes: bool = False


class Trace:
    """What one chain does from the moment it is opened, with `open_chain(..., trace=Trace())`.

    It keeps the first `most` events and no later ones: some 300 bytes each, which no budget counts. Any thread may add
    and look at any time. `blocks` are the names of the blocks, `arena_bytes` the size of the arena, once it is open.
    """

    def __init__(self, most: int = 50_000) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise UsageError(f"a trace keeps 1 event or more, not {most!r}", remedy="give a number like 50000, or none")
        self._most = most
        self._full = False
        self._events: list[Event] = []
        self._slowdowns: list[Stretch] = []
        self.chain = ""
        self.blocks: tuple[str, ...] = ()
        self.arena_bytes = 0

    @property
    def events(self) -> list[Event]:
        """All reads, waits and executions so far, by when they ended: a list of the caller's own."""
        return list(self._events)

    @property
    def slowdowns(self) -> list[Stretch]:
        """Each stretch of reads that the drive was slow at: a list of the caller's own."""
        return list(self._slowdowns)

    @property
    def note(self) -> str | None:
        """In words, what the recording lacks, if anything."""
        return f"the trace ends after {self._most} events; later ones were not recorded" if self._full else None

    def open(self, chain: str, blocks: Sequence[str], arena_bytes: int) -> None:
        """Begin the recording of a chain. UsageError if it records another already."""
        if self.blocks:
            raise UsageError(
                f"the trace records the chain {self.chain!r} already", remedy="give each chain that is opened its own"
            )
        self.chain, self.blocks, self.arena_bytes = chain, tuple(blocks), arena_bytes

    def add(self, event: Event) -> None:
        """Keep `event`, if there is room."""
        if len(self._events) < self._most:
            self._events.append(event)
        else:
            self._full = True

    def add_slowdown(self, stretch: Stretch) -> None:
        """Keep `stretch`, if there is room."""
        if len(self._slowdowns) < self._most:
            self._slowdowns.append(stretch)

    def chrome(self) -> dict[str, Any]:
        """The recording in the JSON form of Chrome's traces, times in microseconds from its first event on."""
        events, slowdowns = self.events, self.slowdowns
        origin = min((*(event.begin for event in events), *(slow.end for slow in slowdowns)), default=0.0)
        drawn = [
            *(_slice(event, self.blocks, origin) for event in events),
            *_flows(events, origin),
            *_loaded(events, self.arena_bytes, origin),
            *(_instant(slow, origin) for slow in slowdowns),
        ]
        drawn.sort(key=lambda one: float(one["ts"]))
        told = {"chain": self.chain, "arena_bytes": self.arena_bytes, "blocks": len(self.blocks)}
        return {
            "traceEvents": [*_names(events, self.chain), *drawn],
            "displayTimeUnit": "ms",
            "otherData": {**told, "note": self.note or "everything was recorded"},
        }

    def write(self, path: str | Path) -> None:
        """Write `chrome()` to `path`, all of it or nothing. UsageError for a path that is none, LayeringError where
        the file cannot be written."""
        target = writable(path)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("w", encoding="utf-8") as file:
                json.dump(self.chrome(), file, separators=(",", ":"), allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            what = f"the trace cannot be written: {error.strerror or error}"
            remedy = "free some disk space, or name another file"
            raise LayeringError(what, where=str(target), remedy=remedy) from error
        finally:
            with suppress(OSError):
                part.unlink()


def writable(path: str | Path) -> Path:
    """`path` without links, if a trace can be written there as far as can be seen beforehand. UsageError if not."""
    try:
        target = Path(path).resolve()
        there, folder = target.exists(), target.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, zero bytes
        raise UsageError(f"no file can be called that: {error}", where=str(path), remedy="name another") from None
    if there and not target.is_file():
        raise UsageError(f"{str(target)!r} is no plain file", where=str(path), remedy="name a .json file")
    if not folder:
        remedy = "make it, or name another"
        raise UsageError(f"there is no folder {str(target.parent)!r}", where=str(path), remedy=remedy)
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise UsageError(f"nothing may be written to {str(target.parent)!r}", where=str(path), remedy="name another")
    return target


def _names(events: Sequence[Event], chain: str) -> Iterator[dict[str, Any]]:
    threads = sorted({event.thread for event in events if isinstance(event, ReadEvent)})
    tracks = {_EXECUTION: "execution", **{thread + 1: f"loader {thread}" for thread in threads}}
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": f"chain {chain}"}}
    for track, name in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": track, "args": {"sort_index": track}}


def _slice(event: Event, blocks: Sequence[str], origin: float) -> dict[str, Any]:
    """The box of one event on its track."""
    said: dict[str, Any] = {"block": event.block, "sweep": event.sweep}
    if isinstance(event, ReadEvent):
        said |= {"extent": event.extent, "offset": event.offset, "bytes": event.bytes, "failed": not event.bytes}
    elif event.kind == "execute":
        said["request"] = event.request
    words = {"read": "read ", "wait": "wait for ", "execute": ""}[event.kind]
    begin, end = _microseconds(event.begin, origin), _microseconds(event.end, origin)
    return {
        "ph": "X", "name": f"{words}{blocks[event.block]}", "cat": event.kind, "pid": _PROCESS, "tid": _track(event),
        "ts": begin, "dur": round(end - begin, 3), "args": said,
    }  # fmt: skip


def _flows(events: Sequence[Event], origin: float) -> Iterator[dict[str, Any]]:
    """An arrow from the read that completed a block to the first execution that used what it brought."""
    completed: dict[tuple[int, int], ReadEvent] = {}
    number = 0
    for event in events:
        key = (event.sweep, event.block)
        if isinstance(event, ReadEvent):
            if event.completes:
                completed[key] = event
        elif event.kind == "execute" and key in completed:
            number += 1
            for end, one in (("s", completed.pop(key)), ("f", event)):
                yield {
                    "ph": end, "name": "loaded", "cat": "weights", "id": number, "pid": _PROCESS, "tid": _track(one),
                    "ts": _microseconds(one.begin, origin), **({"bp": "e"} if end == "f" else {}),
                }  # fmt: skip


def _loaded(events: Sequence[Event], arena_bytes: int, origin: float) -> Iterator[dict[str, Any]]:
    """How many bytes of the arena hold weights: a read that arrives adds its own, and one that begins takes away those
    that it overwrites."""
    holds = np.zeros(-(-arena_bytes // PAGE), np.bool_)
    reads = [event for event in events if isinstance(event, ReadEvent)]
    steps = [(read.begin, order, False) for order, read in enumerate(reads)]
    steps += [(read.end, order, bool(read.bytes)) for order, read in enumerate(reads)]
    pages = 0
    for when, order, arrived in sorted(steps):
        first, length = reads[order].target // PAGE, -(-reads[order].length // PAGE)
        place = holds[first : first + length]
        pages += (length if arrived else 0) - int(np.count_nonzero(place))
        place[:] = arrived
        ts = _microseconds(when, origin)
        yield {
            "ph": "C", "name": "weights in the arena", "pid": _PROCESS, "tid": 0, "ts": ts,
            "args": {"bytes": pages * PAGE},
        }  # fmt: skip


def _instant(slow: Stretch, origin: float) -> dict[str, Any]:
    said = {"bytes_per_second": round(slow.rate), "usual": round(slow.usual)}
    return {
        "ph": "i", "name": "slow drive", "cat": "drive", "s": "p", "pid": _PROCESS, "tid": 0,
        "ts": _microseconds(slow.end, origin), "args": said,
    }  # fmt: skip


def _track(event: Event) -> int:
    return event.thread + 1 if isinstance(event, ReadEvent) else _EXECUTION


def _microseconds(when: float, origin: float) -> float:
    """To the nanosecond, which is what Perfetto keeps."""
    return round((when - origin) * 1e6, 3)
