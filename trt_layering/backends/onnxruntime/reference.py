"""What the uncut model answers, by ONNX Runtime: the measure of every build.

It runs in a child process. May import the graph room, onnx-ir and onnxruntime; raises what they raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from trt_layering import child
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, as_array, reported, run_plainly, uncut_options
from trt_layering.compare import TOLERANCE, difference
from trt_layering.store.manifest import Block, Chain

if TYPE_CHECKING:
    import onnx_ir as ir

_WINDOWS = 64  # the part of the memory that a window may have; smaller than for preparing, where seams would last
_CLEARLY = 1e-3
"""As a part of the largest element: more than optimisation alone makes activations differ."""


def reference(model: Path, work: Path, *, optimise: bool, memory: int, inside: Sequence[str] = ()) -> list[child.Feeds]:
    """The outputs of `model` for each set of arrays in `work/trials.npz`, with ONNX Runtime's optimisation or without,
    and those of the activations `inside` that it has.

    A model whose weights fit `memory` bytes several times over, as the session needs them, is opened from its own file.
    A larger one runs in windows, one after the other: the same answer without optimisation, the same up to the order of
    sums with it, but cut by the code that also cuts the chain.
    """
    task = {"model": str(model.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "expected.npz")}
    child.call(_run, {**task, "optimise": optimise, "memory": memory, "inside": list(inside)})
    return child.load_arrays(work / "expected.npz")


def _run(task: Mapping[str, Any]) -> None:
    """In the child."""
    from trt_layering.backends.onnxruntime.windows import is_small
    from trt_layering.graph.model import open_model

    source = open_model(task["model"])
    trials = child.load_arrays(Path(task["trials"]))
    small = is_small(source, task["memory"]) and not task["inside"]
    answers = _from_its_file(task, trials) if small else _in_windows(task, source, trials)
    child.save_arrays(Path(task["outputs"]), answers)


def _from_its_file(task: Mapping[str, Any], trials: Sequence[child.Feeds]) -> list[child.Feeds]:
    with reported(f"the uncut model {task['model']}"):
        session = ort.InferenceSession(task["model"], uncut_options(task["optimise"]), providers=PROVIDERS)
        names = [output.name for output in session.get_outputs()]
        return [run_plainly(session, names, feeds) for feeds in trials]


def _in_windows(task: Mapping[str, Any], source: ir.Model, trials: Sequence[child.Feeds]) -> list[child.Feeds]:
    from trt_layering.backends.onnxruntime.session import open_session
    from trt_layering.backends.onnxruntime.windows import windows
    from trt_layering.graph.model import infer_shapes, normalise

    normalise(source)
    infer_shapes(source)
    inside = {value for node in source.graph for value in node.outputs if value.name in task["inside"]}
    source.graph.outputs.extend(sorted(inside.difference(source.graph.outputs), key=lambda value: value.name or ""))
    lives = [dict(feeds) for feeds in trials]
    for window in windows(source, max(1, task["memory"] // _WINDOWS)):
        session = open_session(window, uncut_options(task["optimise"]))
        names = [value.name or "" for value in window.graph.outputs]
        for live in lives:
            with reported(f"the uncut model {task['model']}"):
                needed = {value.name or "": live[value.name or ""] for value in window.graph.inputs}
                live.update(run_plainly(session, names, needed))
        del session
    return [{value.name or "": live[value.name or ""] for value in source.graph.outputs} for live in lives]


def suspect(model: Path, folder: Path, draft: Chain, work: Path, *, memory: int, tolerance: float) -> str:
    """Which block of the chain in `folder` is the first to answer otherwise than the uncut `model` does there, or than
    its own file opened plainly, in words; "" if none. `tolerance` is what the chain as a whole may differ by."""
    import msgspec

    seams = [value.name for block in draft.blocks for value in block.outputs]
    child.save_arrays(work / "inside.npz", reference(model, work, optimise=False, memory=memory, inside=seams)[:1])
    files = {"folder": str(folder.absolute()), "trials": str(work / "trials.npz"), "inside": str(work / "inside.npz")}
    task = {**files, "chain": msgspec.to_builtins(draft), "clearly": max(_CLEARLY, tolerance)}
    return str(child.call(_find_suspect, task))


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
        found.extend(f"{names}: {fault} the uncut model has there" for fault in _faults(wanted, got, task["clearly"]))
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
    return run_plainly(session, names, {value.name: as_array(live[value.name]) for value in block.inputs})


def _faults(wanted: child.Feeds, got: child.Feeds, tolerance: float) -> Iterator[str]:
    """What in `got` differs from `wanted` by more than `tolerance` of the largest element, in words."""
    for name, array in wanted.items():
        diff, scale = difference(array, got[name])
        if diff > tolerance * scale:
            yield f"{name!r} differs by {diff:.3g} from what"
