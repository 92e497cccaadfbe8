"""A service under measurement: started and stopped, its memory, what its metrics say, what it should answer.

Imports trt_layering only in child processes and to read configurations. A service that does not come up, or does not
end when it is asked to, is a ServiceFailed with the end of its log.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import chains
import load
import measure
import numpy as np
import yaml

from trt_layering import config

START_SECONDS = 120.0
STEP = 0.05
LOG = Path(".bench/serve/service.log")


class ServiceFailed(RuntimeError):
    """The service did not do what a service does; with the end of what it logged."""


class Service:
    """A service of the deployment in `path`, in a process of its own from `start` to `stop`; or one that runs, as
    process `pid`, at the same addresses."""

    def __init__(self, path: Path, *, pid: int | None = None) -> None:
        self.path, self.pid = path, pid
        deployment = config.load(path).deployment
        self.models = deployment.models
        self.repository = deployment.repository
        self.url = f"{deployment.service.host}:{deployment.service.port}"
        self.metrics_port = deployment.service.metrics_port
        self.drain = float(deployment.service.drain)
        token = deployment.service.token_file
        self.token = Path(token).read_text().strip() if token else None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def client(self, timeout: float = 60.0) -> load.TritonClient:
        return load.TritonClient(self.url, token=self.token, timeout=timeout)

    def start(self) -> None:
        """Returns when a model serves and none is loading any more."""
        command = [sys.executable, "-m", "trt_layering", "serve", str(self.path)]
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with open(LOG, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = self._process.pid
        self.wait_ready(START_SECONDS)

    def wait_ready(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        client = self.client(5.0)
        while not self._is_ready(client):
            if self._process is not None and self._process.poll() is not None:
                raise ServiceFailed(f"the service ended with {self._process.returncode}\n{self.log()}")
            if time.monotonic() > end:
                log = self.log()
                self.stop()
                raise ServiceFailed(f"the service was not ready after {seconds:.0f} s\n{log}")
            time.sleep(STEP)
        client.close()

    def _is_ready(self, client: load.TritonClient) -> bool:
        with suppress(load.Failed):
            return client.ready() and "LOADING" not in self.states().values()
        return False

    def states(self) -> dict[str, str]:
        """By model, what the repository's index says of its state."""
        connection = http.client.HTTPConnection(self.url, timeout=5)
        try:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            connection.request("POST", "/v2/repository/index", b"", headers)
            reply = connection.getresponse()
            index = json.loads(reply.read()) if reply.status == 200 else []
        except OSError:
            return {"": "LOADING"}
        finally:
            connection.close()
        served = {model.name for model in self.models}
        return {entry["name"]: entry.get("state", "") for entry in index if entry["name"] in served}

    def stop(self) -> None:
        """Ends the service by SIGTERM; it may take its drain time and ten seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(self.drain + 10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServiceFailed(f"the service did not end by SIGTERM\n{self.log()}") from None

    def reload(self) -> None:
        """Has the service read its file again."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGHUP)

    def log(self) -> str:
        """The end of what the service wrote, if it was started here."""
        return LOG.read_text(errors="replace")[-4000:] if LOG.exists() else ""

    def reset_peak(self) -> None:
        """Lets `usage().peak` count from here on, where we may say so."""
        with suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def usage(self) -> measure.Usage | None:
        """Memory of the process, in bytes; None where its id is not known."""
        return None if self.pid is None else measure.usage(self.pid)

    def metrics(self) -> dict[str, dict[str, float]]:
        """By name of a sample, by model ("" for those of the process), its value; buckets as NAME_bucket:LIMIT. Empty
        where there is no port for metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        if not self.metrics_port:
            return {}
        connection = http.client.HTTPConnection(self.url.rpartition(":")[0], self.metrics_port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        if reply.status != 200:
            raise ServiceFailed(f"the metrics were answered with {reply.status}: {text[:200]}\n{self.log()}")
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                limit = sample.labels.get("le")
                name = sample.name if limit is None else f"{sample.name}:{limit}"
                found.setdefault(name, {})[sample.labels.get("model", "")] = sample.value
        return found


def mean_waves(before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Requests a sweep between two readings of the metrics, by model; none for a model without a sweep."""
    sums, counts = "trt_layering_wave_size_sum", "trt_layering_wave_size_count"

    def grown(name: str, model: str) -> float:
        return after.get(name, {}).get(model, 0.0) - before.get(name, {}).get(model, 0.0)

    return {model: grown(sums, model) / grown(counts, model) for model in after.get(counts, {}) if grown(counts, model)}


