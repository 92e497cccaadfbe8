"""What users and files give: whether it is text at all, how a message quotes it, and what of it may reach a terminal.
Imports nothing of ours and cannot fail."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence

_SHORT = reprlib.Repr()
_MOST_NAMES = 3
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 1, 80, 80


def quoted(value: object) -> str:
    """`value` as its repr, but cut short where that is long or nested."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write out numbers of thousands of digits
        return f"a huge {type(value).__name__}"


def printable(text: str) -> str:
    """`text` with all that a terminal could take for a command, or a line for its end, written out as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_text(word: str) -> bool:
    """Whether `word` can be a path and stand in a manifest: it is UTF-8, without a NUL."""
    return re.search("[\0\ud800-\udfff]", word) is None


def first_of(names: Sequence[str]) -> str:
    """The first three of `names`, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
