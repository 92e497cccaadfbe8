"""What a chain takes on this machine and this drive: the times of its blocks and extents, and how the drive likes to be
asked.

May import the runtime, the store and the drive. It measures in a child process, which takes at most the chain's floor
and 64 MiB, or what a pass through joined blocks takes if the machine has that to give. Raises what opening, running and
reading raise; the chain on the disk stays as it is until `profile` has all numbers.
"""

from __future__ import annotations

import fcntl
import logging
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trt_layering import backends, child
from trt_layering.backends.base import Progress
from trt_layering.drive import Drive, Reads, search, span_times
from trt_layering.errors import UsageError
from trt_layering.inputs import Feeds, seeded
from trt_layering.interference import slowdowns
from trt_layering.runtime import meter, origin
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.schedules import write_table
from trt_layering.store.manifest import (
    UNMEASURED,
    WEIGHTS_FILE,
    Chain,
    Profile,
    read_manifest,
    resolve,
    write_manifest,
)
from trt_layering.store.reader import WeightFile
from trt_layering.store.writer import disk_errors
from trt_layering.timing import Timed, covers, through, timed, timed_whole
from trt_layering.units import format_size

log = logging.getLogger("trt_layering")

SECONDS = 6.0
"""How long a profile may take, about; more where a few runs take longer."""
_LEAST_SECONDS = 0.12
_TURNS = 2
_BYTES_A_SECOND = 40e6
_MOST_SECONDS = 60.0
_ANY = 1 << 62
_SEED = 0


