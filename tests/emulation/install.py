"""Puts the emulated GPU in the place of a real one, for this process and its children, and takes it away again.

Imports the standard library. A C compiler (`cc`) must be there for the emulated driver.
"""

from __future__ import annotations

import _ctypes
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = ("pycuda", "emulated_device")
VERSIONED = ("tensorrt", "polygraphy")
OURS = "trt_layering.backends.tensorrt."
BOUND = {f"{OURS}{name}" for name in ("bindings", "library", "runtime", "versions")}
"""Ours that know one TensorRT; whoever left them imported had another, perhaps."""

_kept: dict[str, dict[str, ModuleType]] = {}


@functools.cache
def driver() -> Path:
    """The emulated `libcuda.so.1`, built once for each process; its folder is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="emulated-cuda-")
    driver.folder = folder  # type: ignore[attr-defined]
    library = Path(folder.name, "libcuda.so.1")
    source = str(HERE / "libcuda.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wl,-soname,libcuda.so.1", "-o", str(library), source], check=True
    )
    return library


def environment(**switches: str) -> dict[str, str]:
    """The environment for a child that is to find the emulation. `switches`: `seed="3"` is EMULATED_SEED=3."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_")}
    for name, first in (("PYTHONPATH", str(HERE)), ("LD_LIBRARY_PATH", str(driver().parent))):
        found[name] = os.pathsep.join(filter(None, (first, found.get(name, ""))))
    found["TRT_LAYERING_ANY_NUMPY"] = "1"  # the emulated TensorRT of any version takes arrays of any numpy
    return found | {f"EMULATED_{name.upper()}": value for name, value in switches.items()}


@contextmanager
def installed(**switches: str) -> Iterator[Any]:
    """The emulation in this process and in children it starts; the value is the `Machine`.

    On leaving, `sys.path`, the environment and `sys.modules` are as before. Modules that were imported meanwhile are
    kept for the next time, those that know TensorRT for each of its versions. That nothing was misused is for the
    caller to ask: `machine.assert_clean()`.
    """
    before, path = dict(os.environ), list(sys.path)
    ctypes.CDLL(str(driver()))
    wanted, version = environment(**switches), switches.get("tensorrt", "")
    outside = _take(lambda name: _package(name) in (*SHARED, *VERSIONED) or name in BOUND)
    there = set(sys.modules)
    os.environ.clear()
    os.environ.update(wanted)
    sys.path.insert(0, str(HERE))
    _put({**_kept.get("shared", {}), **_kept.get(version, {})})
    try:
        import emulated_device

        yield emulated_device.replace_machine()
    finally:
        _kept["shared"] = _take(lambda name: _package(name) in SHARED)
        _kept[version] = _take(
            lambda name: _package(name) in VERSIONED or (name.startswith(OURS) and name not in there)
        )
        _put(outside)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(before)
        _unload(str(driver()))


def _package(name: str) -> str:
    return name.partition(".")[0]


def _take(wanted: Callable[[str], bool]) -> dict[str, ModuleType]:
    """Remove modules as if they had never been imported."""
    present = sys.modules.get(f"{OURS}present")
    if present is not None:
        present.forget()
    taken = {name: sys.modules.pop(name) for name in list(sys.modules) if wanted(name)}
    for name in taken:
        parent, _, last = name.rpartition(".")
        if parent in sys.modules and parent not in taken:
            vars(sys.modules[parent]).pop(last, None)
    return taken


def _put(modules: dict[str, ModuleType]) -> None:
    """Bring them back."""
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent in sys.modules and parent not in modules:
            setattr(sys.modules[parent], last, module)


def _unload(library: str) -> None:
    """However often it was opened: else the process would go on having a GPU."""
    with suppress(OSError):
        while True:
            handle = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
            _ctypes.dlclose(handle)
            _ctypes.dlclose(handle)
