"""What a backend is: the protocols behind which ONNX Runtime and TensorRT stand.

May import numpy and the manifest's types; for type checking also onnx-ir. Nothing of the runtime, which calls a backend
only through this module. Every failure of the library behind a backend is raised as BackendError.

A block's weights reach its engine by one of four *bindings*. `reference`: the engine reads them where they lie, their
addresses given once, at open (ONNX Runtime). `inputs`: the same, through engine inputs (TensorRT). `refit` and `swap`:
the engine is brought up to date from the arena each time the block's weights have arrived (TensorRT); such an engine
does so at the start of `execute`, which the chain calls only then.

Where a device executes, `execute` only asks: the chain asks for the next block while one executes, and waits for marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trt_layering.errors import BuildError
from trt_layering.store.manifest import Block, TensorRt, Value

if TYPE_CHECKING:
    import onnx_ir as ir

    from trt_layering.graph.cuts import Cut
    from trt_layering.shapes import ShapeRange

Read = Callable[[memoryview, int], None]
Progress = Callable[[str, int, int], None]
"""Called with the stage's name, how much of it is done and how much there is."""


class BlockTooLarge(BuildError):
    """No engine of block number `block` can be built in the memory there is; of a smaller block one may."""

    block = 0


class Landing(Protocol):
    """Where one read is to go."""

    @property
    def memory(self) -> memoryview:
        """For the bytes that are read."""
        ...

    def put(self) -> None:
        """The bytes are there, and nothing uses their place in the arena: bring them to it, perhaps later on, in the
        order in which this is called."""
        ...


