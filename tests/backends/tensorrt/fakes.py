"""A libcuda and libraries that are not there, or are broken in all the ways that libraries are."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from trt_layering.backends.tensorrt import driver, present

PYCUDA = "class Device:\n    def retain_primary_context(self): ...\n"
ATTRIBUTES = {75: 8, 76: 7, 16: 8, 18: 1, 89: 0}


class FakeCuda:
    """A libcuda with `count` GPUs, or one whose cuInit returns `code`."""

    def __init__(self, code: int = 0, *, count: int = 1, name: bytes = b"Orin (nvgpu)", **attributes: int) -> None:
        self._code, self._count, self._name = code, count, name
        self._attributes = ATTRIBUTES | {int(key[1:]): value for key, value in attributes.items()}

    def cuInit(self, flags: int) -> int:
        return self._code

    def cuGetErrorString(self, code: int, text: Any) -> int:
        words = {100: b"no CUDA-capable device is detected", 3: b"initialization error"}.get(code)
        if words is None:
            return 1
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = words
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 12060
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 0 if index < self._count else 101

    def cuDeviceGetName(self, text: Any, size: int, device: Any) -> int:
        text.value = self._name
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self._attributes[attribute]
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: Any) -> int:
        ctypes.cast(total, ctypes.POINTER(ctypes.c_size_t))[0] = 8 << 30
        return 0


def cuda(monkeypatch: pytest.MonkeyPatch, library: object | None) -> None:
    """Makes `library` the libcuda there is; None: there is none. What was found before is forgotten."""

    real = ctypes.CDLL

    def load(name: str | None, *options: Any, **more: Any) -> object:
        if name != "libcuda.so.1":
            return real(name, *options, **more)
        if library is None:
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return library

    monkeypatch.setattr(driver.ctypes, "CDLL", load)
    monkeypatch.setattr(present, "_found", None)


def libraries(monkeypatch: pytest.MonkeyPatch, folder: Path, **sources: str | None) -> None:
    """Makes `pycuda.driver` and `tensorrt` of these sources what is imported; those that are None are not installed."""
    for module in [name for name in sys.modules if name.partition(".")[0] in ("pycuda", "tensorrt")]:
        monkeypatch.delitem(sys.modules, module)
    defaults: dict[str, str | None] = {"pycuda": PYCUDA, "tensorrt": "__version__ = '10.16.0'\n"}
    for name, source in (defaults | sources).items():
        home = folder / name
        if source is None:
            monkeypatch.setitem(sys.modules, name, None)  # which makes importing it fail
            continue
        home.mkdir(parents=True)
        (home / "__init__.py").write_text("" if name == "pycuda" else source)
        if name == "pycuda":
            (home / "driver.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(present, "_found", None)


def tegra(monkeypatch: pytest.MonkeyPatch, jetson: bool) -> None:
    """Makes this machine a Jetson, or not."""
    monkeypatch.setattr(driver, "on_jetson", lambda root=Path("/"): jetson)


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, *, version: str = "10.16.0", **gpu: Any) -> None:
    """Makes this machine one on which TensorRT of this version can be used."""
    cuda(monkeypatch, FakeCuda(**gpu))
    libraries(monkeypatch, folder, tensorrt=f"__version__ = {version!r}\n")
