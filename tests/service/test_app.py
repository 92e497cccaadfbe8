"""The routes: what reaches the deployment, what comes back, and with which status."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.desks import TEXT, Desk, state
from trt_layering.config import Duration, Service, Size
from trt_layering.errors import (
    BudgetError,
    ClosedError,
    NotBuiltError,
    QueueFullError,
    ReadError,
    TimedOutError,
    UnavailableError,
)
from trt_layering.service.access import Access
from trt_layering.service.app import App

TOKEN = b"0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN.decode()}"}
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
PLAIN = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": ROWS.ravel().tolist()}]}
SETTINGS = Service(max_queue=3, max_body=Size(1 << 20), request_timeout=Duration(30))


def asked(
    desk: Desk, talk: Callable[[httpx.AsyncClient, App], Awaitable[Any]], *, settings: Service = SETTINGS,
    access: Access | None = None,
) -> Any:  # fmt: skip
    """What `talk` returns, in front of `desk`."""

    async def front() -> Any:
        with ThreadPoolExecutor(2) as threads:
            names, allowed = [*desk.states][:1], access or Access(TOKEN)
            app = App(desk, names, settings, allowed, computing=threads, waiting=threads)  # type: ignore[arg-type]
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                return await talk(client, app)

    return asyncio.run(front())


def one(desk: Desk, method: str, path: str, **said: Any) -> httpx.Response:
    settings, access = said.pop("settings", SETTINGS), said.pop("access", None)
    return asked(desk, lambda client, _: client.request(method, path, **said), settings=settings, access=access)


def binary(rows: np.ndarray = ROWS, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {
        "name": "x",
        "shape": list(rows.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": rows.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True, **parameters}}).encode()
    return head + rows.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def refused(reply: httpx.Response, status: int, words: str) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json()) == ["error"]
    assert words in reply.json()["error"]
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/v2/models/tiny/versions/3/infer"])
def test_inference_in_json_and_in_binary(path):
    reply = one(Desk(), "POST", path, json=PLAIN | {"id": "7"})
    assert reply.status_code == 200
    assert (reply.json()["id"], reply.json()["model_name"], reply.json()["model_version"]) == ("7", "tiny", "3")
    assert reply.json()["outputs"][0]["data"] == (ROWS * 2).ravel().tolist()
    content, headers = binary()
    reply = one(Desk(), "POST", path, content=content, headers=headers)
    size = int(reply.headers["inference-header-content-length"])
    assert np.array_equal(np.frombuffer(reply.content[size:], np.float32), (ROWS * 2).ravel())


def test_compressed_in_both_directions():
    rows = np.zeros((500, 4), np.float32)
    content, headers = binary(rows)
    headers |= {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    reply = one(Desk(), "POST", "/v2/models/tiny/infer", content=gzip.compress(content), headers=headers)
    assert reply.headers["content-encoding"] == "gzip"
    assert reply.content.endswith(rows.tobytes())


def test_large_json_is_read_beside_the_loop():
    rows = [[float(number % 7)] * 4 for number in range(10_000)]
    tensor = {"name": "x", "shape": [10_000, 4], "datatype": "FP32", "data": rows}
    reply = one(Desk(), "POST", "/v2/models/tiny/infer", json={"inputs": [tensor]})
    assert reply.json()["outputs"][0]["shape"] == [10_000, 4]


def test_timeout_and_priority_of_the_client():
    desk = Desk()
    content, headers = binary(timeout=2_000_000, priority=4)
    assert one(desk, "POST", "/v2/models/tiny/infer", content=content, headers=headers).status_code == 200
    [(_, model, seconds, priority)] = desk.asked
    assert (model, priority) == ("tiny", 0.25)
    assert seconds == 2.0


def test_what_there_is():
    desk = Desk(state(), state("other", state="unavailable", reason="the store is gone", version=None))
    assert one(desk, "GET", "/v2").json()["name"] == "trt-layering"
    assert one(desk, "GET", "/v2/health/live").status_code == 200
    assert one(desk, "GET", "/v2/health/ready").status_code == 200
    assert one(desk, "GET", "/v2/models/tiny").json()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert one(desk, "GET", "/v2/models/tiny/versions/3").json()["versions"] == ["3"]
    assert one(desk, "GET", "/v2/models/tiny/ready").status_code == 200
    assert one(desk, "GET", "/v2/models/tiny/config").json()["backend"] == "onnxruntime"
    assert [model["name"] for model in one(desk, "GET", "/v2/models/stats").json()["model_stats"]] == ["tiny", "other"]
    assert [model["name"] for model in one(desk, "GET", "/v2/models/other/stats").json()["model_stats"]] == ["other"]
    index = one(desk, "POST", "/v2/repository/index").json()
    assert [(model["name"], model["state"]) for model in index] == [("tiny", "READY"), ("other", "UNAVAILABLE")]
    assert [model["name"] for model in one(desk, "POST", "/v2/repository/index", json={"ready": True}).json()] == [
        "tiny"
    ]
    refused(one(desk, "GET", "/v2/models/other/ready"), 503, "the store is gone")
    refused(one(desk, "POST", "/v2/models/other/infer", json=PLAIN), 503, "the store is gone")
    refused(one(Desk(state(state="loading")), "GET", "/v2/health/ready"), 503, "no model is ready")
    page = one(desk, "GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "tiny" in page.text


def test_orders_need_the_token():
    for path, said in (
        ("/v2/repository/models/tiny/load", {}),
        ("/v2/repository/models/tiny/unload", {"parameters": {"unload_dependents": False}}),
        ("/v2/repository/budget", {"memory_budget": "2MiB"}),
    ):
        desk = Desk()
        refused(one(desk, "POST", path, json=said), 401, "Authorization")
        refused(
            one(desk, "POST", path, json=said, headers={"Authorization": "Bearer 0123456789abcdee"}), 401, "another"
        )
        refused(one(desk, "POST", path, json=said, headers=BEARER, access=Access()), 403, "service.token_file")
        assert desk.asked == []
        assert one(desk, "POST", path, json=said, headers=BEARER).status_code == 200
        assert len(desk.asked) == 1


def test_everything_needs_the_token_where_others_reach_it():
    access = Access(TOKEN, everything=True)
    for method, path in (("GET", "/"), ("GET", "/v2/health/live"), ("POST", "/v2/models/tiny/infer"), ("GET", "/none")):
        reply = one(Desk(), method, path, access=access)
        refused(reply, 401, "token")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert one(Desk(), "GET", "/v2", access=access, headers=BEARER).status_code == 200


def test_the_budget():
    desk = Desk()
    reply = one(desk, "POST", "/v2/repository/budget", json={"memory_budget": "96MiB"}, headers=BEARER)
    assert reply.json() == {"memory_budget": 96 << 20}
    assert desk.asked == [("set_budget", 96 << 20)]
    for said in ({"memory_budget": "much"}, {"memory_budget": None}, {}, {"budget": 1}, []):
        refused(one(Desk(), "POST", "/v2/repository/budget", json=said, headers=BEARER), 400, "")
    desk.fault = BudgetError("too little", floor=5, parts={})
    refused(one(desk, "POST", "/v2/repository/budget", json={"memory_budget": 1}, headers=BEARER), 400, "too little")


def test_a_model_is_not_loaded_with_what_the_client_brings():
    said = {"parameters": {"config": "{}"}}
    desk = Desk()
    refused(one(desk, "POST", "/v2/repository/models/tiny/load", json=said, headers=BEARER), 400, "config")
    assert desk.asked == []


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (QueueFullError("the queue is full"), 503, "the queue is full"),
        (UnavailableError("gone", where="here", remedy="build it"), 503, "gone (here); build it"),
        (ClosedError("closed"), 503, "closed"),
        (TimedOutError("late"), 504, "late"),
        (NotBuiltError("not built"), 404, "not built"),
        (ReadError("the drive failed"), 500, "the drive failed"),
        (RuntimeError("/secret/path"), 500, "a fault of the service itself"),
    ],
)
def test_faults_of_the_deployment(fault, status, words, caplog):
    desk = Desk()
    desk.fault = fault
    reply = one(desk, "POST", "/v2/models/tiny/infer", json=PLAIN)
    refused(reply, status, words)
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text
    assert bool(caplog.records) == (status == 500)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/", 404), ("GET", "/nothing", 404), ("GET", "/v2/models/none", 404), ("PUT", "/v2", 403),
        ("GET", "/v2/models/tiny/infer", 405), ("GET", "/v2/models/tiny/versions/4", 404),
        ("GET", "/v2/models/tiny/versions/03", 404), ("GET", "/v2/models/tiny/versions/x", 404),
        ("POST", "/v2/models/tiny/versions/99999999999999999999/infer", 404),
        ("GET", "/v2/models/..%2f..%2fetc%2fpasswd", 404), ("GET", "/v2/models/...", 404),
        ("GET", "/v2/models/%2e%2e/config", 404), ("GET", "/v2/models/a%00b", 404), ("GET", "/v2/models/%ff", 404),
        ("GET", "/v2/models/" + "a" * 4000, 404),
        ("GET", "/etc/passwd", 404), ("GET", "/v2/models/tiny%0a", 404),
    ],
)  # fmt: skip
def test_what_is_not_there(method, path, status):
    refused(one(Desk(), method, path, access=Access()), status, "")


class Looked(Desk):
    """Keeps which names were looked for."""

    def model(self, name):
        self.asked.append(name)
        return super().model(name)


@given(st.text(max_size=40), st.sampled_from(["", "/ready", "/config", "/stats", "/infer", "/load", "/unload"]))
def test_only_what_could_be_a_name_reaches_the_deployment(name, verb):
    desk = Looked()
    orders = verb in ("/load", "/unload")
    path = f"/v2/{'repository/' if orders else ''}models/{quote(name, safe='')}{verb}"
    method = "POST" if orders or verb == "/infer" else "GET"
    reply = one(desk, method, path, headers=BEARER)
    for looked in desk.asked:
        assert looked == name
        assert "/" not in looked
        assert not looked.startswith(".")
        assert looked.isascii()
    assert reply.status_code in (200, 400, 404, 405)
    if reply.status_code != 200:
        assert list(reply.json()) == ["error"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 400), (b"{", {}, 400), (b"[]", {}, 400), (b'{"inputs": []}', {}, 400), (b"\xff", {}, 400),
        (b"x" * 10, {"Content-Encoding": "br"}, 415), (b"x" * 10, {"Content-Encoding": "gzip"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "-1"}, 400), (b"{}", {"Inference-Header-Content-Length": "9"}, 400),
        (b"{}", {"Inference-Header-Content-Length": "\xb2"}, 400), (b"x" * (1 << 20), {}, 400),
        (b"x" * ((1 << 20) + 1), {}, 413), (gzip.compress(bytes(2 << 20)), {"Content-Encoding": "gzip"}, 413),
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(content, headers, status):
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    desk = Desk()
    refused(one(desk, "POST", "/v2/models/tiny/infer", content=content, headers=headers), status, "")
    assert desk.feeds == []


def test_a_body_of_unknown_length_is_read_up_to_the_limit():
    sent = []

    async def pieces():
        while True:
            sent.append(1 << 16)
            yield bytes(1 << 16)

    refused(one(Desk(), "POST", "/v2/models/tiny/infer", content=pieces()), 413, "allowed")
    assert sum(sent) <= (1 << 20) + (2 << 16)


def test_a_full_queue_is_told_before_the_body_is_read():
    async def never():
        raise AssertionError("the body is read")
        yield b""

    refused(one(Desk(state(queued=3)), "POST", "/v2/models/tiny/infer", content=never()), 503, "3 requests wait")


def test_a_request_that_takes_too_long_leaves_the_queue():
    desk = Desk(patient=True)
    settings = msgspec.structs.replace(SETTINGS, request_timeout=Duration(0.02))
    refused(one(desk, "POST", "/v2/models/tiny/infer", json=PLAIN, settings=settings), 504, "did not answer within")
    assert desk.futures[0].cancelled()
    content, headers = binary(timeout=1)
    refused(one(desk, "POST", "/v2/models/tiny/infer", content=content, headers=headers), 504, "did not answer within")


def test_a_body_that_does_not_come():
    settings = msgspec.structs.replace(SETTINGS, request_timeout=Duration(0.02))

    async def half():
        yield b"{"
        await asyncio.Event().wait()

    async def talk(_client, app):
        reply = await call(app, "/v2/models/tiny/infer", half())
        assert (reply.status, app._bodies.held) == (408, 0)

    asked(Desk(), talk, settings=settings)


class Reply:
    """What an application sends to a client that may go."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")


