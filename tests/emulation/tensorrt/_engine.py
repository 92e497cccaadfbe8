"""Runtimes, engines and execution contexts; imports numpy and `emulated_device`. Misuse that TensorRT does not notice
is an EmulationFault; what it notices is logged, and the call returns None or False."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from emulated_device import OutOfMemory, Work, machine

from . import _enums, _plan, _running, _values
from ._builder import scratch_for, shapes_and_values
from ._native import Native, plain

POISON = 0xFF
ALIGNMENT = int(os.environ.get("EMULATED_ALIGNMENT", "256"))
_PIECE = 1 << 20


def _pad(size: int) -> int:
    return max(1, -(-size // 256)) * 256


class State:
    """What an engine is on the device: its weights, and the work that uses it."""

    def __init__(self, plan: _plan.Plan) -> None:
        self.machine = machine()
        self.plan = plan
        self.offsets: dict[str, int] = {}
        self.correct: dict[str, bool] = {}
        self.executions: list[Work] = []
        self.refits: list[Work] = []
        self.active = self.refitting = 0
        self.closed = False
        size = 0
        for weight in plan.weights:
            self.offsets[weight.name] = size
            size += _pad(weight.nbytes)
        self.address = self.machine.allocate(max(256, size), "device", "library")
        at = 0
        for weight in plan.weights:
            if weight.stored:
                self.memory(weight)[:] = np.frombuffer(plan.values, np.uint8, weight.nbytes, at)
                at += weight.nbytes

    def memory(self, weight: _plan.PlanWeight) -> np.ndarray:
        """The engine's own copy of a weight, on the device."""
        return self.machine.view(self.address + self.offsets[weight.name], weight.nbytes)

    def pending(self) -> list[Work]:
        """Executions that have not been done."""
        self.executions = [work for work in self.executions if not work.done]
        return self.executions

    def pending_refits(self) -> list[Work]:
        self.refits = [work for work in self.refits if not work.done]
        return self.refits

    def close(self) -> None:
        """Give the device's memory back."""
        if self.pending() or self.pending_refits():
            self.machine.note_fault("an engine died while work that uses it was pending")
        self.closed = True
        self.machine.free(self.address)


def comes_after(stream: Any, other: Work) -> bool:
    """Whether what `stream` is given now runs after `other`, whatever the order of streams."""
    waiting = [*stream.queue, *stream.waiting_for, *stream.machine._across_null(stream)]
    seen: set[int] = set()
    while waiting:
        work = waiting.pop()
        if work is other:
            return True
        if id(work) not in seen and not work.done:
            seen.add(id(work))
            queue = list(work.stream.queue)
            waiting += [*work.after, *queue[: queue.index(work)]]
    return other.done


class Runtime(Native):
    DLA_core = plain("DLA_core", -1)
    engine_host_code_allowed = plain("engine_host_code_allowed", False)
    max_threads = plain("max_threads", 1)
    num_DLA_cores = property(lambda self: 0)
    logger = property(lambda self: self._logger)

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(
        self, serialized_engine: Any = None, stream_reader: Any = None, stream_reader_v2: Any = None
    ) -> ICudaEngine | None:
        """The engine, which owns a copy of all it needs, or None and an error in the log."""
        if os.environ.get("EMULATED_CUINIT", "0") != "0":
            machine().fault("a runtime used without a driver: TensorRT would crash")
        try:
            if stream_reader is not None:
                data = _read_in_order(stream_reader)
            elif stream_reader_v2 is not None:
                data = _read_anywhere(stream_reader_v2)
            else:
                data = bytes(memoryview(serialized_engine).cast("B"))
            return ICudaEngine._new(self, State(_plan.decode(data)))
        except _plan.PlanError as error:
            _values.error(self._logger, *error.args)
        except OutOfMemory as error:
            _values.error(self._logger, "2: OutOfMemory", f"Requested {error}.")
        return None


def _read_in_order(reader: Any) -> bytes:
    """All bytes of an IStreamReader."""
    pieces = []
    while piece := bytes(reader.read(_PIECE)):
        pieces.append(piece)
    return b"".join(pieces)


