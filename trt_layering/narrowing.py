"""Decides which weights a chain stores in 16 bits: those that leave every block's answer as it was, within a tolerance.

May import the graph room, onnx-ir and the ONNX Runtime backend. Raises what executing a block with its own weights
raises; a block that ONNX Runtime refuses only with narrow ones keeps them as they are.

The blocks of the model run in turn on seeded inputs, with their weights as they are; each also runs on the same
activations with its weights rounded. One block's weights are in memory at a time, as float32 and as 16 bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.runtime import reported, return_memory, run_plainly, uncut_options
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.compare import relative
from trt_layering.errors import BackendError, UsageError
from trt_layering.graph.narrow import KINDS, candidates, fits, narrow, narrow_names, widen
from trt_layering.graph.stored import unmapped
from trt_layering.inputs import Array, Feeds

log = logging.getLogger("trt_layering")

BLOCK_TOLERANCE = {"fp16": 1e-3, "bf16": 1e-2}
"""How much narrow weights may change a block's output, as a part of the largest element, where nobody says."""
CHAIN_TOLERANCE = {"fp16": 1e-2, "bf16": 5e-2}
"""How much all of them together may change a model's output, as a part of the largest element."""
NARROWED_FROM = 16 * 1024
"""Bytes; smaller weights are biases and scales mostly: no time to win, and more to lose."""

_BFLOAT16_SINCE = 13  # the opset
_ROUNDS = 3  # in which single weights are kept; after them, all of a block that still differs too much


@dataclass(frozen=True)
class Cost:
    """What narrow weights do to one block: the largest difference, as a part of the largest element of the output;
    the names of those that could be narrow and are `kept`; and the bytes that the others save."""

    max_rel_diff: float
    kept: tuple[str, ...]
    saved_bytes: int


@dataclass(frozen=True)
class Narrowing:
    """`windows` with narrow weights; and per block, in the order in which `cut` gives them, what these cost."""

    windows: list[ir.Model]
    costs: list[Cost]


Cut = Callable[[Sequence[ir.Model]], Iterable[ir.Model]]


def narrowed(
    windows: Sequence[ir.Model], kind: str, tolerance: float, cut: Cut, trials: Sequence[Feeds], tell: Progress
) -> Narrowing:
    """Copies of `windows` in which as many weights as may be are of `kind`, "fp16" or "bf16": no output of a block
    that `cut` makes of them differs, on any of `trials`, by more than `tolerance` of its largest element.

    Weights that stay as they are are those under `NARROWED_FROM` bytes, those whose values `kind` cannot hold, and, in
    blocks that would differ too much, those that by themselves change the block's outputs most. Raises UsageError where
    the model's opset has no such numbers.
    """
    dtype = KINDS[kind]
    possible = _possible(windows)
    kept = {name for name, tensor in possible.items() if not fits(tensor, dtype)}
    for name in sorted(kept):
        log.info("%s stays float32: its values need more range than %s has", name, kind)
    rounds = 0
    while True:
        drafts = [_draft(window, possible.keys() - kept, dtype) for window in windows]
        blocks = list(cut(drafts))
        looks = _looks(blocks, trials, tolerance, tell)
        worse = [(block, look) for block, look in zip(blocks, looks, strict=True) if look.keep]
        if not worse:
            costs = [_cost(block, look.diff, kept) for block, look in zip(blocks, looks, strict=True)]
            return Narrowing(drafts, costs)
        for block, look in worse:
            kept.update(look.keep if rounds < _ROUNDS else narrow_names(block))
        rounds += 1


def _possible(windows: Sequence[ir.Model]) -> dict[str, ir.TensorProtocol]:
    """Weights by name that can be narrow in each window that has them."""
    possible: dict[str, ir.TensorProtocol] = {}
    barred: set[str] = set()
    for window in windows:
        named = candidates(window.graph, NARROWED_FROM)
        tensors = {name: value.const_value for name, value in window.graph.initializers.items()}
        possible.update({name: tensor for name in named if (tensor := tensors[name]) is not None})
        barred |= tensors.keys() - set(named)
    return {name: tensor for name, tensor in possible.items() if name not in barred}


def _draft(window: ir.Model, names: Collection[str], dtype: ir.DataType) -> ir.Model:
    if dtype == ir.DataType.BFLOAT16 and window.graph.opset_imports.get("", 1) < _BFLOAT16_SINCE:
        raise UsageError(
            f"operators of this model, of opset {window.graph.opset_imports.get('', 1)}, know no bfloat16",
            remedy=f"use fp16, or convert the model to opset {_BFLOAT16_SINCE} or later",
        )
    draft = window.clone()
    narrow(draft, names, dtype)
    return draft


