"""What is said of a server and its models, as `tritonclient` and tools around it read it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import tritonclient
from google.protobuf import json_format

from trt_layering import __version__
from trt_layering.errors import ModelError
from trt_layering.service import description
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.store.manifest import Value

LIMITS = Limits()


@dataclass
class Model:
    name: str = "m"
    version: int | None = 3
    state: Literal["loading", "ready", "unloaded", "unavailable"] = "ready"
    reason: str = ""
    inputs: tuple[Value, ...] = (
        Value(name="x", dtype="float32", shape=("batch", 3, None)),
        Value(name="words", dtype="string", shape=None),
    )
    outputs: tuple[Value, ...] = (Value(name="y", dtype="bfloat16", shape=()),)
    backend: str = "onnxruntime"
    requests: int = 10
    failures: int = 1
    deadline_misses: int = 2
    sweeps: int = 4
    wave_sizes: Mapping[int, int] = field(default_factory=lambda: {4: 2, 1: 2})
    stall_seconds: float = 0.5
    execute_seconds: float = 0.25
    queue_seconds: float = 1.0
    bytes_read: int = 4096
    resident_bytes: int = 100


def test_the_server():
    said = description.server_metadata()
    assert said["version"] == __version__
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(said["extensions"])


def test_metadata():
    assert description.model_metadata(Model()) == {
        "name": "m",
        "versions": ["3"],
        "platform": "trt_layering_onnxruntime",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]},
            {"name": "words", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [{"name": "y", "datatype": "BF16", "shape": []}],
    }


def test_a_model_that_the_protocol_cannot_speak_of():
    model = Model(outputs=(Value(name="y", dtype="complex64", shape=()),))
    for say in (description.model_metadata, description.model_config):
        with pytest.raises(ModelError, match="no datatype for complex64"):
            say(model)


@pytest.mark.parametrize(("backend", "kind"), [("onnxruntime", "KIND_CPU"), ("tensorrt", "KIND_GPU")])
def test_configuration(backend, kind):
    said = description.model_config(Model(backend=backend))
    assert (said["name"], said["max_batch_size"], said["backend"]) == ("m", 0, backend)
    assert [(one["name"], one["data_type"], one["dims"]) for one in said["input"]] == [
        ("x", "TYPE_FP32", [-1, 3, -1]),
        ("words", "TYPE_STRING", [-1]),
    ]
    assert [(one["name"], one["data_type"], one["dims"]) for one in said["output"]] == [("y", "TYPE_BF16", [])]
    assert said["instance_group"][0]["kind"] == kind
    assert said["model_transaction_policy"] == {"decoupled": False}


def tritons_messages(name: str) -> Any:
    """The messages that Triton's own clients have, from a file that needs no more than protobuf."""
    path = Path(next(iter(tritonclient.__path__)), "grpc", f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_configuration_is_tritons():
    said = json_format.ParseDict(description.model_config(Model()), tritons_messages("model_config_pb2").ModelConfig())
    assert list(said.input[0].dims) == [-1, 3, -1]


def test_statistics():
    [said] = description.statistics([Model()])["model_stats"]
    stats = said["inference_stats"]
    assert (said["inference_count"], said["execution_count"]) == (9, 4)
    assert stats["fail"]["count"] == 1
    assert stats["queue"] == {"count": 10, "ns": 1_000_000_000}
    assert stats["compute_infer"] == {"count": 4, "ns": 750_000_000}
    assert said["trt_layering"]["wave_sizes"] == {"1": 2, "4": 2}
    assert description.statistics([]) == {"model_stats": []}


def test_the_index():
    models = [
        Model("a"),
        Model("b", state="loading", version=None),
        Model("c", state="unloaded"),
        Model("d", state="unavailable", reason="its weights are gone"),
    ]
    said = description.repository_index(models, ready="any")
    assert [(one["name"], one["version"], one["state"], one["reason"]) for one in said] == [
        ("a", "3", "READY", ""),
        ("b", "", "LOADING", ""),
        ("c", "3", "UNAVAILABLE", "unloaded"),
        ("d", "3", "UNAVAILABLE", "its weights are gone"),
    ]
    assert description.repository_index(models, ready="only") == said[:1]


def test_all_of_it_is_json():
    said = [description.server_metadata(), description.model_metadata(Model()), description.statistics([Model()])]
    assert msgspec.json.decode(msgspec.json.encode(said)) == said


@pytest.mark.parametrize(
    ("body", "ready"), [(b"", "any"), (b"{}", "any"), (b'{"ready":false}', "any"), (b'{"ready":true}', "only")]
)
def test_what_an_index_is_asked_for(body, ready):
    assert description.parse_index(body, LIMITS) == ready


def test_loading_as_the_client_asks():
    description.check_load(b"", LIMITS)
    description.check_load(b"{}", LIMITS)
    description.check_unload(b'{"parameters": {"unload_dependents": false}}', LIMITS)
    for body in (b'{"parameters": {"config": "{}"}}', b'{"parameters": {"file:1/model.onnx": "AAAA"}}'):
        with pytest.raises(ProtocolError, match="loaded as it was built"):
            description.check_load(body, LIMITS)


@pytest.mark.parametrize("parse", [description.parse_index, description.check_load, description.check_unload])
@pytest.mark.parametrize("body", [b"[", b"[]", b'{"ready": 1, "parameters": 7}', b"[" * 9999, b"\xff"])
def test_what_cannot_be_read(parse, body):
    with pytest.raises(ProtocolError):
        parse(body, LIMITS)