async def call(app: App, path: str, pieces: Any, *, gone: asyncio.Event | None = None) -> Reply:
    """POST `pieces`, which come as they are awaited; once they have, the client goes when `gone` is set."""
    reply, waiting = Reply(), pieces.__aiter__()

    async def receive() -> dict[str, Any]:
        try:
            return {"type": "http.request", "body": await waiting.__anext__(), "more_body": True}
        except StopAsyncIteration:
            pass
        if not ended:
            ended.append(True)
            return {"type": "http.request", "body": b"", "more_body": False}
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    ended: list[bool] = []
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, reply)
    return reply


async def of(*pieces: bytes):
    for piece in pieces:
        yield piece


def test_a_client_that_goes_takes_its_request_along():
    desk, gone = Desk(patient=True), asyncio.Event()

    async def talk(_client, app):
        waiting = asyncio.create_task(call(app, "/v2/models/tiny/infer", of(json.dumps(PLAIN).encode()), gone=gone))
        while not desk.futures:
            await asyncio.sleep(0)
        assert app._bodies.held > 0
        gone.set()
        assert (await waiting).status == 0
        assert app._bodies.held == 0

    asked(desk, talk)
    assert desk.futures[0].cancelled()


def test_a_client_that_goes_before_its_body_has_come():
    desk = Desk()

    async def talk(_client, app):
        async def receive():
            return {"type": "http.disconnect"}

        reply = Reply()
        scope = {"type": "http", "method": "POST", "path": "/v2/models/tiny/infer", "headers": [], "query_string": b"",
                 "root_path": ""}  # fmt: skip
        await app(scope, receive, reply)
        assert reply.status == 0

    asked(desk, talk)
    assert desk.asked == []


