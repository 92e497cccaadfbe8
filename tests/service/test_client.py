"""NVIDIA's `tritonclient`, as it is, against a service that runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests import chains
from tests.service.processes import BEARER, SECONDS, WIDTH, Process, build, configured, serving

triton = pytest.importorskip("tritonclient.http")
from tritonclient.utils import InferenceServerException  # noqa: E402


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("repository")
    models = ("one", "two", "three")
    for name in models:
        build(folder, name)
    with serving(configured(folder, *models, "unbuilt", max_body="1MiB")) as process:
        process.said("version 1 serves", len(models))
        process.folder = folder
        yield process


@pytest.fixture(scope="module")
def client(process):
    """Called `concurrency` times at once at most, with time enough for a machine that is busy."""
    address = f"127.0.0.1:{process.port}"
    with triton.InferenceServerClient(address, concurrency=8, network_timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(process):
    return lambda seed=0: chains.uncut(process.folder / "one-0.onnx", chains.feed(3, seed, WIDTH))["y"]


def tensor(seed: int = 0, binary: bool = True):
    array = chains.feed(3, seed, WIDTH)["x"]
    given = triton.InferInput("x", array.shape, "FP32")
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def test_health_and_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("one")
    assert client.is_model_ready("one", "1")
    assert not client.is_model_ready("unbuilt")
    assert not client.is_model_ready("one", "7")
    assert client.get_server_metadata()["name"] == "trt-layering"
    assert client.get_model_metadata("one")["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, WIDTH]}]
    assert client.get_model_metadata("one", "1")["versions"] == ["1"]
    assert client.get_model_config("one")["input"][0]["data_type"] == "TYPE_FP32"
    index = {model["name"]: (model["state"], model["reason"]) for model in client.get_model_repository_index()}
    assert index["one"] == ("READY", "")
    assert index["unbuilt"][0] == "UNAVAILABLE"
    assert index["unbuilt"][1]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
def test_inference(client, wanted, binary_in, binary_out, packing):
    outputs = None if binary_out is None else [triton.InferRequestedOutput("y", binary_data=binary_out)]
    found = client.infer(
        "one", [tensor(binary=binary_in)], outputs=outputs, request_id="7", model_version="1",
        request_compression_algorithm=packing, response_compression_algorithm=packing,
    )  # fmt: skip
    np.testing.assert_allclose(found.as_numpy("y"), wanted(), atol=1e-5)
    assert found.get_response()["id"] == "7"


def test_many_at_once_and_what_was_counted(client, wanted):
    before = client.get_inference_statistics("one")["model_stats"][0]["inference_count"]
    waiting = [client.async_infer("one", [tensor(seed)]) for seed in range(24)]
    for seed, one in enumerate(waiting):
        np.testing.assert_allclose(one.get_result(timeout=SECONDS).as_numpy("y"), wanted(seed), atol=1e-5)
    [stats] = client.get_inference_statistics("one", "1")["model_stats"]
    assert stats["inference_count"] == before + 24
    assert len(client.get_inference_statistics()["model_stats"]) >= 2


def test_a_model_is_unloaded_and_loaded(client, process, wanted):
    with pytest.raises(InferenceServerException, match="token"):
        client.unload_model("two")
    assert client.is_model_ready("two")
    client.unload_model("two", headers=BEARER)
    assert not client.is_model_ready("two")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("two", [tensor()])
    assert caught.value.status() == "503"
    build(process.folder, "two", seed=1)
    client.load_model("two", headers=BEARER)
    assert client.get_model_metadata("two")["versions"] == ["2"]
    found = client.infer("two", [tensor()]).as_numpy("y")
    newer = chains.uncut(process.folder / "two-1.onnx", chains.feed(3, 0, WIDTH))["y"]
    np.testing.assert_allclose(found, newer, atol=1e-5)


def test_a_newer_version_is_loaded_without_losing_a_request(client, process, wanted):
    """While requests come, none fails, and each has the older or the newer version's answer."""
    build(process.folder, "three", seed=1)
    newer = chains.uncut(process.folder / "three-1.onnx", chains.feed(3, 0, WIDTH))["y"]
    waiting = [client.async_infer("three", [tensor()]) for _ in range(10)]
    client.load_model("three", headers=BEARER)
    waiting += [client.async_infer("three", [tensor()]) for _ in range(10)]
    found = [one.get_result(timeout=SECONDS).as_numpy("y") for one in waiting]
    old, new = ([np.allclose(answer, one, atol=1e-5) for answer in found] for one in (wanted(), newer))
    assert all(one != other for one, other in zip(old, new, strict=True))
    assert all(new[10:])


@pytest.mark.parametrize(
    ("model", "version", "given", "status", "words"),
    [
        ("none", "", "x", "404", "none"), ("..", "", "x", "404", "no model"), ("a/b", "", "x", "404", "nothing"),
        ("one", "9", "x", "404", "version"), ("unbuilt", "", "x", "503", "unbuilt"), ("one", "", "z", "400", "z"),
    ],
)  # fmt: skip
def test_errors(client, model, version, given, status, words):
    array = chains.feed(3, 0, WIDTH)["x"]
    one = triton.InferInput(given, array.shape, "FP32")
    one.set_data_from_numpy(array)
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer(model, [one], model_version=version)
    assert caught.value.status() == status


def test_more_than_is_allowed(client):
    array = np.zeros((2000, WIDTH), np.float32)
    one = triton.InferInput("x", array.shape, "FP32")
    one.set_data_from_numpy(array)
    with pytest.raises(InferenceServerException, match="allowed") as caught:
        client.infer("one", [one])
    assert caught.value.status() == "413"
    assert client.is_server_live()
