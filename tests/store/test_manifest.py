"""The manifest goes to disk and back unchanged, and the repository finds finished versions only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.samples import H, X, chain_of, forge, publish_tiny
from trt_layering.errors import BuildError, CorruptError, ForeignError, NotBuiltError, ReadError, UsageError
from trt_layering.store import manifest
from trt_layering.store.manifest import (
    DTYPE_BITS,
    MANIFEST_FILE,
    PAGE,
    Backend,
    Block,
    Chain,
    Extent,
    Halved,
    KeptNode,
    Narrowed,
    Range,
    Tensor,
    TensorRt,
    Value,
    file_digest,
    finished_chains,
    finished_versions,
    plain_digest,
    read_manifest,
    resolve,
    tensor_nbytes,
    write_manifest,
)

names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def extents(draw: st.DrawFn) -> tuple[Extent, ...]:
    laid: list[Extent] = []
    offset = 0
    for tensor_names in draw(st.lists(st.lists(names, max_size=4, unique=True), max_size=4)):
        tensors: list[Tensor] = []
        end = 0
        for name in tensor_names:
            dtype, shape = draw(st.sampled_from(sorted(DTYPE_BITS))), draw(shapes)
            nbytes = tensor_nbytes(dtype, shape)
            assert nbytes is not None
            tensors.append(Tensor(name=name, dtype=dtype, shape=shape, offset=end, nbytes=nbytes))
            end = -(-(end + nbytes) // 64) * 64
        length = max(PAGE, -(-end // PAGE) * PAGE)
        checksum = f"{draw(st.integers(0, 2**64 - 1)):016x}"
        laid.append(Extent(offset=offset, length=length, checksum=checksum, tensors=tuple(tensors)))
        offset += length
    return tuple(laid)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    laid = draw(extents())
    activations = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    values = [X] + [msgspec.structs.replace(H, name="@" + name) for name in activations]
    blocks = tuple(
        Block(
            name=f"b{index}",
            file=f"b{index}.onnx",
            digest=f"{index:032x}",
            extents=(draw(st.integers(0, len(laid) - 1)),) if laid else (),
            inputs=(values[index],),
            outputs=(values[index + 1],),
        )
        for index in range(len(activations))
    )
    return chain_of(laid, blocks, source=draw(names), outputs=(values[-1],), inputs=(X,))


@settings(max_examples=60, deadline=None)
@given(chain=chains())
def test_what_is_written_is_read(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chain")
    write_manifest(folder, chain)
    assert read_manifest(folder) == chain
    assert os.listdir(folder) == [MANIFEST_FILE]


def test_a_chain_that_would_be_refused_is_not_written(tmp_path: Path) -> None:
    tensor = Tensor(name="w", dtype="float32", shape=(2,), offset=0, nbytes=9)
    wrong = chain_of((Extent(offset=0, length=PAGE, checksum="0" * 16, tensors=(tensor,)),), (), outputs=())
    with pytest.raises(BuildError, match="9 bytes, which is not 'float32' of shape"):
        write_manifest(tmp_path, wrong)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rows": "j"},
        {"indices": "float32"},
        {"result": "float16"},
        {"dtype": "float8e5m2", "result": "float8e5m2"},
        {"dtype": "int4", "result": "int4"},
        {"shape": ()},
        {"shape": (0, 4)},
    ],
)
def test_a_block_with_rows_gathers_from_one_table(tmp_path: Path, change: dict[str, Any]) -> None:
    asked = {"rows": "i", "indices": "int64", "dtype": "float32", "result": "float32", "shape": (9, 4)} | change
    size = tensor_nbytes(asked["dtype"], asked["shape"]) or 0
    table = Tensor(name="t", dtype=asked["dtype"], shape=asked["shape"], offset=0, nbytes=size)
    given, made = (
        Value(name=name, dtype=dtype, shape=None) for name, dtype in (("i", asked["indices"]), ("y", asked["result"]))
    )
    block = Block(
        name="b", file="b.onnx", digest="0" * 32, extents=(0,), inputs=(given,), outputs=(made,), rows=asked["rows"]
    )
    extent = Extent(offset=0, length=PAGE, checksum="0" * 16, tensors=(table,))
    chain = chain_of((extent,), (block,), inputs=(given,), outputs=(made,))
    if not change:
        write_manifest(tmp_path, chain)
        assert read_manifest(tmp_path).block_bytes(0) == 0
        assert chain.loaded_bytes == PAGE
        return
    with pytest.raises(BuildError, match="cannot gather rows"):
        write_manifest(tmp_path, chain)


@pytest.mark.parametrize("field", ["narrowed", "halved"])
def test_what_16_bits_cost_is_told_of_blocks_that_are_there(tmp_path: Path, field: str) -> None:
    halved = Halved(
        block="b", max_rel_diff=1e-3, halved=1, kept=(KeptNode(name="n", op_type="Exp", reason="compared"),)
    )
    told = {"narrowed": Narrowed(block="b", max_rel_diff=1e-3, kept=("w",)), "halved": halved}[field]
    block = Block(name="b", file="b.onnx", digest="0" * 32, extents=(), inputs=(X,), outputs=(H,))
    chain = chain_of((), (block,), inputs=(X,), outputs=(H,), **{field: (told,)})
    write_manifest(tmp_path, chain)
    assert read_manifest(tmp_path) == chain
    stranger = msgspec.structs.replace(chain, **{field: (msgspec.structs.replace(told, block="c"),)})
    with pytest.raises(BuildError, match="'c', which is no block"):
        write_manifest(tmp_path, stranger)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"backend": "onnxruntime"}, "not both"),
        ({"tensorrt": None}, "not both"),
        ({"weights": ("other",)}, "has no weight 'other'"),
        ({"binding": "swap", "weights": ()}, "has no plan of its own"),
        ({"binding": "swap", "weights": (), "tensor": "plan-000"}, None),
    ],
)
def test_a_tensorrt_chain_has_what_its_engines_ask_for(
    tmp_path: Path, change: dict[str, Any], words: str | None
) -> None:
    asked = {"backend": "tensorrt", "weights": ("w",), "binding": "inputs", "tensor": "w"} | change
    tensor = Tensor(name=asked["tensor"], dtype="uint8", shape=(8,), offset=0, nbytes=8)
    extent = Extent(offset=0, length=PAGE, checksum="0" * 16, tensors=(tensor,))
    block = Block(
        name="b", file="b.plan", digest="0" * 32, extents=(0,), inputs=(X,), outputs=(H,), weights=asked["weights"]
    )
    span = Range(min=(1, 1, 1), opt=(1, 2, 1), max=(1, 3, 1))
    how = TensorRt(binding=asked["binding"], placement="staged", ranges={X.name: span, H.name: span})
    how = asked.get("tensorrt", how)
    backend = Backend(name=asked["backend"], version="10.3", fingerprint={})
    chain = chain_of((extent,), (block,), inputs=(X,), outputs=(H,), backend=backend, tensorrt=how)
    if words is None:
        write_manifest(tmp_path, chain)
        assert read_manifest(tmp_path) == chain
        return
    with pytest.raises(BuildError, match=words):
        write_manifest(tmp_path, chain)


def test_a_failed_write_keeps_the_manifest_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chain_of((), (), outputs=())
    write_manifest(tmp_path, before)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path, chain_of((), (), outputs=(), precision="fp16"))
    assert read_manifest(tmp_path) == before


@pytest.mark.parametrize("extra", [{}, {"format": 4, "new_field": [1], "extents": "elsewhere"}])
def test_another_format_is_foreign_whatever_else_it_holds(tmp_path: Path, extra: dict[str, object]) -> None:
    folder = publish_tiny(tmp_path)
    forge(folder, lambda chain: chain.update({"format": 7} | extra))
    with pytest.raises(ForeignError, match=f"format {extra.get('format', 7)}") as caught:
        read_manifest(folder)
    assert "trt-layering build MODEL.onnx --name tiny --repository" in caught.value.remedy


def test_a_changed_format_number_is_corrupt_not_foreign(tmp_path: Path) -> None:
    folder = publish_tiny(tmp_path)
    path = folder / MANIFEST_FILE
    path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":4'))
    with pytest.raises(CorruptError):
        read_manifest(folder)


def test_folders_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(NotBuiltError, match="an unfinished build"):
        read_manifest(tmp_path)
    with pytest.raises(NotBuiltError, match="no such folder"):
        read_manifest(tmp_path / "none")


def test_the_remedy_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    repository = tmp_path / "two words; rm"
    with pytest.raises(NotBuiltError) as caught:
        resolve(repository, "m")
    assert f"--name m --repository '{repository}'" in caught.value.remedy


def test_a_model_may_be_a_link_and_a_version_s_file_may_not(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a" * 3_000_000)
    digest = xxhash.xxh3_128_hexdigest(b"a" * 3_000_000)
    assert plain_digest(model) == digest
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    assert file_digest(link) == digest
    with pytest.raises(CorruptError, match=r"link\.onnx is a symbolic link"):
        plain_digest(link)
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        file_digest(tmp_path / "none.onnx")


def test_packed_sizes() -> None:
    assert tensor_nbytes("int4", (3,)) == 2
    assert tensor_nbytes("int2", (5,)) == 2
    assert tensor_nbytes("uint4", (2, 0)) == 0
    assert tensor_nbytes("float64", ()) == 8
    assert tensor_nbytes("string", (1,)) is None


# ---------------------------------------------------------------------------------------------------- the repository


def make_versions(repository: Path, *versions: str) -> None:
    for version in versions:
        folder = repository / "m" / version
        folder.mkdir(parents=True)
        (folder / MANIFEST_FILE).touch()


def test_the_newest_finished_version_is_served(tmp_path: Path) -> None:
    make_versions(tmp_path, "9", "10", "2", ".build-1-ab", "latest", "007", "-3", "1e9", "11.bak")
    (tmp_path / "m" / "12").mkdir()
    (tmp_path / "m" / "13").touch()
    (tmp_path / "m" / "14").symlink_to(tmp_path / "m" / "9")
    assert finished_versions(tmp_path, "m") == [2, 9, 10]
    assert resolve(tmp_path, "m") == tmp_path / "m" / "10"
    assert resolve(tmp_path, "m", 2) == tmp_path / "m" / "2"


@pytest.mark.parametrize("version", [0, -3, 7, 12, 13, 14])
def test_an_unfinished_version_is_not_served(tmp_path: Path, version: int) -> None:
    make_versions(tmp_path, "9", "-3")
    (tmp_path / "m" / "12").mkdir()
    (tmp_path / "m" / "13").touch()
    (tmp_path / "m" / "14").symlink_to(tmp_path / "m" / "9")
    with pytest.raises(NotBuiltError, match=f"no version {version}; finished are 9"):
        resolve(tmp_path, "m", version)


def test_what_is_there_is_told(tmp_path: Path) -> None:
    make_versions(tmp_path, "1")
    (tmp_path / "unfinished" / "1").mkdir(parents=True)
    (tmp_path / "README.md").touch()
    assert finished_chains(tmp_path) == ["m"]
    with pytest.raises(NotBuiltError, match=r"chains there: m\n") as caught:
        resolve(tmp_path, "unfinished")
    assert "trt-layering build MODEL.onnx --name unfinished" in caught.value.remedy
    with pytest.raises(NotBuiltError, match="chains there: none"):
        resolve(tmp_path / "nowhere", "m")
    with pytest.raises(NotBuiltError, match="chains there: none"):
        resolve(tmp_path / "README.md", "m")


@pytest.mark.parametrize("name", ["", ".", "..", ".m", "a/b", "/etc", "../m", "a\0b", "a\n", "ä", "a b", "x" * 129])
def test_names_stay_inside_the_repository(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        resolve(tmp_path, name)


def tensorrt_chain(**changes: Any) -> dict[str, Any]:
    """One block with one weight, as TensorRT's chains have it."""
    span = Range(min=(1, 2), opt=(1, 2), max=(3, 2))
    x, y = Value(name="x", dtype="float32", shape=("n", 2)), Value(name="y", dtype="float32", shape=("n", 2))
    tensor = Tensor(name="w", dtype="float32", shape=(2, 2), offset=0, nbytes=16)
    block = Block(
        name="block-000", file="a.plan", digest="0" * 32, extents=(0,), inputs=(x,), outputs=(y,), weights=("w",)
    )
    fields: dict[str, Any] = {
        "backend": Backend(name="tensorrt", version="10.3.0", fingerprint={}),
        "tensorrt": TensorRt(binding="inputs", placement="staged", ranges={"x": span, "y": span}),
        "inputs": (x,),
        "outputs": (y,),
        "blocks": (block,),
        "extents": (Extent(offset=0, length=PAGE, checksum="0" * 16, tensors=(tensor,)),),
    }
    return {**fields, **changes}


