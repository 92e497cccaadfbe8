"""A profile says what was measured here, replaces the one that was there and nothing else, and can be killed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trt_layering as tl
from tests.chains import assert_close, feed, in_this_process, layers, opened, saved, uncut
from tests.store.samples import publish_tiny
from tests.store.stop_points import stop_points
from trt_layering import child, drive, profiling, timing
from trt_layering.building import Built, build
from trt_layering.errors import BuildError, NotBuiltError, UsageError
from trt_layering.runtime import meter, origin, supply
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import UNMEASURED, Memory, Profile, read_manifest, write_manifest
from trt_layering.store.reader import WeightFile
from trt_layering.timing import Timed

MIB = 1 << 20
NO_MEMORY = Memory(activations=0, scratch=0, engines=0, shapes={})
PROFILE = msgspec.structs.replace(UNMEASURED, read_rate=5e8, threads=7, machine={"processor": "Z80"}, drive="tape")


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """32 blocks of a MiB each, built and measured as users build."""
    folder = tmp_path_factory.mktemp("medium")
    path = saved(layers(32, width=512, batch=1), folder / "medium.onnx")
    return build(path, repository=folder, block_size="1MiB")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(6), tmp_path_factory.mktemp("source") / "layers.onnx")


@pytest.fixture(scope="module")
def small(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Six blocks of one layer each."""
    with in_this_process():
        return build(source, repository=tmp_path_factory.mktemp("small"), block_size="16KiB")


@pytest.fixture
def copy(small: Built, tmp_path: Path) -> Built:
    """A copy that a test may write to."""
    shutil.copytree(small.path.parent.parent, tmp_path / "engines")
    return Built(tmp_path / "engines" / "layers" / small.path.name, small.manifest)


def where(built: Built) -> dict[str, Any]:
    return {"name": built.path.parent.name, "repository": built.path.parent.parent}


def assert_measured(found: Profile, built: Built) -> None:
    manifest = built.manifest
    assert len(found.execute_seconds) == len(manifest.parts)
    assert len(found.read_seconds) == len(manifest.extents)
    assert all(0 < seconds < 10 for seconds in (*found.execute_seconds, *found.read_seconds))
    assert 1e5 < found.read_rate < 1e12
    assert found.threads in (1, 2, 4, 8)
    assert found.read_size in [size * MIB for size in (1, 2, 4, 8, 16)]
    assert found.threads * found.read_size <= 32 * MIB
    assert 1 <= found.execute_slowdown <= 1000
    assert 1 <= found.read_slowdown <= 1000
    assert found.machine == origin.machine()
    assert found.drive == origin.drive(built.path)


def test_a_build_ends_with_a_profile(medium: Built) -> None:
    assert_measured(medium.manifest.profile, medium)
    assert read_manifest(medium.path) == medium.manifest


