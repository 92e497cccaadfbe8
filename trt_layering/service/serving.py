"""`trt-layering serve`: a deployment, its HTTP and its metrics in one process, from its start to its end.

May import uvicorn and everything of the service. A configuration that cannot be used is ConfigError; an address that is
taken, ServiceError. Once it serves, nothing ends it but a signal: SIGTERM or SIGINT lets requests under way end, a
second one does not; SIGHUP has the file read again, and one that is broken changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from types import FrameType
from typing import NoReturn

import msgspec

from trt_layering import config
from trt_layering.errors import ConfigError, LayeringError
from trt_layering.runtime.deployment import Deployment
from trt_layering.service.access import Access, is_loopback, listen, read_token
from trt_layering.service.app import App, guarded
from trt_layering.service.connections import Listener
from trt_layering.service.logs import event
from trt_layering.service.metrics import metrics_app
from trt_layering.service.replies import words
from trt_layering.service.systemd import Notifier, Watchdog, watchdog_seconds

log = logging.getLogger("trt_layering")

_COMPUTING, _WAITING = 2, 8
"""Threads that read and write large JSON, and those that may wait for the drive."""
_BETWEEN_LOOKS = 0.25
_STARTING_SECONDS = 60.0
_CLOSING_SECONDS = 30.0
"""What closing models may take, once no request is under way, before the process ends all the same."""
_FAILED, _INTERRUPTED = 1, 130
_READ_AGAIN = ("memory_budget", "service.token_file")


def serve(file: str, repository: str | None = None) -> None:
    """Serve the deployment in `file` (`repository` in the place of its own) until a signal ends it. Raises ConfigError,
    ServiceError, and what opening a deployment does. For the main thread of a process that does nothing else."""
    with _ending_quietly():
        read = _read(file, repository)
        service = read.deployment.service
        access = Access(_token(service))
        with contextlib.ExitStack() as opened:
            listening = opened.enter_context(listen(service.host, service.port, "port"))
            access.everything = not is_loopback(listening)
            if access.everything and access.token is None:
                raise _needs_token(read)
            scraped = None
            if service.metrics_port is not None:
                scraped = opened.enter_context(listen(service.host, service.metrics_port, "metrics_port"))
            deployment = opened.enter_context(contextlib.closing(Deployment(read.deployment)))
            asyncio.run(_Serving(read, repository, access, deployment).run(listening, scraped))


def _read(file: str, repository: str | None) -> config.Config:
    """The configuration as it is to be served. ConfigError where it has no models."""
    read = config.load(file)
    if not read.deployment.models:
        raise ConfigError(f"{file} has no models", where=file, remedy="add one under models:")
    if repository is None:
        return read
    changed = msgspec.structs.replace(read.deployment, repository=repository)
    return dataclasses.replace(read, deployment=changed)


def _token(service: config.Service) -> bytes | None:
    return None if service.token_file is None else read_token(service.token_file)


def _needs_token(read: config.Config) -> ConfigError:
    host = read.deployment.service.host
    what = f"{host} can be reached from other machines, and there is no token that they have to know"
    line = read.lines.get("service.host", 1)
    remedy = "set service.token_file, or let service.host be 127.0.0.1"
    return ConfigError(what, where=f"{read.path}:{line}: service.host", remedy=remedy)


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """While inside, and nothing else handles them, SIGTERM and SIGINT leave with status 0: nothing was served yet, or
    nothing any more."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    before = {one: signal.signal(one, leave) for one in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _Serving:
    """One service while it serves, on the event loop of the main thread."""

    def __init__(self, read: config.Config, repository: str | None, access: Access, deployment: Deployment) -> None:
        self._config = read
        self._repository = repository
        self._access = access
        self._deployment = deployment
        self._notifier = Notifier.of()
        self._names = [model.name for model in read.deployment.models]
        self._computing = ThreadPoolExecutor(_COMPUTING, "trt-layering-json")
        self._waiting = ThreadPoolExecutor(_WAITING, "trt-layering-orders")
        self._telling = ThreadPoolExecutor(1, "trt-layering-systemd")
        self._asked_to_end = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    async def run(self, listening: socket.socket, scraped: socket.socket | None) -> None:
        """From the first request to the last."""
        service = self._config.deployment.service
        app = App(
            self._deployment, self._names, service, self._access, computing=self._computing, waiting=self._waiting
        )
        seconds = float(service.request_timeout)
        listeners = [Listener(app, listening, idle_seconds=seconds)]
        if scraped is not None:
            scrapes = guarded(self._access, metrics_app(self._deployment))
            listeners.append(Listener(scrapes, scraped, idle_seconds=seconds))
        self._handle_signals()
        self._deployment.start()
        watchdog = Watchdog(self._notifier, watchdog_seconds(), lambda: self._deployment.heartbeat)
        watchdog.start()
        running = [asyncio.create_task(one.run_until_told()) for one in listeners]
        telling = asyncio.create_task(self._tell_states())
        event(log, logging.INFO, "listening", service=_address(listening), metrics=scraped and _address(scraped))
        await asyncio.wait(
            [asyncio.create_task(self._asked_to_end.wait()), *running], return_when=asyncio.FIRST_COMPLETED
        )
        telling.cancel()
        await self._end(app, listeners)
        await asyncio.gather(*running)
        watchdog.close()
        event(log, logging.INFO, "ended")

    async def _end(self, app: App, listeners: Sequence[Listener]) -> None:
        """Let requests under way end, as long as they may; then close the models, and no more connections."""
        seconds = float(self._config.deployment.service.drain)
        app.draining = True
        bound = threading.Timer(seconds + _CLOSING_SECONDS, _give_up)
        bound.daemon = True
        bound.start()
        event(log, logging.INFO, "ending: requests under way have time to end", seconds=seconds)
        await _by(
            self._telling,
            lambda: self._notifier.stopping("waits for requests under way", seconds=seconds + _CLOSING_SECONDS),
        )
        if not await app.idle(seconds):
            event(log, logging.WARNING, "requests under way did not end in time, and are refused")
        await _by(self._waiting, self._deployment.close)
        for one in listeners:
            one.should_exit = True
        for threads in (self._computing, self._waiting, self._telling):
            threads.shutdown(wait=False, cancel_futures=True)

    # ----------------------------------------------------------------------------------------------------- signals

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for one in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(one, self._end_soon)
        loop.add_signal_handler(signal.SIGHUP, self._reload_soon)

    def _end_soon(self) -> None:
        """The first signal to end; the next one does so, whatever is under way."""
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, _end_now)
        self._asked_to_end.set()

    def _reload_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self) -> None:
        async with self._turn:
            await _by(self._waiting, self._read_again)

    def _read_again(self) -> None:
        """What the file says now: its budget and token count at once; where it is broken, all stays as it was."""
        self._notifier.reloading("reads its configuration again")
        try:
            read = _read(str(self._config.path), self._repository)
            token = _token(read.deployment.service)
            if self._access.everything and token is None:
                raise _needs_token(read)
            budget = read.deployment.memory_budget
            if budget is not None and budget != self._config.deployment.memory_budget:
                self._deployment.set_budget(int(budget))
            self._access.token = token
            self._config, before = read, self._config
            event(log, logging.INFO, "read its configuration again", file=str(read.path), budget=budget,
                  restart_needed_for=", ".join(_unchangeable(before, read)) or None)  # fmt: skip
        except LayeringError as error:
            event(log, logging.ERROR, "the configuration is refused, and all stays as it was", why=words(error))
        finally:
            self._notifier.ready()

    # ------------------------------------------------------------------------------------------------------ states

    async def _tell_states(self) -> None:
        """Tell systemd when the first model serves, and how the models are."""
        ready, told = False, ""
        while True:
            counts = Counter(self._deployment.model(name).state for name in self._names)
            status = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
            settled = counts["ready"] > 0 or not counts["loading"]
            if settled and not ready:
                await _by(self._telling, functools.partial(self._notifier.ready, status))
                level = logging.INFO if counts["ready"] else logging.ERROR
                event(log, level, "serving" if counts["ready"] else "no model can be served", models=status)
            elif not settled:
                await _by(self._telling, lambda: self._notifier.extend(_STARTING_SECONDS))
            elif status != told:
                await _by(self._telling, functools.partial(self._notifier.status, status))
            ready, told = ready or settled, status
            await asyncio.sleep(_BETWEEN_LOOKS)


async def _by(threads: Executor, work: Callable[[], None]) -> None:
    await asyncio.get_running_loop().run_in_executor(threads, work)


def _unchangeable(before: config.Config, after: config.Config) -> list[str]:
    """The settings in which two configurations differ and that are read only at the start."""
    was, now = ({one.field: one.value for one in read.settings()} for read in (before, after))
    return sorted(field for field in {*was, *now} if was.get(field) != now.get(field) and field not in _READ_AGAIN)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end_now(_number: int, _frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, b"told to end again: ends at once\n")
    finally:
        os._exit(_INTERRUPTED)


def _give_up() -> NoReturn:
    try:
        os.write(2, b"closing the models takes too long: ends at once\n")
    finally:
        os._exit(_FAILED)
