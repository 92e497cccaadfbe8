"""The thread that loads and unloads the models of a deployment and divides its memory, while others serve.

May import the fleet, parts, the chain and the store. One change at a time. A chain's budget is exchanged between two of
its sweeps: its queue waits, the old chain gives its memory back, then the new one is opened; those that shrink go
first, so that memory never adds up. A change that cannot be made raises what opening a chain does, and leaves what
served before.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from trt_layering.config import Model
from trt_layering.errors import ClosedError, LayeringError, MemoryLimitError, ReadError, UnknownModelError
from trt_layering.runtime.chain import open_chain
from trt_layering.runtime.fleet import Fleet, Open, Recent, Served, Store, closed
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.parts import Candidate, Part, divided, require_fit, together
from trt_layering.runtime.queues import end
from trt_layering.runtime.supply import check_weights
from trt_layering.store.manifest import finished_chains, resolve
from trt_layering.store.reader import check_store
from trt_layering.units import format_size

log = logging.getLogger("trt_layering")

_TRIES = 3
Found = TypeVar("Found")


class Changes:
    """Owns its thread from `start` to `stop`, and opens and closes the chains of `fleet`, which it borrows. `beat` is
    called by whoever runs a chain, as it gets on. `budget` is in bytes, None: everything stays in memory."""

    def __init__(
        self,
        fleet: Fleet,
        repository: Path,
        options: LoaderOptions,
        budget: int | None,
        beat: Callable[[], None],
    ) -> None:
        self._fleet, self._repository, self._options, self._beat = fleet, repository, options, beat
        self._lane = fleet.gate.lane()
        self._granted = budget
        self._level: float | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[], object], Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._carry_out, name="trt-layering-changes", daemon=True)

    # -------------------------------------------------------------------------------------------- its thread

    def start(self) -> None:
        """Open all models, in order; then make changes as they are asked for."""
        self._thread.start()
        self.ask(self._open_all)

    def ask(self, work: Callable[[], object]) -> Future[None]:
        """Have `work` done in this thread, after what was asked before; the future tells when, or what it raised."""
        future: Future[None] = Future()
        with self._fleet.changed:
            if self._fleet.stopping:
                future.set_exception(closed())
            else:
                self._work.put((work, future))
        return future

    def stop(self, seconds: float) -> bool:
        """Once the fleet is stopping: wait so long for the thread to end; whether it has. What nobody has begun ends
        with ClosedError."""
        self._work.put(None)
        if self._thread.ident is None:
            self._carry_out()
        else:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _carry_out(self) -> None:
        while (item := self._work.get()) is not None:
            work, future = item
            try:
                work()
            except LayeringError as error:
                future.set_exception(error)
            except Exception as error:
                log.exception("a change of models failed")
                future.set_exception(LayeringError(f"the change failed: {error!r}", remedy="report this as a fault"))
            else:
                future.set_result(None)

    # ----------------------------------------------------------------------------------------------- changes

    def load(self, name: str, version: int | None) -> None:
        """Serve the newest finished version of model `name`, or `version`, once all its bytes were found right."""
        served = self._served(name)
        self._fleet.require_open()
        try:
            candidate = Candidate.of(served.model, resolve(self._repository, name, version))
            if served.open is not None and self._is_current(served.open, candidate):
                return
            check_store(candidate.folder, candidate.manifest)
            check_weights(candidate.folder, candidate.manifest, self._options, self._turn)
            wanted = [*(one for one in self._wanted() if one.model.name != name), candidate]
            parts = self._divided(wanted)
            self._exchange(served, candidate, parts)
        except LayeringError as error:
            if served.open is None:
                self._fail(served, error, self._newest(name))
            else:
                log.warning("%s: version %s goes on serving: %s", name, served.open.candidate.version, error.what)
            raise
        finally:
            self._arrange(self._divided(self._wanted()))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One read, when no chain that executes or comes next needs the drive."""
        self._fleet.require_open()
        with self._lane.reading(lambda: not self._fleet.stopping):
            yield

    def unload(self, name: str) -> None:
        """Let what waits for model `name` be served, then give its memory back."""
        served = self._served(name)
        with self._fleet.changed:
            self._fleet.require_open()
            served.state, served.reason = "unloaded", ""
            self._fleet.changed.wait_for(
                lambda: self._fleet.stopping or not served.can_run or not (served.waiting or served.running)
            )
        self._close(served)
        with self._fleet.changed:
            served.candidate, served.held = None, False
            served.state, served.reason = "unloaded", ""
        log.info("%s: unloaded", name)
        self._arrange(self._divided(self._wanted()))

    def set_budget(self, nbytes: int) -> None:
        """Divide `nbytes` from now on; when this returns, memory is within them. Raises BudgetError under the sum of
        floors, and then nothing has changed."""
        require_fit(self._wanted(), nbytes)
        self._granted = nbytes
        log.info("the memory budget is %s", format_size(nbytes))
        self._arrange(self._divided(self._wanted()))

    def set_level(self, level: float | None) -> None:
        """Use that part of the budget beyond the floors, 0 to 1; None: all of it."""
        self._level = level
        self._arrange(self._divided(self._wanted()))

    def lose(self, served: Served, opened: Open, error: LayeringError) -> None:
        """By any thread: what serves a model cannot go on. Its memory is given back soon."""
        with self._fleet.changed:
            if served.open is not opened:
                return
            refusal = served.fail(error, Store.of(opened.candidate.folder), self._fleet.clock())
            refused = self._fleet.refuse(served)
            closing = self._fleet.stopping
            if not closing:
                self._work.put((lambda: self._give_back(served, opened), Future()))
        log.error("%s: cannot be served any more: %s", served.name, error.what)
        for request in refused:
            end(request, refusal)
        if closing:
            self._give_back(served, opened)

    @property
    def budget_bytes(self) -> int:
        """What the models may take together, now."""
        wanted = self._wanted()
        budget = self._effective(wanted)
        return sum(one.resident for one in wanted) if budget is None else budget

    # ----------------------------------------------------------------------------------------- who gets what

    def _served(self, name: str) -> Served:
        """The model called `name`, taken from the repository if the deployment does not have it."""
        with self._fleet.changed:
            found = self._fleet.models.get(name)
        if found is None and name not in finished_chains(self._repository):
            raise unknown(name)
        with self._fleet.changed:
            return found or self._fleet.add(Model(name=name, onnx=""))

    def _wanted(self) -> list[Candidate]:
        """What the budget is divided among."""
        with self._fleet.changed:
            return [served.candidate for served in self._fleet if served.candidate is not None]

    def _effective(self, wanted: Iterable[Candidate]) -> int | None:
        if self._level is None:
            return self._granted
        wanted = list(wanted)
        least = together(wanted)
        most = sum(one.resident for one in wanted) if self._granted is None else self._granted
        return least + max(0, int(self._level * (most - least)))

    def _divided(self, wanted: list[Candidate]) -> dict[str, Part]:
        require_fit(wanted, self._granted)
        return divided(wanted, self._effective(wanted))

    def _arrange(self, parts: Mapping[str, Part]) -> None:
        """Give every open chain its part: first those that shrink, of which none begins another sweep before."""
        with self._fleet.changed:
            differ = [
                served for served in self._fleet
                if served.open is not None and served.name in parts
                and _size(served.open.candidate, parts[served.name]) != _size(served.open.candidate, served.open.part)
            ]  # fmt: skip
            smaller = [served for served in differ if served.open and _shrinks(served.open, parts[served.name])]
            for served in smaller:
                served.held = True
        try:
            for served in smaller + [served for served in differ if served not in smaller]:
                self._reopen(served, parts[served.name])
        finally:
            with self._fleet.changed:
                for served in smaller:
                    served.held = False
                self._fleet.changed.notify_all()

    def _reopen(self, served: Served, part: Part) -> None:
        candidate = served.candidate
        if candidate is None:
            return
        if not self._close(served):
            return
        try:
            self._install(served, self._open(served, candidate, part))
        except LayeringError as error:
            self._fleet.require_open()
            self._fail(served, error, Store.of(candidate.folder))

    # -------------------------------------------------------------------------------------- opening and closing

    def _open_all(self) -> None:
        """All models, each as soon as it can be; those that do not fit beside the ones before them are not."""
        admitted: dict[str, Candidate] = {}
        for served in list(self._fleet):
            try:
                candidate = Candidate.of(served.model, resolve(self._repository, served.name))
                divided([*admitted.values(), candidate], self._granted)
                admitted[served.name] = candidate
            except LayeringError as error:
                self._fail(served, error, self._newest(served.name))
        parts = self._divided(list(admitted.values()))
        with self._fleet.changed:
            for name, candidate in admitted.items():
                self._fleet.models[name].candidate = candidate
        for name, candidate in admitted.items():
            served = self._fleet.models[name]
            try:
                self._install(served, self._open(served, candidate, parts[name]))
            except LayeringError as error:
                self._fleet.require_open()
                self._fail(served, error, Store.of(candidate.folder))

    def _is_current(self, opened: Open, candidate: Candidate) -> bool:
        mine = opened.candidate
        same = (mine.folder, mine.manifest) == (candidate.folder, candidate.manifest)
        return same and opened.store == Store.of(candidate.folder)

    def _newest(self, name: str) -> Store | None:
        """What of model `name` could not be opened."""
        try:
            return Store.of(resolve(self._repository, name))
        except LayeringError:
            return None

    def _exchange(self, served: Served, candidate: Candidate, parts: Mapping[str, Part]) -> None:
        """Serve with `candidate`: opened beside what serves now, if memory allows both, else in its place."""
        part, before = parts[served.name], served.open
        if before is None:
            with self._fleet.changed:
                served.state, served.reason = "loading", ""
            self._arrange({name: part for name, part in parts.items() if self._is_less(name, part)})
            self._install(served, self._open(served, candidate, part))
            return
        if self._fits_beside(candidate, part):
            try:
                opened = self._open(served, candidate, part)
            except MemoryLimitError as error:
                log.info("%s: no memory for two versions at once: %s", served.name, error.what)
            else:
                self._swap(served, opened)
                return
        served_till_now = self._close(served)
        try:
            self._arrange({name: part for name, part in parts.items() if self._is_less(name, part)})
            self._install(served, self._open(served, candidate, part))
        except LayeringError:
            self._fleet.require_open()
            if served_till_now:
                self._install(served, self._open(served, before.candidate, before.part))
            raise

    def _swap(self, served: Served, opened: Open) -> None:
        """Let `opened` serve in the place of what does so."""
        try:
            self._close(served)
        except ClosedError:
            opened.chain.close()
            raise
        self._install(served, opened)

    def _is_less(self, name: str, part: Part) -> bool:
        opened = self._fleet.models[name].open
        return opened is not None and _shrinks(opened, part)

    def _fits_beside(self, candidate: Candidate, part: Part) -> bool:
        budget = self._effective(self._wanted())
        if budget is None:
            return True
        with self._fleet.changed:
            taken = sum(_size(one.open.candidate, one.open.part)[0] for one in self._fleet if one.open is not None)
        return taken + _size(candidate, part)[0] <= budget

    def _open(self, served: Served, candidate: Candidate, part: Part) -> Open:
        for _ in range(_TRIES - 1):
            try:
                return self._open_once(served, candidate, part)
            except ReadError as error:
                log.warning("%s: %s; trying again", served.name, error.what)
        return self._open_once(served, candidate, part)

    def _open_once(self, served: Served, candidate: Candidate, part: Part) -> Open:
        store, recent = Store.of(candidate.folder), Recent(self._beat)
        try:
            chain = open_chain(
                served.name, repository=self._repository, version=candidate.version, budget=part.budget,
                loader=self._options, wave=part.wave, trace=recent, lane=served.lane,
            )  # fmt: skip
        except LayeringError:
            raise
        except Exception as error:
            raise LayeringError(f"opening failed: {error!r}", remedy="report this as a fault") from error
        return Open(chain, candidate, part, recent, store)

    def _install(self, served: Served, opened: Open) -> None:
        with self._fleet.changed:
            if not self._fleet.stopping:
                news = served.state != "ready" or served.candidate is not opened.candidate
                served.open, served.candidate = opened, opened.candidate
                served.state, served.reason, served.held = "ready", "", False
                self._fleet.changed.notify_all()
        if served.open is not opened:
            opened.chain.close()
            raise closed()
        if news:
            log.info("%s: version %s serves", served.name, opened.candidate.version)

    def _close(self, served: Served) -> bool:
        """Close what serves a model, once its sweep has ended; its queue waits from now on. False if there is nothing
        that serves it, since it may have been lost meanwhile."""
        with self._fleet.changed:
            served.held = True
            self._fleet.changed.wait_for(lambda: self._fleet.stopping or served.running is None)
            self._fleet.require_open()
            opened, served.open = served.open, None
        if opened is not None:
            self._give_back(served, opened)
        return opened is not None

    def _give_back(self, served: Served, opened: Open) -> None:
        try:
            opened.chain.close()
        except LayeringError as error:
            log.error("%s: memory may not have been given back: %s", served.name, error.what)
        with self._fleet.changed:
            served.remember(opened.counts())

    def _fail(self, served: Served, error: LayeringError, store: Store | None) -> None:
        with self._fleet.changed:
            before = served.reason
            refusal = served.fail(error, store, self._fleet.clock())
            refused = self._fleet.refuse(served)
            news = served.reason != before
        if news:  # else it was tried again, in vain
            log.error("%s: cannot be served: %s", served.name, error.what)
        for request in refused:
            end(request, refusal)


def unknown(name: str) -> UnknownModelError:
    """What to say to a name that no model has."""
    return UnknownModelError(f"there is no model {name!r}", remedy="ask for one of the deployment or the repository")


def _size(candidate: Candidate, part: Part) -> tuple[int, int]:
    """The bytes that a part comes to, and its wave, which is none where everything stays."""
    if part.budget is None or part.budget >= candidate.resident:
        return candidate.resident, 1
    return part.budget, part.wave


def _shrinks(opened: Open, part: Part) -> bool:
    return _size(opened.candidate, part)[0] < _size(opened.candidate, opened.part)[0]
