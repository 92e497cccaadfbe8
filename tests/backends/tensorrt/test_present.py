"""What is missing is refused in words, in an order in which nothing can crash, and never twice looked for."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.backends.tensorrt import fakes
from tests.backends.tensorrt.stores import publish
from trt_layering import backends
from trt_layering.backends.tensorrt import driver, present
from trt_layering.errors import BackendError
from trt_layering.store.manifest import read_manifest

UNIMPORTABLE = "import sys\nraise SystemError('imported before its turn')\n"


def refusal() -> BackendError:
    with pytest.raises(BackendError) as caught:
        present.require()
    error = caught.value
    assert all((error.what, error.where, error.remedy))
    assert present.missing() == error.what
    assert str(error).replace("\n", "").isprintable()
    for use in (present.version, present.fingerprint):
        with pytest.raises(BackendError):
            use()
    assert error.what in present.here()
    return error


# -------------------------------------------------------------------------------------------------------------- driver


def test_this_machine_is_told_of_without_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(present, "_found", None)
    missing = present.missing()
    assert missing is None or missing.isprintable()


def test_without_a_driver_nothing_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.libraries(monkeypatch, tmp_path, pycuda=UNIMPORTABLE, tensorrt=UNIMPORTABLE)
    fakes.cuda(monkeypatch, None)
    fakes.tegra(monkeypatch, False)
    error = refusal()
    assert isinstance(error.__cause__, driver.NoDriver)
    assert "no NVIDIA driver" in error.what
    assert "--backend onnxruntime" in error.remedy
    assert not {"pycuda", "tensorrt"} & set(sys.modules)


@pytest.mark.parametrize(
    ("library", "what", "remedy"),
    [
        (fakes.FakeCuda(100), "no CUDA-capable device is detected (100)", "nvidia-smi"),
        (fakes.FakeCuda(999), "error 999", "nvidia-smi"),
        (fakes.FakeCuda(3), "initialization error (3)", "spawn"),
        (fakes.FakeCuda(count=0), "finds no GPU", "nvidia-smi"),
        (object(), "has no cuInit", "driver"),
    ],
)
def test_a_driver_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: object, what: str, remedy: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fakes.libraries(monkeypatch, tmp_path, pycuda=UNIMPORTABLE)
    fakes.cuda(monkeypatch, library)
    fakes.tegra(monkeypatch, False)
    error = refusal()
    assert what in error.what
    assert remedy in error.remedy


def test_a_gpu_that_was_hidden_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    fakes.cuda(monkeypatch, fakes.FakeCuda(100))
    assert "CUDA_VISIBLE_DEVICES is '-1'" in refusal().remedy


def test_a_driver_that_fails_when_asked_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(fakes.FakeCuda):
        def cuDeviceGetAttribute(self, value: object, attribute: int, device: object) -> int:
            return 201

    fakes.cuda(monkeypatch, Failing())
    assert "error 201" in refusal().what


@pytest.mark.parametrize(("jetson", "words"), [(True, "JetPack"), (False, "install NVIDIA's driver")])
def test_remedies_suit_the_machine(monkeypatch: pytest.MonkeyPatch, jetson: bool, words: str) -> None:
    fakes.cuda(monkeypatch, None)
    fakes.tegra(monkeypatch, jetson)
    assert words in refusal().remedy


@pytest.mark.parametrize(
    ("files", "jetson"),
    [
        ({"etc/nv_tegra_release": "# R36"}, True),
        ({"proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0"}, True),
        ({"proc/device-tree/model": "Raspberry Pi 5 Model B\0"}, False),
        ({}, False),
    ],
)
def test_a_jetson_is_known_by_its_files(tmp_path: Path, files: dict[str, str], jetson: bool) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert driver.on_jetson(tmp_path) is jetson
    assert "\0" not in driver.board(tmp_path)


# ----------------------------------------------------------------------------------------------------------- libraries

BROKEN = ["1 / 0", "raise SystemExit(3)", "raise BaseException('\\x1b]0;owned\\x07')", "import no_such_library_at_all",
          "raise ImportError('libnvinfer.so.10: cannot open shared object file')", "raise OSError(2, 'gone')",
          "def", "raise ImportError('numpy.core.multiarray failed to import')", "raise RecursionError"]  # fmt: skip


@pytest.mark.parametrize("source", BROKEN)
@pytest.mark.parametrize(("key", "name"), [("pycuda", "PyCUDA"), ("tensorrt", "TensorRT")])
def test_a_broken_library_may_raise_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, name: str, source: str
) -> None:
    fakes.cuda(monkeypatch, fakes.FakeCuda())
    fakes.libraries(monkeypatch, tmp_path, **{key: f"{source}\n"})
    error = refusal()
    assert error.what.startswith(name)
    assert ("numpy<2" in error.remedy) == ("numpy" in source)


@pytest.mark.parametrize("jetson", [True, False])
@pytest.mark.parametrize(("key", "name"), [("pycuda", "PyCUDA"), ("tensorrt", "TensorRT")])
def test_a_library_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, name: str, jetson: bool
) -> None:
    fakes.cuda(monkeypatch, fakes.FakeCuda())
    fakes.libraries(monkeypatch, tmp_path, **{key: None})
    fakes.tegra(monkeypatch, jetson)
    error = refusal()
    assert error.what.startswith(f"{name} is not installed")
    assert ("sudo apt install" if jetson else "trt-layering[tensorrt]") in error.remedy


def test_an_interrupt_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.cuda(monkeypatch, fakes.FakeCuda())
    fakes.libraries(monkeypatch, tmp_path, tensorrt="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        present.missing()


@pytest.mark.parametrize("text", ["8.6.1", "10.2.0.19", "10", "unknown", ""])
def test_a_tensorrt_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    fakes.machine(monkeypatch, tmp_path, version=text)
    error = refusal()
    assert "too old: 10.3 or newer" in error.what
    assert str(tmp_path) in error.where


def test_a_pycuda_that_is_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.cuda(monkeypatch, fakes.FakeCuda())
    fakes.libraries(monkeypatch, tmp_path, pycuda="class Device: ...\n")
    assert "too old" in refusal().what


@pytest.mark.parametrize(
    ("numpy", "tensorrt", "fits"),
    [
        ("1.26.4", "10.3.0", True), ("2.0.0", "10.3.0", False), ("2.4.1", "10.15.9", False),
        ("2.4.1", "10.16.0", True), ("2.4.1", "11.0.0", True), ("1.26.4", "11.4.0", True),
    ],
)  # fmt: skip
def test_numpy_2_needs_a_tensorrt_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, numpy: str, tensorrt: str, fits: bool
) -> None:
    monkeypatch.setattr(np, "__version__", numpy)
    fakes.machine(monkeypatch, tmp_path, version=tensorrt)
    if fits:
        assert present.missing() is None
        return
    error = refusal()
    assert f"numpy {numpy} does not suit TensorRT {tensorrt}" in error.what
    assert "numpy<2" in error.remedy
    monkeypatch.setenv(present.ANY_NUMPY, "1")
    present.forget()
    assert present.missing() is None


# ------------------------------------------------------------------------------------------------------------- what is


def test_a_machine_that_has_it_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.machine(monkeypatch, tmp_path, version="11.0.0.1")
    present.require()
    assert present.version() == "11.0.0.1"
    found = present.fingerprint()
    assert {key: found[key] for key in ("gpu", "sm", "memory")} == {
        "gpu": "Orin (nvgpu)", "sm": "8.7", "memory": "integrated",
    }  # fmt: skip
    assert present.here() == "TensorRT 11.0.0.1 on Orin (nvgpu), SM 8.7"


def test_a_discrete_gpu_and_its_power_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.machine(monkeypatch, tmp_path, name=b"NVIDIA H200", _18=0, _75=9, _76=0)
    first = present.fingerprint()
    assert (first["memory"], first["sm"]) == ("discrete", "9.0")
    fakes.cuda(monkeypatch, fakes.FakeCuda(name=b"NVIDIA H200", _18=0, _75=9, _76=0, _16=3))
    assert present.fingerprint() == first


def test_it_is_looked_at_once_by_however_many_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[int] = []

    class Counting(fakes.FakeCuda):
        def cuInit(self, flags: int) -> int:
            asked.append(flags)
            return 0

    fakes.libraries(monkeypatch, tmp_path)
    fakes.cuda(monkeypatch, Counting())
    found: list[str | None] = []
    threads = [threading.Thread(target=lambda: found.append(present.missing())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (asked, found) == ([0], [None] * 8)


def test_a_refusal_is_a_fresh_error_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.cuda(monkeypatch, None)
    assert refusal() is not refusal()


def test_a_forked_process_asks_anew_and_does_not_wait_for_a_lost_thread() -> None:
    script = """if True:
        import os, threading
        from trt_layering.backends.tensorrt import present
        present.missing()
        held, done = threading.Event(), threading.Event()
        def hold():
            with present._lock:
                held.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if os.fork() == 0:
            os._exit(0 if present._found is None and present.missing() is not None else 1)
        status = os.wait()[1]
        done.set()
        thread.join()
        raise SystemExit(status)
    """
    run = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(run, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


@pytest.mark.parametrize("text", ["10.3.0.26", "10.16.0", "11.0.0rc1", "", "x", "1..2", "10.3.", "9" * 5000, "1" * 12])
def test_versions_are_read_as_far_as_they_are_numbers(text: str) -> None:
    found = present.numbers(text)
    assert text.startswith(".".join(map(str, found)))


# -------------------------------------------------------------------------------------------------------------- choice


def test_auto_is_onnxruntime_without_tensorrt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.cuda(monkeypatch, None)
    with caplog.at_level(logging.INFO, "trt_layering"):
        assert backends.builder("auto").name == "onnxruntime"
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("backend auto: onnxruntime, since TensorRT cannot be used: no NVIDIA driver")


def test_auto_is_tensorrt_where_it_can_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fakes.machine(monkeypatch, tmp_path)
    with caplog.at_level(logging.INFO, "trt_layering"):
        assert backends._best() == "tensorrt"
    assert [record.getMessage() for record in caplog.records] == [
        "backend auto: tensorrt, since there is TensorRT 10.16.0 on Orin (nvgpu), SM 8.7"
    ]


def test_tensorrt_by_name_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.cuda(monkeypatch, None)
    chain = read_manifest(publish(tmp_path))
    for ask in (lambda: backends.builder("tensorrt"), lambda: backends.runtime(chain)):
        with pytest.raises(BackendError, match="no NVIDIA driver") as caught:
            ask()
        assert caught.value.remedy


def test_looking_is_without_heavy_imports() -> None:
    script = """if True:
        import sys
        import trt_layering.backends.tensorrt.present, trt_layering.backends.tensorrt.plan_file
        raise SystemExit(bool({"pycuda", "tensorrt", "onnx", "onnxruntime", "polygraphy"} & set(sys.modules)))
    """
    assert (
        subprocess.run([sys.executable, "-c", script], timeout=60, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
