"""Turns a model into blocks that TensorRT executes, on the machine that will execute them.

May import the graph room, child and the store; imports TensorRT in child processes only. What TensorRT cannot have
raises ModelError or BuildError, a block too large for the memory there is BlockTooLarge.

All blocks are brought into a form in which equal ones are equal, plans are built for each binding that may be taken,
tried on the device, and the quickest binding that gives the right answers is taken for the whole chain.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import onnx_ir as ir

from trt_layering.backends.base import BlockTooLarge, CutBlock, Draft, Places, Progress
from trt_layering.backends.tensorrt import present, profiles, trials
from trt_layering.backends.tensorrt.candidates import Attempt, Choice, choose
from trt_layering.backends.tensorrt.plan_file import PLAN
from trt_layering.backends.tensorrt.plans import Plan, PlanBuilder, PlanRequest
from trt_layering.backends.tensorrt.prepare import prepare
from trt_layering.backends.tensorrt.streamable import streamable
from trt_layering.backends.tensorrt.trials import Case
from trt_layering.backends.values import as_value
from trt_layering.errors import BackendError, BuildError, DiskError, LayeringError
from trt_layering.graph.canonical import Canonical, as_inputs, canonical, save_with_weights, shaped
from trt_layering.graph.shape_tensors import uncrossed
from trt_layering.graph.tables import rows_input
from trt_layering.runtime.meter import available_bytes
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import Binding, Placement, Range, TensorRt, Value

log = logging.getLogger("trt_layering")

BLOCK_TOLERANCE = 1e-3
"""How much a block's output may differ from ONNX Runtime's, as a part of the largest element: sums in another order."""
HALF_TOLERANCE = 2e-2
"""The same where it computes in 16 bits."""
_HEADER = 64
_LEAST_MOST = 256 << 20
"""What a plan's workspace may at least be, however little memory preparing may take."""


@dataclass(frozen=True)
class Wanted:
    """What a build asks of this backend: a `binding` and a `placement`, or "auto" for the quickest, and the folder
    whose chains are built: plans that were finished lie in it until they are part of one."""

    binding: Literal["auto", "inputs", "refit", "swap"]
    placement: Literal["auto", "staged", "zero-copy", "managed"]
    home: Path


@dataclass(frozen=True)
class _Shaped:
    """A block in its canonical form, its key, the files that it is built from, and its inputs' ranges in the form's
    names; `shared`: there is another with this key."""

    name: str
    index: int
    cut: CutBlock
    form: Canonical
    key: str
    profile: Mapping[str, Range]
    with_inputs: Path
    with_weights: Path
    shared: bool


