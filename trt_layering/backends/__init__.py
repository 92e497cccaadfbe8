"""What compiles and executes blocks; one module or folder per inference engine, all behind `base`.

The functions here are the only places that know the backends by name; each is imported when asked for.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from trt_layering.errors import ForeignError, UsageError
from trt_layering.store.manifest import Binding, Chain
from trt_layering.store.reader import check_store

if TYPE_CHECKING:
    from trt_layering.backends.base import Builder, Runtime

NAMES = ("onnxruntime", "tensorrt")

_PLACED = Literal["staged", "zero-copy", "managed"]

log = logging.getLogger("trt_layering")


def builder(name: str, home: Path = Path(), *, binding: str = "auto", placement: str = "auto") -> Builder:
    """The builder of backend `name`, or of the best one this machine has for "auto", which the log then tells. `home`
    is where its chains lie; `binding` and `placement` are for TensorRT. Raises UsageError for what there is not,
    BackendError where this machine lacks what the backend needs."""
    if name not in ("auto", *NAMES):
        raise UsageError(f"there is no backend {name!r}", remedy=f"use auto or {' or '.join(NAMES)}")
    if (_best() if name == "auto" else name) == "tensorrt":
        _require_tensorrt()
        from trt_layering.backends.tensorrt.builder import TensorRtBuilder, Wanted

        return TensorRtBuilder(Wanted(_word("binding", binding, Binding), _word("placement", placement, _PLACED), home))
    for what, word in (("binding", binding), ("placement", placement)):
        if word != "auto":
            raise UsageError(f"{what} {word!r} is for the backend tensorrt", remedy=f"leave out --{what}")
    from trt_layering.backends.onnxruntime.builder import OnnxRuntimeBuilder

    return OnnxRuntimeBuilder()


def _word(what: str, asked: str, known: Any) -> Any:
    if asked not in ("auto", *get_args(known)):
        raise UsageError(f"{what} cannot be {asked!r}", remedy=f"use auto, {' or '.join(get_args(known))}")
    return asked


def _best() -> str:
    from trt_layering.backends.tensorrt import present

    missing = present.missing()
    if missing is None:
        log.info("backend auto: tensorrt, since there is %s", present.here())
        return "tensorrt"
    log.info("backend auto: onnxruntime, since TensorRT cannot be used: %s", missing)
    return "onnxruntime"


def _require_tensorrt() -> None:
    from trt_layering.backends.tensorrt import present

    present.require()


def share_threads(chain: Chain) -> None:
    """In a process of one's own that opens nothing but `chain`: let its engines share one thread pool, if they have
    any."""
    if chain.backend.name == "onnxruntime":
        from trt_layering.backends.onnxruntime.runtime import share_thread_pool

        share_thread_pool()


def engine_overhead(name: str) -> int:
    """Bytes that each engine of backend `name` takes in this process beside those that a build measures."""
    if name != "onnxruntime":
        return 0
    from trt_layering.backends.onnxruntime.runtime import thread_pool_bytes

    return thread_pool_bytes()


def check(folder: Path, chain: Chain) -> None:
    """Raise unless the files of the chain in `folder` are as they were written and its engines can be opened here, as
    far as that can be told without opening them. CorruptError, ForeignError, ReadError."""
    if chain.backend.name == "tensorrt":
        from trt_layering.backends.tensorrt import plan_file

        plan_file.check(folder, chain)
        return
    check_store(folder, chain)


def runtime(chain: Chain) -> Runtime:
    """The runtime that opens `chain`. Raises ForeignError for a backend this version lacks, BackendError where this
    machine lacks what the backend needs."""
    name = chain.backend.name
    if name not in NAMES:
        raise ForeignError(
            f"the chain was built for the backend {name!r}, which this version does not have",
            remedy="install the version that built it, or build the chain again here",
        )
    if name == "tensorrt":
        _require_tensorrt()
        from trt_layering.backends.tensorrt.runtime import TensorRt

        return TensorRt(chain)
    from trt_layering.backends.onnxruntime.runtime import OnnxRuntime

    return OnnxRuntime()
