"""Whether TensorRT can be used here, found out in an order in which nothing can crash: driver, GPU, PyCUDA, TensorRT.

May import errors and `driver`; PyCUDA and TensorRT only inside functions, once the driver has started. What is missing,
broken or too old raises BackendError, in words. What was found is kept for the life of the process; a forked one asks
anew. All of it may be called from any thread.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from trt_layering.backends.tensorrt import driver
from trt_layering.backends.tensorrt.driver import Gpu
from trt_layering.errors import BackendError
from trt_layering.words import printable

LEAST = (10, 3)
"""The oldest TensorRT that can be used."""

NUMPY_2_FROM = (10, 16)
"""The first TensorRT whose Python package reads arrays of numpy 2 rightly."""

ANY_NUMPY = "TRT_LAYERING_ANY_NUMPY"
"""Set in the environment for a TensorRT whose Python package was compiled for numpy 2, whatever its version."""

_SCRIPT = "scripts/bootstrap-jetson.sh does it"
_lock = threading.RLock()


@dataclass(frozen=True)
class _Found:
    """What this process found: a machine, or what keeps it from being used."""

    gpu: Gpu | None = None
    tensorrt: str = ""
    error: BackendError | None = None


_found: _Found | None = None


def require() -> None:
    """Return if chains can be built and run with TensorRT here; BackendError, what to do in its remedy, if not."""
    found = _look()
    if found.error is not None:
        raise BackendError(found.error.what, where=found.error.where, remedy=found.error.remedy) from found.error


def missing() -> str | None:
    """Why TensorRT cannot be used here, in words; None if it can."""
    error = _look().error
    return None if error is None else error.what


def version() -> str:
    """TensorRT's version, like "10.3.0". BackendError where it cannot be used."""
    require()
    return _look().tensorrt


def fingerprint() -> dict[str, str]:
    """What plans depend on beside TensorRT's version; BackendError where it cannot be used.

    Not the number of multiprocessors, which on a Jetson changes with the power mode and which plans bear.
    """
    require()
    gpu = _look().gpu
    assert gpu is not None, "required"
    memory = "integrated" if gpu.integrated else "discrete"
    return {"gpu": gpu.name, "sm": gpu.sm, "memory": memory, "machine": platform.machine()}


def shares_managed_memory() -> bool:
    """Whether the processor may use managed memory while the GPU works; BackendError where TensorRT cannot be used."""
    require()
    gpu = _look().gpu
    return gpu is not None and gpu.managed


def here() -> str:
    """What this machine has, for a sentence: "TensorRT 10.3.0 on Orin (nvgpu), SM 8.7", or why it has none."""
    found = _look()
    if found.error is not None or found.gpu is None:
        return f"no usable TensorRT ({missing()})"
    return f"TensorRT {found.tensorrt} on {printable(found.gpu.name)}, SM {found.gpu.sm}"


def pycuda() -> str:
    """Imports PyCUDA and returns its version. Only where there is a GPU. BackendError."""
    module = _imported("pycuda.driver", "PyCUDA", _pycuda_remedy())
    text = _installed("pycuda") or str(getattr(sys.modules.get("pycuda"), "VERSION_TEXT", "of unknown version"))
    if not hasattr(getattr(module, "Device", None), "retain_primary_context"):
        what = f"PyCUDA {text} is too old: it cannot share the GPU with other libraries of the process"
        raise BackendError(what, where=_where(module), remedy=_pycuda_remedy())
    return text


def tensorrt() -> str:
    """Imports TensorRT and returns its version. Only where there is a GPU. BackendError."""
    module = _imported("tensorrt", "TensorRT", _tensorrt_remedy())
    text = str(getattr(module, "__version__", ""))
    if numbers(text) < LEAST:
        what = f"TensorRT {printable(text) or 'of unknown version'} is too old: {_dotted(LEAST)} or newer is needed"
        raise BackendError(what, where=_where(module), remedy=_tensorrt_remedy())
    return text


def numpy_fits(tensorrt_version: str) -> str:
    """numpy's version, if TensorRT of this version reads its arrays rightly, or the environment says that it does;
    BackendError."""
    import numpy

    text = str(numpy.__version__)
    suits = numbers(text) < (2,) or numbers(tensorrt_version) >= NUMPY_2_FROM
    if not suits and not os.environ.get(ANY_NUMPY):
        raise BackendError(
            f"numpy {text} does not suit TensorRT {tensorrt_version}, whose Python package reads arrays of numpy 2 "
            f"wrongly, as all before {_dotted(NUMPY_2_FROM)} do",
            where=_where(numpy),
            remedy=f"pip install 'numpy<2', or a newer TensorRT; if yours was compiled for numpy 2, set {ANY_NUMPY}=1",
        )  # fmt: skip
    return text


def numbers(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with: "10.3.0.26" → (10, 3, 0, 26), "11.0.0rc1" → (11, 0, 0)."""
    begin = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", text)
    return tuple(int(part) for part in begin[0].split(".")) if begin else ()


def forget() -> None:
    """Look anew when next asked: in a forked process, whose GPU and whose locks were another's, or where libraries have
    been exchanged."""
    global _found, _lock
    _found, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=forget)


def _look() -> _Found:
    global _found
    with _lock:
        if _found is None:
            _found = _examined()
        return _found


def _examined() -> _Found:
    try:
        gpu = driver.ask()
        pycuda()
        text = tensorrt()
        numpy_fits(text)
    except BackendError as error:
        return _Found(error=error)
    return _Found(gpu, text)


def _imported(module: str, name: str, remedy: str) -> ModuleType:
    """`module`; a broken library may raise anything as it is imported."""
    try:
        return importlib.import_module(module)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except ModuleNotFoundError as error:
        lacking = "" if error.name == module.partition(".")[0] else f": it needs {error.name}"
        raise BackendError(f"{name} is not installed{lacking}", where=sys.executable, remedy=remedy) from error
    except BaseException as error:
        words = printable(" ".join(str(error).split()))[:400] or "no reason given"
        what = f"{name} is installed and cannot be imported: {type(error).__name__}: {words}"
        if "numpy" in words.lower():
            remedy = f"pip install 'numpy<2' if {name} was made for numpy 1; otherwise {remedy}"
        raise BackendError(what, where=sys.executable, remedy=remedy) from error


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _where(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or module.__name__)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _tensorrt_remedy() -> str:
    if driver.on_jetson():
        return (
            "JetPack 6.1 or newer has it: sudo apt install python3-libnvinfer, and a venv made with "
            f"--system-site-packages; {_SCRIPT}"
        )
    return "pip install 'trt-layering[tensorrt]'"


def _pycuda_remedy() -> str:
    if driver.on_jetson():
        return f"sudo apt install nvidia-jetpack, for its CUDA toolkit, then pip install -U pycuda; {_SCRIPT}"
    return "pip install 'trt-layering[tensorrt]'; NVIDIA's CUDA toolkit must be there to compile PyCUDA"
