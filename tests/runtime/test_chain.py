"""A chain answers as the uncut model does, at every budget and from every thread, and fails in words."""

from __future__ import annotations

import gc
import logging
import shutil
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

from tests import chains, real_models
from tests.chains import (
    assert_close,
    assert_same,
    assert_valid_by_themselves,
    budgets,
    cut_by,
    feed,
    in_this_process,
    layers,
    opened,
    saved,
    uncut,
)
from tests.graph import strategies
from tests.runtime import measured
from tests.runtime.drives import PATIENCE, Broken, Faulty, Hanging, failure
from trt_layering import building
from trt_layering.building import Built, build
from trt_layering.errors import (
    BackendError,
    BudgetError,
    ClosedError,
    CorruptError,
    ForeignError,
    InputError,
    MemoryLimitError,
    NotBuiltError,
    ReadError,
    UsageError,
)
from trt_layering.runtime import footprint as footprint_module
from trt_layering.runtime import supply
from trt_layering.runtime.chain import Chain, open_chain
from trt_layering.runtime.footprint import Footprint, footprint
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import PAGE, WEIGHTS_FILE, write_manifest
from trt_layering.store.reader import WeightFile

COUNT = 6
BLOCK_SIZES = dict.fromkeys(real_models.REAL_MODELS, "2MiB") | {"common": "4MiB", "minilm": "4MiB", "pp_cls": "64KiB"}
STATS = {
    "requests", "sweeps", "bytes_read", "stall_seconds", "execute_seconds", "read_seconds", "read_rate", "slow_reads",
    "arena_bytes", "resident_bytes", "activation_bytes",
    "scratch_bytes", "engine_bytes", "device_bytes", "budget_bytes", "floor_bytes", "blocks", "mode",
    "predicted_seconds", "fallbacks",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(COUNT), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Six blocks of one layer each, not optimised, so that answers are exact."""
    return six_blocks(source, tmp_path_factory.mktemp("engines"), optimise=False)


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The same, optimised: with all weights in memory it is opened as a whole."""
    return six_blocks(source, tmp_path_factory.mktemp("prepared"), optimise=True)


def six_blocks(source: Path, repository: Path, *, optimise: bool) -> Built:
    """What the rehearsal measures of memory is replaced by numbers that are known."""
    with in_this_process():
        done = build(source, name="layers", repository=repository, block_size="16KiB", optimise=optimise)
    assert len(done.manifest.blocks) == COUNT
    memory = msgspec.structs.replace(done.manifest.memory, activations=8192, scratch=1 << 20, engines=1 << 20)
    return republished(done, memory=memory)


def republished(built: Built, **changes: Any) -> Built:
    """The same chain with another manifest, in the same place."""
    manifest = msgspec.structs.replace(built.manifest, **changes)
    write_manifest(built.path, manifest)
    return Built(built.path, manifest)


@pytest.fixture
def copy(prepared: Built, tmp_path: Path) -> Built:
    """A copy of the optimised chain that a test may damage."""
    shutil.copytree(prepared.path.parent.parent, tmp_path / "engines")
    return Built(tmp_path / "engines" / "layers" / prepared.path.name, prepared.manifest)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets chains read through a stand-in for `os.preadv`."""

    def use(preadv: Any) -> None:
        monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))

    return use


# ------------------------------------------------------------------------------------------------------ right answers


@settings(max_examples=25)
@given(proto=strategies.models(), batch=st.integers(1, 3), fixed=st.booleans(), data=st.data())
def test_any_cuts_and_any_budget_give_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, proto: onnx.ModelProto, batch: int, fixed: bool, data: st.DataObject
) -> None:
    """Optimisation off; dims free or fixed, so that activations are allocated as they come or have their buffers."""
    folder = tmp_path_factory.mktemp("any")
    proto = _with_batch(proto, batch) if fixed else proto
    path = saved(proto, folder / "model.onnx")
    legal: list[int] = []

    def choose(positions: list[int]) -> list[int]:
        legal.extend(positions)
        return sorted(data.draw(st.sets(st.sampled_from(positions)))) if positions else []

    with in_this_process(streamed_from=64), cut_by(choose):
        done = build(path, repository=folder, optimise=False, split=False)
    assert done.manifest.check.max_abs_diff == 0
    assert legal or len(done.manifest.blocks) == 1
    asked = strategies.feeds(batch, seed=data.draw(st.integers(0, 5)))
    wanted = uncut(path, asked)
    needs = Footprint.of(done.manifest)
    arena = data.draw(st.integers(needs.largest_block, max(needs.weights, needs.largest_block)))
    for budget in {needs.floor, needs.fixed + arena, needs.resident}:
        with opened(done, max(budget, 1)) as chain:
            for _ in range(3):
                assert_same(wanted, chain.run(asked))


@settings(max_examples=25)
@given(proto=strategies.models(), batch=st.integers(1, 3), fixed=st.booleans(), data=st.data())
def test_optimised_chains_agree_closely(
    tmp_path_factory: pytest.TempPathFactory, proto: onnx.ModelProto, batch: int, fixed: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("optimised")
    path = saved(_with_batch(proto, batch) if fixed else proto, folder / "model.onnx")

    def choose(positions: list[int]) -> list[int]:
        return sorted(data.draw(st.sets(st.sampled_from(positions)))) if positions else []

    with in_this_process(streamed_from=64), cut_by(choose):
        done = build(path, repository=folder)
    asked = strategies.feeds(batch, seed=data.draw(st.integers(0, 5)))
    wanted = uncut(path, asked, optimised=True)
    for budget in set(budgets(done).values()):
        with opened(done, budget) as chain:
            for _ in range(2):
                assert_close(wanted, chain.run(asked))
    assert_valid_by_themselves(done)


def _with_batch(proto: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return fixed


@pytest.mark.parametrize("name", real_models.REAL_MODELS)
def test_real_models_give_the_same_bits(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    path, asked = real_model(name), real_models.feeds(name)
    shapes = {key: array.shape for key, array in asked.items()}
    with in_this_process():
        done = build(
            path,
            name=name,
            repository=tmp_path,
            block_size=BLOCK_SIZES[name],
            shapes=shapes,
            optimise=False,
            split=False,
        )
    assert len(done.manifest.blocks) > 2
    assert done.manifest.check.max_abs_diff == 0
    wanted = uncut(path, asked)
    for budget in budgets(done).values():
        with opened(done, budget) as chain:
            for _ in range(2):
                assert_same(wanted, chain.run(asked))


@pytest.mark.parametrize("name", real_models.REAL_MODELS)
def test_real_models_optimised_agree_closely(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Through the public functions, as users build, with child processes and weights split."""
    import trt_layering as tl

    path, asked = real_model(name), real_models.feeds(name)
    shapes = {key: array.shape for key, array in asked.items()}
    done = tl.build(path, name=name, repository=tmp_path, block_size=BLOCK_SIZES[name], shapes=shapes)
    assert len(done.manifest.blocks) > 2
    wanted = uncut(path, asked, optimised=True)
    modes = set()
    for budget in budgets(done).values():
        with tl.open_chain(name, repository=tmp_path, budget=budget) as chain:
            for _ in range(2):
                assert_close(wanted, chain.run(asked))
            modes.add(chain.stats()["mode"])
    assert "resident" in modes
    assert len(modes) > 1
    assert_valid_by_themselves(done)


def test_dynamic_dims_stay_dynamic(source: Path, built: Built) -> None:
    for budget in budgets(built).values():
        with opened(built, budget) as chain:
            for rows in (1, 5, 2, 64):
                assert_same(uncut(source, feed(rows)), chain.run(feed(rows)))


def test_outputs_belong_to_the_caller(source: Path, built: Built) -> None:
    with opened(built, budgets(built)["floor"]) as chain:
        first = chain.run(feed(seed=1))
        kept = {name: array.copy() for name, array in first.items()}
        first["y"][:] = 7
        assert_same(kept, chain.run(feed(seed=1)))
        again = chain.run(feed(seed=1))
        chain.run(feed(seed=2))
        assert_same(kept, again)
    assert_same(kept, again)


def test_feeds_stay_as_they_are(built: Built) -> None:
    asked = feed()
    asked["x"].setflags(write=False)
    kept = asked["x"].copy()
    with opened(built) as chain:
        transposed = np.asfortranarray(asked["x"])
        assert_same(chain.run(asked), chain.run({"x": transposed}))
    np.testing.assert_array_equal(kept, asked["x"])


# ----------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("mode", ["floor", "middle", "resident"])
def test_each_thread_gets_its_own_answer(source: Path, built: Built, mode: str) -> None:
    wanted = {seed: uncut(source, feed(seed=seed)) for seed in range(4)}
    wrong: list[Any] = []

    def ask(seed: int) -> None:
        try:
            for _ in range(15):
                assert_same(wanted[seed], chain.run(feed(seed=seed)))
        except BaseException as error:
            wrong.append(error)

    with opened(built, budgets(built)[mode]) as chain:
        threads = [threading.Thread(target=ask, args=[seed]) for seed in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert chain.stats()["sweeps"] == 60
    assert wrong == []


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


def test_close_from_another_thread_ends_a_run_that_waits_for_the_drive(
    built: Built, drive: Callable[[Any], None]
) -> None:
    hanging = Hanging()
    drive(hanging)
    chain = opened(built, budgets(built)["floor"])
    chain.run(feed())
    hanging.hang.set()
    running, results = in_thread(lambda: [chain.run(feed()) for _ in range(3)])
    assert hanging.caught.wait(PATIENCE)
    closing, closed = in_thread(chain.close)
    running.join(1)
    assert not running.is_alive()
    assert isinstance(results[0], ClosedError)
    hanging.release.set()
    closing.join(PATIENCE)
    assert closed == [None]
    with pytest.raises(ClosedError, match="layers"):
        chain.run(feed())


def test_close_while_others_run_and_close(built: Built) -> None:
    for _ in range(5):
        chain = opened(built, budgets(built)["floor"])
        begun = threading.Event()

        def run_on(chain: Chain = chain, begun: threading.Event = begun) -> None:
            while True:
                chain.run(feed())
                begun.set()

        runs = [in_thread(run_on) for _ in range(2)]
        assert begun.wait(PATIENCE)
        closes = [in_thread(chain.close) for _ in range(2)]
        for thread, _ in (*runs, *closes):
            thread.join(PATIENCE)
        assert all(isinstance(results[0], ClosedError) for _, results in runs)
        assert [results for _, results in closes] == [[None], [None]]


def test_no_thread_stays_and_memory_goes_back(built: Built, prepared: Built) -> None:
    before = {thread.name for thread in threading.enumerate()}
    chain = opened(built, budgets(built)["floor"])
    chain.run(feed())
    assert any(thread.name.startswith("trt-layering-loader") for thread in threading.enumerate())
    chain.close()
    chain.close()
    assert {thread.name for thread in threading.enumerate()} == before
    chain = opened(prepared)
    chain.run(feed())
    chain.close()
    assert not _mapped(prepared.path / WEIGHTS_FILE)


def test_a_chain_that_nobody_holds_closes_itself(built: Built) -> None:
    chain = opened(built, budgets(built)["floor"])
    chain.run(feed())
    del chain
    gc.collect()
    assert not any(thread.name.startswith("trt-layering-loader") for thread in threading.enumerate())


def _raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def _mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


# ------------------------------------------------------------------------------------------------------------ failures


def test_after_a_read_error_the_next_run_is_right(source: Path, built: Built, drive: Callable[[Any], None]) -> None:
    wanted = uncut(source, feed())
    broken = Broken()
    drive(broken)
    for mode in ("floor", "middle"):
        with opened(built, budgets(built)[mode]) as chain:
            assert_same(wanted, chain.run(feed()))
            broken.broken.set()
            running, results = in_thread(lambda: [chain.run(feed()) for _ in range(2)])
            running.join(1)
            assert isinstance(results[0], ReadError)
            assert "Input/output error" in str(results[0])
            broken.broken.clear()
            # Reads ahead of this run may still have failed before the drive was well again.
            for _ in range(2):
                try:
                    assert_same(wanted, chain.run(feed()))
                except ReadError:
                    continue
                break
            assert_same(wanted, chain.run(feed()))


@pytest.mark.parametrize("number", range(1, 2 * COUNT))
def test_a_single_failed_read_costs_one_run(
    source: Path, built: Built, drive: Callable[[Any], None], number: int
) -> None:
    drive(Faulty({number: failure()}))
    errors = []
    with opened(built, budgets(built)["floor"]) as chain:
        for _ in range(3):
            try:
                assert_same(uncut(source, feed()), chain.run(feed()))
            except ReadError as error:
                errors.append(error)
        assert chain.stats()["sweeps"] == 2
    assert len(errors) == 1
    assert WEIGHTS_FILE in errors[0].where


def test_a_read_error_while_opening(prepared: Built, drive: Callable[[Any], None]) -> None:
    before = threading.active_count()
    for mode in ("floor", "resident"):
        drive(Faulty({0: failure()}))
        with pytest.raises(ReadError):
            opened(prepared, budgets(prepared)[mode])
    assert threading.active_count() == before


@pytest.mark.parametrize("extent", range(COUNT))
def test_a_flipped_bit(copy: Built, extent: int) -> None:
    """Found from `run` where weights are streamed, when opening where they stay; and it stays an error."""
    weights = copy.path / WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[copy.manifest.extents[extent].offset + 1000] ^= 16
    weights.write_bytes(data)
    with opened(copy, budgets(copy)["floor"]) as chain:
        for _ in range(2):
            with pytest.raises(CorruptError, match=f"extent {extent}") as caught:
                chain.run(feed())
            assert f"w{extent}" in caught.value.where
            assert "trt-layering build" in caught.value.remedy
        assert chain.stats()["sweeps"] == 0
    with pytest.raises(CorruptError, match=f"extent {extent}"):
        opened(copy)


def test_a_store_that_lost_its_end(copy: Built) -> None:
    weights = copy.path / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-PAGE])
    for budget in budgets(copy).values():
        with pytest.raises(CorruptError, match=r"weights\.bin has"):
            opened(copy, budget)


