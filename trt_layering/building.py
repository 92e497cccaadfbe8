"""From an ONNX file to a published chain: prepare, cut, write, rehearse, compare, publish.

May import every room but the command line. A model that cannot be read or cut raises ModelError; a build that fails, or
whose chain does not give the uncut model's answer, raises BuildError and publishes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import onnx_ir as ir

from trt_layering import backends, child, inputs
from trt_layering.assembly import Cutting, assemble, cut_windows
from trt_layering.backends.base import Builder, Progress
from trt_layering.backends.onnxruntime.reference import reference, suspect
from trt_layering.backends.values import as_value
from trt_layering.compare import TOLERANCE, difference
from trt_layering.errors import BuildError, UsageError
from trt_layering.graph.model import infer_shapes, normalise, open_model
from trt_layering.graph.recurrent import split_directions
from trt_layering.graph.split import split_large
from trt_layering.graph.tables import find_tables
from trt_layering.narrowing import BLOCK_TOLERANCE, CHAIN_TOLERANCE, Cost, narrowed
from trt_layering.rehearsal import rehearse, rehearse_resident
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.schedules import write_table
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import (
    FORMAT_VERSION,
    PAGE,
    UNMEASURED,
    Backend,
    Block,
    Chain,
    Check,
    Extent,
    Halved,
    KeptNode,
    Memory,
    Narrowed,
    TensorRt,
    Value,
    check_name,
    file_digest,
)
from trt_layering.store.writer import StoreWriter, disk_errors
from trt_layering.units import format_size, parse_size

if TYPE_CHECKING:
    from trt_layering.backends.tensorrt.precision import Cost as Half

log = logging.getLogger("trt_layering")

SEED = 0
AUTO = "auto"
_SPLIT_TOLERANCE = 1e-6
_SLOTS = 2
_STAGING = 20 << 20
"""Two reads of 4 MiB for each of two threads, and one more. More threads read less at once."""
_OTHER_LIBRARY = 1e-3
"""Sums in another order, through the whole model."""
PRECISION_TOLERANCE = 5e-2
"""That of the model's outputs in 16 bits, which `precision` keeps to as well."""
_BLOCKS = 64
_LEAST_BLOCK, _MOST_BLOCK = 2 << 20, 16 << 20


@dataclass(frozen=True)
class Built:
    """A published chain: its folder and its manifest."""

    path: Path
    manifest: Chain