def profile(
    name: str,
    *,
    repository: str | Path = "engines",
    version: int | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure the newest finished version (or `version`) of chain `name` and keep the profile in its manifest, in the
    place of the one that is there, and schedules made with it; nothing else changes, and open chains go on as they are.

    Takes some seconds. Raises StoreError and its kinds, UsageError where another process profiles the chain, ReadError,
    BackendError, MemoryLimitError, and BuildError where the manifest cannot be written.
    """
    folder, tell = resolve(Path(repository), name, version), progress or _silent
    with _alone(folder):
        chain = read_manifest(folder)
        tell("profile", 0, 1)
        measured = measure(folder, chain)
        chain = msgspec.structs.replace(chain, profile=measured)
        with disk_errors(folder):
            write_manifest(folder, chain)
            write_table(folder, chain)
        tell("profile", 1, 1)
        return measured


def measure(folder: Path, chain: Chain, *, seconds: float = SECONDS) -> Profile:
    """What the chain in `folder` takes here and now, with seeded inputs of the shapes at which its memory was measured,
    in about `seconds`. Writes nothing."""
    task = {"folder": str(folder.absolute()), "chain": msgspec.to_builtins(chain), "seconds": seconds}
    answer = child.call(_measure, task)
    if answer["estimated"]:
        words = "%d joined blocks were not timed, for want of memory or time: each counts as its blocks do"
        log.info(words, answer["estimated"])
    return msgspec.convert(answer["profile"], Profile)


def build_seconds(chain: Chain) -> float:
    """How long a build may measure: less where there is little to measure."""
    return min(SECONDS, _LEAST_SECONDS + chain.weights_bytes / _BYTES_A_SECOND)


def describe(chain: Chain) -> list[tuple[str, str]]:
    """The profile of `chain` as rows of words for people."""
    found = chain.profile
    if not found.execute_seconds:
        return [("profile", "never measured")]
    blocks = sum(found.execute_seconds[: len(chain.blocks)])
    whole = f"; {found.whole_seconds * 1e3:.2f} ms with everything in memory" if found.whole_seconds else ""
    return [
        ("executes in", f"{blocks * 1e3:.2f} ms, without waiting for weights{whole}"),
        (
            "drive reads",
            f"{found.read_rate / 1e6:.0f} MB/s with {found.threads} reads of {format_size(found.read_size)} at once",
        ),
        (
            "at once",
            f"executing takes {found.execute_slowdown:.2f} times as long, reading {found.read_slowdown:.2f} times",
        ),
        ("measured on", f"{origin.words(found.machine)}; {found.drive}" if found.machine else "an unknown machine"),
    ]


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two at once would disturb each other, and write one file."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "wait until it has finished"
            raise UsageError("another process profiles this chain", where=str(folder), remedy=remedy) from error
        yield
    finally:
        os.close(descriptor)


def _measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the child."""
    chain = msgspec.convert(task["chain"], Chain)
    backends.share_threads(chain)
    feeds = seeded(chain.inputs, chain.memory.shapes, _SEED)
    found = measure_here(Path(task["folder"]), chain, feeds, task["seconds"])
    return {"profile": msgspec.to_builtins(found.profile), "estimated": len(chain.joined) - len(found.executed)}


# ------------------------------------------------------------------------------------------- in the measuring process


@dataclass(frozen=True)
class Found:
    """A chain's profile; which of its joined blocks were executed for it, the others counting as their blocks do; the
    most bytes that going through joined blocks took beside arena and engines; and the outputs of each pass through
    them."""

    profile: Profile
    executed: list[int]
    beside: int
    outputs: list[Feeds]


def measure_here(folder: Path, chain: Chain, feeds: Feeds, seconds: float, room: int = _ANY) -> Found:
    """The profile of `chain` in `folder`, run on `feeds`, in about `seconds`.

    The times of joined blocks are taken where a pass through them fits into `room` bytes, and into what the machine has
    to give, and as long as no minute has gone; the others count as their blocks do.
    """
    times, passes = _time_parts(folder, chain, feeds, seconds / 2, room)
    blocks = len(chain.blocks)
    execute = [times[index] for index in range(blocks)]
    for index, part in enumerate(chain.joined, blocks):
        execute.append(times.get(index, sum(execute[part.first : part.first + part.count])))
    measured = msgspec.structs.replace(
        UNMEASURED, execute_seconds=tuple(execute), machine=origin.machine(), drive=origin.drive(folder)
    )
    if chain.extents:
        measured = _with_drive(folder, chain, feeds, measured, seconds)
    whole = _time_whole(folder, chain, feeds, measured, seconds / 4, room)
    measured = msgspec.structs.replace(measured, whole_seconds=whole)
    beside, outputs = max((one.beside for one in passes), default=0), [one.outputs for one in passes]
    return Found(measured, sorted(index - blocks for index in times if index >= blocks), beside, outputs)


def _time_parts(
    folder: Path, chain: Chain, feeds: Feeds, seconds: float, room: int
) -> tuple[dict[int, float], list[Timed]]:
    """The seconds of parts by their index in `Chain.parts`, of those that could be executed, and the passes through
    joined ones. Single and joined blocks take turns, and the least of a part's times counts: what else the machine did
    meanwhile must not decide between them."""
    times: dict[int, float] = {}
    passes, end = [], time.perf_counter() + _MOST_SECONDS
    single = list(range(len(chain.blocks)))
    ways = [single, *covers(chain.joined, len(chain.blocks))]
    turns = ways * (_TURNS if seconds > _LEAST_SECONDS else 1)
    for way in turns:
        passing, room_now = through(chain, way), min(room, meter.available_bytes() or _ANY)
        if way is single or (time.perf_counter() < end and Footprint.of(passing).floor <= room_now):
            done = timed(folder, passing, feeds, seconds / len(turns))
            passes += [] if way is single else [done]
            times.update({i: min(s, times.get(i, s)) for i, s in zip(way, done.seconds, strict=True)})
    return times, passes


def _time_whole(folder: Path, chain: Chain, feeds: Feeds, measured: Profile, seconds: float, room: int) -> float:
    """The seconds of a run with everything in memory, where engines then lay it out as they like best; 0 where that
    takes more than `room` bytes, than the machine has to give, or than a minute to load and to run twice."""
    takes = chain.weights_bytes / max(measured.read_rate, 1.0) + 2 * sum(measured.execute_seconds[: len(chain.blocks)])
    fits = Footprint.of(chain).resident <= min(room, meter.available_bytes() or _ANY)
    return timed_whole(folder, chain, feeds, seconds) if chain.optimised and fits and takes < _MOST_SECONDS else 0.0


def _with_drive(folder: Path, chain: Chain, feeds: Feeds, measured: Profile, seconds: float) -> Profile:
    """`measured` with what the drive does by itself and what it and the blocks do to each other."""
    spans = [(extent.offset, extent.length) for extent in chain.extents]
    with closing(WeightFile(folder / WEIGHTS_FILE)) as file, Reads(file, spans) as reads:
        enough = Drive(file.direct, file.fallback, search(reads.rate, spans, seconds / 3)).enough
        read = partial(reads.rate, enough.threads, enough.read_bytes)
        chosen = replace(enough, bytes_per_second=statistics.median(read(seconds / 36) for _ in range(3)))
        each = span_times(reads, chosen, seconds / 6)
        rate = chosen.bytes_per_second
    executing, reading = slowdowns(folder, chain, feeds, measured.execute_seconds, rate, seconds / 6)
    return msgspec.structs.replace(
        measured, read_seconds=tuple(each), read_rate=chosen.bytes_per_second, threads=chosen.threads,
        read_size=chosen.read_bytes, execute_slowdown=executing, read_slowdown=reading,
    )  # fmt: skip