def subjects(
    service: Service,
    *,
    inputs: int,
    compared: bool,
    weights: Mapping[str, float] | None = None,
    answers: Path | None = None,
    tolerance: float = 1e-5,
) -> list[load.Subject]:
    """The models of the deployment with `inputs` seeded inputs each, and, if `compared`, what a chain with everything
    in memory answers to them: computed once, in a process of its own, or read from `answers`/NAME.npz, if given."""
    made = []
    for model in service.models:
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "answers.npz"
            shapes = {name: list(shape.opt) for name, shape in model.shapes.items()}
            measure.call(
                answer, name=model.name, repository=service.repository, shapes=shapes, inputs=inputs, file=str(file),
                run=compared and answers is None,
            )  # fmt: skip
            feeds, expected = _unpacked(file, inputs)
        if answers is not None:
            expected = _unpacked(answers / f"{model.name}.npz", inputs)[1]
        made.append(
            load.Subject(
                model.name,
                feeds,
                expected if compared else None,
                (weights or {}).get(model.name, model.priority),
                None if model.deadline is None else float(model.deadline),
                tolerance,
            )
        )
    return made


def answer(name: str, repository: str, shapes: Mapping[str, Sequence[int]], inputs: int, file: str, run: bool) -> None:
    """Child function: writes `inputs` seeded inputs of a chain to `file`, as in/NUMBER/NAME, and if `run` what it
    answers with everything in memory, as out/NUMBER/NAME."""
    import trt_layering as tl
    from trt_layering.inputs import seeded
    from trt_layering.store.manifest import read_manifest, resolve

    tl.share_thread_pool()
    manifest = read_manifest(resolve(Path(repository), name))
    asked = [seeded(manifest.inputs, shapes, seed) for seed in range(inputs)]
    found = {f"in/{number}/{key}": array for number, feeds in enumerate(asked) for key, array in feeds.items()}
    if run:
        with tl.open_chain(name, repository=repository) as chain:
            for number, feeds in enumerate(asked):
                found |= {f"out/{number}/{key}": array for key, array in chain.run(feeds).items()}
    np.savez(file, **found)  # type: ignore[arg-type]


def _unpacked(file: Path, inputs: int) -> tuple[list[load.Feeds], list[load.Feeds]]:
    with np.load(file) as stored:
        arrays = {key: stored[key] for key in stored.files}

    def part(begin: str) -> load.Feeds:
        return {key[len(begin) :]: array for key, array in arrays.items() if key.startswith(begin)}

    return [part(f"in/{number}/") for number in range(inputs)], [part(f"out/{number}/") for number in range(inputs)]


def imports_bytes() -> int:
    """Resident bytes of a process that has imported what a service imports, and does nothing."""
    modules = ["numpy", "onnxruntime", "starlette.applications", "uvicorn", "prometheus_client", "trt_layering.cli",
               "trt_layering.service.serving", "trt_layering.backends.onnxruntime.runtime"]  # fmt: skip
    return int(measure.call(measure.imported, modules=modules))


def write_config(path: Path, models: Sequence[Mapping[str, Any]], budget: int, **service: Any) -> Path:
    """A deployment over the bench's chains, on two ports that were free a moment ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "repository": str(chains.REPOSITORY), "memory_budget": budget, "models": [dict(model) for model in models],
        "service": {"port": free_port(), "metrics_port": free_port(), **service},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
