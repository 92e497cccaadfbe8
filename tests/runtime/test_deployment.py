"""Several chains at work together: right answers whatever changes meanwhile, memory within the budget, faults in
words, and no hang."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import timed
from tests.chains import Feeds, assert_close, feed, uncut
from tests.runtime.drives import PATIENCE, Broken, Faulty, Hanging, failure
from tests.runtime.test_pressure import Kernel
from tests.timed import SIZE
from trt_layering import config
from trt_layering.errors import (
    BackendError,
    BudgetError,
    ClosedError,
    ForeignError,
    InputError,
    LayeringError,
    NotBuiltError,
    QueueFullError,
    ReadError,
    StoreError,
    TimedOutError,
    UnavailableError,
    UnknownModelError,
    UsageError,
)
from trt_layering.runtime import changes, supply
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.deployment import Deployment
from trt_layering.runtime.pressure import Pressure
from trt_layering.store.manifest import WEIGHTS_FILE
from trt_layering.store.reader import WeightFile

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

CALM = Pressure(Path("/nowhere"))
LAYERS = {"a": 8, "b": 4}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of `a`, of eight layers, and `b`, of four."""
    folder = tmp_path_factory.mktemp("built")
    for name, count in LAYERS.items():
        timed.build(folder, name, count)
    return folder


@pytest.fixture
def repository(built: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "engines"))


