"""Several requests at once answer as each would alone, read the weights once a wave, and stay within the budget."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import chains
from tests.chains import assert_same, budgets, cut_by, feed, in_this_process, layers, opened, saved, uncut
from tests.graph import strategies
from tests.runtime.drives import PATIENCE, Faulty, Hanging, failure
from trt_layering import building
from trt_layering.building import Built, build
from trt_layering.errors import BackendError, BudgetError, ClosedError, InputError, ReadError, UsageError
from trt_layering.runtime import supply
from trt_layering.runtime.footprint import MOST_WAVE, Footprint
from trt_layering.store.manifest import PAGE, write_manifest
from trt_layering.store.reader import WeightFile

COUNT = 6
ROWS = 3

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module", params=["dynamic", "fixed"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Activations are allocated as they come, or have their buffers."""
    batch = "n" if request.param == "dynamic" else ROWS
    return saved(layers(COUNT, batch=batch), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Six blocks of one layer each; what the rehearsal measures of memory is replaced by numbers that are known."""
    repository = tmp_path_factory.mktemp("engines")
    with in_this_process():
        done = build(source, name="layers", repository=repository, block_size="16KiB", optimise=False)
    assert len(done.manifest.blocks) == COUNT
    return needing(done, activations=8192)


def needing(built: Built, activations: int) -> Built:
    """The same chain, in the same place, said to need so much."""
    memory = msgspec.structs.replace(
        built.manifest.memory, activations=activations, scratch=1 << 20, engines=1 << 20, shapes={"x": (ROWS, 64)}
    )
    manifest = msgspec.structs.replace(built.manifest, memory=memory)
    write_manifest(built.path, manifest)
    return Built(built.path, manifest)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets chains read through a stand-in for `os.preadv`."""

    def use(preadv: Any) -> None:
        monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))

    return use


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() <= before


def floor(built: Built, wave: int) -> int:
    return Footprint.of(built.manifest, wave).floor


def several(count: int) -> list[dict[str, Any]]:
    return [feed(ROWS, seed) for seed in range(count)]


# ------------------------------------------------------------------------------------------------------ right answers


@settings(max_examples=20)
@given(proto=strategies.models(), fixed=st.booleans(), data=st.data())
def test_any_graph_at_any_budget_answers_each_request_as_alone(
    tmp_path_factory: pytest.TempPathFactory, proto: onnx.ModelProto, fixed: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    if fixed:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 2
    path = saved(proto, folder / "model.onnx")

    def choose(positions: list[int]) -> list[int]:
        return sorted(data.draw(st.sets(st.sampled_from(positions)))) if positions else []

    with in_this_process(streamed_from=64), cut_by(choose):
        done = build(path, repository=folder, optimise=False, split=False)
    batches = data.draw(st.lists(st.just(2) if fixed else st.integers(1, 4), min_size=1, max_size=7))
    asked = [strategies.feeds(batch, seed=seed) for seed, batch in enumerate(batches)]
    wanted = [uncut(path, one) for one in asked]
    wave = data.draw(st.integers(1, 5))
    needs = Footprint.of(done.manifest, wave)
    arena = data.draw(st.integers(needs.largest_block, max(needs.weights, needs.largest_block)))
    for budget in {needs.floor, needs.fixed + needs.waves + arena, needs.resident}:
        with opened(done, max(budget, 1), wave=wave) as chain:
            for got in (chain.run_many(asked, wave=wave), [chain.run(one) for one in asked], chain.run_many(asked)):
                for one, answer in zip(wanted, got, strict=True):
                    assert_same(one, answer)
            assert chain.stats()["requests"] == 3 * len(asked)


def test_requests_of_other_shapes_in_one_wave(tmp_path: Path) -> None:
    source = saved(layers(COUNT), tmp_path / "layers.onnx")
    with in_this_process():
        done = build(source, repository=tmp_path, block_size="16KiB", optimise=False)
    asked = [feed(rows, rows) for rows in (1, 5, 0, 2, 64, 5)]
    with opened(done, max(floor(done, 6), 1), wave=6) as chain:
        for one, answer in zip(asked, chain.run_many(asked), strict=True):
            assert_same(uncut(source, one), answer)


@pytest.mark.parametrize("mode", ["floor", "middle", "all in the arena", "resident"])
def test_answers_belong_to_the_caller(source: Path, built: Built, mode: str) -> None:
    asked = several(8)
    with opened(built, budgets(built)[mode]) as chain:
        first = chain.run_many(asked, wave=4)
        first[3]["y"][:] = 7
        second = chain.run_many(asked, wave=3)
        chain.run_many(several(8)[::-1], wave=8)
    for one, answer in zip(asked, second, strict=True):
        assert_same(uncut(source, one), answer)
    assert (first[3]["y"] == 7).all()
    assert_same(uncut(source, asked[4]), first[4])


def test_text_goes_through_a_wave(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    proto = chains.model(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("MatMul", ["h", "w"], ["y"]),
            helper.make_node("Identity", ["t"], ["u"]),
        ],
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64]),
            helper.make_tensor_value_info("t", TensorProto.STRING, [2]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 64]),
            helper.make_tensor_value_info("u", TensorProto.STRING, [2]),
        ],
        [weight],
    )
    with in_this_process():
        done = build(saved(proto, tmp_path / "t.onnx"), repository=tmp_path, block_size="16KiB", optimise=False)
    asked = [{**feed(2, seed), "t": np.array([f"a{seed}", "b"], object)} for seed in range(3)]
    with opened(done, max(floor(done, 3), 1), wave=3) as chain:
        for one, answer in zip(asked, chain.run_many(asked), strict=True):
            np.testing.assert_array_equal(answer["y"], one["x"])
            assert answer["u"].tolist() == one["t"].tolist()