def _read_anywhere(reader: Any) -> bytes:
    """What an IStreamReaderV2 holds, as far as the plan goes: the header, then all of it from the start in pieces."""
    head = bytes(reader.read(64, 0))
    if len(head) < 16 or head[:4] != b"ftrt":
        return head
    if reader.seek(0, _enums.SeekPosition.SET) is False:
        return b""
    left = int.from_bytes(head[8:16], "little")
    pieces = []
    while left > 0:
        piece = bytes(reader.read(min(left, _PIECE), 0))
        if not piece or len(piece) > min(left, _PIECE):
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


class ICudaEngine(Native):
    """Dies with its last reference; contexts and refitters hold one."""

    def _setup(self, runtime: Runtime, state: State) -> None:
        self._runtime, self._state, self._plan = runtime, state, state.plan
        self._logger = runtime.logger
        weakref.finalize(self, state.close).atexit = False

    name = property(lambda self: self._plan.name)
    num_io_tensors = property(lambda self: len(self._plan.tensors))
    num_layers = property(lambda self: self._plan.layers)
    num_optimization_profiles = property(lambda self: len(self._plan.scratch))
    num_aux_streams = property(lambda self: 0)
    refittable = property(lambda self: bool(self._plan.refit))
    has_implicit_batch_dimension = property(lambda self: False)
    device_memory_size = property(lambda self: max(self._plan.scratch))
    device_memory_size_v2 = property(lambda self: max(self._plan.scratch))
    engine_capability = property(lambda self: _enums.EngineCapability.STANDARD)
    streamable_weights_size = property(lambda self: 0)

    def get_device_memory_size_for_profile(self, profile_index: int) -> int:
        return self._plan.scratch[profile_index]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self._plan.scratch[profile_index]

    def get_tensor_name(self, index: int) -> str:
        return self._plan.tensors[index].name

    def _find(self, name: str) -> _plan.PlanTensor | None:
        found = self._plan.tensor(name)
        if found is None:
            _values.error(self._logger, "3: API Usage Error", f"Given invalid tensor name: {name}.")
        return found

    def get_tensor_mode(self, name: str) -> Any:
        found = self._find(name)
        mode = "NONE" if found is None else "INPUT" if found.is_input else "OUTPUT"
        return getattr(_enums.TensorIOMode, mode)

    def get_tensor_dtype(self, name: str) -> Any:
        found = self._find(name)
        return _values.data_type(_values.ONNX_TO_TRT[found.onnx_type] if found else "FLOAT")

    def get_tensor_shape(self, name: str) -> _values.Dims:
        """-1 where it is dynamic."""
        found = self._find(name)
        return _values.Dims(found.shape if found else [])

    def get_tensor_location(self, name: str) -> Any:
        found = self._find(name)
        on_host = found is not None and found.is_shape_tensor
        return _enums.TensorLocation.HOST if on_host else _enums.TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        found = self._find(name)
        return found is not None and found.is_shape_tensor

    def get_tensor_format(self, name: str, profile_index: int = 0) -> Any:
        return _enums.TensorFormat.LINEAR

    def get_tensor_vectorized_dim(self, name: str, profile_index: int = 0) -> int:
        return -1

    def get_tensor_bytes_per_component(self, name: str, profile_index: int = 0) -> int:
        return int(_values.ITEMSIZE[_values.ONNX_TO_TRT[self._plan.tensor(name).onnx_type]])

    def get_tensor_components_per_element(self, name: str, profile_index: int = 0) -> int:
        return 1

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[_values.Dims]:
        """min, opt and max; nothing for outputs and shape tensors."""
        found = self._find(name)
        if found is None or not found.is_input or found.is_shape_tensor:
            return []
        return [_values.Dims(shape) for shape in found.profiles[profile_index]]

    def get_tensor_profile_values(self, name: Any, profile_index: Any) -> list[list[int]]:
        found = self._find(name)
        return found.profiles[profile_index] if found is not None and found.is_shape_tensor else []

    def create_execution_context(self, strategy: Any = None, runtime_config: Any = None) -> IExecutionContext | None:
        """USER_MANAGED takes no memory; the others take `device_memory_size_v2`, or None and an error in the log."""
        if runtime_config is not None:
            machine().fault("create_execution_context of a runtime_config is not emulated")
        kinds = _enums.ExecutionContextAllocationStrategy
        return self._context(None if strategy == kinds.USER_MANAGED else max(self._plan.scratch))

    def create_execution_context_without_device_memory(self) -> IExecutionContext:
        return self._context(None)

    def _context(self, scratch: int | None) -> IExecutionContext | None:
        try:
            return IExecutionContext._new(self, scratch)
        except OutOfMemory as error:
            _values.error(self._logger, "2: OutOfMemory", f"Requested {error}.")
            return None

    def serialize(self) -> _values.IHostMemory:
        """The plan with the weights the engine has now."""
        plan = _plan.decode(self._plan.encode())
        plan.values = b"".join(self._state.memory(weight).tobytes() for weight in plan.weights if weight.stored)
        return _values.IHostMemory(plan.encode())