class TensorRtBuilder:
    """See `backends.base.Builder`."""

    name = "tensorrt"
    suffix = ".plan"
    joins = False

    version = staticmethod(present.version)
    fingerprint = staticmethod(present.fingerprint)
    streamed = staticmethod(streamable)
    legal = staticmethod(uncrossed)

    def __init__(self, wanted: Wanted) -> None:
        """BackendError for a placement that this GPU does not have."""
        if wanted.placement == "managed" and not present.shares_managed_memory():
            what = "processor and GPU cannot use managed memory at the same time here"
            raise BackendError(what, remedy="use --placement staged, zero-copy or auto")
        self._wanted = wanted
        self._inputs: tuple[Value, ...] = ()
        self._work, self._memory = Path(), 0
        self._plans: PlanBuilder | None = None
        self._how: TensorRt | None = None

    def prepare(self, model: ir.Model, work: Path, memory: int, progress: Progress) -> list[ir.Model]:
        """Windows of plain ONNX operators; see `prepare.prepare`."""
        self._inputs, self._work, self._memory = tuple(map(as_value, model.graph.inputs)), work, memory
        return prepare(model, work, memory, progress)

    def drafts(self, cuts: Sequence[CutBlock], ranges: Mapping[str, ShapeRange], progress: Progress) -> list[Draft]:
        """A plan for each block, for the binding that is the best of those wanted."""
        graphs = [cut.graph for cut in cuts]
        found = profiles.ranges(graphs, self._inputs, ranges, self._work, progress)
        blocks = self._shaped(cuts, found)
        wanted = self._wanted.binding
        bindings: Sequence[Binding] = get_args(Binding) if wanted == "auto" else (wanted,)
        plans = self._plans = self._plans or self._plan_builder()
        tries = {binding: _tried(blocks, binding, plans, progress) for binding in bindings}
        choice = self._chosen(blocks, tries, progress)
        chosen = tries[choice.binding]
        self._how = self._described(choice, chosen, found.ranges)
        return [_draft(block, choice.binding, plan) for block, plan in zip(blocks, chosen.plans, strict=True)]

    def _plan_builder(self) -> PlanBuilder:
        """Plans, kept beside the chains. A GPU with memory of its own builds in that."""
        fingerprint = self.fingerprint()
        available = available_bytes if fingerprint["memory"] == "integrated" else trials.free_bytes
        return PlanBuilder(
            self._wanted.home, self.version(), fingerprint, available=available, most=max(self._memory, _LEAST_MOST)
        )

    def published(self) -> None:
        """The chain has its own copies of the plans. Those that cannot be removed stay, which is said."""
        if self._plans is not None:
            try:
                self._plans.prune()
            except DiskError as error:
                log.warning("plans that the chain has copies of stay: %s (%s)", error.what, error.where)

    def close(self) -> None:
        """Plans that were finished stay, for the next try."""
        if self._plans is not None:
            self._plans.close()
            self._plans = None

    def _shaped(self, cuts: Sequence[CutBlock], found: profiles.Found) -> list[_Shaped]:
        forms = [shaped(canonical(cut.graph, cut.weights), found.dims) for cut in cuts]
        keys = [form.key(found.ranges) for form in forms]
        count, blocks = Counter(keys), []
        for index, (cut, form, key) in enumerate(zip(cuts, forms, keys, strict=True)):
            name = f"block-{index:03d}"
            with_inputs, with_weights = self._work / f"{key}.onnx", self._work / f"{name}.onnx"
            if not with_inputs.exists():
                ir.save(as_inputs(form), with_inputs)
            save_with_weights(form, with_weights)
            profile = {f"i{number}": found.ranges[value] for number, value in enumerate(form.inputs)}
            blocks.append(
                _Shaped(name, index, cut, form, key, profile, with_inputs, with_weights, shared=count[key] > 1)
            )
        return blocks

    def _chosen(self, blocks: Sequence[_Shaped], tries: Mapping[Binding, _Try], progress: Progress) -> Choice:
        """The best of `tries`, each of which is measured here. Raises what kept the first back where it was memory that
        kept all of them."""
        progress("candidates", 0, len(tries))
        attempts = []
        for done, (binding, tried) in enumerate(tries.items(), 1):
            attempts.append(tried.attempt(binding, blocks, self._work))
            progress("candidates", done, len(tries))
        if all(isinstance(tried.error, BlockTooLarge) for tried in tries.values()):
            raise next(tried.error for tried in tries.values() if tried.error is not None)
        halves = any(value.dtype == ir.DataType.FLOAT16 for block in blocks for value in _values(block.cut.graph))
        choice = choose(attempts, HALF_TOLERANCE if halves else BLOCK_TOLERANCE)
        for candidate in choice.candidates:
            log.info("binding %s: %s", candidate.binding, candidate.words)
        return choice

    def _described(self, choice: Choice, tried: _Try, ranges: Mapping[str, Range]) -> TensorRt:
        return TensorRt(
            binding=choice.binding,
            placement=self._placement(choice.binding),
            scratch=max((plan.scratch_bytes for plan in tried.plans), default=0),
            ranges=dict(ranges),
            candidates=choice.candidates,
        )

    def _placement(self, binding: Binding) -> Placement:
        """The one wanted, or the quickest here; plans pass through no other than pinned memory."""
        wanted = self._wanted.placement
        if binding == "swap":
            if wanted != "auto":
                log.warning("placement %s is for weights alone: plans are read into pinned memory", wanted)
            return "pinned"
        if wanted != "auto":
            return wanted
        found, words = trials.placement()
        log.info("placement %s: %s", found, words)
        return found

    def draft(self, cut: CutBlock) -> Draft:
        """There are no joined blocks here."""
        raise BuildError("TensorRT chains have no joined blocks", remedy="report this as a fault")

    def tensorrt(self) -> TensorRt | None:
        """What `drafts` decided."""
        return self._how


