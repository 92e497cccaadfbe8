"""Every block with one binding on this device: is it right, and how long does it take. Measured in a child process.

May import child and the manifest's types; in the child it imports TensorRT. What fails raises there what it raises, and
so here: BackendError, MemoryLimitError, BuildError for a child that died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_layering import child
from trt_layering.backends.tensorrt.candidates import Measured
from trt_layering.compare import difference
from trt_layering.store.manifest import Binding, Block, Placement, Value

if TYPE_CHECKING:
    from trt_layering.backends.tensorrt.library import Library
    from trt_layering.backends.tensorrt.memory import Weight
    from trt_layering.backends.tensorrt.tensors import DeviceBuffers, Tensor

Array = np.ndarray[Any, Any]

_RUNS = 5


@dataclass(frozen=True)
class Case:
    """A block `name` and its `plan`: `inputs`, `outputs` and weights by their names in `arrays`, which holds what it
    takes and what it gives, and in `onnx`, which holds its weights as w0, w1, ..."""

    name: str
    plan: str
    plan_bytes: int
    onnx: str
    arrays: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: int
    binding: Binding


def measure(cases: Sequence[Case], scratch: int) -> list[Measured]:
    """One result for each of `cases`, whose engines take at most `scratch` bytes of scratch."""
    found = child.call(_measure, {"cases": [asdict(case) for case in cases], "scratch": scratch})
    return [Measured(**one) for one in found]


def placement() -> tuple[Placement, str]:
    """Where the arena serves best on this device, and in words what was measured."""
    found, words = child.call(_place, {})
    return found, words


def free_bytes() -> int:
    """What the GPU has to give."""
    found: int = child.call(_free, {})
    return found


def _free(_task: Mapping[str, Any]) -> int:
    """In the child."""
    from trt_layering.backends.tensorrt import present
    from trt_layering.backends.tensorrt.cuda import Device

    present.require()
    device = Device()
    try:
        return device.memory_info()[0]
    finally:
        device.close()


def _place(_task: Mapping[str, Any]) -> tuple[str, str]:
    """In the child."""
    from trt_layering.backends.tensorrt import placement as module
    from trt_layering.backends.tensorrt import present
    from trt_layering.backends.tensorrt.cuda import Device

    present.require()
    device = Device()
    try:
        results = module.measure(device)
    finally:
        device.close()
    return module.choose(results), "; ".join(f"{result.placement}: {result.words}" for result in results)


def _measure(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """In the child."""
    from trt_layering.backends.tensorrt import present
    from trt_layering.backends.tensorrt.cuda import Device
    from trt_layering.backends.tensorrt.library import Library

    present.require()
    found = []
    for fields in task["cases"]:
        device = Device()
        library = Library(device, task["scratch"])
        try:
            found.append(asdict(_Trial(library, Case(**fields)).measured()))
        finally:
            library.close()
            device.close()
    return found


class _Trial:
    """One case on a device of its own."""

    def __init__(self, library: Library, case: Case) -> None:
        self._library, self._case = library, case
        self._feeds, self._wanted = child.load_arrays(Path(case.arrays))
        self._block = Block(
            name=case.name, file="plan", digest="0" * 32, extents=(),
            inputs=tuple(_value(name, self._feeds[name]) for name in case.inputs),
            outputs=tuple(_value(name, self._wanted[name]) for name in case.outputs),
            weights=tuple(f"w{index}" for index in range(case.weights)),
        )  # fmt: skip
        self._plan = Path(case.plan).read_bytes()

    def measured(self) -> Measured:
        """Checked and timed."""
        buffers = self._buffers()
        bind_seconds, execute = self._bound()
        live = {name: buffers.tensors[name] for name in self._case.inputs}
        placed = {name: buffers.tensors[name] for name in self._case.outputs}
        execute_seconds = self._timed(lambda: execute(live, placed))
        return Measured(
            block=self._case.name, bind_seconds=bind_seconds, execute_seconds=execute_seconds,
            max_rel_diff=self._difference(placed), plan_bytes=self._case.plan_bytes,
        )  # fmt: skip

    def _buffers(self) -> DeviceBuffers:
        from trt_layering.backends.tensorrt.tensors import buffers, bytes_of

        device = self._library.device
        found = buffers(device, (), 0, (*self._block.inputs, *self._block.outputs))
        for name in self._case.inputs:
            array = np.ascontiguousarray(self._feeds[name])
            if array.nbytes:
                device.write(found.tensors[name].address, bytes_of(array))
        return found

    def _bound(self) -> tuple[float, Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Any]]:
        """What it takes to bring an engine up to date, the first time left out, and how to execute it."""
        from trt_layering.backends.tensorrt.bindings import Instance

        library, block = self._library, self._block
        make = partial(library.engine, memoryview(self._plan), block.name)
        times = [self._seconds(make) for _ in range(_RUNS if self._case.binding == "swap" else 0)]
        instance = Instance(library, block.name, make())
        execute = partial(instance.execute, block)
        if self._case.binding == "swap":
            return median(times[1:]), execute
        weights = self._weights()
        if self._case.binding == "inputs" or not weights:
            for name, weight in weights.items():
                instance.take_weight(name, weight)
            return 0.0, execute
        times = [self._seconds(lambda: instance.refit(block, weights)) for _ in range(_RUNS)]
        return median(times[1:]), execute

    def _weights(self) -> dict[str, Weight]:
        import onnx_ir as ir

        from trt_layering.backends.tensorrt.memory import Weight
        from trt_layering.backends.tensorrt.tensors import bytes_of
        from trt_layering.graph.dtypes import word

        device, weights = self._library.device, {}
        initializers = ir.load(self._case.onnx).graph.initializers
        for name in self._block.weights:
            tensor = initializers[name].const_value
            assert tensor is not None
            array = np.ascontiguousarray(tensor.numpy())
            memory = device.allocate(array.nbytes, f"the weights of {self._case.name}")
            device.write(memory.address, bytes_of(array))
            weights[name] = Weight(memory.address, array.nbytes, word(tensor.dtype), array.shape, "device")
        return weights

    def _seconds(self, work: Callable[[], object]) -> float:
        """What `work` takes until all that it asked of the copy stream is done."""
        begin = time.perf_counter()
        done = work()
        self._library.device.copy.synchronize()
        took = time.perf_counter() - begin
        del done
        return took

    def _timed(self, work: Callable[[], object]) -> float:
        """What `work` takes on the compute stream, once it has been done before."""
        device = self._library.device
        times = []
        for _ in range(_RUNS):
            begin, end = device.timed_event(), device.timed_event()
            begin.record(device.compute)
            work()
            end.record(device.compute)
            end.wait()
            times.append(end.seconds_since(begin))
        return median(times[1:])

    def _difference(self, placed: Mapping[str, Tensor]) -> float:
        """The largest difference from what ONNX Runtime gave, as a part of the largest element of that output."""
        from trt_layering.backends.tensorrt.tensors import bytes_of, empty

        worst = 0.0
        for name in self._case.outputs:
            got = empty(placed[name])
            if got.nbytes:
                self._library.device.read(bytes_of(got), placed[name].address)
            diff, scale = difference(self._wanted[name], got)
            worst = max(worst, diff / scale if scale else diff)
        return worst


def _value(name: str, array: Array) -> Value:
    return Value(name=name, dtype=array.dtype.name, shape=array.shape)
