"""`python -m tests.gpu`: the checks that need a GPU, and one JSON report of them; see README.md.

Exit status 0 if everything is as it must be; 1 if not, or if something is missing, which is said in words; 2 for
arguments that make no sense.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu import cuda_check, report
from trt_layering.backends.tensorrt import driver, present
from trt_layering.backends.tensorrt.cuda import Device
from trt_layering.errors import LayeringError

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        for title in cuda_check.titles().values():
            print(f"cuda: {title}")
        print(f"report: {options.report}")
        return 0
    try:
        return 0 if _carried_out(options.report, options.folder, options.small) else 1
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
        "--small", dest="small", action="store_const", const=cuda_check.SMALL, default=cuda_check.FULL,
        help="move little: quick, and its times say nothing",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be checked, and do nothing")
    return parser


def _carried_out(path: Path, folder: Path | None, sizes: cuda_check.Sizes) -> bool:
    """Whether everything is as it must be. BackendError where there is no GPU or no PyCUDA."""
    gpu = driver.ask()
    version = present.pycuda()
    with tempfile.TemporaryDirectory(prefix=".gpu-check-", dir=folder or path.absolute().parent) as work:
        device = Device()
        machine = _machine(gpu, version, device)
        try:
            parts = [cuda_check.part(device, Path(work), sizes, machine["emulated"], _say)]
        finally:
            device.close()
    ok = report.write(path, machine, parts)
    _say(f"{'all is well' if ok else 'something is WRONG'}; the report is {path.absolute()}")
    return ok


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
    sys.exit(main())