# --------------------------------------------------------------------------------------------------------- what it is


def test_weights_are_read_once_a_wave(built: Built) -> None:
    weights = built.manifest.weights_bytes
    with opened(built, floor(built, 4), wave=4) as chain:
        assert chain.stats()["mode"] == "sequential"
        chain.run_many(several(12), wave=4)
        stats = chain.stats()
    assert (stats["requests"], stats["sweeps"]) == (12, 3)
    assert 3 * weights <= stats["bytes_read"] <= 3 * weights + stats["arena_bytes"]
    assert stats["fallbacks"] == []


def test_each_block_executes_for_the_whole_wave_in_turn(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    with opened(built, floor(built, 3), wave=3) as chain:
        execute = chain._execute

        def note(g: int, place: int, *rest: Any) -> Any:
            done.append((g, place))
            return execute(g, place, *rest)

        monkeypatch.setattr(chain, "_execute", note)
        chain.run_many(several(5), wave=3)
    assert done == [(g, place) for g in range(2 * COUNT) for place in range(3 if g < COUNT else 2)]


def test_a_wave_larger_than_there_is_room_for_is_cut_and_said_once(
    source: Path, built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    asked = several(8)
    with caplog.at_level(logging.WARNING, logger="trt_layering"), opened(built, floor(built, 3), wave=3) as chain:
        for _ in range(2):
            for one, answer in zip(asked, chain.run_many(asked), strict=True):
                assert_same(uncut(source, one), answer)
        stats = chain.stats()
    assert (stats["requests"], stats["sweeps"]) == (16, 6)
    [told] = stats["fallbacks"]
    assert "waves of 8 requests were asked for and the budget leaves room for 3" in told
    assert [record.getMessage() for record in caplog.records].count(f"chain layers: {told}") == 1


def test_a_chain_opened_without_a_wave_uses_what_the_arena_leaves(built: Built, tmp_path: Path) -> None:
    """At the floor that is nothing; a page above it, room for 64 requests of 64 bytes."""
    with opened(built, floor(built, 1)) as chain:
        chain.run_many(several(2))
        assert chain.stats()["sweeps"] == 2
    with in_this_process():
        source = saved(layers(COUNT), tmp_path / "layers.onnx")
        small = needing(build(source, repository=tmp_path, block_size="16KiB", optimise=False), activations=64)
    with opened(small, floor(small, 1) + PAGE - 1) as chain:
        chain.run_many(several(8))
        assert chain.stats()["sweeps"] == 1
        assert chain.stats()["fallbacks"] == []


def test_where_everything_is_resident_requests_run_one_by_one(built: Built) -> None:
    needs = Footprint.of(built.manifest)
    for budget in (needs.fixed + needs.weights, None):
        with opened(built, budget) as chain:
            chain.run_many(several(4))
            stats = chain.stats()
        assert (stats["mode"], stats["requests"], stats["sweeps"], stats["fallbacks"]) == ("resident", 4, 4, [])


# -------------------------------------------------------------------------------------------------------------- memory


@given(
    wave=st.integers(1, 20),
    request_bytes=st.integers(0, 1 << 24),
    blocks=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
    extras=st.lists(st.integers(0, 1 << 24), min_size=2, max_size=2),
)
def test_arena_and_waves_fit_every_budget_and_more_budget_is_never_less_arena(
    built: Built, wave: int, request_bytes: int, blocks: list[int], extras: list[int]
) -> None:
    largest, weights = max(blocks) * PAGE, sum(blocks) * PAGE
    needs = Footprint(largest, 8192, 12345, 54321, weights, 0, 1 << 30, request_bytes, wave)
    assert sum(needs.parts.values()) == needs.floor
    arenas = []
    for extra in sorted(extras):
        budget = needs.floor + extra
        arena = needs.arena(budget, built.manifest)
        assert arena % PAGE == 0
        assert largest <= arena <= weights
        assert needs.fixed + arena + (needs.waves if arena < weights else 0) <= budget
        arenas.append(arena)
    assert arenas == sorted(arenas)
    with pytest.raises(BudgetError):
        needs.arena(needs.floor - 1, built.manifest)


def test_room_for_a_wave_raises_the_floor(built: Built) -> None:
    needs = Footprint.of(built.manifest, 4)
    assert needs.request == 8192
    assert needs.floor == Footprint.of(built.manifest).floor + 3 * 8192
    with pytest.raises(BudgetError, match=r"waves 24\.0 KiB") as caught:
        opened(built, needs.floor - 1, wave=4)
    assert (caught.value.floor, caught.value.parts) == (needs.floor, needs.parts)
    assert caught.value.parts["waves"] == 3 * 8192
    most = Footprint.of(built.manifest, MOST_WAVE)
    assert most.floor == most.fixed + most.weights, "where all weights fit, a wave needs nothing more"
    with opened(built, most.floor, wave=MOST_WAVE) as chain:
        assert len(chain.run_many(several(3))) == 3


def test_a_floor_that_waves_make_says_what_would_lower_it(built: Built) -> None:
    needs = Footprint(4096, 0, 0, 0, 1 << 30, 0, 1 << 30, 1 << 20, 100)
    with pytest.raises(BudgetError) as caught:
        needs.arena(1, built.manifest)
    assert "smaller waves" in caught.value.remedy


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("wave", [0, -1, True, False, 2.0, "8", None, [8], MOST_WAVE + 1, 10**9])
def test_waves_that_are_none(built: Built, wave: Any) -> None:
    with opened(built) as chain:
        with pytest.raises(UsageError, match="a wave is 1 to 64 requests, not") as caught:
            chain.run_many(several(1), wave=wave)
        assert caught.value.remedy
        with pytest.raises(UsageError):
            chain.run_many([], wave=wave)
    with pytest.raises(UsageError, match="wave"):
        opened(built, wave=wave)


@pytest.mark.parametrize("feeds", [feed(), None, "feeds", b"x", np.zeros((2, 3)), (one for one in several(2)), 3])
def test_feeds_that_are_no_list(built: Built, feeds: Any) -> None:
    with opened(built) as chain, pytest.raises(UsageError, match="are a list, not") as caught:
        chain.run_many(feeds)
    assert caught.value.remedy


def test_no_requests_are_no_work(built: Built) -> None:
    for budget in budgets(built).values():
        with opened(built, budget) as chain:
            assert chain.run_many([]) == chain.run_many(()) == []
            assert chain.stats()["sweeps"] == 0


@pytest.mark.parametrize("bad", [{}, {"x": np.zeros((ROWS, 65), np.float32)}, {"z": 1}, None, 5])
def test_a_request_that_does_not_fit_is_named_before_any_work(built: Built, bad: Any) -> None:
    asked: list[Any] = several(5)
    asked[3] = bad
    with opened(built, floor(built, 2), wave=2) as chain:
        with pytest.raises(InputError) as caught:
            chain.run_many(asked, wave=2)
        assert caught.value.where.startswith("request 3")
        assert caught.value.remedy
        assert chain.stats()["requests"] == 0


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("number", range(1, 2 * COUNT, 3))
def test_a_failed_read_ends_its_call_and_the_next_is_right(
    source: Path, built: Built, drive: Callable[[Any], None], number: int
) -> None:
    drive(Faulty({number: failure()}))
    asked, errors = several(4), []
    with opened(built, floor(built, 4), wave=4) as chain:
        for _ in range(3):
            try:
                answers = chain.run_many(asked)
            except ReadError as error:
                errors.append(error)
                continue
            for one, answer in zip(asked, answers, strict=True):
                assert_same(uncut(source, one), answer)
        stats = chain.stats()
    assert len(errors) == 1
    assert (stats["sweeps"], stats["requests"]) == (2, 8)


def test_an_operator_that_fails_for_one_request_ends_its_wave(tmp_path: Path) -> None:
    info = helper.make_tensor_value_info
    proto = chains.model(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "shape"], ["y"])],
        [info("x", TensorProto.FLOAT, ["n", 64]), info("shape", TensorProto.INT64, [2])],
        [info("y", TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(np.ones((64, 64), np.float32), "w")],
    )
    path = saved(proto, tmp_path / "reshape.onnx")
    good = {"x": np.ones((2, 64), np.float32), "shape": np.array([1, 128])}
    with pytest.MonkeyPatch.context() as patch, in_this_process():
        patch.setattr(building.inputs, "seeded", lambda *_: good)
        done = build(path, repository=tmp_path, optimise=False)
    with opened(done, max(floor(done, 3), 1), wave=3) as chain:
        for _ in range(2):
            with pytest.raises(BackendError, match="Reshape"):
                chain.run_many([good, {**good, "shape": np.array([7, 11])}, good])
            for answer in chain.run_many([good] * 3):
                assert_same(uncut(path, good), answer)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def carry_out() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=carry_out)
    thread.start()
    return thread, results


