"""The set-up of a Jetson: a fake root folder, and fake programs that keep what they were asked for in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import checkout
from trt_layering.config import load

# Each is a shell script; $STATE is the folder with what they know: packages/NAME has a version, `log` what was changed.
PROGRAMS = {
    "id": "echo ${FAKE_UID:-1000}",
    "sudo": 'echo "sudo $*" >>$STATE/sudo; [ "$1" = -n ] && shift; exec "$@"',
    "dpkg-query": """
        file=$STATE/packages/$4
        [ -f "$file" ] || exit 1
        case $3 in *Version*) cat "$file";; *Status*) printf installed;; esac""",
    "apt-get": """
        echo "apt-get $*" >>$STATE/log
        [ -f $STATE/no-network ] && { echo "E: Could not resolve the host" >&2; exit 100; }
        installing=
        for word in "$@"; do
            case $word in
            install) installing=yes;;
            -*) ;;
            python3-libnvinfer) [ $installing ] && cat $STATE/tensorrt >$STATE/packages/$word;;
            *) [ $installing ] && echo 1.0 >$STATE/packages/$word;;
            esac
        done
        exit 0""",
    "nvpmodel": """
        if [ "$1" = -q ]; then
            printf 'NV Power Mode: '
            sed -n "s/^< POWER_MODEL ID=$(cat $STATE/mode) NAME=\\([^ ]*\\) >/\\1/p" $STATE/root/etc/nvpmodel.conf
            cat $STATE/mode
        else
            echo "nvpmodel $*, told $(cat)" >>$STATE/log
            [ -f $STATE/needs-reboot ] || echo $2 >$STATE/mode
        fi""",
    "findmnt": "cat $STATE/source",
    "lsblk": 'case $* in *nodeps*) cat $STATE/drives;; *) cat $STATE/ancestors;; esac',
    "df": 'echo "Filesystem 1024-blocks Used Available"; echo "x 1 1 $(cat $STATE/free)"',
    "uname": "echo x86_64",
}  # fmt: skip
PYTHON = """
    case "$*" in
    --version) echo Python $(cat $STATE/python).12;;
    *sys.exit*) ;;
    *version_info*) cat $STATE/python;;
    "-m venv --system-site-packages .venv")
        echo "$*" >>$STATE/log
        mkdir -p .venv/bin
        printf 'include-system-site-packages = true\\nversion = %s.12\\n' $(cat $STATE/python) >.venv/pyvenv.cfg
        cp $STATE/venv-python .venv/bin/python;;
    *) echo "unexpected: $*" >&2; exit 9;;
    esac"""
VENV_PYTHON = """
    case "$*" in
    "-c import pip") ;;
    *numpy.__version__*) cat $STATE/numpy;;
    "-m pip install"*)
        echo "$*, constraint $PIP_CONSTRAINT" >>$STATE/log
        [ -f $STATE/no-network ] && { echo "no route to host" >&2; exit 1; }
        case "$*" in *"numpy<2"*) echo 1.26.4 >$STATE/numpy;; esac
        exit 0;;
    *trt_layering*doctor*) echo "the doctor: $*"; exit $(cat $STATE/doctor);;
    *) echo "unexpected: $*" >&2; exit 9;;
    esac"""
MODES = {
    "nano": ["15W", "25W", "MAXN_SUPER", "7W"],
    "agx": ["MAXN", "MODE_15W", "MODE_30W", "MODE_50W"],
}


@dataclass
class Jetson:
    """A fake machine; `clone` is the repository on it."""

    state: Path
    clone: Path

    @property
    def root(self) -> Path:
        return self.state / "root"

    def knows(self, **files: object) -> None:
        for name, content in files.items():
            (self.state / name.replace("_", "-")).write_text(f"{content}\n")

    def file(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def has(self, package: str, version: str) -> None:
        (self.state / "packages" / package).write_text(version)

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The script, in a session of its own, so that there is no terminal."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHON", "VIRTUAL_ENV")}
        path = f"{self.state / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            [self.clone / "scripts" / "bootstrap-jetson.sh", "--root", str(self.root), *words],
            env={**kept, "PATH": path, "STATE": str(self.state), **variables}, text=True, capture_output=True,
            check=False, timeout=60, start_new_session=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def done(self) -> list[str]:
        """What was changed since it was asked last."""
        log = self.state / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return lines


@pytest.fixture
def jetson(tmp_path: Path) -> Jetson:
    """An Orin Nano with JetPack 6.2 as it comes, with an NVMe drive and enough swap on it."""
    machine = Jetson(tmp_path / "state", checkout.copy(tmp_path / "a clone"))
    for folder in ("bin", "packages", "root/usr/bin", "root/usr/local/cuda-12.6"):
        (machine.state / folder).mkdir(parents=True)
    for name, script in PROGRAMS.items():
        program(machine.state / "bin" / name, script)
    program(machine.root / "usr" / "bin" / "python3", PYTHON)
    program(machine.state / "venv-python", VENV_PYTHON)
    machine.file("proc/device-tree/model", "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0")
    machine.file("etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic, EABI: aarch64\n")
    machine.file("etc/nvpmodel.conf", modes("nano"))
    machine.file("proc/meminfo", "MemTotal:        7802768 kB\nMemFree: 1 kB\n")
    machine.file("proc/swaps", swaps(("/mnt/nvme/swap", 8 << 20), ("/dev/zram0", 650000)))
    machine.has("nvidia-jetpack", "6.2+b77")
    machine.has("nvidia-l4t-core", "36.4.3-20250107174145")
    machine.knows(
        mode=2, python="3.10", numpy="1.26.4", tensorrt="10.3.0.30-1+cuda12.5", doctor=0, source="/dev/nvme0n1p1",
        ancestors="nvme0n1p1\nnvme0n1", drives="nvme0n1\nmmcblk0", free=100 << 20,
    )  # fmt: skip
    return machine


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def modes(board: str) -> str:
    blocks = (
        f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n" for number, name in enumerate(MODES[board])
    )
    return "\n".join(blocks)


def swaps(*files: tuple[str, int]) -> str:
    return "".join(["Filename\tType\tSize\tUsed\tPriority\n", *(f"{name} file {size} 0 -2\n" for name, size in files)])


def warnings(words: str) -> list[str]:
    return [line.removeprefix("warn  ") for line in words.splitlines() if line.startswith("warn  ")]


def packages(lines: list[str]) -> list[str]:
    [line] = [line for line in lines if line.startswith("apt-get") and "install" in line.split()]
    return line.partition("--no-install-recommends ")[2].split()


def test_jetpack_6(jetson: Jetson) -> None:
    result = jetson.run()
    assert result.returncode == 0, result.stderr
    assert warnings(result.stderr) == []
    lines = jetson.done()
    assert packages(lines) == [
        "python3-venv", "python3-dev", "build-essential", "python3-libnvinfer", "cuda-nvcc-12-6",
        "cuda-cudart-dev-12-6", "cuda-profiler-api-12-6", "libcurand-dev-12-6",
    ]  # fmt: skip
    assert "-m venv --system-site-packages .venv" in lines
    pip = [line for line in lines if "pip install" in line]
    assert all(line.endswith(", constraint scripts/old-bindings.txt") for line in pip)
    package, pycuda, models = (line.partition("check ")[2].partition(",")[0] for line in pip)
    assert (package, pycuda) == ("--editable .", "--editable .[jetson]")
    assert "--no-deps ddddocr==" in models
    assert "JetPack: 6.2+b77, L4T 36.4" in result.stderr
    assert result.stdout == "the doctor: -m trt_layering doctor --repository engines\n"
    assert result.stderr.splitlines()[-1] == "next: scripts/build-engines configs/orin-nano-8gb.yaml"


def test_a_second_run_changes_nothing_and_says_so(jetson: Jetson) -> None:
    assert jetson.run().returncode == 0
    assert jetson.done()
    before = snapshot(jetson.clone)
    again = jetson.run()
    assert (again.returncode, jetson.done(), snapshot(jetson.clone)) == (0, [], before)
    assert "ready: nothing had to be changed, 0 warnings" in again.stderr
    assert "apt packages: all installed" in again.stderr
    assert "Python packages: all installed into .venv" in again.stderr
    assert "+ " not in again.stderr


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


class TestDryRun:
    def test_it_prints_what_a_run_does_and_does_nothing(self, jetson: Jetson) -> None:
        before = snapshot(jetson.clone)
        dry = jetson.run("--dry-run", "--power-mode", "25W")
        assert (dry.returncode, jetson.done(), snapshot(jetson.clone)) == (0, [], before)
        assert not (jetson.state / "sudo").exists()
        assert "dry run: nothing was changed" in dry.stderr
        real = jetson.run("--power-mode", "25W")
        printed = [line for line in dry.stderr.splitlines() if line.startswith("+ ") and "doctor" not in line]
        assert printed == [line for line in real.stderr.splitlines() if line.startswith("+ ")]
        assert len(printed) == len(jetson.done()) + 1  # and the .venv that is removed, which nothing logs

    def test_where_all_is_done(self, jetson: Jetson) -> None:
        jetson.run()
        jetson.done()
        dry = jetson.run("--dry-run")
        assert (dry.returncode, jetson.done()) == (0, [])
        assert "0 commands would be run" in dry.stderr

    def test_a_venv_that_has_to_go_stays(self, jetson: Jetson) -> None:
        jetson.run()
        jetson.done()
        (jetson.clone / ".venv" / "pyvenv.cfg").write_text("include-system-site-packages = false\nversion = 3.10.12\n")
        dry = jetson.run("--dry-run")
        assert (dry.returncode, jetson.done()) == (0, [])
        assert "+ rm -rf .venv" in dry.stderr
        assert "-m venv --system-site-packages .venv" in dry.stderr
        assert (jetson.clone / ".venv" / "bin" / "python").exists()


def test_jetpack_7(jetson: Jetson) -> None:
    shutil.rmtree(jetson.root / "usr" / "local")
    jetson.file("proc/device-tree/model", "NVIDIA Jetson AGX Thor Developer Kit\0")
    jetson.file("etc/nv_tegra_release", "# R38 (release), REVISION: 2.0, GCID: 1, BOARD: generic, EABI: aarch64\n")
    jetson.file("proc/meminfo", "MemTotal: 128000000 kB\n")
    jetson.file("proc/swaps", swaps())
    jetson.knows(python="3.12", tensorrt="10.13.3.9-1+cuda13.0", numpy="2.2.0", mode=0)
    jetson.file("etc/nvpmodel.conf", modes("agx"))
    result = jetson.run("--no-models")
    assert result.returncode == 0, result.stderr
    assert warnings(result.stderr) == []
    lines = jetson.done()
    assert "cuda-cudart-dev-13-0" in packages(lines)
    assert not any("ddddocr" in line for line in lines)
    # These bindings are older than 10.16 as well, and some numpy 2 was there.
    assert "numpy<2, constraint scripts/old-bindings.txt" in lines[-1]
    assert "configs/agx-orin.yaml" in result.stderr


def test_newer_bindings_take_any_numpy(jetson: Jetson) -> None:
    jetson.file("etc/nv_tegra_release", "# R39 (release), REVISION: 1.0, GCID: 1, BOARD: generic, EABI: aarch64\n")
    jetson.knows(python="3.12", tensorrt="10.16.1.2-1+cuda13.2", numpy="2.4.0")
    result = jetson.run()
    assert result.returncode == 0, result.stderr
    pip = [line for line in jetson.done() if "pip install" in line]
    assert len(pip) == 3
    assert all(line.endswith(", constraint ") for line in pip)


@pytest.mark.parametrize("model", [None, "Raspberry Pi 5 Model B Rev 1.0\0"])
def test_not_a_jetson(jetson: Jetson, model: str | None) -> None:
    (jetson.root / "etc" / "nv_tegra_release").unlink()
    (jetson.root / "proc" / "device-tree" / "model").unlink()
    if model:
        jetson.file("proc/device-tree/model", model)
    result = jetson.run()
    assert (result.returncode, jetson.done(), result.stdout) == (3, [], "")
    assert f"this is no Jetson: {(model or 'x86_64').rstrip(chr(0))}" in result.stderr
    assert "scripts/quickstart.sh" in result.stderr


@pytest.mark.parametrize("release", ["R35 (release), REVISION: 6.0", "R36 (release), REVISION: 3.0"])
def test_a_jetpack_that_is_too_old(jetson: Jetson, release: str) -> None:
    jetson.file("etc/nv_tegra_release", f"# {release}, GCID: 1, BOARD: generic, EABI: aarch64\n")
    result = jetson.run()
    assert (result.returncode, jetson.done()) == (3, [])
    assert "TensorRT older than 10.3" in result.stderr


def test_the_version_of_a_package_will_do_for_l4ts(jetson: Jetson) -> None:
    (jetson.root / "etc" / "nv_tegra_release").unlink()
    assert "L4T 36.4" in jetson.run("--dry-run").stderr
    (jetson.state / "packages" / "nvidia-l4t-core").unlink()
    result = jetson.run("--dry-run")
    assert result.returncode == 3
    assert "there is no L4T" in result.stderr


def test_an_image_that_is_being_made(jetson: Jetson) -> None:
    (jetson.root / "proc" / "device-tree" / "model").unlink()
    program(jetson.state / "bin" / "nvpmodel", "exit 1")
    result = jetson.run(FAKE_UID="0")
    assert result.returncode == 0, result.stderr
    assert [words.partition(":")[0] for words in warnings(result.stderr)] == ["board", "power mode"]
    assert not (jetson.state / "sudo").exists()


class TestDrives:
    @pytest.mark.parametrize(
        ("ancestors", "kind", "said"),
        [
            ("mmcblk0p1\nmmcblk0", "SD", "an SD card (mmcblk0)"),
            ("mmcblk0p1\nmmcblk0", "MMC", "eMMC (mmcblk0)"),
            ("sda1\nsda", "", "/dev/mmcblk0p1, which is no NVMe drive"),
        ],
    )
    def test_a_slow_one(self, jetson: Jetson, ancestors: str, kind: str, said: str) -> None:
        jetson.knows(source="/dev/mmcblk0p1", ancestors=ancestors)
        jetson.file("sys/block/mmcblk0/device/type", f"{kind}\n")
        result = jetson.run("--dry-run")
        [warned] = warnings(result.stderr)
        assert said in warned
        assert "to do: nvme0n1: give a folder on it as --repository" in result.stderr

    def test_there_is_no_better_one(self, jetson: Jetson) -> None:
        jetson.knows(source="overlay", ancestors="", drives="sda")
        result = jetson.run("--dry-run")
        assert warnings(result.stderr) == ["drive of engines: overlay, which is no NVMe drive"]
        assert "with an NVMe drive: give a folder" in result.stderr

    def test_one_under_another_name(self, jetson: Jetson) -> None:
        jetson.knows(source="/dev/mapper/data", ancestors="data\nnvme0n1p2\nnvme0n1")
        assert "NVMe (nvme0n1)" in jetson.run("--dry-run", "--repository", "not/there/yet").stderr
        assert not (jetson.clone / "not").exists()

    def test_little_space(self, jetson: Jetson) -> None:
        jetson.knows(free=5 << 20)
        assert len(warnings(jetson.run("--dry-run").stderr)) == 2
        jetson.knows(free=1 << 20)
        result = jetson.run()
        assert (result.returncode, jetson.done()) == (1, [])
        assert "1 GiB free" in result.stderr


@pytest.mark.parametrize("files", [(), (("/dev/zram0", 8 << 20),)])
def test_no_swap_but_zram(jetson: Jetson, files: tuple[tuple[str, int], ...]) -> None:
    jetson.file("proc/swaps", swaps(*files))
    result = jetson.run("--dry-run")
    [warned] = warnings(result.stderr)
    assert warned.startswith("memory: 7 GiB, and 0 GiB of swap on a drive")
    assert "fallocate -l 8G" in result.stderr


class TestPowerModes:
    def test_a_slower_one_is_told_and_left(self, jetson: Jetson) -> None:
        jetson.knows(mode=0)
        result = jetson.run()
        assert warnings(result.stderr) == ["power mode: 15W; builds and their measured times are of this mode"]
        assert "for MAXN_SUPER: sudo nvpmodel -m 2" in result.stderr
        assert not any("nvpmodel" in line for line in jetson.done())

    @pytest.mark.parametrize("asked", ["25W", "1"])
    def test_another_is_asked_for(self, jetson: Jetson, asked: str) -> None:
        result = jetson.run("--power-mode", asked)
        assert result.returncode == 0, result.stderr
        assert "nvpmodel -m 1, told no" in jetson.done()
        assert "ok    power mode: 25W" in result.stderr
        assert "sudo -n nvpmodel" not in jetson.run("--power-mode", asked).stderr

    def test_one_that_needs_a_new_start(self, jetson: Jetson) -> None:
        jetson.knows(needs_reboot="")
        result = jetson.run("--power-mode", "7W")
        assert result.returncode == 0
        assert warnings(result.stderr) == ["power mode: still MAXN_SUPER"]

    def test_one_that_there_is_not(self, jetson: Jetson) -> None:
        result = jetson.run("--power-mode", "MAX")
        assert (result.returncode, jetson.done()) == (2, [])
        assert "there are: 0=15W 1=25W 2=MAXN_SUPER 3=7W" in result.stderr


class TestInstalling:
    def test_sudo_is_for_apt_and_told_before(self, jetson: Jetson) -> None:
        words = jetson.run().stderr
        assert [line.split()[2] for line in (jetson.state / "sudo").read_text().splitlines()] == ["apt-get", "env"]
        assert "as root, by way of sudo:\n+ sudo -n apt-get" in words

    def test_only_what_is_missing(self, jetson: Jetson) -> None:
        jetson.has("python3-libnvinfer", "10.3.0.30-1+cuda12.5")
        jetson.has("build-essential", "12.9")
        jetson.run()
        assert not {"python3-libnvinfer", "build-essential"} & set(packages(jetson.done()))

    def test_it_goes_on_after_a_network_failure(self, jetson: Jetson) -> None:
        jetson.knows(no_network="")
        result = jetson.run()
        assert result.returncode == 1
        assert "apt-get could not read the lists" in result.stderr
        assert "Could not resolve" in result.stderr
        for package in ("python3-venv", "python3-dev", "build-essential", "cuda-nvcc-12-6", "cuda-cudart-dev-12-6",
                        "cuda-profiler-api-12-6", "libcurand-dev-12-6", "python3-libnvinfer"):  # fmt: skip
            jetson.has(package, "10.3.0.30")
        jetson.done()
        result = jetson.run()
        assert result.returncode == 1
        assert "pip could not install" in result.stderr
        assert result.stdout == ""
        (jetson.state / "no-network").unlink()
        jetson.done()
        assert jetson.run().returncode == 0
        lines = jetson.done()
        assert len(lines) == 3
        assert all("pip install" in line for line in lines)
        assert jetson.run().returncode == 0
        assert jetson.done() == []

    def test_a_tensorrt_that_is_too_old(self, jetson: Jetson) -> None:
        jetson.knows(tensorrt="8.6.2.3-1+cuda12.2")
        result = jetson.run()
        assert result.returncode == 1
        assert "TensorRT 8.6.2.3-1+cuda12.2 is older than 10.3" in result.stderr

    @pytest.mark.parametrize(
        "settings", ["include-system-site-packages = false\nversion = 3.10.12\n", None], ids=["closed", "other Python"]
    )
    def test_a_venv_that_will_not_do_is_made_anew(self, jetson: Jetson, settings: str | None) -> None:
        jetson.run()
        jetson.done()
        file = jetson.clone / ".venv" / "pyvenv.cfg"
        file.write_text(settings or "include-system-site-packages = true\nversion = 3.8.10\n")
        result = jetson.run()
        assert result.returncode == 0, result.stderr
        assert next(line.partition(" .venv")[0] for line in jetson.done()) == "-m venv --system-site-packages"
        assert "nothing had to be changed" in jetson.run().stderr

    def test_a_numpy_that_somebody_brought(self, jetson: Jetson) -> None:
        jetson.run()
        jetson.done()
        jetson.knows(numpy="2.2.6")
        assert jetson.run().returncode == 0
        [line] = jetson.done()
        assert "numpy<2" in line

    def test_another_python(self, jetson: Jetson) -> None:
        jetson.knows(python="3.11")
        [warned] = warnings(jetson.run("--dry-run").stderr)
        assert "the TensorRT of JetPack 6 is for 3.10" in warned

    def test_the_doctor_finds_something(self, jetson: Jetson) -> None:
        jetson.knows(doctor=1)
        result = jetson.run()
        assert result.returncode == 1
        assert "the doctor found something" in result.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--what"], 2), (["--repository"], 2), (["--repository", "--dry-run"], 2), (["--power-mode", ""], 2),
        (["engines"], 2), (["--help"], 0),
    ],
)  # fmt: skip
def test_words_that_make_no_sense(jetson: Jetson, words: list[str], status: int) -> None:
    result = jetson.run(*words)
    assert (result.returncode, jetson.done()) == (status, [])


CONFIGS = sorted((checkout.ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_deployment_can_be_read(file: Path) -> None:
    config = load(file)
    assert config.deployment.models
    assert config.deployment.memory_budget


@pytest.mark.parametrize("file", [file for file in CONFIGS if "orin" in file.stem], ids=lambda file: file.stem)
def test_deployments_of_jetsons_are_reasoned_and_their_examples_can_be_read(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    assert "was measured on a Jetson" in text.replace("\n# ", " ")
    settings, examples = text.partition("\n# Others, as examples")[::2]
    assert all("#" in line for line in settings.splitlines() if line.split(":")[0] in ("memory_budget", "  threads"))
    uncommented = "\n".join(line.replace("# ", "  ", 1) for line in examples.splitlines()[1:])
    whole = tmp_path / file.name
    whole.write_text(f"{settings}\n{uncommented}\n")
    assert [model.name for model in load(whole).deployment.models][-2:] == ["yolo", "vit"]
