"""The table of schedules that lies beside a chain's manifest: which for which arena, and where the chain's numbers come
from.

May import the schedule, the manifest and msgspec. A table that is missing, damaged or was made for another profile is
made again in memory, which takes seconds for long chains, and that is said in words; no table can make a chain fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from trt_layering.errors import StoreError
from trt_layering.schedule import layouts
from trt_layering.schedule.partition import Partition, Piece
from trt_layering.schedule.residency import Schedule
from trt_layering.schedule.simulate import Pace
from trt_layering.schedule.table import Choice, Table, best_choice, choose, make_table, rate
from trt_layering.store.manifest import SCHEDULES_FILE, Chain, Part, open_plain, sync_folder

_KIND = 1
"""Counted up when tables are made otherwise, so that older ones are made again."""

_MADE_NOW = f"{SCHEDULES_FILE} is missing, damaged or not of this chain's profile: made again when the chain was opened"

Mode = Literal["auto", "sequential", "double"]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    made_for: str
    table: tuple[Choice, ...]


@dataclass(frozen=True)
class Scheduled:
    """What a chain executes, in order, and the schedule of its reads, with its prediction; `fallback` says in words
    what could not be had as asked."""

    parts: tuple[Part, ...]
    choice: Choice
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
    """How fast the profile's machine and drive are, in seconds."""
    profile = chain.profile
    return Pace(1 / max(profile.read_rate, 1.0), profile.execute_slowdown, profile.read_slowdown)


def write_table(folder: Path, chain: Chain) -> Table:
    """Make the table for `chain` and write it to `folder`; at no moment is a part of it there. Raises OSError."""
    whole, speed = partition(chain), pace(chain)
    table = make_table(whole, speed)
    draft = folder / f"{SCHEDULES_FILE}.draft"
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(_File(_digest(whole, speed), table)))
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, folder / SCHEDULES_FILE)
    sync_folder(folder)
    return table


def read_table(folder: Path, chain: Chain) -> tuple[Table, str | None]:
    """The table for `chain`, from `folder` or else made now, and why it was made now."""
    whole, speed = partition(chain), pace(chain)
    try:
        with open(open_plain(folder / SCHEDULES_FILE), "rb") as file:
            found = msgspec.json.decode(file.read(), type=_File)
    except (OSError, StoreError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        found = None
    if found is not None and found.made_for == _digest(whole, speed) and _fits(found.table, whole):
        return found.table, None
    return make_table(whole, speed), _MADE_NOW


def _digest(whole: Partition, speed: Pace) -> str:
    """Of all that a table is made from."""
    numbers = [(piece.first, piece.count, piece.extents, piece.execute) for piece in whole.pieces]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([_KIND, numbers, speed]))


def _fits(table: Table, whole: Partition) -> bool:
    """Whether there is a choice for any arena; each is looked at when it is taken."""
    ascending = all(a.arena_bytes < b.arena_bytes for a, b in pairwise(table))
    return bool(table) and ascending and table[0].arena_bytes <= whole.floor


def _sound(choice: Choice, parts: Partition) -> bool:
    """Whether `choice` executes all blocks in order and keeps to its arena."""
    at = 0
    if len(choice.parts) != len(choice.offsets):
        return False
    for index, offset in zip(choice.parts, choice.offsets, strict=True):
        if not 0 <= index < len(parts.pieces) or parts.pieces[index].first != at:
            return False
        if offset < 0 or offset % layouts.PAGE or offset + parts.pieces[index].nbytes > choice.arena_bytes:
            return False
        at += parts.pieces[index].count
    return at == parts.blocks


def scheduled(folder: Path, chain: Chain, arena_bytes: int, read_size: int, mode: Mode) -> Scheduled:
    """What to execute and read in an arena of at most `arena_bytes`, requests being at most `read_size` bytes: the
    best that is known ("auto"), one block at a time ("sequential"), or two halves in turn ("double"), for which the
    floor may be too small, which is then said. Where the arena also holds all tables, they are loaded, not read by
    rows. Raises ValueError under the floor."""
    tables = mode == "auto" and any(block.rows is not None for block in chain.blocks)
    if tables and arena_bytes >= chain.loaded_bytes:
        return _all_loaded(chain, read_size)
    whole = partition(chain)
    fallback = None
    if mode == "auto":
        table, fallback = read_table(folder, chain)
        choice = choose(table, arena_bytes)
        if not _sound(choice, whole):
            choice, fallback = best_choice(whole, arena_bytes, pace(chain)), _MADE_NOW
    else:
        lengths = [piece.nbytes for piece in whole.pieces[: whole.blocks]]
        halves = layouts.double_buffer(lengths, arena_bytes) if mode == "double" else None
        if mode == "double" and halves is None:
            fallback = "the arena does not hold two of the largest blocks: one block at a time"
        choice = rate(whole, tuple(range(whole.blocks)), halves or (0,) * whole.blocks, pace(chain))
    parts: Sequence[Part] = chain.parts
    chosen = tuple(parts[index] for index in choice.parts)
    return Scheduled(chosen, choice, choice.schedule(whole.pieces, read_size), fallback)


def _all_loaded(chain: Chain, read_size: int) -> Scheduled:
    """Every block with all its weights, tables too, in a place of its own."""
    blocks = tuple(msgspec.structs.replace(block, rows=None) for block in chain.blocks)
    chain = msgspec.structs.replace(chain, blocks=blocks)
    whole = partition(chain)
    lengths = [piece.nbytes for piece in whole.pieces[: whole.blocks]]
    choice = rate(whole, tuple(range(whole.blocks)), layouts.ring(lengths, sum(lengths)), pace(chain))
    return Scheduled(chain.parts[: whole.blocks], choice, choice.schedule(whole.pieces, read_size), None)