class _Scratch:
    """The scratch of a context, and the executions that use it."""

    everywhere: ClassVar[list[tuple[Any, int, int, Work, Any]]] = []
    """(machine, start, end, work, context's key) of all that may be pending."""

    def __init__(self, size: int | None) -> None:
        self.machine = machine()
        self.own = self.machine.allocate(size, "device", "library") if size is not None else 0
        self.address, self.size = self.own, size or 0
        self.works: list[Work] = []

    def close(self) -> None:
        if any(not work.done for work in self.works):
            self.machine.note_fault("an execution context died while its work was pending")
        elif self.own:
            self.machine.free(self.own)

    def check(self, stream: Any, size: int) -> None:
        """Fault unless `size` bytes are there and nobody else may use them at the same time."""
        if not self.address or self.size < size:
            self.machine.fault(f"a context has {self.size} bytes of scratch and needs {size}")
        self.machine.view(self.address, size)
        users = [u for u in _Scratch.everywhere if u[0] is self.machine and not u[3].done]
        _Scratch.everywhere[:] = users
        for _, start, end, work, key in users:
            shared = start < self.address + size and self.address < end
            if (shared or key is self) and not comes_after(stream, work):
                what = "a context" if key is self else "scratch memory"
                self.machine.fault(f"{what} is used by two executions that may run at the same time")

    def use(self, work: Work, size: int) -> None:
        self.works = [one for one in self.works if not one.done] + [work]
        _Scratch.everywhere.append((self.machine, self.address, self.address + size, work, self))