def test_close_ends_a_wave_that_waits_for_the_drive(built: Built, drive: Callable[[Any], None]) -> None:
    hanging = Hanging()
    drive(hanging)
    chain = opened(built, floor(built, 4), wave=4)
    chain.run_many(several(4))
    hanging.hang.set()
    running, results = in_thread(lambda: [chain.run_many(several(8), wave=4) for _ in range(3)])
    assert hanging.caught.wait(PATIENCE)
    closing, closed = in_thread(chain.close)
    running.join(PATIENCE)
    assert isinstance(results[0], ClosedError)
    hanging.release.set()
    closing.join(PATIENCE)
    assert closed == [None]
    with pytest.raises(ClosedError, match="layers"):
        chain.run_many(several(1))


@pytest.mark.parametrize("stop", range(0, 3 * COUNT, 5))
def test_close_within_a_wave_by_a_signal_handler(built: Built, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Between any two executions of the wave, in the thread that runs it."""
    chain = opened(built, floor(built, 3), wave=3)
    execute, done = chain._execute, []

    def close_at(*arguments: Any) -> Any:
        if len(done) == stop:
            chain.close()
        done.append(arguments[:2])
        return execute(*arguments)

    monkeypatch.setattr(chain, "_execute", close_at)
    with pytest.raises(ClosedError):
        chain.run_many(several(3))
    assert len(done) == stop + 1


def test_close_by_a_signal_handler_while_the_loader_is_told_of_a_block(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that runs holds the loader's lock then, which the loader's threads need to end."""
    chain = opened(built, floor(built, 3), wave=3)
    loader = chain._loader
    finish = loader.finish

    def closing(g: int) -> None:
        with loader._lock:
            chain.close()
            finish(g)

    monkeypatch.setattr(loader, "finish", closing)
    running, results = in_thread(lambda: chain.run_many(several(3)))
    running.join(PATIENCE)
    assert isinstance(results[0], ClosedError)


def test_close_by_a_signal_handler_while_a_wave_is_looked_at(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread that asks for numbers, at any moment of it."""
    chain = opened(built, floor(built, 3), wave=3)
    chain.run_many(several(3))
    seconds = chain._loader._meter.seconds

    def closing(now: float) -> float:
        if not chain._loader.owns_this_thread():
            chain.close()
        return seconds(now)

    monkeypatch.setattr(chain._loader._meter, "seconds", closing)
    asking, results = in_thread(chain.stats)
    asking.join(PATIENCE)
    assert results[0]["requests"] == 3


def test_threads_take_turns_between_waves(source: Path, built: Built) -> None:
    wanted = {seed: uncut(source, feed(ROWS, seed)) for seed in range(4)}
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        try:
            for _ in range(8):
                assert_same(wanted[seed], chain.run(feed(ROWS, seed)))
                for answer in chain.run_many([feed(ROWS, seed)] * 5, wave=2):
                    assert_same(wanted[seed], answer)
        except BaseException as error:
            wrong.append(error)

    with opened(built, floor(built, 2), wave=2) as chain:
        threads = [threading.Thread(target=ask, args=[seed]) for seed in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        stats = chain.stats()
    assert wrong == []
    assert (stats["requests"], stats["sweeps"]) == (4 * 8 * 6, 4 * 8 * 4)
