"""Decides which nodes of a model compute in float16: those that leave blocks' answers as they were, within a tolerance.

May import the graph room, onnx-ir and the ONNX Runtime backend, neither TensorRT nor PyCUDA. Raises what executing a
block in float32 raises.

The blocks run in turn on seeded inputs, in float32; each also runs on the same activations with everything rounded that
is to be float16 (`graph.half.rounded`), and a third time on what the rounded blocks before it gave. Where a block's
outputs differ too much, the nodes that cause it are looked for value by value. One block's weights are in memory at a
time, at most twice as float32.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.runtime import return_memory
from trt_layering.backends.tensorrt.sensitive import Find, Search, largest_difference, run, try_rounded
from trt_layering.graph.half import Halves, as_it_was, halve, is_half, name_nodes, outgrown, rounded
from trt_layering.graph.narrow import NarrowTensor
from trt_layering.inputs import Feeds

log = logging.getLogger("trt_layering")

BLOCK_TOLERANCE = 1e-2
"""How much float16 may change a block's output, as a part of the largest element."""
CHAIN_TOLERANCE = 5e-2
"""How much all of it together may change a model's output, as a part of the largest element."""

_TIGHTER = 4.0  # what tolerances of blocks are divided by while the chain's end differs too much
_TIGHTENED = 4  # times; then everything stays float32

Cut = Callable[[Sequence[ir.Model]], Iterable[ir.Model]]


@dataclass(frozen=True)
class Kept:
    """A node that stays float32. `reason`: "compared", in float16 it changed the block's outputs too much; "range", it
    reads a weight outside float16's range; "quantized", "control flow", "operator" or "type", it has no float16."""

    name: str
    op_type: str
    reason: str


@dataclass(frozen=True)
class Cost:
    """What float16 does to one block: the largest difference, as a part of the largest element of the output; how many
    nodes compute in float16, not counting Casts put in; those that stay float32; the bytes that its weights save."""

    max_rel_diff: float
    halved: int
    kept: tuple[Kept, ...]
    saved_bytes: int

    def kinds(self) -> dict[str, int]:
        """How many nodes stay float32, by operator, the most first."""
        return dict(Counter(node.op_type for node in self.kept).most_common())


@dataclass(frozen=True)
class Converted:
    """`windows` in float16 but for what stays float32; per block, in the order in which `cut` gives them, what that
    costs; and the largest difference at the model's outputs, as a part of the largest element."""

    windows: list[ir.Model]
    costs: list[Cost]
    max_rel_diff: float


def in_fp16(
    windows: Sequence[ir.Model],
    outputs: Collection[str],
    cut: Cut,
    trials: Sequence[Feeds],
    tell: Progress,
    tolerance: float = BLOCK_TOLERANCE,
    chain_tolerance: float = CHAIN_TOLERANCE,
) -> Converted:
    """Copies of `windows`, in normal form and with types, that compute in float16 where they may.

    No output of a block that `cut` makes of them differs, on any of `trials`, by more than `tolerance` of its largest
    element, and no output of the model by more than `chain_tolerance`; what is infinite or no number stays so. The
    model's inputs and its `outputs`, by name, keep their types; a value passed between blocks is float16 unless who
    makes and who reads it are float32. Weights that only float16 nodes read become lazy tensors of float16. Operators
    whose answers are random, and models whose outputs differ whatever is kept, end as float32.
    """
    choice = _Choice(windows, outputs, cut, trials, tell, chain_tolerance)
    for attempt in range(_TIGHTENED):
        found = choice.settle(tolerance / _TIGHTER**attempt)
        if found.end <= chain_tolerance or not found.halves.values:
            return found.converted()
        log.info("the model's outputs differ by %.3g of the largest: looking for more to keep in float32", found.end)
    choice.keep_all()
    return choice.draft().converted()


@dataclass(frozen=True)
class _Draft:
    """Windows with some of their nodes in float16, the blocks made of them, and how far these are off."""

    windows: list[ir.Model]
    halves: Halves
    blocks: list[ir.Model]
    finds: list[Find]
    end: float

    def converted(self) -> Converted:
        costs = [_cost(block, find.diff, self.halves) for block, find in zip(self.blocks, self.finds, strict=True)]
        return Converted(self.windows, costs, self.end)


def _cost(block: ir.Model, diff: float, halves: Halves) -> Cost:
    nodes = [node for node in block.graph if node.name not in halves.casts]
    kept = tuple(
        Kept(name, node.op_type, _reason(halves, name)) for node in nodes if (name := node.name) in halves.kept
    )
    halved = sum(is_half(node, halves) for node in nodes)
    tensors = (value.const_value for value in block.graph.initializers.values())
    saved = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, NarrowTensor))
    return Cost(diff, halved, kept, saved)


