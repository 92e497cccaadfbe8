"""Plans of blocks: from the cache, or built by TensorRT in a child process, with less workspace where memory runs out.

May import child, the runtime's meter and the store. A block that cannot be built in the memory there is raises
BlockTooLarge; what TensorRT refuses for another reason, BuildError with the last lines of its log.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from trt_layering import child
from trt_layering.backends.base import BlockTooLarge
from trt_layering.backends.tensorrt import plan_work
from trt_layering.backends.tensorrt.block_file import BlockFile
from trt_layering.backends.tensorrt.plan_cache import Entry, Notes, PlanCache
from trt_layering.backends.tensorrt.plan_work import Refit, Task
from trt_layering.errors import BuildError, MemoryLimitError
from trt_layering.runtime.meter import available_bytes
from trt_layering.store.manifest import PAGE, Binding, Range, Shape
from trt_layering.store.writer import disk_errors
from trt_layering.units import format_seconds, format_size
from trt_layering.words import printable

log = logging.getLogger("trt_layering")

_PLANS, _TIMING = ".plans", ".timing-caches"
_FORMAT = 1
_PROCESS = 512 << 20
"""What is left for TensorRT's libraries and the GPU's context."""
_COPIES = {"inputs": 1, "refit": 4, "swap": 4}
"""How often a block's weights may lie in memory while it is built: read, in the network, in the engine, in the plan."""
_LEAST, _MOST = 8 << 20, 1 << 30
_TRIES = 3
_PATIENCE = 300.0
_OTHERWISE = "choose another binding, or another --block-size so that it is cut elsewhere"
_ENDED_BY_MEMORY = {-signal.SIGKILL, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV}
"""How processes end that the kernel refuses memory to, or whose libraries do not look whether they got it."""


@dataclass(frozen=True)
class PlanRequest:
    """A plan to be had of the block `name` in its canonical form, the file `onnx`: activations i0, … and o0, …, weights
    w0, …, which are inputs of the graph where `binding` is "inputs" and initializers otherwise. `key` is the digest of
    that form, weights' values left out. `shared`: a refit may give other values than the file has."""

    name: str
    onnx: Path
    binding: Binding
    shared: bool
    weights: tuple[str, ...]
    profile: Mapping[str, Range]
    key: str


@dataclass(frozen=True)
class Plan:
    """A plan of `nbytes` bytes at `path`, which stays there until the builder's `prune`. Building it took `seconds` and
    might use `workspace` bytes. Its engine needs `scratch_bytes`, and of a refit exactly `refit_weights`."""

    path: Path
    nbytes: int
    workspace: int
    seconds: float
    scratch_bytes: int
    refit_weights: tuple[str, ...]