def _cost(block: ir.Model, diff: float, kept: Collection[str]) -> Cost:
    tensors = {name: value.const_value for name, value in block.graph.initializers.items()}
    narrowed = (tensors[name] for name in narrow_names(block))
    saved = sum(tensor.nbytes for tensor in narrowed if tensor is not None)
    return Cost(diff, tuple(name for name in tensors if name in kept), saved)


@dataclass(frozen=True)
class _Look:
    """By how much a block differs with narrow weights, and which of them it had better keep."""

    diff: float
    keep: list[str]


def _looks(blocks: Sequence[ir.Model], trials: Sequence[Feeds], tolerance: float, tell: Progress) -> list[_Look]:
    walk = _Walk(blocks, trials, tolerance)
    looks = []
    for index in range(len(blocks)):
        tell("narrow", index, len(blocks))
        looks.append(walk.look(index))
    tell("narrow", len(blocks), len(blocks))
    return looks


class _Walk:
    """Runs `blocks` one after the other on `trials`; `look` must be called for each in its turn."""

    def __init__(self, blocks: Sequence[ir.Model], trials: Sequence[Feeds], tolerance: float) -> None:
        self._blocks = blocks
        self._lives = [dict(feeds) for feeds in trials]
        self._tolerance = tolerance
        self._last = {value.name or "": index for index, block in enumerate(blocks) for value in block.graph.inputs}

    def look(self, index: int) -> _Look:
        block = self._blocks[index]
        names = narrow_names(block)
        wanted = self._run(block, wide=names)
        diff = self._differs(block, names, wanted) if names else 0.0
        keep = self._worst(block, names, wanted) if diff > self._tolerance else []
        self._pass_on(index, wanted)
        return_memory()
        return _Look(diff, keep)

    def _pass_on(self, index: int, results: Sequence[Feeds]) -> None:
        """What later blocks read of what there is and of what block `index` made."""
        for live, made in zip(self._lives, results, strict=True):
            live.update(made)
            for name in [name for name in live if self._last.get(name, -1) <= index]:
                del live[name]

    def _worst(self, block: ir.Model, names: Sequence[str], wanted: Sequence[Feeds]) -> list[str]:
        """The fewest of `names` to keep, those first that alone make the largest difference."""
        alone = {name: self._differs(block, [name], wanted) for name in names} if len(names) > 1 else {names[0]: 0.0}
        ordered = sorted(names, key=lambda name: -alone[name])
        low, high = 1, len(ordered)
        while low < high:
            middle = (low + high) // 2
            if self._differs(block, ordered[middle:], wanted) <= self._tolerance:
                high = middle
            else:
                low = middle + 1
        return ordered[:low]

    def _differs(self, block: ir.Model, narrow: Sequence[str], wanted: Sequence[Feeds]) -> float:
        """Largest difference of the outputs of `block` when only `narrow` are narrow; infinite where it does not
        run."""
        try:
            got = self._run(block, wide=[name for name in narrow_names(block) if name not in narrow])
        except BackendError as error:
            log.info("not narrow: %s", error.what)
            return math.inf
        pairs = ((own[name], other[name]) for own, other in zip(wanted, got, strict=True) for name in own)
        return max((relative(own, other.astype(own.dtype)) for own, other in pairs), default=0.0)

    def _run(self, block: ir.Model, wide: Sequence[str]) -> list[Feeds]:
        """Outputs of `block` for each trial; the weights `wide` have their float32 back."""
        variant = block.clone()
        widen(variant, wide)
        _take(variant.graph, self._lives[0])
        with reported(f"graph {variant.graph.name!r}"):
            session = open_session(variant, uncut_options(optimised=False))
            inputs = [value.name or "" for value in variant.graph.inputs]
            outputs = [value.name or "" for value in variant.graph.outputs]
            return [run_plainly(session, outputs, {name: live[name] for name in inputs}) for live in self._lives]


def _take(graph: ir.Graph, live: Mapping[str, Array]) -> None:
    """Prepare `graph` to be opened: weights leave no mapped pages behind, and rows of a narrow table that are passed
    on to this block are taken as wide as `live` has them."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            value.const_value = unmapped(value.const_value)
    for value in graph.inputs:
        array = live[value.name or ""]
        if array.dtype.kind == "f":
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
