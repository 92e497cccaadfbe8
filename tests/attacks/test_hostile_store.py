"""Stores made to do harm, or harmed: each is refused with one of our errors before anything of it is used.

A digest that is right says that a manifest is as someone wrote it, not that the someone meant well. So the forged ones
here carry the digest that fits them.
"""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.samples import forge, publish_tiny, write_raw
from trt_layering.errors import CorruptError, ForeignError, NotBuiltError, ReadError
from trt_layering.store.manifest import (
    MANIFEST_FILE,
    MANIFEST_LIMIT,
    WEIGHTS_FILE,
    read_manifest,
    resolve,
)
from trt_layering.store.reader import WeightFile, check_store, verify_extent

ENGINE = "block-000.onnx"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return publish_tiny(tmp_path)


def open_store(folder: Path) -> None:
    """Everything that opening a chain checks, and the first read of every extent."""
    chain = read_manifest(folder)
    check_store(folder, chain)
    file = WeightFile(folder / WEIGHTS_FILE, direct="never")
    try:
        for index, extent in enumerate(chain.extents):
            file.read_into(data := memoryview(bytearray(extent.length)), extent.offset)
            verify_extent(extent, index, [data], path=folder / WEIGHTS_FILE)
    finally:
        file.close()


def test_the_store_that_the_attacks_start_from_opens(folder: Path) -> None:
    open_store(folder)
    forge(folder, lambda chain: chain.update(precision="fp16"))
    open_store(folder)


# -------------------------------------------------------------------------------------------------------------- damage