@dataclass(frozen=True)
class _Try:
    """The plans of all blocks for one binding, or what kept them from being built."""

    plans: Sequence[Plan]
    error: LayeringError | None = None

    def attempt(self, binding: Binding, blocks: Sequence[_Shaped], work: Path) -> Attempt:
        """Checked and timed on this device."""
        if self.error is not None:
            return Attempt(binding, failure=self.error.what)
        seen: set[Path] = set()
        cases = []
        for block, plan in zip(blocks, self.plans, strict=True):
            cases.append(_case(block, binding, plan, work, 0 if plan.path in seen else plan.nbytes))
            seen.add(plan.path)
        try:
            return Attempt(binding, trials.measure(cases, max((p.scratch_bytes for p in self.plans), default=0)))
        except LayeringError as error:
            return Attempt(binding, failure=error.what)


def _tried(blocks: Sequence[_Shaped], binding: Binding, plans: PlanBuilder, progress: Progress) -> _Try:
    found: list[Plan] = []
    for block in blocks:
        progress(f"plans for {binding}", block.index, len(blocks))
        try:
            found.append(plans.plan(_request(block, binding)))
        except BlockTooLarge as error:
            error.block = block.index
            return _Try((), error)
        except DiskError:
            raise
        except BuildError as error:
            return _Try((), error)
    progress(f"plans for {binding}", len(blocks), len(blocks))
    return _Try(found)


def _request(block: _Shaped, binding: Binding) -> PlanRequest:
    weights = tuple(f"w{index}" for index in range(len(block.form.weights)))
    if not weights and binding == "refit":
        binding = "inputs"
    return PlanRequest(
        name=block.name, onnx=block.with_inputs if binding == "inputs" else block.with_weights, binding=binding,
        shared=block.shared, weights=weights, profile=block.profile, key=block.key,
    )  # fmt: skip


def _case(block: _Shaped, binding: Binding, plan: Plan, work: Path, plan_bytes: int) -> Case:
    return Case(
        name=block.name, plan=str(plan.path), plan_bytes=plan_bytes, onnx=str(block.with_weights),
        arrays=str(profiles.arrays_file(work, block.index)), inputs=block.form.inputs, outputs=block.form.outputs,
        weights=len(block.form.weights), binding=binding,
    )  # fmt: skip


def _draft(block: _Shaped, binding: Binding, plan: Plan) -> Draft:
    graph = block.cut.graph.graph
    values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    swapped = binding == "swap"
    weights = {name: graph.initializers[name].const_value for name in block.form.weights}
    write: Callable[[Path, Places], None] = partial(_write_header if swapped else _copy, plan.path)
    return Draft(
        stored=_plan_tensor(block, plan) if swapped else {n: t for n, t in weights.items() if t is not None},
        inputs=[values[name] for name in block.form.inputs],
        outputs=[values[name] for name in block.form.outputs],
        engine=block.name if swapped else str(plan.path),
        write=write,
        weights=() if swapped else block.form.weights,
        rows=None if swapped else rows_input(graph),
    )


def _plan_tensor(block: _Shaped, plan: Plan) -> dict[str, ir.TensorProtocol]:
    """The whole plan as a tensor, mapped from its file."""
    return {f"{PLAN}-{block.index:03d}": ir.Tensor(np.memmap(plan.path, np.uint8, "r"))}


def _copy(plan: Path, path: Path, _places: Places) -> None:
    shutil.copyfile(plan, path)


def _write_header(plan: Path, path: Path, _places: Places) -> None:
    """The plan itself is in the weight store; what is needed to tell what built it is here, too."""
    with plan.open("rb") as file:
        path.write_bytes(file.read(_HEADER))


def _values(model: ir.Model) -> list[ir.Value]:
    return [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
