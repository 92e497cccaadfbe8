"""Chains as replicas under a local Ray Serve: two of them, over handles and over HTTP. Skipped where Ray is not
installed: `pip install "ray[serve]"`, which is large and nothing else here needs."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import checkout
from tests.chains import assert_same, feed, in_this_process, layers, saved, uncut
from trt_layering.building import build
from trt_layering.errors import BudgetError, InputError, NotBuiltError, UsageError
from trt_layering.runtime.footprint import footprint

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[serve]"')
serve = pytest.importorskip("ray.serve", reason='Ray Serve is not installed: pip install "ray[serve]"')

pytestmark = pytest.mark.filterwarnings("default")
WAVE = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(6, batch="n"), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def repository(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    with in_this_process():
        build(source, name="layers", repository=folder, block_size="16KiB", optimise=False)
    return folder


@pytest.fixture(scope="module")
def without_token() -> Iterator[None]:
    """Ray writes no token to the home of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The module under test, where replicas find it, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(checkout.ROOT / "scripts"))
        yield importlib.import_module("ray_serve")
        sys.modules.pop("ray_serve", None)


@pytest.fixture(scope="module")
def served(scripts: Any, repository: Path, without_token: None) -> Iterator[tuple[Any, int]]:
    """A handle to two replicas, and the port they are reached at."""
    paths = os.pathsep.join([str(checkout.ROOT), str(checkout.ROOT / "scripts")])
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        needs = footprint("layers", repository=repository, wave=WAVE)
        application = scripts.application(
            {"chain": "layers", "repository": str(repository), "budget": str(needs.floor), "wave": str(WAVE),
             "replicas": "2"}
        )  # fmt: skip
        yield serve.run(application, name="layers", route_prefix="/v2/models/layers"), port
    finally:
        serve.shutdown()
        ray.shutdown()


def test_every_answer_is_right_and_two_replicas_give_them(served, source):
    handle, _ = served
    requests = [feed(rows, seed=rows) for rows in range(1, 25)]
    responses = [handle.infer.remote(feeds) for feeds in requests]
    for feeds, response in zip(requests, responses, strict=True):
        assert_same(uncut(source, feeds), response.result(timeout_s=60))
    status = serve.status().applications["layers"].deployments["layers"]
    assert sum(status.replica_states.values()) == 2
    counts = [handle.stats.remote().result(timeout_s=60)["requests"] for _ in range(20)]
    assert min(counts) > 0
    assert max(counts) < len(requests)


def test_a_request_that_does_not_fit_fails_alone_with_our_error(served, source):
    handle, _ = served
    good = handle.infer.remote(feed(seed=1))
    with pytest.raises(InputError, match="does not fit"):
        handle.infer.remote({"x": np.zeros((1, 3), np.float32)}).result(timeout_s=60)
    assert_same(uncut(source, feed(seed=1)), good.result(timeout_s=60))


def test_nvidias_client_over_http(served, source):
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(f"127.0.0.1:{served[1]}")
    try:
        assert client.is_model_ready("layers")
        assert [value["name"] for value in client.get_model_metadata("layers")["inputs"]] == ["x"]
        feeds = feed(seed=3)
        asked = http.InferInput("x", list(feeds["x"].shape), "FP32")
        asked.set_data_from_numpy(feeds["x"])
        assert_same(uncut(source, feeds), {"y": client.infer("layers", [asked]).as_numpy("y")})
        wrong = http.InferInput("x", [1, 3], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 3), np.float32))
        with pytest.raises(Exception, match="does not fit") as failure:
            client.infer("layers", [wrong])
        assert failure.value.status() == "400"
    finally:
        client.close()


def test_plain_http(served, source):
    import httpx

    base = f"http://127.0.0.1:{served[1]}/v2/models/layers"
    feeds = feed(seed=4)
    tensor = {"name": "x", "shape": list(feeds["x"].shape), "datatype": "FP32", "data": feeds["x"].ravel().tolist()}
    reply = httpx.post(f"{base}/infer", json={"inputs": [tensor]}, timeout=60)
    assert reply.status_code == 200, reply.text
    [output] = reply.json()["outputs"]
    got = np.array(output["data"], np.float32).reshape(output["shape"])
    assert_same(uncut(source, feeds), {"y": got})
    assert httpx.post(f"{base}/infer", content=b"{", timeout=60).status_code == 400
    assert httpx.get(f"{base}/elsewhere", timeout=60).status_code == 404


@pytest.mark.parametrize(("arguments", "error", "says"), [
    ({}, UsageError, "no chain"), ({"chain": "layers", "much": "1"}, UsageError, "much"),
    ({"chain": "gone"}, NotBuiltError, "gone"), ({"chain": "layers", "wave": "0"}, UsageError, "wave"),
    ({"chain": "layers", "replicas": "two"}, UsageError, "replicas"),
    ({"chain": "layers", "replicas": "3", "max_replicas": "2"}, UsageError, "max_replicas"),
    ({"chain": "layers", "budget": "1"}, BudgetError, "floor"),
])  # fmt: skip
def test_what_cannot_be_is_said_before_anything_starts(scripts, repository, arguments, error, says):
    with pytest.raises(error, match=says):
        scripts.application({"repository": str(repository), **arguments})


def test_scaling_is_left_to_ray(scripts, repository):
    given = {"chain": "layers", "repository": str(repository), "replicas": "2", "max_replicas": "5"}
    with pytest.MonkeyPatch.context() as patch:
        options: dict[str, Any] = {}

        class Deployment:
            def options(self, **more: Any) -> Deployment:
                options.update(more)
                return self

            def bind(self, *_: Any) -> None:
                pass

        patch.setattr(scripts.serve, "deployment", lambda _: Deployment())
        scripts.application(given)
    assert options["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 5}
    assert options["ray_actor_options"]["memory"] == footprint("layers", repository=repository).resident
