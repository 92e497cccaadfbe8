"""What reading and executing do to each other, from sweeps of which the numbers are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains import feed, in_this_process, layers, saved
from trt_layering.building import Built, build
from trt_layering.interference import Sweep, execute_slowdown, read_slowdown, slowdowns


def test_both_are_compared_with_themselves_alone() -> None:
    """A sweep that read all the time, and executed half of it."""
    sweep = Sweep(seconds=2.0, execute_seconds=1.0, read_seconds=2.0, bytes_read=10**9)
    assert execute_slowdown(sweep, alone=0.8) == pytest.approx(1.25)
    assert read_slowdown(sweep, rate=1e9) == pytest.approx(3.0), "twice as long, in half of the time"


def test_what_is_done_at_once_for_a_part_only_counts_by_its_share() -> None:
    """Executions that took a tenth longer although the drive read for half of the time: a fifth beside it."""
    sweep = Sweep(seconds=1.1, execute_seconds=1.1, read_seconds=0.55, bytes_read=10**8)
    assert execute_slowdown(sweep, alone=1.0) == pytest.approx(1.2)


@given(*(st.floats(0, 1e3) for _ in range(3)), st.integers(0, 10**12), st.floats(0, 1e3), st.floats(1, 1e12))
def test_nothing_gets_faster_or_endless(seconds, executing, reading, nbytes, alone, rate) -> None:
    sweep = Sweep(seconds, executing, reading, nbytes)
    assert 1 <= execute_slowdown(sweep, alone) <= 10
    assert 1 <= read_slowdown(sweep, rate) <= 10


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    with in_this_process():
        return build(saved(layers(4), folder / "layers.onnx"), repository=folder, block_size="16KiB")


def test_slowdowns_of_a_chain_are_at_least_one(built: Built) -> None:
    executing, reading = slowdowns(built.path, built.manifest, feed(1), [1e-4] * 4, 1e9, 0.0)
    assert 1 <= executing <= 10
    assert 1 <= reading <= 10
    assert slowdowns(built.path, built.manifest, feed(1), [1e3] * 4, 1.0, 0.0) == (1.0, 1.0)
