"""What engines do beside executing: refits at open, and what is given back when there are no more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.backends.tensorrt.opening import SMALL_READS, emulated_gpu, make, put, seeded, spans, switches_for
from tests.chains import assert_close, budgets, layers, opened, saved, uncut
from trt_layering.building import Built

pytestmark = pytest.mark.usefixtures("quick_collections")


REFITTER = ("__init__", "refit_cuda_engine_async", "release_refit_resources")


class Counted:
    """How often TensorRT was asked for what takes long the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import tensorrt as trt

        self.calls: Counter[str] = Counter()
        asked = ((trt.Runtime, "deserialize_cuda_engine"), *((trt.Refitter, name) for name in REFITTER))
        for kind, name in asked:
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, self._counting(name, getattr(kind, name)))

    def _counting(self, name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            return original(*arguments, **named)

        return call

    def since(self, before: Counter[str]) -> dict[str, int]:
        return {name: count - before[name] for name, count in self.calls.items() if count > before[name]}


def chain(folder: Path, count: int, version: str = "10.3") -> Built:
    """Of `count` blocks with equal plans, whose weights are refitted."""
    proto = layers(count)
    path = saved(proto, folder / "model.onnx")
    built = make(path, folder / "made", "refit", version=version, shapes=spans(proto), name="chain")
    return put(built, "staged", folder / "put")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_engines_that_were_refitted_at_open_execute_the_first_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    built = chain(tmp_path, count)
    first = min(count, 2)
    with emulated_gpu(**switches_for("staged", seed=3)):
        counted = Counted(monkeypatch)
        with opened(built, budgets(built)["floor"], loader=SMALL_READS, mode="sequential") as running:
            assert counted.calls["refit_cuda_engine_async"] == first
            before = Counter(counted.calls)
            feeds = seeded(layers(count), 2, 0)
            assert_close(uncut(layers(count), feeds), running.run(feeds))
            expected = {"refit_cuda_engine_async": count, "__init__": count - first}
            assert counted.since(before) == {name: number for name, number in expected.items() if number}


def test_what_refits_took_is_given_back_where_there_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = chain(tmp_path, 3, "11.4")
    with emulated_gpu(tensorrt="11.4", **switches_for("staged")):
        counted = Counted(monkeypatch)
        with opened(built) as running:
            assert counted.calls["release_refit_resources"] == 3
            feeds = seeded(layers(3), 2, 0)
            assert_close(uncut(layers(3), feeds), running.run(feeds))
        counted.calls.clear()
        with opened(built, budgets(built)["floor"], loader=SMALL_READS):
            assert counted.calls["release_refit_resources"] == 0
            assert counted.calls["refit_cuda_engine_async"] == 2


def test_equal_blocks_share_an_engine_whose_weights_are_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = layers(5)
    path = saved(proto, tmp_path / "model.onnx")
    built = make(path, tmp_path / "made", "inputs", shapes=spans(proto), name="chain")
    assert len(built.manifest.blocks) == 5
    with emulated_gpu():
        counted = Counted(monkeypatch)
        for mode in ("floor", "resident"):
            with opened(built, budgets(built)[mode], loader=SMALL_READS) as running:
                feeds = seeded(proto, 2, 0)
                assert_close(uncut(proto, feeds), running.run(feeds))
            assert counted.calls == {"deserialize_cuda_engine": 1}
            counted.calls.clear()