def test_a_store_that_loses_its_end_while_open(copy: Built) -> None:
    weights = copy.path / WEIGHTS_FILE
    with opened(copy, budgets(copy)["floor"]) as chain:
        chain.run(feed())
        with open(weights, "r+b") as file:
            file.truncate(PAGE)
        runs = (chain.run(feed()) for _ in range(3))  # what had been read ahead still executes
        with pytest.raises(CorruptError, match="ends at byte"):
            list(runs)


@pytest.mark.parametrize("optimise", [True, False])
def test_resident_weights_do_not_hang_on_their_file(tmp_path: Path, optimise: bool) -> None:
    """A Gather table is not prepacked: ONNX Runtime would go on using the mapped file, and die with it."""
    rng = np.random.default_rng(0)
    table, weight = (rng.standard_normal(shape, np.float32) for shape in ((512, 64), (64, 64)))
    proto = chains.model(
        [helper.make_node("Gather", ["t", "i"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])],
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64])],
        [numpy_helper.from_array(table, "t"), numpy_helper.from_array(weight, "w")],
    )
    file = saved(proto, tmp_path / "m.onnx")
    done = build(file, repository=tmp_path / "engines", block_size="64KiB", optimise=optimise)
    feeds = {"i": np.arange(512)}
    with opened(done) as chain:
        assert chain.stats()["mode"] == "resident"
        wanted = chain.run(feeds)
        (done.path / WEIGHTS_FILE).write_bytes(b"\xff" * PAGE)
        assert not _mapped(done.path / WEIGHTS_FILE)
        assert_same(chain.run(feeds), wanted)
    np.testing.assert_allclose(wanted["y"], table @ weight, rtol=1e-4, atol=1e-4)


