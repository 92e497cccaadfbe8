"""Finds the nodes of a block that must stay float32: those at which its values begin to differ, and who rounded what
they read.

May import the graph room, onnx-ir and the ONNX Runtime backend, neither TensorRT nor PyCUDA. Raises what executing a
block in float32 raises. All values of a block that differs too much are held at once, for one trial.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.onnxruntime.runtime import reported, run_plainly, uncut_options
from trt_layering.backends.onnxruntime.session import open_session
from trt_layering.compare import relative
from trt_layering.errors import BackendError
from trt_layering.graph.half import Halves, as_it_was, is_half, rounded
from trt_layering.graph.stored import unmapped
from trt_layering.inputs import Array, Feeds

log = logging.getLogger("trt_layering")

_SUSPECTS = {
    "Div", "Exp", "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "Pow", "Reciprocal",
    "ReduceL2", "ReduceLogSumExp", "ReduceMean", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Softmax", "Sqrt",
}  # fmt: skip
"""What overflows or cancels most often; tried first, and given back where it was not the cause."""
_SPARED = 40  # times that a block runs to find out which of its kept nodes could be float16 after all


@dataclass(frozen=True)
class Find:
    """By how much a block differs, the nodes that had better be float32, and the values that must not be rounded."""

    diff: float
    full: frozenset[str] = frozenset()
    unrounded: frozenset[str] = frozenset()


class Search:
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

    def find(self, diff: float) -> Find:
        self._full = {node.name or "" for node in self._nodes if node.op_type in _SUSPECTS}
        while not (passes := self._passes()) and len(self._full) < len(self._nodes):
            self._grow()
        if not passes:
            self._give_up()
        self._spare()
        return Find(diff, frozenset(self._full), frozenset(self._unrounded))

    def _passes(self) -> bool:
        half, _ = rounded(self._block, self._halves, self._full, self._unrounded)
        return largest_difference(self._wanted, self._tried(half, self._names, self._lives)) <= self._tolerance

    def _tried(self, model: ir.Model, names: Sequence[str], lives: Sequence[Feeds]) -> list[Feeds | None]:
        return try_rounded(
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
        """Of the nodes to keep, those are given back without which the block still passes: many at once, then fewer."""
        pending = [[name for node in self._nodes if (name := node.name or "") in self._full]]
        tries = 0
        while pending and tries < _SPARED:
            names = pending.pop()
            self._full.difference_update(names)
            tries += 1
            if not self._passes():
                self._full.update(names)
                middle = len(names) // 2
                pending += [part for part in (names[:middle], names[middle:]) if part and len(names) > 1]

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
            [wanted] = run(plain, names, [live])
            [got] = self._tried(half, [value.name or "" for value in half.graph.outputs], [live])
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


def largest_difference(
    wanted: Sequence[Feeds], got: Sequence[Feeds | None], names: Collection[str] | None = None
) -> float:
    """The largest difference of `names`, or of all; infinite where there is nothing to compare with."""
    largest = 0.0
    for own, other in zip(wanted, got, strict=True):
        for name in own if names is None else own.keys() & names:
            largest = max(largest, math.inf if other is None else relative(own[name], other[name]))
    return largest


def run(model: ir.Model, names: Sequence[str], lives: Sequence[Feeds]) -> list[Feeds]:
    """Outputs `names` of `model` for each of `lives`."""
    with reported(f"graph {model.graph.name!r}"):
        session = open_session(_unmapped(model), uncut_options(optimised=False))
        inputs = [value.name or "" for value in model.graph.inputs]
        return [run_plainly(session, names, {name: live[name] for name in inputs}) for live in lives]


def try_rounded(
    model: ir.Model, names: Sequence[str], lives: Sequence[Feeds], narrow: Sequence[str]
) -> list[Feeds | None]:
    """`run` with the inputs `narrow` rounded; None where it fails, as indices made of what is infinite do."""
    rounds = [{**live, **{name: _rounded_array(live[name]) for name in narrow}} for live in lives]
    with reported(f"graph {model.graph.name!r}"):
        session = open_session(_unmapped(model), uncut_options(optimised=False))
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
