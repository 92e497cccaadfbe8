"""What reading and executing do to each other, with executions and drives that are functions."""

from __future__ import annotations

import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chains import feed, in_this_process, layers, saved
from tests.runtime.drives import PATIENCE, failure
from tests.test_timing import BLOCK
from trt_layering import interference
from trt_layering.building import Built, build
from trt_layering.errors import ReadError
from trt_layering.interference import samples


class Machine:
    """Executions take `alone` seconds, or `beside` while the drive reads; it reads `fast`, or `slow` beside them."""

    def __init__(self, alone: float, beside: float, fast: float, slow: float) -> None:
        self.alone, self.beside, self.fast, self.slow = alone, beside, fast, slow
        self.reading = threading.Event()
        self.executed = threading.Semaphore(0)
        self.spans: list[float] = []

    def execute(self) -> float:
        took = self.beside if self.reading.is_set() else self.alone
        self.executed.release()
        return took

    def read(self, seconds: float) -> float:
        self.spans.append(seconds)
        if threading.current_thread() is threading.main_thread():
            return self.fast
        self.reading.set()
        for _ in range(5):  # of which none may be seen before reading began
            assert self.executed.acquire(timeout=PATIENCE)
        while self.executed.acquire(blocking=False):
            pass
        for _ in range(5):
            assert self.executed.acquire(timeout=PATIENCE)
        self.reading.clear()
        return self.slow


def test_both_are_compared_with_themselves_alone():
    machine = Machine(alone=0.5, beside=0.75, fast=1e9, slow=4e8)
    executing, reading = interference._disturbed(machine.execute, machine.read, 0.0)
    assert executing == pytest.approx(1.5)
    assert reading == pytest.approx(2.5)
    assert machine.spans == [0.75, 0.75], "as long as an execution and a half"


def test_a_drive_that_fails_meanwhile_is_told():
    def read(seconds: float) -> float:
        raise ReadError("the drive failed") from failure()

    with pytest.raises(ReadError, match="the drive failed"):
        interference._disturbed(lambda: 1.0, read, 0.0)


@given(execute=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30), rows=st.sets(st.integers(0, 29)))
def test_samples_lie_where_the_time_goes_and_gather_no_rows(execute, rows):
    blocks = [msgspec.structs.replace(BLOCK, rows="x" if i in rows else None) for i in range(len(execute))]
    chosen = samples(blocks, [*execute, 99.0])  # joined blocks come after
    assert len(set(chosen)) == len(chosen) <= 3
    for index in chosen:
        assert index not in rows
        before, after = sum(execute[:index]), sum(execute[: index + 1])
        shares = (0.5, 1 / 6, 5 / 6)
        assert any(before - 1e-9 <= share * sum(execute) <= after + 1e-9 for share in shares)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    with in_this_process():
        return build(saved(layers(4), folder / "layers.onnx"), repository=folder, block_size="16KiB")


@pytest.mark.parametrize("wanted", [[0], [2], [2, 0, 3]])
def test_blocks_are_executed_on_what_they_get_in_the_chain(built, wanted):
    """Each by itself, on its inputs in a run, answers as in that run."""
    found = interference._captured(built.path, built.manifest, feed(1), wanted)
    assert sorted(block.name for block, _ in found) == sorted(f"block-{index:03}" for index in wanted)
    made = {"x": feed(1)["x"]}
    for block in built.manifest.blocks:
        alone = interference._one_block(built.manifest, block)
        opened = interference.open_at_floor(built.path, alone)
        opened.start()
        made |= opened.run({value.name: made[value.name] for value in block.inputs})
        before = opened.stats()["bytes_read"]
        assert interference._execution(opened, {value.name: made[value.name] for value in block.inputs}) > 0
        assert opened.stats()["bytes_read"] == before, "its weights stay"
        opened.close()
    for _, inputs in found:
        for name, array in inputs.items():
            assert array.tobytes() == made[name].tobytes()


def test_large_inputs_are_held_of_one_block_only(built, monkeypatch):
    monkeypatch.setattr(interference, "_HELD_BYTES", 0)
    [(block, _)] = interference._captured(built.path, built.manifest, feed(1), [2, 1, 3])
    assert block.name == "block-002"


def test_slowdowns_of_a_chain_are_at_least_one(built):
    rates = iter([1e9, 5e8] * 10)
    execute = [1e-4] * 4
    executing, reading = interference.slowdowns(
        built.path, built.manifest, feed(1), execute, lambda seconds: next(rates), 0.0
    )
    assert 1.0 <= executing <= 1000.0
    assert reading == pytest.approx(2.0)
    reversed_rates = iter([5e8, 1e9] * 10)
    _, reading = interference.slowdowns(
        built.path, built.manifest, feed(1), execute, lambda seconds: next(reversed_rates), 0.0
    )
    assert reading == 1.0
