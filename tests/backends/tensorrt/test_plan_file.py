"""Plans that do not fit are refused before TensorRT sees them: by what they were built, what is here, what to do."""

from __future__ import annotations

import base64
import gzip
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tensorrt import fakes
from tests.backends.tensorrt.stores import FINGERPRINT, VERSION, plan, publish
from trt_layering import backends
from trt_layering.backends.tensorrt import plan_file
from trt_layering.errors import CorruptError, ForeignError, ReadError, StoreError
from trt_layering.runtime.chain import open_chain
from trt_layering.store.manifest import WEIGHTS_FILE, Backend, read_manifest

BUILT = "built by TensorRT 10.3.0 on Orin (nvgpu), SM 8.7"
versions = st.tuples(*[st.integers(0, 255)] * 4)
tensorrt_versions = st.tuples(st.sampled_from([10, 11]), st.integers(0, 20), st.integers(0, 9), st.integers(0, 255))


@pytest.fixture(autouse=True)
def _orin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine that the stores were built on."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(np, "__version__", "1.26.4")
    fakes.machine(monkeypatch, tmp_path / "libraries", version="10.3.0")


# ------------------------------------------------------------------------------------------------------------- headers


@given(version=tensorrt_versions, seed=st.integers(0, 1000), size=st.integers(28, 1 << 17))
def test_the_header_of_a_plan(version: tuple[int, int, int, int], seed: int, size: int) -> None:
    header = plan_file.read(plan(size, version=version, seed=seed)[: plan_file.SAMPLE])
    assert header.version == version
    assert header.words == ".".join(map(str, version))
    assert header.is_of(header.words)
    assert header.is_of(header.words.rpartition(".")[0])
    assert not header.is_of("")
    assert not header.is_of(f"{version[0]}.{version[1] + 1}.0")


def test_a_build_number_beyond_a_byte_is_the_same_version() -> None:
    assert plan_file.Header((10, 3, 0, 300 & 255)).is_of("10.3.0.300")


@given(st.integers(0, 27))
def test_a_plan_that_ends_within_its_header(length: int) -> None:
    words = "it is empty" if length == 0 else f"it ends after {length} bytes, within its header"
    with pytest.raises(CorruptError, match=words):
        plan_file.read(plan()[:length])


def replaced(data: bytes) -> bytes:
    return data.decode("utf-8", "replace").encode()


MANGLED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "CRLF": (lambda data: data.replace(b"\n", b"\r\n"), "its line ends were converted"),
    "replacement": (replaced, "the bytes ef bf bd"),
    "latin-1": (lambda data: data.decode("latin-1").encode(), "every byte from 80 on became two"),
    "mark": (lambda data: b"\xef\xbb\xbf" + data, "byte order mark"),
    "UTF-16": (lambda data: data.decode("latin-1").encode("utf-16"), "UTF-16"),
    "UTF-16BE": (lambda data: data.decode("latin-1").encode("utf-16-be"), "UTF-16"),
    "base64": (base64.b64encode, "base64"),
    "base64 lines": (base64.encodebytes, "base64"),
    "hex": (lambda data: data.hex().encode(), "hexadecimal"),
    "gzip": (lambda data: gzip.compress(data, 1), "gzip"),
    "zip": (lambda data: b"PK\x03\x04" + data, "zip"),
    "zeros": (lambda data: bytes(len(data)), "nothing but zeros"),
    "empty": (lambda data: b"", "it is empty"),
    "LFS": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "Git LFS"),
    "annex": (lambda data: b"../.git/annex/objects/aa/bb/SHA256E-s1--2.plan\n", "git-annex"),
    "HTML": (lambda data: b"\n<!DOCTYPE html>\n<html><title>404 Not Found</title>", "HTML"),
    "XML": (lambda data: b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
    "JSON": (lambda data: b'{"message": "Not Found"}', "JSON"),
    "other": (lambda data: b"\x7fELF" + data, "it begins with 7f 45 4c 46"),
    "cut": (lambda data: data[:20], "it ends after 20 bytes"),
}


@pytest.mark.parametrize("how", MANGLED)
@given(version=tensorrt_versions, seed=st.integers(0, 20))
def test_a_plan_that_was_taken_for_text(how: str, version: tuple[int, int, int, int], seed: int) -> None:
    mangle, words = MANGLED[how]
    found = plan_file.damage(mangle(plan(1 << 15, version=version, seed=seed))[: plan_file.SAMPLE])
    assert found is not None
    assert words in found


@given(st.binary(max_size=200), st.booleans())
def test_whatever_there_is_it_is_a_plan_or_told_to_be_none(data: bytes, magic: bool) -> None:
    data = b"ftrt" + data if magic else data
    if plan_file.damage(data) is None:
        assert plan_file.read(data).version == tuple(data[24:28])
        return
    with pytest.raises(CorruptError) as caught:
        plan_file.read(data)
    assert str(caught.value).replace("\n", "").isprintable()
    assert caught.value.remedy


def test_files_are_read_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.plan").write_bytes(plan())
    assert plan_file.read(tmp_path / "a.plan").version == VERSION
    (tmp_path / "link.plan").symlink_to("a.plan")
    with pytest.raises(CorruptError, match="symbolic link"):
        plan_file.read(tmp_path / "link.plan")


# ------------------------------------------------------------------------------------------------------------- at open


