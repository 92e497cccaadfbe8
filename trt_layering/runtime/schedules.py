"""The table of schedules that lies beside a chain's manifest: which for which arena, and where the chain's numbers come
from.

May import the schedule, the manifest and msgspec. A table that is missing, damaged, cannot be read or was made for
another profile is made again in memory, which takes seconds for long chains, and that is said in words; no table can
make a chain fail.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from trt_layering.errors import LayeringError
from trt_layering.schedule import layouts
from trt_layering.schedule.partition import Partition, Piece
from trt_layering.schedule.residency import Schedule
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import Choice, Table, choose, keep_all, make_table, rate
from trt_layering.store.manifest import SCHEDULES_FILE, Chain, Part, open_plain, sync_folder

LIMIT = 16 << 20
"""A larger file is no table."""

_KIND = 2
"""Counted up when tables are made otherwise, so that older ones are made again."""

_MADE_NOW = (
    f"{SCHEDULES_FILE} is missing, damaged or not of this chain's profile: its schedules were made again, as they will "
    "be each time; `profile` writes it anew"
)

Mode = Literal["auto", "sequential", "double"]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """`digest` is of the bytes of `table`, `made_for` of all that it was made from."""

    digest: str
    made_for: str
    table: msgspec.Raw


@dataclass(frozen=True)
class Scheduled:
    """What a chain executes, in order, and the schedule of its reads, with its prediction; `fallback` says in words
    what could not be had as asked. `choice` is among those of `partition`."""

    parts: tuple[Part, ...]
    choice: Choice
    partition: Partition
    schedule: Schedule
    fallback: str | None


def partition(chain: Chain) -> Partition:
    """`chain` as numbers. A block that reads rows takes no arena; what was not timed takes no time."""
    parts = chain.parts
    seconds = chain.profile.execute_seconds or (0.0,) * len(parts)
    return Partition(
        tuple(
            Piece(part.first, part.count, _extents(chain, part), time)
            for part, time in zip(parts, seconds, strict=True)
        )
    )


def _extents(chain: Chain, part: Part) -> tuple[tuple[int, int], ...]:
    if part.block.rows is not None:
        return ()
    return tuple((index, chain.extents[index].length) for index in part.block.extents)


def pace(chain: Chain) -> Pace:
    """How fast the profile's machine and drive are, in seconds, and how the drive is asked."""
    profile = chain.profile
    byte_time = 1 / max(profile.read_rate, 1.0)
    return Pace(
        byte_time, profile.execute_slowdown, profile.read_slowdown, _first_read(chain, byte_time), profile.read_size
    )


def _first_read(chain: Chain, byte_time: float) -> float:
    """How many seconds longer an extent takes by itself than among others; 0 where that was not measured."""
    times = zip(chain.extents, chain.profile.read_seconds, strict=False)
    longer = [max(0.0, seconds - extent.length * byte_time) for extent, seconds in times]
    return statistics.median(longer) if longer else 0.0


def write_table(folder: Path, chain: Chain) -> Table:
    """Make the table for `chain` and write it to `folder`; at no moment is a part of it there. Raises OSError."""
    whole, speed = partition(chain), pace(chain)
    table = make_table(whole, speed)
    raw = msgspec.json.encode(table)
    content = _File(xxhash.xxh3_128_hexdigest(raw), _digest(whole, speed), msgspec.Raw(raw))
    draft = folder / f"{SCHEDULES_FILE}.draft"
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(content))
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, folder / SCHEDULES_FILE)
    sync_folder(folder)
    return table


def read_table(folder: Path, chain: Chain) -> tuple[Table, str | None]:
    """The table for `chain`, from `folder` or else made now, and why it was made now. Every choice of it can be
    taken."""
    whole, speed = partition(chain), pace(chain)
    found = _stored(folder / SCHEDULES_FILE, _digest(whole, speed))
    if found is not None and _fits(found, whole):
        return found, None
    return make_table(whole, speed), _MADE_NOW


