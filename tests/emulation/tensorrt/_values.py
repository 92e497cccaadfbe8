"""Loggers, shapes, weights, host memory and what types are called where; imports the tables, numpy, onnx and
`emulated_device`."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from emulated_device import machine

from . import _enums, _tables
from ._native import Native

_ONNX = onnx.TensorProto
ONNX_TO_TRT = {
    _ONNX.FLOAT: "FLOAT",
    _ONNX.FLOAT16: "HALF",
    _ONNX.BFLOAT16: "BF16",
    _ONNX.INT8: "INT8",
    _ONNX.UINT8: "UINT8",
    _ONNX.INT32: "INT32",
    _ONNX.INT64: "INT64",
    _ONNX.BOOL: "BOOL",
}
TRT_TO_ONNX = {name: number for number, name in ONNX_TO_TRT.items()}
ITEMSIZE = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT8": 1, "UINT8": 1, "INT32": 4, "INT64": 8, "BOOL": 1, "FP8": 1}
ITEMSIZE |= {"INT4": 0.5, "FP4": 0.5, "E8M0": 1}
NUMPY = {
    "FLOAT": np.dtype(np.float32),
    "HALF": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "INT8": np.dtype(np.int8),
    "UINT8": np.dtype(np.uint8),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


def data_type(name: str) -> Any:
    """The member of DataType that is called so."""
    return getattr(_enums.DataType, name)


def nbytes(name: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of this DataType."""
    return math.ceil(math.prod(shape) * ITEMSIZE[name])


class ILogger(Native):
    Severity = _enums.Severity

    def log(self, severity: Any, msg: str) -> None:
        machine().fault("a logger does not override ILogger.log")


class Logger(ILogger):
    def __init__(self, min_severity: Any = _enums.Severity.WARNING) -> None:
        self._min_severity = min_severity

    @property
    def min_severity(self) -> Any:
        return self._min_severity

    @min_severity.setter
    def min_severity(self, value: Any) -> None:
        self._min_severity = value

    def log(self, severity: Any, msg: str) -> None:
        if severity <= self._min_severity:
            print(f"[TRT] [{severity.name[0]}] {msg}", file=sys.stderr)


def say(logger: ILogger, severity: str, text: str) -> None:
    """What TensorRT tells its logger. An exception of the logger's would end the process."""
    try:
        logger.log(getattr(_enums.Severity, severity), text)
    except Exception as error:
        machine().fault(f"a logger raised {error!r}: TensorRT would end the process")


def error(logger: ILogger, code: str, text: str) -> None:
    """An error, as TensorRT words them."""
    say(logger, "ERROR", f"Error Code {code} ({text})")


class Dims(Native):
    """A shape. Compares with tuples and lists, has no hash."""

    MAX_DIMS = property(lambda self: 8)

    def __init__(self, shape: Sequence[int] = ()) -> None:
        if len(shape) > 8:
            raise ValueError("a shape has eight dimensions at most")
        self._shape = [int(size) for size in shape]

    def __len__(self) -> int:
        return len(self._shape)

    def __iter__(self) -> Iterator[int]:
        return iter(self._shape)

    def __getitem__(self, index: Any) -> Any:
        found = self._shape[index]
        return Dims(found) if isinstance(index, slice) else found

    def __setitem__(self, index: int, value: int) -> None:
        self._shape[index] = int(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dims | tuple | list) and list(other) == self._shape

    __hash__ = None

    def __repr__(self) -> str:
        return str(tuple(self._shape))


Sequence.register(Dims)


class Weights(Native):
    """A pointer, a type and a count. `_source` is what it was made from, kept alive."""

    def __init__(self, type: Any = None, ptr: int = 0, count: int = 0, a: np.ndarray | None = None) -> None:
        self._source = None
        self._dtype, self._address, self._count = type or data_type("FLOAT"), int(ptr), int(count)
        if a is not None:
            if not a.flags.c_contiguous:
                raise TypeError("Weights of an array that is not contiguous")
            names = {dtype: name for name, dtype in NUMPY.items() if name != "BF16"}
            if a.dtype not in names:
                raise TypeError(f"Weights have no type for numpy's {a.dtype}")
            self._source, self._dtype = a, data_type(names[a.dtype])
            self._address, self._count = a.ctypes.data, a.size

    def _setup(self, dtype: str, count: int, address: int) -> None:
        self._source, self._dtype, self._address, self._count = None, data_type(dtype), address, count

    dtype = property(lambda self: self._dtype)
    size = property(lambda self: self._count)
    nbytes = property(lambda self: max(0, math.ceil(self._count * ITEMSIZE[self._dtype.name])))

    def numpy(self) -> np.ndarray:
        """Up to 10.15, bindings with numpy 2 give an array of other memory than was meant."""
        if self._dtype.name not in NUMPY or self._dtype.name == "BF16":
            raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
        if not _tables.at_least(10, 16) and int(np.__version__.split(".")[0]) >= 2:
            return np.frombuffer(b"\xa5" * self.nbytes, NUMPY[self._dtype.name])
        return np.frombuffer(self._read("HOST"), NUMPY[self._dtype.name])

    def _read(self, location: str) -> bytes:
        """The bytes there now, seen from the host or from the device."""
        if location == "DEVICE":
            return machine().view(self._address, self.nbytes).tobytes()
        if self._address >> 56:
            machine().fault(f"the host reads weights at {self._address:#x}, an address of the device")
        if machine().is_pinned(self._address, self.nbytes):
            return machine().host_view(self._address, self.nbytes).tobytes()
        return ctypes.string_at(self._address, self.nbytes)


def as_weights(value: Weights | np.ndarray) -> Weights:
    """As pybind11 converts an array."""
    return value if isinstance(value, Weights) else Weights(a=value)


def _not_of_a_buffer(self: Any, *args: Any) -> Any:
    raise TypeError("IHostMemory has no such operation: take a memoryview or bytes of it")


class IHostMemory(bytearray):
    """Bytes of the library's. Only the buffer protocol, `nbytes` and `dtype`: no length, no index, no methods."""

    __len__ = __getitem__ = __setitem__ = __delitem__ = __iter__ = __contains__ = __add__ = __iadd__ = __mul__ = (
        _not_of_a_buffer
    )

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<tensorrt.tensorrt.IHostMemory object>"

    def __getattribute__(self, name: str) -> Any:
        if name not in ("nbytes", "dtype") and not name.startswith("__"):
            raise AttributeError(f"'tensorrt.tensorrt.IHostMemory' object has no attribute '{name}'")
        return super().__getattribute__(name)

    nbytes = property(lambda self: bytearray.__len__(self))
    dtype = property(lambda self: data_type("INT8"))