class IExecutionContext(Native):
    """Holds its engine."""

    name = plain("name", "")
    debug_sync = plain("debug_sync", False)
    enqueue_emits_profile = plain("enqueue_emits_profile", True)
    nvtx_verbosity = plain("nvtx_verbosity", _enums.ProfilingVerbosity.LAYER_NAMES_ONLY)
    persistent_cache_limit = plain("persistent_cache_limit", 0)

    def _setup(self, engine: ICudaEngine, scratch: int | None) -> None:
        self._engine, self._state, self._plan = engine, engine._state, engine._plan
        self._logger = engine._logger
        self._scratch = _Scratch(scratch)
        self._profile = 0
        self._chosen: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        weakref.finalize(self, self._scratch.close).atexit = False

    engine = property(lambda self: self._engine)
    active_optimization_profile = property(lambda self: self._profile)
    device_memory = property(
        lambda self: self._scratch.address,
        lambda self, address: self._set_scratch(address, max(self._plan.scratch)),
    )

    @property
    def all_binding_shapes_specified(self) -> bool:
        return not self._missing_shapes()

    @property
    def all_shape_inputs_specified(self) -> bool:
        return not self._missing_shapes()

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Forgets the shapes set before."""
        if not 0 <= profile_index < len(self._plan.scratch):
            return self._refuse(f"There is no optimization profile {profile_index}.")
        self._profile = int(profile_index)
        self._chosen.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self._set_scratch(int(memory), int(size))

    def _set_scratch(self, address: int, size: int) -> None:
        if self._scratch.own:
            machine().fault("device memory given to a context that manages its own")
        if address % 256:
            machine().fault(f"scratch memory at {address:#x} is not aligned to 256 bytes")
        self._scratch.address, self._scratch.size = address, size

    def update_device_memory_size_for_shapes(self) -> int:
        chosen = self._shapes()
        return scratch_for(self._plan, chosen) if chosen is not None else 0

    def set_input_shape(self, name: str, shape: Any) -> bool:
        """False and an error in the log outside the profile."""
        tensor, shape = self._plan.tensor(name), tuple(int(size) for size in shape)
        if tensor is None or not tensor.is_input:
            return self._refuse(f"Given invalid tensor name: {name}. It is no input.")
        if tensor.is_shape_tensor:
            return list(shape) == tensor.shape or self._refuse(f"Input {name} has the shape {tensor.shape}.")
        low, _, high = tensor.profiles[self._profile]
        fits = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
        if not fits:
            return self._refuse(
                f"Set dimension {list(shape)} for tensor {name} does not satisfy any optimization profiles. Valid "
                f"range for profile {self._profile}: {low}..{high}."
            )
        self._chosen[name] = shape
        return True

    def _refuse(self, text: str) -> bool:
        _values.error(self._logger, "3: API Usage Error", text)
        return False

    def set_tensor_address(self, name: str, memory: int) -> bool:
        """0 forgets it. The documentation asks for an alignment of 256 bytes at least."""
        tensor, memory = self._plan.tensor(name), int(memory)
        if tensor is None:
            return self._refuse(f"Given invalid tensor name: {name}.")
        if memory % ALIGNMENT and not tensor.is_shape_tensor:
            machine().fault(f"tensor {name} at {memory:#x} is not aligned to {ALIGNMENT} bytes")
        self._addresses[name] = memory
        return True

    def get_tensor_address(self, name: str) -> int:
        return self._addresses.get(name, 0)

    def _missing_shapes(self) -> list[str]:
        return [
            t.name
            for t in self._plan.tensors
            if t.is_input
            and (not self._addresses.get(t.name) if t.is_shape_tensor else -1 in t.shape and t.name not in self._chosen)
        ]

    def _shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Shapes of all inputs (values, for shape tensors, read now), or None while some are not set."""
        if self._missing_shapes():
            return None
        return {
            t.name: self._host_values(t) if t.is_shape_tensor else self._chosen.get(t.name, tuple(t.shape))
            for t in self._plan.tensors
            if t.is_input
        }

    def _host_values(self, tensor: _plan.PlanTensor) -> tuple[int, ...]:
        kind = _values.ONNX_TO_TRT[tensor.onnx_type]
        data = ctypes.string_at(self._addresses[tensor.name], _values.nbytes(kind, tensor.shape))
        return tuple(np.frombuffer(data, _values.NUMPY[kind]).tolist())

    def _all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs and outputs, as far as they are known."""
        chosen = self._shapes()
        if chosen is None:
            return dict(self._chosen)
        shapes, values = shapes_and_values(self._plan, chosen)
        return dict(shapes) | _running.output_shapes(self._plan.model, shapes, values)

    def get_tensor_shape(self, name: str) -> _values.Dims:
        """-1 where it is not known yet."""
        tensor = self._plan.tensor(name)
        return _values.Dims(self._all_shapes().get(name, tensor.shape) if tensor else [])

    def infer_shapes(self) -> list[str]:
        """Inputs whose shape or values are still missing."""
        return self._missing_shapes()

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Shapes and addresses count as they are now, memory as it is when the stream gets there."""
        missing = self._missing_shapes() or [n for n in self._plan_names() if not self._addresses.get(n)]
        if missing:
            return self._refuse(f"Not all shapes or addresses are specified: {', '.join(missing)}.")
        stream = machine().stream(int(stream_handle))
        size = self._plan.scratch[self._profile]
        self._scratch.check(stream, size)
        for refit in self._state.pending_refits():
            if not comes_after(stream, refit):
                machine().fault("an engine executes while a refit of it may run at the same time")
        run = _Execution(self, size)
        uses = run.uses()
        works = [stream.enqueue(run.begin, "execution", uses), stream.enqueue(run.end, "execution", uses)]
        self._state.executions += works
        for work in works:
            self._scratch.use(work, size)
        return True

    def _plan_names(self) -> Iterable[str]:
        return (tensor.name for tensor in self._plan.tensors)


