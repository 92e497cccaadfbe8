"""What this machine has and what that means for chains: the drive, memory, processor, inference libraries, GPU.

May import the store, the meter and the backends. Nothing here raises because something is missing or broken: that is a
finding, in words, with what to do about it.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from trt_layering import board, drive, gpu
from trt_layering.errors import LayeringError
from trt_layering.findings import Finding
from trt_layering.runtime import meter
from trt_layering.units import format_size

_DEFAULT_BLOCK = 16 << 20
_SLOW_DRIVE = 200e6
_LITTLE_SPACE = 1 << 30
_NO_LIMIT = 1 << 60


def examine(repository: str | Path = "engines") -> list[Finding]:
    """Look at everything; takes a few seconds, most of them for the drive under `repository`, which need not exist yet.

    A file of up to 128 MiB is written there and removed again.
    """
    folder = existing_folder(Path(repository))
    found = [python(), processor(), *memory(Path("/")), *disk(folder), onnxruntime()]
    return [*found, *board.examine(folder), *gpu.examine()]


def existing_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def python() -> Finding:
    """The interpreter."""
    return Finding("Python", f"{platform.python_version()} ({sys.executable})")


def processor() -> Finding:
    """Cores this process may use and the instruction sets that prepared blocks depend on."""
    cores = len(os.sched_getaffinity(0))
    try:
        from trt_layering.backends.onnxruntime.machine import fingerprint

        features = fingerprint().get("instructions", "")
    except Exception as error:
        return Finding("processor", f"{platform.machine()}, {cores} cores", "warn", _words(error), {"cores": cores})
    return Finding("processor", f"{platform.machine()}, {cores} cores, {features}", numbers={"cores": cores})


def memory(root: Path) -> list[Finding]:
    """What can be had, and the limit of the memory cgroup if there is one. `root` is where /proc and /sys are."""
    available, limit = meter.available_bytes(), cgroup_limit(root)
    numbers = {"available_bytes": available}
    if available == 0:
        found = [Finding("memory", "unknown", "warn", "give each chain a budget by hand")]
    else:
        block = available // 3
        found = [
            Finding("memory available", format_size(available), numbers=numbers),
            Finding(
                "block size",
                f"4 KiB to {format_size(block)}: two blocks and what is between them must fit into memory; "
                f"{format_size(_DEFAULT_BLOCK)} unless you say otherwise",
                numbers={"largest_block_bytes": block},
            ),
        ]
    if limit is None:
        return [*found, Finding("memory limit", "none (no memory cgroup holds this process back)")]
    words = f"{format_size(limit)} by a memory cgroup; the page cache counts too"
    return [*found, Finding("memory limit", words, numbers={"limit_bytes": limit})]


def cgroup_limit(root: Path) -> int | None:
    """The least memory limit of this process's cgroups and those around them, of version 2 or 1; None without one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top, name = {
            "": ("sys/fs/cgroup", "memory.max"),
            "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        }.get(controllers, ("", ""))
        if name:
            group = root / top / path.lstrip("/")
            limits += [_limit(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(root / top)]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(file: Path) -> int | None:
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):
        return None
    return limit if limit < _NO_LIMIT else None


def disk(folder: Path, measure: Callable[[Path], drive.Drive] = drive.measure) -> list[Finding]:
    """Free space at `folder` and how fast it is read; `measure` is replaced by tests."""
    free = shutil.disk_usage(folder).free
    space = Finding(
        "disk space", f"{format_size(free)} free at {folder}",
        "ok" if free >= _LITTLE_SPACE else "warn", "" if free >= _LITTLE_SPACE else "a build needs the model's size",
        {"free_bytes": free},
    )  # fmt: skip
    try:
        measured = measure(folder)
    except (OSError, LayeringError) as error:
        remedy = "name a folder that can be written: --repository"
        return [space, Finding("drive", f"not measured at {folder}: {_words(error)}", "warn", remedy)]
    return [space, _direct(measured), _rate(measured)]


def _direct(measured: drive.Drive) -> Finding:
    if measured.direct:
        return Finding("direct I/O", "yes: weights are read past the page cache")
    remedy = "a repository on a local drive (ext4, xfs, btrfs) has it; without it reads take page cache and copies"
    return Finding("direct I/O", f"no: {measured.fallback}", "warn", remedy)


def _rate(measured: drive.Drive) -> Finding:
    best, enough = measured.best, measured.enough
    rate = best.bytes_per_second
    value = (
        f"{rate / 1e6:.0f} MB/s with {best.threads} reads of {format_size(best.read_bytes)} at once; "
        f"{enough.threads} of {format_size(enough.read_bytes)} are enough; "
        f"a block of {format_size(_DEFAULT_BLOCK)} takes {_DEFAULT_BLOCK / rate * 1e3:.1f} ms"
    )
    slow = rate < _SLOW_DRIVE
    remedy = "put the repository on an NVMe drive: a run takes at least the streamed weights divided by this rate"
    numbers: dict[str, int | float] = {
        "bytes_per_second": rate,
        "threads": enough.threads,
        "read_bytes": enough.read_bytes,
    }
    numbers |= {
        f"bytes_per_second_{one.threads}x{one.read_bytes >> 20}MiB": one.bytes_per_second for one in measured.rates
    }
    return Finding("drive reads", value, "warn" if slow else "ok", remedy if slow else "", numbers)


def onnxruntime() -> Finding:
    """ONNX Runtime, without which nothing is prepared or run on the CPU."""
    try:
        import onnxruntime as ort

        return Finding("ONNX Runtime", f"{ort.__version__} ({', '.join(ort.get_available_providers())})")
    except Exception as error:
        return Finding("ONNX Runtime", f"not usable: {_words(error)}", "fail", "pip install onnxruntime")


def _words(error: Exception) -> str:
    if isinstance(error, LayeringError):
        return error.what
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
