"""Cuts prepared windows into blocks and writes them: weights to the store, engines beside them.

May import the graph room, the store and the backends' protocols. A value whose type is unknown raises BuildError,
a full disk too.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from trt_layering.backends.base import Builder, Progress
from trt_layering.errors import BuildError
from trt_layering.graph.blocks import Cutter
from trt_layering.graph.cuts import choose_cuts, find_cuts
from trt_layering.graph.tables import bring_forward, find_tables, rows_input, seams
from trt_layering.store.manifest import Block, Part, Value
from trt_layering.store.writer import StoreWriter

log = logging.getLogger("trt_layering")

Places = dict[str, tuple[int, int]]
"""Offset and length in `weights.bin` of each streamed weight."""

_STREAMED_FROM = 1024
_JOINED = 4
"""How many times larger the blocks of a level are than those that they are joined of."""
_WORDS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


@dataclass(frozen=True)
class Assembled:
    """What was written: the chain's blocks, engines for runs of them, and the same computation in its windows uncut if
    those are fewer."""

    blocks: tuple[Block, ...]
    joined: tuple[Part, ...]
    whole: tuple[Block, ...]


@dataclass(frozen=True)
class CutBlock:
    """A block before it is written: its graph and the bytes of its streamed weights by name."""

    graph: ir.Model
    weights: Mapping[str, int]


def assemble(
    writer: StoreWriter,
    builder: Builder,
    windows: Sequence[ir.Model],
    size: int,
    dims: Mapping[str, int],
    tell: Progress,
) -> Assembled:
    """Write `windows` as blocks of at most `size` bytes of weights where the graph allows; `dims` gives numbers for
    symbolic dims, to find narrow cuts by."""
    seamed = [_seamed(window, size, dims) for window in windows]
    cuts = [cut for window in seamed for cut in _blocks(window)]
    places, blocks = _write(writer, builder, cuts, tell)
    joined = _write_joined(writer, builder, seamed, blocks, places)
    whole = _write_whole(writer, builder, windows, places) if len(windows) < len(blocks) else ()
    return Assembled(blocks, joined, whole)


def cut_windows(windows: Iterable[ir.Model], size: int, dims: Mapping[str, int]) -> Iterator[CutBlock]:
    """The blocks that `assemble` writes, in their order."""
    for window in windows:
        yield from _blocks(_seamed(window, size, dims))


@dataclass(frozen=True)
class _Seamed:
    """A window and the bytes of its streamed weights; the first of `levels` are the positions at which it is cut, its
    ends included, the others those between which blocks are joined, each a part of the one before."""

    window: ir.Model
    sizes: Mapping[str, int]
    levels: Sequence[Sequence[int]]


def _seamed(window: ir.Model, size: int, dims: Mapping[str, int]) -> _Seamed:
    """`window` with its seams, its Gathers of rows brought forward; the seams around these are in every level."""
    bring_forward(window.graph)
    graph, sizes = window.graph, _streamed(window.graph)
    cuts = find_cuts(graph, dims)
    required = seams(graph, (cut.position for cut in cuts))
    levels = [[0, *choose_cuts(graph, cuts, size, sizes, required), len(graph)]]
    while (size := size * _JOINED) < sum(sizes.values()):
        cuts = [cut for cut in cuts if cut.position in levels[-1]]
        levels.append([0, *choose_cuts(graph, cuts, size, sizes, required), len(graph)])
    levels.append([0, *sorted(required), len(graph)])
    return _Seamed(window, sizes, levels)


def _blocks(seamed: _Seamed) -> Iterator[CutBlock]:
    cutter = Cutter(seamed.window)
    whole = find_tables(seamed.window.graph)
    for start, stop in pairwise(seamed.levels[0]):
        graph = cutter.extract(start, stop)
        if rows_input(graph.graph) is not None:
            whole -= graph.graph.initializers.keys()
        yield CutBlock(graph, {name: seamed.sizes[name] for name in graph.graph.initializers if name in seamed.sizes})
    for name in sorted(whole):
        log.warning("%s is loaded as a whole, though only rows of it are used: no seam can part its Gather", name)


def _streamed(graph: ir.Graph) -> dict[str, int]:
    """Bytes of the initializers that go to the weight store. The others stay in their block's file: small ones, which
    some kernels read when a session is made, before any weights have been loaded, and those of a dtype that cannot be
    given by reference."""
    sizes = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _STREAMED_FROM:
            continue
        if _numpy_can_alias(tensor.dtype):
            sizes[name] = tensor.nbytes
        else:
            log.warning("%s stays in memory: weights of %s cannot be streamed", name, word(tensor.dtype))
    return sizes


def _numpy_can_alias(dtype: ir.DataType) -> bool:
    return dtype == ir.DataType.BFLOAT16 or (
        dtype.bitwidth >= 8 and dtype.numpy().kind in "biuf" and "float8" not in word(dtype)
    )


def _write(
    writer: StoreWriter, builder: Builder, cuts: Sequence[CutBlock], tell: Progress
) -> tuple[Places, tuple[Block, ...]]:
    """Write weights and engines; a weight of several blocks goes to an extent of its own, once."""
    users: dict[str, list[int]] = defaultdict(list)
    for index, cut in enumerate(cuts):
        for name in cut.weights:
            users[name].append(index)
    written: dict[tuple[int, ...], int] = {}
    places: Places = {}
    blocks = []
    for index, cut in enumerate(cuts):
        tell("write", index, len(cuts))
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in cut.weights:
            groups[tuple(users[name])].append(name)
        for group in [group for group in groups if group not in written]:
            written[group] = _write_extent(writer, cut.graph.graph, groups[group], places)
        extents = tuple(written[group] for group in groups)
        name, rows = f"block-{index:03d}", rows_input(cut.graph.graph)
        blocks.append(_write_engine(writer, builder, name, cut.graph, places, extents, rows))
    tell("write", len(cuts), len(cuts))
    return places, tuple(blocks)


def _write_joined(
    writer: StoreWriter, builder: Builder, seamed: Iterable[_Seamed], blocks: Sequence[Block], places: Places
) -> tuple[Part, ...]:
    """Engines for runs of `blocks`, over the same weights."""
    joined: list[Part] = []
    before = 0
    for window in seamed:
        single, cutter = window.levels[0], Cutter(window.window)
        for start, stop in dict.fromkeys(run for level in window.levels[1:] for run in pairwise(level)):
            first, count = before + single.index(start), single.index(stop) - single.index(start)
            if count > 1:
                extents = tuple(dict.fromkeys(e for block in blocks[first : first + count] for e in block.extents))
                graph, name = cutter.extract(start, stop), f"joined-{len(joined):03d}"
                block = _write_engine(writer, builder, name, graph, places, extents)
                joined.append(Part(first=first, count=count, block=block))
        before += len(single) - 1
    return tuple(joined)


def _write_whole(
    writer: StoreWriter, builder: Builder, windows: Sequence[ir.Model], places: Places
) -> tuple[Block, ...]:
    """Engines of the uncut windows over the same weights."""
    blocks = []
    for index, window in enumerate(windows):
        names = set(window.graph.initializers)
        extents = (i for i, extent in enumerate(writer.extents) if any(t.name in names for t in extent.tensors))
        blocks.append(_write_engine(writer, builder, f"whole-{index:03d}", window, places, tuple(extents)))
    return tuple(blocks)


def _write_engine(
    writer: StoreWriter,
    builder: Builder,
    name: str,
    graph: ir.Model,
    places: Places,
    extents: tuple[int, ...],
    rows: str | None = None,
) -> Block:
    """Write the engine of `graph`; `rows` is the input that chooses rows, if it only gathers these."""
    file = writer.engine_file(name, builder.suffix)
    builder.write_engine(graph, file, {key: places[key] for key in graph.graph.initializers if key in places})
    return Block(
        name=name,
        file=file.name,
        digest=writer.digest(file),
        extents=extents,
        inputs=tuple(map(as_value, graph.graph.inputs)),
        outputs=tuple(map(as_value, graph.graph.outputs)),
        rows=rows,
    )


def _write_extent(writer: StoreWriter, graph: ir.Graph, names: Sequence[str], places: Places) -> int:
    tensors = {name: graph.initializers[name].const_value for name in names}
    index = writer.add_extent(
        [(name, word(t.dtype), tuple(t.shape.numpy()), t) for name, t in tensors.items() if t is not None]
    )
    extent = writer.extents[index]
    places.update({tensor.name: (extent.offset + tensor.offset, tensor.nbytes) for tensor in extent.tensors})
    return index


def as_value(value: ir.Value) -> Value:
    """The manifest's description of `value`. Raises BuildError if its type is unknown or not a tensor's."""
    dtype = value.dtype
    if value.name is None or dtype is None or not isinstance(value.type, ir.TensorType):
        raise BuildError(
            f"the type of {value.name!r} is not known or not a tensor's", remedy="give the model types, or simplify it"
        )
    dims = None if value.shape is None else tuple(d if isinstance(d, int) else d.value or None for d in value.shape)
    return Value(name=value.name, dtype=word(dtype), shape=dims)


def word(dtype: ir.DataType) -> str:
    """The manifest's word for `dtype`."""
    return _WORDS.get(dtype, dtype.name.lower())
