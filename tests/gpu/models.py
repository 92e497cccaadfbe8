"""Models that checks are made with: seeded, small, one of convolutions and one of equal layers as transformers have.

Imports numpy, onnx and `tests.real_models`, which finds a real model where its wheel is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.gpu.report import LeftOut

Array = np.ndarray[Any, Any]
REAL = "pp_cls"


@dataclass(frozen=True)
class Model:
    """A model's file, its feeds, and the size of blocks that cuts it into a few."""

    path: Path
    feeds: dict[str, Array]
    block_size: int


@dataclass(frozen=True)
class Sizes:
    """Of the convolutions `channels`, `side` of the picture, their number; of the layers `width`, `length` of the
    sequence, their number; and sizes of blocks for both, and for the real model."""

    channels: int
    side: int
    convolutions: int
    width: int
    length: int
    layers: int
    conv_block: int
    layer_block: int
    real_block: int


FULL = Sizes(256, 28, 8, 512, 128, 4, 5 << 20, 13 << 20, 128 << 10)
SMALL = Sizes(16, 6, 3, 32, 4, 2, 16 << 10, 52 << 10, 256 << 10)


@dataclass
class _Graph:
    """Nodes and weights as they come; `seed` makes the weights."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def weight(self, shape: Sequence[int], scale: float | None = None) -> str:
        """Of a size that keeps values about 1."""
        fan = int(np.prod(shape[1:] if len(shape) == 4 else shape[:1]))
        array = self.rng.standard_normal(shape, np.float32) * np.float32(fan**-0.5 if scale is None else scale)
        return self.constant(array)

    def constant(self, array: Array) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return str(self.weights[-1].name)

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        made = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [made], name=f"{kind}_{len(self.nodes)}", **attributes))
        return made

    def save(self, path: Path, end: str, given: Sequence[int], made: Sequence[int]) -> Path:
        self.nodes.append(helper.make_node("Identity", [end], ["y"], name="end"))
        ends = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
            for name, shape in (("x", given), ("y", made))
        ]
        graph = helper.make_graph(self.nodes, "g", *ends, self.weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        return path


def convolutions(folder: Path, sizes: Sizes) -> Model:
    """Convolutions with a residual each, their average, and a matrix at the end."""
    graph, channels = _Graph(), sizes.channels
    value = graph.add("Conv", "x", graph.weight((channels, 3, 3, 3)), pads=[1] * 4)
    for _ in range(sizes.convolutions):
        weights = graph.weight((channels, channels, 3, 3), 0.5 * (9 * channels) ** -0.5), graph.weight((channels,), 0.1)
        value = graph.add("Add", value, graph.add("Relu", graph.add("Conv", value, *weights, pads=[1] * 4)))
    value = graph.add("Flatten", graph.add("GlobalAveragePool", value))
    value = graph.add("Gemm", value, graph.weight((channels, 10)), graph.weight((10,)))
    shape = (1, 3, sizes.side, sizes.side)
    path = graph.save(folder / "convolutions.onnx", value, shape, (1, 10))
    return Model(path, {"x": np.random.default_rng(1).standard_normal(shape, np.float32)}, sizes.conv_block)


def layers(folder: Path, sizes: Sizes) -> Model:
    """Equal layers of attention and of two matrices, each with its own weights."""
    graph, value = _Graph(), "x"
    for _ in range(sizes.layers):
        value = graph.add("Add", value, _attention(graph, _normalised(graph, value, sizes.width), sizes.width))
        inner = graph.add(
            "MatMul", _normalised(graph, value, sizes.width), graph.weight((sizes.width, 4 * sizes.width))
        )
        inner = graph.add("Mul", inner, graph.add("Sigmoid", inner))
        value = graph.add("Add", value, graph.add("MatMul", inner, graph.weight((4 * sizes.width, sizes.width))))
    shape = (1, sizes.length, sizes.width)
    path = graph.save(folder / "layers.onnx", value, shape, shape)
    return Model(path, {"x": np.random.default_rng(2).standard_normal(shape, np.float32)}, sizes.layer_block)


def _normalised(graph: _Graph, value: str, width: int) -> str:
    scale, bias = graph.constant(np.ones(width, np.float32)), graph.constant(np.zeros(width, np.float32))
    return graph.add("LayerNormalization", value, scale, bias, axis=-1)


def _attention(graph: _Graph, value: str, width: int) -> str:
    query, key, content = (graph.add("MatMul", value, graph.weight((width, width))) for _ in range(3))
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 2, 1]))
    scores = graph.add("Mul", scores, graph.constant(np.asarray(width**-0.5, np.float32)))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), content)
    return graph.add("MatMul", mixed, graph.weight((width, width)))


def real(_folder: Path, sizes: Sizes) -> Model:
    """A real model. Raises LeftOut where its wheel is not installed."""
    try:
        path = real_models.locate(REAL)
    except ModuleNotFoundError as error:  # PackageNotFoundError is one
        raise LeftOut(f"the wheel of {REAL} is not installed") from error
    return Model(path, real_models.feeds(REAL), sizes.real_block)


MODELS: dict[str, Callable[[Path, Sizes], Model]] = {"convolutions": convolutions, "layers": layers, "real": real}
