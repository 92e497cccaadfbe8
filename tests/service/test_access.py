"""Tokens, who needs one, and the addresses a service listens on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.errors import ConfigError, ServiceError
from trt_layering.service.access import Access, is_loopback, listen, read_token

TOKEN = b"0123456789abcdef"


def written(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_token_is_read(tmp_path, mode):
    assert read_token(written(tmp_path / "token", b" " + TOKEN + b"\n", mode)) == TOKEN


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o601, 0o602])
def test_a_token_that_others_know_or_change_is_none(tmp_path, mode):
    with pytest.raises(ConfigError, match="open to others") as caught:
        read_token(written(tmp_path / "token", TOKEN, mode))
    assert TOKEN.decode() not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"short", b"two words of sixteen", TOKEN + b"\0", b"x" * 5000, b"\xff" * 20]
)
def test_a_file_without_a_token(tmp_path, content):
    with pytest.raises(ConfigError, match="holds no token") as caught:
        read_token(written(tmp_path / "token", content))
    assert "service.token_file" in caught.value.where
    assert caught.value.exit_status == 2


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, words in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "is no file"),
        (tmp_path / "pipe", "is no file"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_token(str(path))


PATHS = st.text("/v2modelsrpitoryinfrlauc.%{}", max_size=40) | st.sampled_from(
    ["/v2/repository/models/a/load", "/v2/repository/budget", "/v2/models/a/infer", "/v2/repository/models/infer",
     "/v2/repository/index", "/v2/repository/index/../models/a/load", "/v2/models/a/infer\n"]
)  # fmt: skip


@given(st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]), PATHS, st.booleans())
def test_what_may_change_something_needs_the_token(method, path, everything):
    """Without a token: what only reads, inference and the index; nothing where others reach the service."""
    access = Access(TOKEN, everything)
    open_to_all = method in ("GET", "HEAD") or path == "/v2/repository/index"
    open_to_all |= path.startswith("/v2/models/") and path.endswith("/infer")
    assert (access.verdict(method, path, []) == "yes") == (open_to_all and not everything)
    assert access.verdict(method, path, [(b"authorization", b"Bearer " + TOKEN)]) == "yes"


@given(st.binary(max_size=40))
def test_no_other_token_will_do(said):
    verdict = Access(TOKEN).verdict("POST", "/v2/repository/budget", [(b"authorization", b"Bearer " + said)])
    assert verdict == ("yes" if said.strip() == TOKEN else "wrong token")


@pytest.mark.parametrize(
    ("headers", "verdict"),
    [
        ([], "no token"),
        ([(b"authorization", b"Basic " + TOKEN)], "no token"),
        ([(b"authorization", TOKEN)], "no token"),
        ([(b"authorization", b"Bearer " + TOKEN)] * 2, "no token"),
        ([(b"authorization", b"Bearer ")], "wrong token"),
        ([(b"authorization", b"bearer  " + TOKEN)], "yes"),
    ],
)
def test_forms_of_the_header(headers, verdict):
    assert Access(TOKEN).verdict("POST", "/v2/repository/budget", headers) == verdict


def test_a_service_without_a_token_changes_nothing():
    headers = [(b"authorization", b"Bearer ")]
    assert Access().verdict("POST", "/v2/repository/budget", headers) == "no token is set"
    assert Access(None, True).verdict("GET", "/", headers) == "no token is set"


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0, "port") as taken:
        port = taken.getsockname()[1]
        assert is_loopback(taken)
        with pytest.raises(ServiceError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            listen("127.0.0.1", port, "metrics_port")
    assert caught.value.where == "service.metrics_port"
    assert caught.value.exit_status == 1
    listen("127.0.0.1", port, "port").close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "a" * 100, "nosuchhost.invalid", "\0"])
def test_an_address_that_is_not_of_this_machine(host):
    with pytest.raises(ServiceError, match="cannot listen"):
        listen(host, 0, "port")


def test_which_addresses_are_loopback():
    for host, loopback in (("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("0.0.0.0", False)):
        with listen(host, 0, "port") as listening:
            assert is_loopback(listening) == loopback
    if socket.has_ipv6:
        try:
            listening = listen("::1", 0, "port")
        except ServiceError:
            return
        with listening:
            assert is_loopback(listening)
