"""The bench's models: the same bytes every time, valid, of known size, and nothing half-made is taken for finished."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
models: Any = pytest.importorskip("models")


class _Counter:
    """Stands in for the weights file: counts bytes and keeps none."""

    def __init__(self) -> None:
        self.position = 0

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        self.position = position

    def truncate(self, size: int) -> None:
        pass

    def write(self, data: memoryview) -> None:
        self.position += data.nbytes


@pytest.fixture
def cheap_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the right size without the time it takes to draw them."""

    def weight(draft: Any, name: str, shape: tuple[int, ...], _low: float, _high: float) -> str:
        offset = draft._begin(name, shape)
        draft._data.seek(offset + 4 * math.prod(shape))
        return name

    monkeypatch.setattr(models.Draft, "weight", weight)


@pytest.mark.usefixtures("cheap_weights")
@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # of the published networks, without the three numbers per channel that folding BatchNormalization removes
        ("resnet152", 60_192_808 - 75_712),
        ("vgg19", 143_667_240),
        ("encoder", 24 * 12_596_224),
        ("densenet201", 20_013_928),
        ("yolov4", 64_400_000),
        ("sparse", 144 * 2048 * 2048),
    ],
)
def test_topologies_are_valid_and_of_the_published_size(name: str, parameters: int) -> None:
    draft = models.Draft(name, _Counter(), "data")
    models.DRAWINGS[name](draft)
    model = draft.model()
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    count = sum(
        math.prod(tensor.dims)
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    )
    assert count == pytest.approx(parameters, rel=0.01)
    known = {value.name for value in inferred.graph.value_info} | {value.name for value in inferred.graph.output}
    assert {result for node in model.graph.node for result in node.output} <= known


def test_a_model_is_made_of_the_same_bytes_every_time(tmp_path: Path) -> None:
    first, second = models.make("tiny", tmp_path / "a"), models.make("tiny", tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    data = [path.with_name("tiny.onnx.data").read_bytes() for path in (first, second)]
    assert data[0] == data[1]
    assert sorted(path.name for path in first.parent.iterdir()) == ["tiny.onnx", "tiny.onnx.data"]


def test_weights_differ_between_tensors_and_outputs_are_of_order_one(tmp_path: Path) -> None:
    path = models.make("tiny", tmp_path)
    model = onnx.load(path)
    blobs = [onnx.numpy_helper.to_array(tensor).tobytes() for tensor in model.graph.initializer]
    assert len(set(blobs)) == len(blobs)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((2, 3, 32, 32), dtype=np.float32)
    (output,) = session.run(None, {"input": x})
    assert output.shape == (2, 10)
    assert 0.1 < np.abs(output).max() < 10
    assert not np.array_equal(output[0], output[1])


def test_a_finished_model_is_kept_and_an_interrupted_one_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.make("tiny", tmp_path)
    content = path.read_bytes()

    def refuse(_draft: Any) -> None:
        raise InterruptedError

    monkeypatch.setitem(models.DRAWINGS, "tiny", refuse)
    assert models.make("tiny", tmp_path) == path
    path.unlink()
    with pytest.raises(InterruptedError):
        models.make("tiny", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.onnx.data"]
    monkeypatch.undo()
    models.make("tiny", tmp_path)
    assert path.read_bytes() == content


def test_a_sparse_weight_takes_its_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with open(path, "wb") as stream:
        draft = models.Draft("sparse", stream, "data")
        draft.sparse_weight("w", (2048, 2048), 1.0, 2)
    assert path.stat().st_size == 4 * 2048 * 2048
    values = np.fromfile(path, np.float32).reshape(2048, 2048)
    assert values[:2].all()
    assert not values[2:].any()