class PlanBuilder:
    """Plans for one machine, kept in `repository` until `prune`: an interrupted build resumes with all it finished.

    TensorRT's `version` and the `fingerprint` are what plans depend on. `available` says how many bytes there are to
    build in, of the GPU's memory where it has its own; no workspace is larger than `most` bytes. Of a block that builds
    for more than `patience` seconds the log says so, again and again. A builder serves one thread.
    """

    def __init__(
        self,
        repository: Path,
        version: str,
        fingerprint: Mapping[str, str],
        *,
        available: Callable[[], int] = available_bytes,
        most: int = _MOST,
        patience: float = _PATIENCE,
    ) -> None:
        """Touches nothing yet."""
        self._cache = PlanCache(repository / _PLANS)
        self._machine = [version, *(f"{key}={value}" for key, value in sorted(fingerprint.items()))]
        gpu = "-".join(fingerprint.get(key, "unknown") for key in ("gpu", "sm"))
        self._timing = repository / _TIMING / (re.sub("[^A-Za-z0-9.]+", "-", f"{version}-{gpu}") + ".cache")
        self._available, self._most, self._patience = available, most, patience

    def plan(self, request: PlanRequest) -> Plan:
        """The plan that `request` asks for. Raises BlockTooLarge after the last try, BuildError where TensorRT refuses
        the block or the binding or the disk is full, ModelError where the block's file cannot be read."""
        block = BlockFile.open(request.onnx, request.weights)
        kinds: tuple[Refit, ...] = ("none",)
        if request.binding == "refit":
            kinds = ("individual",) if request.shared else ("identical", "individual")
        refusal: _WeightsRefused | None = None
        for refit in kinds:
            try:
                return self._plan(request, refit, block)
            except _WeightsRefused as error:
                if refusal is None and len(kinds) > 1:
                    log.info("%s is built with weights marked one by one: %s", request.name, error.what)
                refusal = error
        assert refusal is not None, "the last kind was refused"
        raise refusal

    def prune(self) -> int:
        """Remove the plans asked for so far, of which a published chain has its own copies; the bytes that this frees.
        What another build uses stays until that is pruned."""
        return self._cache.prune()

    def close(self) -> None:
        """Let other builds prune; the plans stay."""
        self._cache.close()

    def _plan(self, request: PlanRequest, refit: Refit, block: BlockFile) -> Plan:
        words = f"{request.name} ({request.binding})"
        with self._cache.entry(self._digest(request, refit, block), words) as entry:
            if refusal := entry.refusal():
                raise _WeightsRefused(refusal, where=str(request.onnx), remedy=_OTHERWISE)
            notes = entry.find()
            if notes is None:
                try:
                    notes = self._built(request, refit, entry, block.weight_bytes)
                except _WeightsRefused as error:
                    entry.refuse(error.what)
                    raise
                entry.keep(notes)
        return Plan(
            path=entry.plan, nbytes=notes.nbytes, workspace=notes.workspace, seconds=notes.seconds,
            scratch_bytes=notes.scratch_bytes, refit_weights=notes.refit_weights,
        )  # fmt: skip

    def _digest(self, request: PlanRequest, refit: Refit, block: BlockFile) -> str:
        """Of all that the plan depends on: weights' values, too, unless they are given later."""
        values = ""
        if request.binding == "swap" or refit == "identical":
            with disk_errors(request.onnx):
                values = block.values_digest()
        profile = sorted(_shapes(request).items())
        known = [_FORMAT, request.key, request.binding, refit, request.weights, profile, values, self._machine]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(known))

    def _built(self, request: PlanRequest, refit: Refit, entry: Entry, weight_bytes: int) -> Notes:
        """Build the draft of `entry`, at most `_TRIES` times, with half the workspace each time that memory ran out."""
        first = self._workspace(request, weight_bytes)
        tried: list[str] = []
        for workspace in dict.fromkeys(max(first >> attempt, _LEAST) for attempt in range(_TRIES)):
            task = Task(
                onnx=str(request.onnx), draft=str(entry.draft), timing_cache=str(self._timing), workspace=workspace,
                refit=refit, weights=request.weights, profile=_shapes(request),
            )  # fmt: skip
            with _told_while(f"{request.name} ({request.binding})", self._patience):
                answer = _tried(task)
            for words in answer.get("said", ()):
                log.warning("%s", words)
            if "reason" not in answer:
                return _notes(answer, workspace)
            if answer["reason"] != "memory":
                raise _refusal(request, answer)
            tried.append(f"{format_size(workspace)}: {_short(answer)}")
            log.info("%s was not built with a workspace of %s", request.name, tried[-1])
        raise self._too_large(request, weight_bytes, tried)

    def _workspace(self, request: PlanRequest, weight_bytes: int) -> int:
        """Half of what is available beside the process and the weights."""
        left = self._available() - _PROCESS - _COPIES[request.binding] * weight_bytes
        return min(max(left // 2 // PAGE * PAGE, _LEAST), self._most)

    def _too_large(self, request: PlanRequest, weight_bytes: int, tried: list[str]) -> BlockTooLarge:
        available = self._available()
        there = f"{format_size(available)} are available" if available else "what is available is not known"
        return BlockTooLarge(
            f"memory ran out each time that {request.name} was built for {request.binding}: it has "
            f"{format_size(weight_bytes)} of weights, and {there}",
            where="; ".join(f"with a workspace of {words}" for words in tried),
            remedy="build with a smaller --block-size, stop other programs, or add swap space",
        )


class _WeightsRefused(BuildError):
    """Weights that a refit would have to give are not those that are streamed."""


def _shapes(request: PlanRequest) -> dict[str, tuple[Shape, Shape, Shape]]:
    return {name: (shapes.min, shapes.opt, shapes.max) for name, shapes in request.profile.items()}


def _tried(task: Task) -> dict[str, Any]:
    """What the child answers; one that died, or that memory was refused to, answers "memory"."""
    try:
        answer: dict[str, Any] = child.call(plan_work.build, asdict(task))
    except MemoryLimitError as error:
        return {"reason": "memory", "words": error.what}
    except child.Died as error:
        if error.status not in _ENDED_BY_MEMORY:
            raise
        return {"reason": "memory", "words": f"the process {child.how_it_ended(error.status)}"}
    return answer


def _notes(answer: Mapping[str, Any], workspace: int) -> Notes:
    return Notes(
        digest=answer["digest"], nbytes=answer["nbytes"], workspace=workspace, seconds=answer["seconds"],
        scratch_bytes=answer["scratch_bytes"], refit_weights=tuple(answer["refit_weights"]),
    )  # fmt: skip


def _refusal(request: PlanRequest, answer: Mapping[str, Any]) -> BuildError:
    kind = _WeightsRefused if answer["reason"] == "weights" else BuildError
    return kind(
        f"TensorRT builds no plan of {request.name} for {request.binding}: {_short(answer)}",
        where=str(request.onnx), remedy=_OTHERWISE,
    )  # fmt: skip


def _short(answer: Mapping[str, Any]) -> str:
    """The reason, and after it the last that TensorRT said of it."""
    lines = dict.fromkeys(printable(" ".join(line.split()))[:300] for line in answer.get("lines", ()))
    words: str = answer["words"]
    reason = printable(" ".join(words.split()))[:300]
    return " | ".join([reason, *(line for line in list(lines)[-3:] if reason not in line)])


@contextmanager
def _told_while(words: str, patience: float) -> Iterator[None]:
    """Log, each time that `patience` seconds have passed meanwhile, that `words` still builds."""
    done = threading.Event()

    def tell() -> None:
        passed = 0.0
        while not done.wait(patience):
            passed += patience
            log.warning("%s still builds after %s; TensorRT tries many kernels", words, format_seconds(passed))

    teller = threading.Thread(target=tell, name="trt-layering-patience", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
