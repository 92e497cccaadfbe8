"""What a backend is: the protocols behind which ONNX Runtime and TensorRT stand.

May import numpy and the manifest's types; for type checking also onnx-ir. Nothing of the runtime, which calls a backend
only through this module. Every failure of the library behind a backend is raised as BackendError.

A block's weights reach its engine by one of four *bindings*. `reference`: the engine reads them where they lie, their
addresses given once, at open (ONNX Runtime). `inputs`: the same, through engine inputs (TensorRT). `refit` and `swap`:
the engine is brought up to date from the arena each time the block's weights have arrived (TensorRT); such an engine
does so at the start of `execute`, which the chain calls only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trt_layering.store.manifest import Block

if TYPE_CHECKING:
    import onnx_ir as ir

Read = Callable[[memoryview, int], None]
Progress = Callable[[str, int, int], None]
"""Called with the stage's name, how much of it is done and how much there is."""


class Engine(Protocol):
    """One block, ready to execute. Not thread-safe: a chain executes its engines in turn."""

    def execute(self, live: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the block once.

        `live` holds the backend's tensors by name, among them every input of the block. `into` may name outputs with
        the tensors they are to be written to; others go to the buffers given at open, or are allocated where there are
        none. Returns all outputs by name. Buffers belong to the chain and are overwritten by the next sweep.
        """
        ...

    def close(self) -> None:
        """Release the engine; after this nothing of it refers to the weights' memory."""
        ...


class Runtime(Protocol):
    """Opens engines and moves tensors between numpy and the backend; one for each open chain."""

    fallbacks: list[str]
    """What could not be had as asked, each in words, for the log and `Chain.stats`."""

    def version(self) -> str:
        """The version of the library behind the backend."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """What prepared engines depend on beside the version."""
        ...

    def open_streamed(
        self, folder: Path, block: Block, weights: Mapping[str, np.ndarray[Any, Any]], buffers: Mapping[str, Any]
    ) -> Engine:
        """An engine that reads `weights` where they lie, at each execution. They are views of the arena with the
        dtypes and shapes of the manifest and hold nothing yet; they must outlive the engine."""
        ...

    def open_resident(self, folder: Path, block: Block, buffers: Mapping[str, Any], read: Read) -> Engine:
        """An engine that has its weights in memory of its own, laid out as executes fastest. They come from
        `weights.bin` in `folder`; `read` fills a buffer, page by page, from an offset of that file, and raises what
        the drive does."""
        ...

    def wrap(self, array: np.ndarray[Any, Any]) -> Any:
        """The backend's tensor over `array`, which must be C-contiguous and outlive it; copied only if it has to be."""
        ...

    def fill(self, tensor: Any, array: np.ndarray[Any, Any]) -> None:
        """Copy `array` into `tensor`, one that `wrap` made. BackendError where their shapes or dtypes differ."""
        ...

    def unwrap(self, tensor: Any) -> np.ndarray[Any, Any]:
        """`tensor` as a numpy array that the caller owns."""
        ...

    def close(self) -> None:
        """Give back memory kept between executions."""
        ...


class Builder(Protocol):
    """Turns a model into blocks that this backend can execute, on the machine that will execute them."""

    name: str
    suffix: str
    """Of engine files, for example ".onnx"."""

    def version(self) -> str:
        """The version of the library behind the backend."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """What prepared engines depend on beside the version; compared when a chain is opened."""
        ...

    def prepare(self, model: ir.Model, work: Path, memory: int, progress: Progress) -> Sequence[ir.Model]:
        """The model as one or more consecutive windows of prepared graph, typed, together computing what it computes.

        `work` is an empty folder that outlives the windows; `memory` is what preparing may take, in bytes.
        """
        ...

    def write_engine(self, block: ir.Model, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        """Write the engine of `block` without the weights named in `places`, which gives their offset and length in
        `weights.bin` beside `path`."""
        ...
