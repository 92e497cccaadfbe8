"""Opens and executes blocks on ONNX Runtime's CPU provider. Imports onnxruntime and numpy, nothing of onnx.

Every failure of ONNX Runtime is raised as BackendError, a failed allocation as MemoryLimitError.

All engines of the process share one allocator, ONNX Runtime's own: scratch is as large as one block needs, not as all
do. It is kept between executions, since taking it anew costs page faults each time. They share one thread pool, too,
in processes that asked for it with `share_thread_pool`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import _pybind_state as C
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from trt_layering.backends.arena import Arena
from trt_layering.backends.base import Buffers, Read
from trt_layering.backends.onnxruntime import machine
from trt_layering.backends.onnxruntime.mapped import take_over
from trt_layering.errors import BackendError, LayeringError, MemoryLimitError
from trt_layering.store.manifest import WEIGHTS_FILE, Block, Value

Array = np.ndarray[Any, Any]

PROVIDERS = ["CPUExecutionProvider"]
_OUT_OF_MEMORY = ("Failed to allocate", "bad_alloc", "PosixThread", "Resource temporarily unavailable")
_ALLOCATOR = {
    "max_mem": 0,
    "arena_extend_strategy": 1,  # as much as was asked for, not the next power of two
    "initial_chunk_size_bytes": 256 * 1024,
    "max_dead_bytes_per_chunk": 64 * 1024,
}
_LIBRARIES = ("builtins", "onnxruntime", "polygraphy", "onnx", "onnx_ir", "google", "numpy")
"""Whose errors are told as ONNX Runtime's."""
_BFLOAT16 = 16
_NOT_NUMPYS = {
    "tensor(bfloat16)": "bfloat16",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(float8e4m3fnuz)": "float8_e4m3fnuz",
    "tensor(float8e5m2)": "float8_e5m2",
    "tensor(float8e5m2fnuz)": "float8_e5m2fnuz",
}
"""ml_dtypes' names of what numpy has no dtype for."""
_THREAD_BYTES = 112 * 1024
"""What each thread of a pool took, resident, in ONNX Runtime 1.32: mostly its queue."""
_IDENTITY = (
    b'\x08\x08\x12\x00:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08'
    b"\x01b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)
"""A model that copies one float32: executed to make ONNX Runtime give its unused scratch back."""


class _Process:
    """What all engines of this process share; what there is stays."""

    lock = threading.Lock()
    has_allocator = False
    has_threads = False
    fallbacks: tuple[str, ...] = ()


def share_thread_pool() -> None:
    """Let all engines that are opened from now on share one thread pool, instead of having one each.

    For processes of one's own, at their start: ONNX Runtime then refuses every session in the process that is made
    with its default options, until they say `use_per_session_threads = False`. Versions that cannot share one from
    Python (1.23) are reported in `Chain.stats`.
    """
    with _Process.lock:
        if not hasattr(ort, "set_global_thread_pool_sizes"):
            _Process.fallbacks = (
                f"each block has its own thread pool: ONNX Runtime {ort.__version__} cannot share one",
            )
            return
        with contextlib.suppress(Fail):  # there is one already
            ort.set_global_thread_pool_sizes(0, 1)


def has_shared_threads() -> bool:
    """Whether somebody made a thread pool for the whole process, which all sessions must then use. ONNX Runtime tells
    only by refusing a session; this goes past its Python wrapper, which would print that and try again."""
    if not _Process.has_threads:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        try:
            C.InferenceSession(options, _IDENTITY, False, False)
        except RuntimeError:
            _Process.has_threads = True
    return _Process.has_threads


def thread_pool_bytes() -> int:
    """Memory of a thread pool of a block's own; 0 where all share one."""
    if has_shared_threads():
        return 0
    return _THREAD_BYTES * (len(os.sched_getaffinity(0)) - 1)


def _share_allocator() -> None:
    with _Process.lock, reported("ONNX Runtime's shared allocator"):
        if not _Process.has_allocator:
            info = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
            ort.create_and_register_allocator(info, ort.OrtArenaCfg(_ALLOCATOR))
            _Process.has_allocator = True


def session_options(shared_threads: bool) -> ort.SessionOptions:
    """Options for a block's session as it is: no further optimisation, the shared allocator, shared threads if any.

    Threads spin while their block executes and sleep when it ends: those of other blocks need the processor then.
    The planner may not hand a dead tensor's memory to a later one of the same shape: it then lives until that one dies,
    and scratch would hold a widened weight for each shape that weights of 16 bits have. The allocator reuses it anyway.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.enable_mem_pattern = options.enable_mem_reuse = False
    options.use_per_session_threads = not shared_threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    return options


def uncut_options(optimised: bool) -> ort.SessionOptions:
    """Options for a session over the uncut model: optimised as far as ONNX Runtime can, or not at all, its weights as
    they lie. (Prepacked ones change the order of sums, so the last bits, and weights that come and go cannot be.)"""
    options = ort.SessionOptions()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    if not optimised:
        options.add_session_config_entry("session.disable_prepacking", "1")
    # Otherwise weights of few bits would make ONNX Runtime round activations to 8 bits: up to 0.2 % were seen.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    options.log_severity_level = 4
    options.use_per_session_threads = not has_shared_threads()
    return options


@contextmanager
def reported(where: str, remedy: str = "check the input's shapes; if they are right, rebuild") -> Iterator[None]:
    """Turns what ONNX Runtime raises inside into ours; `remedy` is for what is not about memory. What a signal handler
    of the caller's raises meanwhile passes."""
    try:
        yield
    except LayeringError:
        raise
    except Exception as error:
        if _is_the_callers(error):
            raise
        text = str(error)
        if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
            raise MemoryLimitError(
                f"ONNX Runtime could not have the memory or the threads that it needs: {text}",
                where=where,
                remedy="lower the budget or the input's size, or raise the process's limits",
            ) from error
        raise BackendError(f"ONNX Runtime refused: {text}", where=where, remedy=remedy) from error


def _is_the_callers(error: Exception) -> bool:
    """Whether `error` is of a class that no library here has, or an OSError that is none of the system's, as a deadline
    is: TimeoutError("too late")."""
    if isinstance(error, OSError):
        return error.errno is None
    return type(error).__module__.partition(".")[0] not in _LIBRARIES


class Done:
    """A mark in what is executed at once."""

    def wait(self) -> None:
        """It is done."""


@dataclass(frozen=True)
class HostBuffers:
    """One request's activations in `memory`; see `backends.base.Buffers`."""

    memory: Array
    tensors: dict[str, ort.OrtValue]


class OnnxRuntime:
    """The ONNX Runtime side of one open chain."""

    ahead = 0
    in_host_memory = True

    def __init__(self) -> None:
        _share_allocator()
        self._shared_threads = has_shared_threads()
        self.fallbacks = list(_Process.fallbacks)

    version = staticmethod(machine.version)
    fingerprint = staticmethod(machine.fingerprint)

    def arena(self, size: int, blocks: int, threads: int, read_size: int) -> Arena:
        """Host memory, to which reads go directly."""
        return Arena(size)

    def mark(self) -> Done:
        """Whatever was asked for has been executed."""
        return Done()

    def settle(self) -> None:
        """Nothing goes on behind `execute`."""

    def open_streamed(
        self, folder: Path, block: Block, weights: Mapping[str, Array], buffers: Mapping[str, ort.OrtValue]
    ) -> OnnxRuntimeEngine:
        """An engine over `weights` where they lie; see `backends.base.Runtime`."""
        options = session_options(self._shared_threads)
        options.add_session_config_entry("session.disable_prepacking", "1")
        values = {name: tensor_over(array) for name, array in weights.items()}
        for name, value in values.items():
            options.add_initializer(name, value)
        return self._open(folder, block, options, values, buffers)

    def ready(self) -> None:
        """There is nothing that would not be done by executing."""

    def open_resident(
        self, folder: Path, block: Block, buffers: Mapping[str, ort.OrtValue], read: Read
    ) -> OnnxRuntimeEngine:
        """An engine with weights of its own: prepacked by ONNX Runtime where its kernels gain by that, the others as
        they are. While it is opened, `weights.bin` is read through the page cache, which is let go afterwards."""
        with _Process.lock:  # nobody else may map the file meanwhile
            engine = self._open(folder, block, session_options(self._shared_threads), {}, buffers)
            with reported(block.name):
                take_over(folder / WEIGHTS_FILE, read)
            return engine

    def _open(
        self,
        folder: Path,
        block: Block,
        options: ort.SessionOptions,
        weights: Mapping[str, ort.OrtValue],
        buffers: Mapping[str, ort.OrtValue],
    ) -> OnnxRuntimeEngine:
        with reported(f"{block.name} ({folder / block.file})"):
            session = ort.InferenceSession(str(folder / block.file), options, providers=PROVIDERS)
            return OnnxRuntimeEngine(session, block, weights, buffers)

    def buffers(self, places: Sequence[tuple[Value, int]], nbytes: int, ends: Sequence[Value]) -> HostBuffers:
        """Memory for one request, zero until written; inputs and outputs are the caller's arrays."""
        memory = np.zeros(nbytes, np.uint8)
        tensors = {value.name: tensor_over(_array_of(value, memory[offset:])) for value, offset in places}
        return HostBuffers(memory, tensors)

    def feed(self, arrays: Mapping[str, Array], buffers: Buffers) -> dict[str, ort.OrtValue | Array]:
        """Tensors over the arrays themselves."""
        return {name: self.wrap(array) for name, array in arrays.items()}

    def wrap(self, array: Array) -> ort.OrtValue | Array:
        """ONNX Runtime's tensor over `array`; text stays an array, since Python can make no tensor of it."""
        return array if array.dtype.kind == "O" else tensor_over(array)

    def fill(self, tensor: ort.OrtValue, array: Array) -> None:
        """Copy `array` into `tensor`; see `backends.base.Runtime`."""
        target = as_array(tensor)
        if (target.shape, target.dtype) != (array.shape, array.dtype):
            raise BackendError(
                f"{array.dtype} of {array.shape} does not fit where {target.dtype} of {target.shape} is expected",
                remedy="check the input's shapes; if they are right, rebuild",
            )
        tensor.update_inplace(array)

    def unwrap(self, tensor: ort.OrtValue | Array) -> Array:
        """A copy of `tensor` that the caller owns."""
        return np.array(as_array(tensor))

    def device_bytes(self) -> int:
        """There is no device."""
        return 0

    def close(self) -> None:
        """Make the shared allocator, and the C library, give back what no engine uses."""
        gc.collect()
        with reported("giving scratch memory back"):
            session = ort.InferenceSession(_IDENTITY, session_options(has_shared_threads()), providers=PROVIDERS)
            shrink = ort.RunOptions()
            shrink.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            session.run(None, {"x": np.zeros(1, np.float32)}, shrink)
        return_memory()


class OnnxRuntimeEngine:
    """One block's session. Owns the session; borrows weights and buffers."""

    def __init__(
        self,
        session: ort.InferenceSession,
        block: Block,
        weights: Mapping[str, ort.OrtValue],
        buffers: Mapping[str, ort.OrtValue],
    ) -> None:
        self._where = f"{block.name} ({block.file})"
        self._session: ort.InferenceSession | None = session
        self._weights = weights  # the session keeps bare addresses of these
        self._inputs = [value.name for value in block.inputs]
        self._outputs = [value.name for value in block.outputs]
        self._takes_text = any(value.dtype == "string" for value in block.inputs)
        self._buffers = {name: buffers[name] for name in (*self._inputs, *self._outputs) if name in buffers}
        self._binding = session.io_binding()
        self._bound: dict[str, ort.OrtValue] = {}  # of those names that have buffers
        self._loose = any(name not in buffers for name in self._inputs)
        if not self._loose:
            self._bind_inputs(self._buffers)
        self._bind_outputs(self._buffers)

    def _bind_inputs(self, tensors: Mapping[str, ort.OrtValue]) -> None:
        for name in self._inputs:
            if self._bound.get(name) is not tensors[name]:
                self._bind(self._binding.bind_ortvalue_input, name, tensors[name])

    def _bind_outputs(self, tensors: Mapping[str, ort.OrtValue]) -> None:
        for name in self._outputs:
            if name in tensors and self._bound.get(name) is not tensors[name]:
                self._bind(self._binding.bind_ortvalue_output, name, tensors[name])

    def _bind(self, bind: Callable[[str, ort.OrtValue], None], name: str, tensor: ort.OrtValue) -> None:
        """What is remembered as bound is so, even where a signal ends this in the middle. Tensors of one sweep are not
        remembered, which would keep their memory."""
        self._bound.pop(name, None)
        bind(name, tensor)
        if name in self._buffers:
            self._bound[name] = tensor

    def execute(self, live: Mapping[str, ort.OrtValue], into: Mapping[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
        """Execute the block; see `backends.base.Engine`."""
        if self._session is None:
            raise BackendError("the engine is closed", where=self._where)
        with reported(self._where):
            placed = {**self._buffers, **into}
            if self._takes_text:
                return self._execute_on_arrays(self._session, live, placed)
            if all(name in placed for name in self._outputs):
                return self._execute_in_place(self._session, live, placed)
            results = self._session.run_with_ort_values(self._outputs, {name: live[name] for name in self._inputs})
            return self._put(dict(zip(self._outputs, results, strict=True)), placed)

    def _execute_in_place(
        self, session: ort.InferenceSession, live: Mapping[str, ort.OrtValue], placed: Mapping[str, ort.OrtValue]
    ) -> dict[str, ort.OrtValue]:
        """All outputs go to the tensors that `placed` names."""
        self._bind_inputs(live)
        self._bind_outputs(placed)
        session.run_with_iobinding(self._binding)
        if self._loose:
            for name in self._inputs:
                self._bound.pop(name, None)
            self._binding.clear_binding_inputs()  # a binding would keep its tensors until the next sweep
        return {name: placed[name] for name in self._outputs}

    def _put(self, results: Mapping[str, Any], placed: Mapping[str, ort.OrtValue]) -> dict[str, Any]:
        """Copy those `results` that have a place there. (A binding could mix both kinds, but in ONNX Runtime 1.23 what
        it allocates does not outlive its being cleared.)"""
        for name in self._outputs:
            if name in placed:
                placed[name].update_inplace(as_array(results[name]))
        return {**results, **{name: placed[name] for name in self._outputs if name in placed}}

    def _execute_on_arrays(
        self, session: ort.InferenceSession, live: Mapping[str, Any], placed: Mapping[str, ort.OrtValue]
    ) -> dict[str, Any]:
        """The only way in for text; everything else is copied."""
        arrays = session.run(self._outputs, {name: as_array(live[name]) for name in self._inputs})
        results = {n: a if a.dtype.kind == "O" else tensor_over(a) for n, a in zip(self._outputs, arrays, strict=True)}
        return self._put(results, placed)

    def close(self) -> None:
        """Drop the session and everything it refers to."""
        self._session = None
        self._binding = None
        self._bound = {}
        self._weights = {}
        self._buffers = {}


def _array_of(value: Value, memory: Array) -> Array:
    """The first bytes of `memory` as an array for `value`, whose shape is known."""
    shape = tuple(dim for dim in value.shape or () if isinstance(dim, int))
    dtype = np.dtype(value.dtype)
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def return_memory() -> None:
    """Make the C library give back what was freed: glibc alone keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def as_array(tensor: ort.OrtValue | Array) -> Array:
    """What `wrap` made or a block gave, as an array; a view of it where numpy has the dtype."""
    if isinstance(tensor, np.ndarray):
        return tensor
    dtype = _NOT_NUMPYS.get(tensor.data_type())
    if dtype is None:
        array: Array = tensor.numpy()
        return array
    import ml_dtypes

    elements = (ctypes.c_ubyte * tensor.tensor_size_in_bytes()).from_address(tensor.data_ptr())
    restored: Array = np.frombuffer(bytes(elements), getattr(ml_dtypes, dtype)).reshape(tensor.shape())
    return restored


def run_plainly(session: ort.InferenceSession, names: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs `names` of `session` as arrays of their own; of dtypes that numpy lacks, too, unless text is fed."""
    if any(array.dtype.kind == "O" for array in feeds.values()):
        return dict(zip(names, session.run(list(names), dict(feeds)), strict=True))
    tensors = session.run_with_ort_values(list(names), {name: tensor_over(array) for name, array in feeds.items()})
    return {name: np.array(as_array(tensor)) for name, tensor in zip(names, tensors, strict=True)}


def tensor_over(array: Array) -> ort.OrtValue:
    """A tensor over `array`'s memory, which must outlive it."""
    if array.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)
