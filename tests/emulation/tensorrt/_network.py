"""Networks and the ONNX parser that fills them; imports onnx, numpy and `emulated_device`. What the parser does not
take is a ParserError, and parse() returns False."""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from emulated_device import machine
from onnx import external_data_helper

from . import _enums, _values
from ._native import Native, plain
from ._plan import tensor_shape
from ._running import forget_shapes

# fmt: off
UNSUPPORTED = frozenset({
    "Adagrad", "Adam", "Bernoulli", "CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "DFT",
    "Det", "DynamicQuantizeLinear", "Gradient", "HammingWindow", "HannWindow", "ImageDecoder", "MatMulInteger",
    "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Momentum", "Multinomial", "NegativeLogLikelihoodLoss", "Optional",
    "OptionalGetElement", "OptionalHasElement", "QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap",
    "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer", "Unique",
})
# fmt: on
"""Operators without an importer."""

SHAPE_OPERANDS = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
"""Operands that TensorRT needs to know on the host, to compute shapes."""

NO_WEIGHTS = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "NonMaxSuppression": (3, 4),
    "Pad": (2,),
    "QuantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "Upsample": (1,),
}
"""Floating-point operands that become part of a layer and cannot be refitted."""

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
LAYERS = {
    "Cast": "CAST",
    "Concat": "CONCATENATION",
    "Conv": "CONVOLUTION",
    "ConvTranspose": "DECONVOLUTION",
    "Gather": "GATHER",
    "Gemm": "MATRIX_MULTIPLY",
    "MatMul": "MATRIX_MULTIPLY",
    "Relu": "ACTIVATION",
    "Sigmoid": "ACTIVATION",
    "Softmax": "SOFTMAX",
}


class ITensor(Native):
    def _setup(self, network: INetworkDefinition, value: onnx.ValueInfoProto) -> None:
        self._network, self._value = network, value

    name = property(lambda self: self._value.name)
    dtype = property(lambda self: _values.data_type(_values.ONNX_TO_TRT[self._value.type.tensor_type.elem_type]))
    is_network_input = property(lambda self: self in self._network._inputs)
    is_network_output = property(lambda self: self in self._network._outputs)
    is_shape_tensor = property(lambda self: self.name in self._network._shape_tensors())
    is_execution_tensor = property(lambda self: not self.is_shape_tensor)
    location = property(
        lambda self: _enums.TensorLocation.HOST if self.is_shape_tensor else _enums.TensorLocation.DEVICE
    )
    allowed_formats = plain("allowed_formats", 4095)

    @property
    def shape(self) -> _values.Dims:
        return _values.Dims(tensor_shape(self._value))

    @shape.setter
    def shape(self, shape: Any) -> None:
        if not self.is_network_input:
            machine().fault(f"the shape of {self.name}, which is no input, was set")
        declared = self._value.type.tensor_type.shape
        del declared.dim[:]
        for size in shape:
            dim = declared.dim.add()
            if size >= 0:
                dim.dim_value = int(size)
        self._network._infer()


class ILayer(Native):
    def _setup(self, network: INetworkDefinition, node: onnx.NodeProto) -> None:
        self._network, self._node = network, node

    name = property(lambda self: self._node.name)
    type = property(lambda self: getattr(_enums.LayerType, LAYERS.get(self._node.op_type, "ELEMENTWISE")))
    num_inputs = property(lambda self: len(self._node.input))
    num_outputs = property(lambda self: len(self._node.output))
    precision_is_set = property(lambda self: False)


