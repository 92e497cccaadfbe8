"""Real sockets: clients that send nothing, half, nonsense or too much, and those that go."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import closing

import msgspec
import pytest

from tests.service.desks import Desk, listening, state
from trt_layering.config import Duration, Service, Size

SECONDS = 20
HEAD = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: here\r\n"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
SMALL = Service(max_body=Size(1 << 20))


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS)


def reply(client: socket.socket) -> http.client.HTTPResponse:
    found = http.client.HTTPResponse(client, method="POST")
    found.begin()
    return found


def until_closed(client: socket.socket) -> bytes:
    with closing(client):
        parts = []
        try:
            while part := client.recv(1 << 16):
                parts.append(part)
        except ConnectionResetError:
            pass
        return b"".join(parts)


def test_many_requests_on_one_connection():
    with listening(Desk()) as port, opened(port) as client:
        for _ in range(3):
            client.sendall(WHOLE)
            found = reply(client)
            assert json.loads(found.read())["outputs"][0]["data"] == [2, 4, 6, 8]


def test_requests_that_come_before_the_last_one_is_answered():
    last = WHOLE.replace(b"Host: here", b"Host: here\r\nConnection: close")
    with listening(Desk()) as port:
        client = opened(port)
        client.sendall(WHOLE * 2 + last)
        assert until_closed(client).count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET /v2\r\n\r\n", b"GET /v2 HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n", HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"A: " + b"b" * (80 << 10), b"\0" * (80 << 10),
    ],
)  # fmt: skip
def test_what_is_no_http(sent):
    with listening(Desk()) as port:
        client = opened(port)
        client.sendall(sent)
        head, _, body = until_closed(client).partition(b"\r\n\r\n")
        if head:  # a connection that is reset may lose the reply
            assert head.split()[1] == b"400" or b"413" in head
            assert list(json.loads(body)) == ["error"]


def test_a_body_too_large_is_refused_before_it_comes():
    with listening(Desk(), SMALL) as port, opened(port) as client:
        client.sendall(HEAD + b"Content-Length: 1048577\r\n\r\n")
        assert reply(client).status == 413


def test_a_body_that_comes_all_the_same_is_taken_in_and_the_connection_serves_on():
    with listening(Desk(), SMALL) as port, opened(port) as client:
        size = 3 << 20
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % size + bytes(size))
        found = reply(client)
        assert (found.status, list(json.loads(found.read()))) == (413, ["error"])
        client.sendall(WHOLE)
        assert reply(client).status == 200


def test_a_client_that_wants_to_be_asked_for_its_body_is_not():
    with listening(Desk(state(queued=64)), SMALL) as port, opened(port) as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 1000\r\n\r\n")
        assert reply(client).status == 503


@pytest.mark.parametrize("sent", [b"", b"POST /v2", HEAD, WHOLE[:-5]])
def test_who_sends_no_more_is_cut_off(sent):
    """Also in the middle of a body, which gets a reply first."""
    settings = msgspec.structs.replace(SMALL, request_timeout=Duration(0.05))
    with listening(Desk(), settings, idle_seconds=0.05) as port:
        client = opened(port)
        client.sendall(sent)
        answer = until_closed(client)
        assert (b" 408 " in answer) == (sent == WHOLE[:-5])


def test_who_drips_a_head_is_cut_off():
    with listening(Desk(), idle_seconds=0.05) as port:
        client = opened(port)
        client.sendall(b"GET /v2 HTTP/1.1\r\n")
        try:
            for _ in range(100_000):
                client.sendall(b"a: b\r\n")
                client.settimeout(0.01)
                try:
                    if not client.recv(1):
                        break
                except TimeoutError:
                    continue
            else:
                pytest.fail("the connection lives on")
        except OSError:
            pass
        client.close()


class Told(Desk):
    """Says when a request has come."""

    def __init__(self, **options):
        super().__init__(**options)
        self.came = threading.Event()
        self.cancelled = threading.Event()

    def submit(self, *arguments, **options):
        future = super().submit(*arguments, **options)
        future.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        self.came.set()
        return future


@pytest.mark.parametrize("way", ["closed", "reset", "half"])
def test_a_client_that_goes_cancels_its_request(way):
    desk = Told(patient=True)
    with listening(desk) as port:
        client = opened(port)
        client.sendall(WHOLE)
        assert desk.came.wait(SECONDS)
        if way == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if way == "half":
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
        assert desk.cancelled.wait(SECONDS)
        client.close()
        with opened(port) as other:
            other.sendall(WHOLE)
            assert desk.came.wait(SECONDS)


def test_names_in_paths_as_they_are_sent():
    with listening(Desk()) as port:
        for path in (b"/v2/models/..", b"/v2/models/../../etc/passwd", b"/v2/models/%2e%2e/config", b"//v2", b"/./v2",
                     b"/v2/models/%2Fetc%2Fpasswd", b"/v2/models/tiny/../tiny", b"/v2/models/%", b"*"):  # fmt: skip
            with opened(port) as client:
                client.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: here\r\n\r\n")
                found = reply(client)
                assert (found.status, list(json.loads(found.read()))) == (404, ["error"]), path
