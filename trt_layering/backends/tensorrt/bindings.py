"""TensorRT engines of blocks, by how their weights reach them: as inputs, by a refit, or with the whole plan.

Imports TensorRT, so only after `present.require()`. What TensorRT refuses raises BackendError with the last line of its
log.

With `inputs`, engines of equal blocks are one, and each block has a context of its own, to which the addresses of its
weights are given once. With `refit` and `swap`, an engine holds its weights by itself: so at most two engines are there
at a time, in two slots that blocks take in turn. While one executes, the other is made ready.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path

import tensorrt as trt

from trt_layering.backends.tensorrt import versions
from trt_layering.backends.tensorrt.cuda import Event
from trt_layering.backends.tensorrt.library import Library
from trt_layering.backends.tensorrt.memory import Weight
from trt_layering.backends.tensorrt.tensors import Tensor
from trt_layering.errors import BackendError
from trt_layering.store.manifest import Block

_SLOTS = 2
_ONCE_MORE = "open the chain again; where it fails again, build it again on this machine"
_DTYPES = {
    "float32": trt.DataType.FLOAT, "float16": trt.DataType.HALF, "bfloat16": trt.DataType.BF16,
    "int8": trt.DataType.INT8, "int32": trt.DataType.INT32, "int64": trt.DataType.INT64,
    "uint8": trt.DataType.UINT8, "bool": trt.DataType.BOOL,
}  # fmt: skip


class Execution:
    """One context, and where what it executes on lies. Addresses and shapes are given to it when they change."""

    def __init__(self, library: Library, engine: trt.ICudaEngine, where: str) -> None:
        """`where` names the engine in errors."""
        self._library, self._engine, self._where = library, engine, where
        self._context = library.context(engine, where)
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def take_weight(self, name: str, weight: Weight) -> None:
        """Let the engine's input `name` be `weight` from now on."""
        self._place(name, weight.address)

    def execute(self, block: Block, live: Mapping[str, Tensor], placed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Ask for one execution, as `block`, on `live`, its results to go to `placed`."""
        for index, value in enumerate(block.inputs):
            self._place(f"i{index}", live[value.name].address)
            self._shape(f"i{index}", live[value.name].shape)
        results = {value.name: placed[value.name] for value in block.outputs}
        for index, tensor in enumerate(results.values()):
            tensor.take(self._result_shape(f"o{index}"))
            self._place(f"o{index}", tensor.address)
        with self._library.device.current():
            asked = self._context.execute_async_v3(self._library.device.compute.handle)
        self._library.require(asked, "TensorRT did not execute the block", block.name, _ONCE_MORE)
        return results

    def _place(self, name: str, address: int) -> None:
        if self._addresses.get(name) != address:
            taken = self._context.set_tensor_address(name, address)
            self._library.require(taken, f"TensorRT refused an address for {name}", self._where)
            self._addresses[name] = address

    def _shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes.get(name) != shape:
            taken = self._context.set_input_shape(name, shape)
            remedy = "give an input within the shapes the chain was built for, or build for more with --shape"
            self._library.require(taken, f"the shape {shape} of {name} is outside its range", self._where, remedy)
            self._shapes[name] = shape

    def _result_shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._context.get_tensor_shape(name))
        if any(dim < 0 for dim in shape):
            raise BackendError(
                f"the size of {name} depends on the values of the inputs", where=self._where,
                remedy="such models cannot be had with TensorRT here: build with --backend onnxruntime",
            )  # fmt: skip
        return shape


class InputsEngine:
    """A block whose weights are inputs of its engine; see `backends.base.Engine`. Borrows weights and buffers."""

    def __init__(
        self,
        library: Library,
        engine: trt.ICudaEngine,
        block: Block,
        weights: Mapping[str, Weight],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._block, self._buffers = block, buffers
        self._execution: Execution | None = Execution(library, engine, f"{block.name} ({block.file})")
        for index, name in enumerate(block.weights):
            self._execution.take_weight(f"w{index}", weights[name])

    def execute(self, live: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Ask for the block once."""
        if self._execution is None:
            raise BackendError("the engine is closed", where=self._block.name)
        return self._execution.execute(self._block, live, {**self._buffers, **into})

    def close(self) -> None:
        """Let context and engine go."""
        self._execution = None


class Instance:
    """An engine that holds weights, of the plan called `plan`, with what is needed to refit and to execute it."""

    def __init__(self, library: Library, plan: str, engine: trt.ICudaEngine) -> None:
        self.plan = plan
        self.holds = ""
        """The block whose weights it has."""
        self._library, self._engine = library, engine
        self._execution = Execution(library, engine, plan)
        self.execute = self._execution.execute
        self.take_weight = self._execution.take_weight
        self._refitters: dict[str, trt.Refitter] = {}

    def refit(self, block: Block, weights: Mapping[str, Weight]) -> None:
        """Ask, on the copy stream, for the weights of `block` to be taken over from where they lie. Each block has a
        refitter of its own, told once: one keeps all that it was ever told."""
        if block.name not in self._refitters:
            self._refitters[block.name] = self._library.refitter(self._engine, block.name, told(block, weights))
        with self._library.device.current():
            done = self._refitters[block.name].refit_cuda_engine_async(self._library.device.copy.handle)
        self._library.require(done, "TensorRT did not take the weights over", block.name, _ONCE_MORE)

    def end_refits(self) -> None:
        """It keeps the weights that it has: give back what refits took beside them, once they are done."""
        if versions.HAS_RELEASE_REFIT_RESOURCES:
            for refitter in self._refitters.values():
                refitter.release_refit_resources()
        self._refitters.clear()


def told(block: Block, weights: Mapping[str, Weight]) -> dict[str, tuple[trt.Weights, trt.TensorLocation]]:
    """What a refitter is told of the weights of `block`, by the engine's names."""
    locations = {"device": trt.TensorLocation.DEVICE, "host": trt.TensorLocation.HOST}
    found = {}
    for index, name in enumerate(block.weights):
        weight, dtype = weights[name], _DTYPES[weights[name].dtype]
        found[f"w{index}"] = (trt.Weights(dtype, weight.address, prod(weight.shape)), locations[weight.location])
    return found


class Slots:
    """Two places for engines that hold their weights. A block that takes one knows that the block that had it last has
    been executed: it is not the newest, and the chain asks for one block while another executes, never for more."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._places: list[Instance | None] = [None] * _SLOTS
        self._ready = [library.device.event() for _ in range(_SLOTS)]
        self._newest = 0

    def find(self, block: str) -> Instance | None:
        """The engine that holds the weights of `block`, if one does."""
        for place, instance in enumerate(self._places):
            if instance is not None and instance.holds == block:
                self._newest = place
                return instance
        return None

    def take(self, plan: str, make: Callable[[], trt.ICudaEngine]) -> tuple[Instance, Event]:
        """The other place than the newest, with an engine of `plan`: the one that is there, or one that `make` gives
        when that has been let go; and an event for what is then done to it."""
        self._newest = place = (self._newest + 1) % _SLOTS
        found = self._places[place]
        if found is None or found.plan != plan:
            found = self._places[place] = None
            found = self._places[place] = Instance(self._library, plan, make())
        found.holds = ""
        return found, self._ready[place]

    def forget(self) -> None:
        """Keep the engines, but as no block's, and let those who took them take them again."""
        for place, instance in enumerate(self._places):
            if instance is None:
                self._newest = place
            else:
                instance.holds = ""

    def empty(self) -> None:
        """Let the engines go."""
        self._places = [None] * _SLOTS


class RefitEngine:
    """A block whose weights an engine takes over from the arena; see `backends.base.Engine`. Borrows slots, weights and
    buffers; `plan` is its stripped plan, which equal blocks share."""

    def __init__(
        self, library: Library, slots: Slots, block: Block, plan: Plan, weights: Mapping[str, Weight],
        buffers: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._library, self._slots, self._block, self._plan = library, slots, block, plan
        self.plan = block.file
        self._weights, self._buffers = dict(weights), buffers

    def ready(self) -> Instance:
        """The engine with the block's weights, to which it was refitted on the copy stream, behind the copies of
        them."""
        instance = self._slots.find(self._block.name)
        if instance is None:
            instance, refitted = self._slots.take(self._block.file, self._plan.engine)
            if self._weights:
                self._refit(instance, refitted)
            instance.holds = self._block.name
        return instance

    def _refit(self, instance: Instance, refitted: Event) -> None:
        try:
            instance.refit(self._block, self._weights)
        finally:  # what was asked for reads the arena, even where it was not all
            refitted.record(self._library.device.copy)
            self._library.device.compute.wait(refitted)

    def execute(self, live: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Ask for the refit, if there has to be one, and for the block once."""
        return self.ready().execute(self._block, live, {**self._buffers, **into})

    def close(self) -> None:
        """The slots hold the engine."""


class SwapEngine:
    """A block whose whole plan comes from the weight store; see `backends.base.Engine`. Borrows slots, the plan's place
    in the arena, and buffers."""

    def __init__(
        self, library: Library, slots: Slots, block: Block, plan: Weight, buffers: Mapping[str, Tensor]
    ) -> None:
        self._library, self._slots, self._block, self._buffers = library, slots, block, buffers
        self._data = memoryview((ctypes.c_ubyte * plan.nbytes).from_address(plan.address)).cast("B")

    def ready(self) -> Instance:
        """The engine, out of the plan that has arrived; TensorRT copies what it needs of it."""
        instance = self._slots.find(self._block.name)
        if instance is None:
            name = self._block.name
            instance, _ = self._slots.take(name, lambda: self._library.engine(self._data, name))
            instance.holds = name
        return instance

    def execute(self, live: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the engine, if it is not there, and ask for the block once."""
        return self.ready().execute(self._block, live, {**self._buffers, **into})

    def close(self) -> None:
        """The slots hold the engine."""


class KeptEngine:
    """A block whose engine holds its weights for good; see `backends.base.Engine`. Borrows buffers."""

    def __init__(self, instance: Instance, block: Block, buffers: Mapping[str, Tensor]) -> None:
        self._instance: Instance | None = instance
        self._block, self._buffers = block, buffers

    def execute(self, live: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Ask for the block once."""
        if self._instance is None:
            raise BackendError("the engine is closed", where=self._block.name)
        return self._instance.execute(self._block, live, {**self._buffers, **into})

    def close(self) -> None:
        """Let the engine go."""
        self._instance = None


class Plan:
    """A plan file of a chain: read once, and deserialized as often as an engine of it is needed. Equal blocks share the
    file, and with the binding `inputs` the engine as well."""

    def __init__(self, library: Library, path: Path) -> None:
        self._library, self._path = library, path
        self._data = library.read(path)
        self._shared: trt.ICudaEngine | None = None

    def engine(self) -> trt.ICudaEngine:
        """A new engine."""
        return self._library.engine(memoryview(self._data), self._path.name)

    def shared(self) -> trt.ICudaEngine:
        """The one engine that all blocks with this plan execute; the plan's bytes are let go when it is there."""
        if self._shared is None:
            self._shared = self.engine()
            self._data = b""
        return self._shared


def first_refits(library: Library, slots: Slots, engines: Sequence[RefitEngine]) -> None:
    """Refit an engine of each plan once, with whatever lies in the arena: the first time takes far longer than later
    ones. Those of the first blocks come last and stay in the slots, though as no block's."""
    first = engines[:_SLOTS]
    there = {engine.plan for engine in first}
    for engine in {engine.plan: engine for engine in engines if engine.plan not in there}.values():
        engine.ready()
        library.device.copy.synchronize()
    for engine in first:
        engine.ready()
    slots.forget()
