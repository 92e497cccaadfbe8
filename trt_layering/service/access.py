"""Who may ask for what: the address a service listens on, and the bearer token of those who may change it.

May import errors and the standard library. A token file that others can read, or that holds no token, and an address
that cannot be listened on are ConfigError or ServiceError; no token is ever in a message or a log.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from trt_layering.errors import ConfigError, ServiceError

_LONGEST = 4096
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{16,}")
_OPEN_TO_ALL = ("GET", "HEAD")
_INDEX = "/v2/repository/index"
_INFER = re.compile(r"/v2/models/.+/infer\Z")
_BACKLOG = 128

Verdict = Literal["yes", "no token", "wrong token", "no token is set"]


def read_token(file: str) -> bytes:
    """The token in `file`, without the space around it. ConfigError where it cannot be read, is of more than 4 KiB, can
    be read by others than its owner and group, or holds no token of 16 characters or more."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(file, f"cannot be read: {error.strerror}", "name a file with a token in it") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unusable(file, "is no file", "name a file with a token in it")
        if status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise _unusable(file, "is open to others than its owner and group", "chmod 0640 it, and make a new token")
        token = os.read(descriptor, _LONGEST + 1)
    except OSError as error:
        raise _unusable(file, f"cannot be read: {error.strerror}", "check its drive") from None
    finally:
        os.close(descriptor)
    if len(token) > _LONGEST or not _TOKEN.fullmatch(token.strip()):
        remedy = "write one line of 16 or more letters and digits, as `openssl rand -hex 32` prints"
        raise _unusable(file, "holds no token", remedy)
    return token.strip()


def _unusable(file: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"the token file {what}", where=f"service.token_file: {file}", remedy=remedy)


@dataclass
class Access:
    """Who may do what. `token` may be exchanged at any time; `everything`: not only changes need it."""

    token: bytes | None = None
    everything: bool = False

    def verdict(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Verdict:
        """Whether a request may be answered: `headers` as ASGI has them, names in lower case. Only what is known to
        change nothing is open without a token."""
        changes_nothing = method in _OPEN_TO_ALL or path == _INDEX or _INFER.match(path) is not None
        if changes_nothing and not self.everything:
            return "yes"
        if self.token is None:
            return "no token is set"
        said = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = (said[0] if len(said) == 1 else b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return "no token"
        return "yes" if hmac.compare_digest(token.strip(), self.token) else "wrong token"


def listen(host: str, port: int, field: str) -> socket.socket:
    """A socket that listens at `host` and `port`; `field` is the setting that said so. ServiceError where that address
    is taken or not of this machine."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )
        return _listening(*found[0])
    except (OSError, UnicodeError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        what = f"port {port} of {host} is in use" if taken else f"cannot listen on {host}, port {port}: {_words(error)}"
        remedy = "end what listens there, or name another port" if taken else "name an address of this machine"
        raise ServiceError(what, where=f"service.{field}", remedy=remedy) from None


def _listening(family: int, kind: int, protocol: int, _name: str, address: tuple[Any, ...]) -> socket.socket:
    """A socket of these, which says its protocol: only then asyncio has its connections send at once what is short."""
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error)


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches `listener`."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
