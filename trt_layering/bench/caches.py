"""The page cache emptied, so that a run begins as the first one after a boot. Imports only the standard library; Linux.

A file that cannot be opened raises OSError.
"""

from __future__ import annotations

import os
from pathlib import Path


def drop_pages(*paths: Path) -> None:
    """Drops the pages of `paths` (files, or folders with all their files) from the page cache, and no others."""
    for path in paths:
        for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def drop_caches(*paths: Path) -> str:
    """The same, and then all clean pages of the machine where permitted; says in words how far it came."""
    drop_pages(*paths)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "caches of the model's files dropped"
    return "all caches dropped"