def test_bodies_together_are_bounded():
    desk = Desk(patient=True)
    rows = np.zeros(((1 << 20) // 16 - 64, 4), np.float32)

    async def talk(client, app):
        content, headers = binary(rows)

        def send():
            return asyncio.create_task(client.post("/v2/models/tiny/infer", content=content, headers=headers))

        waiting = [send() for _ in range(4)]
        while len(desk.futures) < 4:
            await asyncio.sleep(0)
        refused(await send(), 503, "requests under way hold")
        for number in range(4):
            desk.answer(number)
        assert [(await one).status_code for one in waiting] == [200] * 4
        assert app._bodies.held == 0
        waiting = send()
        while len(desk.futures) < 5:
            await asyncio.sleep(0)
        desk.answer()
        assert (await waiting).status_code == 200

    asked(desk, talk)


def test_while_it_ends_requests_under_way_are_answered_and_no_others():
    desk = Desk(patient=True)

    async def talk(client, app):
        assert await app.idle(0.1)
        first = asyncio.create_task(client.post("/v2/models/tiny/infer", json=PLAIN))
        while not desk.futures:
            await asyncio.sleep(0)
        app.draining = True
        assert not await app.idle(0.001)
        refused(await client.post("/v2/models/tiny/infer", json=PLAIN), 503, "ends")
        refused(await client.get("/v2/health/ready"), 503, "ends")
        assert (await client.get("/v2/health/live")).status_code == 200
        desk.answer()
        assert (await first).status_code == 200
        assert await app.idle(10)

    asked(desk, talk)


def test_texts():
    desk = Desk(state(inputs=(TEXT,)))
    desk.patient = True

    async def talk(client, _app):
        tensor = {"name": "x", "shape": [2], "datatype": "BYTES", "data": ["a", "ß"]}
        waiting = asyncio.create_task(client.post("/v2/models/tiny/infer", json={"inputs": [tensor]}))
        while not desk.futures:
            await asyncio.sleep(0)
        desk.futures[0].set_result({"y": np.ones((2, 4), np.float32)})
        assert (await waiting).status_code == 200

    asked(desk, talk)
    assert desk.feeds[0]["x"].tolist() == ["a", "ß"]
