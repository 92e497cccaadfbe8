"""The first run of a chain that is about to be published: its answers, its memory, its times.

It runs in a child process, whose memory is the chain's alone. May import the runtime. Raises what the run raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trt_layering import child
from trt_layering.errors import BackendError
from trt_layering.store.manifest import Block, Chain, Memory

log = logging.getLogger("trt_layering")

_RUNS = 3
_ENOUGH_SECONDS = 1.0


def rehearse(folder: Path, draft: Chain, work: Path) -> tuple[Chain, list[child.Feeds]]:
    """Run the chain in `folder`, which has no manifest yet, at its floor on each set of arrays in `work/trials.npz`.

    Returns `draft` with measured memory and times, and the outputs. Where activations do not have the shapes that the
    model declares, these are forgotten, which the log says, and the activations are allocated as they come.
    """
    task = {"folder": str(folder.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "outputs.npz")}
    try:
        measured = child.call(_run, {**task, "chain": msgspec.to_builtins(draft)})
    except BackendError as error:
        draft = _without_shapes(draft)
        measured = child.call(_run, {**task, "chain": msgspec.to_builtins(draft)})
        log.warning("activations are allocated as they come, since the model's shapes do not hold: %s", error.what)
    memory = msgspec.convert(measured["memory"], Memory)
    times = measured["times"]
    single = times["execute_seconds"]
    joined = (sum(single[part.first : part.first + part.count]) for part in draft.joined)
    seconds = (*single, *joined)
    profile = msgspec.structs.replace(draft.profile, execute_seconds=seconds, read_rate=times["read_rate"])
    return msgspec.structs.replace(draft, memory=memory, profile=profile), child.load_arrays(work / "outputs.npz")


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

    return msgspec.structs.replace(
        draft, blocks=tuple(map(forget, draft.blocks)), whole=tuple(map(forget, draft.whole))
    )


def _run(task: Mapping[str, Any]) -> dict[str, Any]:
    """In the child."""
    from trt_layering.backends.onnxruntime.runtime import share_thread_pool
    from trt_layering.runtime import meter
    from trt_layering.runtime.chain import Chain as OpenChain
    from trt_layering.runtime.footprint import Footprint
    from trt_layering.runtime.loader import LoaderOptions

    share_thread_pool()
    draft = msgspec.structs.replace(
        msgspec.convert(task["chain"], Chain), whole=(), joined=()
    )  # its blocks are what is looked at
    base = meter.current_rss_bytes()
    trials = child.load_arrays(Path(task["trials"]))
    needs = Footprint.of(draft)
    seconds = [float("inf")] * len(draft.blocks)
    alive = 0

    def observe(index: int, took: float, live: Mapping[str, Any]) -> None:
        nonlocal alive
        alive = max(alive, sum(tensor_bytes(tensor) for tensor in live.values()))
        seconds[index] = min(seconds[index], took)

    chain = OpenChain(
        Path(task["folder"]), draft, budget=max(needs.floor, 1), loader=LoaderOptions(), mode="sequential"
    )
    try:
        engines = max(0, meter.current_rss_bytes() - base - needs.engines)
        meter.reset_peak()
        chain.start()
        outputs = [_repeat(partial(chain.observe, feeds, observe)) for feeds in reversed(trials)][::-1]
        held = sum(array.nbytes for array in outputs[-1].values())  # by a caller, while the next sweep runs
        total = max(0, meter.peak_rss_bytes() + held - base - needs.engines - chain.stats()["arena_bytes"])
        stats = chain.stats()
    finally:
        chain.close()
    child.save_arrays(Path(task["outputs"]), outputs)
    alive = min(alive, max(0, total - engines))
    memory = Memory(
        activations=alive,
        scratch=max(0, total - engines - alive),
        engines=engines,
        shapes={name: array.shape for name, array in trials[-1].items()},
    )
    rate = stats["bytes_read"] / stats["read_seconds"] if stats["read_seconds"] else 1e9
    return {"memory": msgspec.to_builtins(memory), "times": {"execute_seconds": seconds, "read_rate": rate}}


def _repeat(run: Callable[[], child.Feeds]) -> child.Feeds:
    """The outputs of `run`, which is done up to three times as long as they take less than a second."""
    begin = time.perf_counter()
    for _ in range(_RUNS):
        outputs = run()
        if time.perf_counter() - begin > _ENOUGH_SECONDS:
            break
    return outputs


def tensor_bytes(tensor: Any) -> int:
    """Bytes of a backend's tensor; 0 for text, which has no fixed size."""
    if isinstance(tensor, np.ndarray) or tensor.data_type() == "tensor(string)":
        return 0
    return int(tensor.tensor_size_in_bytes())
