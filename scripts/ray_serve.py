"""Chains as replicas under Ray Serve: each holds one chain open within a budget of its own; how many there are, and
where, is Ray's business.

    cd scripts
    serve run ray_serve:application chain=reader budget=48MiB --name reader --route-prefix /v2/models/reader

Arguments of `application`: `chain`; `repository` ("engines"), which every node must have at that path; `budget`
(without one, everything in memory); `wave` (8), requests that a replica executes together; `replicas` (1), and
`max_replicas` for Ray to scale between the two; `gpus` (0) for each replica. Over HTTP it is the Open Inference
Protocol for that one model, as `tritonclient.http` speaks it; in Python `handle.infer.remote(feeds)`. What cannot be
answered raises our errors there, and is `{"error": ...}` over HTTP. Needs `pip install "ray[serve]"`; imports ray and
trt_layering.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

import trt_layering as tl
from trt_layering.service import description
from trt_layering.service.body import Body
from trt_layering.service.protocol import infer_answer, parse_infer, wanted_outputs
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.store.manifest import Value
from trt_layering.units import parse_size

Array = np.ndarray[Any, Any]
Feeds = Mapping[str, Array]
LIMITS = Limits()
DEFAULTS = {
    "chain": "", "repository": "engines", "budget": "", "wave": "8", "replicas": "1", "max_replicas": "", "gpus": "0"
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What the protocol tells of a model."""

    name: str
    version: int | None
    state: str
    reason: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    backend: str


class Replica:
    """One process with one open chain. It ends with the process, or when Ray takes the replica away."""

    def __init__(self, chain: str, repository: str, budget: int | None, wave: int) -> None:
        tl.share_thread_pool()
        self._chain = tl.open_chain(chain, repository=repository, budget=budget, wave=wave)
        manifest = self._chain.manifest
        self._model = Model(
            chain, None, "ready", "", self._chain.inputs, self._chain.outputs, manifest.backend.name
        )  # fmt: skip
        self._wave.set_max_batch_size(wave)

    async def infer(self, feeds: Feeds) -> dict[str, Array]:
        """What `Chain.run` returns and raises; requests that wait at the same time are a wave."""
        answer = await self._wave(feeds)
        if isinstance(answer, tl.LayeringError):
            raise answer
        return dict(answer)

    # Those that wait when the replica gets free are its next wave: there is nothing to wait for beyond that.
    @serve.batch(batch_wait_timeout_s=0.0)
    async def _wave(self, feeds: list[Feeds]) -> list[dict[str, Array] | tl.LayeringError]:
        return await asyncio.to_thread(self._answers, feeds)

    def _answers(self, feeds: Sequence[Feeds]) -> list[dict[str, Array] | tl.LayeringError]:
        """In a wave; where a request does not fit, which is found before any work, each by itself."""
        try:
            return [*self._chain.run_many(feeds, wave=len(feeds))]
        except tl.InputError:
            return [self._answer(one) for one in feeds]
        except tl.LayeringError as error:
            return [error] * len(feeds)

    def _answer(self, feeds: Feeds) -> dict[str, Array] | tl.LayeringError:
        try:
            return self._chain.run(feeds)
        except tl.LayeringError as error:
            return error

    def stats(self) -> dict[str, Any]:
        """The chain's statistics, of whichever replica answers."""
        return self._chain.stats()

    async def __call__(self, request: Request) -> Response:
        """The Open Inference Protocol below the route: infer, ready and metadata."""
        wanted = (request.method, request.url.path.removeprefix(request.scope.get("root_path", "")).rstrip("/"))
        try:
            if wanted == ("POST", "/infer"):
                return await self._infer(request)
            if wanted == ("GET", "/ready"):
                return Response()
            if wanted == ("GET", ""):
                return _json(description.model_metadata(self._model))  # type: ignore[arg-type]
            return _json({"error": "there are infer, ready, and the model's metadata"}, 404)
        except tl.LayeringError as error:
            return _json({"error": str(error)}, _status(error))

    async def _infer(self, request: Request) -> Response:
        body = Body(request.headers, LIMITS)
        async for piece in request.stream():
            body.add(piece)
        asked = parse_infer(body.finish(), request.headers, LIMITS)
        wanted = wanted_outputs(asked, self._model.outputs)
        found = await self.infer(asked.feeds)
        answer = infer_answer(
            asked, wanted, found, self._model.name, self._model.version, request.headers.get("accept-encoding")
        )
        return Response(answer.body, headers=dict(answer.headers))


def _json(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


def _status(error: tl.LayeringError) -> int:
    if isinstance(error, ProtocolError):
        return error.status
    if isinstance(error, tl.UsageError):
        return 400
    return 503 if isinstance(error, (tl.ReadError, tl.MemoryLimitError, tl.ClosedError)) else 500


def application(arguments: Mapping[str, str]) -> Any:
    """A Ray Serve application of one chain, for `serve run`, a Serve config file, or `serve.run`. Raises UsageError,
    StoreError and BudgetError here, before anything is started."""
    unknown = arguments.keys() - DEFAULTS.keys()
    if unknown or not arguments.get("chain"):
        what = f"there is no argument {min(unknown)!r}" if unknown else "no chain was named"
        raise tl.UsageError(what, where="application", remedy=f"the arguments are {', '.join(DEFAULTS)}")
    given = {**DEFAULTS, **arguments}
    budget = parse_size(given["budget"], what="budget") if given["budget"] else None
    wave, gpus = _number(given, "wave", 1), _number(given, "gpus", 0)
    needs = tl.footprint(given["chain"], repository=given["repository"], wave=wave)
    if budget is not None and budget < needs.floor:
        raise tl.BudgetError(
            f"the budget of {budget} bytes is under the floor of {needs.floor}", floor=needs.floor, parts={},
            where="budget", remedy="give it more, or make waves smaller",
        )  # fmt: skip
    # Ray places replicas by the memory they ask for; what Python and the libraries take comes on top.
    actor = {"memory": budget or needs.resident, "num_gpus": gpus}
    deployment = serve.deployment(Replica).options(
        name=given["chain"], ray_actor_options=actor, max_ongoing_requests=2 * wave, max_queued_requests=64,
        **_scaling(given),
    )  # fmt: skip
    return deployment.bind(given["chain"], str(Path(given["repository"]).resolve()), budget, wave)


def _scaling(given: Mapping[str, str]) -> dict[str, Any]:
    replicas = _number(given, "replicas", 1)
    if not given["max_replicas"]:
        return {"num_replicas": replicas}
    return {"autoscaling_config": {"min_replicas": replicas, "max_replicas": _number(given, "max_replicas", replicas)}}


def _number(given: Mapping[str, str], name: str, least: int) -> int:
    text = str(given[name])
    if not text.isdecimal() or int(text) < least:
        raise tl.UsageError(f"{name} is {text!r}", where="application", remedy=f"give a whole number from {least} on")
    return int(text)
