"""Chains of TensorRT engines on the emulated GPU answer as the uncut model does: for each way in which weights reach
engines, at every budget, whatever the order in which streams get on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import real_models
from tests.backends.tensorrt.opening import (
    BOUND,
    ODD,
    SMALL_READS,
    VERSIONS,
    emulated_gpu,
    make,
    of_the_driver,
    put,
    seeded,
    spans,
    switches_for,
)
from tests.chains import assert_close, assert_same, budgets, cut_by, feed, layers, opened, saved, uncut
from trt_layering.building import Built
from trt_layering.errors import BackendError, ClosedError, InputError
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.loader import LoaderOptions

COUNT = 10
STREAMED = "middle"
MODES = ("floor", "middle", "all in the arena", "resident")
MEMORIES = ("integrated", "discrete")
Cutting = Callable[[], AbstractContextManager[None]]

pytestmark = pytest.mark.usefixtures("quick_collections")


class Chains:
    """Chains of one model, built once for each binding and version, and put where a test wants them."""

    def __init__(self, proto: onnx.ModelProto, folder: Path, cutting: Cutting = nullcontext) -> None:
        self.proto, self.folder, self._cutting = proto, folder, cutting
        self.path = saved(proto, folder / "model.onnx")
        self._made: dict[tuple[str, ...], Built] = {}
        self._answers: dict[tuple[int, int], tuple[Mapping[str, Any], Mapping[str, Any]]] = {}

    def get(self, binding: Any, placement: Any, memory: str = "integrated", version: str = "10.3") -> Built:
        """The chain of this kind."""
        base, key = (binding, version), (binding, version, placement, memory)
        if base not in self._made:
            options = {"shapes": spans(self.proto), "name": "chain"}
            with self._cutting():
                self._made[base] = make(self.path, self.folder / "-".join(base), binding, version=version, **options)
        if key not in self._made:
            self._made[key] = put(self._made[base], placement, self.folder / "-".join(key), memory)
        return self._made[key]

    def answer(self, size: int, seed: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Inputs, and what the uncut model makes of them."""
        if (size, seed) not in self._answers:
            feeds = seeded(self.proto, size, seed)
            self._answers[size, seed] = feeds, uncut(self.proto, feeds)
        return self._answers[size, seed]

    def assert_right(self, chain: Chain, size: int, seed: int = 0) -> None:
        """One run answers as it should."""
        feeds, wanted = self.answer(size, seed)
        assert_close(wanted, chain.run(feeds))


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Chains:
    """Layers that are all equal but for their weights, each a block."""
    return Chains(layers(COUNT), tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Chains]:
    """Cut wherever they may be."""
    return {name: Chains(form(), tmp_path_factory.mktemp("odd"), partial(cut_by, list)) for name, form in ODD.items()}


_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@pytest.mark.parametrize(("binding", "placement"), BOUND)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    memory=st.sampled_from(MEMORIES),
    mode=st.sampled_from(MODES),
    waves=st.lists(_sizes, min_size=1, max_size=4),
    threads=st.integers(1, 3),
    read_size=st.sampled_from((4096, 8192, 65536)),
    verify=st.sampled_from(("first", "always", "never")),
)
def test_layers(
    ten: Chains, binding: str, placement: Any, seed: int, memory: str, mode: str, waves: list[list[int]],
    threads: int, read_size: int, verify: Any,
) -> None:  # fmt: skip
    built = ten.get(binding, placement, memory)
    loader = LoaderOptions(threads=threads, read_size=read_size, verify=verify)
    with (
        emulated_gpu(**switches_for(placement, memory, seed)),
        opened(built, budgets(built)[mode], loader=loader) as chain,
    ):
        for sizes in waves:
            pairs = [ten.answer(size, seed) for seed, size in enumerate(sizes)]
            got = chain.run_many([feeds for feeds, _ in pairs], wave=len(pairs))
            for (_, wanted), one in zip(pairs, got, strict=True):
                assert_close(wanted, one)
        stats = chain.stats()
        assert stats["requests"] == sum(map(len, waves))
        assert bool(stats["arena_bytes"]) == (mode != "resident")