def _reason(halves: Halves, name: str) -> str:
    return {"chosen": "compared"}.get(halves.kept[name], halves.kept[name])


class _Choice:
    """Which nodes stay float32, as far as is known."""

    def __init__(
        self,
        windows: Sequence[ir.Model],
        outputs: Collection[str],
        cut: Cut,
        trials: Sequence[Feeds],
        tell: Progress,
        chain_tolerance: float,
    ) -> None:
        self._windows = [window.clone() for window in windows]
        name_nodes(self._windows)
        self._large = outgrown(self._windows)
        for name in sorted(self._large):
            log.info("%s stays float32: its values need more range than fp16 has", name)
        self._outputs, self._cut, self._trials, self._tell = outputs, cut, trials, tell
        self._chain_tolerance = chain_tolerance
        self._full: set[str] = set()

    def keep_all(self) -> None:
        self._full = {node.name or "" for window in self._windows for node in window.graph}

    def draft(self, tolerance: float = float("inf")) -> _Draft:
        """Everything in float16 that is not known to have to stay float32, cut into blocks and compared."""
        drafts = [window.clone() for window in self._windows]
        halves = halve(drafts, self._full, self._large, self._outputs)
        blocks = list(self._cut(drafts))
        walk = _Walk(blocks, halves, self._trials, tolerance, self._outputs)
        finds = []
        for index in range(len(blocks)):
            self._tell("precision", index, len(blocks))
            finds.append(walk.look(index))
        self._tell("precision", len(blocks), len(blocks))
        return _Draft(drafts, halves, blocks, finds, walk.end)

    def settle(self, tolerance: float) -> _Draft:
        """The first draft in which each block is within `tolerance`."""
        while True:
            draft = self.draft(tolerance)
            more = self._resolved(draft) - self._full
            if not more:
                return draft
            self._full |= more

    def _resolved(self, draft: _Draft) -> set[str]:
        """The nodes that `draft` shows to have to be float32: those found, and all that make or read a value which must
        not be rounded."""
        unrounded = {name for find in draft.finds for name in find.unrounded}
        nodes = {name for find in draft.finds for name in find.full}
        for node in (node for window in self._windows for node in window.graph):
            if any(value is not None and value.name in unrounded for value in (*node.inputs, *node.outputs)):
                nodes.add(node.name or "")
        return nodes


class _Walk:
    """Runs `blocks` one after the other on `trials`; `look` must be called for each in its turn. `end` is then the
    largest difference of the model's `outputs`."""

    def __init__(
        self,
        blocks: Sequence[ir.Model],
        halves: Halves,
        trials: Sequence[Feeds],
        tolerance: float,
        outputs: Collection[str],
    ) -> None:
        self._blocks, self._halves, self._tolerance, self._outputs = blocks, halves, tolerance, outputs
        self._exact = [dict(feeds) for feeds in trials]
        self._own = [dict(feeds) for feeds in trials]
        self._last = {value.name or "": index for index, block in enumerate(blocks) for value in block.graph.inputs}
        self.end = 0.0

    def look(self, index: int) -> Find:
        block, halves = self._blocks[index], self._halves
        names = [value.name or "" for value in block.graph.outputs]
        wanted = run(as_it_was(block, halves), names, self._exact)
        narrow = [name for value in block.graph.inputs if (name := value.name or "") in halves.values]
        results = try_rounded(rounded(block, halves)[0], names, [*self._exact, *self._own], narrow)
        got, own = results[: len(wanted)], results[len(wanted) :]
        diff = largest_difference(wanted, got)
        find = Find(diff)
        if diff > self._tolerance and any(is_half(node, halves) for node in block.graph):
            find = Search(block, halves, self._exact, wanted, self._tolerance).find(diff)
        if any(name in self._outputs for name in names):
            self.end = max(self.end, largest_difference(wanted, own, self._outputs))
        self._pass_on(index, self._exact, wanted)
        self._pass_on(index, self._own, [other or exact for exact, other in zip(wanted, own, strict=True)])
        return_memory()
        return find

    def _pass_on(self, index: int, lives: Sequence[Feeds], results: Sequence[Feeds]) -> None:
        for live, made in zip(lives, results, strict=True):
            live.update(made)
            for name in [name for name in live if self._last.get(name, -1) <= index]:
                del live[name]