class _Execution:
    """One enqueued inference, in two pieces with time between: the first spoils scratch and outputs, the second reads
    the inputs and writes the outputs. So data that changes, or is looked at, in between is noticed."""

    def __init__(self, context: IExecutionContext, scratch: int) -> None:
        self.state, self.machine = context._state, machine()
        self.scratch = (context._scratch.address, scratch)
        self.host: dict[str, np.ndarray] = {}
        self.buffers: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        shapes = context._all_shapes()
        self.inputs = context._plan.input_names
        for tensor in context._plan.tensors:
            kind = _values.ONNX_TO_TRT[tensor.onnx_type]
            shape = shapes[tensor.name]
            if any(dimension < 0 for dimension in shape):
                self.machine.fault(f"output {tensor.name} depends on data: it needs an IOutputAllocator, not emulated")
            size = _values.nbytes(kind, shape)
            address = context._addresses[tensor.name]
            if tensor.is_shape_tensor:
                self.host[tensor.name] = np.frombuffer(ctypes.string_at(address, size), np.uint8)
            self.buffers[tensor.name] = (tensor.onnx_type, shape, address, size)
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        ranges = [(a, a + n, name) for name, (_, _, a, n) in self.buffers.items() if name not in self.host]
        ranges.append((self.scratch[0], sum(self.scratch), "scratch"))
        written = [one for one in ranges if one[2] not in self.inputs]
        for start, end, name in written:
            for other_start, other_end, other in ranges:
                if other != name and start < other_end and other_start < end:
                    self.machine.fault(f"{name} is written where {other} is")

    def uses(self) -> list[tuple[int, int]]:
        """Memory that must stay until it is done."""
        buffers = [(a, n) for name, (_, _, a, n) in self.buffers.items() if name not in self.host and n]
        return [*buffers, self.scratch]

    def _views(self, names: Iterable[str]) -> dict[str, tuple[int, tuple[int, ...], np.ndarray]]:
        return {
            name: (kind, shape, self.host[name] if name in self.host else self.machine.view(address, size))
            for name, (kind, shape, address, size) in self.buffers.items()
            if name in names
        }

    def begin(self) -> None:
        self._require_engine()
        self.state.active += 1
        self.machine.view(*self.scratch)[:] = POISON
        self.token = np.frombuffer(os.urandom(16), np.uint8)
        self.machine.view(*self.scratch)[:16] = self.token
        for _, _, data in self._views(set(self.buffers) - set(self.inputs)).values():
            data[:] = POISON

    def end(self) -> None:
        self._require_engine()
        self.state.active -= 1
        if not np.array_equal(self.machine.view(*self.scratch)[:16], self.token):
            self.machine.fault("scratch memory was written by others during an execution")
        weights = {w.name: (w.onnx_type, tuple(w.shape), self.state.memory(w)) for w in self.state.plan.weights}
        outputs = self._views(set(self.buffers) - set(self.inputs))
        _running.run(self.state.plan.model, self._views(self.inputs) | weights, outputs)
        if not all(self.state.correct.values()):
            for _, _, data in outputs.values():
                data[::3] ^= 0x15
        self.machine.view(*self.scratch)[:] = POISON

    def _require_engine(self) -> None:
        if self.state.closed:
            self.machine.fault("the engine is gone before its work was done")
        if self.state.refitting:
            self.machine.fault("an engine executes while it is refitted")
