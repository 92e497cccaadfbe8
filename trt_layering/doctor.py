"""What this machine has and what that means for chains: the drive, memory, processor, inference libraries, GPU.

May import the store, the meter and the backends. Nothing here raises because something is missing or broken: that is a
finding, in words, with what to do about it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from trt_layering import drive
from trt_layering.errors import LayeringError
from trt_layering.runtime import meter
from trt_layering.units import format_size

Status = Literal["ok", "warn", "fail"]

_DEFAULT_BLOCK = 16 << 20
_SLOW_DRIVE = 200e6
_LITTLE_SPACE = 1 << 30
_NO_LIMIT = 1 << 60
_GPU_LIBRARIES = (
    ("TensorRT", "tensorrt", "pip install 'trt-layering[tensorrt]'; on a Jetson it comes with JetPack"),
    ("PyCUDA", "pycuda.driver", "pip install 'trt-layering[tensorrt]'"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `numbers` are its measurements, in bytes, seconds and bytes per second."""

    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""
    numbers: Mapping[str, int | float] = field(default_factory=dict)


def examine(repository: str | Path = "engines") -> list[Finding]:
    """Look at everything; takes a few seconds, most of them for the drive under `repository`, which need not exist yet.

    A file of up to 128 MiB is written there and removed again.
    """
    gpu = driver()
    found = [python(), processor(), *memory(Path("/")), *disk(existing_folder(Path(repository))), onnxruntime(), gpu]
    for name, package, remedy in _GPU_LIBRARIES:
        found.append(library(name, package, remedy) if gpu.numbers else without_gpu(name, package))
    return found


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


def library(name: str, module: str, remedy: str) -> Finding:
    """A library for the GPU. Only to be asked where `driver` found one: without, importing it may crash."""
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        return Finding(name, f"not usable: {_words(error)}", "warn", remedy)
    return Finding(name, _version(module) or str(getattr(imported, "__version__", "present")))


def without_gpu(name: str, module: str) -> Finding:
    """The same library where there is no GPU to use it with: what is installed, without importing it."""
    version = _version(module)
    there = (
        f"{version} is installed, but there is no GPU to use it" if version else "not installed, and no GPU to use it"
    )
    return Finding(name, f"{there}; chains run on the CPU")


def _version(module: str) -> str:
    try:
        return metadata.version(module.partition(".")[0])
    except metadata.PackageNotFoundError:
        return ""


def driver() -> Finding:
    """NVIDIA's driver and its first GPU, asked by way of libcuda.so.1 itself."""
    name = "CUDA driver"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Finding(name, f"none ({error}); chains run on the CPU", "ok" if not _nvidia() else "warn")
    code = cuda.cuInit(0)
    if code:
        return Finding(
            name, f"cuInit failed: {_cuda_words(cuda, code)}", "warn", "check nvidia-smi, and this user's groups"
        )
    version, device, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    text = ctypes.create_string_buffer(256)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if cuda.cuDeviceGet(ctypes.byref(device), 0):
        return Finding(name, "there is a driver but no GPU", "warn", "check nvidia-smi")
    cuda.cuDeviceGetName(text, len(text), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    words = f"CUDA {cuda_version}, {text.value.decode(errors='replace')}, {format_size(total.value)}"
    return Finding(name, words, numbers={"gpu_bytes": total.value})


def _nvidia() -> bool:
    """Whether the machine looks as if it had an NVIDIA GPU."""
    return Path("/proc/driver/nvidia").exists() or Path("/dev/nvidia0").exists() or Path("/dev/nvhost-gpu").exists()


def _cuda_words(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(code, ctypes.byref(text)) or not text.value:
        return f"error {code}"
    return f"{text.value.decode(errors='replace')} ({code})"


def _words(error: Exception) -> str:
    if isinstance(error, LayeringError):
        return error.what
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
