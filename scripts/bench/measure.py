"""What the benches share: fresh processes, memory and time measured, caches dropped, the machine described.

Imports only the standard library and numpy at the top, so that a child process starts as bare as it can; Linux only.
A child that fails raises ChildError with the end of what it wrote.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from trt_layering.bench.cgroup import MemoryGroup

MIB = 1 << 20
RESULTS = Path(".bench/results")
_FOLDER = Path(__file__).resolve().parent
_CHILD = """
import sys
procs, folder, module, function, arguments = sys.argv[1:]
if procs:
    open(procs, "w").write("0")
import importlib, json
sys.path.insert(0, folder)
result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
sys.stdout.flush()
print("\\n" + json.dumps(result))
"""


class ChildError(RuntimeError):
    """A child process failed; `status` is its exit status, negative for the signal that ended it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def call(
    function: Callable[..., Any], *, group: MemoryGroup | None = None, timeout: float = 1800, **arguments: Any
) -> Any:
    """What `function(**arguments)` returns in a fresh Python process, inside memory group `group` if given.

    `function` stands at the top of a bench module; arguments and result are JSON.
    """
    module = function.__module__
    if module == "__main__":
        module = Path(sys.modules["__main__"].__file__ or "").stem
    procs = str(group.procs) if group else ""
    command = [sys.executable, "-c", _CHILD, procs, str(_FOLDER), module, function.__name__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise ChildError(f"{function.__name__} ended with {done.returncode}\n{done.stderr[-2000:]}", done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


# Memory


@dataclass(frozen=True)
class Usage:
    """Resident memory of a process, in bytes: now, at its peak, and how now divides."""

    now: int
    peak: int
    anonymous: int
    file: int


def usage(pid: int | str = "self") -> Usage:
    """Resident memory of process `pid`, from /proc. Raises OSError when there is no such process."""
    fields = {"VmRSS": 0, "VmHWM": 0, "RssAnon": 0, "RssFile": 0}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in fields:
            fields[name] = int(rest.split()[0]) * 1024
    return Usage(fields["VmRSS"], fields["VmHWM"], fields["RssAnon"], fields["RssFile"])


def reset_peak() -> None:
    """Let `usage().peak` of this process count from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def imported(modules: Sequence[str]) -> int:
    """Child function: the resident bytes of a process that has imported `modules` and done nothing else."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return usage().now


def touch(count: int) -> int:
    """Child function: takes `count` bytes of memory and returns the resident bytes then."""
    block = bytearray(count)
    block[::4096] = b"1" * len(block[::4096])
    return usage().now


class TreeSampler:
    """Samples the summed resident memory of a process and its descendants while the `with` body runs.

    `peak` is the largest sum seen; shared pages count once per process, so it errs upwards.
    """

    def __init__(self, pid: int, interval: float = 0.005) -> None:
        self.peak = 0
        self._pid, self._interval = pid, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> TreeSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, tree_bytes(self._pid))


def tree_bytes(pid: int) -> int:
    """Resident bytes of process `pid` and its descendants, now."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError):
            total += usage(process).now
    return total


def _tree(pid: int) -> Iterable[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


# Time


@dataclass(frozen=True)
class Spread:
    """The median of `count` samples and their quartiles, in the samples' unit."""

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float = 1e3, digits: int = 2) -> str:
        """Median and quartiles, by default of seconds in milliseconds: "12.30 (12.10-12.60)"."""
        low, median, high = (f"{value * scale:.{digits}f}" for value in (self.low, self.median, self.high))
        return f"{median} ({low}-{high})"


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles of `samples`, which hold at least one."""
    if len(samples) < 2:
        return Spread(samples[0], samples[0], samples[0], len(samples))
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(statistics.median(samples), low, high, len(samples))


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action()` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def interleave(
    subjects: Mapping[str, Callable[[], object]], *, rounds: int, batch: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of each run of each subject, in turn: `rounds` times a batch of each, in alternating order.

    The first run of a batch is not counted: it meets caches and threads that the other subject has left behind.
    """
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for action in subjects.values():
        for _ in range(warm_up):
            action()
    for number in range(rounds):
        order = list(subjects.items())
        for name, action in order if number % 2 == 0 else reversed(order):
            action()
            samples[name].extend(timed(action) for _ in range(batch))
    return samples


# The machine


@dataclass(frozen=True)
class Machine:
    """What the numbers were measured on. `drive_rate` is in bytes per second."""

    cpu: str
    cores: int
    memory: int
    kernel: str
    file_system: str
    drive_rate: float
    drive_access: str
    python: str
    numpy: str
    onnxruntime: str

    def text(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 1e9:.1f} GB, Linux {self.kernel}, {self.file_system}, "
            f"drive {self.drive_rate / 1e9:.2f} GB/s ({self.drive_access}), Python {self.python}, "
            f"numpy {self.numpy}, onnxruntime {self.onnxruntime}"
        )


def describe_machine(file: Path) -> Machine:
    """This machine; the drive's rate is measured by reading `file`, which should be some hundred MB."""
    rate, access = drive_rate(file)
    return Machine(
        cpu=_proc_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory=int((_proc_field(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) * 1024,
        kernel=platform.release(),
        file_system=_file_system(file),
        drive_rate=rate,
        drive_access=access,
        python=platform.python_version(),
        numpy=np.__version__,
        onnxruntime=importlib.metadata.version("onnxruntime"),
    )


def drive_rate(file: Path, *, threads: int = 2, size: int = 8 * MIB, most: int = 1 << 30) -> tuple[float, str]:
    """Bytes per second of reading up to `most` bytes of `file` in requests of `size` by `threads` threads; and how."""
    access = "direct reads"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        descriptor, access = os.open(file, os.O_RDONLY), "buffered reads, cache dropped before"
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    requests = iter(range(0, min(file.stat().st_size, most), size))
    lock, counts = threading.Lock(), []

    def read() -> None:
        with mmap.mmap(-1, size) as buffer:
            while True:
                with lock:
                    offset = next(requests, None)
                if offset is None:
                    return
                counts.append(os.preadv(descriptor, [buffer], offset))

    workers = [threading.Thread(target=read) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    os.close(descriptor)
    return sum(counts) / seconds, f"{access}, {threads} threads of {size // MIB} MiB"


def _proc_field(file: Path, name: str) -> str | None:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _file_system(file: Path) -> str:
    """The type of the file system that holds `file`: that of the longest mount point above it."""
    path, best, kind = str(file.resolve()), "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, candidate, *_ = line.split()
        if len(mount) >= len(best) and (path + "/").startswith(mount.rstrip("/") + "/"):
            best, kind = mount, candidate
    return kind


# Results


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a Markdown table that also reads well on a terminal."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    line = functools.partial(_table_line, widths=widths)
    print(f"\n{title}\n", line(header), line(["-" * width for width in widths]), *map(line, rows), sep="\n", flush=True)


def _table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def write_results(name: str, machine: Machine, results: Any) -> Path:
    """Writes `results` with the machine to `.bench/results/NAME.json`; returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": asdict(machine), "results": results}, indent=1) + "\n")
    return path
