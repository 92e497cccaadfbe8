"""The first run of a chain that is about to be published: its answers, its memory, its times.

It runs in a child process, whose memory is the chain's alone. May import the runtime. Raises what the run raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trt_layering import backends, child, profiling
from trt_layering.errors import BackendError
from trt_layering.store.manifest import Block, Chain, Memory, Profile

log = logging.getLogger("trt_layering")

_RUNS = 5
_ENOUGH_SECONDS = 1.0


@dataclass(frozen=True)
class Rehearsed:
    """A chain with its memory and its profile; its outputs for each set of trial arrays, block by block, and for the
    last set by each pass through joined blocks."""

    chain: Chain
    outputs: list[child.Feeds]
    joined: list[child.Feeds]


def rehearse(folder: Path, draft: Chain, work: Path, memory: int) -> Rehearsed:
    """Run the chain in `folder`, which has no manifest yet, at its floor on each set of arrays in `work/trials.npz`.

    Memory and profile are measured with the last set of arrays. Joined blocks are executed too where that takes at most
    `memory` bytes. Where activations do not have the shapes that the model declares, these are forgotten, which the log
    says, and the activations are allocated as they come; not on a device, whose engines were built for these shapes.
    """
    task = {
        "folder": str(folder.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "outputs.npz"),
        "joined": str(work / "joined.npz"), "memory": memory,
    }  # fmt: skip
    try:
        measured = child.call(_run, {**task, "chain": msgspec.to_builtins(draft)})
    except BackendError as error:
        if draft.tensorrt is not None:
            raise
        draft = _without_shapes(draft)
        measured = child.call(_run, {**task, "chain": msgspec.to_builtins(draft)})
        log.warning("activations are allocated as they come, since the model's shapes do not hold: %s", error.what)
    draft = _with_joined(draft, measured["executed"])
    found, profile = msgspec.convert(measured["memory"], Memory), msgspec.convert(measured["profile"], Profile)
    chain = msgspec.structs.replace(draft, memory=found, profile=profile)
    return Rehearsed(chain, child.load_arrays(work / "outputs.npz"), child.load_arrays(work / "joined.npz"))


def _with_joined(draft: Chain, executed: Sequence[int]) -> Chain:
    """`draft` with those of its joined blocks that were executed: of others neither answers nor memory are known."""
    joined = tuple(part for index, part in enumerate(draft.joined) if index in executed)
    if len(joined) < len(draft.joined):
        left_out = len(draft.joined) - len(joined)
        log.info("%d joined blocks are left out, which take more than --memory or too long to try", left_out)
    return msgspec.structs.replace(draft, joined=joined)


def rehearse_resident(folder: Path, chain: Chain, work: Path) -> list[child.Feeds]:
    """The outputs of the chain in `folder` for each set of arrays in `work/trials.npz` with everything in memory."""
    task = {"folder": str(folder.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "resident.npz")}
    child.call(_run_resident, {**task, "chain": msgspec.to_builtins(chain)})
    return child.load_arrays(work / "resident.npz")


def _run_resident(task: Mapping[str, Any]) -> None:
    """In the child."""
    from trt_layering.runtime.chain import Chain as OpenChain
    from trt_layering.runtime.loader import LoaderOptions

    chain = OpenChain(Path(task["folder"]), msgspec.convert(task["chain"], Chain), budget=None, loader=LoaderOptions())
    try:
        chain.start()
        outputs = [chain.run(feeds) for feeds in child.load_arrays(Path(task["trials"]))]
    finally:
        chain.close()
    child.save_arrays(Path(task["outputs"]), outputs)


def _without_shapes(draft: Chain) -> Chain:
    def forget(block: Block) -> Block:
        outputs = tuple(msgspec.structs.replace(value, shape=None) for value in block.outputs)
        return msgspec.structs.replace(block, outputs=outputs)

    joined = tuple(msgspec.structs.replace(part, block=forget(part.block)) for part in draft.joined)
    return msgspec.structs.replace(
        draft, blocks=tuple(map(forget, draft.blocks)), whole=tuple(map(forget, draft.whole)), joined=joined
    )


def _run(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the child."""
    folder, draft = Path(task["folder"]), msgspec.convert(task["chain"], Chain)
    backends.share_threads(draft)
    trials = child.load_arrays(Path(task["trials"]))
    memory, outputs = _first_runs(folder, draft, trials)
    child.save_arrays(Path(task["outputs"]), outputs)
    chain = msgspec.structs.replace(draft, memory=memory)
    seconds = profiling.build_seconds(draft)
    found = profiling.measure_here(folder, chain, trials[-1], seconds, room=task["memory"])
    child.save_arrays(Path(task["joined"]), found.outputs)
    missing = max(0, found.beside - memory.activations - memory.scratch)
    memory = msgspec.structs.replace(memory, scratch=memory.scratch + missing)
    times, blocks = found.profile.execute_seconds, len(draft.blocks)
    kept = (*times[:blocks], *(times[blocks + index] for index in found.executed))
    profile = msgspec.structs.replace(found.profile, execute_seconds=kept)
    return {
        "memory": msgspec.to_builtins(memory),
        "profile": msgspec.to_builtins(profile),
        "executed": found.executed,
    }


