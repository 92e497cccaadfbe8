"""What the uncut model answers, by ONNX Runtime: the measure of every build.

It runs in a child process. May import the graph room, onnx-ir and onnxruntime; raises what they raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from trt_layering import child
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, as_array, reported, uncut_options
from trt_layering.compare import TOLERANCE, difference
from trt_layering.store.manifest import Block, Chain

_CLEARLY = 1e-3
"""As a part of the largest element: more than optimisation alone makes activations differ."""


def reference(model: Path, work: Path, *, optimise: bool, memory: int, inside: Sequence[str] = ()) -> list[child.Feeds]:
    """The outputs of `model` for each set of arrays in `work/trials.npz`, with ONNX Runtime's optimisation or without,
    and those of the activations `inside` that it has.

    A model whose weights fit `memory` bytes runs as it is; a larger one in windows, one after the other, which gives
    the same answer without optimisation and the same up to the order of sums with it.
    """
    task = {"model": str(model.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "expected.npz")}
    child.call(_run, {**task, "optimise": optimise, "memory": memory, "inside": list(inside)})
    return child.load_arrays(work / "expected.npz")


def _run(task: Mapping[str, Any]) -> None:
    """In the child."""
    from trt_layering.backends.onnxruntime.builder import windows
    from trt_layering.backends.onnxruntime.session import open_session
    from trt_layering.graph.model import infer_shapes, normalise, open_model

    source = open_model(task["model"])
    normalise(source)
    infer_shapes(source)
    inside = {value for node in source.graph for value in node.outputs if value.name in task["inside"]}
    source.graph.outputs.extend(sorted(inside.difference(source.graph.outputs), key=lambda value: value.name or ""))
    outputs = [value.name or "" for value in source.graph.outputs]
    lives = child.load_arrays(Path(task["trials"]))
    for window in windows(source, task["memory"]):
        session = open_session(window, optimise=task["optimise"])
        names = [value.name or "" for value in window.graph.outputs]
        for live in lives:
            needed = {value.name or "": live[value.name or ""] for value in window.graph.inputs}
            with reported(f"the uncut model {task['model']}"):
                live.update(zip(names, session.run(names, needed), strict=True))
        del session
    child.save_arrays(Path(task["outputs"]), [{name: live[name] for name in outputs} for live in lives])


def suspect(model: Path, folder: Path, draft: Chain, work: Path, *, memory: int) -> str:
    """Which block of the chain in `folder` is the first to answer otherwise than the uncut `model` does there, or than
    its own file opened plainly, in words; "" if none."""
    import msgspec

    seams = [value.name for block in draft.blocks for value in block.outputs]
    child.save_arrays(work / "inside.npz", reference(model, work, optimise=False, memory=memory, inside=seams)[:1])
    files = {"folder": str(folder.absolute()), "trials": str(work / "trials.npz"), "inside": str(work / "inside.npz")}
    return str(child.call(_find_suspect, {**files, "chain": msgspec.to_builtins(draft)}))


def _find_suspect(task: Mapping[str, Any]) -> str:
    """In the child."""
    import msgspec

    from trt_layering.runtime.chain import Chain as OpenChain
    from trt_layering.runtime.footprint import Footprint
    from trt_layering.runtime.loader import LoaderOptions

    draft = msgspec.structs.replace(msgspec.convert(task["chain"], Chain), whole=())  # its blocks are what is looked at
    uncut = child.load_arrays(Path(task["inside"]))[0]
    found: list[str] = []
    since = 0  # the first block after the last one whose answer was there to compare

    def observe(index: int, _: float, live: Mapping[str, Any]) -> None:
        nonlocal since
        block = draft.blocks[index]
        got = {value.name: as_array(live[value.name]) for value in block.outputs}
        wanted = {name: array for name, array in uncut.items() if name in got and array.shape == got[name].shape}
        names = " to ".join(dict.fromkeys([draft.blocks[since].name, block.name]))
        found.extend(f"{names}: {fault} the uncut model has there" for fault in _faults(wanted, got, _CLEARLY))
        plain = _opened_plainly(Path(task["folder"]) / block.file, block, live)
        found.extend(f"{block.name}: {fault} its file gives opened plainly" for fault in _faults(plain, got, TOLERANCE))
        since = index + 1 if wanted else since

    chain = OpenChain(Path(task["folder"]), draft, budget=max(Footprint.of(draft).floor, 1), loader=LoaderOptions())
    try:
        chain.start()
        chain.observe(child.load_arrays(Path(task["trials"]))[0], observe)
    finally:
        chain.close()
    return found[0] if found else ""


def _opened_plainly(file: Path, block: Block, live: Mapping[str, Any]) -> child.Feeds:
    session = ort.InferenceSession(str(file), uncut_options(optimised=False), providers=PROVIDERS)
    names = [value.name for value in block.outputs]
    results = session.run(names, {value.name: as_array(live[value.name]) for value in block.inputs})
    return dict(zip(names, results, strict=True))


def _faults(wanted: child.Feeds, got: child.Feeds, tolerance: float) -> Iterator[str]:
    """What in `got` differs from `wanted` by more than `tolerance` of the largest element, in words."""
    for name, array in wanted.items():
        diff, scale = difference(array, got[name])
        if diff > tolerance * scale:
            yield f"{name!r} differs by {diff:.3g} from what"