def test_a_tensorrt_chain_is_read_as_written(tmp_path: Path) -> None:
    chain = chain_of(**tensorrt_chain())
    write_manifest(tmp_path, chain)
    assert read_manifest(tmp_path) == chain


BLOCK = tensorrt_chain()["blocks"][0]
SPANNED = Range(min=(1, 2), opt=(1, 2), max=(3, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensorrt": None}, "not both"),
        ({"backend": Backend(name="onnxruntime", version="1", fingerprint={})}, "not both"),
        ({"blocks": (msgspec.structs.replace(BLOCK, weights=()),)}, "numbers other weights"),
        ({"blocks": (msgspec.structs.replace(BLOCK, weights=("w", "w")),)}, "numbers other weights"),
        ({"tensorrt": TensorRt(binding="swap", placement="pinned", ranges={"x": SPANNED, "y": SPANNED})}, "no plan"),
        ({"tensorrt": TensorRt(binding="inputs", placement="staged", ranges={"x": SPANNED})}, "size of 'y'"),
        (
            {
                "tensorrt": TensorRt(
                    binding="inputs",
                    placement="staged",
                    ranges={"x": SPANNED, "y": Range(min=(4, 2), opt=(1, 2), max=(3, 2))},
                )
            },
            "range of 'y' is none",
        ),
        (
            {
                "tensorrt": TensorRt(
                    binding="inputs",
                    placement="staged",
                    ranges={"x": Range(min=(1,), opt=(1,), max=(3,)), "y": SPANNED},
                )
            },
            "range of 'x' is of another rank",
        ),
    ],
)
def test_a_tensorrt_chain_that_makes_no_sense(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BuildError, match=words):
        write_manifest(tmp_path, chain_of(**tensorrt_chain(**changes)))
