"""What the uncut model answers, by ONNX Runtime: the measure of every build.

It runs in a child process. May import the graph room, onnx-ir and onnxruntime; raises what they raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort

from trt_layering import child
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, reported, uncut_options
from trt_layering.store.manifest import Chain


def reference(model: Path, work: Path, *, optimise: bool, memory: int) -> list[child.Feeds]:
    """The outputs of `model` for each set of arrays in `work/trials.npz`, with ONNX Runtime's optimisation or without.

    A model whose weights fit `memory` bytes runs as it is; a larger one in windows, one after the other, which gives
    the same answer without optimisation and the same up to the order of sums with it.
    """
    task = {"model": str(model.absolute()), "trials": str(work / "trials.npz"), "outputs": str(work / "expected.npz")}
    child.call(_run, {**task, "optimise": optimise, "memory": memory})
    return child.load_arrays(work / "expected.npz")


def _run(task: Mapping[str, Any]) -> None:
    """In the child."""
    from trt_layering.backends.onnxruntime.builder import windows
    from trt_layering.backends.onnxruntime.session import open_session
    from trt_layering.graph.model import infer_shapes, normalise, open_model

    source = open_model(task["model"])
    normalise(source)
    infer_shapes(source)
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


def suspect(folder: Path, draft: Chain, work: Path) -> str:
    """Which block of the chain in `folder` answers otherwise than its own file opened plainly, in words; "" if none."""
    import msgspec

    task = {"folder": str(folder.absolute()), "chain": msgspec.to_builtins(draft), "trials": str(work / "trials.npz")}
    return str(child.call(_find_suspect, task))


def _find_suspect(task: Mapping[str, Any]) -> str:
    """In the child."""
    import msgspec

    from trt_layering.compare import TOLERANCE, difference
    from trt_layering.runtime.chain import Chain as OpenChain
    from trt_layering.runtime.footprint import Footprint
    from trt_layering.runtime.loader import LoaderOptions

    draft = msgspec.structs.replace(msgspec.convert(task["chain"], Chain), whole=())  # its blocks are what is looked at
    found: list[str] = []

    def observe(index: int, _: float, live: Mapping[str, Any]) -> None:
        block = draft.blocks[index]
        file = Path(task["folder"]) / block.file
        session = ort.InferenceSession(str(file), uncut_options(optimised=False), providers=PROVIDERS)
        names = [value.name for value in block.outputs]
        results = session.run_with_ort_values(names, {value.name: live[value.name] for value in block.inputs})
        for name, result in zip(names, results, strict=True):
            diff, scale = difference(result.numpy(), live[name].numpy())
            if diff > TOLERANCE * scale:
                found.append(
                    f"{block.name}: its {name!r} differs by {diff:.3g} from what its file gives opened plainly"
                )

    chain = OpenChain(Path(task["folder"]), draft, budget=max(Footprint.of(draft).floor, 1), loader=LoaderOptions())
    try:
        chain.start()
        chain.observe(child.load_arrays(Path(task["trials"]))[0], observe)
    finally:
        chain.close()
    return found[0] if found else ""
