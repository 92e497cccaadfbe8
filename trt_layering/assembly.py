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
from pathlib import Path

import onnx_ir as ir

from trt_layering.backends.base import BlockTooLarge, Builder, CutBlock, Draft, Places, Progress
from trt_layering.backends.values import as_value
from trt_layering.graph.blocks import Cutter
from trt_layering.graph.cuts import Cut, choose_cuts, find_cuts
from trt_layering.graph.dtypes import word
from trt_layering.graph.tables import bring_forward, find_tables, rows_input, seams
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import Block, Part
from trt_layering.store.writer import StoreWriter

log = logging.getLogger("trt_layering")

_JOINED = 4
"""How many times larger the blocks of a level are than those that they are joined of."""
_WORDS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


@dataclass(frozen=True)
class Assembled:
    """What was written: the chain's blocks, engines for runs of them, and the same computation in its windows uncut if
    those are fewer. `first_cut` are those of the blocks, by name, with which those of `cut_windows` begin: some may
    have been cut further."""

    blocks: tuple[Block, ...]
    joined: tuple[Part, ...]
    whole: tuple[Block, ...]
    first_cut: tuple[str, ...]


def assemble(
    writer: StoreWriter,
    builder: Builder,
    windows: Sequence[ir.Model],
    cutting: Cutting,
    ranges: Mapping[str, ShapeRange],
    tell: Progress,
) -> Assembled:
    """Write `windows` as blocks, cut as `cutting` says; `ranges` are the shapes of the model's inputs. A block of which
    no engine can be built in the memory there is is cut once more, which the log says."""
    seamed = [_seamed(builder, window, cutting) for window in windows]
    starts = [window.levels[0][:-1] for window in seamed]
    while True:
        cuts = [cut for window in seamed for cut in _blocks(window)]
        try:
            drafts = builder.drafts(cuts, ranges, tell)
            break
        except BlockTooLarge as error:
            if not _cut_once_more(seamed, error.block):
                raise
            log.warning("cut into smaller blocks: %s", error.what)
    places, blocks = _write(writer, builder, drafts, tell)
    if not builder.joins:
        return Assembled(blocks, (), (), _first_cut(starts, seamed, blocks))
    joined = _write_joined(writer, builder, seamed, blocks, places)
    whole = _write_whole(writer, builder, windows, places) if len(windows) < len(blocks) else ()
    return Assembled(blocks, joined, whole, _first_cut(starts, seamed, blocks))


def _first_cut(starts: Sequence[Sequence[int]], seamed: Sequence[_Seamed], blocks: Sequence[Block]) -> tuple[str, ...]:
    found, rest = [], iter(blocks)
    for before, window in zip(starts, seamed, strict=True):
        found += [block.name for start, block in zip(window.levels[0][:-1], rest, strict=False) if start in before]
    return tuple(found)


@dataclass(frozen=True)
class Cutting:
    """Where windows are cut: into blocks of at most `size` bytes of weights where the graph allows. `dims` gives
    numbers for symbolic dims, to find narrow cuts by."""

    size: int
    dims: Mapping[str, int]


def cut_windows(builder: Builder, windows: Iterable[ir.Model], cutting: Cutting) -> Iterator[CutBlock]:
    """The blocks that `assemble` writes, in their order."""
    for window in windows:
        yield from _blocks(_seamed(builder, window, cutting))


@dataclass(frozen=True)
class _Seamed:
    """A window and the bytes of its streamed weights; the first of `levels` are the positions at which it is cut, its
    ends included, the others those between which blocks are joined, each a part of the one before."""

    window: ir.Model
    sizes: Mapping[str, int]
    cuts: Sequence[Cut]
    levels: list[list[int]]