def refused(folder: Path) -> StoreError:
    with pytest.raises(StoreError) as caught:
        backends.check(folder, read_manifest(folder))
    error = caught.value
    assert BUILT in error.what
    assert f"trt-layering build MODEL.onnx --name tiny --repository {folder.parents[1]}" in error.remedy
    assert str(error).replace("\n", "").isprintable()
    return error


@pytest.mark.parametrize("binding", ["inputs", "swap"])
def test_a_store_of_this_machine_passes(tmp_path: Path, binding: str) -> None:
    folder = publish(tmp_path, binding=binding)  # type: ignore[arg-type]
    backends.check(folder, read_manifest(folder))


@pytest.mark.parametrize("how", MANGLED)
def test_a_mangled_plan_is_refused_by_what_happened_to_it(tmp_path: Path, how: str) -> None:
    mangle, words = MANGLED[how]
    folder = publish(tmp_path)
    (folder / "block-000.plan").write_bytes(mangle(plan()))
    error = refused(folder)
    assert isinstance(error, CorruptError)
    assert words in error.what
    assert "this machine has TensorRT 10.3.0 on Orin (nvgpu), SM 8.7" in error.what
    assert error.where == str(folder / "block-000.plan")


@pytest.mark.parametrize("length", [29, 1000, plan_file.SAMPLE, (1 << 17) - 1])
def test_a_plan_cut_short_after_its_header(tmp_path: Path, length: int) -> None:
    folder = publish(tmp_path)
    (folder / "block-000.plan").write_bytes(plan()[:length])
    error = refused(folder)
    assert isinstance(error, CorruptError)
    assert "was changed" in error.what


def test_a_plan_of_another_tensorrt_among_the_chains(tmp_path: Path) -> None:
    folder = publish(tmp_path)
    (folder / "block-000.plan").write_bytes(plan(version=(8, 6, 1, 6)))
    error = refused(folder)
    assert "block-000.plan holds a plan of TensorRT 8.6.1.6" in error.what


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("how", ["CRLF", "replacement", "zeros", "other"])
def test_a_mangled_plan_within_the_weights(tmp_path: Path, how: str, block: int) -> None:
    mangle, words = MANGLED[how]
    folder = publish(tmp_path, binding="swap")
    offset = read_manifest(folder).extents[block].offset
    data = bytearray((folder / WEIGHTS_FILE).read_bytes())
    data[offset : offset + (1 << 17)] = mangle(plan(seed=block))[: 1 << 17]
    (folder / WEIGHTS_FILE).write_bytes(data)
    error = refused(folder)
    assert words in error.what
    assert error.where == f"{folder / WEIGHTS_FILE}, the plan of block 'block-00{block}'"


@pytest.mark.parametrize("missing", [1, 1 << 16, 1 << 17, 200_000, (2 << 17) - 10, 2 << 17])
def test_weights_with_plans_that_are_cut_short(tmp_path: Path, missing: int) -> None:
    folder = publish(tmp_path, binding="swap")
    data = (folder / WEIGHTS_FILE).read_bytes()
    (folder / WEIGHTS_FILE).write_bytes(data[: len(data) - missing])
    assert isinstance(refused(folder), CorruptError)


@pytest.mark.parametrize(
    ("version", "gpu", "words"),
    [
        ("10.7.0", {}, ["another TensorRT:", "this machine has TensorRT 10.7.0"]),
        ("11.0.0.1", {}, ["another TensorRT:", "this machine has TensorRT 11.0.0.1"]),
        ("10.3.0", {"_76": 6}, ["another SM:", "SM 8.6"]),
        ("10.3.0", {"name": b"NVIDIA Thor"}, ["another GPU:", "on NVIDIA Thor"]),
        ("10.3.0", {"_18": 0}, ["another kind of GPU memory:"]),
        ("10.7.0", {"name": b"RTX \x1b[31m"}, ["another TensorRT and another GPU:", "RTX \\x1b[31m"]),
    ],
)
def test_another_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, gpu: dict[str, int], words: list[str]
) -> None:
    folder = publish(tmp_path)
    fakes.machine(monkeypatch, tmp_path / "other", version=version, **gpu)
    error = refused(folder)
    assert isinstance(error, ForeignError)
    assert all(part in error.what for part in words)


def test_no_tensorrt_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = publish(tmp_path)
    fakes.cuda(monkeypatch, None)
    error = refused(folder)
    assert isinstance(error, ForeignError)
    assert "no NVIDIA driver" in error.what
    with pytest.raises(ForeignError, match="no NVIDIA driver"):
        open_chain("tiny", repository=tmp_path)


def test_a_build_without_some_of_the_fingerprint_is_not_taken_for_one_with_it(tmp_path: Path) -> None:
    fewer = {key: value for key, value in FINGERPRINT.items() if key != "memory"}
    for told, words in ((fewer, "another kind of GPU memory"), ({**FINGERPRINT, "more": "1"}, "another machine")):
        folder = publish(tmp_path, backend=Backend(name="tensorrt", version="10.3.0", fingerprint=told))
        assert words in refused(folder).what


def test_what_is_told_of_a_plan_that_tensorrt_does_not_take() -> None:
    told = plan_file.described(plan())
    assert told == "it was built by TensorRT 10.3.0.26; this machine has TensorRT 10.3.0 on Orin (nvgpu), SM 8.7"
    assert plan_file.described(bytes(100)) == "it is nothing but zeros, as a drive leaves that lost its power"


def test_a_drive_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    folder = publish(tmp_path)
    monkeypatch.setattr(plan_file.os, "pread", fail)
    with pytest.raises(ReadError, match="Input/output error"):
        backends.check(folder, read_manifest(folder))