def test_close_by_a_signal_handler_during_a_run(built: Built) -> None:
    chain = opened(built, budgets(built)["floor"])

    def close_within(index: int, seconds: float, live: Any) -> None:
        chain.close()

    with pytest.raises(ClosedError):
        chain.observe(feed(), close_within)
    with pytest.raises(ClosedError):
        chain.run(feed())


def test_an_interruption_before_the_first_block_leaves_the_chain_usable(
    source: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(built, budgets(built)["floor"]) as chain:
        chain.run(feed())
        with monkeypatch.context() as patch:
            patch.setattr(chain, "_sweep", _raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                chain.run(feed())
        assert_same(chain.run(feed()), uncut(source, feed()))


def test_a_run_within_a_run_is_refused(source: Path, built: Built) -> None:
    """A signal handler may try it: it would take the place of the blocks that are being executed."""
    with opened(built, budgets(built)["floor"]) as chain:
        with pytest.raises(UsageError, match="within"):
            chain.observe(feed(), lambda index, seconds, live: chain.run(feed()))
        assert_same(chain.run(feed()), uncut(source, feed()))


def test_close_by_a_signal_handler_before_the_first_block(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has its turn already, and is not known to run yet."""
    chain = opened(built, budgets(built)["floor"])
    turn = chain._turn

    class Closing:
        def __enter__(self) -> None:
            turn.acquire()
            monkeypatch.setattr(chain, "_turn", turn)
            chain.close()

        def __exit__(self, *_: object) -> None:
            turn.release()

    monkeypatch.setattr(chain, "_turn", Closing())
    with pytest.raises(ClosedError):
        chain.run(feed())


def test_an_interruption_of_the_recovery_from_an_interruption(
    source: Path, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(built, budgets(built)["floor"]) as chain:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(chain, "_sweep", _raising(KeyboardInterrupt()))
                patch.setattr(chain._loader, "abandon", _raising(KeyboardInterrupt()))
                with pytest.raises(KeyboardInterrupt):
                    chain.run(feed())
            assert_same(chain.run(feed()), uncut(source, feed()))


def test_a_forked_process_is_told_and_its_parent_goes_on(source: Path, built: Built) -> None:
    """The child has none of the loader's threads and must not wait for them."""
    assert measured.call(measured.forked, repository=str(built.path.parent.parent), name="layers") == {
        "run": "ClosedError",
        "close": "returned",
        "exit": 0,
        "parent": True,
    }


def test_threads_that_cannot_be_had(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", _raising(RuntimeError("can't start new thread")))
    with pytest.raises(MemoryLimitError, match="no thread for the loader"):
        open_chain("layers", repository=built.path.parent.parent, budget=budgets(built)["floor"])


def test_memory_that_cannot_be_had(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(built, budgets(built)["floor"]) as chain:
        monkeypatch.setattr(chain._runtime, "unwrap", _raising(MemoryError()))
        with pytest.raises(MemoryLimitError, match="memory ran out"):
            chain.run(feed())


def test_an_input_larger_in_one_dim_is_noted(built: Built) -> None:
    with opened(built, budgets(built)["floor"]) as chain:
        chain.run(feed(1))
        assert chain.stats()["fallbacks"] == []
        chain.run(feed(2))
        assert "larger than 1x64" in chain.stats()["fallbacks"][0]


def test_a_changed_engine(copy: Built) -> None:
    engine = copy.path / copy.manifest.blocks[3].file
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    with pytest.raises(CorruptError, match=engine.name):
        opened(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.9.1"}, r"built by onnxruntime 0\.9\.1 and this machine has"),
        ({"name": "tpu"}, "'tpu', which this version does not have"),
    ],
)
def test_a_store_of_another_library(copy: Built, change: dict[str, str], said: str) -> None:
    other = republished(copy, backend=msgspec.structs.replace(copy.manifest.backend, **change))
    with pytest.raises(ForeignError, match=said) as caught:
        opened(other)
    assert "build" in caught.value.remedy


def test_a_store_of_another_machine(copy: Built) -> None:
    """Matters where the graph was optimised for a machine; one that was not runs anywhere."""
    elsewhere = msgspec.structs.replace(copy.manifest.backend, fingerprint={"machine": "pdp11", "instructions": "mov"})
    with opened(republished(copy, backend=elsewhere, optimised=False)) as chain:
        chain.run(feed())
    with pytest.raises(ForeignError, match="machine pdp11, instructions mov") as caught:
        opened(republished(copy, backend=elsewhere, optimised=True))
    assert "build" in caught.value.remedy


def test_an_operator_that_fails_is_a_backend_error_and_costs_one_run(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((WIDTH := 64, 64), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "shape"], ["y"])]
    info = helper.make_tensor_value_info
    proto = chains.model(
        nodes,
        [info("x", TensorProto.FLOAT, ["n", WIDTH]), info("shape", TensorProto.INT64, [2])],
        [info("y", TensorProto.FLOAT, [None, None])],
        [weight],
    )
    path = saved(proto, tmp_path / "reshape.onnx")
    good = {"x": np.ones((2, WIDTH), np.float32), "shape": np.array([1, 128])}
    with pytest.MonkeyPatch.context() as patch, in_this_process():
        patch.setattr(building.inputs, "seeded", lambda *_: good)
        done = build(path, repository=tmp_path, optimise=False)
    for budget in budgets(done).values():
        with opened(done, budget) as chain:
            for _ in range(2):
                with pytest.raises(BackendError, match="Reshape") as caught:
                    chain.run({**good, "shape": np.array([7, 11])})
                assert "block-" in caught.value.where
                assert_same(uncut(path, good), chain.run(good))


# ------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({}, "'x' is missing"),
        ({"X": feed()["x"]}, "no input 'X'"),
        ({**feed(), "z": np.zeros(1)}, "no input 'z'"),
        ({"x": feed()["x"].astype(np.float64)}, "float64"),
        ({"x": feed()["x"].astype(">f4")}, ">f4"),
        ({"x": feed()["x"].astype(int)}, "int64"),
        ({"x": np.zeros(64, np.float32)}, "rank 1"),
        ({"x": np.zeros((1, 1, 64), np.float32)}, "rank 3"),
        ({"x": np.zeros((2, 65), np.float32)}, "axis 1 is 65 and must be 64"),
        ({"x": [[1.0] * 64]}, "float64"),
        ({"x": None}, "object"),
        ({"x": "text"}, "str"),
    ],
)
@pytest.mark.parametrize("mode", ["floor", "resident"])
def test_feeds_that_do_not_fit(prepared: Built, feeds: dict[str, Any], said: str, mode: str) -> None:
    with opened(prepared, budgets(prepared)[mode]) as chain:
        with pytest.raises(InputError, match=said) as caught:
            chain.run(feeds)
        assert caught.value.remedy
        assert chain.stats()["sweeps"] == 0
        chain.run(feed())


def test_a_misspelt_input_is_recognised(built: Built) -> None:
    with opened(built) as chain, pytest.raises(InputError) as caught:
        chain.run({"xx": feed()["x"]})
    assert "did you mean 'x'" in caught.value.remedy


def test_an_empty_batch_is_a_batch(source: Path, built: Built) -> None:
    asked = {"x": np.zeros((0, 64), np.float32)}
    for budget in budgets(built).values():
        with opened(built, budget) as chain:
            assert_same(uncut(source, asked), chain.run(asked))
            assert_same(uncut(source, feed()), chain.run(feed()))


# ------------------------------------------------------------------------------------------------- budgets and numbers


def test_a_budget_under_the_floor_opens_nothing(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Footprint.of(built.manifest)
    assert sum(needs.parts.values()) == needs.floor
    monkeypatch.setattr(supply, "Arena", None)
    monkeypatch.setattr(supply, "WeightFile", None)
    for budget in (1, needs.floor - 1, "1KiB"):
        with pytest.raises(BudgetError, match="under the floor") as caught:
            opened(built, budget)  # type: ignore[arg-type]
        error = caught.value
        assert (error.floor, error.parts, error.exit_status) == (needs.floor, needs.parts, 3)
        assert all(name.replace("_", " ") in error.what for name in needs.parts)
        assert "layers" in error.where
        assert error.remedy


@pytest.mark.parametrize(
    ("memory", "size", "lever"),
    [
        ({"engines": 1 << 30}, 1, "larger --block-size"),
        ({"scratch": 1 << 30}, 1, "--shape"),
        ({"activations": 1 << 30}, 1, "--shape"),
        ({"engines": 0, "scratch": 0, "activations": 0}, 1 << 20, "smaller --block-size"),
        ({"engines": 0, "scratch": 0, "activations": 0}, 1, "not split"),
    ],
)
def test_the_remedy_names_what_would_lower_the_floor(copy: Built, memory: Any, size: int, lever: str) -> None:
    changed = republished(copy, memory=msgspec.structs.replace(copy.manifest.memory, **memory), block_size=size)
    with pytest.raises(BudgetError) as caught:
        opened(changed, 1)
    assert lever in caught.value.remedy


def test_more_than_the_machine_has(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint_module, "available_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryLimitError, match="the machine has") as caught:
        opened(built)
    assert "floor" in caught.value.remedy or "from" in caught.value.remedy
    monkeypatch.setattr(footprint_module, "available_bytes", lambda: 0)  # not known
    opened(built).close()


@pytest.mark.parametrize("budget", ["much", 0, -5, "0", 1.5, True])
def test_budgets_that_are_none(built: Built, budget: Any) -> None:
    with pytest.raises(UsageError, match="budget"):
        opened(built, budget)


def test_chains_and_versions_that_are_not_there(built: Built) -> None:
    repository = built.path.parent.parent
    with pytest.raises(NotBuiltError, match="layers"):
        open_chain("layer", repository=repository)
    with pytest.raises(NotBuiltError, match="no version 7"):
        open_chain("layers", repository=repository, version=7)
    with pytest.raises(UsageError):
        open_chain("../layers", repository=repository)
    with pytest.raises(NotBuiltError):
        footprint("layer", repository=repository)
    assert footprint("layers", repository=repository) == Footprint.of(built.manifest)


@pytest.mark.parametrize("mode", ["floor", "middle", "all in the arena", "resident"])
def test_numbers_about_what_happened(prepared: Built, mode: str) -> None:
    needs, weights = Footprint.of(prepared.manifest), prepared.manifest.weights_bytes
    budget = budgets(prepared)[mode]
    with opened(prepared, budget) as chain:
        before = chain.stats()
        for _ in range(4):
            chain.run(feed())
        stats = chain.stats()
    assert set(stats) == STATS
    assert (before["sweeps"], stats["sweeps"]) == (0, 4)
    assert stats["budget_bytes"] == budget
    assert (stats["floor_bytes"], stats["activation_bytes"]) == (needs.floor, needs.activations)
    assert (stats["scratch_bytes"], stats["engine_bytes"]) == (needs.scratch, needs.engines)
    assert stats["execute_seconds"] > before["execute_seconds"] == 0
    assert stats["stall_seconds"] >= 0
    assert stats["arena_bytes"] <= budget - needs.fixed
    streamed = weights - stats["resident_bytes"]
    if mode in ("all in the arena", "resident"):
        assert stats["mode"] == "resident"
        assert (streamed, stats["bytes_read"]) == (0, weights)
    else:
        assert stats["mode"] in {"floor": ["sequential"], "middle": ["sequential", "double", "ring"]}[mode]
        read = stats["bytes_read"] - stats["resident_bytes"]
        assert 4 * streamed <= read <= 4 * streamed + stats["arena_bytes"]
        assert stats["read_seconds"] > 0
    assert stats["blocks"] in {"floor": [COUNT], "resident": [1]}.get(mode, range(1, COUNT + 1))  # some may be joined


def test_without_a_budget_everything_stays(built: Built, prepared: Built) -> None:
    for chain in (opened(built), opened(prepared)):
        with chain:
            assert chain.stats()["mode"] == "resident"
            assert chain.stats()["budget_bytes"] == chain.footprint.resident


def test_inputs_and_outputs_are_the_models(built: Built) -> None:
    with opened(built) as chain:
        [x], [y] = chain.inputs, chain.outputs
    assert (x.name, x.dtype, x.shape) == ("x", "float32", ("n", 64))
    assert (y.name, y.dtype, y.shape) == ("y", "float32", ("n", 64))


def test_fallbacks_are_told_once_and_in_the_numbers(
    built: Built, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: WeightFile, flag: int) -> None:
        if flag:
            raise failure(22)

    monkeypatch.setattr(WeightFile, "_switch", refuse)
    with caplog.at_level(logging.WARNING, logger="trt_layering"), opened(built, budgets(built)["floor"]) as chain:
        [told] = chain.stats()["fallbacks"]
        chain.run(feed())
    assert "page cache" in told
    assert [record.getMessage() for record in caplog.records].count(f"chain layers: {told}") == 1
    with pytest.raises(ReadError, match="direct"):
        opened(built, loader=LoaderOptions(direct_io="always"))


@pytest.mark.parametrize(
    "options",
    [
        LoaderOptions(threads=1, read_size=PAGE),
        LoaderOptions(threads=8, read_size="8KiB", verify="always"),
        LoaderOptions(direct_io="never", verify="never"),
    ],
)
def test_loader_options_change_no_answer(source: Path, built: Built, options: LoaderOptions) -> None:
    for budget in budgets(built).values():
        with opened(built, budget, loader=options) as chain:
            for seed in range(3):
                assert_same(uncut(source, feed(seed=seed)), chain.run(feed(seed=seed)))


def test_the_observer_sees_each_block_and_what_is_alive(built: Built) -> None:
    seen: list[tuple[int, set[str]]] = []
    with opened(built, budgets(built)["floor"]) as chain:
        chain.observe(feed(), lambda index, seconds, live: seen.append((index, set(live))))
    assert [index for index, _ in seen] == list(range(COUNT))
    assert seen[0][1] >= {"x"}
    for (_, names), block in zip(seen, built.manifest.blocks, strict=True):
        assert names == {value.name for value in (*block.inputs, *block.outputs)}, "others are alive"


def test_a_manifest_without_times_opens(copy: Built) -> None:
    """The format allows it."""
    profile = msgspec.structs.replace(copy.manifest.profile, execute_seconds=(), read_rate=0.0)
    with opened(republished(copy, profile=profile), budgets(copy)["middle"]) as chain:
        chain.run(feed())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() <= before
