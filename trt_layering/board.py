"""What `doctor` tells of one of NVIDIA's boards: JetPack, power mode, swap, and the drive that chains are read from.

May import findings, units, words, `driver` and the names of drives. `root` is where /proc, /sys and /etc are; programs
are found on PATH. Nothing raises: what cannot be read or run is a finding, or left out.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from trt_layering.backends.tensorrt import driver
from trt_layering.findings import Finding
from trt_layering.runtime import origin
from trt_layering.units import format_size
from trt_layering.words import printable

_ROOT = Path("/")
_SECONDS = 10
_LITTLE_SWAP = 4 << 30
_LITTLE_MEMORY = 16 << 30
_L4T = re.compile(r"R([0-9]{1,4}) \(release\), REVISION: ([0-9]{1,4}(?:\.[0-9]{1,4})*)")
_MODE = re.compile(r"^NV Power Mode\s*:\s*(\S+)", re.MULTILINE)
_MODES = re.compile(r"<\s*POWER_MODEL\s+ID=([0-9]{1,4})\s+NAME=(\S+?)\s*>")


def examine(repository: Path, root: Path = _ROOT) -> list[Finding]:
    """Look at all of it; `repository` is a folder that exists. On other machines: only the drive and the swap."""
    found = [kind_of_drive(repository, root), swap(root)]
    if driver.on_jetson(root):
        found = [jetpack(root), power(root), *found]
    return [finding for finding in found if finding is not None]


def jetpack(root: Path) -> Finding:
    """Which JetPack is on the board, and whether its TensorRT is new enough."""
    name, board = "JetPack", driver.board(root) or "a Jetson"
    told = _L4T.search(_text(root / "etc/nv_tegra_release"))
    if told is None:
        remedy = "TensorRT has to come from JetPack 6.1 or newer; in a container, use an image of l4t-jetpack"
        return Finding(name, f"{board}; /etc/nv_tegra_release does not say which", "warn", remedy)
    release = tuple(int(number) for number in (told[1], *told[2].split(".")))
    words = f"{board}, Linux for Tegra {'.'.join(map(str, release))}"
    if release >= (38,):
        return Finding(name, f"{words}: JetPack 7 or newer")
    if release >= (36, 4):
        return Finding(name, f"{words}: JetPack 6.1 or newer")
    old = "JetPack 6.0, whose TensorRT is 8.6" if release >= (36,) else "JetPack 5 or older, whose TensorRT is 8"
    remedy = "flash JetPack 6.1 or newer: TensorRT 10.3 or newer is needed"
    return Finding(name, f"{words}: {old}", "warn", remedy)


def power(root: Path) -> Finding:
    """The power mode, which bounds every clock; the fastest is called MAXN on all boards."""
    name = "power mode"
    try:
        told = subprocess.run(
            ["nvpmodel", "-q"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=True
        )
    except FileNotFoundError:
        return Finding(name, "unknown: there is no nvpmodel", "warn", "sudo apt install nvidia-l4t-nvpmodel")
    except subprocess.CalledProcessError as error:
        said = printable(" ".join(error.stderr.decode(errors="replace").split()))[:200]
        return Finding(name, f"unknown: nvpmodel -q failed: {said or error.returncode}", "warn", "sudo nvpmodel -q")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, f"unknown: nvpmodel -q: {type(error).__name__}", "warn", "sudo nvpmodel -q")
    mode = _MODE.search(told.stdout.decode(errors="replace"))
    if mode is None:
        return Finding(name, "unknown: nvpmodel -q does not say", "warn", "sudo nvpmodel -q")
    if mode[1].startswith("MAXN"):
        return Finding(name, f"{printable(mode[1])}; sudo jetson_clocks keeps the clocks up while you measure")
    remedy = f"sudo nvpmodel -m {_fastest(root)}, then sudo jetson_clocks; profile chains again in the mode they run in"
    return Finding(name, f"{printable(mode[1])}: slower than the board can", "warn", remedy)


def _fastest(root: Path) -> str:
    """The number of the last of the modes called MAXN; 0, as on most boards, where that cannot be read."""
    modes = [number for number, name in _MODES.findall(_text(root / "etc/nvpmodel.conf")) if name.startswith("MAXN")]
    return modes[-1] if modes else "0"


def swap(root: Path) -> Finding | None:
    """Swap, of which zram is no more memory than there is; None where nothing is to be told."""
    lines = [line.split() for line in _text(root / "proc/swaps").splitlines()[1:]]
    sizes = {fields[0]: int(fields[2]) << 10 for fields in lines if len(fields) >= 3 and fields[2].isdigit()}
    if not sizes and not driver.on_jetson(root):
        return None
    compressed = sum(size for name, size in sizes.items() if Path(name).name.startswith("zram"))
    real = sum(sizes.values()) - compressed
    numbers = {"swap_bytes": real, "zram_bytes": compressed}
    words = (
        f"{format_size(real) if real else 'none'} on a drive, {format_size(compressed) if compressed else 'no'} zram"
    )
    if not driver.on_jetson(root) or not (0 < _memory(root) < _LITTLE_MEMORY):
        return Finding("swap", words, numbers=numbers)
    file = "add a swap file on NVMe for builds (sudo fallocate -l 8G /swap; chmod 600, mkswap, swapon)"
    zram = "turn zram off (sudo systemctl disable --now nvzramconfig): it takes its pages from the same memory"
    remedies = [*([file] if real < _LITTLE_SWAP else []), *([zram] if compressed else [])]
    return Finding("swap", words, "warn" if remedies else "ok", "; ".join(remedies), numbers)


def _memory(root: Path) -> int:
    total = re.search(r"^MemTotal:\s*([0-9]{1,15}) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(total[1]) << 10 if total else 0


def kind_of_drive(folder: Path, root: Path) -> Finding | None:
    """What kind of drive is under `folder`; None where that cannot be told."""
    disk = origin.disk(folder, root)
    if disk is None:
        return None
    name, slow = "kind of drive", "put the repository on an NVMe drive: --repository, or a mount at its place"
    if disk.name.startswith("nvme"):
        return Finding(name, f"NVMe ({disk.name})")
    if disk.name.startswith("mmcblk"):
        card = _text(disk / "device/type").strip() == "SD"
        return Finding(name, f"{'SD card' if card else 'eMMC'} ({disk.name})", "warn", slow)
    if any(part.startswith("usb") for part in disk.parts):
        return Finding(name, f"USB ({disk.name})", "warn", slow)
    if disk.name.startswith(("sd", "hd")) and _text(disk / "queue/rotational").strip() == "1":
        return Finding(name, f"hard disk ({disk.name})", "warn", slow)
    return Finding(name, disk.name)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(1 << 20).decode(errors="replace").replace("\0", "")
    except OSError:
        return ""