def _seamed(builder: Builder, window: ir.Model, cutting: Cutting) -> _Seamed:
    """`window` with its seams, its Gathers of rows brought forward; the seams around these are in every level."""
    bring_forward(window.graph)
    graph, sizes, size = window.graph, builder.streamed(window.graph), cutting.size
    cuts = every = builder.legal(graph, find_cuts(graph, cutting.dims))
    required = seams(graph, (cut.position for cut in cuts))
    levels = [[0, *choose_cuts(graph, cuts, size, sizes, required), len(graph)]]
    while (size := size * _JOINED) < sum(sizes.values()):
        cuts = [cut for cut in cuts if cut.position in levels[-1]]
        levels.append([0, *choose_cuts(graph, cuts, size, sizes, required), len(graph)])
    levels.append([0, *sorted(required), len(graph)])
    return _Seamed(window, sizes, every, levels)


def _cut_once_more(seamed: Sequence[_Seamed], block: int) -> bool:
    """Cut block number `block` where it may be, into two at least; whether it may be."""
    for window in seamed:
        seams_here = window.levels[0]
        if block >= len(seams_here) - 1:
            block -= len(seams_here) - 1
            continue
        start, stop = seams_here[block : block + 2]
        cuts = [cut for cut in window.cuts if start < cut.position < stop]
        here = Cutter(window.window).extract(start, stop).graph.initializers
        sizes = {name: size for name, size in window.sizes.items() if name in here}
        inner = choose_cuts(window.window.graph, cuts, max(sum(sizes.values()) // 2, 1), sizes, ())
        window.levels[0][block + 1 : block + 1] = inner
        return bool(inner)
    return False


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


def _write(
    writer: StoreWriter, builder: Builder, drafts: Sequence[Draft], tell: Progress
) -> tuple[dict[str, tuple[int, int]], tuple[Block, ...]]:
    """Write what is stored, and engines; what several blocks have goes to an extent of its own, once."""
    users: dict[str, list[int]] = defaultdict(list)
    for index, draft in enumerate(drafts):
        for name in draft.stored:
            users[name].append(index)
    written: dict[tuple[int, ...], int] = {}
    places: dict[str, tuple[int, int]] = {}
    engines: dict[str, Path] = {}
    blocks = []
    for index, draft in enumerate(drafts):
        tell("write", index, len(drafts))
        groups: dict[tuple[int, ...], dict[str, ir.TensorProtocol]] = defaultdict(dict)
        for name, tensor in draft.stored.items():
            groups[tuple(users[name])][name] = tensor
        for group in [group for group in groups if group not in written]:
            written[group] = _write_extent(writer, groups[group], places)
        extents = tuple(written[group] for group in groups)
        blocks.append(_write_engine(writer, builder, f"block-{index:03d}", draft, places, extents, engines))
    tell("write", len(drafts), len(drafts))
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
                draft = builder.draft(CutBlock(cutter.extract(start, stop), {}))
                name = f"joined-{len(joined):03d}"
                block = _write_engine(writer, builder, name, draft, places, extents, {})
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
        draft = builder.draft(CutBlock(window, {}))
        blocks.append(_write_engine(writer, builder, f"whole-{index:03d}", draft, places, tuple(extents), {}))
    return tuple(blocks)


def _write_engine(
    writer: StoreWriter,
    builder: Builder,
    name: str,
    draft: Draft,
    places: Places,
    extents: tuple[int, ...],
    engines: dict[str, Path],
) -> Block:
    """Write the engine of `draft`, unless it is one of those already in `engines`."""
    if draft.engine not in engines:
        engines[draft.engine] = writer.engine_file(name, builder.suffix)
        draft.write(engines[draft.engine], places)
    file = engines[draft.engine]
    return Block(
        name=name,
        file=file.name,
        digest=writer.digest(file),
        extents=extents,
        inputs=tuple(map(as_value, draft.inputs)),
        outputs=tuple(map(as_value, draft.outputs)),
        rows=draft.rows,
        weights=draft.weights,
    )


def _write_extent(
    writer: StoreWriter, stored: Mapping[str, ir.TensorProtocol], places: dict[str, tuple[int, int]]
) -> int:
    index = writer.add_extent([(name, word(t.dtype), tuple(t.shape.numpy()), t) for name, t in stored.items()])
    extent = writer.extents[index]
    places.update({tensor.name: (extent.offset + tensor.offset, tensor.nbytes) for tensor in extent.tensors})
    return index