def _stored(path: Path, made_for: str) -> Table | None:
    """What is written in `path`, if that was made from what has the digest `made_for`, and is as it was written."""
    try:
        with open(open_plain(path), "rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            return None
        found = msgspec.json.decode(data, type=_File)
        if found.made_for != made_for or found.digest != xxhash.xxh3_128_hexdigest(bytes(found.table)):
            return None
        return msgspec.json.decode(found.table, type=tuple[Choice, ...])
    except (OSError, LayeringError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _digest(whole: Partition, speed: Pace) -> str:
    """Of all that a table is made from."""
    numbers = [(piece.first, piece.count, piece.extents, piece.execute) for piece in whole.pieces]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([_KIND, numbers, speed]))


def _fits(table: Table, whole: Partition) -> bool:
    """Whether there is a choice for any arena, and each is one that could have been made."""
    if not table or table[0].arena_bytes > whole.floor:
        return False
    if not all(a.arena_bytes < b.arena_bytes and a.seconds >= b.seconds for a, b in pairwise(table)):
        return False
    sizes = [(piece.first, piece.count, piece.nbytes) for piece in whole.pieces]
    return all(_sound(choice, sizes, whole.blocks) for choice in table)


def _sound(choice: Choice, sizes: Sequence[tuple[int, int, int]], blocks: int) -> bool:
    """Whether `choice` executes all `blocks` in order and keeps to its arena; `sizes` are the first block of each
    piece, their count and bytes."""
    at = total = 0
    if len(choice.parts) != len(choice.offsets) or not 0 <= choice.seconds < inf:
        return False
    for index, offset in zip(choice.parts, choice.offsets, strict=True):
        if not 0 <= index < len(sizes):
            return False
        first, count, nbytes = sizes[index]
        if first != at or offset < 0 or offset % layouts.PAGE or offset + nbytes > choice.arena_bytes:
            return False
        at += count
        total += nbytes
    streams = 0 <= choice.streamed_bytes <= total
    return at == blocks and streams and choice.resident_bytes + choice.streamed_bytes == total


def scheduled(folder: Path, chain: Chain, arena_bytes: int, read_size: int, mode: Mode) -> Scheduled:
    """What to execute and read in an arena of at most `arena_bytes`, requests being at most `read_size` bytes: the
    best that is known ("auto"), one block at a time ("sequential"), or two halves in turn ("double"), for which the
    floor may be too small, which is then said. Where the arena also holds all tables, they are loaded, not read by
    rows. Raises ValueError under the floor."""
    if mode == "auto" and loads_tables(chain) and arena_bytes >= chain.loaded_bytes:
        return all_loaded(chain, read_size)
    whole = partition(chain)
    fallback = None
    if mode == "auto":
        table, fallback = read_table(folder, chain)
        choice = choose(table, arena_bytes)
    else:
        lengths = [piece.nbytes for piece in whole.pieces[: whole.blocks]]
        halves = layouts.double_buffer(lengths, arena_bytes) if mode == "double" else None
        if mode == "double" and halves is None:
            fallback = "the arena does not hold two of the largest blocks: one block at a time"
        choice = rate(whole, tuple(range(whole.blocks)), halves or (0,) * whole.blocks, pace(chain))
    parts: Sequence[Part] = chain.parts
    chosen = tuple(parts[index] for index in choice.parts)
    return Scheduled(chosen, choice, whole, choice.schedule(whole.pieces, read_size), fallback)


def loads_tables(chain: Chain) -> bool:
    """Whether there are tables that are read by rows, unless there is an arena for everything."""
    return any(block.rows is not None for block in chain.blocks)


def all_loaded(chain: Chain, read_size: int) -> Scheduled:
    """Every block with all its weights, tables too, in a place of its own."""
    blocks = tuple(msgspec.structs.replace(block, rows=None) for block in chain.blocks)
    chain = msgspec.structs.replace(chain, blocks=blocks)
    whole = partition(chain)
    choice = keep_all(whole, tuple(range(whole.blocks)), pace(chain))
    return Scheduled(chain.parts[: whole.blocks], choice, whole, choice.schedule(whole.pieces, read_size), None)
