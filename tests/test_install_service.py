"""The installation of the service into a fake root folder, by fake programs that keep what they were asked for; and the
unit itself, as systemd-analyze sees it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import checkout

SCRIPT = checkout.ROOT / "scripts" / "install-service.sh"
UNIT = checkout.ROOT / "scripts" / "trt-layering.service"
UNITS = "etc/systemd/system"
INSTALLED = f"{UNITS}/trt-layering.service"
MACHINE = f"{INSTALLED}.d/10-machine.conf"
MEMORY = f"{INSTALLED}.d/20-memory.conf"
ENABLED = f"{UNITS}/multi-user.target.wants/trt-layering.service"

# Each is a shell script; $STATE is the folder with what they know: owners/PATH has an owner, `log` what was done.
PROGRAMS = {
    "id": "echo ${FAKE_UID:-0}",
    "chown": """
        echo "chown $1 $2" >>$STATE/log
        mkdir -p "$STATE/owners/$2" && echo $1 >"$STATE/owners/$2/.owner" """,
    "stat": """
        for path in "$@"; do :; done
        owner=0:0
        [ -f "$STATE/owners/$path/.owner" ] && owner=$(cat "$STATE/owners/$path/.owner")
        [ -e "$path" ] || exit 1
        case "$*" in
        *%u:%g*) echo $owner;;
        *"-c %u"*) echo ${owner%:*};;
        *) exec $REAL_STAT "$@";;
        esac""",
    "systemd-sysusers": """
        echo "systemd-sysusers $*" >>$STATE/log
        [ -f $STATE/no-users ] && { echo "no space left on device" >&2; exit 1; }
        grep -q '^u trt-layering - ' "$2" || exit 9
        echo trt-layering:x:991:990::/var/lib/trt-layering:/usr/sbin/nologin >>$STATE/root/etc/passwd
        echo trt-layering:x:990: >>$STATE/root/etc/group""",
    "userdel": 'echo "userdel $*" >>$STATE/log; sed -i /^trt-layering:/d $STATE/root/etc/passwd $STATE/root/etc/group',
    "systemctl": """
        case "$*" in
        --version) echo "systemd $(cat $STATE/systemd) ($(cat $STATE/systemd).11-0ubuntu3)";;
        "--quiet is-enabled"*) [ -f $STATE/enabled ];;
        "--quiet is-active"*) [ -f $STATE/active ];;
        show*) cat $STATE/stale;;
        *)
            echo "systemctl $*" >>$STATE/log
            case "$*" in
            daemon-reload) echo no >$STATE/stale;;
            enable*) touch $STATE/enabled;;
            *start*) touch $STATE/active;;
            disable*) rm -f $STATE/enabled $STATE/active;;
            esac;;
        esac""",
}  # fmt: skip
PYTHON = """
    case "$*" in
    "-c import trt_layering") [ ! -f $STATE/no-package ];;
    "-c import uvicorn") [ ! -f $STATE/no-uvicorn ];;
    "- "*) if [ -f $STATE/told ]; then cat $STATE/told; else exec $REAL_PYTHON "$@"; fi;;
    *doctor*) echo "the doctor: $*"; exit $(cat $STATE/doctor);;
    *) echo "unexpected: $*" >&2; exit 9;;
    esac"""


@dataclass
class Machine:
    """A fake machine, with a program at /opt/trt-layering and a deployment."""

    state: Path
    config: Path

    @property
    def root(self) -> Path:
        return self.state / "root"

    def knows(self, **files: object) -> None:
        for name, content in files.items():
            (self.state / name.replace("_", "-")).write_text(f"{content}\n")

    def told(self, repository: str, token: str = "") -> None:
        """What Python says of the deployment."""
        self.knows(told=f"/usr/lib/trt_layering\n{repository}\n{token}")

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The script, told to take the fake root folder for the machine."""
        environment = {
            **os.environ, "PATH": f"{self.state / 'bin'}:{os.environ['PATH']}", "STATE": str(self.state),
            "PYTHON": str(self.state / "python"), "REAL_PYTHON": sys.executable, "PYTHONPATH": str(checkout.ROOT),
            "REAL_STAT": str(shutil.which("stat")),
        }  # fmt: skip
        return subprocess.run(
            [SCRIPT, "--root", str(self.root), *words], env={**environment, **variables}, text=True,
            capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def install(self, *words: str, live: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        program = "/opt/trt-layering/.venv/bin/trt-layering"
        how = ["--live"] if live else []
        return self.run(str(self.config), "--program", program, *how, *words, **variables)

    def done(self) -> list[str]:
        """What the fake programs changed since it was asked last."""
        log = self.state / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return [line.replace(str(self.root), "") for line in lines]

    def file(self, path: str) -> str:
        return (self.root / path).read_text()

    def owner(self, path: str) -> str:
        return (self.state / "owners" / f"{self.root}/{path}".lstrip("/") / ".owner").read_text().strip()

    def mode(self, path: str) -> str:
        return f"{stat.S_IMODE((self.root / path).stat().st_mode):o}"

    def systemctl(self) -> list[str]:
        return [line.removeprefix("systemctl ") for line in self.done() if line.startswith("systemctl")]

    def everything(self) -> dict[str, tuple[int, int]]:
        found = {str(path): path.lstat() for path in self.root.rglob("*")}
        return {path: (status.st_mtime_ns, status.st_mode) for path, status in found.items()}


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with systemd 249, where nothing was installed."""
    machine = Machine(tmp_path / "state", tmp_path / "a deployment.yaml")
    for name, script in PROGRAMS.items():
        program(machine.state / "bin" / name, script)
    program(machine.state / "python", PYTHON)
    program(machine.root / "opt/trt-layering/.venv/bin/trt-layering", "exit 0")
    (machine.root / "etc").mkdir()
    (machine.root / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\n")
    (machine.root / "etc/group").write_text("root:x:0:\n")
    machine.knows(systemd=249, stale="no", doctor=0)
    machine.config.write_text("memory_budget: 128MiB\n")
    machine.told("/var/lib/trt-layering/engines")
    return machine


@pytest.fixture
def reading(machine: Machine) -> Machine:
    """The machine, with a Python that reads the deployment as the package does."""
    (machine.state / "told").unlink()
    return machine


class TestInstalling:
    def test_a_first_time(self, reading: Machine) -> None:
        result = reading.install()
        assert result.returncode == 0, result.stderr
        assert reading.file(INSTALLED) == UNIT.read_text()
        assert reading.file(MACHINE).splitlines()[1:] == [
            "[Service]", "ExecStart=",
            "ExecStart=/opt/trt-layering/.venv/bin/trt-layering serve /etc/trt-layering/config.yaml",
        ]  # fmt: skip
        assert reading.file("etc/trt-layering/config.yaml") == reading.config.read_text()
        assert (reading.owner("etc/trt-layering/config.yaml"), reading.mode("etc/trt-layering/config.yaml")) == (
            "0:990", "640"
        )  # fmt: skip
        for folder in ("var/lib/trt-layering", "var/lib/trt-layering/engines"):
            assert (reading.owner(folder), reading.mode(folder)) == ("991:990", "750")
        assert reading.systemctl() == ["daemon-reload", "enable trt-layering", "--no-block start trt-layering"]
        assert not (reading.root / MEMORY).exists()
        assert result.stdout == (
            f"the doctor: -m trt_layering doctor {reading.config} --repository /var/lib/trt-layering/engines\n"
        )
        assert "done: " in result.stderr

    def test_a_second_time_changes_nothing_and_says_so(self, machine: Machine) -> None:
        machine.install("--memory-max", "2GiB")
        assert machine.done()
        before = machine.everything()
        again = machine.install("--memory-max", "2GiB")
        assert (again.returncode, machine.done(), machine.everything()) == (0, [], before)
        assert "done: nothing had to be changed" in again.stderr
        assert "\n+ " not in again.stderr

    def test_a_changed_deployment_is_reloaded(self, machine: Machine) -> None:
        machine.install()
        machine.done()
        machine.config.write_text("memory_budget: 64MiB\n")
        assert machine.install().returncode == 0
        assert machine.systemctl() == ["--no-block reload trt-layering"]
        assert machine.file("etc/trt-layering/config.yaml") == "memory_budget: 64MiB\n"
        assert machine.mode("etc/trt-layering/config.yaml") == "640"

    def test_a_changed_unit_is_started_again(self, machine: Machine) -> None:
        machine.install()
        machine.done()
        (machine.root / INSTALLED).write_text("[Service]\n")
        machine.install()
        assert machine.systemctl() == ["daemon-reload", "--no-block restart trt-layering"]

    def test_what_an_interrupted_call_left_is_gone_on_with(self, machine: Machine) -> None:
        machine.install()
        machine.done()
        machine.knows(stale="yes")
        machine.install()
        assert machine.systemctl() == ["daemon-reload", "--no-block restart trt-layering"]

    def test_without_starting(self, machine: Machine) -> None:
        machine.install("--no-start")
        assert machine.systemctl() == ["daemon-reload", "enable trt-layering"]

    def test_what_an_administrator_added_stays(self, machine: Machine) -> None:
        machine.install()
        added = machine.root / f"{INSTALLED}.d" / "override.conf"
        added.write_text("[Service]\nNice=5\n")
        machine.install()
        assert machine.run("--uninstall", "--live").returncode == 0
        assert added.exists()

    @pytest.mark.parametrize(("version", "notified"), [(252, False), (253, True)])
    def test_reloads_that_systemd_waits_for_where_it_can(self, machine: Machine, version: int, notified: bool) -> None:
        machine.knows(systemd=version)
        machine.install()
        assert ("Type=notify-reload\nExecReload=\n" in machine.file(MACHINE)) == notified

    def test_a_repository_elsewhere_may_be_written_to(self, reading: Machine) -> None:
        (reading.root / "mnt/nvme").mkdir(parents=True)
        reading.config.write_text("repository: /mnt/nvme/engines\n")
        assert reading.install().returncode == 0
        assert "[Unit]\nRequiresMountsFor=/mnt/nvme/engines\n[Service]\n" in reading.file(MACHINE)
        assert "ReadWritePaths=/mnt/nvme/engines\n" in reading.file(MACHINE)
        assert (reading.owner("mnt/nvme/engines"), reading.mode("mnt/nvme/engines")) == ("991:990", "750")


class TestMemory:
    @pytest.mark.parametrize(("size", "written"), [("2GiB", "2G"), ("50%", "50%")])
    def test_a_limit(self, machine: Machine, size: str, written: str) -> None:
        assert machine.install("--memory-max", size).returncode == 0
        assert machine.file(MEMORY) == f"[Service]\nMemoryMax={written}\n"

    def test_it_stays_until_it_is_taken_away(self, machine: Machine) -> None:
        machine.install("--memory-max", "2GiB")
        machine.install()
        assert (machine.root / MEMORY).exists()
        machine.done()
        machine.install("--memory-max", "infinity")
        assert not (machine.root / MEMORY).exists()
        assert machine.systemctl() == ["daemon-reload", "--no-block restart trt-layering"]
        again = machine.install("--memory-max", "infinity")
        assert "nothing had to be changed" in again.stderr

    @pytest.mark.parametrize("size", ["2GB", "1G\nExecStart=/bin/sh"])
    def test_no_size(self, machine: Machine, size: str) -> None:
        result = machine.install("--memory-max", size)
        assert (result.returncode, machine.done()) == (2, [])
        assert "no amount of memory" in result.stderr


class TestToken:
    TOKEN = "etc/trt-layering/token"

    @pytest.fixture(autouse=True)
    def _a_deployment_that_names_one(self, machine: Machine) -> None:
        machine.told("/var/lib/trt-layering/engines", f"/{self.TOKEN}")

    def test_it_is_made_once_and_never_said(self, machine: Machine) -> None:
        result = machine.install()
        assert result.returncode == 0, result.stderr
        secret = machine.file(self.TOKEN)
        assert re.fullmatch(r"[0-9a-f]{64}", secret)
        assert (machine.owner(self.TOKEN), machine.mode(self.TOKEN)) == ("0:990", "640")
        assert secret not in result.stderr + result.stdout
        again = machine.install()
        assert machine.file(self.TOKEN) == secret
        assert "nothing had to be changed" in again.stderr

    def test_one_that_is_there_is_kept_but_closed_to_others(self, machine: Machine) -> None:
        (machine.root / "etc/trt-layering").mkdir()
        (machine.root / self.TOKEN).write_text("chosen by hand")
        assert machine.install().returncode == 0
        assert machine.file(self.TOKEN) == "chosen by hand"
        assert (machine.owner(self.TOKEN), machine.mode(self.TOKEN)) == ("0:990", "640")


class TestImages:
    def test_systemctl_is_not_asked(self, machine: Machine) -> None:
        program(machine.state / "bin" / "systemctl", "echo asked >>$STATE/log; exit 1")
        result = machine.install(live=False)
        assert result.returncode == 0, result.stderr
        assert "asked" not in machine.done()
        assert os.readlink(machine.root / ENABLED) == f"/{INSTALLED}"
        assert result.stdout == ""  # the doctor would look at another machine
        before = machine.everything()
        again = machine.install(live=False)
        assert (machine.done(), machine.everything()) == ([], before)
        assert "nothing had to be changed" in again.stderr

    def test_the_user_is_the_images(self, machine: Machine) -> None:
        machine.install(live=False)
        assert f"systemd-sysusers --root={machine.root} " in (machine.state / "log").read_text()

    def test_a_program_below_the_root(self, machine: Machine) -> None:
        path = machine.root / "opt/trt-layering/.venv/bin/trt-layering"
        assert machine.install("--program", str(path), live=False).returncode == 0
        assert "ExecStart=/opt/trt-layering/.venv/bin/trt-layering serve" in machine.file(MACHINE)

    def test_removed_again(self, machine: Machine) -> None:
        machine.install("--memory-max", "1G", live=False)
        assert machine.run("--uninstall", "--purge").returncode == 0
        left = [path for path in machine.root.rglob("*trt*") if "opt" not in path.parts]
        assert left == []


class TestDryRun:
    def test_it_prints_what_a_run_does_and_does_nothing(self, machine: Machine) -> None:
        before = machine.everything()
        dry = machine.install("--dry-run", "--memory-max", "1G", FAKE_UID="1000")
        assert (dry.returncode, machine.done(), machine.everything()) == (0, [], before)
        assert "dry run: nothing was changed" in dry.stderr
        real = machine.install("--memory-max", "1G")
        numbers = {"trt-layering:trt-layering": "991:990", "0:trt-layering": "0:990"}
        printed = [line for line in dry.stderr.splitlines() if line.startswith("+ ")]
        for name, number in numbers.items():
            printed = [line.replace(f"chown {name} ", f"chown {number} ") for line in printed]
        assert printed == [line for line in real.stderr.splitlines() if line.startswith("+ ")]

    def test_where_all_is_done(self, machine: Machine) -> None:
        machine.install()
        machine.done()
        dry = machine.install("--dry-run")
        assert (dry.returncode, machine.done()) == (0, [])
        assert "0 changes would be made" in dry.stderr

    def test_removing(self, machine: Machine) -> None:
        machine.install()
        machine.done()
        before = machine.everything()
        dry = machine.run("--uninstall", "--purge", "--dry-run", "--live")
        assert (dry.returncode, machine.done(), machine.everything()) == (0, [], before)
        assert f"+ rm -rf {machine.root}/var/lib/trt-layering" in dry.stderr


class TestRemoving:
    @pytest.fixture(autouse=True)
    def _installed(self, machine: Machine) -> None:
        machine.install("--memory-max", "1G")
        (machine.root / "var/lib/trt-layering/engines/finder").mkdir()
        machine.done()

    def test_what_cannot_be_made_again_stays(self, machine: Machine) -> None:
        result = machine.run("--uninstall", "--live")
        assert result.returncode == 0, result.stderr
        assert machine.systemctl() == ["disable --now trt-layering", "daemon-reload"]
        assert (machine.root / "var/lib/trt-layering/engines/finder").is_dir()
        assert (machine.root / "etc/trt-layering/config.yaml").exists()
        assert not list((machine.root / UNITS).glob("trt-layering*"))
        assert "--uninstall --purge removes them" in result.stderr
        again = machine.run("--uninstall", "--live")
        assert machine.done() == []
        assert "nothing had to be changed" in again.stderr

    def test_all_of_it(self, machine: Machine) -> None:
        assert machine.run("--uninstall", "--purge", "--live").returncode == 0
        assert f"userdel --prefix {machine.root} trt-layering".replace(str(machine.root), "") in machine.done()
        assert not (machine.root / "var/lib/trt-layering").exists()
        assert not (machine.root / "etc/trt-layering").exists()
        again = machine.run("--uninstall", "--purge", "--live")
        assert (again.returncode, machine.done()) == (0, [])

    def test_and_installed_again(self, machine: Machine) -> None:
        machine.run("--uninstall", "--live")
        machine.done()
        assert machine.install().returncode == 0
        assert machine.systemctl()[-1] == "--no-block start trt-layering"


class TestRefusals:
    @pytest.mark.parametrize(
        "words",
        [
            [], ["a.yaml", "b.yaml"], ["--nonsense"], ["a.yaml", "--memory-max"], ["--purge", "a.yaml"],
            ["--uninstall", "a.yaml"], ["--root", "/nowhere", "a.yaml"],
        ],
    )  # fmt: skip
    def test_words_that_make_no_sense(self, machine: Machine, words: list[str]) -> None:
        before = machine.everything()
        result = machine.run(*words)
        assert (result.returncode, machine.done(), machine.everything()) == (2, [], before)
        assert "to do: scripts/install-service.sh --help tells more" in result.stderr

    def test_a_deployment_that_makes_no_sense(self, reading: Machine) -> None:
        reading.config.write_text("memory_bugdet: 1GiB\n")
        self.refused(reading, "did you mean 'memory_budget'?", status=2)

    def test_no_deployment(self, reading: Machine) -> None:
        reading.config.unlink()
        self.refused(reading, str(reading.config), status=2)

    @pytest.mark.parametrize("repository", ["/mnt/my drive", "/mnt/50%"])
    def test_a_repository_that_would_be_more_than_a_path_in_a_unit(self, reading: Machine, repository: str) -> None:
        reading.config.write_text(f"repository: '{repository}'\n")
        self.refused(reading, "systemd cannot be given the path", status=2)

    def test_what_the_doctor_finds(self, machine: Machine) -> None:
        machine.knows(doctor=1)
        self.refused(machine, "the doctor found something")

    def test_without_the_package(self, machine: Machine) -> None:
        machine.knows(no_package="")
        self.refused(machine, "quickstart.sh")

    def test_without_what_the_service_needs(self, machine: Machine) -> None:
        machine.knows(no_uvicorn="")
        self.refused(machine, "[serve]")

    def test_an_old_systemd(self, machine: Machine) -> None:
        machine.knows(systemd=245)
        self.refused(machine, "systemd 245 is older than 249")

    def test_somebody_who_is_not_root(self, machine: Machine) -> None:
        before = machine.everything()
        result = machine.install(FAKE_UID="1000")
        assert (result.returncode, machine.everything()) == (1, before)
        assert "call it with sudo" in result.stderr

    def test_no_program(self, machine: Machine) -> None:
        (machine.root / "opt/trt-layering/.venv/bin/trt-layering").unlink()
        self.refused(machine, "there is no program")

    def test_a_program_in_a_home_folder(self, machine: Machine) -> None:
        program(machine.root / "home/nvidia/clone/.venv/bin/trt-layering", "")
        result = machine.install("--program", "/home/nvidia/clone/.venv/bin/trt-layering")
        assert (result.returncode, machine.done()) == (1, [])
        assert "cannot read /home/nvidia" in result.stderr
        assert "move the checkout to /opt/trt-layering" in result.stderr

    def test_a_program_that_others_cannot_reach(self, machine: Machine) -> None:
        (machine.root / "opt/trt-layering").chmod(0o700)
        self.refused(machine, "cannot read /opt/trt-layering/.venv/bin/trt-layering")

    def refused(self, machine: Machine, words: str, *, status: int = 1) -> None:
        before = machine.everything()
        result = machine.install()
        assert (result.returncode, machine.done(), machine.everything()) == (status, [], before), result.stderr
        assert words in result.stderr
        assert "Traceback" not in result.stderr

    def test_a_step_that_fails_is_gone_on_with(self, machine: Machine) -> None:
        machine.knows(no_users="")
        result = machine.install()
        assert result.returncode == 1
        assert "no space left on device" in result.stderr
        assert not (machine.root / INSTALLED).exists()
        (machine.state / "no-users").unlink()
        assert machine.install().returncode == 0
        assert (machine.root / INSTALLED).exists()


class TestUnit:
    def settings(self) -> list[tuple[str, str]]:
        lines = [line for line in UNIT.read_text().splitlines() if line and line[0] not in "#["]
        return [(key, value) for key, _, value in (line.partition("=") for line in lines)]

    def test_what_the_service_relies_on(self) -> None:
        settings = dict(self.settings())
        assert settings["Type"] == "notify"
        assert settings["RestartPreventExitStatus"] == "2"
        assert settings["OOMPolicy"] == "continue"
        assert settings["ExecReload"].endswith("-HUP $MAINPID")
        assert {"PrivateDevices", "MemoryDenyWriteExecute", "MemoryMax", "PrivateUsers"}.isdisjoint(settings)

    def test_devices_that_systemd_takes_as_they_are_meant(self) -> None:
        devices = [value.split()[0] for key, value in self.settings() if key == "DeviceAllow"]
        assert "char-nvidia*" in devices
        assert not [device for device in devices if device.startswith("/dev/") and "*" in device]

    @pytest.fixture
    def analyze(self) -> str:
        found = shutil.which("systemd-analyze")
        if found is None:
            pytest.skip("systemd-analyze is not installed")
        words = subprocess.run([found, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        if int(words.split()[1]) < 250:
            pytest.skip("this systemd-analyze cannot look at units that are not installed (250 and newer can)")
        return found

    @pytest.mark.parametrize("words", [[], ["--memory-max", "2GiB"]])
    def test_systemd_finds_no_fault(self, machine: Machine, analyze: str, words: list[str]) -> None:
        program(machine.root / "bin/true", "")
        machine.told("/mnt/nvme/engines")
        assert machine.install("--program", "/bin/true", *words, live=False).returncode == 0
        done = subprocess.run(
            [analyze, "verify", machine.root / INSTALLED], capture_output=True, text=True, check=False, timeout=60
        )
        assert [line for line in done.stderr.splitlines() if "trt-layering" in line] == []
        assert done.returncode == 0

    def test_it_is_exposed_little(self, analyze: str) -> None:
        done = subprocess.run(
            [analyze, "security", "--offline=yes", "--no-pager", UNIT], capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        found = re.search(r"Overall exposure level .*: ([0-9.]+)", done.stdout)
        assert found, done.stderr
        assert float(found[1]) <= 3.0