class Arena(Protocol):
    """The memory that streamed weights pass through. Whoever closes it sees to it that nothing uses it any more."""

    @property
    def size(self) -> int:
        """Its bytes."""
        ...

    @property
    def staged(self) -> bool:
        """Reads land elsewhere first, so they may begin before their place in the arena is free."""
        ...

    def landing(self, thread: int, target: int, length: int) -> Landing:
        """Where loader thread number `thread` is to read `length` bytes that belong at `target`. One at a time for each
        thread; waits until the memory for it is free."""
        ...

    def publish(self, block: int) -> None:
        """By the loader: all that block number `block` needs has been put."""
        ...

    def arrive(self, block: int) -> None:
        """By the executor: what it asks of engines from now on must find what was put for `block` at its place."""
        ...

    def pieces(self, target: int, length: int) -> Iterator[memoryview]:
        """Bytes that have been put, in order; each piece is valid until the next. For checksums."""
        ...

    def weight(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
        """The weight that is to lie at `offset`, as the backend's engines take it; valid until `close`."""
        ...

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        ...


class Mark(Protocol):
    """A moment in what was asked of a backend."""

    def wait(self) -> None:
        """Return when all that was asked before is done. Raises BackendError if it failed."""
        ...


class Buffers(Protocol):
    """The memory of one request's activations."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The backend's tensors over it by name."""
        ...


class Engine(Protocol):
    """One block, ready to execute. Not thread-safe: a chain executes its engines in turn."""

    def execute(self, live: Mapping[str, Any], into: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the block once, or have it done: see `Runtime.mark`.

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

    ahead: int
    """How many blocks may be unfinished when the next is asked for; 0 where `execute` returns when it is done."""

    in_host_memory: bool
    """Whether tensors can be made over any array, so that a caller's array can be written to directly."""

    def arena(self, size: int, blocks: int, threads: int, read_size: int) -> Arena:
        """Memory of `size` bytes for the weights of `blocks` blocks, to which `threads` loader threads bring pieces of
        at most `read_size` bytes. MemoryLimitError where the machine has less to give."""
        ...

    def mark(self) -> Mark:
        """Stands for all that was asked so far."""
        ...

    def settle(self) -> None:
        """Return when nothing that was asked can be under way, whatever of it failed."""
        ...

    def open_streamed(
        self, folder: Path, block: Block, weights: Mapping[str, Any], buffers: Mapping[str, Any]
    ) -> Engine:
        """An engine that takes `weights` from where they lie, at each execution. They are what `Arena.weight` gave and
        hold nothing yet; the arena must outlive the engine."""
        ...

    def ready(self) -> None:
        """All engines are open; what is better done before the first run is done now."""
        ...

    def open_resident(self, folder: Path, block: Block, buffers: Mapping[str, Any], read: Read) -> Engine:
        """An engine that has its weights in memory of its own, laid out as executes fastest. They come from
        `weights.bin` in `folder`; `read` fills a buffer, page by page, from an offset of that file, and raises what
        the drive does."""
        ...

    def buffers(self, places: Sequence[tuple[Value, int]], nbytes: int, ends: Sequence[Value]) -> Buffers:
        """Memory for one request: `nbytes` in which activations lie at their `places`; `ends` are the model's inputs
        and outputs of known size, for which a backend that cannot use a caller's arrays takes memory, too."""
        ...

    def feed(self, arrays: Mapping[str, np.ndarray[Any, Any]], buffers: Buffers) -> dict[str, Any]:
        """The backend's tensors of a model's inputs: over `arrays`, which are C-contiguous and must outlive them, or in
        the memory of `buffers`."""
        ...

    def wrap(self, array: np.ndarray[Any, Any]) -> Any:
        """The backend's tensor over `array`, which must be C-contiguous and outlive it; copied only if it has to be."""
        ...

    def fill(self, tensor: Any, array: np.ndarray[Any, Any]) -> None:
        """Copy `array` into `tensor`, one that `wrap` made. BackendError where their shapes or dtypes differ."""
        ...

    def unwrap(self, tensor: Any) -> np.ndarray[Any, Any]:
        """`tensor`, once it is there, as a numpy array that the caller owns."""
        ...

    def device_bytes(self) -> int:
        """Bytes that a device says it gave since this runtime was made; 0 where host memory is all there is."""
        ...

    def close(self) -> None:
        """Give back memory kept between executions."""
        ...


Places = Mapping[str, tuple[int, int]]
"""Offset and length in `weights.bin` by the name of what lies there."""


@dataclass(frozen=True)
class CutBlock:
    """A block before it is written: its graph and the bytes of its streamed weights by name."""

    graph: ir.Model
    weights: Mapping[str, int]


@dataclass(frozen=True)
class Draft:
    """A block whose engine can be written. `stored` is what of it goes to the weight store, by name; `inputs` and
    `outputs` are in the engine's order, and so are its `weights` where it numbers them. Drafts with the same `engine`
    share a file, which `write` makes at a path, with the places of what is stored. `rows`: the input that chooses rows,
    if the block only gathers these and the table is stored as it is."""

    stored: Mapping[str, ir.TensorProtocol]
    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    engine: str
    write: Callable[[Path, Places], None]
    weights: tuple[str, ...] = ()
    rows: str | None = None


class Builder(Protocol):
    """Turns a model into blocks that this backend can execute, on the machine that will execute them."""

    name: str
    suffix: str
    """Of engine files, for example ".onnx"."""
    joins: bool
    """Whether engines for runs of blocks, and for everything at once, are written as well."""

    def version(self) -> str:
        """The version of the library behind the backend."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """What prepared engines depend on beside the version; compared when a chain is opened."""
        ...

    def prepare(self, model: ir.Model, work: Path, memory: int, progress: Progress) -> Sequence[ir.Model]:
        """The model as one or more consecutive windows of prepared graph, typed, together computing what it computes.

        `work` is a folder that outlives the windows; `memory` is what preparing may take, in bytes.
        """
        ...

    def streamed(self, graph: ir.Graph) -> dict[str, int]:
        """Bytes of the initializers of `graph` that may go to the weight store, by name; the others stay in engines."""
        ...

    def legal(self, graph: ir.Graph, cuts: Iterable[Cut]) -> list[Cut]:
        """Those of `cuts` at which engines of this backend can pass on what is alive."""
        ...

    def drafts(self, cuts: Sequence[CutBlock], ranges: Mapping[str, ShapeRange], progress: Progress) -> list[Draft]:
        """The engines of all blocks of the model, in order, ready to be written; `ranges` are the shapes of its inputs.
        Raises BlockTooLarge where one cannot be built in the memory there is."""
        ...

    def draft(self, cut: CutBlock) -> Draft:
        """The engine of one more graph, if the backend `joins`."""
        ...

    def tensorrt(self) -> TensorRt | None:
        """After `drafts`: how the chain's engines get their weights, if they are TensorRT's."""
        ...

    def published(self) -> None:
        """The chain is there: what was kept for another try is not needed any more."""
        ...

    def close(self) -> None:
        """The build has ended, one way or another."""
        ...
