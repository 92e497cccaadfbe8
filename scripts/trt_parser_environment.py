"""The environment in which check_trt_parser.py asks NVIDIA's parser: two pinned wheels, and links by which the bindings
of one find the library in the other. Imports the standard library only. What cannot be had raises Unchecked.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

WHEELS = ("tensorrt-cu13-bindings==11.4.0.106", "onnxruntime-ep-nv-tensorrt-rtx-cu13==0.5.0")
LINKS = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.1.*",
    "libtensorrt_rtx.so.1": "libtensorrt_rtx.so.1.*",
    "libtensorrt_rtx.so": "libtensorrt_rtx.so.1.*",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1.*",
}
"""What the bindings look for, and the library that stands in for it."""
PLUGINS = "int initLibNvInferPlugins(void *l, const char *n) { return 1; } int getPluginCreators(void) { return 0; }"
"""The bindings load a library of plugins, too, and need nothing of it here."""


class Unchecked(Exception):
    """Nothing could be checked: what is wrong, and what to do."""


def prepared(folder: Path) -> Path:
    """The environment in `folder`, made the first time."""
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == _mark():
        return folder
    if shutil.which("cc") is None:
        raise Unchecked(
            "there is no C compiler, which a stub of one library is made with\n"
            "  to do: install one that answers to cc (Debian, Ubuntu: apt install gcc libc6-dev)"
        )
    print(f"putting {' and '.join(WHEELS)} into {folder} (about 150 MB to download)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder / "venv", with_pip=True, clear=True)
    except subprocess.CalledProcessError as error:
        remedy = "install Python's venv module (Debian, Ubuntu: apt install python3-venv)"
        raise Unchecked(f"no virtual environment can be made: {error}\n  to do: {remedy}") from error
    _run([str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy"])
    _run([
        str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
        *WHEELS,
    ])  # fmt: skip
    _link(folder)
    ready.write_text(_mark())
    return folder


def _mark() -> str:
    return "\n".join((*WHEELS, sys.version))


def _link(folder: Path) -> None:
    rtx = next((folder / "venv").glob("lib/python*/site-packages/onnxruntime_ep_nv_tensorrt_rtx"), None)
    links = folder / "lib"
    links.mkdir()
    for name, pattern in LINKS.items():
        found = [file for file in sorted(rtx.glob(pattern)) if not file.is_symlink()] if rtx is not None else []
        if not found:
            raise Unchecked(f"{WHEELS[1]} holds no {pattern}\n  to do: pin the versions that this script was made for")
        (links / name).symlink_to(found[0])
    stub = links / "libnvinfer_plugin.so.11"
    _run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(stub), f"-Wl,-soname,{stub.name}"], PLUGINS)


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        remedy = "mend what it says, or check elsewhere: the wheels are for x86-64 Linux"
        raise Unchecked(f"{' '.join(command[:4])} failed: {said}\n  to do: {remedy}")
