"""Every call by which a build touches the disk, numbered: something can be made to happen at any one of them.

Run as a program it builds version 2 of a chain again and again, killing the builder (SIGKILL) at one call after the
other, each in a repository of its own (`<base>/<point>`), until one build gets through; it prints how many were killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "close")


@contextmanager
def stop_points(reach: Callable[[int, str], None]) -> Iterator[None]:
    """Calls `reach(number, name)` before each disk call, counted from 0. A write does half of what it is asked, so that
    what remains is a point of its own: there are moments at which an extent is half there."""
    count = itertools.count()
    originals = {name: getattr(os, name) for name in CALLS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            reach(next(count), name)
            if name == "pwrite" and len(args[1]) >= 1024:
                descriptor, data, offset = args
                return originals[name](descriptor, data[: len(data) // 2], offset)
            return originals[name](*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def build_killed_at(repository: Path, point: int) -> bool:
    """Whether the build was killed: False means it has fewer points."""
    from tests.store.samples import publish_tiny

    child = os.fork()
    if child == 0:

        def kill(number: int, name: str) -> None:
            if number == point:
                os.kill(os.getpid(), signal.SIGKILL)

        with stop_points(kill):
            publish_tiny(repository, seed=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the build failed at point {point}")
    return os.WIFSIGNALED(status)


def main(base: Path) -> None:
    from tests.store.samples import publish_tiny

    for point in itertools.count():
        publish_tiny(base / str(point), seed=1)
        if not build_killed_at(base / str(point), point):
            print(point)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
