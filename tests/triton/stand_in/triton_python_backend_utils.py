"""What Triton's Python backend gives a model, as strict as its bindings are: what has no keyword there has none here,
and a value of a wrong type is a TypeError. Only what a model that answers at once can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CODES = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"
)  # fmt: skip
_DTYPES = {
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "object",
}  # fmt: skip


class _Code:
    def __init__(self, name: str) -> None:
        self.name = name


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} is needed, not {type(value).__name__}")
    return value


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = map(_Code, CODES)

    def __init__(self, message: str, code: _Code = INTERNAL) -> None:
        self._message, self._code = _typed(message, str), _typed(code, _Code)

    def message(self) -> str:
        return str(self._message)

    def code(self) -> _Code:
        return self._code


class Tensor:
    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any], /) -> None:
        self._name, self._array = _typed(name, str), _typed(numpy_array, np.ndarray)
        if numpy_array.dtype.name not in _DTYPES:
            raise TritonModelException(f"dtype {numpy_array.dtype} is not supported")

    def name(self) -> str:
        return str(self._name)

    def as_numpy(self) -> np.ndarray[Any, Any]:
        return self._array


class InferenceRequest:
    def __init__(self, *, inputs: Sequence[Tensor], requested_output_names: Sequence[str]) -> None:
        self._inputs, self._wanted = list(inputs), list(requested_output_names)

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._wanted


class InferenceResponse:
    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None, parameters: Any = None
    ) -> None:
        self._tensors = [_typed(tensor, Tensor) for tensor in output_tensors]
        self._error = None if error is None else _typed(error, TritonError)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error
