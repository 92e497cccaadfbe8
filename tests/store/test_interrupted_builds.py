"""A build that is killed or runs out of disk at any moment leaves earlier versions as they were and nothing half-made
in service; the next build removes what is left and says so."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.samples import assert_whole, publish_tiny
from tests.store.stop_points import stop_points
from trt_layering.errors import BuildError
from trt_layering.store.manifest import finished_versions, resolve
from trt_layering.store.writer import StoreWriter

ROOT = Path(__file__).parents[2]


def test_killed_at_any_disk_call(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.store.stop_points", str(tmp_path)]
    done = subprocess.run(program, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=60)
    points = int(done.stdout)
    assert points >= 30, "a build that writes touches the disk more often"
    versions = []
    for point in range(points):
        repository = tmp_path / str(point)
        finished = finished_versions(repository, "tiny")
        versions.append(len(finished))
        for version in finished:
            assert_whole(resolve(repository, "tiny", version))
        assert assert_whole(resolve(repository, "tiny", 1)).blocks[0].digest == engine_digest(tmp_path / str(points), 1)
        left = {path.name for path in (repository / "tiny").glob(".build-*")}
        with StoreWriter(repository, "tiny") as writer:
            assert set(writer.cleaned) == left
        assert {path.name for path in (repository / "tiny").iterdir()} == {str(version) for version in finished}
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    assert finished_versions(tmp_path / str(points), "tiny") == [1, 2]


def engine_digest(repository: Path, version: int) -> str:
    return assert_whole(resolve(repository, "tiny", version)).blocks[0].digest


def test_disk_full_at_any_disk_call(tmp_path: Path) -> None:
    before = assert_whole(publish_tiny(tmp_path, seed=1))
    told = set()
    for point in range(1000):
        message = build_with_full_disk(tmp_path, point)
        if message is None:
            break
        told.add(message.splitlines()[0].split(",")[0])
        # A version whose last fsync failed is there whole; anything else is not there.
        for version in finished_versions(tmp_path, "tiny"):
            assert_whole(resolve(tmp_path, "tiny", version))
        assert assert_whole(resolve(tmp_path, "tiny", 1)) == before
        assert not list((tmp_path / "tiny").glob(".build-*"))
    assert 20 < point < 999
    assert any(text.startswith("the disk is full: 8.0 KiB more needed for one extent") for text in told)


def build_with_full_disk(repository: Path, point: int) -> str | None:
    """What the error said; None if the build has no such point."""

    def fill_disk(number: int, name: str) -> None:
        if number == point and name not in ("close", "unlink"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reached.append(name)

    reached: list[str] = []
    try:
        with stop_points(fill_disk):
            publish_tiny(repository, seed=2)
    except BuildError as error:
        return str(error)
    if len(reached) > point:  # a call that cannot fail this way
        shutil.rmtree(resolve(repository, "tiny"))
        return "no error"
    return None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this machine lets one be made."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can make a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    before = assert_whole(publish_tiny(small_disk))
    with StoreWriter(small_disk, "tiny") as writer:
        weight = [("big", "uint8", (4 << 20,), lambda: [bytes(1 << 20)] * 4)]
        with pytest.raises(BuildError, match=r"disk is full: [34]\.\d MiB more needed for one extent, .* free") as told:
            writer.add_extent(weight)
        assert "another drive" in told.value.remedy
    assert os.listdir(small_disk / "tiny") == ["1"]
    assert assert_whole(resolve(small_disk, "tiny")) == before
    assert assert_whole(publish_tiny(small_disk, seed=3)) != before
