"""`trt-layering serve` as a process, and plain requests to it. Whatever is waited for has `SECONDS`, then the test
fails with the log."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import chains, checkout
from trt_layering import building

SECONDS = 60
WIDTH = 256
TOKEN = "0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
_LISTENING = re.compile(r"listening service=127\.0\.0\.1:(\d+)(?: metrics=127\.0\.0\.1:(\d+))?")


def build(folder: Path, name: str, seed: int = 0) -> building.Built:
    """A version more of the chain `name` in `folder`; "x" of n x 256 to "y"."""
    with chains.in_this_process(streamed_from=1):
        model = chains.saved(chains.layers(6, width=WIDTH, seed=seed), folder / f"{name}-{seed}.onnx")
        return building.build(
            model, name=name, repository=folder, backend="onnxruntime", block_size=300_000,
            shapes={"x": {"min": (1, WIDTH), "opt": (3, WIDTH), "max": (8, WIDTH)}},
        )  # fmt: skip


def configured(folder: Path, *models: str, shares: dict[str, int] | None = None, **service: Any) -> Path:
    """A deployment's file in `folder`, with a token; any ports that are free unless `service` says others. With the
    `shares` of all models, these are the budget."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(f"{TOKEN}\n")
    said = {"port": 0, "metrics_port": 0, "token_file": str(token), **service}
    entries = [{"name": name, "onnx": name} | ({"share": shares[name]} if shares else {}) for name in models]
    written = {"repository": str(folder), "service": said, "models": entries}
    file = folder / f"{'-'.join(models) or 'none'}.yaml"
    file.write_text(json.dumps(written | ({"memory_budget": sum(shares.values())} if shares else {})))
    return file


class Process:
    """One that serves."""

    def __init__(self, file: Path, **environment: str) -> None:
        self._started = subprocess.Popen(
            [sys.executable, "-m", "trt_layering", "serve", str(file)],
            cwd=checkout.ROOT, env=os.environ | environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._started.stderr
        for line in self._started.stderr:
            with self._more:
                self._lines.append(line)
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def said(self, words: str, times: int = 1) -> str:
        """The log, once `words` stand in it so many times."""
        with self._more:
            found = self._more.wait_for(lambda: self.log.count(words) >= times or self._ended, SECONDS)
        assert found, f"not said: {words}\n{self.log}"
        assert self.log.count(words) >= times, f"ended without saying: {words}\n{self.log}"
        return self.log

    def ready(self) -> Process:
        self.said("serving models=")
        return self

    @property
    def port(self) -> int:
        found = _LISTENING.search(self.said("listening service="))
        assert found
        return int(found[1])

    @property
    def metrics_port(self) -> int:
        found = _LISTENING.search(self.said("listening service="))
        assert found
        return int(found[2])

    def signal(self, number: signal.Signals) -> None:
        self._started.send_signal(number)

    def status(self) -> int:
        """The status with which it ends."""
        try:
            status = self._started.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end\n{self.log}")
        self._reader.join(SECONDS)
        assert "Traceback" not in self.log
        return status

    def kill(self) -> None:
        self._started.kill()
        self._started.wait(SECONDS)
        self._reader.join(SECONDS)
        assert self._started.stderr
        self._started.stderr.close()


@contextmanager
def serving(file: Path, **environment: str) -> Iterator[Process]:
    """A process that serves `file`, which is gone in the end, however it went."""
    process = Process(file, **environment)
    try:
        yield process
    finally:
        process.kill()


def ask(
    port: int, method: str, path: str, content: bytes | dict[str, Any] = b"", headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """A reply's status, and what its JSON says."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        body = json.dumps(content).encode() if isinstance(content, dict) else content
        client.request(method, path, body, headers or {})
        reply = client.getresponse()
        said = reply.read()
        return reply.status, json.loads(said) if said[:1] in (b"{", b"[") else said.decode()
    finally:
        client.close()


def question(rows: int = 3, seed: int = 0) -> dict[str, Any]:
    """An inference request in JSON, of what `chains.feed` gives."""
    array = chains.feed(rows, seed, WIDTH)["x"]
    return {"inputs": [{"name": "x", "shape": list(array.shape), "datatype": "FP32", "data": array.ravel().tolist()}]}


def infer(port: int, model: str, seed: int = 0) -> tuple[int, Any]:
    """A reply's status, and the output "y" or the error's words."""
    status, said = ask(port, "POST", f"/v2/models/{model}/infer", question(seed=seed))
    if status != 200:
        return status, said["error"]
    [output] = said["outputs"]
    return status, np.array(output["data"], np.float32).reshape(output["shape"])