@pytest.fixture(scope="module")
def wanted(built: Path) -> Callable[[str, int], Feeds]:
    """What the uncut model `name` answers to `feed(3, seed)`."""
    known: dict[tuple[str, int], Feeds] = {}

    def answer(name: str, seed: int) -> Feeds:
        if (name, seed) not in known:
            known[name, seed] = uncut(built / f"{name}.onnx", feed(3, seed))
        return known[name, seed]

    return answer


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets chains read through a stand-in for `os.preadv`."""

    def use(preadv: Any) -> None:
        monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))

    return use


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def floor(built: Path, *names: str) -> int:
    return sum(timed.needs(built, name).floor for name in names or LAYERS)


def described(repository: Path, budget: int | None, *, max_queue: int = 64, **models: dict[str, Any]) -> Any:
    entries = [config.Model(name=name, onnx="", **models.get(name, {})) for name in (models or LAYERS)]
    return config.Deployment(
        repository=str(repository), memory_budget=None if budget is None else config.Size(budget),
        service=config.Service(max_queue=max_queue), models=tuple(entries),
    )  # fmt: skip


def until(holds: Callable[[], Any]) -> Any:
    """Give other threads the processor until it `holds`."""
    end = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < end, "it never came"
        os.sched_yield()
    return found


@contextmanager
def serving(
    repository: Path,
    budget: int | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    pressure: Pressure | None = None,
    watched: bool = False,
    **more: Any,
) -> Iterator[Deployment]:
    """A deployment whose models are open. Unless it is `watched`, `tick` does what its watcher would."""
    before = set(threading.enumerate())
    deployment = Deployment(described(repository, budget, **more), clock=clock, pressure=pressure or CALM)
    try:
        if watched:
            deployment.start()
        else:
            deployment._executor.start()
            deployment._changes.start()
        until(lambda: all(model.state != "loading" for model in deployment.models()))
        yield deployment
    finally:
        deployment.close()
        until(lambda: set(threading.enumerate()) <= before)


def tick(deployment: Deployment, clock: Clock, seconds: float = 5.0) -> None:
    clock.now += seconds
    deployment._watcher.tick(clock.now)
    settle(deployment)


def settle(deployment: Deployment) -> None:
    """Until all changes that were asked for are made."""
    deployment._changes.ask(lambda: None).result(PATIENCE)


def states(deployment: Deployment) -> dict[str, str]:
    return {model.name: model.state for model in deployment.models()}


def answer(deployment: Deployment, name: str, seed: int = 0) -> Feeds:
    return deployment.submit(name, feed(3, seed)).result(PATIENCE)


def same(wanted: Any, deployment: Deployment, *names: str) -> None:
    """Right answers of all models, or of those named."""
    for name in names or tuple(LAYERS):
        assert_close(wanted(name, 1), answer(deployment, name, 1))


def taken(deployment: Deployment) -> int:
    """Bytes that open chains may take, by what they say of themselves."""
    return sum(model.budget_bytes for model in deployment.models())


@contextmanager
def load_of(deployment: Deployment, wanted: Any, names: Sequence[str], each: int = 2) -> Iterator[list[int]]:
    """Threads that ask and compare, all the time; a list that counts answers. Any error or wrong answer fails."""
    stop, wrong, right = threading.Event(), [], []

    def ask(name: str, seed: int) -> None:
        try:
            while not stop.is_set():
                assert_close(wanted(name, seed), answer(deployment, name, seed))
                right.append(seed)
        except BaseException as error:
            wrong.append(error)

    for name in names:
        wanted(name, 0)
        wanted(name, 1)
    threads = [threading.Thread(target=ask, args=(name, seed % 2)) for name in names for seed in range(each)]
    for thread in threads:
        thread.start()
    try:
        yield right
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert wrong == []


# ------------------------------------------------------------------------------------------------------ right answers


@pytest.mark.parametrize("beyond", [None, 0, 1 << 16, 1 << 30])
def test_models_answer_as_if_each_were_alone(repository: Path, wanted: Any, beyond: int | None) -> None:
    budget = None if beyond is None else floor(repository) + beyond
    with serving(repository, budget, watched=True) as deployment:
        with load_of(deployment, wanted, ["a", "b"]) as right:
            until(lambda: len(right) > 40)
        assert states(deployment) == {"a": "ready", "b": "ready"}
        state = deployment.model("a")
        assert (state.version, state.backend, state.inputs[0].name) == (1, "onnxruntime", "x")
        assert state.requests > 0
        assert state.failures == state.deadline_misses == 0
        assert sum(size * count for size, count in state.wave_sizes.items()) == state.requests
        assert budget is None or taken(deployment) <= budget == deployment.budget_bytes
        assert state.floor_bytes == timed.needs(repository, "a").floor
        assert {event.block for event in state.last_sweep if event.kind == "execute"} == set(
            range(max(event.block for event in state.last_sweep) + 1)
        )
    with pytest.raises(ClosedError):
        deployment.submit("a", feed())
    with pytest.raises(ClosedError):
        deployment.load("a")


def test_requests_that_wait_make_waves(repository: Path, wanted: Any, drive: Any) -> None:
    hanging = Hanging()
    drive(hanging)
    with serving(repository, floor(repository) + 8 * SIZE, a={"wave": 4}, b={"wave": 1}) as deployment:
        same(wanted, deployment)
        hanging.hang.set()
        held = deployment.submit("a", feed(3))
        assert hanging.caught.wait(PATIENCE)
        until(lambda: deployment.model("a").queued == 0)
        waiting = [(name, seed, deployment.submit(name, feed(3, seed))) for seed in range(6) for name in LAYERS]
        fleet = deployment._fleet
        assert fleet.gate._order == (fleet.models["a"].lane,)
        assert deployment.model("a").queued == 6
        hanging.release.set()
        assert_close(wanted("a", 0), held.result(PATIENCE))
        for name, seed, future in waiting:
            assert_close(wanted(name, seed), future.result(PATIENCE))
        assert deployment.model("a").wave_sizes == {1: 2, 4: 1, 2: 1}
        assert deployment.model("b").wave_sizes == {1: 7}


def test_the_earliest_deadline_then_priority_then_age(repository: Path, drive: Any) -> None:
    hanging, done, clock = Hanging(), [], Clock()
    drive(hanging)
    models: dict[str, Any] = {"a": {"wave": 1}, "b": {"wave": 1, "deadline": config.Duration(3.0)}}
    with serving(repository, floor(repository), clock=clock, **models) as deployment:
        answer(deployment, "a")
        hanging.hang.set()
        held = deployment.submit("a", feed(3))
        assert hanging.caught.wait(PATIENCE)
        until(lambda: deployment.model("a").queued == 0)

        def ask(name: str, word: str, **more: Any) -> None:
            deployment.submit(name, feed(3), **more).add_done_callback(lambda _: done.append(word))

        ask("a", "old")
        ask("a", "low", priority=0.5)
        ask("a", "high", priority=2.0)
        ask("b", "late deadline")
        clock.now += 4
        ask("b", "deadline")
        clock.now += 0.9
        ask("a", "young")
        fleet = deployment._fleet
        assert fleet.gate._order == (fleet.models["a"].lane, fleet.models["b"].lane)
        hanging.release.set()
        held.result(PATIENCE)
        assert deployment.drain(PATIENCE)
        assert done == ["late deadline", "deadline", "high", "old", "young", "low"]
        assert deployment.model("b").deadline_misses == 1
        with pytest.raises(UnavailableError, match="about to end"):
            deployment.submit("a", feed(3))


def test_what_cannot_be_asked(repository: Path, drive: Any) -> None:
    hanging = Hanging()
    drive(hanging)
    with serving(repository, floor(repository), max_queue=2, a={}) as deployment:
        with pytest.raises(UnknownModelError, match="'c'"):
            deployment.submit("c", feed())
        with pytest.raises(UnknownModelError):
            deployment.model("../a")
        with pytest.raises(UnknownModelError):
            deployment.load("../a")
        with pytest.raises(UnavailableError, match="not loaded"):
            deployment.submit("b", feed())
        for wrong in ({}, {"x": feed()["x"], "z": feed()["x"]}, {"x": feed()["x"][0]}):
            with pytest.raises(InputError):
                deployment.submit("a", wrong)
        hanging.hang.set()
        first = deployment.submit("a", feed())
        until(lambda: deployment.model("a").queued == 0)
        second, third = (deployment.submit("a", feed()) for _ in range(2))
        with pytest.raises(QueueFullError, match="2 requests"):
            deployment.submit("a", feed())
        assert second.cancel()
        fourth = deployment.submit("a", feed())
        hanging.release.set()
        for future in (first, third, fourth):
            future.result(PATIENCE)
        assert deployment.model("a").requests == 3
        for budget in (0, -1, True, 1.5, "1MiB"):
            with pytest.raises(UsageError):
                deployment.set_budget(budget)  # type: ignore[arg-type]


def test_a_request_of_a_wave_that_fails_fails_alone(
    repository: Path, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_many = Chain.run_many

    def picky(self: Chain, feeds: Any, *, wave: int) -> Any:
        if any(one["x"].shape[0] == 7 for one in feeds):
            raise BackendError("seven rows")
        return run_many(self, feeds, wave=wave)

    monkeypatch.setattr(Chain, "run_many", picky)
    with serving(repository, floor(repository)) as deployment:
        futures = [deployment.submit("a", feed(7 if index == 4 else 3)) for index in range(9)]
        for index, future in enumerate(futures):
            if index == 4:
                with pytest.raises(BackendError, match="seven"):
                    future.result(PATIENCE)
            else:
                assert_close(wanted("a", 0), future.result(PATIENCE))
        assert (deployment.model("a").requests, deployment.model("a").failures) == (8, 1)


# ------------------------------------------------------------------------------------------------------------- budget


def test_the_budget_may_change_all_the_time(repository: Path, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load: no request fails, and what is open together never takes more than the larger of two budgets."""
    least = floor(repository)
    with serving(repository, 1 << 30) as deployment:
        before, peak = taken(deployment), 0
        opening = changes.open_chain

        def counted(*arguments: Any, **options: Any) -> Chain:
            nonlocal peak
            peak = max(peak, taken(deployment) + options["budget"])
            return opening(*arguments, **options)

        monkeypatch.setattr(changes, "open_chain", counted)
        with load_of(deployment, wanted, ["a", "b"]):
            for budget in (before, *[least, least + 3 * SIZE] * 2):
                peak = 0
                deployment.set_budget(budget)
                assert taken(deployment) <= budget == deployment.budget_bytes
                assert peak <= max(budget, before)
                before = budget
        assert states(deployment) == {"a": "ready", "b": "ready"}


