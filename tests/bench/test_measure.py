"""What the benches measure with: child processes, medians, memory, and that a failed child is no result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trt_layering.bench import cgroup

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
measure: Any = pytest.importorskip("measure")

MIB = 1 << 20


def test_a_child_returns_json_and_imports_add_to_its_memory() -> None:
    bare = measure.call(measure.imported, modules=[])
    assert measure.call(measure.imported, modules=["onnxruntime", "no.such.module"]) > bare + 5 * MIB


def test_a_failed_child_is_an_error_with_its_words() -> None:
    with pytest.raises(measure.ChildError, match="TypeError") as caught:
        measure.call(measure.imported, modules=3)
    assert caught.value.status == 1


def test_usage_sees_a_peak_after_the_memory_is_gone_and_not_after_a_reset() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("peak memory cannot be reset here")
    measure.reset_peak()
    before = measure.usage().now
    block = bytearray(os.urandom(1)) * (64 * MIB)
    del block
    assert measure.usage().peak > before + 60 * MIB
    measure.reset_peak()
    assert measure.usage().peak < before + 30 * MIB


def test_the_tree_sampler_counts_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; x = b'1' * (64 << 20); print(len(x), flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in set(measure._tree(os.getpid()))
        assert measure.tree_bytes(os.getpid()) > measure.usage().now + 60 * MIB
        child.communicate()


def test_a_spread_is_the_median_with_its_quartiles() -> None:
    spread = measure.spread([4.0, 1.0, 3.0, 2.0, 100.0])
    assert (spread.low, spread.median, spread.high, spread.count) == (2.0, 3.0, 4.0, 5)
    assert measure.spread([7.0]) == measure.Spread(7.0, 7.0, 7.0, 1)


def test_interleaving_takes_turns_and_leaves_out_the_first_of_a_batch() -> None:
    order: list[str] = []
    samples = measure.interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, batch=2, warm_up=1
    )
    assert "".join(order) == "ab" + "aaabbb" + "bbbaaa"
    assert {name: len(found) for name, found in samples.items()} == {"a": 4, "b": 4}


def test_a_memory_group_limits_its_child_and_is_removed() -> None:
    try:
        group = cgroup.MemoryGroup(32 * MIB)
    except OSError as error:
        pytest.skip(str(error))
    with group, pytest.raises(measure.ChildError) as caught:
        measure.call(measure.touch, group=group, count=64 * MIB)
    assert caught.value.status == -9
    assert not group.procs.exists()


def test_the_drive_rate_is_measured_over_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(os.urandom(1) * (3 * MIB))
    rate, access = measure.drive_rate(file, threads=2, size=MIB)
    assert rate > MIB
    assert "2 threads of 1 MiB" in access
