"""A memory cgroup (version 2 or 1) with a limit, for one child process at a time. Imports only the standard library.

Needs the right to make groups, usually root. Where that is missing `MemoryGroup` raises OSError, and the caller leaves
that measurement out and says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_MOUNTS = Path("/proc/self/mounts")
_GROUPS = Path("/proc/self/cgroup")
_numbers = itertools.count()


class MemoryGroup:
    """A group limited to `limit` bytes, swap excluded. A process joins by writing its id to `procs`.

    Use as a context manager; the group is removed at the end, when its processes have ended.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.version, self._folder = _make_group()
        try:
            self._set_limit()
        except OSError:
            self._folder.rmdir()
            raise

    @property
    def procs(self) -> Path:
        return self._folder / "cgroup.procs"

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _set_limit(self) -> None:
        if self.version == 2:
            (self._folder / "memory.max").write_text(str(self.limit))
            swap = self._folder / "memory.swap.max"
            value = "0"
        else:
            (self._folder / "memory.limit_in_bytes").write_text(str(self.limit))
            swap = self._folder / "memory.memsw.limit_in_bytes"
            value = str(self.limit)
        if swap.exists():
            swap.write_text(value)

    def peak_bytes(self) -> int | None:
        """Most memory the group has been charged for, page cache included; None where the kernel does not count it."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        try:
            return int((self._folder / name).read_text())
        except OSError:
            return None

    def close(self) -> None:
        """Remove the group. Just after its last process has ended the kernel may still hold it for a moment."""
        with contextlib.suppress(OSError):
            (self._folder / "memory.force_empty").write_text("0")
        for _ in range(100):
            try:
                self._folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.02)
        raise OSError(f"the memory group {self._folder} could not be removed; remove it with rmdir")


def _make_group() -> tuple[int, Path]:
    """Makes an empty group with a memory controller; returns the hierarchy's version and the group's folder."""
    name = f"trt-layering-bench-{os.getpid()}-{next(_numbers)}"
    reasons = []
    for version, parent in _parents():
        folder = parent / name
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
            return version, folder
        folder.rmdir()
        reasons.append(f"{parent}: no memory controller below it")
    raise OSError("no memory cgroup could be made: " + ("; ".join(reasons) or "no cgroup file system is mounted"))


def _parents() -> Iterator[tuple[int, Path]]:
    """Folders in which a group might be made: below this process's own group, else at the hierarchy's root."""
    own = {}
    for line in _GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    for line in _MOUNTS.read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            yield 1, Path(mount) / own.get("memory", "")
            yield 1, Path(mount)
        elif kind == "cgroup2":
            group = Path(mount) / own.get("", "")
            yield from ((2, parent) for parent in (group, group.parent, Path(mount)) if parent.is_relative_to(mount))
