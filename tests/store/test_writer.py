"""What the writer puts on the disk, in how much memory, and that it is published whole or not at all."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.samples import assert_whole, chain_of, fill, publish_tiny
from trt_layering.errors import BuildError, UsageError
from trt_layering.store import writer as writer_module
from trt_layering.store.manifest import PAGE, WEIGHTS_FILE, resolve
from trt_layering.store.writer import StoreWriter

DTYPES = ["float32", "int64", "uint8", "bool", "float16", "complex128"]


class Lazy:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.array


def transposed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array.T).T


def backwards(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.flip(np.ascontiguousarray(np.flip(array)))


def big_endian(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(array.dtype.newbyteorder(">"))


def in_pieces(array: np.ndarray[Any, Any]) -> Callable[[], Iterable[bytes | memoryview]]:
    data = array.tobytes()
    return lambda: (memoryview(data)[at : at + 37] for at in range(0, len(data), 37))


SOURCES = [lambda a: a, Lazy, transposed, backwards, big_endian, in_pieces, lambda a: lambda: [bytearray(a.tobytes())]]


@st.composite
def weights(draw: st.DrawFn) -> list[tuple[str, np.ndarray[Any, Any], Callable[[Any], Any]]]:
    count = draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    drawn = []
    for index in range(count):
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 17), max_size=3)))
        array = rng.integers(0, 2 if dtype.kind == "b" else 200, shape).astype(dtype)
        drawn.append((f"w{index}", array, draw(st.sampled_from(SOURCES))))
    return drawn


@settings(max_examples=50, deadline=None)
@given(groups=st.lists(weights(), max_size=3), piece=st.sampled_from([16, 100, 4096]))
def test_bytes_lie_where_the_extents_say(
    groups: list[Any], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch, StoreWriter(tmp_path_factory.mktemp("store"), "m") as writer:
        patch.setattr(writer_module, "PIECE", piece)
        patch.setattr(writer_module, "_UNSYNCED", 8192)
        for number, group in enumerate(groups):
            asked = ((name, a.dtype.name, a.shape, source(a)) for name, a, source in group)
            assert writer.add_extent(asked) == number
        chain = chain_of(writer.extents, (), outputs=())
        folder = writer.publish(chain)
    stored = (folder / WEIGHTS_FILE).read_bytes()
    assert_whole(folder)
    covered = bytearray(stored)
    for extent, group in zip(chain.extents, groups, strict=True):
        assert extent.offset % PAGE == extent.length % PAGE == 0
        for tensor, (name, array, _) in zip(extent.tensors, group, strict=True):
            start = extent.offset + tensor.offset
            assert tensor.name == name
            assert tensor.offset % 64 == 0
            assert tensor.shape == array.shape
            assert stored[start : start + tensor.nbytes] == array.tobytes()
            covered[start : start + tensor.nbytes] = bytes(tensor.nbytes)
    assert not any(covered), "padding is zeros"


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.FLOAT4E2M1])
@pytest.mark.parametrize("shape", [(3, 5), (4, 4), (0,), (1,)])
def test_elements_under_a_byte_are_packed_as_onnx_packs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: ir.DataType, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(writer_module, "PIECE", 4)
    numbers = np.random.default_rng(0).integers(0 if dtype is ir.DataType.UINT4 else -8, 8, shape)
    tensor = ir.Tensor(numbers.astype(dtype.numpy()), dtype=dtype)
    with StoreWriter(tmp_path, "m") as writer:
        writer.add_extent([("w", dtype.name.lower(), shape, tensor)])
        nbytes = writer.extents[0].tensors[0].nbytes
        assert (writer.folder / WEIGHTS_FILE).read_bytes()[:nbytes] == tensor.tobytes()


def test_small_numbers_in_wider_arrays_are_packed_too(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, "m") as writer:
        writer.add_extent([("w", "int4", (3,), np.array([-1, 2, -8], np.int8))])
        assert (writer.folder / WEIGHTS_FILE).read_bytes()[:2] == bytes([0x2F, 0x08])


def test_a_mapped_model_is_stored_in_bounded_memory(tmp_path: Path) -> None:
    size = 192 << 20
    with open(tmp_path / "model.bin", "wb") as file:
        file.truncate(size)
    shape = (size // 4 // 4096, 4096)
    kind = ir.DataType.FLOAT
    whole = ir.ExternalTensor("model.bin", 0, size, kind, shape=ir.Shape(shape), name="w", base_dir=tmp_path)
    columns = ir.Tensor(whole.numpy()[:, 1024:3072])
    half = ir.LazyTensor(lambda: columns, dtype=kind, shape=columns.shape)
    with StoreWriter(tmp_path, "m") as writer:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_rss()
        writer.add_extent([("w", "float32", shape, whole), ("half", "float32", (shape[0], 2048), half)])
        assert peak_rss() - before < 48 << 20
    assert writer.extents[0].length == size + size // 2


def peak_rss() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def cached(path: Path) -> bool:
    """Whether the first page of `path` is in the page cache, as mincore(2) has it: asking does not bring it in."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        pages = ctypes.create_string_buffer(1)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(1), pages) == 0
        del view
        return bool(pages.raw[0] & 1)