def test_a_budget_under_the_floors_changes_nothing(repository: Path, wanted: Any) -> None:
    budget = floor(repository) + 3 * SIZE
    with serving(repository, budget) as deployment:
        chains = [served.open for served in deployment._fleet]
        with pytest.raises(BudgetError) as caught:
            deployment.set_budget(floor(repository) - 1)
        assert caught.value.floor == floor(repository) == sum(caught.value.parts.values())
        assert [served.open for served in deployment._fleet] == chains
        assert deployment.budget_bytes == budget
        same(wanted, deployment)


def test_a_model_that_does_not_fit_beside_the_others(repository: Path, wanted: Any) -> None:
    with serving(repository, floor(repository) - 1) as deployment:
        assert states(deployment) == {"a": "ready", "b": "unavailable"}
        with pytest.raises(UnavailableError, match="under the"):
            deployment.submit("b", feed())
        with pytest.raises(BudgetError):
            deployment.load("b")
        same(wanted, deployment, "a")
        deployment.unload("a")
        deployment.load("b")
        same(wanted, deployment, "b")
        deployment.set_budget(floor(repository))
        deployment.load("a")
        same(wanted, deployment)


def test_what_one_model_gives_back_the_others_get(repository: Path, wanted: Any) -> None:
    budget = floor(repository) + 2 * SIZE
    with serving(repository, budget) as deployment:
        before = deployment.model("a").budget_bytes
        deployment.unload("b")
        assert deployment.model("b").state == "unloaded"
        assert before < deployment.model("a").budget_bytes <= budget
        with pytest.raises(UnavailableError, match="not loaded"):
            deployment.submit("b", feed())
        deployment.load("b")
        assert deployment.model("a").budget_bytes == before
        assert taken(deployment) <= budget
        same(wanted, deployment)


