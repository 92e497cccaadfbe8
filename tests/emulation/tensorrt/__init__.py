"""An emulated TensorRT of the version EMULATED_TENSORRT, see ../README.md. It has exactly the classes, members, enum
values and parameter names of that version's Python bindings, and runs networks with ONNX Runtime."""

from __future__ import annotations

import warnings
from typing import Any

from . import _builder, _engine, _enums, _native, _network, _refitter, _tables, _values

__version__ = _tables.FULL_VERSION
__cuda_version__ = "12.6"

IMPLEMENTED: list[type] = [
    _values.ILogger,
    _values.Logger,
    _values.Dims,
    _values.Weights,
    _network.ITensor,
    _network.ILayer,
    _network.INetworkDefinition,
    _network.ParserError,
    _network.OnnxParser,
    _builder.IOptimizationProfile,
    _builder.ITimingCache,
    _builder.IBuilderConfig,
    _builder.Builder,
    _engine.Runtime,
    _engine.ICudaEngine,
    _engine.IExecutionContext,
    _refitter.Refitter,
]
_native.REGISTRY["IHostMemory"] = _values.IHostMemory
globals().update(_native.build_namespace(IMPLEMENTED))

for _cls in (_values.ILogger, _values.Logger):
    _cls.Severity = _enums.Severity
    for _name, _value in _enums.Severity._values.items():
        setattr(_cls, _name, _value)


def common_enter(this: Any) -> Any:
    """Types of TensorRT are context managers that do nothing."""
    warnings.warn(
        "Context managers for TensorRT types are deprecated. Memory will be freed automatically when the reference "
        "count reaches 0.",
        DeprecationWarning,
        stacklevel=2,
    )
    return this


def common_exit(this: Any, exc_type: Any, exc_value: Any, traceback: Any) -> None:
    pass


for _cls in (
    _builder.Builder,
    _engine.ICudaEngine,
    _engine.IExecutionContext,
    _engine.Runtime,
    _network.INetworkDefinition,
    _network.OnnxParser,
    _values.IHostMemory,
    _refitter.Refitter,
    _builder.IBuilderConfig,
):
    _cls.__enter__, _cls.__exit__ = common_enter, common_exit

_CALLED = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
    "fp8": "FP8",
    "int4": "INT4",
    "fp4": "FP4",
    "e8m0": "E8M0",
}
for _name, _value in _CALLED.items():
    if hasattr(_enums.DataType, _value):
        globals()[_name] = getattr(_enums.DataType, _value)
_enums.DataType.itemsize = property(lambda this: _values.ITEMSIZE[this.name])


def volume(iterable: Any) -> int:
    """The number of elements."""
    product = 1
    for size in iterable:
        product *= size
    return product


def nptype(trt_type: Any) -> Any:
    """numpy's type. TypeError where it has none."""
    if trt_type.name not in _values.NUMPY or trt_type.name == "BF16":
        raise TypeError("Could not resolve TensorRT datatype to an equivalent numpy datatype.")
    return _values.NUMPY[trt_type.name].type


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    return True


def get_nv_onnx_parser_version() -> int:
    return _tables.NUMBERS[0] * 10000 + _tables.NUMBERS[1] * 100


def get_plugin_registry() -> Any:
    return _native._lacking("get_plugin_registry")()


def get_builder_plugin_registry(arg0: Any) -> Any:
    return _native._lacking("get_builder_plugin_registry")()
