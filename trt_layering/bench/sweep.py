"""A bench: every subject at every budget, in processes of their own that take turns, so that what changes on the
machine meanwhile changes for all of them.

May import the runtime's footprint and the store. Raises what a subject raises, and BackendError where one of them
answers otherwise than the first; of the subjects that may fail, that is a note in the results.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trt_layering import child
from trt_layering.bench import subjects
from trt_layering.bench.caches import drop_pages
from trt_layering.bench.cgroup import MemoryGroup
from trt_layering.bench.plain import PROCESS_BYTES
from trt_layering.bench.results import Samples, point
from trt_layering.bench.subjects import CHAIN, SUBJECTS, Subject
from trt_layering.bench.worker import EndedError, Worker
from trt_layering.bench.workspace import remove_left, workspace
from trt_layering.compare import TOLERANCE, difference
from trt_layering.errors import BackendError, LayeringError, MemoryLimitError
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import Chain, resolve
from trt_layering.units import format_size

Progress = Callable[[str, int, int], None]

_TURN_SECONDS = 5.0
_MAPPED_PATIENCE = 180.0  # under too small a limit the kernel can go on reclaiming for minutes
_OTHER_KERNELS = 1e-3  # of the largest output: what is not prepacked is summed in another order, by other kernels
_FRACTIONS = (0.10, 0.25, 0.50, 0.75)
_STEPS = 5
_APART = 1.12


@dataclass(frozen=True)
class Request:
    """What is to be measured. `against` names subjects beside the chain, `model` is the uncut one's file; `iterations`
    runs a turn, one turn of each subject in each of `rounds`; `loader` are fields of LoaderOptions."""

    chain: Chain
    repository: Path
    version: int
    budgets: Sequence[int]
    against: Sequence[str]
    model: Path | None
    feeds: child.Feeds
    iterations: int
    rounds: int
    loader: Mapping[str, Any]


class Held(Protocol):
    """What the sweep needs of a Worker."""

    opened: dict[str, Any]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]: ...
    def close(self) -> None: ...


Start = Callable[..., Held]
Call = Callable[[child.Work, Mapping[str, Any]], Any]


def default_budgets(needs: Footprint) -> list[int]:
    """About eight from the floor to everything: fractions of the weights that lie between, and even ratios, where these
    are not next to another one."""
    low, high = max(needs.floor, 1), max(needs.resident, needs.floor, 1)
    fractions = [int(part * (needs.weights + needs.tables)) for part in _FRACTIONS]
    chosen = [low, high, *(budget for budget in fractions if low < budget < high)]
    for step in range(1, _STEPS):
        budget = round(low * (high / low) ** (step / _STEPS))
        if all(max(budget, other) > _APART * min(budget, other) for other in chosen):
            chosen.append(budget)
    return sorted(set(chosen))


def sweep(request: Request, progress: Progress, start: Start = Worker, call: Call = child.call) -> dict[str, Any]:
    """Measure; the results, plain JSON. `start` opens a subject like Worker, `call` is like that of `child`."""
    with tempfile.TemporaryDirectory(prefix="trt-layering-bench-") as work:
        return _Sweep(request, Path(work), progress, start, call).measured()


@dataclass
class _Open:
    """A subject at one budget (0: all of them) with its process, its samples, and what its libraries alone take."""

    subject: Subject
    budget: int
    held: Held
    libraries: int
    samples: Samples = field(default_factory=Samples)


class _Sweep:
    def __init__(self, request: Request, work: Path, progress: Progress, start: Start, call: Call) -> None:
        self._request, self._work, self._progress, self._start, self._call = request, work, progress, start, call
        self._libraries: dict[bool, int] = {}
        self._notes: list[str] = []
        self._points: list[dict[str, Any]] = []
        self._reference: tuple[str, child.Feeds] | None = None
        self._turns = 0
        self._against = [CHAIN.name, *request.against]
        child.save_arrays(work / "feeds.npz", [request.feeds])

    def measured(self) -> dict[str, Any]:
        """The whole result."""
        request = self._request
        left = remove_left(request.repository)
        self._notes += [f"removed {name}, left by a bench that was killed" for name in left]
        with contextlib.ExitStack() as stack:
            mapped = stack.enter_context(self._mapped_copy())
            holding = self._opened([s for s in SUBJECTS.values() if not s.for_each_budget], 0, None, stack)
            whole = {one.subject.name: Samples() for one in holding}
            self._baseline = next((name for name in ("memory", "resident") if name in whole), CHAIN.name)
            for budget in request.budgets:
                with contextlib.ExitStack() as at_budget:
                    each = [s for s in SUBJECTS.values() if s.for_each_budget]
                    self._measure(budget, [*holding, *self._opened(each, budget, mapped, at_budget)], whole)
        for one in holding:
            samples = whole[one.subject.name]
            if samples.seconds:
                alone = whole[self._baseline].seconds
                self._points.append(point(one.subject.name, None, samples, request.chain.weights_bytes, alone))
        return self._result()

    def _chain_task(self, budget: int, mode: str) -> dict[str, Any]:
        request = self._request
        return {
            "name": request.chain.name, "repository": str(request.repository), "version": request.version,
            "budget": budget or None, "loader": dict(request.loader), "mode": mode,
            "feeds": str(self._work / "feeds.npz"),
        }  # fmt: skip

    def _timeline(self) -> dict[str, Any] | None:
        """Two sweeps at the budget whose arena is nearest to half the weights; None where no budget streams."""
        needs = Footprint.of(self._request.chain)
        budgets = [budget for budget in self._request.budgets if budget < needs.resident]
        if not budgets:
            return None
        budget = min(budgets, key=lambda one: abs(one - needs.fixed - needs.weights / 2))
        self._progress("tracing", 0, 0)
        told: dict[str, Any] = self._call(subjects.traced, self._chain_task(budget, "auto"))
        return {**told, "budget_bytes": budget}

    def _result(self) -> dict[str, Any]:
        chain, request = self._request.chain, self._request
        needs = Footprint.of(chain)
        return {
            "name": chain.name, "version": request.version, "machine": _machine(),
            "weights_bytes": chain.weights_bytes, "stored_as": chain.weights, "floor_bytes": needs.floor,
            "everything_bytes": needs.resident, "budgets": list(request.budgets), "baseline": self._baseline,
            "iterations": request.iterations, "rounds": request.rounds, "points": self._points,
            "timeline": self._timeline(), "notes": list(dict.fromkeys(self._notes)),
        }  # fmt: skip

    @contextlib.contextmanager
    def _mapped_copy(self) -> Iterator[Path | None]:
        """The uncut model, optimised, with its weights in a file that can be mapped, on the chain's drive; None, and a
        note, where it or a memory group cannot be had, whatever the reason."""
        if "mapped" not in self._against:
            yield None
            return
        with contextlib.ExitStack() as stack:
            try:
                MemoryGroup(PROCESS_BYTES).close()
                path = stack.enter_context(workspace(self._request.repository)) / "optimised.onnx"
                self._progress("preparing the mapped model", 0, 0)
                task = {"model": str(self._request.model), "target": str(path)}
                self._call(subjects.prepare_mapped, task)
            except (OSError, LayeringError) as error:
                lines = str(error.what if isinstance(error, LayeringError) else error).splitlines()
                self._leave_out(SUBJECTS["mapped"], " … ".join(dict.fromkeys((lines[0], lines[-1]))))
                path = None
            yield path

    def _opened(
        self, wanted: Sequence[Subject], budget: int, mapped: Path | None, stack: contextlib.ExitStack
    ) -> list[_Open]:
        """Those of `wanted` that were asked for and can be had, open until `stack` ends."""
        found = []
        for subject in wanted:
            if subject.name not in self._against:
                continue
            try:
                held = self._process(subject, budget, mapped, stack)
            except (EndedError, MemoryLimitError) as error:
                self._failed(subject, budget, error)
                continue
            stack.callback(held.close)
            one = _Open(subject, budget, held, self._libraries_of(subject, held.opened["modules"]))
            one.samples.peak_bytes = held.opened["peak_bytes"] - one.libraries
            found.append(one)
        return found

    def _process(self, subject: Subject, budget: int, mapped: Path | None, stack: contextlib.ExitStack) -> Held:
        label = f"{subject.label} at {format_size(budget)}" if budget else subject.label
        if subject.name in subjects.MODES:
            task = self._chain_task(budget, subjects.MODES[subject.name])
            return self._start(label, {**task, "kind": subject.name})
        task = {"kind": subject.name, "feeds": str(self._work / "feeds.npz")}
        if mapped is None:
            return self._start(label, {**task, "model": str(self._request.model)})
        drop_pages(mapped.parent)
        group = stack.enter_context(MemoryGroup(budget + PROCESS_BYTES))
        return self._start(label, {**task, "model": str(mapped)}, group, _MAPPED_PATIENCE)

    def _libraries_of(self, subject: Subject, modules: Sequence[str]) -> int:
        """Resident bytes of a process with these modules imported; a chain's are alike, and so are a session's."""
        key = subject.name in subjects.MODES
        if key not in self._libraries:
            self._libraries[key] = int(self._call(subjects.imported, {"modules": list(modules)}))
        return self._libraries[key]

    def _measure(self, budget: int, opened: list[_Open], whole: Mapping[str, Samples]) -> None:
        """All rounds of one budget. What the subjects that hold everything took goes to `whole`, too."""
        now = {one.subject.name: one.samples if one.budget else Samples() for one in opened}
        for number in range(self._request.rounds):
            for one in opened if number % 2 == 0 else opened[::-1]:
                if one.subject.name in now and not self._turn(one, budget, now[one.subject.name], whole):
                    del now[one.subject.name]
        baseline = now[self._baseline].seconds if self._baseline in now else None
        for one in opened:
            if one.budget and one.subject.name in now:
                weights = self._request.chain.weights_bytes
                self._points.append(point(one.subject.name, budget, one.samples, weights, baseline))

    def _turn(self, one: _Open, budget: int, now: Samples, whole: Mapping[str, Samples]) -> bool:
        """One turn of a subject; False where it failed as it may."""
        request, answers = self._request, self._work / "answers.npz"
        task = {"iterations": request.iterations, "seconds": _TURN_SECONDS, "answers": str(answers)}
        try:
            turn = one.held.ask(task)
        except (EndedError, MemoryLimitError) as error:
            self._failed(one.subject, budget, error)
            return False
        self._compare(one.subject, budget, child.load_arrays(answers)[0])
        now.add(turn, one.libraries)
        if not one.budget:
            whole[one.subject.name].peak_bytes = one.samples.peak_bytes
            whole[one.subject.name].add(turn, one.libraries)
        self._turns += 1
        total = len(request.budgets) * request.rounds * len(self._against)
        self._progress("measuring", min(self._turns, total), total)
        return True

    def _failed(self, subject: Subject, budget: int, error: BackendError | MemoryLimitError) -> None:
        """Note that a subject did not survive; raises `error` where it should have."""
        if not subject.may_fail:
            raise error
        where = f" at {format_size(budget)}" if budget else ""
        self._notes.append(f"{subject.label}{where} did not run: {error.what}")

    def _leave_out(self, subject: Subject, why: str) -> None:
        self._against.remove(subject.name)
        self._notes.append(f"{subject.label} is left out: {why}")

    def _compare(self, subject: Subject, budget: int, got: child.Feeds) -> None:
        """Raise unless `got` is what the first subject answered, as far as the build's check allowed."""
        if self._reference is None:
            self._reference = (subject.label, got)
            return
        label, wanted = self._reference
        least = _OTHER_KERNELS if subject.name == "mapped" else TOLERANCE
        tolerance = max(self._request.chain.check.tolerance, least)
        for name, array in wanted.items():
            apart, largest = difference(array, got[name]) if name in got else (float("inf"), 0.0)
            if apart > tolerance * largest:
                raise BackendError(
                    f"{subject.label} at {format_size(budget)} answers otherwise than {label}: {name!r} differs by "
                    f"{apart:.3g}, the largest output is {largest:.3g}",
                    where=f"chain {self._request.chain.name!r}",
                    remedy="give the model that the chain was built from; if it is, build the chain again",
                )


def _machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import onnxruntime

    cpu = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.machine(), "cores": len(os.sched_getaffinity(0)), "kernel": platform.release(),
        "python": platform.python_version(), "onnxruntime": onnxruntime.__version__,
    }  # fmt: skip


def newest(repository: Path, name: str, version: int | None) -> tuple[Path, int]:
    """The folder and number of the version of chain `name` that is served."""
    folder = resolve(repository, name, version)
    return folder, int(folder.name)
