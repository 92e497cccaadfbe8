"""What the GPU or TensorRT refuses reaches the caller in words, the chain can be closed, and nothing is left."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.backends.tensorrt.opening import (
    SMALL_READS,
    emulated_gpu,
    make,
    of_the_driver,
    put,
    seeded,
    spans,
    switches_for,
)
from tests.chains import assert_close, budgets, layers, opened, saved, uncut
from trt_layering.building import Built
from trt_layering.errors import BackendError, LayeringError, MemoryLimitError
from trt_layering.store.manifest import write_manifest

CASES = (
    ("inputs", "staged"), ("inputs", "zero-copy"), ("refit", "staged"), ("refit", "zero-copy"), ("swap", "pinned"),
)  # fmt: skip
PROTO = layers(8)

pytestmark = pytest.mark.usefixtures("quick_collections")
every = pytest.mark.parametrize("case", CASES, ids="-".join)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Built]:
    """A chain for each case, four blocks of two equal layers."""
    folder = tmp_path_factory.mktemp("faults")
    path = saved(PROTO, folder / "model.onnx")
    options = {"shapes": spans(PROTO), "name": "chain", "block_size": "32KiB"}
    made = {binding: make(path, folder / binding, binding, **options) for binding in ("inputs", "refit", "swap")}
    return {(b, p): put(made[b], p, folder / f"{b}-{p}") for b, p in CASES}  # type: ignore[arg-type]


def right(chain: Any, size: int = 2) -> None:
    feeds = seeded(PROTO, size, 0)
    assert_close(uncut(PROTO, feeds), chain.run(feeds))


def _one_run(built: Built, mode: str) -> None:
    with opened(built, budgets(built)[mode], loader=SMALL_READS) as chain:
        right(chain)


def _four_runs(built: Built) -> None:
    with opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain:
        for _ in range(4):
            right(chain)


def _fails_later(built: Built, machine: Any, failures: dict[str, str]) -> None:
    with opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain:
        machine.failures.update(failures)
        right(chain)


def _raised(work: Callable[[], object]) -> LayeringError | None:
    try:
        work()
    except LayeringError as error:
        return error
    return None


@pytest.mark.parametrize("number", ["1", "2"])
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "refit"], ids="-".join)
def test_a_refit_that_is_refused(chains: dict[Any, Built], case: Any, number: str) -> None:
    """The first of a refitter is at open or when a block comes, the second when it comes once more."""
    built = chains[case]
    with emulated_gpu(**switches_for(case[1], seed=1), refit_fail=number):
        error = _raised(lambda: _four_runs(built))
    assert isinstance(error, BackendError)
    assert error.what.startswith("TensorRT did not take the weights over: ")
    assert "Refit failed" in error.what
    assert error.remedy


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "refit"], ids="-".join)
def test_a_refused_refit_is_not_taken_for_a_good_one(
    chains: dict[Any, Built], case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = chains[case]
    with (
        emulated_gpu(**switches_for(case[1], seed=1)),
        opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain,
    ):
        for number in ("2", "4"):
            right(chain)
            monkeypatch.setenv("EMULATED_REFIT_FAIL", number)
            assert isinstance(_raised(lambda: [right(chain) for _ in range(4)]), BackendError)
            monkeypatch.delenv("EMULATED_REFIT_FAIL")
            right(chain, 5)


@every
@pytest.mark.parametrize("mode", ["floor", "resident"])
def test_a_plan_that_cannot_be_deserialized(
    chains: dict[Any, Built], case: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulated_gpu(**switches_for(case[1])):
        import tensorrt as trt

        monkeypatch.setattr(trt.Runtime, "deserialize_cuda_engine", lambda *_: None)
        with (
            pytest.raises(BackendError, match="TensorRT cannot use the plan") as caught,
            opened(chains[case], budgets(chains[case])[mode], loader=SMALL_READS) as chain,
        ):
            right(chain)
        assert "build the chain again" in caught.value.remedy


@every
def test_an_execution_that_is_refused(chains: dict[Any, Built], case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built = chains[case]
    with (
        emulated_gpu(**switches_for(case[1], seed=2)),
        opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain,
    ):
        import tensorrt as trt

        right(chain)
        original, calls = trt.IExecutionContext.execute_async_v3, [0]

        def third(self: Any, stream: int) -> bool:
            calls[0] += 1
            return calls[0] != 3 and bool(original(self, stream))

        with monkeypatch.context() as patch:
            patch.setattr(trt.IExecutionContext, "execute_async_v3", third)
            with pytest.raises(BackendError, match="TensorRT did not execute the block") as caught:
                right(chain)
            assert caught.value.where == "block-002"
        right(chain)


@every
@pytest.mark.parametrize("mode", ["middle", "resident"])
def test_memory_runs_out_at_open(chains: dict[Any, Built], case: Any, mode: str) -> None:
    """Whatever is the first that is not given."""
    built, switches = chains[case], switches_for(case[1])
    with emulated_gpu(**switches) as machine, opened(built, budgets(built)[mode], loader=SMALL_READS) as chain:
        right(chain)
        peak = machine.peak
    refused = 0
    for part in range(1, 12):
        with emulated_gpu(**switches, memory=str(peak * part // 12)) as machine:
            error = _raised(lambda: _one_run(built, mode))
            assert machine.used == 0
            if error is not None:
                refused += 1
                assert isinstance(error, MemoryLimitError), error
                assert "budget" in error.remedy
    assert refused >= 8


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "inputs"], ids="-".join)
def test_memory_runs_out_in_the_middle(chains: dict[Any, Built], case: Any) -> None:
    built = chains[case]
    with (
        emulated_gpu(**switches_for(case[1], seed=3)) as machine,
        opened(built, budgets(built)["floor"], loader=SMALL_READS) as chain,
    ):
        machine.total_memory, usual = machine.used + 256, machine.total_memory
        if case[0] == "refit":  # equal blocks, whose two engines are there since the chain was opened
            right(chain)
            return
        with pytest.raises(MemoryLimitError, match=r"block|plan") as caught:
            right(chain)
        assert "lower the budget" in caught.value.remedy
        machine.total_memory = usual
        right(chain)


@every
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuMemcpyHtoDAsync", "copying to the GPU"),
        ("cuMemcpyDtoHAsync", "copying from the GPU"),
        ("cuEventRecord", "recording an event"),
        ("cuEventSynchronize", "the GPU worked"),
        ("cuStreamWaitEvent", "letting the compute stream wait"),
    ],
)
@pytest.mark.parametrize("when", ["at open", "later"])
def test_a_call_of_the_driver_that_fails(chains: dict[Any, Built], case: Any, call: str, words: str, when: str) -> None:
    """In a thread of the loader, or in the one that runs."""
    built, failures = chains[case], {call: "an illegal memory access was encountered"}
    with emulated_gpu(**switches_for(case[1], seed=4)) as machine:
        if when == "at open":
            machine.failures.update(failures)
        error = _raised(lambda: _fails_later(built, machine, failures))
        machine.failures.clear()
    if error is None:
        assert call == "cuStreamWaitEvent", "nothing was told"
        assert case in (("inputs", "zero-copy"), ("swap", "pinned"))
        return
    assert isinstance(error, BackendError)
    assert f"the GPU failed: {words}: {call} failed: an illegal memory access" in error.what
    assert "dmesg" in error.remedy


def test_the_driver_says_more_than_was_planned(
    chains: dict[Any, Built], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = put(chains["inputs", "staged"], "staged", tmp_path)
    memory = msgspec.structs.replace(built.manifest.memory, engines=0)
    write_manifest(built.path, msgspec.structs.replace(built.manifest, memory=memory))
    with emulated_gpu() as machine, caplog.at_level(logging.WARNING, "trt_layering"):
        with opened(built, 2 << 20, loader=SMALL_READS) as chain:
            assert of_the_driver(chain) == []
        told, more = machine.memory_info, iter((0, 16 << 20))
        machine.memory_info = lambda: (told()[0] - next(more, 16 << 20), told()[1])
        with opened(built, 2 << 20, loader=SMALL_READS) as chain:
            for _ in range(2):
                right(chain)
            (words,) = of_the_driver(chain)
    assert words.startswith("the GPU gave ")
    assert "were planned: the budget is exceeded" in words
    assert [words in record.getMessage() for record in caplog.records].count(True) == 1


@every
def test_the_driver_says_what_was_planned(chains: dict[Any, Built], case: Any) -> None:
    built = chains[case]
    for mode, budget in budgets(built).items():
        with emulated_gpu(**switches_for(case[1])), opened(built, budget, loader=SMALL_READS) as chain:
            right(chain)
            assert 0 < chain.stats()["device_bytes"] <= chain._planned_bytes(), mode
            assert of_the_driver(chain) == []