def test_a_fixed_share(repository: Path) -> None:
    share = timed.needs(repository, "a").floor + SIZE
    models: dict[str, Any] = {"a": {"share": config.Share(share), "wave": 8}, "b": {}}
    with serving(repository, floor(repository) + 4 * SIZE, **models) as deployment:
        assert deployment.model("a").budget_bytes == share
        deployment.set_budget(share + timed.needs(repository, "b").floor)
        assert deployment.model("a").budget_bytes == share
    models["a"]["share"] = config.Share(1)
    with serving(repository, floor(repository), **models) as deployment:
        assert states(deployment) == {"a": "unavailable", "b": "ready"}


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.sampled_from(["load", "unload", "budget"]), st.integers(0, 9)), max_size=4))
def test_any_changes_leave_right_answers_within_the_budget(
    built: Path, wanted: Any, steps: list[tuple[str, int]]
) -> None:
    with serving(built, floor(built) + 2 * SIZE) as deployment:
        for what, number in steps:
            name = "ab"[number % 2]
            if what == "load":
                deployment.load(name)
            elif what == "unload":
                deployment.unload(name)
            else:
                deployment.set_budget(floor(built) + number * SIZE // 2)
            assert taken(deployment) <= deployment.budget_bytes or not taken(deployment)
            for name, state in states(deployment).items():
                if state == "ready":
                    same(wanted, deployment, name)


# ----------------------------------------------------------------------------------------------------------- versions


def another(repository: Path, name: str = "a") -> Path:
    """A newer version of model `name`, the same in everything."""
    last = max(int(folder.name) for folder in (repository / name).iterdir())
    return Path(shutil.copytree(repository / name / str(last), repository / name / str(last + 1)))


@pytest.mark.parametrize("beyond", [0, 1 << 30, None])
def test_a_new_version_comes_without_a_request_lost(repository: Path, wanted: Any, beyond: int | None) -> None:
    """Beside the old one where memory allows it, and in its place where not."""
    budget = None if beyond is None else floor(repository) + beyond
    with serving(repository, budget) as deployment, load_of(deployment, wanted, ["a", "b"]) as right:
        for version in (2, 3):
            another(repository)
            deployment.load("a")
            assert deployment.model("a").version == version
            count = len(right)
            until(lambda count=count: len(right) > count + 4)
        deployment.load("a", 2)
        assert deployment.model("a").version == 2
        chain = deployment._fleet.models["a"].open
        deployment.load("a", 2)
        assert deployment._fleet.models["a"].open is chain


@pytest.mark.parametrize("beyond", [0, 1 << 30])
@pytest.mark.parametrize("damage", ["foreign", "engine", "weights", "truncated", "opening"])
def test_a_version_that_cannot_be_opened_leaves_the_old_one(
    repository: Path, wanted: Any, beyond: int, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(repository, floor(repository) + beyond) as deployment:
        same(wanted, deployment)
        folder = another(repository)
        if damage == "foreign":
            manifest = folder / "chain.json"
            manifest.write_bytes(manifest.read_bytes().replace(b"onnxruntime", b"otherruntim"))
        elif damage == "engine":
            next(folder.glob("*.onnx")).write_bytes(b"none")
        elif damage in ("weights", "truncated"):
            spoil(folder / WEIGHTS_FILE, damage)
        else:
            opening = changes.open_chain

            def refuses(*arguments: Any, **options: Any) -> Chain:
                if options["version"] == 2:
                    raise ForeignError("of another machine")
                return opening(*arguments, **options)

            monkeypatch.setattr(changes, "open_chain", refuses)
        with load_of(deployment, wanted, ["a", "b"]), pytest.raises(StoreError):
            deployment.load("a")
        assert deployment.model("a").version == 1
        assert states(deployment) == {"a": "ready", "b": "ready"}
        same(wanted, deployment)
        with pytest.raises(NotBuiltError, match="version 9"):
            deployment.load("a", 9)
        assert deployment.model("a").version == 1


def test_a_chain_that_only_the_repository_has(repository: Path, wanted: Any) -> None:
    with serving(repository, floor(repository) + SIZE, a={}) as deployment:
        assert states(deployment) == {"a": "ready", "b": "unloaded"}
        deployment.load("b")
        same(wanted, deployment)
        deployment.unload("b")
        assert deployment.model("b").state == "unloaded"


def test_loading_and_unloading_leaves_nothing_behind(repository: Path, wanted: Any) -> None:
    with serving(repository, floor(repository) + SIZE) as deployment:
        same(wanted, deployment)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for cycle in range(4):
            deployment.unload("a")
            if cycle % 4 == 3:
                file = repository / "a" / "1" / WEIGHTS_FILE
                file.rename(file.with_suffix(".away"))
                with pytest.raises(LayeringError):
                    deployment.load("a")
                file.with_suffix(".away").rename(file)
            deployment.load("a")
        same(wanted, deployment)
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == files


# ------------------------------------------------------------------------------------------------------------- faults


def spoil(file: Path, how: str) -> None:
    if how == "deleted":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, 4096)
    else:
        data = bytearray(file.read_bytes())
        data[: len(data)] = bytes(255 - byte for byte in data)
        file.write_bytes(data)


@pytest.mark.parametrize("noticed", ["by a request", "by the watcher"])
@pytest.mark.parametrize("how", ["deleted", "truncated", "corrupted", "folder deleted"])
def test_a_store_that_is_damaged_while_it_serves(repository: Path, wanted: Any, how: str, noticed: str) -> None:
    """That model says why, the others go on, and it is served again once it was built anew."""
    clock, home = Clock(), repository / "a"
    with serving(repository, floor(repository), clock=clock) as deployment:
        same(wanted, deployment)
        shutil.copytree(home / "1", home.parent / "kept")
        if how == "folder deleted":
            shutil.rmtree(home)
        else:
            spoil(home / "1" / WEIGHTS_FILE, how)
        if noticed == "by a request":
            with pytest.raises(UnavailableError, match=r"weights.bin (is gone|was changed)"):
                answer(deployment, "a")
        else:
            tick(deployment, clock)
        assert states(deployment).get("a") == "unavailable"
        assert WEIGHTS_FILE in deployment.model("a").reason
        with pytest.raises(UnavailableError, match=r"weights.bin (is gone|was changed)"):
            deployment.submit("a", feed())
        same(wanted, deployment, "b")
        for _ in range(3):  # nothing is there to recover with, or it is still as bad
            tick(deployment, clock)
            assert deployment.model("a").state == "unavailable"
        with pytest.raises(LayeringError):
            deployment.load("a")
        version = 1 if how == "folder deleted" else 2
        (home.parent / "kept").rename(home / "2") if version == 2 else shutil.move(home.parent / "kept", home / "1")
        if noticed == "by a request":
            deployment.load("a")
        else:
            tick(deployment, clock)
        assert (deployment.model("a").state, deployment.model("a").version) == ("ready", version)
        same(wanted, deployment)


def test_models_that_are_not_built_are_served_once_they_are(repository: Path, wanted: Any) -> None:
    clock = Clock()
    (repository / "b").rename(repository / "away")
    with serving(repository, floor(repository, "a") * 3, clock=clock) as deployment:
        assert states(deployment)["b"] == "unavailable"
        assert "not built" in deployment.model("b").reason
        tick(deployment, clock)
        same(wanted, deployment, "a")
        (repository / "away").rename(repository / "b")
        tick(deployment, clock)
        same(wanted, deployment)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_drive_that_fails_now_and_then(repository: Path, wanted: Any, drive: Any, times: int) -> None:
    """Reads are tried again twice, then the request gets the error; the model goes on."""
    faulty = Faulty()
    drive(faulty)
    with serving(repository, floor(repository, "a"), a={}) as deployment:
        deployment._fleet.models["a"].open.chain.settle()
        failures = [faulty.calls]

        def preadv(*arguments: Any) -> int:
            if len(failures) <= times and deployment.model("a").queued == 0:
                failures.append(1)
                raise failure()
            return os.preadv(*arguments)

        deployment._fleet.models["a"].open.chain._supply.file._preadv = preadv
        future = deployment.submit("a", feed(3))
        if times < 3:
            assert_close(wanted("a", 0), future.result(PATIENCE))
        else:
            with pytest.raises(ReadError, match="drive failed"):
                future.result(PATIENCE)
        assert deployment.model("a").state == "ready"
        same(wanted, deployment, "a")


def test_a_drive_that_is_broken_while_a_model_is_opened(repository: Path, wanted: Any, drive: Any) -> None:
    clock, broken = Clock(), Broken()
    drive(broken)
    broken.broken.set()
    with serving(repository, floor(repository), clock=clock, a={}) as deployment:
        assert deployment.model("a").state == "unavailable"
        assert "drive failed" in deployment.model("a").reason
        broken.broken.clear()
        tick(deployment, clock, 29)
        assert deployment.model("a").state == "unavailable"
        tick(deployment, clock)
        same(wanted, deployment, "a")


def test_a_drive_that_hangs(repository: Path, wanted: Any, drive: Any) -> None:
    """Requests wait or time out; the executor is alive meanwhile, and serves again when the drive does."""
    hanging, clock = Hanging(), Clock()
    drive(hanging)
    with serving(repository, floor(repository), clock=clock) as deployment:
        same(wanted, deployment)
        hanging.hang.set()
        first = deployment.submit("a", feed(3), timeout=4)
        until(lambda: deployment.model("a").queued == 0)
        waiting, patient = deployment.submit("b", feed(3), timeout=9), deployment.submit("b", feed(3), timeout=60)
        fleet = deployment._fleet
        until(lambda: fleet.models["a"].open.chain.awaits_drive)
        clock.now += 10
        assert deployment.heartbeat == clock.now
        deployment._watcher.tick(clock.now)
        for future, seconds in ((first, 4), (waiting, 9)):
            with pytest.raises(TimedOutError, match=f"within {seconds} s"):
                future.result(PATIENCE)
        assert not patient.done()
        assert not deployment.drain(0.0)
        fleet.draining = False
        hanging.release.set()
        assert_close(wanted("b", 0), patient.result(PATIENCE))
        same(wanted, deployment)
        assert (deployment.model("a").failures, deployment.model("b").failures) == (1, 1)
        assert deployment.model("a").requests == 2


def test_closing_does_not_wait_for_a_drive_that_hangs_to_tell(repository: Path, drive: Any) -> None:
    hanging = Hanging()
    drive(hanging)
    with serving(repository, floor(repository)) as deployment:
        answer(deployment, "a")
        hanging.hang.set()
        futures = [deployment.submit(name, feed(3)) for name in ("a", "b", "a")]
        assert hanging.caught.wait(PATIENCE)
        closing = threading.Thread(target=deployment.close)
        closing.start()
        for future in futures:
            with pytest.raises(ClosedError):
                future.result(PATIENCE)
        hanging.release.set()
        closing.join(PATIENCE)
        assert not closing.is_alive()


def test_closing_gives_up_on_a_drive_that_never_answers(
    repository: Path, drive: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trt_layering.runtime.deployment._CLOSE_SECONDS", 0.1)
    hanging = Hanging()
    drive(hanging)
    with serving(repository, floor(repository)) as deployment:
        answer(deployment, "a")
        hanging.hang.set()
        future = deployment.submit("a", feed(3))
        assert hanging.caught.wait(PATIENCE)
        deployment.close()
        assert isinstance(future.exception(PATIENCE), ClosedError)
        assert "has not answered" in caplog.text
        hanging.release.set()


def test_closing_while_models_are_opened(repository: Path, drive: Any) -> None:
    hanging = Hanging()
    drive(hanging)
    hanging.hang.set()
    deployment = Deployment(described(repository, floor(repository)))
    deployment.start()
    assert hanging.caught.wait(PATIENCE)
    with pytest.raises(UnavailableError, match="being loaded"):
        deployment.submit("a", feed())
    closing = threading.Thread(target=deployment.close)
    closing.start()
    until(lambda: deployment._fleet.stopping)
    hanging.release.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    deployment.close()


def test_a_deployment_that_never_started(repository: Path) -> None:
    deployment = Deployment(described(repository, None))
    with pytest.raises(UnavailableError, match="being loaded"):
        deployment.submit("a", feed())
    waiting = deployment._changes.ask(lambda: None)
    deployment.close()
    assert waiting.done()


def test_a_fault_of_ours_is_told_and_the_executor_goes_on(
    repository: Path, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(repository, None) as deployment:
        with monkeypatch.context() as patch:
            patch.setattr(Chain, "run_many", lambda *_, **__: 1 / 0)
            with pytest.raises(LayeringError, match="the executor failed"):
                answer(deployment, "a")
            patch.setattr(changes, "open_chain", lambda *_, **__: 1 / 0)
            deployment.unload("b")
            with pytest.raises(LayeringError, match="opening failed"):
                deployment.load("b")
        deployment.load("b")
        same(wanted, deployment)


# ------------------------------------------------------------------------------------------------------------ watching


def test_memory_pressure(repository: Path, wanted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The models shrink to their floors, and grow back in steps; the log has a line for each."""
    kernel, clock = Kernel(tmp_path / "root", True), Clock()
    caplog.set_level(logging.INFO, "trt_layering")
    pressure = Pressure(kernel.root)
    budget = floor(repository) + 8 * SIZE
    with serving(repository, budget, clock=clock, pressure=pressure) as deployment:
        before = taken(deployment)
        assert deployment.pressure is None
        kernel.stall(50, 20)
        with load_of(deployment, wanted, ["a", "b"], each=1):
            tick(deployment, clock)
            assert taken(deployment) <= deployment.budget_bytes == floor(repository)
            assert "20 %" in str(deployment.pressure)
            tick(deployment, clock)
            kernel.stall(0, 0)
            sizes = []
            for _ in range(30):
                tick(deployment, clock)
                sizes.append(deployment.budget_bytes)
        assert deployment.pressure is None
        assert sorted(set(sizes)) == [floor(repository) + 2 * step * SIZE for step in range(5)]
        assert sizes == sorted(sizes)
        assert taken(deployment) == before
    messages = [record.getMessage() for record in caplog.records]
    assert len([message for message in messages if "memory is short" in message]) == 1
    assert len([message for message in messages if "grow back" in message]) == 1


def test_samples(repository: Path) -> None:
    clock = Clock()
    with serving(repository, floor(repository), clock=clock) as deployment:
        for _ in range(3):
            answer(deployment, "a")
        clock.now += 1
        deployment._watcher.tick(clock.now)
        clock.now += 0.5
        deployment._watcher.tick(clock.now)
        [sample] = deployment.history()
        assert (sample.time, sample.models["a"].requests, sample.models["b"].requests) == (1001.0, 3, 0)
        assert (sample.models["a"].mean_seconds, sample.models["b"].mean_seconds) == (0.0, None)
        assert 0 <= sample.models["a"].stall_share <= 1
        for _ in range(400):
            clock.now += 1
            deployment._watcher.tick(clock.now)
        assert len(deployment.history()) == 300
        assert deployment.history()[-1].models["a"].requests == 0


def test_the_watcher_ends_requests_by_itself(repository: Path, drive: Any) -> None:
    hanging = Hanging()
    drive(hanging)
    with serving(repository, floor(repository), watched=True) as deployment:
        answer(deployment, "a")
        hanging.hang.set()
        future = deployment.submit("a", feed(3), timeout=0.05)
        with pytest.raises(TimedOutError):
            future.result(PATIENCE)
        hanging.release.set()


def test_the_heartbeat_goes_on_while_there_is_nothing_to_do(repository: Path) -> None:
    with serving(repository, None) as deployment:
        before = deployment.heartbeat
        until(lambda: deployment.heartbeat > before)
