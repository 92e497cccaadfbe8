"""Refitters; imports numpy and `emulated_device`. Weights are read when the refit runs, from the host or the device."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
from emulated_device import machine

from . import _enums, _values
from ._engine import ICudaEngine
from ._native import Native, plain
from ._plan import PlanWeight


class Refitter(Native):
    """Holds its engine, and every Weights it was ever given."""

    max_threads = plain("max_threads", 1)
    weights_validation = plain("weights_validation", True)
    logger = property(lambda self: self._logger)

    def __init__(self, engine: ICudaEngine, logger: Any) -> None:
        if not engine.refittable:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._engine, self._state, self._logger = engine, engine._state, logger
        self._weights = {weight.name: weight for weight in engine._plan.weights if weight.refittable}
        self._set: dict[str, tuple[_values.Weights, str]] = {}
        self._kept: list[_values.Weights] = []
        self._calls = 0

    def get_all_weights(self) -> list[str]:
        return list(self._weights)

    def get_missing_weights(self) -> list[str]:
        """Optimistic, as TensorRT's may be: none, once any has been set."""
        return [] if self._set else list(self._weights)

    def get_weights_prototype(self, weights_name: str) -> _values.Weights:
        """Type and count without values; count -1 for an unknown name."""
        weight = self._weights.get(weights_name)
        if weight is None:
            return _values.Weights._new("FLOAT", -1, 0)
        return _values.Weights._new(_values.ONNX_TO_TRT[weight.onnx_type], _count(weight), 0)

    def get_named_weights(self, weights_name: str) -> _values.Weights:
        found = self._set.get(weights_name)
        return found[0] if found else _values.Weights._new("FLOAT", 0, 0)

    def get_weights_location(self, weights_name: str) -> Any:
        found = self._set.get(weights_name)
        return getattr(_enums.TensorLocation, found[1] if found else "HOST")

    def set_named_weights(self, name: str, weights: Any, location: Any = None) -> bool:
        """False and an error in the log for an unknown name, another count or another type."""
        known, given = self._weights.get(name), _values.as_weights(weights)
        self._kept.append(given)
        if known is None:
            return self._refuse(f"There are no refittable weights named {name}.")
        if given.dtype.name != _values.ONNX_TO_TRT[known.onnx_type] or given.size != _count(known):
            return self._refuse(
                f"Weights {name} are {_count(known)} of {_values.ONNX_TO_TRT[known.onnx_type]}, not {given.size} of "
                f"{given.dtype.name}."
            )
        if not given._address:
            return self._refuse(f"Weights {name} have no values.")
        self._set[name] = (given, location.name if location is not None else "HOST")
        return True

    def unset_named_weights(self, weights_name: str) -> bool:
        return self._set.pop(weights_name, None) is not None

    def _refuse(self, text: str) -> bool:
        _values.error(self._logger, "3: API Usage Error", text)
        return False

    def refit_cuda_engine(self) -> bool:
        """At once."""
        if self._state.pending() or self._state.pending_refits():
            machine().fault("an engine is refitted while work that uses it is pending")
        refit = _Refit(self)
        refit.begin()
        refit.end()
        return refit.complete or self._refuse("Refit failed: some weights may have been replaced.")

    def refit_cuda_engine_async(self, stream_handle: int) -> bool:
        """When the stream gets there. What else uses the engine must be on the same stream or done."""
        stream = machine().stream(int(stream_handle))
        for work in [*self._state.pending(), *self._state.pending_refits()]:
            if work.stream is not stream:
                machine().fault("an engine is refitted while work of another stream that uses it is pending")
        refit = _Refit(self)
        self._state.refits += [stream.enqueue(refit.begin, "refit"), stream.enqueue(refit.end, "refit")]
        return refit.complete or self._refuse("Refit failed: some weights may have been replaced.")

    def release_refit_resources(self) -> bool:
        self._set.clear()
        self._kept.clear()
        return True


def _count(weight: PlanWeight) -> int:
    return int(np.prod(weight.shape, dtype=np.int64))


class _Refit:
    """One refit, in two pieces with time between: the weights are spoilt, then read from where they were set."""

    def __init__(self, refitter: Refitter) -> None:
        self.state, self.machine = refitter._state, machine()
        self.identical = refitter._engine._plan.refit == "REFIT_IDENTICAL"
        self.sources = [(refitter._weights[name], *source) for name, source in refitter._set.items()]
        refitter._calls += 1
        self.complete = os.environ.get("EMULATED_REFIT_FAIL") != str(refitter._calls)
        if not self.complete:
            self.sources = self.sources[: len(self.sources) // 2]

    def begin(self) -> None:
        self._require_idle()
        self.state.refitting += 1
        for weight, _, _ in self.sources:
            self.state.memory(weight)[:] = 0xFF

    def end(self) -> None:
        self.state.refitting -= 1
        self._require_idle()
        for weight, source, location in self.sources:
            data = source._read(location)
            self.state.memory(weight)[:] = np.frombuffer(data, np.uint8)
            self.state.correct[weight.name] = not self.identical or zlib.crc32(data) == weight.checksum

    def _require_idle(self) -> None:
        if self.state.closed:
            self.machine.fault("an engine is refitted after its end")
        if self.state.active:
            self.machine.fault("an engine is refitted while it executes")
