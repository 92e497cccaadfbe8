"""A deployment's stand-in, for what lies in front of it: requests are answered when a test says so."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from trt_layering.config import Service
from trt_layering.errors import InputError, LayeringError, UnknownModelError
from trt_layering.runtime.deployment import ModelState
from trt_layering.service.access import Access, listen
from trt_layering.service.app import App
from trt_layering.service.connections import Listener
from trt_layering.store.manifest import Value

X = Value("x", "float32", ("n", 4))
Y = Value("y", "float32", ("n", 4))
USUAL = Service()
TEXT = Value("x", "string", ("n",))


def state(name: str = "tiny", **changes: Any) -> ModelState:
    """A model that serves and has done nothing yet."""
    usual: dict[str, Any] = {
        "name": name, "version": 3, "state": "ready", "reason": "", "inputs": (X,), "outputs": (Y,),
        "backend": "onnxruntime", "wave_sizes": {}, "predicted_seconds": None, "fallbacks": (), "last_sweep": (),
    }  # fmt: skip
    zero = {field.name: 0 for field in dataclasses.fields(ModelState) if field.name not in usual}
    return ModelState(**(usual | zero | changes))


class Desk:
    """As much of `Deployment` as the routes use. Answers doubled inputs at once, or with `patient` when told to;
    `fault` is raised instead of taking a request or an order. What was asked is kept."""

    def __init__(self, *states: ModelState, patient: bool = False) -> None:
        self.states = {one.name: one for one in states or (state(),)}
        self.patient = patient
        self.fault: Exception | None = None
        self.futures: list[Future[dict[str, np.ndarray[Any, Any]]]] = []
        self.feeds: list[dict[str, Any]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.budget_bytes = 1 << 20
        self.pressure = None
        self.heartbeat = 0.0

    def model(self, name: str) -> ModelState:
        if name not in self.states:
            raise UnknownModelError(f"there is no model {name!r}")
        return self.states[name]

    def models(self) -> list[ModelState]:
        return list(self.states.values())

    def history(self) -> list[Any]:
        return []

    def submit(
        self, model: str, feeds: Mapping[str, Any], *, timeout: float | None = None, priority: float | None = None
    ) -> Future[dict[str, np.ndarray[Any, Any]]]:
        self._order("submit", model, timeout, priority)
        if list(feeds) != ["x"]:
            raise InputError("the model has no such input", where=str(list(feeds)))
        self.feeds.append(dict(feeds))
        self.futures.append(Future())
        if not self.patient:
            self.answer()
        return self.futures[-1]

    def answer(self, number: int = -1) -> None:
        self.futures[number].set_result({"y": self.feeds[number]["x"] * 2})

    def load(self, name: str, version: int | None = None) -> None:
        self.model(name)
        self._order("load", name)

    def unload(self, name: str) -> None:
        self.model(name)
        self._order("unload", name)

    def set_budget(self, nbytes: int) -> None:
        self._order("set_budget", nbytes)
        self.budget_bytes = nbytes

    def _order(self, *order: Any) -> None:
        self.asked.append(order)
        if isinstance(self.fault, (LayeringError, RuntimeError)):
            raise self.fault


@contextmanager
def listening(
    desk: Desk, settings: Service = USUAL, access: Access | None = None, *, idle_seconds: float = 30
) -> Iterator[int]:
    """`desk` behind a real socket: its port, while a thread serves it."""
    ready: Future[tuple[asyncio.AbstractEventLoop, Listener]] = Future()
    listener = listen("127.0.0.1", 0, "port")

    async def serve(computing: ThreadPoolExecutor) -> None:
        app = App(desk, list(desk.states), settings, access or Access(), computing=computing, waiting=computing)  # type: ignore[arg-type]
        server = Listener(app, listener, idle_seconds=idle_seconds)
        ready.set_result((asyncio.get_running_loop(), server))
        await server.run_until_told()

    def run() -> None:
        with ThreadPoolExecutor(2) as computing:
            asyncio.run(serve(computing))

    port = listener.getsockname()[1]
    thread = threading.Thread(target=run)
    thread.start()
    loop, server = ready.result(20)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        thread.join(20)
        assert not thread.is_alive()
