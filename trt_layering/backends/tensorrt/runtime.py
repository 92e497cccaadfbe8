"""Opens and executes chains of TensorRT engines. Imports TensorRT, so only after `present.require()`.

Every failure of the GPU or of TensorRT is raised as BackendError, a failed allocation as MemoryLimitError. All memory
is taken when a chain is opened, but for engines that come and go with their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from trt_layering.backends.base import Arena, Buffers, Engine, Read
from trt_layering.backends.tensorrt import memory, present
from trt_layering.backends.tensorrt.bindings import (
    InputsEngine,
    Instance,
    KeptEngine,
    Plan,
    RefitEngine,
    Slots,
    SwapEngine,
    first_refits,
)
from trt_layering.backends.tensorrt.cuda import Device, DeviceMemory, Event, HostMemory
from trt_layering.backends.tensorrt.library import Library
from trt_layering.backends.tensorrt.tensors import DeviceBuffers, Tensor, buffers, bytes_of, empty
from trt_layering.errors import BackendError
from trt_layering.store.manifest import PAGE, Block, Chain, Extent, Value

Array = np.ndarray[Any, Any]

_MARKS = 8
_PIECE = 4 << 20


class TensorRt:
    """The TensorRT side of one open chain; see `backends.base.Runtime`."""

    ahead = 1
    in_host_memory = False

    def __init__(self, chain: Chain) -> None:
        """Raises BackendError where the machine has no GPU or no TensorRT, ForeignError where the chain was built for
        others."""
        present.require()
        assert chain.tensorrt is not None, "the manifest is checked when it is read"
        self.fallbacks: list[str] = []
        self._chain, self._how = chain, chain.tensorrt
        self._plans: dict[str, Plan] = {}
        self._kept: dict[int, DeviceMemory] = {}
        self._waiting: list[RefitEngine] = []
        self._device = Device()
        try:
            self._free_before, _ = self._device.memory_info()
            self._library = Library(self._device, self._how.scratch)
            self._slots = Slots(self._library)
            self._marks: Iterator[Event] = cycle([self._device.event() for _ in range(_MARKS)])
        except BaseException:
            self._device.close()
            raise

    version = staticmethod(present.version)
    fingerprint = staticmethod(present.fingerprint)

    def arena(self, size: int, blocks: int, threads: int, read_size: int) -> Arena:
        """The arena where the chain's placement says."""
        placement: memory.Placement = "pinned" if self._how.binding == "swap" else self._how.placement
        return memory.make_arena(placement, self._device, size, blocks, threads, read_size)

    def mark(self) -> Event:
        """An event behind all that was asked of the compute stream."""
        mark = next(self._marks)
        mark.record(self._device.compute)
        return mark

    def settle(self) -> None:
        """Wait for both streams; see `backends.base.Runtime`."""
        self._device.settle()

    def open_streamed(
        self, folder: Path, block: Block, weights: Mapping[str, memory.Weight], buffers: Mapping[str, Tensor]
    ) -> Engine:
        """An engine of the chain's binding; see `backends.base.Runtime`."""
        if self._how.binding == "swap":
            return SwapEngine(self._library, self._slots, block, next(iter(weights.values())), buffers)
        plan = self._plan(folder, block)
        if self._how.binding == "inputs" or not block.weights:
            return InputsEngine(self._library, plan.shared(), block, weights, buffers)
        engine = RefitEngine(self._library, self._slots, block, plan, weights, buffers)
        self._waiting.append(engine)
        return engine

    def ready(self) -> None:
        """All engines are open: refit each once."""
        first_refits(self._library, self._slots, self._waiting)
        self._waiting.clear()

    def _plan(self, folder: Path, block: Block) -> Plan:
        if block.file not in self._plans:
            self._plans[block.file] = Plan(self._library, folder / block.file)
        return self._plans[block.file]

    def open_resident(self, folder: Path, block: Block, buffers: Mapping[str, Tensor], read: Read) -> Engine:
        """An engine with its weights in device memory: its inputs, or its own."""
        staging = self._device.pinned(_PIECE, "staging")
        try:
            if self._how.binding == "swap":
                engine = self._library.engine(self._whole(block, read), block.name)
                return KeptEngine(Instance(self._library, block.name, engine), block, buffers)
            plan = self._plan(folder, block)
            if self._how.binding == "inputs" or not block.weights:
                weights = self._loaded(block, self._kept, read, staging)
                return InputsEngine(self._library, plan.shared(), block, weights, buffers)
            return KeptEngine(self._refitted(block, plan, read, staging), block, buffers)
        finally:
            staging.free()

    def _refitted(self, block: Block, plan: Plan, read: Read, staging: HostMemory) -> Instance:
        """An engine that took the block's weights over."""
        instance = Instance(self._library, block.name, plan.engine())
        extents: dict[int, DeviceMemory] = {}
        weights = self._loaded(block, extents, read, staging)
        if weights:
            try:
                instance.refit(block, weights)
            finally:  # what was asked for reads the weights, even where it was not all
                self._device.copy.synchronize()
        for passing in extents.values():
            passing.free()
        instance.end_refits()
        return instance

    def _whole(self, block: Block, read: Read) -> memoryview:
        """The plan that is the block's extent."""
        (index,) = block.extents
        extent = self._chain.extents[index]
        (plan,) = extent.tensors
        array = np.empty(extent.length + PAGE, np.uint8)
        start = -array.ctypes.data % PAGE
        read(array[start : start + extent.length].data, extent.offset)
        return array[start + plan.offset : start + plan.offset + plan.nbytes].data

    def _loaded(
        self, block: Block, extents: dict[int, DeviceMemory], read: Read, staging: HostMemory
    ) -> dict[str, memory.Weight]:
        """The block's weights in device memory: `extents`, by number, to which those are added that are missing."""
        weights = {}
        for index in block.extents:
            if index not in extents:
                extents[index] = self._load(self._chain.extents[index], f"the weights of {block.name}", read, staging)
            for tensor in self._chain.extents[index].tensors:
                address = extents[index].address + tensor.offset
                weights[tensor.name] = memory.Weight(address, tensor.nbytes, tensor.dtype, tensor.shape, "device")
        return weights

    def _load(self, extent: Extent, purpose: str, read: Read, staging: HostMemory) -> DeviceMemory:
        loaded = self._device.allocate(extent.length, purpose)
        for begin in range(0, extent.length, _PIECE):
            part = staging.memory[: min(_PIECE, extent.length - begin)]
            read(part, extent.offset + begin)
            self._device.upload(loaded.address + begin, part, self._device.copy)
            self._device.copy.synchronize()
        return loaded

    def buffers(self, places: Sequence[tuple[Value, int]], nbytes: int, ends: Sequence[Value]) -> DeviceBuffers:
        """Device memory for one request, its inputs and outputs included; it stays the runtime's."""
        rows = {value.name for block in self._chain.blocks if block.rows is not None for value in block.outputs}
        return buffers(self._device, places, nbytes, ends, rows)

    def feed(self, arrays: Mapping[str, Array], buffers: Buffers) -> dict[str, Tensor]:
        """`arrays` copied to the inputs' memory."""
        for name, array in arrays.items():
            self.fill(buffers.tensors[name], array)
        return {name: buffers.tensors[name] for name in arrays}

    def wrap(self, array: Array) -> Tensor:
        """There is no memory for what nobody named."""
        raise BackendError(
            f"there is no device memory for a value of {array.dtype} and shape {array.shape}",
            remedy="report this as a fault",
        )

    def fill(self, tensor: Tensor, array: Array) -> None:
        """Copy `array`, whose shape `tensor` has from then on; see `backends.base.Runtime`."""
        if array.dtype.name != tensor.dtype:
            raise BackendError(f"{array.dtype} does not fit where {tensor.name!r} of {tensor.dtype} is expected")
        tensor.take(array.shape)
        data = bytes_of(np.ascontiguousarray(array))
        if tensor.host is None:
            self._device.write(tensor.address, data)
        elif tensor.nbytes:
            tensor.host[: tensor.nbytes] = data
            self._device.upload(tensor.address, tensor.host[: tensor.nbytes], self._device.compute)

    def unwrap(self, tensor: Tensor) -> Array:
        """What `tensor` holds when all that was asked before is done; an array that the caller owns."""
        array = empty(tensor)
        if not tensor.nbytes:
            return array
        if tensor.host is None:
            self._device.read(bytes_of(array), tensor.address)
            return array
        host = tensor.host[: tensor.nbytes]
        self._device.download(host, tensor.address, self._device.compute)
        self.mark().wait()
        bytes_of(array)[:] = host
        return array

    def device_bytes(self) -> int:
        """By how much the driver says that free memory has become less since this was made."""
        free, _ = self._device.memory_info()
        return max(0, self._free_before - free)

    def close(self) -> None:
        """Give everything back. Engines are closed by now, and nothing executes."""
        self._slots.empty()
        self._plans.clear()
        self._waiting.clear()
        self._library.close()
        self._device.close()
