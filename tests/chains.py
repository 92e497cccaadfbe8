"""Small models and the chains built from them, fast enough for property tests, and what the uncut models answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_layering import assembly, building, child, profiling
from trt_layering.backends.onnxruntime import builder as onnxruntime_builder
from trt_layering.backends.onnxruntime import runtime as onnxruntime_runtime
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, uncut_options
from trt_layering.graph import cuts as cuts_module
from trt_layering.runtime.chain import Chain
from trt_layering.store.manifest import PAGE

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
WIDTH = 64
OPSET = [helper.make_opsetid("", 17)]


def layers(count: int = 4, *, width: int = WIDTH, batch: int | str = "n", seed: int = 0) -> onnx.ModelProto:
    """`count` times MatMul and Tanh, each with a weight of `width`² floats (16 KiB), from "x" to "y"."""
    rng = np.random.default_rng(seed)
    names = ["x", *(f"h{index}" for index in range(1, count)), "y"]
    nodes, weights = [], []
    for index in range(count):
        weight = rng.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [names[index], f"w{index}"], [f"m{index}"]))
        nodes.append(helper.make_node("Tanh", [f"m{index}"], [names[index + 1]]))
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, width])] for name in ("x", "y")]
    return model(nodes, *ends, weights)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    return helper.make_model(graph, opset_imports=OPSET, ir_version=8)


def saved(proto: onnx.ModelProto, path: Path) -> Path:
    onnx.save(proto, path)
    return path


def feed(rows: int = 3, seed: int = 0, width: int = WIDTH) -> Feeds:
    return {"x": np.random.default_rng(seed).standard_normal((rows, width), np.float32)}


def uncut(path: Path | onnx.ModelProto, feeds: Mapping[str, Any], *, optimised: bool = False) -> Feeds:
    """What ONNX Runtime answers to the model as a whole."""
    source = str(path) if isinstance(path, Path) else path.SerializeToString()
    session = ort.InferenceSession(source, uncut_options(optimised), providers=PROVIDERS)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def assert_same(wanted: Mapping[str, Array], got: Mapping[str, Array]) -> None:
    """Bit for bit, in the same order."""
    assert list(wanted) == list(got)
    for name, array in wanted.items():
        assert (array.dtype, array.shape) == (got[name].dtype, got[name].shape), name
        assert array.tobytes() == got[name].tobytes(), f"{name} differs by {np.abs(array - got[name]).max()}"


def assert_close(wanted: Mapping[str, Array], got: Mapping[str, Array], tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest output."""
    assert list(wanted) == list(got)
    for name, array in wanted.items():
        assert (array.dtype, array.shape) == (got[name].dtype, got[name].shape), name
        largest = float(np.abs(array.astype(np.float64)).max(initial=0.0))
        np.testing.assert_allclose(got[name], array, rtol=0, atol=tolerance * largest, err_msg=name)


def assert_valid_by_themselves(built: building.Built) -> None:
    """Every engine file is a model that the checker passes and plain ONNX Runtime opens."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for block in (*built.manifest.blocks, *built.manifest.whole):
        file = str(built.path / block.file)
        onnx.checker.check_model(file, full_check=True)
        session = ort.InferenceSession(file, options, providers=PROVIDERS)
        assert [value.name for value in session.get_inputs()] == [value.name for value in block.inputs]
        assert [value.name for value in session.get_outputs()] == [value.name for value in block.outputs]


@contextmanager
def in_this_process(*, streamed_from: int | None = None) -> Iterator[None]:
    """`build` without child processes, which take a second each to start, and measuring no longer than it must: what it
    measures of memory is then wrong, and what of times is coarse.

    `streamed_from`: bytes from which weights are streamed, so that weights of small models are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "call", lambda work, task: json.loads(json.dumps(work(json.loads(json.dumps(task))))))
        patch.setattr(onnxruntime_runtime, "share_thread_pool", lambda: None)
        patch.setattr(profiling, "build_seconds", lambda chain: 0.0)
        if streamed_from is not None:
            patch.setattr(onnxruntime_builder, "_STREAMED_FROM", streamed_from)
        yield


@contextmanager
def cut_by(choose: Callable[[list[int]], Sequence[int]]) -> Iterator[None]:
    """`build` cuts where `choose` says, which is given all legal positions."""

    def chosen(_graph: Any, cuts: Sequence[cuts_module.Cut], *_: Any) -> list[int]:
        return sorted(choose([cut.position for cut in cuts]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "choose_cuts", chosen)
        yield


def budgets(chain: building.Built) -> dict[str, int]:
    """By mode: the floor, an arena that holds two thirds of the weights, one that holds all, and what is resident."""
    from trt_layering.runtime.footprint import Footprint

    needs = Footprint.of(chain.manifest)
    middle = max(needs.largest_block, needs.weights * 2 // 3 // PAGE * PAGE)
    return {
        "floor": max(needs.floor, 1),  # chains measured in this process may seem to need nothing
        "middle": max(needs.fixed + middle, 1),
        "all in the arena": max(min(needs.fixed + needs.weights, needs.resident - 1), needs.floor, 1),
        "resident": max(needs.resident, 1),
    }


def opened(built: building.Built, budget: int | None = None, **options: Any) -> Chain:
    """The chain that was built, whichever version it is."""
    from trt_layering.runtime.chain import open_chain

    path = built.path
    return open_chain(path.parent.name, repository=path.parent.parent, version=int(path.name), budget=budget, **options)
