"""Rows of words as lines with aligned columns. Imports nothing of ours and cannot fail."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[object]]) -> list[str]:
    """One line a row; every column as wide as its widest cell, the last one ragged."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in texts), strict=True)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in texts
    ]
