"""The doctor: what it finds, on this machine and on made-up ones."""

from __future__ import annotations

import errno
import json
import os

import pytest

from tests.backends.tensorrt import fakes
from trt_layering import doctor, drive
from trt_layering.errors import ReadError


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "engines"
    folder.mkdir()
    return folder


def test_everything_is_looked_at_and_nothing_left_behind(repository, monkeypatch):
    monkeypatch.setattr(doctor.drive.measure, "__kwdefaults__", {"file_bytes": 4 << 20, "seconds": 0.05})
    findings = {finding.name: finding for finding in doctor.examine(repository / "not" / "there")}
    assert {
        "Python", "processor", "memory available", "memory limit", "block size", "disk space", "direct I/O",
        "drive reads", "ONNX Runtime", "CUDA driver", "TensorRT", "PyCUDA",
    } <= set(findings)  # fmt: skip
    assert all(finding.status == "ok" or finding.remedy for finding in findings.values())
    assert findings["ONNX Runtime"].status == "ok"
    assert findings["drive reads"].numbers["bytes_per_second"] > 0
    assert list(repository.iterdir()) == []
    json.dumps([finding.numbers for finding in findings.values()])


@pytest.mark.parametrize("failing", ["write", "fdatasync", "urandom"])
def test_the_temporary_file_goes_when_measuring_fails(repository, monkeypatch, failing):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(drive.os, failing, fail)
    findings = doctor.disk(repository)
    assert [finding.status for finding in findings][1:] == ["warn"]
    assert "No space left" in findings[1].value
    monkeypatch.undo()
    assert list(repository.iterdir()) == []


def test_a_drive_that_fails_is_a_finding(repository):
    def measure(_):
        raise ReadError("the drive failed: Input/output error")

    assert "Input/output error" in doctor.disk(repository, measure)[1].value


def test_no_direct_io_is_told_with_the_reason(repository):
    def measure(_):
        return drive.Drive(False, "the file system has no direct reads", [drive.Rate(1, 1 << 20, 50e6)])

    _, direct, rate = doctor.disk(repository, measure)
    assert (direct.status, rate.status) == ("warn", "warn")
    assert "has no direct reads" in direct.value
    assert "50 MB/s" in rate.value


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "500\n", "sys/fs/cgroup/a/memory.max": "1000\n"}, 500),
        ("0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"}, None),
        ("0::/../outside\n", {}, None),
        ("4:memory:/job\n0::/\n", {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700\n"}, 700),
        ("4:memory:/job\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("3:cpu,cpuacct:/\n", {"sys/fs/cgroup/cpu/memory.max": "5\n"}, None),
        (None, {}, None),
    ],
)
def test_memory_limits_of_both_cgroup_versions(tmp_path, cgroup, files, limit):
    for name, text in {**files, **({"proc/self/cgroup": cgroup} if cgroup else {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doctor.cgroup_limit(tmp_path) == limit


def test_gpu_libraries_are_not_imported_without_a_gpu(monkeypatch, tmp_path):
    fakes.libraries(monkeypatch, tmp_path, pycuda="raise SystemError\n", tensorrt="raise SystemError\n")
    fakes.cuda(monkeypatch, None)
    monkeypatch.setattr(doctor, "disk", lambda folder: [])
    monkeypatch.setattr(doctor, "onnxruntime", lambda: doctor.Finding("ONNX Runtime", ""))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert "no GPU" in findings["TensorRT"].value
