"""What compiles and executes blocks; one module or folder per inference engine, all behind `base`.

`builder` and `runtime` are the only places that know the backends by name; each is imported when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trt_layering.errors import ForeignError, UsageError

if TYPE_CHECKING:
    from trt_layering.backends.base import Builder, Runtime

NAMES = ("onnxruntime",)


def builder(name: str) -> Builder:
    """The builder of backend `name`, or of the best one this machine has for "auto". Raises UsageError for others."""
    if name not in ("auto", *NAMES):
        raise UsageError(f"there is no backend {name!r}", remedy=f"use auto or {' or '.join(NAMES)}")
    from trt_layering.backends.onnxruntime.builder import OnnxRuntimeBuilder

    return OnnxRuntimeBuilder()


def engine_overhead(name: str) -> int:
    """Bytes that each engine of backend `name` takes in this process beside those that a build measures."""
    if name not in NAMES:
        return 0
    from trt_layering.backends.onnxruntime.runtime import thread_pool_bytes

    return thread_pool_bytes()


def runtime(name: str) -> Runtime:
    """The runtime that opens chains built by backend `name`. Raises ForeignError for a backend this version lacks."""
    if name not in NAMES:
        raise ForeignError(
            f"the chain was built for the backend {name!r}, which this version does not have",
            remedy="install the version that built it, or build the chain again here",
        )
    from trt_layering.backends.onnxruntime.runtime import OnnxRuntime

    return OnnxRuntime()
