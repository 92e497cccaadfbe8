"""Which blocks are executed as one: a chain's blocks and its joined blocks as numbers, and ways to cover the chain.

Pure; imports nothing. Joined blocks spare seams, so executing them is quicker; single ones leave more places where
reading may go on. Blocks that stay in memory together gain nothing by being apart.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True)
class Piece:
    """An engine for `count` blocks from `first` on: its extents in arena order, as (index, length in bytes), and the
    time that it executes."""

    first: int
    count: int
    extents: tuple[tuple[int, int], ...]
    execute: float

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the arena."""
        return sum(length for _, length in self.extents)


Cover = tuple[int, ...]
"""Indices of pieces that execute every block once, in order."""


class Partition:
    """All `pieces` of a chain, in any order, and how many `blocks` they are cut from."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = pieces
        self.blocks = sum(piece.count == 1 for piece in pieces)
        self._starts: list[list[int]] = [[] for _ in range(self.blocks)]
        for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].count):
            self._starts[pieces[index].first].append(index)

    @property
    def floor(self) -> int:
        """The smallest arena, in bytes: the largest single block."""
        return max((piece.nbytes for piece in self.pieces if piece.count == 1), default=0)

    @property
    def total(self) -> int:
        """Bytes of an arena that holds all blocks."""
        return sum(piece.nbytes for piece in self.pieces if piece.count == 1)

    def covers(self) -> list[Cover]:
        """From the single blocks to the largest joined ones: covers of pieces up to some size."""
        found = {self.cover(range(self.blocks), 0): None}
        size, most = self.floor, max((piece.nbytes for piece in self.pieces), default=0)
        while size < most:
            size = max(2 * size, 1)
            found[self.cover(range(self.blocks), size)] = None
        return list(found)

    def cover(self, blocks: range, most_bytes: int) -> Cover:
        """Pieces that execute `blocks` in order: joined ones of at most `most_bytes` where they fit, else single."""
        chosen, at = [], blocks.start
        while at < blocks.stop:
            for index in self._starts[at]:
                piece = self.pieces[index]
                if piece.count == 1 or (piece.nbytes <= most_bytes and at + piece.count <= blocks.stop):
                    break
            chosen.append(index)
            at += piece.count
        return tuple(chosen)

    def join_kept(self, chosen: Cover, kept: Set[int]) -> tuple[Cover, frozenset[int]]:
        """`chosen` with every run of pieces that stay joined as far as can be; `kept` and what is returned beside it
        are positions in the cover."""
        joined: list[int] = []
        positions: set[int] = set()
        for keeps, run in groupby(range(len(chosen)), key=kept.__contains__):
            members = [chosen[position] for position in run]
            if keeps:
                last = self.pieces[members[-1]]
                nbytes = sum(self.pieces[member].nbytes for member in members)
                members = list(self.cover(range(self.pieces[members[0]].first, last.first + last.count), nbytes))
                positions.update(range(len(joined), len(joined) + len(members)))
            joined += members
        return tuple(joined), frozenset(positions)
