"""The routes of a service: what is asked over HTTP, put to the deployment, and its answer sent back.

May import starlette and all of the service but `serving`. Every error is a reply, `{"error": …}`; nothing from a
request is a name of a file: models are looked up among the deployment's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router

from trt_layering.config import Service
from trt_layering.errors import UnknownModelError
from trt_layering.runtime.deployment import Deployment, ModelState
from trt_layering.service import description, protocol
from trt_layering.service.access import Access
from trt_layering.service.bodies import Bodies, Gone, Hold, gone
from trt_layering.service.body import HEADER_LENGTH
from trt_layering.service.encoding import Buffer
from trt_layering.service.page import HEADERS, page
from trt_layering.service.refusals import Limits
from trt_layering.service.replies import LATER, SOON, Refusal, as_json, refusal
from trt_layering.units import parse_size
from trt_layering.words import quoted

Answer = TypeVar("Answer")
Feeds = Mapping[str, np.ndarray[Any, Any]]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_TOGETHER = 4
"""How many bodies of the largest size all requests under way may hold."""
_ORDERS = Limits(max_body=64 << 10)
"""What a request that is no inference may hold."""
_QUICK = 64 << 10
"""Bytes of JSON, or of texts, that are read in about a millisecond: more are read beside the event loop."""
_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class App:
    """One ASGI application in front of `deployment`, which its caller owns. Of one event loop.

    `names` are the models for which nothing has to be looked up on the drive. `computing` executes what takes long:
    reading and writing large JSON; `waiting`, what may wait for the drive. Once `draining` is set, requests for
    inference are told to come again.
    """

    def __init__(
        self, deployment: Deployment, names: Collection[str], settings: Service, access: Access, *,
        computing: Executor, waiting: Executor,
    ) -> None:  # fmt: skip
        self.draining = False
        self._access = access
        self._deployment = deployment
        self._names = frozenset(names)
        self._settings = settings
        self._computing = computing
        self._waiting = waiting
        self._limits = Limits(max_body=int(settings.max_body))
        self._bodies = Bodies(_TOGETHER * int(settings.max_body))
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._router = Router(self._routes(), redirect_slashes=False, default=_no_route)

    def _routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        routes = [Route(f"{at}/infer", self._infer, methods=["POST"]) for at in _with_versions(model)]
        for name, endpoint in (("", self._metadata), ("/ready", self._model_ready), ("/config", self._config)):
            routes += [Route(f"{at}{name}", endpoint) for at in _with_versions(model)]
        return [
            Route("/v2/models/stats", self._all_stats),
            *routes,
            *(Route(f"{at}/stats", self._stats) for at in _with_versions(model)),
            Route("/v2", self._server),
            Route("/v2/health/live", self._live),
            Route("/v2/health/ready", self._ready),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self._load, methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", self._unload, methods=["POST"]),
            Route("/v2/repository/budget", self._budget, methods=["POST"]),
            Route("/", self._page),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its first line to the last byte of its reply."""
        if scope["type"] != "http":
            return
        self._under_way += 1
        self._idle.clear()
        try:
            await self._guarded(scope, receive, send)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # the router then raises, where a method is not allowed
        begun = False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            require(self._access, scope)
            await self._router(scope, receive, sending)
        except Gone:
            return
        except asyncio.CancelledError:
            ended = Refusal(503, "the service ends", retry_after=LATER)
            if not begun:
                await ended.reply()(scope, receive, send)
        except Exception as error:
            told = refusal(error)
            if not begun:
                await told.reply()(scope, receive, send)

    async def idle(self, seconds: float) -> bool:
        """Whether within `seconds` no request is under way."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    # ------------------------------------------------------------------------------------------------- inference

    async def _infer(self, request: Request) -> Response:
        begin = asyncio.get_running_loop().time()
        seconds = float(self._settings.request_timeout)
        state = await self._serving(request)
        if state.queued >= self._settings.max_queue:
            words = f"{state.queued} requests wait for {state.name}, and no more may"
            raise Refusal(503, words, retry_after=SOON)
        with self._bodies.hold() as hold:
            body = await self._bodies.read(hold, request.headers, request.receive, self._limits, seconds)
            asked, wanted = await self._asked(body, request.headers, state, hold)
            del body
            left = seconds - (asyncio.get_running_loop().time() - begin)
            outputs = await self._outputs(asked, state.name, request.receive, left)
            return await self._answer(asked, wanted, outputs, state, request.headers)

    async def _serving(self, request: Request) -> ModelState:
        """The model that a request for inference names. Refusal where it serves none now."""
        if self.draining:
            raise Refusal(503, "the service ends", retry_after=LATER, headers={"Connection": "close"})
        state = await self._model(request)
        if state.state != "ready":
            why = f": {state.reason}" if state.reason else ""
            raise Refusal(503, f"model {state.name} is {state.state}{why}", retry_after=LATER)
        return state

    async def _asked(
        self, body: Buffer, headers: Mapping[str, str], state: ModelState, hold: Hold
    ) -> tuple[protocol.InferRequest, Sequence[protocol.WantedOutput]]:
        """What the body asks of the model, checked before the model works."""

        def read() -> tuple[protocol.InferRequest, Sequence[protocol.WantedOutput]]:
            asked = protocol.parse_infer(body, headers, self._limits)
            return asked, protocol.wanted_outputs(asked, state.outputs)

        said = headers.get(HEADER_LENGTH, "")
        quick = "content-encoding" not in headers and (int(said) if said.isascii() and said.isdigit() else len(body))
        texts = any(value.dtype == "string" for value in state.inputs)
        found = read() if 0 < quick <= _QUICK and not texts else await _by(self._computing, read)
        hold.take(max(0, sum(array.nbytes for array in found[0].feeds.values()) - len(body)))
        return found

    async def _outputs(self, asked: protocol.InferRequest, model: str, receive: Receive, seconds: float) -> Feeds:
        """What the model answers within `seconds`; whoever has gone or waits no longer waits in no queue either."""
        seconds = min(seconds, asked.timeout or seconds)
        future = self._deployment.submit(model, asked.feeds, timeout=seconds, priority=_priority(asked))
        answer, left = asyncio.wrap_future(future), asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((answer, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if left.done():
                raise Gone
            raise Refusal(504, f"model {model} did not answer within {seconds:.3g} s")
        finally:
            left.cancel()
            answer.cancel()

    async def _answer(
        self, asked: protocol.InferRequest, wanted: Sequence[protocol.WantedOutput], outputs: Feeds, state: ModelState,
        headers: Mapping[str, str],
    ) -> Response:  # fmt: skip
        """The reply with what is `wanted` of `outputs`."""
        encoding = headers.get("accept-encoding")

        def write() -> protocol.Answer:
            return protocol.infer_answer(asked, wanted, outputs, state.name, state.version, encoding)

        slow = sum(outputs[one.name].nbytes for one in wanted if encoding or not one.binary)
        answer = await _by(self._computing, write) if slow > _QUICK else write()
        return Response(answer.body, headers=dict(answer.headers))

    # ---------------------------------------------------------------------------------------- what there is, and how

    async def _model(self, request: Request) -> ModelState:
        """The model that the path names. UnknownModelError where there is none, or not in the version it names."""
        name, version = _name(request), request.path_params.get("version")
        if name in self._names:
            state = self._deployment.model(name)
        else:
            state = await _by(self._waiting, lambda: self._deployment.model(name))
        if version is not None and (not _VERSION.fullmatch(version) or int(version) != state.version):
            here = "no version" if state.version is None else f"version {state.version}"
            raise UnknownModelError(f"model {name} has no version {quoted(version)}; {here} is loaded")
        return state

    async def _server(self, _request: Request) -> Response:
        return as_json(description.server_metadata())

    async def _live(self, _request: Request) -> Response:
        return as_json({"live": True})

    async def _ready(self, _request: Request) -> Response:
        if self.draining or not any(self._deployment.model(name).state == "ready" for name in self._names):
            raise Refusal(503, "the service ends" if self.draining else "no model is ready", retry_after=LATER)
        return as_json({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        state = await self._serving(request)
        return as_json({"name": state.name, "ready": True})

    async def _metadata(self, request: Request) -> Response:
        return as_json(description.model_metadata(await self._model(request)))

    async def _config(self, request: Request) -> Response:
        return as_json(description.model_config(await self._model(request)))

    async def _stats(self, request: Request) -> Response:
        return as_json(description.statistics([await self._model(request)]))

    async def _all_stats(self, _request: Request) -> Response:
        return as_json(description.statistics(await _by(self._waiting, self._deployment.models)))

    async def _page(self, _request: Request) -> Response:
        return HTMLResponse(await _by(self._waiting, lambda: page(self._deployment)), headers=dict(HEADERS))

    # ------------------------------------------------------------------------------------------------------ orders

    async def _order(self, request: Request) -> bytes:
        """The body of a request that is no inference."""
        with self._bodies.hold() as hold:
            seconds = float(self._settings.request_timeout)
            return bytes(await self._bodies.read(hold, request.headers, request.receive, _ORDERS, seconds))

    async def _index(self, request: Request) -> Response:
        ready = description.parse_index(await self._order(request), _ORDERS)
        models = await _by(self._waiting, self._deployment.models)
        return as_json(description.repository_index(models, ready=ready))

    async def _load(self, request: Request) -> Response:
        name = _name(request)
        description.check_load(await self._order(request), _ORDERS)
        await _by(self._waiting, lambda: self._deployment.load(name))
        return as_json({})

    async def _unload(self, request: Request) -> Response:
        name = _name(request)
        description.check_unload(await self._order(request), _ORDERS)
        await _by(self._waiting, lambda: self._deployment.unload(name))
        return as_json({})

    async def _budget(self, request: Request) -> Response:
        wanted = protocol.decoded(await self._order(request), _BUDGET, _ORDERS).memory_budget
        budget = parse_size(wanted, what="memory_budget")
        await _by(self._waiting, lambda: self._deployment.set_budget(budget))
        return as_json({"memory_budget": self._deployment.budget_bytes})


class _Budget(msgspec.Struct, forbid_unknown_fields=True):
    memory_budget: str | int


_BUDGET = msgspec.json.Decoder(_Budget)


def require(access: Access, scope: Scope) -> None:
    """Refusal, 401 or 403, unless who sent the request may have it answered."""
    verdict = access.verdict(scope["method"], scope["path"], scope["headers"])
    if verdict == "no token is set":
        raise Refusal(403, "this needs a token, and the service has none; set service.token_file")
    if verdict != "yes":
        words = "this needs the service's token: Authorization: Bearer TOKEN"
        raise Refusal(401, words if verdict == "no token" else "the token is another", headers=_CHALLENGE)


def guarded(access: Access, app: Application) -> Application:
    """`app` for those whom `access` lets in."""

    async def inside(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            require(access, scope)
        except Refusal as told:
            await told.reply()(scope, receive, send)
        else:
            await app(scope, receive, send)

    return inside


async def _by(threads: Executor, work: Callable[[], Answer]) -> Answer:
    """What `work` returns, which one of `threads` does."""
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _name(request: Request) -> str:
    """The model that the path names, if it is a name that a model could have: nothing else reaches the deployment."""
    name: str = request.path_params["model"]
    if not _NAME.fullmatch(name):
        raise UnknownModelError(
            f"there is no model {quoted(name)}", remedy="POST /v2/repository/index tells which there are"
        )
    return name


def _priority(asked: protocol.InferRequest) -> float | None:
    """The deployment's priority, greater for what is more urgent, of the client's, of which 1 is the most urgent."""
    return None if asked.priority is None else 1.0 / asked.priority


def _with_versions(model: str) -> tuple[str, str]:
    return f"{model}/versions/{{version}}", model


async def _no_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise Refusal(404, f"there is nothing at {quoted(scope['path'])}")