def build(
    model: str | Path,
    *,
    name: str | None = None,
    repository: str | Path = "engines",
    backend: str = "auto",
    block_size: int | str = "auto",
    precision: str = "fp32",
    binding: str = "auto",
    placement: str = "auto",
    shapes: Mapping[str, Any] | None = None,
    optimise: bool = True,
    split: bool = True,
    memory: int | str = "1GiB",
    weights: str = "fp32",
    weights_tolerance: float | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build `model` into the next version of chain `name` (default: the file's stem) in `repository`.

    Blocks hold at most `block_size` bytes of weights where the graph allows, "auto" being a 64th of the model's, at
    least 2 and at most 16 MiB; with `split`, weights larger than that are divided. `shapes` gives sizes to unknown
    dims, an input's shape or its min, opt and max: the check runs, and memory is measured, at opt and max. `memory`
    bounds what preparing may take, beside 150 MiB for the process itself.
    Without `optimise` the graph is executed as it is, and outputs equal those of the uncut model, run at
    ORT_DISABLE_ALL and with session.disable_prepacking, bit for bit; where a weight was divided, within 1e-6 of the
    largest output. With it they are within 1e-5 of the uncut model's with the same optimisation. `Check.tolerance`
    says which it is. With `weights` "fp16" or "bf16", weights of float32 are stored in 16 bits and widened inside the
    engines where that changes no output of a block by more than `weights_tolerance` of its largest element (default:
    1e-3 and 1e-2); outputs are then within 1e-2 and 5e-2 of the uncut model's. Where activations of 16 bits pass
    between blocks they are rounded there, which can be more: such a chain is refused.

    With the backend "tensorrt", `binding` says how weights reach engines and `placement` where they pass through, each
    "auto" for the quickest on this device; `precision` "fp16" lets those nodes compute in 16 bits that keep the model's
    outputs within 5e-2, else outputs are within 1e-3 of the uncut model's.

    Raises UsageError, ModelError, BackendError, or BuildError when the disk is full or the chain's answer is not the
    uncut model's. Earlier versions stay as they are.
    """
    path = Path(model)
    order = _Order(
        path=path,
        name=check_name(path.stem if name is None else name),
        block_size=0 if block_size == AUTO else parse_size(block_size, what="block_size"),
        precision=precision,
        optimise=optimise,
        memory=parse_size(memory, what="memory"),
        weights=_weights(weights),
        weights_tolerance=_weights_tolerance(weights, weights_tolerance),
    )
    ranges = {key: ShapeRange.parse(value) for key, value in (shapes or {}).items()}
    home, tell = Path(repository), progress or _silent
    builder = backends.builder(backend, home, binding=binding, placement=placement)
    _check_suits(builder, order)
    source = open_model(path)
    normalise(source)
    infer_shapes(source)
    order = replace(order, block_size=order.block_size or _block_size(source.graph, order.weights))
    trials = _trials(tuple(map(as_value, source.graph.inputs)), ranges)
    divided = split and _divide(source, order.block_size)
    with closing(builder), StoreWriter(home, order.name) as writer, disk_errors(writer.folder):
        for leftover in writer.cleaned:
            log.warning("removed %s, left by a build that was killed", leftover)
        work = writer.folder / "work"
        work.mkdir()
        child.save_arrays(work / "trials.npz", trials)
        draft = _written(order, source, builder, writer, trials, ranges, tell)
        tolerance = _tolerance(order, draft, divided)
        chain = _checked(order, draft, writer.folder, work, tolerance, tell)
        write_table(writer.folder, chain)
        built = Built(writer.publish(chain), chain)
        builder.published()
        return built


@dataclass(frozen=True)
class _Order:
    """What was asked for, in numbers."""

    path: Path
    name: str
    block_size: int
    precision: str
    optimise: bool
    memory: int
    weights: Literal["fp32", "fp16", "bf16"]
    weights_tolerance: float


def _check_suits(builder: Builder, order: _Order) -> None:
    """UsageError for what the backend does not have."""
    if order.precision not in ("fp32", "fp16"):
        raise UsageError(f"there is no precision {order.precision!r}", remedy="use fp32 or fp16")
    if builder.name != "tensorrt" and order.precision != "fp32":
        remedy = "use fp32 with --weights fp16, which stores weights in 16 bits, or --backend tensorrt"
        raise UsageError(f"the backend {builder.name} computes in fp32", remedy=remedy)
    if builder.name == "tensorrt" and not order.optimise:
        raise UsageError("TensorRT always optimises", remedy="leave out --no-optimise, or use --backend onnxruntime")
    if builder.name == "tensorrt" and order.weights != "fp32":
        raise UsageError(
            f"TensorRT chains have no weights stored as {order.weights} beside what computes in fp32",
            remedy="use --precision fp16, which has weights in 16 bits too, or --backend onnxruntime",
        )


def _tolerance(order: _Order, draft: Chain, divided: bool) -> float:
    """How much an output of the chain may differ from the uncut model's, as a part of its largest element."""
    if order.precision == "fp16":
        return PRECISION_TOLERANCE
    if any(block.saved_bytes for block in draft.narrowed):
        return CHAIN_TOLERANCE[order.weights]
    if draft.tensorrt is not None:
        return _OTHER_LIBRARY
    if order.optimise:
        return TOLERANCE
    return _SPLIT_TOLERANCE if divided else 0.0


def _weights(word: str) -> Literal["fp32", "fp16", "bf16"]:
    if word not in ("fp32", "fp16", "bf16"):
        raise UsageError(f"weights cannot be stored as {word!r}", remedy="use fp32, fp16 or bf16")
    return cast(Literal["fp32", "fp16", "bf16"], word)


def _weights_tolerance(weights: str, asked: float | None) -> float:
    if asked is None:
        return BLOCK_TOLERANCE.get(weights, 0.0)
    if weights == "fp32":
        raise UsageError(
            "a tolerance for weights was given, which stay as they are", remedy="give weights fp16 or bf16"
        )
    if not (isfinite(asked) and 0 <= asked <= 1):
        raise UsageError(f"the tolerance for weights must lie in 0 to 1, not {asked}", remedy="give one like 1e-3")
    return asked


def _block_size(graph: ir.Graph, stored: str) -> int:
    """For a model of some size, the size of blocks that gives schedules enough to choose from, in not too many
    engines."""
    weights = sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None)
    weights //= 1 if stored == "fp32" else 2
    return min(max(-(-weights // _BLOCKS) // PAGE * PAGE, _LEAST_BLOCK), _MOST_BLOCK)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _trials(known: Sequence[Value], ranges: Mapping[str, ShapeRange]) -> list[inputs.Feeds]:
    """Seeded feeds at the most usual and, if they differ, at the largest shapes."""
    usual = {key: shape.opt for key, shape in ranges.items()}
    largest = {key: shape.max for key, shape in ranges.items()}
    return [inputs.seeded(known, shape, SEED) for shape in ([usual] if usual == largest else [usual, largest])]


def _dims(graph: ir.Graph, feeds: inputs.Feeds) -> dict[str, int]:
    """What the symbolic dims of the inputs are in `feeds`."""
    known = (as_value(value) for value in graph.inputs)
    pairs = (pair for value in known for pair in zip(value.shape or (), feeds[value.name].shape, strict=False))
    return {dim: size for dim, size in pairs if isinstance(dim, str)}


def _divide(source: ir.Model, size: int) -> bool:
    """Divide what is larger than `size` bytes; whether that changed how results are summed up."""
    for done in split_directions(source, size):
        log.info("%s divided into its directions", done.tensor)
    divided = split_large(source, size, find_tables(source.graph))
    for done in divided:
        if done.pieces > 1:
            log.info("%s divided into %d", done.tensor, done.pieces)
        else:
            log.warning("%s is larger than the block size and stays whole: %s", done.tensor, done.reason)
    return any(done.pieces > 1 for done in divided)


def _written(
    order: _Order,
    source: ir.Model,
    builder: Builder,
    writer: StoreWriter,
    trials: Sequence[inputs.Feeds],
    ranges: Mapping[str, ShapeRange],
    tell: Progress,
) -> Chain:
    """The chain, written but for its manifest; nothing in it has been measured."""
    cutting = Cutting(order.block_size, _dims(source.graph, trials[0]))
    windows = builder.prepare(source, writer.folder / "work", order.memory, tell) if order.optimise else [source]

    def cut(windows: Sequence[ir.Model]) -> list[ir.Model]:
        return [block.graph for block in cut_windows(builder, windows, cutting)]

    halves: Sequence[Half] = ()
    if order.precision == "fp16":
        windows, halves = _in_fp16(source, windows, cut, trials, tell)
    windows, costs = _narrowed(order, windows, cut, trials, tell)
    parts = assemble(writer, builder, windows, cutting, ranges, tell)
    return Chain(
        format=FORMAT_VERSION,
        name=order.name,
        source=order.path.name,
        source_digest=file_digest(order.path),
        backend=Backend(name=builder.name, version=builder.version(), fingerprint=builder.fingerprint()),
        precision=order.precision,
        optimised=order.optimise,
        block_size=order.block_size,
        inputs=tuple(map(as_value, source.graph.inputs)),
        outputs=tuple(map(as_value, source.graph.outputs)),
        extents=writer.extents,
        blocks=parts.blocks,
        # Laid out otherwise, weights give the same answers but not the same bits.
        whole=parts.whole if order.optimise else (),
        joined=parts.joined,
        memory=_device_memory(builder.tensorrt(), parts.blocks, writer.extents),
        profile=UNMEASURED,
        check=Check(max_abs_diff=0.0, max_abs_output=0.0, seed=SEED, tolerance=0.0),
        weights=order.weights,
        tensorrt=builder.tensorrt(),
        narrowed=tuple(
            Narrowed(block=block, max_rel_diff=cost.max_rel_diff, kept=cost.kept, saved_bytes=cost.saved_bytes)
            for block, cost in zip(parts.first_cut if costs else (), costs, strict=True)
        ),
        halved=tuple(
            _halved(block, half) for block, half in zip(parts.first_cut if halves else (), halves, strict=True)
        ),
    )


def _device_memory(how: TensorRt | None, blocks: Sequence[Block], extents: Sequence[Extent]) -> Memory:
    """What a chain takes on a device beside what its first run will measure."""
    largest = max((sum(extents[index].length for index in block.extents) for block in blocks), default=0)
    slots = _SLOTS * largest if how is not None and how.binding != "inputs" else 0
    staging = _STAGING if how is not None and how.placement == "staged" else 0
    return Memory(activations=0, scratch=0, engines=0, shapes={}, staging=staging, slots=slots)


def _in_fp16(
    source: ir.Model,
    windows: Sequence[ir.Model],
    cut: Callable[[Sequence[ir.Model]], list[ir.Model]],
    trials: Sequence[inputs.Feeds],
    tell: Progress,
) -> tuple[Sequence[ir.Model], Sequence[Half]]:
    """`windows` computing in 16 bits where that changes little, and what it does to each block."""
    from trt_layering.backends.tensorrt.precision import in_fp16

    found = in_fp16(windows, [value.name or "" for value in source.graph.outputs], cut, trials, tell)
    halved, kept = sum(cost.halved for cost in found.costs), sum(len(cost.kept) for cost in found.costs)
    log.info("%d nodes compute in float16, %d stay float32; outputs differ by %.3g", halved, kept, found.max_rel_diff)
    return found.windows, found.costs


def _halved(block: str, half: Half) -> Halved:
    kept = tuple(KeptNode(name=node.name, op_type=node.op_type, reason=node.reason) for node in half.kept)
    return Halved(
        block=block, max_rel_diff=half.max_rel_diff, halved=half.halved, kept=kept, saved_bytes=half.saved_bytes
    )


def _narrowed(
    order: _Order,
    windows: Sequence[ir.Model],
    cut: Callable[[Sequence[ir.Model]], list[ir.Model]],
    trials: Sequence[inputs.Feeds],
    tell: Progress,
) -> tuple[Sequence[ir.Model], Sequence[Cost]]:
    """`windows` with narrow weights, if they were asked for, and what those cost in each block."""
    if order.weights == "fp32":
        return windows, ()
    found = narrowed(windows, order.weights, order.weights_tolerance, cut, trials, tell)
    return found.windows, found.costs


def _checked(order: _Order, draft: Chain, folder: Path, work: Path, tolerance: float, tell: Progress) -> Chain:
    """`draft` with what its first run measured. Raises BuildError where it does not answer as the uncut model does, in
    blocks or, if `order.memory` allows that, in joined ones and with everything in memory."""

    def blame() -> str:
        if draft.tensorrt is not None:
            return "each block gave ONNX Runtime's answers by itself"
        return suspect(order.path, folder, draft, work, memory=order.memory, tolerance=tolerance)

    tell("check", 0, 3)
    expected = reference(order.path, work, optimise=order.optimise, memory=order.memory)
    tell("check", 1, 3)
    found = rehearse(folder, draft, work, order.memory)
    chain, checks = found.chain, [_compare(draft, expected, found.outputs, tolerance, blame)]
    for outputs in found.joined:
        checks.append(_compare(draft, expected[-1:], [outputs], tolerance, lambda: "the joined blocks, joined-*"))
    tell("check", 2, 3)
    laid_out_otherwise = bool(chain.whole) or chain.tensorrt is not None
    if laid_out_otherwise and Footprint.of(chain).resident <= order.memory:
        resident = rehearse_resident(folder, chain, work)
        where = "the uncut engines, whole-*" if chain.whole else "the engines with everything in memory"
        checks.append(_compare(draft, expected, resident, tolerance, lambda: where))
    elif laid_out_otherwise:
        log.info("not checked with everything in memory, which is more than --memory %s", format_size(order.memory))
    tell("check", 3, 3)
    return msgspec.structs.replace(chain, check=max(checks, key=lambda check: check.max_abs_diff))


def _compare(
    draft: Chain,
    expected: Sequence[child.Feeds],
    outputs: Sequence[child.Feeds],
    tolerance: float,
    blame: Callable[[], str],
) -> Check:
    """The chain's outputs beside the uncut model's. Raises BuildError where they differ too much, naming what `blame`
    finds."""
    largest_diff = largest_output = 0.0
    for wanted, got in zip(expected, outputs, strict=True):
        for name, array in wanted.items():
            diff, scale = difference(array, got[name])
            if diff > tolerance * scale:
                raise BuildError(
                    f"the output {name!r} differs by {diff:.3g} from the uncut model's, whose largest is {scale:.3g}",
                    where=blame() or "no single block: small differences add up",
                    remedy=_remedy(draft),
                )
            largest_diff, largest_output = max(largest_diff, diff), max(largest_output, scale)
    return Check(max_abs_diff=largest_diff, max_abs_output=largest_output, seed=SEED, tolerance=tolerance)


def _remedy(draft: Chain) -> str:
    """What to do about a chain that answers otherwise than its model."""
    if any(block.saved_bytes for block in draft.narrowed):
        return f"build with a smaller --weights-tolerance, for fewer weights of {draft.weights}, or with --weights fp32"
    if any(value.dtype in ("float16", "bfloat16") for block in draft.blocks[:-1] for value in block.outputs):
        return (
            "activations of 16 bits are rounded between blocks: convert the model to float32, or give a --block-size "
            "that holds it whole"
        )
    return (
        "a model with random operators cannot be checked; for others, build with --no-split or --no-optimise, and "
        "report the model"
    )
