"""Every wait, every event and every call that tells TensorRT something is needed: without any one of them, a chain
gives wrong numbers or is a fault on the emulated GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.backends.tensorrt.opening import make, put, seeded, spans, switches_for
from tests.chains import assert_close, budgets, layers, opened, saved, uncut
from tests.emulation.install import installed
from trt_layering.building import Built
from trt_layering.errors import BackendError
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.loader import LoaderOptions

CASES = (
    ("inputs", "staged"), ("inputs", "zero-copy"), ("refit", "staged"), ("refit", "zero-copy"), ("swap", "pinned"),
)  # fmt: skip
SEEDS = 4
CHECKED = LoaderOptions(threads=1, read_size=4096, verify="first")
UNCHECKED = LoaderOptions(threads=4, read_size=32768, verify="never")
"""Neither checksums nor few slots make the loader wait for copies."""
NOT_OURS = {("synchronize", "runtime.py", "close")}
"""The wait of `Device.close`, for those who have no arena that waited before; `test_cuda` has it."""

Mutate = Callable[[Any], AbstractContextManager[None]]
pytestmark = pytest.mark.usefixtures("quick_collections")


class Mutants:
    """Six equal blocks of two layers, and what happens to them when something is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder, proto = folder, layers(12)
        path = saved(proto, folder / "model.onnx")
        self.answers = [(feeds, uncut(proto, feeds)) for feeds in (seeded(proto, size, size) for size in (2, 5, 1))]
        self._made: dict[str, Built] = {}
        for binding, placement in CASES:
            if binding not in self._made:
                self._made[binding] = make(
                    path, folder / binding, binding, shapes=spans(proto), name="chain", block_size="32KiB"
                )
            key = f"{binding}-{placement}"
            self._made[key] = put(self._made[binding], placement, folder / key)  # type: ignore[arg-type]

    def caught(self, case: tuple[str, str], seed: int, mutate: Mutate = nullcontext) -> str | None:
        """How the mutation `mutate` of the machine showed, if it did."""
        for work in (self._runs, self._checked, self._resident, self._fails_and_goes_on, self._refused_at_open):
            switches = {"refit_fail": "1"} if work == self._refused_at_open else {}
            with installed(**switches_for(case[1], seed=seed), **switches) as machine:  # type: ignore[arg-type]
                try:
                    with mutate(machine):
                        work(self._made["-".join(case)])
                    machine.assert_clean()
                except Exception as error:
                    return f"{type(error).__name__}: {str(error).strip()[:100]}"
        return None

    def _runs(self, built: Built) -> None:
        with opened(built, budgets(built)["middle"], loader=UNCHECKED) as chain:
            self._assert_right(chain)

    def _checked(self, built: Built) -> None:
        with opened(built, budgets(built)["middle"], loader=CHECKED) as chain:
            self._assert_right(chain)

    def _resident(self, built: Built) -> None:
        with opened(built, loader=CHECKED) as chain:
            self._assert_right(chain)

    def _assert_right(self, chain: Chain) -> None:
        for feeds, wanted in self.answers:
            assert_close(wanted, chain.run(feeds))
        got = chain.run_many([feeds for feeds, _ in self.answers], wave=2)
        for (_, wanted), one in zip(self.answers, got, strict=True):
            assert_close(wanted, one)

    def _fails_and_goes_on(self, built: Built) -> None:
        """A block fails when it has been asked for; then the chain answers, fails again and is closed."""
        with opened(built, budgets(built)["floor"], loader=UNCHECKED) as chain:
            self._fail(chain)
            for feeds, wanted in self.answers:
                assert_close(wanted, chain.run(feeds))
            self._fail(chain)

    def _fail(self, chain: Chain) -> None:
        engine: Any = chain._supply.engines[3]
        execute = engine.execute

        def fail(live: Any, into: Any) -> None:
            execute(live, into)
            raise ZeroDivisionError

        engine.execute = fail
        with suppress(ZeroDivisionError):
            chain.run(self.answers[0][0])
        engine.execute = execute

    def _refused_at_open(self, built: Built) -> None:
        with suppress(BackendError):
            opened(built, budgets(built)["middle"], loader=CHECKED).close()


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> Mutants:
    return Mutants(tmp_path_factory.mktemp("mutants"))