class INetworkDefinition(Native):
    """Filled by the parser only."""

    name = plain("name", "")

    def _setup(self, builder: Any, flags: int) -> None:
        self._builder, self._flags = builder, flags
        self._model = onnx.ModelProto()
        self._inputs: list[ITensor] = []
        self._outputs: list[ITensor] = []
        self._layers: list[ILayer] = []
        self._marked: set[str] = set()
        self._parser: Any = None

    builder = property(lambda self: self._builder)
    flags = property(lambda self: self._flags)
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))
    num_layers = property(lambda self: len(self._layers))
    has_implicit_batch_dimension = property(lambda self: False)

    def get_flag(self, flag: Any) -> bool:
        return bool(self._flags >> int(flag) & 1)

    def get_input(self, index: int) -> ITensor:
        return self._inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self._outputs[index]

    def get_layer(self, index: int) -> ILayer:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> ILayer:
        return self._layers[index]

    def __iter__(self) -> Iterator[ILayer]:
        return iter(self._layers)

    def mark_weights_refittable(self, name: str) -> bool:
        """Names no weights: an error is logged, and False."""
        if name not in self._weights():
            _values.error(self._builder.logger, "3: API Usage Error", f"There are no weights named {name}.")
            return False
        self._marked.add(name)
        return True

    def unmark_weights_refittable(self, name: str) -> bool:
        there = name in self._marked
        self._marked.discard(name)
        return there

    def are_weights_marked_refittable(self, name: str) -> bool:
        return name in self._marked

    def _fill(self, model: onnx.ModelProto, parser: Any) -> None:
        self._model = model
        self._parser = weakref.ref(parser)
        if not self.name:
            self.name = model.graph.name
        self._infer()
        self._layers = [ILayer._new(self, node) for node in model.graph.node]

    def _infer(self) -> None:
        model = self._model
        forget_shapes(model)
        inferred = onnx.shape_inference.infer_shapes(_without_data(model), data_prop=True)
        for value, found in zip(model.graph.output, inferred.graph.output, strict=True):
            value.type.CopyFrom(found.type)
        self._inputs = [ITensor._new(self, value) for value in model.graph.input]
        self._outputs = [ITensor._new(self, value) for value in model.graph.output]

    def _weights(self) -> dict[str, onnx.TensorProto]:
        """Constants that are weights: those that may be refitted."""
        used: dict[str, list[bool]] = {}
        for node in nodes(self._model.graph):
            for index, name in enumerate(node.input):
                used.setdefault(name, []).append(index not in NO_WEIGHTS.get(node.op_type, ()))
        found = self._model.graph.initializer
        return {t.name: t for t in found if t.data_type in FLOATS and any(used.get(t.name, ()))}

    def _shape_tensors(self) -> set[str]:
        """Inputs whose values decide shapes."""
        makers = {name: node for node in nodes(self._model.graph) for name in node.output}
        waiting = [
            node.input[index]
            for node in nodes(self._model.graph)
            for index in SHAPE_OPERANDS.get(node.op_type, ())
            if index < len(node.input)
        ]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                maker = makers.get(name)
                if maker is not None and maker.op_type not in ("Shape", "Size"):
                    waiting += maker.input
        return seen & {value.name for value in self._model.graph.input}


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of subgraphs too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def _without_data(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with large constants as inputs, for shape inference to copy less."""
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = model.graph.name
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if tensor.data_type in FLOATS and len(tensor.raw_data) > 1024:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            light.graph.input.append(value)
        else:
            light.graph.initializer.append(tensor)
    return light


class ParserError(Native):
    def _setup(self, code: str, text: str, node: int, found: onnx.NodeProto) -> None:
        self._code, self._text, self._node, self._found = code, text, node, found

    def code(self) -> Any:
        return getattr(_enums.ErrorCode, self._code)

    def desc(self) -> str:
        return self._text

    def node(self) -> int:
        return self._node

    def node_name(self) -> str:
        return self._found.name

    def node_operator(self) -> str:
        return self._found.op_type

    def file(self) -> str:
        return "onnxOpCheckers.cpp"

    def func(self) -> str:
        return "emulated"

    def line(self) -> int:
        return 1

    def local_function_stack(self) -> list[str]:
        return []

    def local_function_stack_size(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"In node {self._node} with name: {self._found.name} and operator: {self._found.op_type}: {self._text}"


class OnnxParser(Native):
    """Must live as long as its network is used: it holds the weights."""

    def __init__(self, network: INetworkDefinition, logger: Any) -> None:
        self._network, self._logger = network, logger
        self._errors: list[ParserError] = []
        self._flags = 1
        self._loaded: onnx.ModelProto | None = None

    num_errors = property(lambda self: len(self._errors))
    flags = property(lambda self: self._flags, lambda self, flags: setattr(self, "_flags", int(flags)))

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def clear_errors(self) -> None:
        self._errors.clear()

    def set_flag(self, flag: Any) -> None:
        self._flags |= 1 << int(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags &= ~(1 << int(flag))

    def get_flag(self, flag: Any) -> bool:
        return bool(self._flags >> int(flag) & 1)

    def supports_operator(self, op_name: str) -> bool:
        return op_name not in UNSUPPORTED and onnx.defs.has(op_name)

    def set_builder_config(self, builder_config: Any) -> bool:
        return True

    def parse(self, model: Any, path: str | None = None) -> bool:
        """`path`: the file `model` was read from, beside which its external data lies."""
        return self._load(model, path) and self._import()

    def parse_from_file(self, model: str) -> bool:
        try:
            data = Path(model).read_bytes()
        except OSError as error:
            return self._refuse("MODEL_DESERIALIZE_FAILED", f"Failed to open file: {model}: {error}")
        return self._load(data, model) and self._import()

    def load_model_proto(self, model: Any, path: str | None = None) -> bool:
        return self._load(model, path)

    def _load(self, model: Any, path: str | None) -> bool:
        try:
            loaded = onnx.load_model_from_string(bytes(model))
            if not loaded.graph.node and not loaded.graph.output:
                raise ValueError("the model is empty")
            if path is not None:
                external_data_helper.load_external_data_for_model(loaded, str(Path(path).parent))
        except Exception as error:
            return self._refuse("MODEL_DESERIALIZE_FAILED", f"Failed to parse the ONNX model: {error}")
        self._loaded = loaded
        return True

    def load_initializer(self, name: str, data: int, size: int) -> bool:
        found = [t for t in self._loaded.graph.initializer if t.name == name] if self._loaded else []
        for tensor in found:
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = ctypes.string_at(data, size)
        return bool(found) or self._refuse("INVALID_VALUE", f"There is no initializer {name}.")

    def parse_model_proto(self) -> bool:
        return self._import()

    def _import(self) -> bool:
        if self._network.num_layers:
            return self._refuse("UNSUPPORTED_GRAPH", "The network is not empty.")
        model = self._loaded
        if any(external_data_helper.uses_external_data(t) for t in model.graph.initializer):
            return self._refuse("INVALID_VALUE", "Failed to load weights from an external file.")
        if not self._check(model):
            return False
        _normalize(model)
        self._network._fill(model, self)
        return True

    def _check(self, model: onnx.ModelProto) -> bool:
        for index, node in enumerate(nodes(model.graph)):
            if node.domain not in ("", "ai.onnx") or node.op_type in UNSUPPORTED or not onnx.defs.has(node.op_type):
                text = f"No importer registered for op: {node.op_type}"
                self._refuse("UNSUPPORTED_NODE", text, index, node)
        constants = {tensor.name for tensor in model.graph.initializer}
        for value in model.graph.input:
            if value.name not in constants and value.type.tensor_type.elem_type not in _values.ONNX_TO_TRT:
                self._refuse("UNSUPPORTED_NODE_DATATYPE", f"Unsupported data type of input {value.name}")
        return not self._errors

    def _refuse(self, code: str, text: str, index: int = -1, node: onnx.NodeProto | None = None) -> bool:
        self._errors.append(ParserError._new(code, text, index, node or onnx.NodeProto()))
        _values.say(self._logger, "ERROR", f"ModelImporter: {self._errors[-1]!r}")
        return False


def _normalize(model: onnx.ModelProto) -> None:
    """Constant nodes become weights; weights of BatchNormalization lose their names, as TensorRT folds them."""
    graph = model.graph
    for node in [node for node in graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]:
        graph.node.remove(node)
        graph.initializer.add().CopyFrom(node.attribute[0].t)
        graph.initializer[-1].name = node.output[0]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for value in [value for value in graph.input if value.name in constants]:
        graph.input.remove(value)
    count = 0
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            for index in (1, 2, 3, 4):
                if node.input[index] in constants:
                    graph.initializer.add().CopyFrom(constants[node.input[index]])
                    node.input[index] = graph.initializer[-1].name = f"tmp_refittable_weight{count}"
                    count += 1
    used = {name for node in nodes(graph) for name in node.input} | {value.name for value in graph.output}
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in used]:
        graph.initializer.remove(tensor)
    for index, node in enumerate(graph.node):
        node.name = re.sub(r"^$", f"{node.op_type}_{index}", node.name)
