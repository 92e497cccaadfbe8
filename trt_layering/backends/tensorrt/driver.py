"""NVIDIA's driver and the GPU that chains run on, asked by way of libcuda.so.1 itself, so that nothing else is loaded
before it is known to be there. May import errors. What is missing or broken raises BackendError, in words."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_layering.errors import BackendError

_LIBRARY = "libcuda.so.1"
_ROOT = Path("/")
_NO_DEVICE = 100
_FORKED = 3
_NEEDED = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute")
_INTEGRATED, _CONCURRENT_MANAGED, _MULTIPROCESSORS, _MAJOR, _MINOR = 18, 89, 16, 75, 76
"""Numbers of the attributes, as cuda.h has them."""


class NoDriver(BackendError):
    """There is no libcuda.so.1 at all."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU, and the driver's CUDA version. `total_bytes` is 0 where the driver does not say; `managed`: the
    processor may use managed memory while the GPU does."""

    cuda: str
    count: int
    name: str
    sm: str
    integrated: bool
    managed: bool
    multiprocessors: int
    total_bytes: int


def ask() -> Gpu:
    """The first GPU that this process may use. NoDriver or BackendError where there is none."""
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NoDriver(f"no NVIDIA driver: {error}", where=_LIBRARY, remedy=_driver_remedy()) from error
    lacking = [name for name in _NEEDED if not hasattr(library, name)]
    if lacking:
        what = f"the NVIDIA driver is too old or damaged: its library has no {lacking[0]}"
        raise BackendError(what, where=_LIBRARY, remedy=_driver_remedy())
    code = library.cuInit(0)
    if code:
        raise BackendError(f"the NVIDIA driver does not start: {_words(library, code)}", where=_LIBRARY,
                           remedy=_start_remedy(code))  # fmt: skip
    return _gpu(library)


def _gpu(library: Any) -> Gpu:
    number, device, version, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _checked(library, library.cuDeviceGetCount(ctypes.byref(number)))
    if number.value < 1:
        what = "the NVIDIA driver finds no GPU"
        raise BackendError(what, where=_LIBRARY, remedy=_start_remedy(_NO_DEVICE))
    _checked(library, library.cuDeviceGet(ctypes.byref(device), 0))
    _checked(library, library.cuDeviceGetName(name, len(name), device))
    _checked(library, library.cuDriverGetVersion(ctypes.byref(version)))
    if hasattr(library, "cuDeviceTotalMem_v2"):
        library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = _attribute(library, _MAJOR, device), _attribute(library, _MINOR, device)
    return Gpu(
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        count=number.value,
        name=name.value.decode(errors="replace"),
        sm=f"{major}.{minor}",
        integrated=bool(_attribute(library, _INTEGRATED, device)),
        managed=bool(_attribute(library, _CONCURRENT_MANAGED, device)),
        multiprocessors=_attribute(library, _MULTIPROCESSORS, device),
        total_bytes=total.value,
    )


def _attribute(library: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _checked(library, library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value


def _checked(library: Any, code: int) -> None:
    if code:
        raise BackendError(f"the NVIDIA driver says nothing of its GPU: {_words(library, code)}", where=_LIBRARY,
                           remedy=_start_remedy(code))  # fmt: skip


def _words(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    known = hasattr(library, "cuGetErrorString") and not library.cuGetErrorString(code, ctypes.byref(text))
    return f"{text.value.decode(errors='replace')} ({code})" if known and text.value else f"error {code}"


def _start_remedy(code: int) -> str:
    if code == _FORKED:
        return "a process forked from one that has used the GPU cannot use it: start it by spawn instead"
    if code == _NO_DEVICE and "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}: unset it, or name a GPU there is"
    if on_jetson():
        return "add this user to the groups video and render (sudo usermod -aG video,render $USER), and start again"
    return "see what nvidia-smi says; in a container, start it with --gpus all"


def _driver_remedy() -> str:
    if on_jetson():
        return "install JetPack (sudo apt install nvidia-jetpack); in a container, start it with --runtime nvidia"
    return "install NVIDIA's driver; in a container, start it with --gpus all; without a GPU use --backend onnxruntime"


def on_jetson(root: Path = _ROOT) -> bool:
    """Whether this is one of NVIDIA's boards, where libraries come with JetPack."""
    return (root / "etc/nv_tegra_release").exists() or "Jetson" in board(root)


def board(root: Path = _ROOT) -> str:
    """The board's name, "" where it has none."""
    try:
        text = (root / "proc/device-tree/model").read_bytes()[:256].decode(errors="replace")
    except OSError:
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def looks_like_nvidia(root: Path = _ROOT) -> bool:
    """Whether the machine looks as if it had an NVIDIA GPU, whatever its driver says."""
    return any((root / name).exists() for name in ("proc/driver/nvidia", "dev/nvidia0", "dev/nvhost-gpu"))
