"""Makes the bench's ONNX models: known topologies with seeded random weights, the same bytes every time.

    python scripts/bench/models.py resnet152 encoder [--out .bench]

Imports only numpy and onnx, downloads nothing, and holds no more than a few MiB of weights at a time: weights are
written straight to external data beside the model. A model that is already there is kept; an interrupted run leaves
nothing that looks finished, since the .onnx file is put in place last.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
PAGE = 4096
CHUNK = 1 << 20  # elements of weights generated at a time
RECIPE = "1"  # raise when a topology or its weights change: older files are then made anew
DEFAULT_FOLDER = Path(".bench")

Shape = tuple[int | str, ...]


class Draft:
    """A graph in the making; its weights go to `data` as soon as they are named. Values are passed by name."""

    def __init__(self, name: str, data: BinaryIO, location: str) -> None:
        self.name = name
        self._data = data
        self._location = location
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Shape) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return name

    def output(self, value: str, name: str, shape: Shape) -> None:
        """Renames `value`, the result of the latest node that made it, to the graph output `name`."""
        for node in self._nodes:
            for results in (node.input, node.output):
                results[:] = [name if result == value else result for result in results]
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def node(self, op: str, *inputs: str, scope: str, **attributes: Any) -> str:
        """Adds a node under `scope` and returns its result's name, both in the style of a torch export."""
        node_name = f"/{scope}/{op}"
        result = f"{node_name}_output_0"
        self._nodes.append(helper.make_node(op, inputs, [result], name=node_name, **attributes))
        return result

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> str:
        """A small initializer that stays inside the model file: shapes, sizes, scalars."""
        self._initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, shape: Sequence[int], low: float, high: float) -> str:
        """An external initializer, uniform in [low, high); the same values for the same model and name."""
        offset = self._begin(name, shape)
        generator = np.random.Generator(np.random.PCG64(list(f"{self.name}:{name}".encode())))
        elements = math.prod(shape)
        for start in range(0, elements, CHUNK):
            chunk = generator.random(min(CHUNK, elements - start), dtype=np.float32)
            chunk *= np.float32(high - low)
            chunk += np.float32(low)
            self._data.write(chunk.astype("<f4", copy=False).data)
        assert self._data.tell() == offset + 4 * elements
        return name

    def sparse_weight(self, name: str, shape: tuple[int, int], bound: float, rows: int) -> str:
        """An external initializer of which only the first `rows` rows are written; the rest is a hole in the file."""
        offset = self._begin(name, shape)
        generator = np.random.Generator(np.random.PCG64(list(f"{self.name}:{name}".encode())))
        values = generator.random((rows, shape[1]), dtype=np.float32) * np.float32(2 * bound) - np.float32(bound)
        self._data.write(values.astype("<f4", copy=False).data)
        end = offset + 4 * math.prod(shape)
        self._data.truncate(end)
        self._data.seek(end)
        return name

    def _begin(self, name: str, shape: Sequence[int]) -> int:
        offset = -(-self._data.tell() // PAGE) * PAGE
        self._data.truncate(offset)
        self._data.seek(offset)
        tensor = TensorProto(
            name=name, data_type=TensorProto.FLOAT, dims=list(shape), data_location=TensorProto.EXTERNAL
        )
        entries = {"location": self._location, "offset": offset, "length": 4 * math.prod(shape)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        self._initializers.append(tensor)
        return offset

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._initializers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="scripts/bench/models.py",
            producer_version=RECIPE,
        )
        return model

    # Layers. Scales follow He et al., so that values neither vanish nor explode over the depth.

    def conv(
        self, x: str, scope: str, channels: tuple[int, int], kernel: int, stride: int = 1, gain: float = 2.0
    ) -> str:
        """A convolution as exported with its BatchNormalization folded into weight and bias."""
        fan_in = channels[0] * kernel * kernel
        bound = math.sqrt(3.0 * gain / fan_in)
        weight = self.weight(f"{scope}.weight", (channels[1], channels[0], kernel, kernel), -bound, bound)
        bias = self.weight(f"{scope}.bias", (channels[1],), -0.1, 0.1)
        return self.node(
            "Conv", x, weight, bias, scope=scope.replace(".", "/"), dilations=[1, 1], group=1,
            kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, strides=[stride] * 2,
        )  # fmt: skip

    def relu(self, x: str, scope: str) -> str:
        return self.node("Relu", x, scope=scope.replace(".", "/"))

    def gemm(self, x: str, scope: str, features: tuple[int, int], gain: float = 1.0) -> str:
        bound = math.sqrt(3.0 * gain / features[0])
        weight = self.weight(f"{scope}.weight", (features[1], features[0]), -bound, bound)
        bias = self.weight(f"{scope}.bias", (features[1],), -0.1, 0.1)
        return self.node("Gemm", x, weight, bias, scope=scope.replace(".", "/"), alpha=1.0, beta=1.0, transB=1)

    def max_pool(self, x: str, scope: str, kernel: int, stride: int, pad: int) -> str:
        return self.node(
            "MaxPool", x, scope=scope, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, ceil_mode=0
        )

    def batch_norm(self, x: str, scope: str, channels: int) -> str:
        """A BatchNormalization that has no convolution before it and so stays in an export."""
        parts = [
            self.weight(f"{scope}.weight", (channels,), 0.8, 1.2),
            self.weight(f"{scope}.bias", (channels,), -0.1, 0.1),
            self.weight(f"{scope}.running_mean", (channels,), -0.1, 0.1),
            self.weight(f"{scope}.running_var", (channels,), 0.8, 1.2),
        ]
        return self.node("BatchNormalization", x, *parts, scope=scope.replace(".", "/"), epsilon=1e-5, momentum=0.9)


def draw_resnet152(draft: Draft) -> None:
    """torchvision's resnet152: bottlenecks of 3, 8, 36 and 3, stride on the 3x3 convolution."""
    depths = (3, 8, 36, 3)
    x = draft.input("input", ("N", 3, 224, 224))
    x = draft.relu(draft.conv(x, "conv1", (3, 64), 7, 2), "relu")
    x = draft.max_pool(x, "maxpool", 3, 2, 1)
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            stride = 2 if stage and not index else 1
            x = _bottleneck(draft, x, f"layer{stage + 1}.{index}", channels, width, stride, 2.0 / sum(depths))
            channels = 4 * width
    x = draft.node("GlobalAveragePool", x, scope="avgpool")
    x = draft.node("Flatten", x, scope="flatten", axis=1)
    draft.output(draft.gemm(x, "fc", (2048, 1000)), "output", ("N", 1000))


def _bottleneck(draft: Draft, x: str, scope: str, channels: int, width: int, stride: int, gain: float) -> str:
    y = draft.relu(draft.conv(x, f"{scope}.conv1", (channels, width), 1), f"{scope}.relu")
    y = draft.relu(draft.conv(y, f"{scope}.conv2", (width, width), 3, stride), f"{scope}.relu_1")
    y = draft.conv(y, f"{scope}.conv3", (width, 4 * width), 1, gain=gain)
    if channels != 4 * width or stride != 1:
        x = draft.conv(x, f"{scope}.downsample.0", (channels, 4 * width), 1, stride, gain=1.0)
    return draft.relu(draft.node("Add", y, x, scope=scope.replace(".", "/")), f"{scope}.relu_2")


def draw_vgg19(draft: Draft) -> None:
    """torchvision's vgg19 without BatchNormalization; its first Gemm holds 72 % of the bytes."""
    x = draft.input("input", ("N", 3, 224, 224))
    channels, position = 3, 0
    for depth, width in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(depth):
            x = draft.conv(x, f"features.{position}", (channels, width), 3)
            x = draft.relu(x, f"features.{position + 1}")
            channels, position = width, position + 2
        x = draft.max_pool(x, f"features/{position}", 2, 2, 0)
        position += 1
    x = draft.node("Flatten", x, scope="flatten", axis=1)
    x = draft.relu(draft.gemm(x, "classifier.0", (25088, 4096), 2.0), "classifier.1")
    x = draft.relu(draft.gemm(x, "classifier.3", (4096, 4096), 2.0), "classifier.4")
    draft.output(draft.gemm(x, "classifier.6", (4096, 1000)), "output", ("N", 1000))


HIDDEN, FEED_FORWARD, HEADS, LAYERS = 1024, 4096, 16, 24


def draw_encoder(draft: Draft) -> None:
    """A BERT-large encoder over embedded tokens: 24 layers of attention and feed-forward, normalised after each."""
    shape: Shape = (1, "length", HIDDEN)
    x = draft.input("embeddings", shape)
    draft.constant("split_heads", np.array([0, 0, HEADS, HIDDEN // HEADS], np.int64))
    draft.constant("join_heads", np.array([0, 0, HIDDEN], np.int64))
    for name, value in (
        ("head_scale", math.sqrt(HIDDEN // HEADS)),
        ("sqrt_two", math.sqrt(2)),
        ("one", 1),
        ("half", 0.5),
    ):
        draft.constant(name, np.array(value, np.float32))
    for index in range(LAYERS):
        scope = f"encoder/layer.{index}"
        y = _attention(draft, x, f"{scope}/attention")
        x = _layer_norm(draft, draft.node("Add", y, x, scope=f"{scope}/attention/residual"), f"{scope}/attention/norm")
        y = _feed_forward(draft, x, f"{scope}/feed_forward")
        x = _layer_norm(draft, draft.node("Add", y, x, scope=f"{scope}/feed_forward/residual"), f"{scope}/norm")
    draft.output(x, "hidden", shape)


def _linear(draft: Draft, x: str, scope: str, features: tuple[int, int]) -> str:
    bound = math.sqrt(3.0 / features[0])
    x = draft.node("MatMul", x, draft.weight(f"{scope}/weight", features, -bound, bound), scope=scope)
    return draft.node("Add", draft.weight(f"{scope}/bias", features[1:], -0.1, 0.1), x, scope=scope)


def _attention(draft: Draft, x: str, scope: str) -> str:
    heads = {}
    for part, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3])):
        y = _linear(draft, x, f"{scope}/{part}", (HIDDEN, HIDDEN))
        y = draft.node("Reshape", y, "split_heads", scope=f"{scope}/{part}")
        heads[part] = draft.node("Transpose", y, scope=f"{scope}/{part}", perm=order)
    scores = draft.node("MatMul", heads["query"], heads["key"], scope=f"{scope}/scores")
    scores = draft.node("Div", scores, "head_scale", scope=f"{scope}/scores")
    scores = draft.node("Softmax", scores, scope=f"{scope}/scores", axis=-1)
    mixed = draft.node("MatMul", scores, heads["value"], scope=f"{scope}/context")
    mixed = draft.node("Transpose", mixed, scope=f"{scope}/context", perm=[0, 2, 1, 3])
    mixed = draft.node("Reshape", mixed, "join_heads", scope=f"{scope}/context")
    return _linear(draft, mixed, f"{scope}/output", (HIDDEN, HIDDEN))


def _feed_forward(draft: Draft, x: str, scope: str) -> str:
    x = _linear(draft, x, f"{scope}/intermediate", (HIDDEN, FEED_FORWARD))
    y = draft.node("Div", x, "sqrt_two", scope=f"{scope}/gelu")
    y = draft.node("Erf", y, scope=f"{scope}/gelu")
    y = draft.node("Add", y, "one", scope=f"{scope}/gelu")
    y = draft.node("Mul", x, y, scope=f"{scope}/gelu")
    y = draft.node("Mul", y, "half", scope=f"{scope}/gelu/half")
    return _linear(draft, y, f"{scope}/output", (FEED_FORWARD, HIDDEN))


def _layer_norm(draft: Draft, x: str, scope: str) -> str:
    scale = draft.weight(f"{scope}/weight", (HIDDEN,), 0.8, 1.2)
    bias = draft.weight(f"{scope}/bias", (HIDDEN,), -0.1, 0.1)
    return draft.node("LayerNormalization", x, scale, bias, scope=scope, axis=-1, epsilon=1e-12)


def draw_densenet201(draft: Draft) -> None:
    """torchvision's densenet201: growth 32, dense blocks of 6, 12, 48 and 32, live values that pass many layers."""
    growth = 32
    x = draft.input("input", ("N", 3, 224, 224))
    x = draft.relu(draft.conv(x, "features.conv0", (3, 64), 7, 2), "features.relu0")
    x = draft.max_pool(x, "features/pool0", 3, 2, 1)
    channels = 64
    for block, depth in enumerate((6, 12, 48, 32), start=1):
        features = [x]
        for layer in range(1, depth + 1):
            features.append(
                _dense_layer(draft, features, f"features.denseblock{block}.denselayer{layer}", channels, growth)
            )
            channels += growth
        x = draft.node("Concat", *features, scope=f"features/denseblock{block}", axis=1)
        if block < 4:
            scope = f"features.transition{block}"
            x = draft.relu(draft.batch_norm(x, f"{scope}.norm", channels), f"{scope}.relu")
            x = draft.conv(x, f"{scope}.conv", (channels, channels // 2), 1)
            x = draft.node("AveragePool", x, scope=f"features/transition{block}", kernel_shape=[2, 2], strides=[2, 2])
            channels //= 2
    x = draft.relu(draft.batch_norm(x, "features.norm5", channels), "relu")
    x = draft.node("GlobalAveragePool", x, scope="avgpool")
    x = draft.node("Flatten", x, scope="flatten", axis=1)
    draft.output(draft.gemm(x, "classifier", (channels, 1000)), "output", ("N", 1000))


def _dense_layer(draft: Draft, features: list[str], scope: str, channels: int, growth: int) -> str:
    x = draft.node("Concat", *features, scope=scope.replace(".", "/"), axis=1) if len(features) > 1 else features[0]
    x = draft.relu(draft.batch_norm(x, f"{scope}.norm1", channels), f"{scope}.relu1")
    x = draft.relu(draft.conv(x, f"{scope}.conv1", (channels, 4 * growth), 1), f"{scope}.relu2")
    return draft.conv(x, f"{scope}.conv2", (4 * growth, growth), 3)


class _Yolo:
    """The layers of a YOLOv4 detector, numbered as they come; `activation` follows every convolution."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._count = 0

    def conv(
        self, x: str, channels: tuple[int, int], kernel: int, stride: int = 1, *, activation: str, gain: float = 2.0
    ) -> str:
        self._count += 1
        scope = f"conv{self._count}"
        x = self.draft.conv(x, scope, channels, kernel, stride, gain)
        if activation == "leaky":
            return self.draft.node("LeakyRelu", x, scope=scope, alpha=0.1)
        if activation == "mish":
            y = self.draft.node("Softplus", x, scope=scope)
            y = self.draft.node("Tanh", y, scope=scope)
            return self.draft.node("Mul", x, y, scope=scope)
        return x

    def concat(self, *values: str) -> str:
        self._count += 1
        return self.draft.node("Concat", *values, scope=f"concat{self._count}", axis=1)

    def upsample(self, x: str) -> str:
        self._count += 1
        return self.draft.node(
            "Resize", x, "", "upsample_scales", scope=f"upsample{self._count}",
            coordinate_transformation_mode="asymmetric", mode="nearest", nearest_mode="floor",
        )  # fmt: skip

    def stage(self, x: str, channels: int, depth: int) -> str:
        """A cross-stage partial stage: halves the resolution, `depth` residual blocks on one of two branches."""
        wide, first = 2 * channels, channels == 32
        half = wide if first else channels
        x = self.conv(x, (channels, wide), 3, 2, activation="mish")
        shortcut = self.conv(x, (wide, half), 1, activation="mish")
        x = self.conv(x, (wide, half), 1, activation="mish")
        for _ in range(depth):
            inner = half // 2 if first else half
            y = self.conv(x, (half, inner), 1, activation="mish")
            y = self.conv(y, (inner, half), 3, activation="mish", gain=1.0 / depth)
            self._count += 1
            x = self.draft.node("Add", x, y, scope=f"shortcut{self._count}")
        x = self.conv(x, (half, half), 1, activation="mish")
        return self.conv(self.concat(x, shortcut), (2 * half, wide), 1, activation="mish")

    def narrow(self, x: str, channels: int, half: int, rounds: int) -> str:
        """`rounds` pairs of 3x3 and 1x1 convolutions after a first 1x1, `half` channels at the end."""
        x = self.conv(x, (channels, half), 1, activation="leaky")
        for _ in range(rounds):
            x = self.conv(x, (half, 2 * half), 3, activation="leaky")
            x = self.conv(x, (2 * half, half), 1, activation="leaky")
        return x

    def head(self, x: str, half: int, name: str, size: int) -> None:
        x = self.conv(x, (half, 2 * half), 3, activation="leaky")
        self.draft.output(self.conv(x, (2 * half, 255), 1, activation="linear", gain=1.0), name, ("N", 255, size, size))


def draw_yolov4(draft: Draft) -> None:
    """YOLOv4 as its configuration has it: CSPDarknet-53 with Mish, spatial pooling, path aggregation, three heads."""
    net = _Yolo(draft)
    draft.constant("upsample_scales", np.array([1, 1, 2, 2], np.float32))
    x = net.conv(draft.input("input", ("N", 3, 416, 416)), (3, 32), 3, activation="mish")
    stages = []
    for channels, depth in ((32, 1), (64, 2), (128, 8), (256, 8), (512, 4)):
        x = net.stage(x, channels, depth)
        stages.append(x)
    x = net.narrow(x, 1024, 512, 1)
    pooled = [draft.max_pool(x, f"spp{kernel}", kernel, 1, kernel // 2) for kernel in (13, 9, 5)]
    deep = net.narrow(net.concat(*pooled, x), 2048, 512, 1)
    x = net.upsample(net.conv(deep, (512, 256), 1, activation="leaky"))
    middle = net.narrow(net.concat(net.conv(stages[3], (512, 256), 1, activation="leaky"), x), 512, 256, 2)
    x = net.upsample(net.conv(middle, (256, 128), 1, activation="leaky"))
    fine = net.narrow(net.concat(net.conv(stages[2], (256, 128), 1, activation="leaky"), x), 256, 128, 2)
    net.head(fine, 128, "fine", 52)
    x = net.conv(fine, (128, 256), 3, 2, activation="leaky")
    middle = net.narrow(net.concat(x, middle), 512, 256, 2)
    net.head(middle, 256, "middle", 26)
    x = net.conv(middle, (256, 512), 3, 2, activation="leaky")
    net.head(net.narrow(net.concat(x, deep), 1024, 512, 2), 512, "coarse", 13)


SPARSE_LAYERS, SPARSE_WIDTH, SPARSE_ROWS = 144, 2048, 2


def draw_sparse(draft: Draft) -> None:
    """144 residual MatMuls of 2048 x 2048, 2.4 GB in name; two rows of each are written, the rest are holes."""
    shape: Shape = ("N", SPARSE_WIDTH)
    x = draft.input("input", shape)
    bound = math.sqrt(3.0 / (SPARSE_ROWS * SPARSE_LAYERS))
    for index in range(SPARSE_LAYERS):
        weight = draft.sparse_weight(f"layer.{index}.weight", (SPARSE_WIDTH, SPARSE_WIDTH), bound, SPARSE_ROWS)
        y = draft.node("MatMul", x, weight, scope=f"layer.{index}")
        x = draft.node("Add", x, y, scope=f"layer.{index}")
    draft.output(x, "output", shape)


def draw_tiny(draft: Draft) -> None:
    """A residual network of 2.7 MB for tests: convolutions, a shortcut and two Gemms."""
    x = draft.input("input", ("N", 3, 32, 32))
    x = draft.relu(draft.conv(x, "stem", (3, 32), 3, 2), "stem_relu")
    channels = 32
    for index, width in enumerate((32, 64)):
        x = _bottleneck(draft, x, f"layer.{index}", channels, width, 2, 1.0)
        channels = 4 * width
    x = draft.node("Flatten", x, scope="flatten", axis=1)
    x = draft.relu(draft.gemm(x, "fc1", (4 * 4 * channels, 128), 2.0), "fc1_relu")
    draft.output(draft.gemm(x, "fc2", (128, 10)), "output", ("N", 10))


DRAWINGS: dict[str, Callable[[Draft], None]] = {
    "resnet152": draw_resnet152,
    "vgg19": draw_vgg19,
    "encoder": draw_encoder,
    "densenet201": draw_densenet201,
    "yolov4": draw_yolov4,
    "sparse": draw_sparse,
    "tiny": draw_tiny,
}


@dataclass(frozen=True)
class Case:
    """A model and the input shapes it is measured with."""

    name: str
    model: str
    shapes: Mapping[str, tuple[int, ...]]


_IMAGE = {"input": (1, 3, 224, 224)}
CASES = {
    case.name: case
    for case in (
        Case("resnet152", "resnet152", _IMAGE),
        Case("vgg19", "vgg19", _IMAGE),
        Case("encoder-1", "encoder", {"embeddings": (1, 1, HIDDEN)}),
        Case("encoder-128", "encoder", {"embeddings": (1, 128, HIDDEN)}),
        Case("densenet201", "densenet201", _IMAGE),
        Case("yolov4", "yolov4", {"input": (1, 3, 416, 416)}),
        Case("sparse", "sparse", {"input": (1, SPARSE_WIDTH)}),
        Case("tiny", "tiny", {"input": (1, 3, 32, 32)}),
    )
}


def make(name: str, folder: Path = DEFAULT_FOLDER) -> Path:
    """The path of model `name` in `folder`, made first where it is not there; its weights lie beside it as `.data`.

    Raises KeyError for a name that is not in `DRAWINGS`, OSError where the folder cannot be written.
    """
    draw = DRAWINGS[name]
    path, data = folder / f"{name}.onnx", folder / f"{name}.onnx.data"
    if _is_current(path, data):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _scratch(path) as new_path, _scratch(data) as new_data:
        with open(new_data, "wb") as stream:
            draft = Draft(name, stream, data.name)
            draw(draft)
        new_path.write_bytes(draft.model().SerializeToString(deterministic=True))
        os.replace(new_data, data)
        os.replace(new_path, path)
    return path


def _is_current(path: Path, data: Path) -> bool:
    if not (path.is_file() and data.is_file()):
        return False
    return str(onnx.load(path, load_external_data=False).producer_version) == RECIPE


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
    finally:
        scratch.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="+", choices=[*DRAWINGS, "all"], metavar="NAME", help=", ".join([*DRAWINGS, "all"])
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_FOLDER, help="folder, made if missing (default: %(default)s)"
    )
    arguments = parser.parse_args()
    names = list(DRAWINGS) if "all" in arguments.names else arguments.names
    for name in names:
        path = make(name, arguments.out)
        size = path.with_name(f"{path.name}.data").stat().st_size
        print(f"{path}  {size / 1e6:.1f} MB of weights", flush=True)


if __name__ == "__main__":
    main()
