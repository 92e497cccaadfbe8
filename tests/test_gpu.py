"""What the doctor says of GPUs, of drivers without one and of libraries that are missing, broken or do not suit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.backends.tensorrt import fakes
from trt_layering import gpu
from trt_layering.backends.tensorrt import driver
from trt_layering.errors import BackendError, MemoryLimitError
from trt_layering.findings import Finding


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Finding]]:
    """All findings by name; measuring is left out, for which there is no GPU."""
    monkeypatch.setattr(gpu, "placement", lambda: Finding("weights' placement", "staged"))
    monkeypatch.setattr(np, "__version__", "1.26.4")

    def examine() -> dict[str, Finding]:
        found = {finding.name: finding for finding in gpu.examine()}
        assert all(finding.status == "ok" or finding.remedy for finding in found.values())
        assert all(finding.value.isprintable() for finding in found.values())
        json.dumps([dict(finding.numbers) for finding in found.values()])
        return found

    return examine


def test_a_machine_that_has_it_all(monkeypatch, tmp_path, examined):
    fakes.machine(monkeypatch, tmp_path, version="10.3.0")
    found = examined()
    assert all(finding.status == "ok" for finding in found.values())
    assert found["CUDA driver"].value == "CUDA 12.6"
    assert found["GPU"].value == (
        "Orin (nvgpu), SM 8.7, 8 multiprocessors, integrated (memory is shared with the processor), 8.00 GiB, "
        "no concurrent use of managed memory"
    )
    assert found["GPU"].numbers["gpu_bytes"] == 8 << 30
    assert found["TensorRT"].value == "10.3.0"
    assert found["numpy"].value == "1.26.4, which suits this TensorRT"
    assert found["TensorRT backend"].value == "can be used: TensorRT 10.3.0 on Orin (nvgpu), SM 8.7"
    assert "weights' placement" in found


def test_a_discrete_gpu_of_several(monkeypatch, tmp_path, examined):
    fakes.machine(monkeypatch, tmp_path, name=b"H200\x1b[2J", count=2, _18=0, _89=1)
    found = examined()
    assert "of 2 GPUs the first is used" in found["CUDA driver"].value
    assert found["GPU"].value.startswith(
        "H200\\x1b[2J, SM 8.7, 8 multiprocessors, discrete, 8.00 GiB, managed memory can"
    )


@pytest.mark.parametrize(("nvidia", "status"), [(True, "warn"), (False, "ok")])
def test_no_driver_matters_where_there_is_a_gpu(monkeypatch, examined, nvidia, status):
    fakes.cuda(monkeypatch, None)
    monkeypatch.setattr(driver, "looks_like_nvidia", lambda: nvidia)
    found = examined()
    assert found["CUDA driver"].status == status
    assert "chains run on the CPU" in found["CUDA driver"].value
    assert set(found) == {"CUDA driver", "PyCUDA", "TensorRT"}


def test_a_driver_without_gpu(monkeypatch, examined):
    fakes.cuda(monkeypatch, fakes.FakeCuda(100))
    found = examined()["CUDA driver"]
    assert found.status == "warn"
    assert "no CUDA-capable device is detected (100)" in found.value


def test_a_library_that_is_there_but_broken(monkeypatch, tmp_path, examined):
    fakes.cuda(monkeypatch, fakes.FakeCuda())
    fakes.libraries(monkeypatch, tmp_path, tensorrt="raise ImportError('libnvinfer.so.10: cannot open')\n")
    found = examined()
    assert (found["PyCUDA"].status, found["TensorRT"].status) == ("ok", "warn")
    assert "libnvinfer.so.10" in found["TensorRT"].value
    assert "libnvinfer.so.10" in found["TensorRT backend"].value
    assert not {"numpy", "weights' placement"} & set(found)


def test_a_numpy_that_does_not_suit(monkeypatch, tmp_path, examined):
    fakes.machine(monkeypatch, tmp_path, version="10.13.0")
    monkeypatch.setattr(np, "__version__", "2.4.0")
    found = examined()
    assert (found["TensorRT"].status, found["numpy"].status) == ("ok", "warn")
    assert "numpy<2" in found["numpy"].remedy


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], tuple[Finding, list[str]]]:
    """`gpu.placement` where measuring gives these results or raises this error, and what was done with the device."""

    def place(results: object) -> tuple[Finding, list[str]]:
        done: list[str] = []

        def measure(device: object) -> object:
            if isinstance(results, Exception):
                raise results
            return results

        device = SimpleNamespace(close=lambda: done.append("closed"))
        package = "trt_layering.backends.tensorrt"
        monkeypatch.setitem(sys.modules, f"{package}.cuda", SimpleNamespace(Device=lambda: device))
        module = SimpleNamespace(measure=measure, choose=lambda results: results[-1].placement)
        monkeypatch.setitem(sys.modules, f"{package}.placement", module)
        return gpu.placement(), done

    return place


def test_where_weights_are_best_put(measured):
    results = [
        SimpleNamespace(placement="managed", seconds=None, words="refused\x07"),
        SimpleNamespace(placement="staged", seconds=0.5, words="64 MB/s"),
    ]
    found, done = measured(results)
    assert found.value == "staged (managed: refused\\x07; staged: 64 MB/s)"
    assert (found.numbers, done) == ({"staged_seconds": 0.5}, ["closed"])


@pytest.mark.parametrize("error", [BackendError("the GPU fell off the bus"), MemoryLimitError("no room for 32 MiB")])
def test_a_measurement_that_fails_is_a_finding(measured, error):
    found, done = measured(error)
    assert (found.value, found.status, done) == (f"not measured: {error.what}", "warn", ["closed"])
    assert found.remedy


def test_what_nvidia_leaves_behind_is_seen(tmp_path: Path):
    assert not driver.looks_like_nvidia(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvhost-gpu").touch()
    assert driver.looks_like_nvidia(tmp_path)