def test_a_profile_is_measured_again_and_nothing_else_changes(medium: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a child process, as users do it."""
    write_manifest(medium.path, msgspec.structs.replace(medium.manifest, profile=PROFILE))
    before = {file.name: file.read_bytes() for file in medium.path.iterdir()}
    monkeypatch.setattr(profiling.measure, "__kwdefaults__", {"seconds": 0.1})
    stages: list[tuple[str, int, int]] = []
    found = tl.profile(**where(medium), progress=lambda *stage: stages.append(stage))
    assert_measured(found, medium)
    assert read_manifest(medium.path) == msgspec.structs.replace(medium.manifest, profile=found)
    after = {file.name: file.read_bytes() for file in medium.path.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == {"chain.json", "schedules.json"}
    assert set(after) == set(before)
    assert opened_fallbacks(medium) == []
    assert stages == [("profile", 0, 1), ("profile", 1, 1)]


def opened_fallbacks(built: Built) -> list[str]:
    with opened(built, Footprint.of(built.manifest).floor) as chain:
        found: list[str] = chain.stats()["fallbacks"]
        return found


def peak(task: dict[str, Any]) -> int:
    """In a process of its own: how far measuring goes above what it began with, with `in_flight` bytes for reads."""
    from trt_layering.backends.onnxruntime.runtime import share_thread_pool
    from trt_layering.inputs import seeded

    share_thread_pool()
    drive.IN_FLIGHT = timing._LITTLE = task["in_flight"]
    folder = Path(task["folder"])
    chain = read_manifest(folder)
    base = meter.current_rss_bytes()
    meter.reset_peak()
    real = meter.reset_peak
    try:
        meter.reset_peak = lambda: None  # by which measuring would forget its peak
        profiling.measure_here(folder, chain, seeded(chain.inputs, chain.memory.shapes, 0), 0.2, room=0)
    finally:
        meter.reset_peak = real
    return meter.peak_rss_bytes() - base


def test_measuring_takes_the_floor_and_what_is_read_at_once(medium: Built) -> None:
    floor = Footprint.of(medium.manifest).floor
    assert floor + 10 * MIB < medium.manifest.weights_bytes, "or nothing is shown"
    assert child.call(peak, {"folder": str(medium.path), "in_flight": 2 * MIB}) <= floor + 10 * MIB


def test_an_open_chain_reads_as_its_profile_says(copy: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        asked.append(len(buffers[0]))
        return os.preadv(descriptor, buffers, offset)

    monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))
    profile = msgspec.structs.replace(copy.manifest.profile, threads=3, read_size=8192)
    streamed = msgspec.structs.replace(copy.manifest, profile=profile, optimised=False)  # whatever memory seemed to be
    write_manifest(copy.path, streamed)
    with opened(copy, max(Footprint.of(copy.manifest).floor, 1)) as chain:
        chain.run(feed(1))
        assert sum(thread.name.startswith("trt-layering-loader") for thread in threading.enumerate()) == 3
    assert max(asked) == 8192


# --------------------------------------------------------------------------------------------------------- in its way


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring finds what the tests know."""
    monkeypatch.setattr(profiling, "measure", lambda folder, chain: PROFILE)


def test_no_chain_no_profile(tmp_path: Path) -> None:
    with pytest.raises(NotBuiltError, match="nobody"):
        tl.profile("nobody", repository=tmp_path)


@pytest.mark.usefixtures("known")
def test_two_at_once_are_refused(copy: Built) -> None:
    descriptor = os.open(copy.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process profiles") as caught:
            tl.profile(**where(copy))
        assert caught.value.remedy
        assert read_manifest(copy.path) == copy.manifest
    finally:
        os.close(descriptor)
    assert tl.profile(**where(copy)) == PROFILE


def test_an_error_while_measuring_leaves_all_as_it_was(copy: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, chain: Any) -> Profile:
        raise BuildError("measuring failed")

    before = {file.name: file.read_bytes() for file in copy.path.iterdir()}
    monkeypatch.setattr(profiling, "measure", fail)
    with pytest.raises(BuildError, match="measuring failed"):
        tl.profile(**where(copy))
    assert {file.name: file.read_bytes() for file in copy.path.iterdir()} == before


@pytest.mark.usefixtures("known")
def test_a_full_disk_leaves_the_old_profile(copy: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildError, match="the disk is full"):
        tl.profile(**where(copy))
    monkeypatch.undo()
    assert read_manifest(copy.path) == copy.manifest


def killed_at(repository: Path, point: int) -> bool:
    process = os.fork()
    if process == 0:

        def kill(number: int, name: str) -> None:
            if number == point:
                os.kill(os.getpid(), signal.SIGKILL)

        with stop_points(kill):
            profiling.profile("tiny", repository=repository)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.usefixtures("known")
def test_killed_at_any_moment_it_leaves_the_old_profile_or_the_new_one(tmp_path: Path) -> None:
    before = read_manifest(publish_tiny(tmp_path))
    after = msgspec.structs.replace(before, profile=PROFILE)
    found = []
    for point in range(100):
        write_manifest(tmp_path / "tiny" / "1", before)
        if not killed_at(tmp_path, point):
            break
        found.append(read_manifest(tmp_path / "tiny" / "1"))
    assert 4 < point < 99
    assert found[0] == before
    assert found[-1] == after
    assert all(chain in (before, after) for chain in found)
    assert read_manifest(tmp_path / "tiny" / "1") == after


# ------------------------------------------------------------------------------------------------------ joined blocks


@pytest.fixture
def joined(copy: Built, monkeypatch: pytest.MonkeyPatch) -> Iterator[Built]:
    monkeypatch.setattr(profiling.measure, "__kwdefaults__", {"seconds": 0.0})
    assert len(copy.manifest.joined) > 1
    with in_this_process():
        yield copy


def sums(built: Built, seconds: tuple[float, ...]) -> list[float]:
    """What joined blocks take if their blocks are executed one by one."""
    return [sum(seconds[part.first : part.first + part.count]) for part in built.manifest.joined]


def test_joined_blocks_are_executed_too(joined: Built, source: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trt_layering"):
        found = tl.profile(**where(joined))
    assert_measured(found, joined)
    estimates = sums(joined, found.execute_seconds)
    assert all(took != sum_ for took, sum_ in zip(found.execute_seconds[6:], estimates, strict=True))
    assert "joined" not in caplog.text
    with opened(joined) as chain:
        assert_close(uncut(source, feed(1), optimised=True), chain.run(feed(1)))


def test_joined_blocks_that_do_not_fit_count_as_their_blocks(
    joined: Built, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling.meter, "available_bytes", lambda: 1)
    with caplog.at_level(logging.INFO, logger="trt_layering"):
        found = profiling.measure(joined.path, joined.manifest)
    assert list(found.execute_seconds[6:]) == sums(joined, found.execute_seconds)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{len(joined.manifest.joined)} joined blocks were not timed, for want of memory or time"
    ]


def test_a_build_executes_joined_blocks_in_the_memory_it_has(source: Path, tmp_path: Path) -> None:
    """The largest would take 96 KiB for weights; what is measured beside those in this process may be anything."""
    asked = []
    real = profiling.timed

    def noted(folder: Path, chain: Any, *rest: Any) -> Any:
        asked.append(max(chain.block_bytes(index) for index in range(len(chain.blocks))))
        return real(folder, chain, *rest)

    with in_this_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "timed", noted)
        patch.setattr("trt_layering.backends.engine_overhead", lambda name: 0)
        done = build(source, repository=tmp_path, block_size="16KiB")
        assert max(asked) == done.manifest.weights_bytes
        asked.clear()
        chain = msgspec.structs.replace(done.manifest, memory=NO_MEMORY)
        found = profiling.measure_here(done.path, chain, feed(1), 0.0, room=Footprint.of(chain).floor + 48 * 1024)
    assert asked[0] == 16384
    assert max(asked) == 65536
    assert len(found.executed) == len(chain.joined) - 1


def test_memory_holds_for_joined_blocks_too(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = 1 << 30

    def measured(*_: Any, **__: Any) -> profiling.Found:
        return profiling.Found(UNMEASURED, [], more, [])

    monkeypatch.setattr(profiling, "measure_here", measured)
    with in_this_process():
        memory = build(source, repository=tmp_path, block_size="16KiB").manifest.memory
    assert memory.activations + memory.scratch == more


# ------------------------------------------------------------------------------------------------ everything in memory


def test_a_run_with_everything_in_memory_is_timed(joined: Built) -> None:
    found = tl.profile(**where(joined))
    assert 0 < found.whole_seconds < 10
    with opened(joined) as chain:
        assert chain.stats()["predicted_seconds"] == found.whole_seconds


def test_a_run_with_everything_in_memory_has_the_engines_that_are_opened_then(
    small: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    real = timing.OpenChain

    def noted(*given: Any, **options: Any) -> Any:
        seen.append(real(*given, **options))
        return seen[-1]

    monkeypatch.setattr(timing, "OpenChain", noted)
    assert timing.timed_whole(small.path, small.manifest, feed(1), 0.0) > 0
    (chain,) = seen
    stats = chain.stats()
    assert (stats["mode"], stats["blocks"]) == ("resident", len(small.manifest.whole))
    assert stats["requests"] == 5


@pytest.mark.parametrize("what", ["room", "machine", "time", "not optimised"])
def test_everything_in_memory_is_not_timed_where_it_cannot_be(
    small: Built, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(profiling, "timed_whole", lambda *_: 1.0)
    chain, slow = small.manifest, msgspec.structs.replace(small.manifest.profile, read_rate=1e3)
    resident = Footprint.of(chain).resident
    measure = profiling._time_whole
    assert measure(small.path, chain, feed(1), chain.profile, 0.0, resident) == 1.0
    if what == "room":
        assert measure(small.path, chain, feed(1), chain.profile, 0.0, resident - 1) == 0.0
    elif what == "machine":
        monkeypatch.setattr(profiling.meter, "available_bytes", lambda: resident - 1)
        assert measure(small.path, chain, feed(1), chain.profile, 0.0, resident) == 0.0
    elif what == "time":
        assert measure(small.path, chain, feed(1), slow, 0.0, resident) == 0.0
    else:
        assert measure(small.path, msgspec.structs.replace(chain, optimised=False), {}, slow, 0.0, 1 << 60) == 0.0


# -------------------------------------------------------------------------------------------------------------- words


def test_words_for_people(small: Built) -> None:
    rows = dict(profiling.describe(msgspec.structs.replace(small.manifest, profile=UNMEASURED)))
    assert rows == {"profile": "never measured"}
    profile = msgspec.structs.replace(PROFILE, execute_seconds=(0.001,) * 6, execute_slowdown=1.25)
    rows = dict(profiling.describe(msgspec.structs.replace(small.manifest, profile=profile)))
    assert rows["executes in"].startswith("6.00 ms")
    assert rows["drive reads"] == "500 MB/s with 7 reads of 4.0 MiB at once"
    assert "1.25 times" in rows["at once"]
    assert rows["measured on"] == "Z80; tape"


def test_a_build_measures_as_long_as_there_is_something_to_measure(small: Built) -> None:
    assert profiling.build_seconds(small.manifest) < 0.2
    large = msgspec.structs.replace(small.manifest.extents[0], length=1 << 40)
    assert profiling.build_seconds(msgspec.structs.replace(small.manifest, extents=(large,))) == profiling.SECONDS


def test_blocks_and_joined_ones_take_turns_and_the_least_counts(source: Path, tmp_path: Path) -> None:
    """Single ones are timed in a slow minute first, joined ones in another later: neither decides."""
    with in_this_process():
        done = build(source, repository=tmp_path, block_size="16KiB")
    passes: list[int] = []

    def timed(_folder: Path, chain: Any, *_: Any) -> Timed:
        single, again = len(chain.blocks) == len(done.manifest.blocks), len(chain.blocks) in passes
        passes.append(len(chain.blocks))
        return Timed([1.0 if single == again else 10.0] * len(chain.blocks), 0, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "timed", timed)
        times, _ = profiling._time_parts(done.path, done.manifest, feed(1), 1.0, 1 << 62)
    half = len(passes) // 2
    assert passes[:half] == passes[half:]
    assert len(set(passes)) > 1
    assert set(times) == set(range(len(done.manifest.parts)))
    assert set(times.values()) == {1.0}
