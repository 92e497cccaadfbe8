"""Runs the graph of a plan with ONNX Runtime, on memory given by address; imports onnx, onnxruntime and numpy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from ._plan import tensor_shape

Buffers = Mapping[str, tuple[int, Sequence[int], np.ndarray]]
"""Name → ONNX type, shape, bytes."""


@functools.lru_cache(maxsize=256)
def session(model: bytes) -> onnxruntime.InferenceSession:
    """A session on `model`, unoptimised and on one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    try:
        with contextlib.redirect_stdout(None):  # ONNX Runtime prints that it failed
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except RuntimeError as error:
        if "use_per_session_threads" not in str(error):
            raise
        options.intra_op_num_threads = options.inter_op_num_threads = 0
        options.use_per_session_threads = False  # the process has a pool for all sessions
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: bytes, inputs: Buffers, outputs: Buffers) -> None:
    """Run `model` from and into these buffers (all uint8)."""
    running = session(model)
    bound = running.io_binding()
    kept = []
    for name, (kind, shape, data) in inputs.items():
        data = _aligned(data)
        kept.append(data)
        bound.bind_input(name, "cpu", 0, kind, list(shape), data.ctypes.data)
    results = {name: _aligned_empty(data.size) for name, (_, _, data) in outputs.items()}
    for name, (kind, shape, _) in outputs.items():
        bound.bind_output(name, "cpu", 0, kind, list(shape), results[name].ctypes.data)
    running.run_with_iobinding(bound)
    for name, (_, _, data) in outputs.items():
        data[:] = results[name]


def _aligned_empty(size: int) -> np.ndarray:
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def _aligned(data: np.ndarray) -> np.ndarray:
    if data.ctypes.data % 64 == 0 and data.size:
        return data
    room = _aligned_empty(max(1, data.size))
    room[: data.size] = data
    return room


@functools.lru_cache(maxsize=1024)
def output_shapes(
    model: bytes, shapes: tuple[tuple[str, tuple[int, ...]], ...], values: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[str, tuple[int, ...]]:
    """Output name → its shape for inputs of these `shapes`, shape tensors having these `values`."""
    graph = onnx.load_model_from_string(model)
    inferred = _inferred(graph, dict(shapes), dict(values))
    if all(size >= 0 for shape in inferred.values() for size in shape):
        return inferred
    return _by_running(model, dict(shapes), dict(values))


def _inferred(
    model: onnx.ModelProto, shapes: dict[str, tuple[int, ...]], values: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    for value in [v for v in model.graph.input if v.name in shapes]:
        tensor_type = value.type.tensor_type
        if value.name in values:
            array = np.array(values[value.name], onnx.helper.tensor_dtype_to_np_dtype(tensor_type.elem_type))
            array = array.reshape(shapes[value.name])
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
            model.graph.input.remove(value)
            continue
        tensor_type.ClearField("shape")
        for size in shapes[value.name]:
            tensor_type.shape.dim.add().dim_value = size
        tensor_type.shape.SetInParent()
    forget_shapes(model)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return {
        v.name: tuple(tensor_shape(v)) if v.type.tensor_type.HasField("shape") else (-1,) for v in model.graph.output
    }


def forget_shapes(model: onnx.ModelProto) -> None:
    """Remove what a model says of the shapes of its outputs and inner values: it may be wrong."""
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _by_running(
    model: bytes, shapes: dict[str, tuple[int, ...]], values: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    running = session(model)
    feeds = {}
    for value in onnx.load_model_from_string(model).graph.input:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        shape = shapes.get(value.name, tuple(tensor_shape(value)))
        array = np.array(values[value.name], dtype).reshape(shape) if value.name in values else np.zeros(shape, dtype)
        if dtype == ml_dtypes.bfloat16:
            kind = onnx.TensorProto.BFLOAT16
            feeds[value.name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), kind)
        else:
            feeds[value.name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    names = [output.name for output in running.get_outputs()]
    found = running.run_with_ort_values(names, feeds)
    return {name: tuple(value.shape()) for name, value in zip(names, found, strict=True)}
