"""Runs models and chains of blocks plainly, with ONNX Runtime's optimisation off, so that results are exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import parser

from trt_layering.graph.blocks import Cutter

Array = np.ndarray[Any, Any]


def from_proto(source: onnx.ModelProto | str) -> ir.Model:
    """A model from a message, which it does not share, or from ONNX's text form."""
    proto = onnx.ModelProto()
    proto.CopyFrom(parser.parse_model(source) if isinstance(source, str) else source)
    return ir.from_proto(proto)


def session(model: Path | ir.Model | onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if isinstance(model, ir.Model):
        model = ir.to_proto(model)
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: Path | ir.Model | onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name; `feeds` may hold more than the model's inputs."""
    opened = session(model)
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, {i.name: feeds[i.name] for i in opened.get_inputs()}), strict=True))


def cut(model: ir.Model, positions: Sequence[int]) -> list[ir.Model]:
    cutter = Cutter(model)
    bounds = [0, *positions, len(model.graph)]
    return [cutter.extract(start, stop) for start, stop in pairwise(bounds)]


def run_chain(blocks: Sequence[ir.Model], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All values that the blocks pass on or put out; each block gets only what its inputs name."""
    live = dict(feeds)
    for block in blocks:
        live.update(run(block, live))
    return live


def check(blocks: Sequence[ir.Model]) -> Sequence[ir.Model]:
    """The same blocks; raises where ONNX's own checker finds something. It knows ONNX's operators only."""
    for block in blocks:
        onnx.checker.check_model(ir.to_proto(block))
    return blocks


def assert_same(expected: Mapping[str, Array], got: Mapping[str, Array]) -> None:
    """Bit for bit."""
    for name, array in expected.items():
        assert array.dtype == got[name].dtype
        assert array.shape == got[name].shape
        assert array.tobytes() == got[name].tobytes(), f"{name} differs"
