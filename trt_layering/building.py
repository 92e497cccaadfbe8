"""From an ONNX file to a published chain: cut, write, rehearse, compare, publish.

May import every room but the command line. A model that cannot be read or cut raises ModelError; a build that fails, or
whose chain does not give the uncut model's answer, raises BuildError and publishes nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from trt_layering import backends, child, inputs
from trt_layering.backends.base import Builder, Progress
from trt_layering.backends.onnxruntime.reference import reference, suspect
from trt_layering.compare import TOLERANCE, difference
from trt_layering.errors import BuildError, UsageError
from trt_layering.graph.blocks import Cutter
from trt_layering.graph.cuts import choose_cuts, find_cuts
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.recurrent import split_directions
from trt_layering.graph.split import split_large
from trt_layering.rehearsal import rehearse
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import (
    FORMAT_VERSION,
    Backend,
    Block,
    Chain,
    Check,
    Memory,
    Times,
    Value,
    check_name,
    file_digest,
)
from trt_layering.store.writer import StoreWriter
from trt_layering.units import parse_size

log = logging.getLogger("trt_layering")

SEED = 0
_STREAMED_FROM = 1024
_WORDS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


Places = dict[str, tuple[int, int]]
"""Offset and length in `weights.bin` of each streamed weight."""


@dataclass(frozen=True)
class Built:
    """A published chain: its folder and its manifest."""

    path: Path
    manifest: Chain


@dataclass(frozen=True)
class _Cut:
    """A block before it is written: its graph and the bytes of its streamed weights by name."""

    graph: ir.Model
    weights: Mapping[str, int]


def build(
    model: str | Path,
    *,
    name: str | None = None,
    repository: str | Path = "engines",
    backend: str = "auto",
    block_size: int | str = "16MiB",
    precision: str = "fp32",
    shapes: Mapping[str, Any] | None = None,
    optimise: bool = True,
    split: bool = True,
    memory: int | str = "1GiB",
    progress: Progress | None = None,
) -> Built:
    """Build `model` into the next version of chain `name` (default: the file's stem) in `repository`.

    Blocks hold at most `block_size` bytes of weights where the graph allows; with `split`, weights larger than that
    are divided. `shapes` gives sizes to unknown dims, an input's shape or its min, opt and max: the check runs, and
    memory is measured, at opt and max. `memory` bounds what preparing may take, beside 150 MiB for the process itself.
    Without `optimise` the graph is executed as it is, and outputs equal the uncut model's bit for bit.

    Raises UsageError, ModelError, BackendError, or BuildError when the chain's answer is not the uncut model's.
    """
    path = Path(model)
    chain_name = check_name(path.stem if name is None else name)
    size = parse_size(block_size, what="block_size")
    if precision != "fp32":
        raise UsageError(f"precision {precision!r} is not to be had from this backend", remedy="use fp32")
    ranges = {key: ShapeRange.parse(value) for key, value in (shapes or {}).items()}
    tell = progress or _silent
    builder = backends.builder(backend)
    source = open_model(path)
    normalise(source)
    infer_shapes(source)
    known = tuple(map(_value, source.graph.inputs))
    trials = _trials(known, ranges)
    if split:
        _split(source, size)
    with StoreWriter(Path(repository), chain_name) as writer:
        for leftover in writer.cleaned:
            log.warning("removed %s, left by a build that was killed", leftover)
        work = writer.folder / "work"
        work.mkdir()
        budget = parse_size(memory, what="memory")
        windows = builder.prepare(source, work, budget, tell) if optimise else [source]
        cuts = list(_blocks(windows, size, _dims(known, trials[0])))
        places, blocks = _write(writer, builder, cuts, tell)
        # Laid out otherwise, weights give the same answers but not the same bits.
        whole = _write_whole(writer, builder, windows, places) if optimise and len(windows) < len(blocks) else ()
        draft = Chain(
            format=FORMAT_VERSION,
            name=chain_name,
            source=path.name,
            source_digest=file_digest(path),
            backend=Backend(name=builder.name, version=builder.version(), fingerprint=builder.fingerprint()),
            precision=precision,
            optimised=optimise,
            block_size=size,
            inputs=known,
            outputs=tuple(map(_value, source.graph.outputs)),
            extents=writer.extents,
            blocks=blocks,
            whole=whole,
            memory=Memory(activations=0, scratch=0, engines=0, shapes={}),
            times=Times(execute_seconds=(0.0,) * len(blocks), read_rate=1e9),
            check=Check(max_abs_diff=0.0, max_abs_output=0.0, seed=SEED),
        )
        child.save_arrays(work / "trials.npz", trials)
        tell("check", 0, 2)
        expected = reference(path, work, optimise=optimise, memory=budget)
        tell("check", 1, 2)
        chain, outputs = rehearse(writer.folder, draft, work)
        check = _compare(expected, outputs, lambda: suspect(path, writer.folder, draft, work, memory=budget))
        tell("check", 2, 2)
        chain = msgspec.structs.replace(chain, check=check)
        return Built(writer.publish(chain), chain)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _trials(known: Sequence[Value], ranges: Mapping[str, ShapeRange]) -> list[inputs.Feeds]:
    """Seeded feeds at the most usual and, if they differ, at the largest shapes."""
    usual = {key: shape.opt for key, shape in ranges.items()}
    largest = {key: shape.max for key, shape in ranges.items()}
    return [inputs.seeded(known, shape, SEED) for shape in ([usual] if usual == largest else [usual, largest])]


def _dims(known: Sequence[Value], feeds: inputs.Feeds) -> dict[str, int]:
    """What the symbolic dims of the inputs are in `feeds`."""
    pairs = (
        (dim, size) for value in known for dim, size in zip(value.shape or (), feeds[value.name].shape, strict=False)
    )
    return {dim: size for dim, size in pairs if isinstance(dim, str)}


def _split(source: ir.Model, size: int) -> None:
    for done in (*split_directions(source, size), *split_large(source, size)):
        if done.pieces > 1:
            log.info("%s divided into %d", done.tensor, done.pieces)
        else:
            log.warning("%s is larger than the block size and stays whole: %s", done.tensor, done.reason)


def _blocks(windows: Iterable[ir.Model], size: int, dims: Mapping[str, int]) -> Iterable[_Cut]:
    for window in windows:
        sizes = _streamed(window.graph)
        stops = choose_cuts(window.graph, find_cuts(window.graph, dims), size, sizes)
        bounds = [0, *stops, len(window.graph)]
        cutter = Cutter(window)
        for start, stop in pairwise(bounds):
            graph = cutter.extract(start, stop)
            yield _Cut(graph, {name: sizes[name] for name in graph.graph.initializers if name in sizes})


def _streamed(graph: ir.Graph) -> dict[str, int]:
    """Bytes of the initializers that go to the weight store. The others are small, and stay in their block's file: some
    kernels read small constants when a session is made, before any weights have been loaded."""
    sizes = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= _STREAMED_FROM and _numpy_can_alias(tensor.dtype):
            sizes[name] = tensor.nbytes
    return sizes


def _numpy_can_alias(dtype: ir.DataType) -> bool:
    return dtype == ir.DataType.BFLOAT16 or (
        dtype.bitwidth >= 8 and dtype.numpy().kind in "biuf" and "float8" not in _word(dtype)
    )


def _write(
    writer: StoreWriter, builder: Builder, cuts: Sequence[_Cut], tell: Progress
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
        blocks.append(_write_engine(writer, builder, f"block-{index:03d}", cut.graph, places, extents))
    tell("write", len(cuts), len(cuts))
    return places, tuple(blocks)


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
    writer: StoreWriter, builder: Builder, name: str, graph: ir.Model, places: Places, extents: tuple[int, ...]
) -> Block:
    file = writer.engine_file(name, builder.suffix)
    builder.write_engine(graph, file, {key: places[key] for key in graph.graph.initializers if key in places})
    return Block(
        name=name,
        file=file.name,
        digest=writer.digest(file),
        extents=extents,
        inputs=tuple(map(_value, graph.graph.inputs)),
        outputs=tuple(map(_value, graph.graph.outputs)),
    )


def _write_extent(writer: StoreWriter, graph: ir.Graph, names: Sequence[str], places: Places) -> int:
    tensors = {name: graph.initializers[name].const_value for name in names}
    index = writer.add_extent(
        [(name, _word(t.dtype), tuple(t.shape.numpy()), t) for name, t in tensors.items() if t is not None]
    )
    extent = writer.extents[index]
    places.update({tensor.name: (extent.offset + tensor.offset, tensor.nbytes) for tensor in extent.tensors})
    return index


def _value(value: ir.Value) -> Value:
    dtype = value.dtype
    if value.name is None or dtype is None or not isinstance(value.type, ir.TensorType):
        raise BuildError(
            f"the type of {value.name!r} is not known or not a tensor's", remedy="give the model types, or simplify it"
        )
    dims = None if value.shape is None else tuple(d if isinstance(d, int) else d.value or None for d in value.shape)
    return Value(name=value.name, dtype=_word(dtype), shape=dims)


def _word(dtype: ir.DataType) -> str:
    return _WORDS.get(dtype, dtype.name.lower())


def _compare(expected: Sequence[child.Feeds], outputs: Sequence[child.Feeds], suspect: Callable[[], str]) -> Check:
    """The chain's outputs beside the uncut model's. Raises BuildError where they differ too much, naming what `suspect`
    finds."""
    largest_diff = largest_output = 0.0
    for wanted, got in zip(expected, outputs, strict=True):
        for name, array in wanted.items():
            diff, scale = difference(array, got[name])
            if diff > TOLERANCE * scale:
                raise BuildError(
                    f"the output {name!r} differs by {diff:.3g} from the uncut model's, whose largest is {scale:.3g}",
                    where=suspect() or "no single block: small differences add up",
                    remedy="build with --no-split or --no-optimise; if one of them works, report the model",
                )
            largest_diff, largest_output = max(largest_diff, diff), max(largest_output, scale)
    return Check(max_abs_diff=largest_diff, max_abs_output=largest_output, seed=SEED)
