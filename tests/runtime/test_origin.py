"""Which machine and drive this is: from a made-up /proc and /sys, and what an open chain says of a profile from
elsewhere."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chains import assert_same, feed, in_this_process, layers, opened, saved
from trt_layering.building import Built, build
from trt_layering.runtime import origin
from trt_layering.store.manifest import UNMEASURED, Profile

SECTORS = str((256 << 30) // 512)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a test puts its /proc and /sys; a file of the tests lies on the drive of the same number as really."""
    return tmp_path / "root"


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def device(root: Path, path: Path, folder: str, files: dict[str, str]) -> None:
    """Makes the drive of `path` the one in `folder` of the devices."""
    put(root, {f"sys/devices/{folder}/{name}": text for name, text in files.items()})
    number = os.stat(path).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / "sys/devices" / folder)


def mounted(root: Path, *lines: str) -> None:
    put(root, {"proc/self/mountinfo": "".join(f"{line}\n" for line in lines)})


# ------------------------------------------------------------------------------------------------------------- drives


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"device/model": "Samsung SSD 980 PRO 1TB \n", "wwid": "eui.0025", "size": SECTORS},
         "Samsung SSD 980 PRO 1TB eui.0025 256.00 GiB, ext4"),
        ({"device/model": "ST4000", "device/wwid": "t10.ATA  ST4000\n", "size": SECTORS},
         "ST4000 t10.ATA ST4000 256.00 GiB, ext4"),
        ({"device/name": "SD64G", "device/serial": "0x12", "size": SECTORS}, "SD64G 0x12 256.00 GiB, ext4"),
        ({"serial": "overlayblk", "size": SECTORS}, "overlayblk 256.00 GiB, ext4"),
        ({"serial": "", "size": SECTORS}, "disk0 256.00 GiB, ext4"),
        ({"size": "many"}, "disk0, ext4"),
        ({"dm/uuid": "LVM-abc"}, "LVM-abc, ext4"),
        ({"device/model": "evil\x1b[31m\0model"}, "evil [31m model disk0, ext4"),
    ],
)  # fmt: skip
def test_a_drive_is_told_by_what_stays(root, tmp_path, files, said):
    device(root, tmp_path, "pci/disk0", {"dev": "1:1", **files})
    mounted(root, "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw")
    assert origin.drive(tmp_path, root) == said


def test_a_partition_is_of_its_disk(root, tmp_path):
    put(root, {"sys/devices/nvme0n1/device/model": "FURY", "sys/devices/nvme0n1/serial": "S1"})
    device(root, tmp_path, "nvme0n1/nvme0n1p2", {"partition": "2", "size": "5"})
    mounted(root, "27 1 254:0 / / rw - xfs /dev/nvme0n1p2 rw")
    assert origin.drive(tmp_path, root) == "FURY S1, xfs"


def test_a_subvolume_is_of_what_is_mounted(root, tmp_path):
    put(root, {"sys/class/block/nvme7n1/serial": "S7"})
    mounted(root, "27 1 0:44 /@home / rw - btrfs /dev/nvme7n1 rw")
    assert origin.drive(tmp_path, root) == "S7, btrfs"


def test_the_innermost_mount_counts_and_of_two_there_the_later(root, tmp_path):
    inner = tmp_path / "a b"
    inner.mkdir()
    mounted(
        root,
        "1 0 0:1 / / rw - overlay overlay rw",
        f"2 1 0:2 / {tmp_path}/a\\040b rw - nfs4 server:/old rw",
        f"3 1 0:3 / {tmp_path}/a\\040b rw - nfs4 server:/new rw",
        f"4 1 0:4 / {tmp_path}/a rw - tmpfs tmpfs rw",
        "garbage",
    )
    assert origin.drive(inner, root) == "server:/new, nfs4"
    assert origin.drive(tmp_path, root) == "overlay, overlay"


def test_a_drive_of_which_nothing_is_known_has_a_number(root, tmp_path):
    number = os.stat(tmp_path).st_dev
    assert origin.drive(tmp_path, root) == f"device {os.major(number)}:{os.minor(number)}"
    assert origin.drive(tmp_path / "not there", root) == "unknown"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    texts=st.fixed_dictionaries({name: st.binary(max_size=60) for name in ("serial", "size", "device/model")}),
    mounts=st.binary(max_size=200),
)
def test_whatever_the_files_say_nothing_raises(tmp_path_factory, texts, mounts):
    tmp_path = tmp_path_factory.mktemp("any")
    root = tmp_path / "root"
    device(root, tmp_path, "disk0", {"dev": ""})
    for name, data in {**{f"sys/devices/disk0/{n}": d for n, d in texts.items()}, "proc/self/mountinfo": mounts,
                       "proc/cpuinfo": mounts}.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    told = origin.drive(tmp_path, root)
    assert told
    assert told == origin.drive(tmp_path, root)
    assert told.isprintable()
    assert all(origin.machine(root).values())


