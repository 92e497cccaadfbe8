"""What `doctor` tells of the GPU: driver, device, the libraries for it, and where weights go through quickest.

May import the TensorRT backend, of which `driver` and `present` alone are imported where it cannot be used. Nothing
raises: what is missing or broken is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from trt_layering.backends.tensorrt import driver, present
from trt_layering.backends.tensorrt.driver import Gpu, NoDriver
from trt_layering.errors import BackendError, MemoryLimitError
from trt_layering.findings import Finding
from trt_layering.units import format_size
from trt_layering.words import printable

_LIBRARIES = (("PyCUDA", "pycuda"), ("TensorRT", "tensorrt"))


def examine() -> list[Finding]:
    """Look at all of it. Libraries for the GPU are imported only where there is one."""
    try:
        found = driver.ask()
    except BackendError as error:
        return [_no_driver(error), *(_unused(name, package) for name, package in _LIBRARIES)]
    tensorrt = _asked("TensorRT", present.tensorrt)
    findings = [_driver(found), _device(found), _asked("PyCUDA", present.pycuda), tensorrt]
    if tensorrt.status == "ok":
        findings.append(_asked("numpy", lambda: f"{present.numpy_fits(tensorrt.value)}, which suits this TensorRT"))
    missing = present.missing()
    if missing is not None:
        return [*findings, Finding("TensorRT backend", f"cannot be used: {missing}; chains run on the CPU")]
    return [*findings, Finding("TensorRT backend", f"can be used: {present.here()}"), placement()]


def placement() -> Finding:
    """Where streamed weights are best put, by a measurement of a few seconds. Only where TensorRT can be used."""
    from trt_layering.backends.tensorrt.cuda import Device
    from trt_layering.backends.tensorrt.placement import choose, measure

    name, remedy = "weights' placement", "free some memory, and stop other programs that use the GPU"
    try:
        device = Device()
        try:
            results = measure(device)
        finally:
            device.close()
    except (BackendError, MemoryLimitError) as error:
        return Finding(name, f"not measured: {printable(error.what)}", "warn", remedy)
    told = "; ".join(f"{result.placement}: {printable(result.words)}" for result in results)
    seconds = {f"{one.placement}_seconds": one.seconds for one in results if one.seconds is not None}
    return Finding(name, f"{choose(results)} ({told})", numbers=seconds)


def _no_driver(error: BackendError) -> Finding:
    expected = driver.looks_like_nvidia() or not isinstance(error, NoDriver)
    words = f"{printable(error.what)}; chains run on the CPU"
    return Finding("CUDA driver", words, "warn" if expected else "ok", error.remedy if expected else "")


def _driver(found: Gpu) -> Finding:
    more = f"; of {found.count} GPUs the first is used" if found.count > 1 else ""
    return Finding("CUDA driver", f"CUDA {found.cuda}{more}")


def _device(found: Gpu) -> Finding:
    kind = "integrated (memory is shared with the processor)" if found.integrated else "discrete"
    managed = "managed memory can be used by both at once" if found.managed else "no concurrent use of managed memory"
    words = (
        f"{printable(found.name)}, SM {found.sm}, {found.multiprocessors} multiprocessors, {kind}, "
        f"{format_size(found.total_bytes)}, {managed}"
    )
    numbers = {
        "gpu_bytes": found.total_bytes, "multiprocessors": found.multiprocessors, "integrated": int(found.integrated),
        "concurrent_managed": int(found.managed),
    }  # fmt: skip
    return Finding("GPU", words, numbers=numbers)


def _asked(name: str, question: Callable[[], str]) -> Finding:
    try:
        return Finding(name, question())
    except BackendError as error:
        return Finding(name, error.what, "warn", error.remedy)


def _unused(name: str, package: str) -> Finding:
    """A library for the GPU where there is none to use it with: what is installed, without importing it."""
    try:
        there = f"{metadata.version(package)} is installed, but there is no GPU to use it"
    except metadata.PackageNotFoundError:
        there = "not installed, and no GPU to use it"
    return Finding(name, f"{there}; chains run on the CPU")