@pytest.mark.parametrize(
    ("binding", "placement"), [("inputs", "staged"), ("inputs", "zero-copy"), ("refit", "staged"), ("swap", "pinned")]
)
@pytest.mark.parametrize("name", ODD)
def test_odd_models(odd: dict[str, Chains], name: str, binding: str, placement: Any) -> None:
    chains, seed = odd[name], list(ODD).index(name)
    built = chains.get(binding, placement)
    more = 2 * Footprint.of(built.manifest).request
    for mode, budget in budgets(built).items():
        wave = {"budget": budget + more, "wave": 3} if mode == "middle" else {"budget": budget}
        with (
            emulated_gpu(**switches_for(placement, seed=seed)),
            opened(built, loader=SMALL_READS, **wave) as chain,
        ):
            for size in (1, 5, 2):
                chains.assert_right(chain, size)
            pairs = [chains.answer(size, 1) for size in (2, 4, 1)]
            for (_, wanted), got in zip(pairs, chain.run_many([f for f, _ in pairs], wave=3), strict=True):
                assert_close(wanted, got)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("binding", "placement"), [("inputs", "staged"), ("refit", "zero-copy"), ("swap", "pinned")])
def test_every_version(odd: dict[str, Chains], version: str, binding: str, placement: Any) -> None:
    chains = odd["shared weights"]
    built = chains.get(binding, placement, version=version)
    with (
        emulated_gpu(tensorrt=version, **switches_for(placement, seed=3)),
        opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain,
    ):
        for size in (1, 5):
            chains.assert_right(chain, size)


@pytest.mark.parametrize(("binding", "placement"), BOUND)
def test_thirty_sweeps(ten: Chains, binding: str, placement: Any) -> None:
    built = ten.get(binding, placement)
    with (
        emulated_gpu(**switches_for(placement, seed=5)) as machine,
        opened(built, budgets(built)[STREAMED], loader=SMALL_READS) as chain,
    ):
        ten.assert_right(chain, 1)
        if binding == "inputs":
            machine.no_more_allocations = True
        for sweep in range(30):
            ten.assert_right(chain, sweep % 5 + 1)
        machine.no_more_allocations = False
        assert of_the_driver(chain) == []