def test_every_flipped_bit_of_the_manifest_is_found(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    whole = path.read_bytes()
    descriptor = os.open(path, os.O_WRONLY)
    for position in range(len(whole)):
        for bit in range(8):
            os.pwrite(descriptor, bytes([whole[position] ^ 1 << bit]), position)
            with pytest.raises(CorruptError):
                read_manifest(folder)
        os.pwrite(descriptor, whole[position : position + 1], position)
    os.close(descriptor)
    open_store(folder)


def test_a_manifest_of_any_other_length_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_FILE
    whole = path.read_bytes()
    for length in reversed(range(len(whole))):
        os.truncate(path, length)
        with pytest.raises(CorruptError):
            read_manifest(folder)
    longer = (whole + extra for extra in (b"\n", b" ", b"\0", b"}", b"{}", whole))
    padded = (whole.replace(b'","chain"', b'", "chain"'), whole.replace(b'{"digest"', b'{"digest":"","digest"'))
    for changed in (*longer, *padded):
        path.write_bytes(changed)
        with pytest.raises(CorruptError):
            read_manifest(folder)


def test_every_flipped_byte_of_the_weights_is_found(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    whole = path.read_bytes()
    chain = read_manifest(folder)
    for position in range(0, len(whole), 61):
        index = next(i for i, e in enumerate(chain.extents) if e.offset <= position < e.offset + e.length)
        extent = chain.extents[index]
        data = bytearray(whole[extent.offset : extent.offset + extent.length])
        data[position - extent.offset] ^= 1 << position % 8
        with pytest.raises(CorruptError, match=f"extent {index} of"):
            verify_extent(extent, index, [memoryview(data)])


@pytest.mark.parametrize("change", [-1, 1, -4096, 4096, -(10**9)])
def test_weights_of_another_length_are_refused(folder: Path, change: int) -> None:
    path = folder / WEIGHTS_FILE
    os.truncate(path, max(0, path.stat().st_size + change))
    with pytest.raises(CorruptError, match=r"weights\.bin has \d+ bytes instead of \d+") as caught:
        open_store(folder)
    assert caught.value.where == str(path)
    assert "trt-layering build" in caught.value.remedy


def test_weights_swapped_between_extents_are_found(folder: Path) -> None:
    path = folder / WEIGHTS_FILE
    chain = read_manifest(folder)
    data = path.read_bytes()
    second, third = (data[e.offset : e.offset + e.length] for e in chain.extents[1:])
    assert len(second) == len(third)
    path.write_bytes(data[: chain.extents[1].offset] + third + second)
    with pytest.raises(CorruptError, match=r"extent 1 of .* checksum"):
        open_store(folder)


@pytest.mark.parametrize("name", [ENGINE, "block-001.onnx", "whole-000.onnx"])
def test_a_changed_engine_is_found(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[0] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CorruptError, match=rf"{name} was changed"):
        open_store(folder)


# --------------------------------------------------------------------------------------------------------------- files


def missing(path: Path) -> None:
    path.unlink()


def symbolic_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def link_inside(path: Path) -> None:
    path.rename(path.parent / "other")
    path.symlink_to("other")


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "elsewhere")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


ATTACKS = [missing, symbolic_link, link_inside, dangling_link, hard_link, directory, fifo, device]


@pytest.mark.parametrize("name", [WEIGHTS_FILE, ENGINE, MANIFEST_FILE])
@pytest.mark.parametrize("attack", ATTACKS)
def test_files_that_are_no_files_by_themselves(folder: Path, attack: Callable[[Path], None], name: str) -> None:
    attack(folder / name)
    if not os.path.lexists(folder / MANIFEST_FILE):
        with pytest.raises(NotBuiltError, match="an unfinished build"):
            open_store(folder)
        return
    with pytest.raises(CorruptError, match=name.replace(".", r"\.")) as caught:
        open_store(folder)
    assert caught.value.where == str(folder / name)


@pytest.mark.parametrize("attack", ATTACKS)
def test_weights_are_not_opened_through_links_even_unchecked(folder: Path, attack: Callable[[Path], None]) -> None:
    attack(folder / WEIGHTS_FILE)
    with pytest.raises(CorruptError):
        WeightFile(folder / WEIGHTS_FILE)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_file_that_cannot_be_opened_now_is_no_corruption(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise OSError(number, os.strerror(number), str(path))

    chain = read_manifest(folder)
    monkeypatch.setattr(os, "open", refuse)
    for use in (read_manifest, lambda folder: check_store(folder, chain)):
        with pytest.raises(ReadError, match=os.strerror(number)):
            use(folder)


# ----------------------------------------------------------------------------------------------------- forged manifests

Edit = Callable[[dict[str, Any]], object]


def setter(*path: str | int, to: Any) -> Edit:
    def edit(chain: Any) -> None:
        for step in path[:-1]:
            chain = chain[step]
        chain[path[-1]] = to

    return edit


def repeat(*path: str | int) -> Edit:
    def edit(chain: Any) -> None:
        for step in path:
            chain = chain[step]
        chain.append(copy.deepcopy(chain[-1]))

    return edit


FORGERIES: dict[str, tuple[Edit, str]] = {
    "a file above the folder": (setter("blocks", 0, "file", to="../x.onnx"), r"blocks\[\d\]\.file"),
    "a file by its whole path": (setter("blocks", 0, "file", to="/etc/passwd"), r"blocks\[\d\]\.file"),
    "the folder itself": (setter("blocks", 0, "file", to=".."), r"blocks\[\d\]\.file"),
    "a file in a folder": (setter("blocks", 0, "file", to="a/b"), r"blocks\[\d\]\.file"),
    "a hidden file": (setter("blocks", 0, "file", to=".ssh"), r"blocks\[\d\]\.file"),
    "a file with a NUL": (setter("blocks", 0, "file", to="a\0b"), r"blocks\[\d\]\.file"),
    "a file with a newline": (setter("blocks", 0, "file", to="block-000.onnx\n"), r"blocks\[\d\]\.file"),
    "no file": (setter("blocks", 0, "file", to=""), r"blocks\[\d\]\.file"),
    "the weights as an engine": (setter("blocks", 0, "file", to=WEIGHTS_FILE), "as its engine"),
    "the manifest as an engine": (setter("blocks", 0, "file", to=MANIFEST_FILE), "as its engine"),
    "one engine, two digests": (setter("blocks", 1, "file", to=ENGINE), "as its engine"),
    "a digest that is none": (setter("blocks", 0, "digest", to="0" * 31), r"blocks\[\d\]\.digest"),
    "a block twice": (setter("blocks", 1, "name", to="block-000"), "two blocks are called"),
    "a block out of a folder": (setter("blocks", 1, "name", to="../b"), r"blocks\[\d\]\.name"),
    "a chain out of the repository": (setter("name", to="../m"), r"\$\.name"),
    "an extent beyond the last": (setter("blocks", 0, "extents", to=[3]), "an extent that is not there"),
    "an extent before the first": (setter("blocks", 0, "extents", to=[-1]), r"blocks\[\d\]\.extents"),
    "an extent twice": (setter("blocks", 0, "extents", to=[1, 1]), "an extent twice"),
    "an extent by a huge index": (setter("blocks", 0, "extents", to=[10**30]), r"blocks\[\d\]\.extents"),
    "offset off a page": (setter("extents", 1, "offset", to=8191), r"extents\[\d\]\.offset"),
    "offset below zero": (setter("extents", 0, "offset", to=-4096), r"extents\[\d\]\.offset"),
    "offset as text": (setter("extents", 0, "offset", to="0"), r"extents\[\d\]\.offset"),
    "offset as a fraction": (setter("extents", 0, "offset", to=0.5), r"extents\[\d\]\.offset"),
    "extents over each other": (setter("extents", 2, "offset", to=8192), "extent 2 has"),
    "extents in another order": (lambda chain: chain["extents"].reverse(), "extent 0 has"),
    "an extent of no length": (setter("extents", 0, "length", to=0), "extent 0 has"),
    "an extent off a page": (setter("extents", 0, "length", to=8193), r"extents\[\d\]\.length"),
    "an extent beyond all files": (setter("extents", 2, "length", to=2**63 - 4096), r"extents\[\d\]\.length"),
    "a checksum that is none": (setter("extents", 0, "checksum", to="zz"), r"extents\[\d\]\.checksum"),
    "a tensor out of its extent": (setter("extents", 2, "tensors", 1, "offset", to=4096), "outside its extent"),
    "a tensor over another": (setter("extents", 0, "tensors", 1, "offset", to=64), "over another tensor"),
    "a tensor off its alignment": (setter("extents", 0, "tensors", 0, "offset", to=4), r"tensors\[\d\]\.offset"),
    "a tensor larger than said": (setter("extents", 0, "tensors", 0, "shape", to=[3300, 40]), "is not 'float32'"),
    "a tensor of another type": (setter("extents", 0, "tensors", 0, "dtype", to="float64"), "is not 'float64'"),
    "a tensor of objects": (setter("extents", 0, "tensors", 0, "dtype", to="object"), "is not 'object'"),
    "a tensor of strings": (setter("extents", 1, "tensors", 1, "dtype", to="string"), "is not 'string'"),
    "a dim below zero": (setter("extents", 0, "tensors", 0, "shape", to=[-33, -40]), r"tensors\[\d\]\.shape"),
    "a tensor of many dims": (setter("extents", 0, "tensors", 0, "shape", to=[1] * 65), r"tensors\[\d\]\.shape"),
    "two weights of one name": (setter("extents", 1, "tensors", 0, "name", to="a/b"), "two weights of one name"),
    "bytes below zero": (setter("extents", 0, "tensors", 0, "nbytes", to=-1), r"tensors\[\d\]\.nbytes"),
    "an input nobody makes": (setter("blocks", 1, "inputs", 0, "name", to="z"), "which no earlier block makes"),
    "an input made later": (lambda chain: chain["blocks"].reverse(), "which no earlier block makes"),
    "an activation made twice": (setter("blocks", 1, "outputs", 0, "name", to="h:0/out"), "which is there already"),
    "an output over an input": (setter("blocks", 1, "outputs", 0, "name", to="x"), "which is there already"),
    "an output nobody makes": (setter("outputs", 0, "name", to="z"), "no block makes the output"),
    "two inputs of one name": (repeat("inputs"), "two inputs have one name"),
    "an input of objects": (setter("inputs", 0, "dtype", to="O"), "unknown dtype 'O'"),
    "an activation of objects": (setter("blocks", 0, "outputs", 0, "dtype", to="O"), "unknown dtype 'O'"),
    "an activation dim below zero": (setter("inputs", 0, "shape", to=[-1]), r"inputs\[\d\]\.shape"),
    "an activation dim that is true": (setter("inputs", 0, "shape", to=[True]), r"inputs\[\d\]\.shape"),
    "memory below zero": (setter("memory", "activations", to=-1), r"memory\.activations"),
    "times of other blocks": (setter("profile", "execute_seconds", to=[1.0]), "1 times for 2 blocks"),
    "a check below zero": (setter("check", "max_abs_diff", to=-1.0), r"check\.max_abs_diff"),
    "no number as a check": (setter("check", "max_abs_diff", to=None), r"check\.max_abs_diff"),
    "the uncut chain out of the folder": (setter("whole", 0, "file", to="../x"), r"whole\[\d\]\.file"),
    "the uncut chain under a block's name": (setter("whole", 0, "name", to="block-000"), "two blocks are called"),
    "the uncut chain without its extents": (setter("whole", 0, "extents", to=[0, 9]), "an extent that is not there"),
    "the uncut chain without its input": (setter("whole", 0, "inputs", 0, "name", to="h:0/out"), "no earlier block"),
    "the uncut chain without its output": (setter("whole", 0, "outputs", 0, "name", to="z"), "no block makes the"),
    "the uncut chain of objects": (setter("whole", 0, "inputs", 0, "dtype", to="O"), "unknown dtype 'O'"),
    "an unknown field": (setter("blocks", 0, "command", to="rm"), "unknown field"),
    "a missing field": (lambda chain: chain.pop("extents"), "missing required field"),
    "no format": (lambda chain: chain.pop("format"), "missing required field"),
    "a format that is text": (setter("format", to="1"), r"\$\.format"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_manifest_that_makes_no_sense(folder: Path, what: str) -> None:
    edit, told = FORGERIES[what]
    forge(folder, edit)
    with pytest.raises(CorruptError, match=told) as caught:
        read_manifest(folder)
    assert caught.value.where == str(folder / MANIFEST_FILE)
    assert "trt-layering build" in caught.value.remedy


@pytest.mark.parametrize(
    "chain",
    [
        b"",
        b"null",
        b"[]",
        b"1" * 5000,
        b'"\xff"',
        b"[" * 200_000,
        b'{"format":' + b"[" * 200_000,
        b'{"format":1,"name":' + b'{"a":' * 200_000,
        b'{"format":1e999}',
        b'{"format":NaN}',
        b'{"format":"\\ud800"}',
    ],
    ids=lambda chain: repr(chain[:24]),
)
def test_a_manifest_that_is_no_chain(folder: Path, chain: bytes) -> None:
    write_raw(folder, chain)
    with pytest.raises(CorruptError):
        read_manifest(folder)


def test_a_manifest_too_large_to_be_one(folder: Path) -> None:
    os.truncate(folder / MANIFEST_FILE, MANIFEST_LIMIT * 1000)
    with pytest.raises(CorruptError, match="larger than"):
        read_manifest(folder)


def test_what_is_told_of_a_hostile_store_cannot_drive_a_terminal(folder: Path) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e"
    edits = [
        setter("extents", 0, "tensors", 0, "name", to=evil),
        setter("blocks", 0, "inputs", 0, "name", to=evil),
        setter("blocks", 0, evil, to=1),
    ]
    for edit in edits[1:]:
        publish = publish_tiny(folder.parents[1])
        forge(publish, edit)
        with pytest.raises(CorruptError) as caught:
            read_manifest(publish)
        assert str(caught.value).replace("\n", "").isprintable()
    forge(folder, edits[0])
    with pytest.raises(CorruptError) as caught:
        verify_extent(read_manifest(folder).extents[0], 0, [memoryview(b"")])
    assert str(caught.value).replace("\n", "").isprintable()


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1, 64, 4096, 2**31, 2**62, 2**63, 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "..", "/etc/passwd", "a/b", WEIGHTS_FILE, ENGINE, "float32", "string", "object", "x", "y"]),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = publish_tiny(tmp_path_factory.mktemp("fuzzed"))
    return folder, json.loads((folder / MANIFEST_FILE).read_bytes())["chain"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_forgery_gets_anything_but_our_errors(fuzzed: tuple[Path, dict[str, Any]], data: st.DataObject) -> None:
    """Any part of the manifest replaced by anything, the digest right: refused as ours, or harmless."""
    folder, original = fuzzed
    chain = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        replace_somewhere(chain, data)
    write_raw(folder, json.dumps(chain, separators=(",", ":")).encode())
    error = refusal(folder)
    assert error is None or (error.what and error.where and error.remedy)


def refusal(folder: Path) -> CorruptError | ForeignError | None:
    try:
        open_store(folder)
    except (CorruptError, ForeignError) as error:
        return error
    return None


def replace_somewhere(node: Any, data: st.DataObject) -> None:
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not (isinstance(node[key], dict | list) and node[key]) or data.draw(st.integers(0, 3)) == 0:
            node[key] = data.draw(values)
            return
        node = node[key]


# ---------------------------------------------------------------------------------------------------------- repository


def test_a_version_that_is_a_link_is_not_a_version(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "2").symlink_to(folder)
    assert resolve(tmp_path, "tiny") == folder


def test_a_damaged_version_leaves_the_earlier_one_in_reach(folder: Path, tmp_path: Path) -> None:
    newer = publish_tiny(tmp_path, seed=1)
    (newer / MANIFEST_FILE).write_bytes(b"")
    with pytest.raises(CorruptError):
        open_store(resolve(tmp_path, "tiny"))
    open_store(resolve(tmp_path, "tiny", 1))
    assert resolve(tmp_path, "tiny", 1) == folder