def test_what_was_written_leaves_the_page_cache(tmp_path: Path) -> None:
    control = tmp_path / "control"
    with open(control, "wb") as file:
        file.write(bytes(PAGE))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached(control):
        pytest.skip("this file system keeps its files in memory")
    assert not cached(publish_tiny(tmp_path) / WEIGHTS_FILE)


# ---------------------------------------------------------------------------------------------------------- bad sources


def test_what_a_source_raises_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    def broken() -> Iterable[bytes]:
        yield b"\xff" * 40
        raise ZeroDivisionError

    ones = np.ones(3, np.float32)
    with StoreWriter(tmp_path, "m") as writer:
        writer.add_extent([("a", "float32", (3,), ones)])
        with pytest.raises(ZeroDivisionError):
            writer.add_extent([("broken", "uint8", (PAGE * 2,), broken)])
        assert writer.add_extent([("b", "float32", (3,), ones)]) == 1
        with pytest.raises(ZeroDivisionError):
            writer.add_extent([("broken", "uint8", (PAGE * 2,), broken)])
        folder = writer.publish(chain_of(writer.extents, (), outputs=()))
    assert len(assert_whole(folder).extents) == 2


@pytest.mark.parametrize("given_bytes", [0, 11, 13, 4096])
def test_a_source_of_the_wrong_length_is_refused(tmp_path: Path, given_bytes: int) -> None:
    with StoreWriter(tmp_path, "m") as writer:
        with pytest.raises(BuildError, match=r"weight 'w' gave .* bytes; float32 of shape \(3,\) needs 12"):
            writer.add_extent([("w", "float32", (3,), lambda: [b"a" * given_bytes])])
        assert writer.extents == ()


def test_a_source_that_never_ends_is_left(tmp_path: Path) -> None:
    pieces = iter([b"abcd"] * 1000)
    with StoreWriter(tmp_path, "m") as writer, pytest.raises(BuildError, match="gave more bytes"):
        writer.add_extent([("w", "float32", (3,), lambda: pieces)])
    assert len(list(pieces)) == 996


@pytest.mark.parametrize("dtype", ["string", "object", "float31", ""])
def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path: Path, dtype: str) -> None:
    with StoreWriter(tmp_path, "m") as writer, pytest.raises(BuildError, match="cannot be stored"):
        writer.add_extent([("w", dtype, (1,), lambda: [b""])])


# ----------------------------------------------------------------------------------------------------------- publishing


