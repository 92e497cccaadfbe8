"""`python -m tests.gpu`: the checks that need a GPU, and one JSON report of them; see README.md.

Exit status 0 if everything is as it must be; 1 if not, or if something is missing, which is said in words; 2 for
arguments that make no sense.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu import cuda_check, report, tensorrt_check
from trt_layering.backends.tensorrt import driver, present
from trt_layering.backends.tensorrt.cuda import Device
from trt_layering.errors import LayeringError

Say = Callable[[str], None]
PARTS = ("cuda", "tensorrt")
_SECONDS = 570.0
"""For everything; scripts/gpu_check.sh ends what takes longer than ten minutes."""
_CUDA_SECONDS = 150.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    checks = options.check or tensorrt_check.titles()
    only = "tensorrt" if options.check else options.only
    parts = [only] if only else PARTS
    if options.dry_run:
        titles = {"cuda": [*cuda_check.titles().values()], "tensorrt": checks}
        for name in parts:
            print("\n".join(f"{name}: {title}" for title in titles[name]))
        print(f"report: {options.report}")
        return 0
    try:
        return 0 if _carried_out(options.report, options.folder, options.small, parts, checks) else 1
    except (LayeringError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description="Checks what needs a GPU; writes one JSON report."
    )
    parser.add_argument("--report", type=Path, default=Path("gpu-report.json"), help="the report's file")
    parser.add_argument("--folder", type=Path, help="where to write and read files: on the drive that chains will use")
    parser.add_argument(
        "--small", action="store_true", help="small models, and little that is moved: quick, and its times say nothing"
    )
    parser.add_argument("--only", choices=PARTS, help="one part, and not the other")
    parser.add_argument(
        "--check", action="append", choices=tensorrt_check.titles(), metavar="TITLE",
        help="one check of the part tensorrt, as --dry-run lists them, and no others; may be given again",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be checked, and do nothing")
    return parser


def _carried_out(path: Path, folder: Path | None, small: bool, names: Sequence[str], checks: Sequence[str]) -> bool:
    """Whether everything is as it must be. BackendError where there is no GPU or no PyCUDA."""
    until = time.monotonic() + _SECONDS
    gpu = driver.ask()
    version = present.pycuda()
    parts: list[report.Part] = []
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=folder or path.absolute().parent) as work:
        device = Device()
        machine = _machine(gpu, version, device)
        try:
            if "cuda" in names:
                sizes = cuda_check.SMALL if small else cuda_check.FULL
                with _in_time(path, machine):
                    parts.append(cuda_check.part(device, Path(work), sizes, machine["emulated"], _say))
        finally:
            device.close()
        if "tensorrt" in names:
            parts.append(tensorrt_check.part(checks, Path(work), small, until, _say))
    ok = report.write(path, machine, parts)
    print("\n".join(report.table(parts)))
    _say(f"{'all is well' if ok else 'something is WRONG'}; the report, which can be posted, is {path}")
    return ok


@contextmanager
def _in_time(path: Path, machine: dict[str, Any]) -> Iterator[None]:
    """Ends the process, with a report that says so, where a part in this process does not end: a GPU that does not
    answer holds whoever waits for it."""

    def give_up() -> None:
        words = f"did not end within {_CUDA_SECONDS:.0f} s: the GPU does not answer"
        check = report.Check("all", False, words, _CUDA_SECONDS, to_do="look at dmesg, and restart the machine")
        report.write(path, machine, [report.Part("cuda", False, _CUDA_SECONDS, [check])])
        _say(f"cuda: WRONG: {words}")
        os._exit(1)

    timer = threading.Timer(_CUDA_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _machine(gpu: driver.Gpu, pycuda_version: str, device: Device) -> dict[str, Any]:
    import pycuda

    return {
        "emulated": "EMULATED" in dir(pycuda),
        "machine": {
            "gpu": gpu.name, "sm": gpu.sm, "integrated": gpu.integrated, "multiprocessors": gpu.multiprocessors,
            "shares_managed_memory": gpu.managed, "memory_bytes": device.total_bytes,
            "free_bytes": device.memory_info()[0], "cuda": gpu.cuda, "board": driver.board(),
            "system": platform.platform(), "python": platform.python_version(), "numpy": np.__version__,
            "pycuda": pycuda_version, "tensorrt": present.missing() or present.version(),
        },
    }  # fmt: skip


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a check's process is ended, too
    sys.exit(main())