def test_this_machine():
    here = origin.machine()
    assert here == origin.machine()
    assert here["processor"]
    assert int(here["cores"]) == len(os.sched_getaffinity(0))
    assert origin.drive(Path("/")) == origin.drive(Path("/"))


# ----------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"proc/cpuinfo": "processor : 0\nmodel : 7\nmodel name\t: Intel(R)  Xeon\nmodel name : other\n"},
         "Intel(R) Xeon"),
        ({"proc/device-tree/model": "NVIDIA Jetson Orin Nano\0", "proc/cpuinfo": "CPU part : 0xd42\n"},
         "NVIDIA Jetson Orin Nano"),
        ({"proc/device-tree/model": "Raspberry Pi 5\0", "proc/cpuinfo": "model name : Cortex-A76\n"},
         "Raspberry Pi 5, Cortex-A76"),
        ({}, os.uname().machine),
    ],
)  # fmt: skip
def test_a_machine_is_told_by_its_processor_and_board(root, files, said):
    put(root, files)
    assert origin.machine(root)["processor"] == said


# ------------------------------------------------------------------------------------------------- measured elsewhere


def measured(folder: Path) -> Profile:
    return msgspec.structs.replace(UNMEASURED, machine=origin.machine(), drive=origin.drive(folder))


def test_nothing_is_said_of_a_profile_from_here_or_of_none(tmp_path):
    assert origin.measured_elsewhere(measured(tmp_path), tmp_path) == []
    assert origin.measured_elsewhere(UNMEASURED, tmp_path) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drive": "OLD 1"}, ["another drive (OLD 1;"]),
        ({"machine": {"processor": "Z80", "cores": "1"}}, ["another machine (Z80, 1 cores;"]),
        ({"machine": {**origin.machine(), "cores": "999"}}, ["another machine (", "999 cores;"]),
        ({"drive": "OLD 1", "machine": {"processor": "Z80"}}, ["another machine (Z80;", "and another drive (OLD 1;"]),
    ],
)
def test_a_profile_from_elsewhere_is_told_in_one_sentence(tmp_path, change, words):
    folder = tmp_path / "my engines" / "ocr" / "3"
    folder.mkdir(parents=True)
    [said] = origin.measured_elsewhere(msgspec.structs.replace(measured(folder), **change), folder)
    assert all(word in said for word in words)
    assert said.endswith(f": run trt-layering profile ocr --repository '{tmp_path}/my engines'")


def test_what_a_store_from_elsewhere_says_is_printable(tmp_path):
    hostile = {"machine": {"processor": "Z80\x1b[2J", "cores": "1\r"}, "drive": "OLD\x9b1\n\u202e"}
    [said] = origin.measured_elsewhere(msgspec.structs.replace(UNMEASURED, **hostile), tmp_path)
    assert said.isprintable()
    assert r"Z80\x1b[2J, 1\r cores" in said
    assert r"OLD\x9b1\n\u202e" in said
    assert origin.words(hostile["machine"]) == r"Z80\x1b[2J, 1\r cores"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    with in_this_process():
        return build(saved(layers(3), folder / "layers.onnx"), repository=folder, block_size="16KiB", optimise=False)


def test_a_chain_on_another_drive_runs_and_says_so_once(built, caplog, monkeypatch):
    with opened(built) as chain:
        wanted = chain.run(feed(1))
        assert chain.stats()["fallbacks"] == []
    monkeypatch.setattr(origin, "drive", lambda path: "NEW 2, xfs")
    with caplog.at_level(logging.WARNING, logger="trt_layering"), opened(built) as chain:
        assert_same(wanted, chain.run(feed(1)))
        chain.run(feed(1))
        [told] = chain.stats()["fallbacks"]
    assert "another drive (" in told
    assert "this one is NEW 2, xfs" in told
    assert [record.getMessage() for record in caplog.records] == [f"chain layers: {told}"]
