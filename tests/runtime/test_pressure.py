"""What the kernel says of memory, from files of a test, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trt_layering.runtime.pressure import Pressure, Relief

GROUP = "sys/fs/cgroup/system.slice/service"


class Kernel:
    """Its files below `root`."""

    def __init__(self, root: Path, group: bool) -> None:
        self.root, self.home = root, root / (GROUP if group else "proc/pressure")
        (root / "proc/self").mkdir(parents=True)
        self.home.mkdir(parents=True)
        (root / "proc/self/cgroup").write_text("4:memory:/old\n0::/" + ("system.slice/service\n" if group else "\n"))
        self.stalls = self.home / ("memory.pressure" if group else "memory")
        self.stall(0, 0)
        self.events(high=3, max=9, oom=1)

    def stall(self, some: float, full: float) -> None:
        self.stalls.write_text(
            f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=7\n"
            f"full avg10={full:.2f} avg60=99.00 avg300=99.00 total=7\n"
        )

    def events(self, **counts: int) -> None:
        (self.home / "memory.events").write_text("low 0\n" + "".join(f"{k} {v}\n" for k, v in counts.items()))


@pytest.fixture(params=[True, False], ids=["group", "machine"])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, request.param)


def test_stalls(kernel: Kernel) -> None:
    pressure = Pressure(kernel.root)
    assert pressure.look() is None
    kernel.stall(80, 4.9)
    assert pressure.look() is None
    kernel.stall(80, 6.5)
    assert "6.5 %" in str(pressure.look())
    kernel.stall(0, 0)
    assert pressure.look() is None


def test_events_of_the_group(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, True)
    pressure = Pressure(tmp_path)
    assert pressure.look() is None  # what was before does not count
    kernel.events(high=3, max=10, oom=1)
    assert pressure.look() is None  # a page cache at its limit does that
    kernel.stall(20, 0)
    kernel.events(high=3, max=11, oom=1)
    assert "limit" in str(pressure.look())
    assert pressure.look() is None
    kernel.events(high=3, max=11, oom=2)
    assert "killed" in str(pressure.look())
    assert pressure.look() is None


@pytest.mark.parametrize("text", ["", "some avg10=x\n", "\0\xff", "full avg10=\n"])
def test_files_that_say_nothing(kernel: Kernel, text: str) -> None:
    kernel.stalls.write_text(text)
    assert Pressure(kernel.root).look() is None
    kernel.stalls.unlink()
    assert Pressure(kernel.root).look() is None
    assert Pressure(kernel.root / "nothing").look() is None


def test_all_is_given_up_at_once_and_taken_back_in_steps() -> None:
    relief = Relief()
    assert not relief.update(None, 0)
    assert relief.update("short", 1)
    assert (relief.level, relief.words) == (0, "short")
    assert not relief.update("short", 2)
    assert not relief.update(None, 31.9)
    levels = []
    for now in range(32, 300):
        if relief.update(None, now):
            levels.append((now, relief.level))
    assert levels == [(32, 0.25), (62, 0.5), (92, 0.75), (122, None)]
    assert relief.words is None


def test_memory_that_gets_short_again_is_taken_back_later() -> None:
    relief = Relief()
    relief.update("short", 0)
    for now in range(1, 62):
        relief.update(None, now)
    assert relief.level == 0.5
    assert relief.update("short again", 62)
    assert (relief.level, relief.words) == (0, "short again")
    assert not relief.update(None, 121)
    assert relief.update(None, 122)
    now = 122
    while relief.level is not None:
        now += 1
        relief.update(None, now)
    assert relief.update("short", now + 599)
    assert not relief.update(None, now + 599 + 119)
    assert relief.update(None, now + 599 + 120)
