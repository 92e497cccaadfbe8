"""What ONNX Runtime has optimised, in its own operators and with weights of its own making, is cut like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from onnx import ModelProto

from tests import real_models
from tests.graph import strategies
from tests.graph.execution import Array, assert_same, cut, run, run_chain, session
from trt_layering.graph.cuts import find_cuts
from trt_layering.graph.model import open_model


def prepared(source: str | bytes, folder: Path) -> Path:
    """The model as ONNX Runtime optimises it for this machine, its weights beside it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "prepared.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "prepared.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "64")
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return folder / "prepared.onnx"


def typed(model: ir.Model, feeds: Mapping[str, Array]) -> ir.Model:
    """`model` with the types of what it makes when it runs, since no inference knows these operators."""
    proto = ir.to_proto(model)
    known = {output.name for output in proto.graph.output}
    for node in model.graph:
        for value in node.outputs:
            if value.name and value.name not in known:
                proto.graph.output.add(name=value.name)
    kinds = {found.name: found.type for found in session(proto).get_outputs()}
    tensors = {name for name, kind in kinds.items() if kind.startswith("tensor")}
    del proto.graph.output[:]
    proto.graph.output.extend(ir.to_proto(model).graph.output)
    for name in sorted(tensors - known):
        proto.graph.output.add(name=name)
    made = run(proto, feeds)
    for value in (output for node in model.graph for output in node.outputs if output.name in made):
        array = made[value.name or ""]
        value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape([None] * array.ndim)
    return model


@settings(max_examples=30)
@given(proto=strategies.models())
def test_generated_models(proto: ModelProto, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = prepared(proto.SerializeToString(), tmp_path_factory.getbasetemp())
    model = typed(open_model(path), strategies.feeds())
    blocks = cut(model, [seam.position for seam in find_cuts(model.graph)])
    assert_same(run(path, strategies.feeds()), run_chain(blocks, strategies.feeds()))


@pytest.mark.parametrize("name", ["common_det", "pp_rec", "minilm", "common_old"])
def test_real_models(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    feeds = real_models.feeds(name)
    path = prepared(str(real_model(name)), tmp_path)
    model = typed(open_model(path), feeds)
    assert {"com.microsoft", "com.microsoft.nchwc"}.intersection(node.domain for node in model.graph)
    legal = [seam.position for seam in find_cuts(model.graph)]
    assert len(legal) > len(model.graph) * 0.9
    positions = legal[len(legal) // 12 :: len(legal) // 6]
    assert_same(run(path, feeds), run_chain(cut(model, positions), feeds))
