"""`trt-layering serve` from its start to its end, in processes of their own: signals, faults, and what is left."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import chains
from tests.service.processes import BEARER, SECONDS, WIDTH, ask, build, configured, infer, question, serving
from trt_layering.store.manifest import WEIGHTS_FILE


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("one", "two"):
        build(folder, name)
    return folder


@pytest.fixture
def folder(built, tmp_path) -> Path:
    """A repository of the test's own, with the chains "one" and "two"."""
    shutil.copytree(built, tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture(scope="module")
def wanted(built):
    """What the uncut model answers to the request number `seed`."""
    return lambda seed=0: chains.uncut(built / "one-0.onnx", chains.feed(3, seed, WIDTH))["y"]


def right(found, wanted) -> None:
    status, answer = found
    assert status == 200, answer
    np.testing.assert_allclose(answer, wanted, atol=1e-5)


@pytest.fixture
def systemd(tmp_path):
    """A socket as systemd's, and its path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(SECONDS)
        yield listening, str(tmp_path / "notify")


def told(listening: socket.socket, words: str) -> str:
    """The next message that has `words`."""
    while words not in (message := listening.recv(4096).decode()):
        pass
    return message


def test_a_life(folder, wanted, systemd):
    """Ready, asked, read again, and ended."""
    listening, path = systemd
    file = configured(folder, "one", "two")
    with serving(file, NOTIFY_SOCKET=path) as process:
        assert "STATUS=" in told(listening, "READY=1")
        process.said("serving models=")
        right(infer(process.port, "one"), wanted())
        assert ask(process.port, "GET", "/v2/health/ready")[0] == 200
        assert "<html" in ask(process.port, "GET", "/")[1]
        assert 'nv_inference_count{model="one",version="1"} 1' in ask(process.metrics_port, "GET", "/metrics")[1]
        read_again(process, file, listening)
        process.signal(signal.SIGTERM)
        told(listening, "STOPPING=1")
        assert process.status() == 0


def read_again(process, file, listening) -> None:
    """The token and the budget change; a broken file changes nothing."""
    written = json.loads(file.read_text())
    budget = "/v2/repository/budget"
    file.with_name("token").write_text("another-token-of-many-letters")
    file.write_text(json.dumps(written | {"memory_budget": "64MiB", "repository": "elsewhere"}))
    process.signal(signal.SIGHUP)
    told(listening, "RELOADING=1")
    told(listening, "READY=1")
    assert "restart_needed_for=repository" in process.said("read its configuration again")
    assert ask(process.port, "POST", budget, {"memory_budget": "64MiB"}, BEARER)[0] == 401
    file.write_text("models: [")
    process.signal(signal.SIGHUP)
    process.said("refused")
    file.write_text(json.dumps(written | {"memory_budget": "1"}))
    process.signal(signal.SIGHUP)
    process.said("refused", 2)
    another = {"Authorization": "Bearer another-token-of-many-letters"}
    assert ask(process.port, "POST", budget, {"memory_budget": "65MiB"}, another) == (200, {"memory_budget": 65 << 20})


def under_load(port: int, stop: threading.Event, replies: list) -> None:
    """Ask until `stop` is set or the service has gone; keep what was replied."""
    while not stop.is_set():
        try:
            replies.append(infer(port, "one", len(replies) % 5))
        except (OSError, EOFError, ValueError):
            return


def test_requests_under_way_are_answered_before_the_end(folder, wanted):
    stop, replies = threading.Event(), [[] for _ in range(4)]
    with serving(configured(folder, "one")) as process, ThreadPoolExecutor(4) as clients:
        port = process.ready().port
        asked = [clients.submit(under_load, port, stop, own) for own in replies]
        right(infer(port, "one"), wanted())
        process.signal(signal.SIGTERM)
        assert process.status() == 0
        stop.set()
        for one in asked:
            one.result(SECONDS)
    answers = [reply for own in replies for reply in enumerate(own)]
    assert answers
    for number, (status, answer) in answers:
        if status == 503:
            assert "ends" in answer
        else:
            right((status, answer), wanted(number % 5))


def half(port: int) -> socket.socket:
    """A client that has sent half a request, of which the service waits for the rest."""
    client = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    body = json.dumps(question()).encode()
    head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: here\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    client.sendall(head % len(body))
    assert b"100 Continue" in client.recv(4096)  # the service waits for the body now
    return client


def test_a_second_signal_ends_it_at_once(folder):
    with serving(configured(folder, "one", drain="3600s")) as process:
        with half(process.ready().port):
            process.signal(signal.SIGTERM)
            process.said("ending")
            assert ask(process.port, "GET", "/v2/health/ready")[0] == 503
            process.signal(signal.SIGTERM)
            assert process.status() == 130
        process.said("at once")


def test_what_does_not_end_in_time_is_refused(folder):
    with serving(configured(folder, "one", drain="200ms")) as process:
        with half(process.ready().port) as client:
            process.signal(signal.SIGTERM)
            assert process.status() == 0
            assert b" 503 " in client.recv(4096)
        process.said("did not end in time")


def test_a_killed_service_serves_again(folder, wanted):
    stop, replies = threading.Event(), []
    file = configured(folder, "one")
    with serving(file) as process, ThreadPoolExecutor(2) as clients:
        port = process.ready().port
        asked = clients.submit(under_load, port, stop, replies)
        right(infer(port, "one"), wanted())
        process.kill()
        asked.result(SECONDS)
    with serving(configured(folder, "one", port=port)) as process:
        right(infer(process.ready().port, "one"), wanted())
        assert process.port == port
        process.signal(signal.SIGTERM)
        assert process.status() == 0


def test_two_services_on_one_repository_but_not_on_one_port(folder, wanted):
    file = configured(folder, "one")
    with serving(file) as first, serving(file) as second:
        for process in (first, second):
            right(infer(process.ready().port, "one"), wanted())
        with serving(configured(folder, "two", port=first.port)) as third:
            assert third.status() == 1
            assert f"port {first.port} of 127.0.0.1 is in use" in third.log
        assert infer(first.port, "one")[0] == 200


@pytest.mark.usefixtures("engines_take_what_the_manifest_says")
def test_a_store_that_goes_while_it_serves(folder, wanted):
    """Its model is refused with the reason, the other one serves on, and a new build brings it back."""
    shares = {name: chains.budgets(build(folder, name))["middle"] for name in ("one", "two")}
    with serving(configured(folder, "one", "two", shares=shares)) as process:
        process.ready()
        process.said("serves", 2)
        right(infer(process.port, "one"), wanted())
        for version in ("1", "2"):
            (folder / "one" / version / WEIGHTS_FILE).unlink()
        statuses = [infer(process.port, "one") for _ in range(2)]
        assert statuses[-1][0] == 503
        assert WEIGHTS_FILE in statuses[-1][1]
        right(infer(process.port, "two"), wanted())
        build(folder, "one")
        assert ask(process.port, "POST", "/v2/repository/models/one/load", headers=BEARER)[0] == 200
        right(infer(process.port, "one"), wanted())
        assert ask(process.port, "GET", "/v2/models/one")[1]["versions"] == ["3"]


@pytest.mark.parametrize(
    ("service", "status", "words"),
    [
        ({"host": "0.0.0.0", "token_file": None}, 2, "no token"),
        ({"token_file": "/nonexistent"}, 2, "token file cannot be read"),
        ({"port": "many"}, 2, "Expected a whole number"),
        ({"host": "192.0.2.1"}, 1, "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_served(folder, service, status, words):
    with serving(configured(folder, "one", **service)) as process:
        assert process.status() == status
        assert words in process.log


def test_a_deployment_without_models_or_with_none_built(folder):
    with serving(configured(folder)) as process:
        assert process.status() == 2
    with serving(configured(folder, "unbuilt")) as process:
        process.said("no model can be served")
        assert ask(process.port, "GET", "/v2/health/live")[0] == 200
        assert ask(process.port, "GET", "/v2/health/ready")[0] == 503
        assert infer(process.port, "unbuilt")[0] == 503
        process.signal(signal.SIGINT)
        assert process.status() == 0