def _first(found: Iterable[str | None]) -> str | None:
    return next(filter(None, found), None)


def _sites(mutants: Mutants, case: tuple[str, str]) -> list[tuple[str, str]]:
    """Where the runs of `case` wait and record."""
    found: set[tuple[str, str]] = set()

    @contextmanager
    def note(machine: Any) -> Iterator[None]:
        yield
        found.update(machine.wait_sites)

    assert mutants.caught(case, 0, note) is None
    return sorted(found)


def test_every_wait_and_every_event(mutants: Mutants) -> None:
    caught: dict[tuple[str, str], str | None] = {}
    for case in CASES:
        for kind, site in _sites(mutants, case):
            file, _, function = site.replace(":", " ").split()
            if (kind, file, function) in NOT_OURS or caught.get((kind, site)):
                continue
            tries = (mutants.caught(case, seed, lambda m, at=(kind, site): m.without(*at)) for seed in range(SEEDS))
            caught[kind, site] = _first(tries)
    for at, how in caught.items():
        print(*at, "->", how)
    assert not [at for at, how in caught.items() if how is None], "needless, or not tested"
    assert len(caught) > 15


@contextmanager
def _leaving_out(owner: str, name: str, number: int, calls: list[int]) -> Iterator[None]:
    """The call of this number, of the method `name` of a class, does nothing and says it did."""
    module, _, kind = owner.rpartition(".")
    patched = getattr(importlib.import_module(module), kind)
    original, seen = getattr(patched, name), 0

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        calls[0] = max(calls[0], seen)
        return True if seen - 1 == number else original(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, name, call)
        yield


OURS = "trt_layering.backends.tensorrt"


@pytest.mark.parametrize(
    ("case", "owner", "name", "first"),
    [
        (CASES[0], "tensorrt.IExecutionContext", "set_tensor_address", 0),
        (CASES[0], "tensorrt.IExecutionContext", "set_input_shape", 0),
        (CASES[0], "tensorrt.IExecutionContext", "set_device_memory", 0),
        (CASES[0], "tensorrt.IExecutionContext", "execute_async_v3", 0),
        (CASES[0], f"{OURS}.memory.StagedArena", "copy_in", 0),
        (CASES[2], "tensorrt.Refitter", "set_named_weights", 0),
        (CASES[3], "tensorrt.Refitter", "set_named_weights", 0),
        (CASES[2], "tensorrt.Refitter", "refit_cuda_engine_async", 2),
        (CASES[2], "tensorrt.IExecutionContext", "set_tensor_address", 0),
        (CASES[4], "tensorrt.IExecutionContext", "set_device_memory", 0),
    ],
)
def test_every_call(mutants: Mutants, case: tuple[str, str], owner: str, name: str, first: int) -> None:
    """Left out one at a time, of those of the first sweep; `first`: those before are first refits, which are only for
    their time."""
    calls = [0]
    assert mutants.caught(case, 0, lambda _: _leaving_out(owner, name, -1, calls)) is None
    assert calls[0] > first
    for number in range(first, min(calls[0], 6)):
        tries = (
            mutants.caught(case, seed, lambda _, n=number: _leaving_out(owner, name, n, [0])) for seed in range(SEEDS)
        )
        assert _first(tries), f"{name}, call {number}"


@contextmanager
def _finished_too_early(_machine: Any) -> Iterator[None]:
    def finish_all_but(self: Any, newest: int) -> None:
        while len(self._asked) > newest:
            asked = self._asked.popleft()
            if asked.frees:
                self._loader.finish(asked.g)
                self._loader.settle()  # which may be as quick as that
            asked.mark.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "_finish_all_but", finish_all_but)
        yield


@contextmanager
def _further_ahead(_machine: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(f"{OURS}.runtime").TensorRt, "ahead", 2)
        yield


@pytest.mark.parametrize(
    ("case", "mutate"),
    [
        *((case, _finished_too_early) for case in CASES[:2]),
        *((case, _further_ahead) for case in CASES[2:]),
    ],
)
def test_blocks_are_finished_in_time(mutants: Mutants, case: tuple[str, str], mutate: Mutate) -> None:
    assert any(mutants.caught(case, seed, mutate) for seed in range(2 * SEEDS))
