"""What the process takes and what the machine has left, also within a memory group."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from trt_layering.runtime import meter

MIB = 1 << 20
FILES = {
    "memory.max": "{limit}\n",
    "memory.current": "{usage}\n",
    "memory.limit_in_bytes": "{limit}\n",
    "memory.usage_in_bytes": "{usage}\n",
    "memory.stat": "anon 5\ninactive_file {cache}\nactive_file 7\n",
}


def touched(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    memory[:: mmap.PAGESIZE] = b"x" * len(range(0, size, mmap.PAGESIZE))
    return memory


def test_memory_that_is_taken_shows_and_the_peak_stays_until_it_is_reset() -> None:
    before = meter.current_rss_bytes()
    memory = touched(64 * MIB)
    assert 60 * MIB < meter.current_rss_bytes() - before < 70 * MIB
    memory.close()
    assert meter.current_rss_bytes() - before < 4 * MIB
    assert meter.peak_rss_bytes() - before > 60 * MIB
    meter.reset_peak()
    assert meter.peak_rss_bytes() - before < 4 * MIB


def test_the_machine_has_something_left() -> None:
    assert meter.available_bytes() > 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root folder in the place of the machine's, with a GiB available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    monkeypatch.setattr(meter, "_MEMINFO", tmp_path / "proc/meminfo")
    monkeypatch.setattr(meter, "Path", lambda text: tmp_path / text.lstrip("/"))
    return tmp_path


def group(machine: Path, where: str, line: str, limit: str | int, usage: int, cache: int = 0) -> None:
    folder = machine / "sys/fs/cgroup" / where
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text.format(limit=limit, usage=usage, cache=cache))
    (machine / "proc/self/cgroup").write_text(line)


def test_outside_any_group_it_is_what_the_kernel_says(machine: Path) -> None:
    assert meter.available_bytes() == 1 << 30
    (machine / "proc/self/cgroup").write_text("0::/nowhere\n")
    assert meter.available_bytes() == 1 << 30


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("a/b", "0::/a/b\n"),
        ("memory/a", "3:cpu:/\n7:memory:/a\n0::/\n"),
    ],
)
def test_a_group_allows_less(machine: Path, where: str, line: str) -> None:
    """Page cache that can be dropped counts as room."""
    group(machine, where, line, limit=300 * MIB, usage=250 * MIB, cache=20 * MIB)
    assert meter.available_bytes() == 70 * MIB


def test_a_group_without_a_limit_allows_all(machine: Path) -> None:
    group(machine, "a", "0::/a\n", limit="max", usage=1)
    assert meter.available_bytes() == 1 << 30


def test_a_group_that_is_full_allows_nothing_but_is_not_unknown(machine: Path) -> None:
    group(machine, "a", "0::/a\n", limit=MIB, usage=2 * MIB)
    assert meter.available_bytes() == 1


def test_a_limit_on_a_group_further_up_counts(machine: Path) -> None:
    group(machine, "a", "0::/a/b\n", limit=100 * MIB, usage=60 * MIB)
    group_b = machine / "sys/fs/cgroup/a/b"
    group_b.mkdir()
    for name, text in FILES.items():
        (group_b / name).write_text(text.format(limit="max", usage=60 * MIB, cache=0))
    assert meter.available_bytes() == 40 * MIB


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_STATUS", "_MEMINFO"):
        monkeypatch.setattr(meter, name, tmp_path / "none")
    monkeypatch.setattr(meter, "Path", lambda text: tmp_path / "none")
    assert meter.current_rss_bytes() == 0
    assert meter.available_bytes() == 0
    assert meter.peak_rss_bytes() > 0
    meter.reset_peak()
