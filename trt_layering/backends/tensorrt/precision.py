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
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime.runtime import reported, return_memory, run_plainly
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.compare import relative
from trt_layering.errors import BackendError, UsageError
from trt_layering.graph.half import Halves, as_it_was, halve, is_half, name_nodes, outgrown, rounded
from trt_layering.graph.narrow import NarrowTensor
from trt_layering.graph.stored import unmapped
from trt_layering.inputs import Array, Feeds

log = logging.getLogger("trt_layering")

BLOCK_TOLERANCE = 1e-2
"""How much float16 may change a block's output, as a part of the largest element."""
CHAIN_TOLERANCE = 5e-2
"""How much all of it together may change a model's output, as a part of the largest element."""

_SUSPECTS = {
    "Div", "Exp", "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "Pow", "Reciprocal",
    "ReduceL2", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Softmax", "Sqrt",
}  # fmt: skip
"""What overflows or cancels most often; tried first, and given back where it was not the cause."""
_SPARED = 24  # of a block's kept nodes, so many are tried one by one whether they could be float16 after all
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


def refuse_narrow_weights(weights: str) -> None:
    """Raises UsageError where `weights`, the word of the command line, asks for 16 bits beside precision fp16."""
    if weights != "fp32":
        raise UsageError(
            f"weights cannot be stored as {weights} where precision is fp16, which stores them in 16 bits already",
            remedy="leave out --weights, or --precision",
        )


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
    finds: list[_Find]
    end: float

    def converted(self) -> Converted:
        costs = [_cost(block, find.diff, self.halves) for block, find in zip(self.blocks, self.finds, strict=True)]
        return Converted(self.windows, costs, self.end)


@dataclass(frozen=True)
class _Find:
    """By how much a block differs, the nodes that had better be float32, and the values that must not be rounded."""

    diff: float
    full: frozenset[str] = frozenset()
    unrounded: frozenset[str] = frozenset()


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

    def look(self, index: int) -> _Find:
        block, halves = self._blocks[index], self._halves
        names = [value.name or "" for value in block.graph.outputs]
        wanted = _run(as_it_was(block, halves), names, self._exact)
        narrow = [name for value in block.graph.inputs if (name := value.name or "") in halves.values]
        results = _try(rounded(block, halves)[0], names, [*self._exact, *self._own], narrow)
        got, own = results[: len(wanted)], results[len(wanted) :]
        diff = _largest(wanted, got)
        find = _Find(diff)
        if diff > self._tolerance and any(is_half(node, halves) for node in block.graph):
            find = _Search(block, halves, self._exact, wanted, self._tolerance).find(diff)
        if any(name in self._outputs for name in names):
            self.end = max(self.end, _largest(wanted, own, self._outputs))
        self._pass_on(index, self._exact, wanted)
        self._pass_on(index, self._own, [other or exact for exact, other in zip(wanted, own, strict=True)])
        return_memory()
        return find

    def _pass_on(self, index: int, lives: Sequence[Feeds], results: Sequence[Feeds]) -> None:
        for live, made in zip(lives, results, strict=True):
            live.update(made)
            for name in [name for name in live if self._last.get(name, -1) <= index]:
                del live[name]


