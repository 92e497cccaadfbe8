"""TensorRT's runtime: engines out of plans, contexts, refitters, and its log.

Imports TensorRT, so only after `present.require()`. What TensorRT refuses raises BackendError with the last line of its
log, MemoryLimitError where that speaks of memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import tensorrt as trt

from trt_layering.backends.tensorrt import plan_file
from trt_layering.backends.tensorrt.cuda import Device, DeviceMemory
from trt_layering.errors import BackendError, MemoryLimitError
from trt_layering.store.manifest import open_plain
from trt_layering.units import format_size

log = logging.getLogger("trt_layering.tensorrt")

_KEPT_LINES = 4
_Made = TypeVar("_Made")
_OF_MEMORY = ("out of memory", "outofmemory", "cudaerrormemoryallocation", "memory allocation")


class _Log(trt.ILogger):
    """Passes what TensorRT says on to Python's log, and keeps the last errors."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
            self.lines.append(msg)
            log.error("%s", msg)
        elif severity == trt.ILogger.Severity.WARNING:
            log.warning("%s", msg)
        else:
            log.debug("%s", msg)


class Library:
    """TensorRT on `device`, whose contexts share `scratch` bytes of scratch: they execute one after the other, on one
    stream. Owns the scratch until `close`; engines and contexts that it gave must be gone by then."""

    def __init__(self, device: Device, scratch: int) -> None:
        self.device = device
        self._log = _Log()
        with device.current():
            self._runtime = self._made(lambda: trt.Runtime(self._log), "TensorRT does not start", device.name)
        self._scratch: DeviceMemory = device.allocate(max(scratch, 1), "scratch")

    def read(self, path: Path) -> bytes:
        """The bytes of a plan."""
        with open(open_plain(path), "rb") as file:
            return file.read()

    def engine(self, plan: memoryview, where: str) -> trt.ICudaEngine:
        """The engine of `plan`, whose bytes it needs no more then. `where` names it in errors."""
        self._log.lines.clear()
        with self.device.current():
            engine: trt.ICudaEngine | None = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            told = plan_file.described(bytes(plan[: plan_file.SAMPLE]))
            raise self.refusal(f"TensorRT cannot use the plan ({told})", where, "build the chain again on this machine")
        return engine

    def context(self, engine: trt.ICudaEngine, where: str) -> trt.IExecutionContext:
        """A context of `engine` over the shared scratch."""
        needed = engine.device_memory_size_v2
        if needed > self._scratch.nbytes:
            raise BackendError(
                f"the engine needs {format_size(needed)} of scratch, where the build found "
                f"{format_size(self._scratch.nbytes)}",
                where=where, remedy="build the chain again on this machine",
            )  # fmt: skip
        with self.device.current():
            strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context: trt.IExecutionContext | None = engine.create_execution_context(strategy)
            if context is None:
                raise self.refusal("TensorRT made no execution context", where, "lower the budget: memory may be short")
            context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        return context

    def refitter(
        self, engine: trt.ICudaEngine, where: str, weights: Mapping[str, tuple[trt.Weights, trt.TensorLocation]]
    ) -> trt.Refitter:
        """A refitter of `engine` that was told `weights`, every one that the engine has. BackendError where it is asked
        for others, or they do not suit it."""
        with self.device.current():
            refitter = self._made(lambda: trt.Refitter(engine, self._log), "TensorRT cannot refit the engine", where)
        refitter.weights_validation = False  # which would wait for the device
        asked = set(refitter.get_all_weights())
        if asked != set(weights):
            names = ", ".join(sorted(asked ^ set(weights)))
            raise BackendError(
                f"the engine's weights are not those of the chain: {names}", where=where, remedy="build the chain again"
            )
        for name, (values, location) in weights.items():
            taken = refitter.set_named_weights(name, values, location)
            self.require(taken, f"TensorRT refused the weight {name}", where)
        return refitter

    def _made(self, make: Callable[[], _Made], what: str, where: str) -> _Made:
        """What `make` makes; TensorRT's constructors raise TypeError where there is nothing to be had."""
        try:
            return make()
        except TypeError as error:
            raise self.refusal(what, where, "build the chain again on this machine") from error

    def require(self, done: bool, what: str, where: str, remedy: str = "build the chain again on this machine") -> None:
        """Raise BackendError with TensorRT's last words unless `done`."""
        if not done:
            raise self.refusal(what, where, remedy)

    def refusal(self, what: str, where: str, remedy: str) -> BackendError | MemoryLimitError:
        """The error for `what`, with TensorRT's last words."""
        lines = "; ".join(self._log.lines)
        self._log.lines.clear()
        words = f"{what}: {lines}" if lines else what
        if any(sign in lines.lower() for sign in _OF_MEMORY):
            remedy = "lower the budget, or stop other programs that use the GPU's memory"
            return MemoryLimitError(words, where=where, remedy=remedy)
        return BackendError(words, where=where, remedy=remedy)

    def close(self) -> None:
        """Give the scratch back, once nothing executes."""
        self._scratch.free()
