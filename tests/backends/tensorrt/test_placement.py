"""Which placement is measured, refused and chosen."""

from __future__ import annotations

import pytest

from tests.backends.tensorrt.rig import emulated
from trt_layering.backends.tensorrt import placement
from trt_layering.backends.tensorrt.placement import Result, choose, measure
from trt_layering.errors import MemoryLimitError

SAMPLE = 9 << 20


def test_a_gpu_with_memory_of_its_own_has_no_choice() -> None:
    with emulated(integrated="0") as (device, machine):
        results = measure(device, SAMPLE)
        assert machine.peak == 0
    assert choose(results) == "staged"
    assert [(r.placement, r.seconds) for r in results] == [("staged", None)]
    assert "memory of its own" in results[0].words


@pytest.mark.parametrize("shared", ["0", "1"])
def test_an_integrated_gpu_measures_what_it_can(shared: str) -> None:
    with emulated(concurrent_managed=shared) as (device, machine):
        results = measure(device, SAMPLE, rounds=2)
        assert not machine.allocations()
    assert [r.placement for r in results] == ["staged", "zero-copy", "managed"]
    assert [r.seconds is not None for r in results] == [True, True, shared == "1"]
    assert shared == "1" or "managed" in results[2].words


def test_the_quickest_is_chosen() -> None:
    results = [Result("staged", 3.0, 1, ""), Result("zero-copy", 2.0, 1, ""), Result("managed", None, 1, "")]
    assert choose(results) == "zero-copy"


def test_no_room_is_told_and_a_refused_placement_is_a_result() -> None:
    with emulated(memory=str(SAMPLE)) as (device, _), pytest.raises(MemoryLimitError):
        measure(device, SAMPLE)
    with emulated() as (device, machine):
        machine.failures["cuMemHostGetDevicePointer"] = "out of memory"
        results = measure(device, SAMPLE, rounds=1)
    assert [r.seconds is not None for r in results] == [True, False, False]
    assert placement.choose(results) == "staged"
