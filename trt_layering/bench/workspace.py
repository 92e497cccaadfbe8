"""A folder for files as large as the model, on the drive of the chain: gone at the end, or, if the bench is killed,
when the next one begins.

May import the store's locks. A folder that cannot be made raises OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trt_layering.store.writer import locked, remove_abandoned

_PREFIX = ".bench-"


def remove_left(repository: Path) -> list[str]:
    """Removes what killed benches left in `repository`, as far as that is permitted; the names."""
    with contextlib.suppress(OSError), locked(repository.resolve(), fcntl.LOCK_EX):
        return remove_abandoned(repository, f"{_PREFIX}*")
    return []


@contextlib.contextmanager
def workspace(repository: Path) -> Iterator[Path]:
    """A folder in `repository`, which holds its lock, so that no other bench takes it for left behind."""
    folder = repository.resolve() / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        with locked(folder.parent, fcntl.LOCK_EX):
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.enter_context(locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
        yield folder