def test_a_build_that_fails_or_ends_early_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with StoreWriter(tmp_path, "m") as writer:
            fill(writer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.listdir(tmp_path / "m") == []
    with StoreWriter(tmp_path, "m") as writer:
        fill(writer)
    assert os.listdir(tmp_path / "m") == []


def test_versions_count_up_and_never_over_what_is_there(tmp_path: Path) -> None:
    assert publish_tiny(tmp_path) == tmp_path / "tiny" / "1"
    (tmp_path / "tiny" / "7").mkdir()
    (tmp_path / "tiny" / "8").write_text("a file")
    assert publish_tiny(tmp_path) == tmp_path / "tiny" / "9"
    assert (tmp_path / "tiny" / "8").read_text() == "a file"


def test_a_version_appears_only_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def record_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append("name " + Path(target).name)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    with StoreWriter(tmp_path, "tiny") as writer:
        temporary = writer.folder.name
        folder = writer.publish(fill(writer))
    manifest, version = done.index("name chain.json"), done.index("name 1")
    assert {f"sync {name}" for name in os.listdir(folder) if name != "chain.json"} <= set(done[:manifest])
    assert done[manifest - 1] == "sync chain.json.draft"
    assert f"sync {temporary}" in done[manifest:version]
    assert "sync tiny" in done[version:]


def test_a_version_holds_what_its_chain_names_and_nothing_else(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, "m") as writer:
        chain = fill(writer)
        (writer.folder / "prepared.onnx").touch()
        (writer.folder / "scratch").mkdir()
        (writer.folder / "scratch" / "file").touch()
        folder = writer.publish(chain)
    assert_whole(folder)


def remove_engine(folder: Path) -> None:
    (folder / "block-001.onnx").unlink()


def change_engine(folder: Path) -> None:
    (folder / "block-001.onnx").write_bytes(b"other")


def link_engine(folder: Path) -> None:
    (folder / "block-001.onnx").rename(folder.parent / "elsewhere")
    os.link(folder.parent / "elsewhere", folder / "block-001.onnx")


@pytest.mark.parametrize("damage", [remove_engine, change_engine, link_engine])
def test_what_could_not_be_opened_is_not_published(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    with StoreWriter(tmp_path, "tiny") as writer:
        chain = fill(writer)
        damage(writer.folder)
        with pytest.raises(BuildError, match=r"block-001\.onnx"):
            writer.publish(chain)
    assert {path.name for path in (tmp_path / "tiny").iterdir()} <= {"elsewhere"}


def test_a_chain_of_other_extents_is_not_published(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, "tiny") as writer:
        fill(writer)
        with pytest.raises(BuildError, match="other extents"):
            writer.publish(chain_of((), (), outputs=()))
    assert os.listdir(tmp_path / "tiny") == []


def test_builds_that_end_together_get_a_version_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 6
    together = threading.Barrier(count)
    waited = threading.local()
    rename = os.rename

    def rename_together(source: Path, target: Path) -> None:
        if Path(target).name.isdigit() and not hasattr(waited, "once"):
            waited.once = True
            together.wait(10)
        rename(source, target)

    monkeypatch.setattr(writer_module.os, "rename", rename_together)
    threads = [threading.Thread(target=publish_tiny, args=(tmp_path, seed)) for seed in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chains = {assert_whole(tmp_path / "tiny" / str(version + 1)).blocks[0].digest for version in range(count)}
    assert len(chains) == count
    assert len(os.listdir(tmp_path / "tiny")) == count


# ------------------------------------------------------------------------------------------------------------ leftovers


def test_leftovers_of_dead_builds_go_and_living_builds_stay(tmp_path: Path) -> None:
    dead = tmp_path / "m" / ".build-1-00000000"  # process 1 lives, but it holds no lock
    (dead / "scratch").mkdir(parents=True)
    (dead / WEIGHTS_FILE).touch()
    with StoreWriter(tmp_path, "m") as first, StoreWriter(tmp_path, "m") as second:
        assert first.cleaned == [dead.name]
        assert second.cleaned == []
        assert first.folder != second.folder
        assert first.folder.is_dir()
    assert os.listdir(tmp_path / "m") == []


def test_links_and_files_that_look_like_leftovers_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / ".build-2-00000000").symlink_to(precious)
    (tmp_path / "m" / ".build-3-00000000").touch()
    with StoreWriter(tmp_path, "m") as writer:
        assert writer.cleaned == []
    assert (precious / "file").exists()


def test_without_locks_nothing_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "tiny" / ".build-1-00000000").mkdir(parents=True)
    assert_whole(publish_tiny(tmp_path))
    assert (tmp_path / "tiny" / ".build-1-00000000").is_dir()


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "..", "a/b", ".build-1-ab"])
def test_a_name_outside_the_repository_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        StoreWriter(tmp_path / "engines", name)
    assert os.listdir(tmp_path) == []


def test_engines_stay_in_the_folder(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, "m") as writer:
        assert writer.engine_file("block-000", ".plan") == writer.folder / "block-000.plan"
        with pytest.raises(UsageError):
            writer.engine_file("../block-000", ".plan")


def test_a_repository_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "engines").touch()
    with pytest.raises(BuildError, match="Not a directory") as caught, StoreWriter(tmp_path / "engines", "m"):
        pass
    assert str(tmp_path / "engines") in caught.value.where


def test_a_relative_repository_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert publish_tiny(Path("engines")) == Path("engines/tiny/1")
    assert resolve(Path("engines"), "tiny") == Path("engines/tiny/1")


def test_a_chain_may_live_on_another_drive(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "tiny").symlink_to(tmp_path / "drive")
    folder = publish_tiny(tmp_path / "engines")
    assert_whole(folder)
    assert resolve(tmp_path / "engines", "tiny") == folder
    assert os.listdir(tmp_path / "drive") == ["1"]
