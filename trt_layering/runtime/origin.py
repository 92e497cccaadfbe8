"""Which machine and which drive this is, so that a profile that was measured on others is noticed.

Reads /proc and /sys; may import the manifest's types, units and words. Nothing here raises: what cannot be read is left
out, and a drive of which nothing can be read is named by what is mounted, or by its device number.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from trt_layering.store.manifest import Profile
from trt_layering.units import format_size
from trt_layering.words import printable

_ROOT = Path("/")
_SECTOR = 512
_MODELS = ("device/model", "device/name")
_SERIALS = ("serial", "device/serial", "wwid", "device/wwid", "dm/uuid", "md/uuid", "loop/backing_file")


def machine(root: Path = _ROOT) -> dict[str, str]:
    """The `processor` (and the board, where it has a name) and how many `cores` this process may use."""
    names = [_text(root / "proc/device-tree/model"), _model_name(root / "proc/cpuinfo")]
    processor = ", ".join(name for name in names if name) or platform.machine()
    return {"processor": processor, "cores": str(len(os.sched_getaffinity(0)))}


def drive(path: Path, root: Path = _ROOT) -> str:
    """The drive that holds `path`, by what stays the same when the machine starts again: model, serial number (or the
    name, where it has none) and size; and the kind of file system."""
    number = _device(path)
    if not number:
        return "unknown"
    source, kind = _mounted(Path(os.path.realpath(path)), root)
    whole = disk(path, root)
    name = _described(whole) if whole is not None else source or f"device {number}"
    return ", ".join(part for part in (name, kind) if part)


def disk(path: Path, root: Path = _ROOT) -> Path | None:
    """The folder of /sys of the whole disk that `path` lies on; None where that cannot be told."""
    number = _device(path)
    found = _existing(root / "sys/dev/block" / number) if number else None
    source, _ = _mounted(Path(os.path.realpath(path)), root)
    if number and found is None and source.startswith("/dev/"):  # btrfs gives each subvolume a number of its own
        found = _existing(root / "sys/class/block" / Path(os.path.realpath(source)).name)
    return found


def _device(path: Path) -> str:
    """Like "8:1"; "" where `path` cannot be had."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return ""
    return f"{os.major(device)}:{os.minor(device)}"


def measured_elsewhere(profile: Profile, folder: Path) -> list[str]:
    """In one sentence, or none: that `profile` of the chain in `folder` (`<repository>/<name>/<version>`) was measured
    on another machine or drive than where it is now. Of a chain that was never measured nothing is said."""
    strange = []
    if profile.machine and profile.machine != (here := machine()):
        strange.append(f"another machine ({words(profile.machine)}; this one is {words(here)})")
    if profile.drive and profile.drive != (now := drive(folder)):
        strange.append(f"another drive ({printable(profile.drive)}; this one is {printable(now)})")
    if not strange:
        return []
    home = folder.absolute().parent
    again = f"trt-layering profile {shlex.quote(home.name)} --repository {shlex.quote(str(home.parent))}"
    return [f"the profile was measured on {' and '.join(strange)}: run {again}"]


def words(of: Mapping[str, str]) -> str:
    """What `machine` found, for people; what a store says in its place, too, which may hold anything."""
    return printable(", ".join(f"{value} cores" if key == "cores" else value for key, value in of.items()))


def _model_name(cpuinfo: Path) -> str:
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return " ".join(value.split())
    except OSError:
        pass
    return ""


def _existing(link: Path) -> Path | None:
    """The folder of the whole disk that `link` leads to, or to a partition of which."""
    folder = Path(os.path.realpath(link))
    if not folder.is_dir():
        return None
    return folder.parent if (folder / "partition").exists() else folder


def _described(disk: Path) -> str:
    model, serial = (
        next((text for name in names if (text := _text(disk / name))), "") for names in (_MODELS, _SERIALS)
    )
    sectors = _text(disk / "size")
    size = format_size(int(sectors) * _SECTOR) if re.fullmatch("[0-9]{1,18}", sectors) else ""
    return " ".join(part for part in (model, serial or disk.name, size) if part)


def _mounted(path: Path, root: Path) -> tuple[str, str]:
    """What is mounted where `path` is, and its file system; two empty texts where that cannot be told."""
    found, depth = ("", ""), -1
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(" "), [*after.split(" "), "", ""]
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]) if len(fields) > 4 else "")
        if len(point.parts) >= depth and path.is_relative_to(point):
            found, depth = (source, kind), len(point.parts)
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _text(file: Path) -> str:
    """What `file` says, as printable words; "" where it cannot be read."""
    try:
        text = file.read_bytes()[:256].decode(errors="replace")
    except OSError:
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