@pytest.mark.parametrize(("binding", "placement"), BOUND)
def test_two_chains_at_once(ten: Chains, odd: dict[str, Chains], binding: str, placement: Any) -> None:
    both = (ten, odd["several ends"])
    built = [chains.get(binding, placement) for chains in both]
    with (
        emulated_gpu(**switches_for(placement, seed=7)),
        opened(built[0], budgets(built[0])["middle"], loader=SMALL_READS) as first,
        opened(built[1], budgets(built[1])["floor"], loader=SMALL_READS) as second,
    ):
        failed: list[BaseException] = []

        def work(chains: Chains, chain: Chain) -> None:
            try:
                for size in (1, 5, 3, 2):
                    chains.assert_right(chain, size)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(both, (first, second), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


@pytest.mark.parametrize(("binding", "placement"), BOUND)
def test_an_observer_sees_each_block(ten: Chains, binding: str, placement: Any) -> None:
    built = ten.get(binding, placement)
    with (
        emulated_gpu(**switches_for(placement, seed=2)),
        opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain,
    ):
        feeds, wanted = ten.answer(3, 0)
        seen: list[tuple[int, bool]] = []
        got = chain.observe(feeds, lambda index, seconds, live: seen.append((index, seconds > 0 and bool(live))))
        assert_close(wanted, got)
        assert seen == [(index, True) for index in range(len(built.manifest.blocks))]


@pytest.mark.parametrize(("binding", "placement"), BOUND)
@pytest.mark.parametrize("at", [0, 2, COUNT - 1])
def test_an_error_in_the_middle_and_then_the_right_answer(ten: Chains, binding: str, placement: Any, at: int) -> None:
    built = ten.get(binding, placement)
    for seed in range(3):
        with (
            emulated_gpu(**switches_for(placement, seed=seed)),
            opened(built, budgets(built)[STREAMED], loader=SMALL_READS) as chain,
        ):
            ten.assert_right(chain, 2)
            engine, execute = chain._supply.engines[at], chain._supply.engines[at].execute

            def fail(live: Any, into: Any, execute: Any = execute) -> Any:
                execute(live, into)  # asked for, and nobody has a mark of it
                raise ZeroDivisionError

            engine.execute = fail  # type: ignore[method-assign]
            with pytest.raises(ZeroDivisionError):
                chain.run(ten.answer(5, 1)[0])
            engine.execute = execute  # type: ignore[method-assign]
            for size in (5, 1):
                ten.assert_right(chain, size)


@pytest.mark.parametrize(("binding", "placement"), BOUND)
def test_closed_while_it_runs(ten: Chains, binding: str, placement: Any) -> None:
    built = ten.get(binding, placement)
    with emulated_gpu(**switches_for(placement, seed=4)):
        chain = opened(built, budgets(built)[STREAMED], loader=SMALL_READS)
        closers: list[threading.Thread] = []

        def close(index: int, _seconds: float, _live: Any) -> None:
            if index == 2:
                closers.append(threading.Thread(target=chain.close))
                closers[0].start()
                while not chain._closing:
                    pass

        with pytest.raises(ClosedError):
            chain.observe(ten.answer(2, 0)[0], close)
        closers[0].join()
        with pytest.raises(ClosedError):
            chain.run(ten.answer(2, 0)[0])


@pytest.mark.parametrize(("binding", "placement"), BOUND)
def test_dropped_and_never_closed(ten: Chains, binding: str, placement: Any) -> None:
    built = ten.get(binding, placement)
    with emulated_gpu(**switches_for(placement)):
        chain = opened(built, budgets(built)["floor"], loader=SMALL_READS)
        ten.assert_right(chain, 1)
        finalizer = chain._finalizer
        del chain
        assert not finalizer.alive


def test_answers_are_the_callers(ten: Chains) -> None:
    built = ten.get("inputs", "staged")
    with emulated_gpu(), opened(built, loader=SMALL_READS) as chain:
        first = chain.run(feed(3, 1))
        kept = {name: array.copy() for name, array in first.items()}
        chain.run(feed(3, 2))
        assert_same(kept, first)


@pytest.mark.parametrize("rows", [0, 6])
def test_shapes_outside_the_ranges(ten: Chains, rows: int) -> None:
    built = ten.get("inputs", "staged")
    with emulated_gpu(), opened(built, loader=SMALL_READS) as chain:
        for ask in (chain.run, lambda feeds: chain.run_many([feed(2), feeds])):
            with pytest.raises(InputError, match=f"shape {rows}x64 is outside .* 1x64 to 5x64") as caught:
                ask(feed(rows))
            assert "'x'" in str(caught.value)
        assert chain.stats()["sweeps"] == 0
        ten.assert_right(chain, 5)


@pytest.mark.parametrize("mode", ["floor", "resident"])
def test_engines_that_cannot_be_refitted(ten: Chains, mode: str, tmp_path: Path) -> None:
    built = ten.get("inputs", "staged")
    how = built.manifest.tensorrt
    assert how is not None
    manifest = msgspec.structs.replace(built.manifest, tensorrt=msgspec.structs.replace(how, binding="refit"))
    lying = put(Built(built.path, manifest), "staged", tmp_path)
    with (
        emulated_gpu(),
        pytest.raises(BackendError, match="cannot refit") as caught,
        opened(lying, budgets(lying)[mode], loader=SMALL_READS) as chain,
    ):
        chain.run(feed(3))
    assert "build the chain again" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "binding", "placement", "modes"),
    [
        ("minilm", "inputs", "staged", ("floor", "resident")),
        ("pp_cls", "inputs", "zero-copy", ("floor", "all in the arena")),
        ("pp_rec", "inputs", "staged", ("middle",)),
        ("common_det", "inputs", "staged", ("floor",)),
        ("minilm", "refit", "staged", ("middle",)),
        ("pp_cls", "swap", "pinned", ("middle",)),
    ],
)
def test_real_models(
    real_model: Any, tmp_path: Path, name: str, binding: str, placement: Any, modes: tuple[str, ...]
) -> None:
    path, feeds = real_model(name), real_models.feeds(name)
    shapes = {key: list(array.shape) for key, array in feeds.items()}
    built = put(make(path, tmp_path, binding, shapes=shapes, block_size="auto"), placement, tmp_path / "put")
    wanted = uncut(path, feeds)
    for seed, mode in enumerate(modes):
        with (
            emulated_gpu(**switches_for(placement, seed=seed)),
            opened(built, budgets(built)[mode], loader=LoaderOptions(read_size=64 << 10)) as chain,
        ):
            for _ in range(1 if mode == "resident" else 2):
                assert_close(wanted, chain.run(feeds))