def _first_runs(folder: Path, draft: Chain, trials: Sequence[child.Feeds]) -> tuple[Memory, list[child.Feeds]]:
    """What the chain's blocks take one by one, at the floor, for each of `trials`: the memory of the largest, the
    outputs of all."""
    from trt_layering.runtime import meter
    from trt_layering.runtime.chain import Chain as OpenChain
    from trt_layering.runtime.footprint import Footprint
    from trt_layering.runtime.loader import LoaderOptions

    draft = msgspec.structs.replace(draft, whole=(), joined=())
    base = meter.current_rss_bytes()
    needs = Footprint.of(draft)
    alive = 0

    def observe(_index: int, _took: float, live: Mapping[str, Any]) -> None:
        nonlocal alive
        alive = max(alive, sum(tensor_bytes(tensor) for tensor in live.values()))

    chain = OpenChain(folder, draft, budget=max(needs.floor, 1), loader=LoaderOptions(), mode="sequential")
    try:
        engines = max(0, meter.current_rss_bytes() - base - needs.engines)
        meter.reset_peak()
        chain.start()
        outputs = [_repeat(partial(chain.observe, feeds, observe)) for feeds in reversed(trials)][::-1]
        held = sum(array.nbytes for array in outputs[-1].values())  # by a caller, while the next sweep runs
        total = max(0, meter.peak_rss_bytes() + held - base - needs.engines - chain.stats()["arena_bytes"])
        device_bytes = chain.stats()["device_bytes"]
    finally:
        chain.close()
    shapes = {name: array.shape for name, array in trials[-1].items()}
    if draft.tensorrt is not None:
        return _on_the_device(draft, device_bytes, meter.peak_rss_bytes() - base, shapes), outputs
    alive = min(alive, max(0, total - engines))
    memory = Memory(activations=alive, scratch=max(0, total - engines - alive), engines=engines, shapes=shapes)
    return memory, outputs


def _on_the_device(draft: Chain, device_bytes: int, host_bytes: int, shapes: Mapping[str, Any]) -> Memory:
    """The memory of a chain at its floor, which took `device_bytes` of the GPU's memory and `host_bytes` of the
    process's. What is allocated by us is known; the rest is TensorRT's and the driver's. Where the processor's memory
    is the GPU's, the driver counts the staging, too."""
    from trt_layering.runtime.activations import Packing, device_nbytes
    from trt_layering.runtime.footprint import Footprint

    assert draft.tensorrt is not None
    packing, needs = Packing.of(draft, draft.blocks), Footprint.of(draft)
    activations = packing.nbytes + sum(device_nbytes(value) or 0 for value in packing.ends)
    known = activations + draft.tensorrt.scratch + needs.largest_block + draft.memory.slots
    if draft.backend.fingerprint.get("memory") == "integrated":
        known += draft.memory.staging
    return msgspec.structs.replace(
        draft.memory, activations=activations, scratch=draft.tensorrt.scratch,
        engines=max(0, device_bytes - known) + max(0, host_bytes), shapes=dict(shapes),
    )  # fmt: skip


def _repeat(run: Callable[[], child.Feeds]) -> child.Feeds:
    """The outputs of `run`, which is done a few times as long as they take less than a second."""
    begin = time.perf_counter()
    for _ in range(_RUNS):
        outputs = run()
        if time.perf_counter() - begin > _ENOUGH_SECONDS:
            break
    return outputs


def tensor_bytes(tensor: Any) -> int:
    """Bytes of ONNX Runtime's tensor; 0 for text, which has no fixed size, and for what lies on a device."""
    if isinstance(tensor, np.ndarray) or not hasattr(tensor, "data_type") or tensor.data_type() == "tensor(string)":
        return 0
    return int(tensor.tensor_size_in_bytes())
