"""What the doctor says of made-up boards: files under a folder of the test's, programs on a PATH of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trt_layering import board

ORIN = {"proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0"}
R36 = "# R36 (release), REVISION: {}, GCID: 1, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025\n"
MODES = (
    "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n"
    "< PM_CONFIG DEFAULT=1 >\n"
)
SWAPS = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def drive(root: Path, folder: str, files: dict[str, str]) -> None:
    """Makes the drive of `root` the one in `folder` of the devices."""
    put(root, {f"sys/devices/{folder}/{name}": text for name, text in ({"size": "1"} | files).items()})
    number = os.stat(root).st_dev
    link = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / "sys/devices" / folder)


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    """Makes `script` the only `nvpmodel` there is; None: there is none."""
    folder.mkdir()
    if script is not None:
        (folder / "nvpmodel").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvpmodel").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


# ------------------------------------------------------------------------------------------------------------- JetPack


@pytest.mark.parametrize(
    ("release", "words", "status"),
    [
        (
            R36.format("4.3"),
            "NVIDIA Jetson Orin Nano Developer Kit, Linux for Tegra 36.4.3: JetPack 6.1 or newer",
            "ok",
        ),
        (R36.format("4.0"), "JetPack 6.1 or newer", "ok"),
        (R36.format("3.0"), "JetPack 6.0, whose TensorRT is 8.6", "warn"),
        (R36.format("5").replace("R36", "R35"), "JetPack 5 or older", "warn"),
        (R36.format("2.0").replace("R36", "R38"), "JetPack 7 or newer", "ok"),
        ("gibberish", "does not say which", "warn"),
        ("", "does not say which", "warn"),
    ],
)
def test_jetpack_by_its_release(tmp_path, release, words, status):
    put(tmp_path, {**ORIN, "etc/nv_tegra_release": release})
    found = board.jetpack(tmp_path)
    assert words in found.value
    assert found.status == status
    assert bool(found.remedy) == (status == "warn")


# --------------------------------------------------------------------------------------------------------------- power


@pytest.mark.parametrize(
    ("script", "words", "remedy"),
    [
        ("echo 'NV Power Mode: MAXN_SUPER'; echo 2", "MAXN_SUPER; sudo jetson_clocks", ""),
        ("echo 'NV Power Mode: MAXN'; echo 0", "MAXN; ", ""),
        ("echo 'NV Power Mode: 15W'; echo 0", "15W: slower than the board can", "sudo nvpmodel -m 2,"),
        ("echo 'NVPM WARN: x' >&2; echo 'NV Fan Mode:quiet'; echo 'NV Power Mode: 25W'", "25W", "sudo nvpmodel -m 2,"),
        ("echo nothing of the kind", "does not say", "sudo nvpmodel -q"),
        ("echo 'must be root \x1b[2J' >&2; exit 4", "nvpmodel -q failed: must be root", "sudo nvpmodel -q"),
        ("exit 4", "nvpmodel -q failed: 4", "sudo nvpmodel -q"),
        (None, "no nvpmodel", "sudo apt install"),
    ],
)
def test_the_power_mode(tmp_path, monkeypatch, script, words, remedy):
    put(tmp_path, {"etc/nvpmodel.conf": MODES})
    program(tmp_path / "bin", monkeypatch, script)
    found = board.power(tmp_path)
    assert words in found.value
    assert found.value.isprintable()
    assert remedy in found.remedy
    assert found.status == ("warn" if remedy else "ok")


def test_an_nvpmodel_that_hangs_or_cannot_be_run(tmp_path, monkeypatch):
    monkeypatch.setattr(board, "_SECONDS", 0.05)
    program(tmp_path / "bin", monkeypatch, "exec /bin/sleep 60")
    assert "TimeoutExpired" in board.power(tmp_path).value
    (tmp_path / "bin/nvpmodel").write_bytes(b"\0no program")
    assert "OSError" in board.power(tmp_path).value


def test_the_fastest_mode_where_none_is_named(tmp_path):
    assert board._fastest(tmp_path) == "0"
    put(tmp_path, {"etc/nvpmodel.conf": MODES.replace("MAXN", "OTHER")})
    assert board._fastest(tmp_path) == "0"


# ---------------------------------------------------------------------------------------------------------------- swap


@pytest.mark.parametrize(
    ("files", "kib", "words", "remedies"),
    [
        (["/dev/zram0 partition 1000000", "/dev/zram1 partition 1000000"], 7_700_000, "none on a drive",
         ["swap file on NVMe", "nvzramconfig"]),
        (["/swap file 8388604"], 7_700_000, "no zram", []),
        (["/swap file 8388604", "/dev/zram0 partition 5"], 7_700_000, "8.00 GiB on a drive", ["nvzramconfig"]),
        (["/swap file 5"], 7_700_000, "on a drive", ["swap file on NVMe"]),
        ([], 7_700_000, "none on a drive, no zram", ["swap file on NVMe"]),
        ([], 64_000_000, "none on a drive, no zram", []),
    ],
)  # fmt: skip
def test_swap_of_a_board(tmp_path, files, kib, words, remedies):
    swaps = SWAPS + "".join("\t".join([*line.split(), "0", "-2"]) + "\n" for line in files)
    put(tmp_path, {**ORIN, "proc/swaps": swaps, "proc/meminfo": f"MemTotal:        {kib} kB\n"})
    found = board.swap(tmp_path)
    assert words in found.value
    assert all(part in found.remedy for part in remedies)
    assert (found.status, bool(found.remedy)) == (("warn", True) if remedies else ("ok", False))


def test_swap_of_another_machine_is_told_only_if_there_is_some(tmp_path):
    put(tmp_path, {"proc/swaps": SWAPS})
    assert board.swap(tmp_path) is None
    put(tmp_path, {"proc/swaps": f"{SWAPS}/dev/sda2\tpartition\t2048\t0\t-2\n"})
    found = board.swap(tmp_path)
    assert (found.status, found.numbers) == ("ok", {"swap_bytes": 2 << 20, "zram_bytes": 0})


# -------------------------------------------------------------------------------------------------------------- drives


@pytest.mark.parametrize(
    ("folder", "files", "words", "status"),
    [
        ("pci0/nvme/nvme0/nvme0n1", {}, "NVMe (nvme0n1)", "ok"),
        ("mmc0/block/mmcblk1", {"device/type": "SD\n"}, "SD card (mmcblk1)", "warn"),
        ("mmc0/block/mmcblk0", {"device/type": "MMC\n"}, "eMMC (mmcblk0)", "warn"),
        ("pci0/usb2/2-1/block/sda", {"queue/rotational": "0"}, "USB (sda)", "warn"),
        ("pci0/ata1/block/sdb", {"queue/rotational": "1\n"}, "hard disk (sdb)", "warn"),
        ("pci0/ata1/block/sdb", {"queue/rotational": "0\n"}, "sdb", "ok"),
        ("virtual/block/dm-0", {}, "dm-0", "ok"),
    ],
)
def test_the_kind_of_drive(tmp_path, folder, files, words, status):
    drive(tmp_path, folder, files)
    found = board.kind_of_drive(tmp_path, tmp_path)
    assert (found.value, found.status) == (words, status)
    assert ("NVMe" in found.remedy) == (status == "warn")


def test_a_drive_of_which_nothing_is_known(tmp_path):
    assert board.kind_of_drive(tmp_path, tmp_path) is None
    assert board.kind_of_drive(tmp_path / "nowhere", tmp_path) is None


# -------------------------------------------------------------------------------------------------------------- all of


def test_a_board_as_a_whole_and_a_machine_that_is_none(tmp_path, monkeypatch):
    program(tmp_path / "bin", monkeypatch, None)
    assert board.examine(tmp_path, tmp_path) == []
    put(tmp_path, ORIN)
    assert [finding.name for finding in board.examine(tmp_path, tmp_path)] == ["JetPack", "power mode", "swap"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.binary(max_size=60), min_size=5, max_size=5))
def test_nothing_raises_whatever_the_files_say(tmp_path, monkeypatch, texts):
    monkeypatch.setenv("PATH", str(tmp_path))
    names = ("etc/nv_tegra_release", "proc/device-tree/model", "proc/swaps", "proc/meminfo", "etc/nvpmodel.conf")
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    for finding in board.examine(tmp_path, tmp_path):
        assert finding.value.isprintable()
        assert finding.status == "ok" or finding.remedy
