"""What a process takes that runs a chain, in processes of their own, where it can be measured."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.chains import layers, model, saved
from tests.runtime import measured
from trt_layering.building import Built, build

MIB = 1 << 20


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """24 blocks of a MiB each, built and measured as users build."""
    folder = tmp_path_factory.mktemp("medium")
    path = saved(layers(24, width=512, batch=1), folder / "medium.onnx")
    done = build(path, repository=folder, block_size="1MiB")
    assert len(done.manifest.blocks) == 24
    return done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("tiny")
    done = build(saved(layers(6), folder / "tiny.onnx"), repository=folder, block_size="16KiB")
    assert len(done.manifest.blocks) == 6
    return done


def where(built: Built) -> dict[str, str]:
    return {"repository": str(built.path.parent.parent), "name": built.path.parent.name}


def test_the_peak_is_within_the_budget_and_8_mib(medium: Built) -> None:
    asked = [("floor", 0), ("floor", 5 * MIB), ("floor", 14 * MIB), ("arena", 0), ("resident", 0)]
    peaks, arenas = [], []
    for mode, extra in asked:
        peak, budget, arena_bytes = measured.call(measured.peak, **where(medium), mode=mode, extra=extra, runs=6)
        assert peak <= budget + 8 * MIB, (mode, extra)
        peaks.append(peak)
        arenas.append(arena_bytes)
    assert peaks[0] < medium.manifest.weights_bytes, "at the floor less than the weights"
    for peak, arena_bytes in zip(peaks[1:4], arenas[1:4], strict=True):  # which a schedule need not take all of
        assert peak - peaks[0] > arena_bytes - arenas[0] - 2 * MIB, "a larger arena must show, or nothing was measured"
    assert arenas[3] > arenas[0] + 10 * MIB
    assert min(peaks[3:]) > medium.manifest.weights_bytes


@pytest.mark.parametrize("batch", ["n", 1])
def test_the_peak_of_waves_is_within_the_budget_and_8_mib(tmp_path: Path, batch: int | str) -> None:
    """24 blocks, each adding a weight of 2 MiB to activations of 2 MiB, which are quickly computed."""
    path = saved(sums(24, batch), tmp_path / "sums.onnx")
    done = build(path, repository=tmp_path, block_size="2MiB")
    assert len(done.manifest.blocks) == 24
    peaks = []
    for wave in (8, 2):
        peak, budget, held = measured.call(measured.peak_of_waves, **where(done), room=wave, asked=8)
        assert held == wave
        assert peak <= budget + 8 * MIB, wave
        peaks.append(peak)
    assert peaks[0] > peaks[1] + 10 * MIB, "the activations of the larger wave must show, or nothing was measured"


def sums(count: int, batch: int | str) -> onnx.ModelProto:
    """`count` times Add of a weight of 2 MiB, and Relu; of the last only the largest element is the output."""
    names = ["x", *(f"h{index}" for index in range(count))]
    nodes, weights = [], []
    for index in range(count):
        weights.append(numpy_helper.from_array(np.full((512, 1024), index, np.float32), f"w{index}"))
        nodes.append(helper.make_node("Add", [names[index], f"w{index}"], [f"m{index}"]))
        nodes.append(helper.make_node("Relu", [f"m{index}"], [names[index + 1]]))
    nodes.append(helper.make_node("ReduceMax", [names[-1]], ["y"], axes=[1, 2], keepdims=0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 512, 1024])
    return model(nodes, [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch])], weights)


@pytest.mark.parametrize("mode", ["floor", "resident"])
def test_memory_stays_flat(tiny: Built, mode: str) -> None:
    """1,000 runs of changing sizes, and 50 times opened, run and closed."""
    sizes = measured.call(measured.leak, **where(tiny), mode=mode, rows=[1, 7, 3], runs=1000, cycles=50)
    for what, points in sizes.items():
        assert len(points) == 10
        assert points[-1] - points[1] <= 2 * MIB, f"{what}: {points}"


@pytest.mark.parametrize("mode", ["arena", "resident"])
def test_closing_gives_memory_back(medium: Built, mode: str) -> None:
    sizes = measured.call(measured.given_back, **where(medium), mode=mode)
    assert sizes["during"] - sizes["before"] > 16 * MIB
    assert sizes["after"] - sizes["before"] < 2 * MIB


@pytest.mark.parametrize("mode", ["floor", "resident"])
def test_running_imports_nothing_that_only_building_needs(tiny: Built, mode: str) -> None:
    loaded = set(measured.call(measured.modules, **where(tiny), mode=mode))
    assert {"onnxruntime", "numpy", "msgspec"} <= loaded
    assert not loaded & {"onnx", "onnx_ir", "polygraphy", "rich", "PIL", "yaml", "ml_dtypes", "hypothesis"}


def test_engines_share_one_thread_pool_where_they_may(medium: Built) -> None:
    cpus = len(os.sched_getaffinity(0))
    own, _ = measured.call(measured.threads, **where(medium), shared=False)
    shared, after = measured.call(measured.threads, **where(medium), shared=True)
    assert own >= 24 * (cpus - 1)
    assert shared <= 2 * cpus + 2 + medium.manifest.profile.threads
    assert after <= shared - 2, "the loader's threads are gone"


def test_a_chain_that_its_own_loader_finds_unused(tiny: Built) -> None:
    """Garbage is collected in whatever thread allocates; memory must not go while that thread still reads into it."""
    left = measured.call(measured.collected_by_its_loader, **where(tiny), reads=6)
    assert left == ["MainThread"]


def test_a_process_may_end_with_a_chain_open(tiny: Built) -> None:
    assert measured.call(measured.left_open, **where(tiny)) == "ended"


def test_paths_of_the_tests_are_not_in_the_store(tiny: Built) -> None:
    """A store can be moved: nothing in it says where it was built."""
    folder = str(Path(tiny.path).parent.parent)
    for file in tiny.path.iterdir():
        assert folder.encode() not in file.read_bytes()