class _Search:
    """Looks for what must stay float32 for `block` to give `wanted`, on inputs that others computed in float32."""

    def __init__(
        self,
        block: ir.Model,
        halves: Halves,
        lives: Sequence[Feeds],
        wanted: Sequence[Feeds],
        tolerance: float,
    ) -> None:
        self._block, self._halves, self._lives, self._tolerance = block, halves, lives, tolerance
        self._names = [value.name or "" for value in block.graph.outputs]
        self._wanted = wanted
        self._nodes = [node for node in block.graph if is_half(node, halves)]
        self._full: set[str] = set()
        self._unrounded: set[str] = set()

    def find(self, diff: float) -> _Find:
        self._full = {node.name or "" for node in self._nodes if node.op_type in _SUSPECTS}
        while not (passes := self._passes()) and len(self._full) < len(self._nodes):
            self._grow()
        if not passes:
            self._give_up()
        self._spare()
        return _Find(diff, frozenset(self._full), frozenset(self._unrounded))

    def _passes(self) -> bool:
        half, _ = rounded(self._block, self._halves, self._full, self._unrounded)
        return _largest(self._wanted, self._try(half, self._names, self._lives)) <= self._tolerance

    def _try(self, model: ir.Model, names: Sequence[str], lives: Sequence[Feeds]) -> list[Feeds | None]:
        return _try(
            model, names, lives, [name for name in self._rounded_inputs() if self._source(name) not in self._unrounded]
        )

    def _rounded_inputs(self) -> list[str]:
        return [name for value in self._block.graph.inputs if (name := value.name or "") in self._halves.values]

    def _source(self, name: str) -> str:
        """The value of the model that `name` is, if a Cast made it."""
        return self._halves.sources.get(name, name)

    def _give_up(self) -> None:
        """All of the block stays float32, which is not enough; so does what it is given and what it passes on, those
        values first that are the farthest off once they are rounded."""
        off = {name: _off(name, self._lives) for name in self._rounded_inputs()}
        off.update({name: _off(name, self._wanted) for name in self._names if name in self._halves.values})
        for name in sorted(off, key=lambda name: -off[name]):
            if self._passes():
                return
            self._unrounded.add(self._source(name))

    def _spare(self) -> None:
        """Of the nodes to keep, those are given back without which the block still passes."""
        for name in sorted(self._full)[:_SPARED]:
            self._full.remove(name)
            if not self._passes():
                self._full.add(name)

    def _grow(self) -> None:
        """Add to the nodes to keep those at which values begin to differ too much."""
        before = len(self._full), len(self._unrounded)
        exact, wrong = self._differences()
        for node in self._block.graph:
            bad = [value for value in node.outputs if value.name in wrong]
            if bad and not any(value is not None and value.name in wrong for value in node.inputs):
                self._blame(node, bad, exact)
        if (len(self._full), len(self._unrounded)) == before:
            self._full = {node.name or "" for node in self._nodes}

    def _blame(self, node: ir.Node, wrong: Sequence[ir.Value], exact: Mapping[str, float]) -> None:
        """`node` makes the values `wrong` of inputs that are right; `exact` tells differences before rounding."""
        name = node.name or ""
        if name not in self._full and is_half(node, self._halves):
            self._full.add(name)
            return
        for value in wrong:
            if exact[value.name or ""] > self._tolerance:
                self._full.update(half.name or "" for half in self._makers(node))
            else:
                self._full.update(reader.name or "" for reader in value.consumers() if is_half(reader, self._halves))
                if value.is_graph_output():
                    self._unrounded.add(self._source(value.name or ""))

    def _makers(self, node: ir.Node) -> Iterator[ir.Node]:
        """The nodes nearest before `node` that are still float16."""
        pending, seen = [node], {node}
        while pending:
            for value in pending.pop().inputs:
                maker = None if value is None else value.producer()
                if maker is None or maker in seen:
                    continue
                seen.add(maker)
                if is_half(maker, self._halves) and maker.name not in self._full:
                    yield maker
                else:
                    pending.append(maker)

    def _differences(self) -> tuple[dict[str, float], set[str]]:
        """Of each value of the block, by how much it differs before it is rounded; and those that differ too much, then
        or afterwards."""
        plain = as_it_was(self._block, self._halves)
        half, places = rounded(self._block, self._halves, self._full, self._unrounded)
        names = [value.name or "" for node in plain.graph for value in node.outputs if _is_tensor(value)]
        pairs = {name: places.get(name, (name, name)) for name in names}
        _put_out(plain, names)
        _put_out(half, dict.fromkeys(name for pair in pairs.values() for name in pair))
        exact, wrong = dict.fromkeys(names, 0.0), set()
        for live in self._lives:
            [wanted] = _run(plain, names, [live])
            [got] = self._try(half, [value.name or "" for value in half.graph.outputs], [live])
            if got is None:
                return exact, set()
            for name, (before, after) in pairs.items():
                exact[name] = max(exact[name], relative(wanted[name], got[before]))
                if max(exact[name], relative(wanted[name], got[after])) > self._tolerance:
                    wrong.add(name)
        return exact, wrong


def _is_tensor(value: ir.Value) -> bool:
    return bool(value.name) and isinstance(value.type, ir.TensorType)


def _put_out(model: ir.Model, names: Collection[str]) -> None:
    """Let the values `names` be the outputs of `model`."""
    made = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [made[name] for name in names]


def _largest(wanted: Sequence[Feeds], got: Sequence[Feeds | None], names: Collection[str] | None = None) -> float:
    """The largest difference of `names`, or of all; infinite where there is nothing to compare with."""
    largest = 0.0
    for own, other in zip(wanted, got, strict=True):
        for name in own if names is None else own.keys() & names:
            largest = max(largest, math.inf if other is None else relative(own[name], other[name]))
    return largest


def _run(model: ir.Model, names: Sequence[str], lives: Sequence[Feeds]) -> list[Feeds]:
    """Outputs `names` of `model` for each of `lives`."""
    with reported(f"graph {model.graph.name!r}"):
        session = open_session(_unmapped(model), optimise=False)
        inputs = [value.name or "" for value in model.graph.inputs]
        return [run_plainly(session, names, {name: live[name] for name in inputs}) for live in lives]


def _try(model: ir.Model, names: Sequence[str], lives: Sequence[Feeds], narrow: Sequence[str]) -> list[Feeds | None]:
    """`_run` with the inputs `narrow` rounded; None where it fails, as indices made of what is infinite do."""
    rounds = [{**live, **{name: _rounded_array(live[name]) for name in narrow}} for live in lives]
    with reported(f"graph {model.graph.name!r}"):
        session = open_session(_unmapped(model), optimise=False)
    inputs = [value.name or "" for value in model.graph.inputs]
    return [_attempt(session, names, {name: live[name] for name in inputs}) for live in rounds]


def _attempt(session: ort.InferenceSession, names: Sequence[str], feeds: Feeds) -> Feeds | None:
    try:
        with reported("float16"):
            return run_plainly(session, names, feeds)
    except BackendError as error:
        log.info("not float16: %s", error.what)
        return None


def _off(name: str, arrays: Sequence[Feeds]) -> float:
    """How far the value `name` is off once it is rounded."""
    return max(relative(one[name], _rounded_array(one[name])) for one in arrays)


def _rounded_array(array: Array) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(array.dtype)


def _unmapped(model: ir.Model) -> ir.Model:
    """`model`, its weights such that they leave no mapped pages behind."""
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            value.const_value = unmapped(value.const_value)
    return model
