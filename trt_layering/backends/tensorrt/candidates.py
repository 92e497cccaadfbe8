"""Which binding a chain gets: the fastest of those that answered right, by what was measured on this device.

May import errors, the manifest and units. Measures nothing itself. BuildError where no binding is left, with what kept
each of them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trt_layering.errors import BuildError
from trt_layering.store.manifest import Binding, Candidate
from trt_layering.units import format_seconds, format_size

_DOING = {"inputs": "binding", "refit": "refitting", "swap": "deserializing"}


@dataclass(frozen=True)
class Measured:
    """One block with one binding: what bringing its engine up to date takes (refit, deserialize; 0 for inputs) and what
    executing it takes; its largest difference from ONNX Runtime's outputs, as a part of the largest of these; and its
    plan's bytes, 0 where it shares another block's."""

    block: str
    bind_seconds: float
    execute_seconds: float
    max_rel_diff: float
    plan_bytes: int


@dataclass(frozen=True)
class Attempt:
    """One binding for a whole chain: what was measured, block by block, or in words why it cannot be had."""

    binding: Binding
    blocks: Sequence[Measured] = ()
    failure: str = ""


@dataclass(frozen=True)
class Choice:
    """The `binding` taken, and all `candidates` in the order in which they were asked about."""

    binding: Binding
    candidates: tuple[Candidate, ...]


def choose(attempts: Sequence[Attempt], tolerance: float) -> Choice:
    """The quickest of `attempts` whose blocks all differ by at most `tolerance`; of equals the first. Raises BuildError
    where there is none."""
    objections = [_objection(attempt, tolerance) for attempt in attempts]
    right = [n for n, objection in enumerate(objections) if not objection]
    if not right:
        raise BuildError(
            "no binding gives this model's answers on this device",
            where="; ".join(f"{one.binding}: {words}" for one, words in zip(attempts, objections, strict=True)),
            remedy="build with another --block-size, or with --precision fp32, and report the model",
        )
    taken = min(right, key=lambda n: sweep_seconds(attempts[n]))
    found = []
    for n, (attempt, objection) in enumerate(zip(attempts, objections, strict=True)):
        seconds = 0.0 if objection else sweep_seconds(attempt)
        verdict = "taken" if n == taken else "not quicker"
        words = objection or f"{verdict}: {_told(attempt, seconds)}"
        found.append(Candidate(binding=attempt.binding, seconds=seconds, words=words))
    return Choice(attempts[taken].binding, tuple(found))


def sweep_seconds(attempt: Attempt) -> float:
    """One run with all weights in time. An engine is brought up to date while the one before executes, in the other of
    two slots: the first of a run waits for that, each other for the longer of the two."""
    blocks = attempt.blocks
    if attempt.binding == "inputs" or not blocks:
        return sum(block.execute_seconds for block in blocks)
    steps = (max(after.bind_seconds, block.execute_seconds) for block, after in pairwise(blocks))
    return blocks[0].bind_seconds + sum(steps) + blocks[-1].execute_seconds


def _objection(attempt: Attempt, tolerance: float) -> str:
    """What keeps `attempt` out, or ""."""
    if attempt.failure:
        return attempt.failure
    for block in attempt.blocks:
        if not block.max_rel_diff <= tolerance:  # nor is NaN
            differs = f"differs from ONNX Runtime by {block.max_rel_diff:.3g} of its largest output"
            return f"{block.block} {differs}, over {tolerance:.3g}"
    return ""


def _told(attempt: Attempt, seconds: float) -> str:
    executing = sum(block.execute_seconds for block in attempt.blocks)
    binding = sum(block.bind_seconds for block in attempt.blocks)
    worst = max((block.max_rel_diff for block in attempt.blocks), default=0.0)
    parts = [f"executing {format_seconds(executing)}"]
    if attempt.binding != "inputs":
        exposed = format_seconds(seconds - executing)
        parts.append(f"{_DOING[attempt.binding]} {format_seconds(binding)}, of which {exposed} are waited for")
    parts.append(f"plans of {format_size(sum(block.plan_bytes for block in attempt.blocks))}")
    parts.append(f"differs by at most {worst:.2g}")
    return f"{format_seconds(seconds)} a run: {'; '.join(parts)}"
