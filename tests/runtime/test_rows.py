"""Rows read on demand: the bits of the whole table, from drives that tear, fail and hang, in bounded memory."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests import chains
from tests.chains import Feeds, assert_close, assert_same, assert_valid_by_themselves, in_this_process, opened, uncut
from tests.runtime.drives import PATIENCE, Broken, Faulty, Hanging, failure
from tests.runtime.test_chain import in_thread
from trt_layering import Footprint, LoaderOptions
from trt_layering.building import Built, build
from trt_layering.errors import ClosedError, CorruptError, InputError, LayeringError, MemoryLimitError, ReadError
from trt_layering.graph import tables
from trt_layering.runtime import rows, supply
from trt_layering.runtime.rows import Piece, RowReader, Table, pieces_of
from trt_layering.store.manifest import PAGE, WEIGHTS_FILE, Extent, Tensor
from trt_layering.store.reader import WeightFile

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "bfloat16")
ROWS, WIDTH = 300, 64


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() <= before


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets chains read through a stand-in for `os.preadv`."""

    def use(preadv: Any) -> None:
        monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))

    return use


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return np.random.default_rng(seed).integers(-100, 100, shape).astype(kind)


# -------------------------------------------------------------------------------------------------- tables and pieces


@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=30, unique=True),
    st.integers(1, 5 * PAGE),
    st.sampled_from([PAGE, 4 * PAGE]),
    st.sampled_from([0, PAGE, 8 * PAGE]),
)
def test_pieces_are_whole_pages_that_hold_every_row_once(numbers: list[int], size: int, most: int, gap: int) -> None:
    begins = [64 + row * size for row in sorted(numbers)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_PIECE", most)
        patch.setattr(rows, "_GAP", gap)
        pieces = pieces_of(begins, size)
    held = [0] * len(begins)
    end = 0
    for piece in pieces:
        assert piece.offset % PAGE == piece.length % PAGE == 0
        assert piece.offset >= end
        assert 0 < piece.length <= most
        end = piece.offset + piece.length
        assert piece.first < piece.last
        for i in range(piece.first, piece.last):
            part = min(begins[i] + size, end) - max(begins[i], piece.offset)
            assert part > 0
            held[i] += part
    assert held == [size] * len(begins)


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_rows_of_any_table(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str) -> None:
    """Rows longer and shorter than a piece, on drives that read short, with caches of any size."""
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    array = numbers(dtype, shape, data.draw(st.integers(0, 3)))
    file = tmp_path_factory.mktemp("table") / WEIGHTS_FILE
    before = data.draw(st.sampled_from([0, 64, 4032]))
    length = -(-(before + array.nbytes) // PAGE) * PAGE
    file.write_bytes(bytes(PAGE) + (bytes(before) + array.tobytes()).ljust(length, b"\0"))
    tensor = Tensor(name="t", dtype=dtype, shape=shape, offset=before, nbytes=array.nbytes)
    extent = Extent(offset=PAGE, length=length, checksum="0" * 16, tensors=(tensor,))
    short: dict[int, OSError | int] = {data.draw(st.integers(0, 20)): data.draw(st.integers(1, 2 * PAGE)) for _ in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_PIECE", data.draw(st.sampled_from([PAGE, 16 * PAGE])))
        patch.setattr(rows, "_AT_ONCE", data.draw(st.sampled_from([1, 3])))
        patch.setattr(rows, "CACHE_BYTES", data.draw(st.sampled_from([0, 200, 1 << 20])))
        reader = RowReader(WeightFile(file, preadv=Faulty(short)))
        try:
            table = Table(reader, extent)
            for _ in range(3):
                asked = st.lists(st.integers(-shape[0], shape[0] - 1), max_size=12)
                indices = np.array(data.draw(asked), data.draw(st.sampled_from([np.int32, np.int64])))
                indices = data.draw(st.sampled_from([indices, indices.reshape(1, -1, 1), indices[:1].reshape(-1)]))
                got, wanted = table.gather(indices, "i"), np.take(array, indices, axis=0)
                assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
                assert got.tobytes() == wanted.tobytes()
            assert got.size == 0 or reader.rows_read > 0
        finally:
            reader.close()


def test_a_scalar_gives_one_row(tmp_path: Path) -> None:
    array = numbers("float32", (5, 32))
    (tmp_path / WEIGHTS_FILE).write_bytes(array.tobytes().ljust(PAGE, b"\0"))
    tensor = Tensor(name="t", dtype="float32", shape=(5, 32), offset=0, nbytes=array.nbytes)
    reader = RowReader(WeightFile(tmp_path / WEIGHTS_FILE))
    table = Table(reader, Extent(offset=0, length=PAGE, checksum="0" * 16, tensors=(tensor,)))
    assert table.gather(np.array(-1), "i").tobytes() == array[-1].tobytes()
    reader.close()


def test_the_rows_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = numbers("float32", (100, 1024))
    (tmp_path / WEIGHTS_FILE).write_bytes(array.tobytes())
    monkeypatch.setattr(rows, "CACHE_BYTES", 3 * PAGE)
    tensor = Tensor(name="t", dtype="float32", shape=(100, 1024), offset=0, nbytes=array.nbytes)
    reader = RowReader(WeightFile(tmp_path / WEIGHTS_FILE))
    table = Table(reader, Extent(offset=0, length=array.nbytes, checksum="0" * 16, tensors=(tensor,)))
    counts = []
    for asked in ([10, 10, 40], [10], [70], [95], [10, 70], [40], [-90]):
        assert table.gather(np.array(asked), "i").tobytes() == array[asked].tobytes()
        counts.append((reader.rows_read, reader.row_hits))
    assert counts == [(2, 0), (2, 1), (3, 1), (4, 1), (4, 3), (5, 3), (5, 4)]
    assert reader.bytes_read == 5 * PAGE
    reader.close()


def test_memory_is_bounded(tmp_path: Path) -> None:
    """All rows of a table of 8 MiB: what is taken beside the result is a small part of it."""
    array = numbers("float32", (2048, 1024))
    (tmp_path / WEIGHTS_FILE).write_bytes(array.tobytes())
    tensor = Tensor(name="t", dtype="float32", shape=(2048, 1024), offset=0, nbytes=array.nbytes)
    reader = RowReader(WeightFile(tmp_path / WEIGHTS_FILE))
    table = Table(reader, Extent(offset=0, length=array.nbytes, checksum="0" * 16, tensors=(tensor,)))
    indices = np.concatenate([np.arange(2048), np.arange(2048)])[::-1]
    tracemalloc.start()
    try:
        got = table.gather(indices, "i")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - got.nbytes < 2 << 20
    assert got.tobytes() == array[indices].tobytes()
    reader.close()


# ------------------------------------------------------------------------------------------------------------- chains


def embedding(indices: str = "int64", count: int | str = "n") -> onnx.ModelProto:
    """A table of 300 rows of 64 floats gathered by `i` and backwards by -1 - i, and a layer after it."""
    weight = numbers("float32", (WIDTH, WIDTH), 1) / 100
    one = np.array(-1, indices)
    return chains.model(
        [
            helper.make_node("Gather", ["t", "i"], ["h"]),
            helper.make_node("Sub", ["m", "i"], ["j"]),
            helper.make_node("Gather", ["t", "j"], ["k"]),
            helper.make_node("Add", ["h", "k"], ["s"]),
            helper.make_node("MatMul", ["s", "w"], ["o"]),
            helper.make_node("Tanh", ["o"], ["y"]),
        ],
        [helper.make_tensor_value_info("i", helper.np_dtype_to_tensor_dtype(np.dtype(indices)), [count])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [count, WIDTH]) for name in ("y", "k")],
        [
            numpy_helper.from_array(numbers("float32", (ROWS, WIDTH)), "t"),
            numpy_helper.from_array(weight, "w"),
            numpy_helper.from_array(one, "m"),
        ],
    )


@contextmanager
def small_tables() -> Iterator[None]:
    """`build` in this process, taking tables of a KiB for tables."""
    with in_this_process(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "TABLE_FROM", 1024)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chains.saved(embedding(), tmp_path_factory.mktemp("model") / "embedding.onnx")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    with small_tables():
        return build(source, repository=tmp_path_factory.mktemp("engines"), block_size="16KiB")


@pytest.fixture(scope="module")
def exact(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    with small_tables():
        return build(source, repository=tmp_path_factory.mktemp("exact"), block_size="16KiB", optimise=False)


def asked(count: int = 5, seed: int = 0) -> Feeds:
    return {"i": np.random.default_rng(seed).integers(-ROWS, ROWS, count)}


def floor(done: Built) -> int:
    return max(Footprint.of(done.manifest).floor, 1)


@pytest.mark.parametrize("optimise", [True, False])
def test_the_table_is_no_part_of_the_arena(built: Built, exact: Built, source: Path, optimise: bool) -> None:
    done = built if optimise else exact
    by_rows = [block for block in done.manifest.blocks if block.rows is not None]
    assert len(by_rows) == 2
    (extent,) = {extent for block in by_rows for extent in block.extents}
    table = done.manifest.extents[extent]
    assert [tensor.name for tensor in table.tensors] == ["t"]
    needs = Footprint.of(done.manifest)
    assert needs.largest_block < table.length < needs.resident
    assert_valid_by_themselves(done)
    with opened(done, floor(done)) as chain:
        for seed in range(4):
            wanted = uncut(source, asked(seed=seed), optimised=optimise)
            (assert_close if optimise else assert_same)(wanted, chain.run(asked(seed=seed)))
        stats = chain.stats()
        assert stats["arena_bytes"] < table.length
        assert stats["rows_read"] > 0
        assert stats["row_hits"] > 0
        assert stats["bytes_read"] > stats["row_bytes"] > 0
    with opened(done) as chain:
        (assert_close if optimise else assert_same)(uncut(source, asked(), optimised=optimise), chain.run(asked()))
        assert chain.stats()["mode"] == "resident"
        assert "rows_read" not in chain.stats()


@settings(max_examples=20)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), fixed=st.booleans())
def test_any_table_gives_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: str, fixed: bool
) -> None:
    """Outputs with and without a place of their own; indices that are fed and that are computed."""
    array = numbers(dtype, (data.draw(st.integers(40, 90)), *data.draw(st.sampled_from([(64,), (9, 8), (200,)]))))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    declared = list(shape) if fixed else [f"d{axis}" for axis in range(len(shape))]
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    proto = chains.model(
        [
            helper.make_node("Gather", ["t", "i"], ["a"], axis=data.draw(st.sampled_from([0, -array.ndim]))),
            helper.make_node("Neg", ["i"], ["j"]),
            helper.make_node("Cast", ["j"], ["l"], to=TensorProto.INT32),
            helper.make_node("Gather", ["t", "l"], ["b"]),
            helper.make_node("Identity", ["b"], ["c"]),
        ],
        [helper.make_tensor_value_info("i", TensorProto.INT64, declared)],
        [helper.make_tensor_value_info(name, kind, [*declared, *array.shape[1:]]) for name in ("a", "c")],
        [numpy_helper.from_array(array, "t")],
    )
    folder = tmp_path_factory.mktemp("any")
    shapes = None if fixed else {"i": shape}
    with small_tables():
        done = build(
            chains.saved(proto, folder / "m.onnx"), repository=folder, shapes=shapes, block_size="1KiB", optimise=False
        )
    assert sum(block.rows is not None for block in done.manifest.blocks) == 2
    limit = array.shape[0] - 1
    for budget in (floor(done), None):
        with opened(done, budget) as chain:
            for seed in range(2):
                indices = np.random.default_rng(seed).integers(-limit, limit + 1, shape)
                got = chain.run({"i": indices})
                for name, rows_of in (("a", indices), ("c", -indices)):
                    assert got[name].tobytes() == array[rows_of].tobytes()
                    assert (got[name].dtype, got[name].shape) == (array.dtype, array[rows_of].shape)


@pytest.mark.parametrize("optimise", [True, False])
def test_minilm(real_model: Callable[[str], Path], tmp_path: Path, optimise: bool) -> None:
    path = real_model("minilm")
    shapes = {"input_ids": (2, 9), "attention_mask": (2, 9)}
    with in_this_process():
        done = build(path, repository=tmp_path, block_size="4MiB", shapes=shapes, optimise=optimise, split=optimise)
    needs = Footprint.of(done.manifest)
    assert done.manifest.blocks[0].rows == "input_ids"
    assert needs.largest_block < 4 << 20
    assert needs.tables > 46_000_000
    assert done.manifest.joined
    with opened(done, max(needs.fixed, 0) + (8 << 20)) as chain:
        for seed in range(2):
            ids = np.random.default_rng(seed).integers(0, 30522, (2, 9))
            fed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
            (assert_close if optimise else assert_same)(uncut(path, fed, optimised=optimise), chain.run(fed))
        stats = chain.stats()
        assert 0 < stats["rows_read"] + stats["row_hits"] <= 36
        assert stats["row_bytes"] < 1 << 20


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, 1 << 40])
def test_an_index_outside_the_table(built: Built, source: Path, wrong: int) -> None:
    with opened(built, floor(built)) as chain:
        with pytest.raises(InputError, match=f"'t', which has {ROWS} rows") as caught:
            chain.run({"i": np.array([1, wrong])})
        # Whichever is executed first.
        assert any(
            f"row {row} is" in str(caught.value) and name in caught.value.where
            for name, row in (("'i'", wrong), ("'j'", -1 - wrong))
        )
        assert_close(uncut(source, asked(), optimised=True), chain.run(asked()))


def test_a_drive_that_fails_costs_the_run(built: Built, source: Path, drive: Callable[[Any], None]) -> None:
    broken = Broken()
    drive(broken)
    with opened(built, floor(built)) as chain:
        chain.run(asked())
        broken.broken.set()
        with pytest.raises(ReadError, match="Input/output error"):
            chain.run(asked(200, seed=1))
        broken.broken.clear()
        for _ in range(2):  # the loader's reads ahead may have failed as well
            try:
                chain.run(asked(200, seed=1))
            except ReadError:
                continue
            break
        assert_close(uncut(source, asked(200, 1), optimised=True), chain.run(asked(200, 1)))


def test_an_interruption_leaves_the_chain_usable(built: Built, source: Path, drive: Callable[[Any], None]) -> None:
    interrupt = threading.Event()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if interrupt.is_set() and threading.current_thread() is threading.main_thread():
            interrupt.clear()
            raise KeyboardInterrupt
        return Broken()(descriptor, buffers, offset)

    drive(preadv)
    with opened(built, floor(built)) as chain:
        interrupt.set()
        with pytest.raises(KeyboardInterrupt):
            chain.run(asked(200))
        for seed in range(3):
            assert_close(uncut(source, asked(200, seed), optimised=True), chain.run(asked(200, seed)))


def test_close_while_rows_are_read(built: Built, drive: Callable[[Any], None]) -> None:
    hanging = Hanging()
    drive(hanging)
    chain = opened(built, floor(built))
    chain.run(asked())
    hanging.hang.set()
    running, results = in_thread(lambda: chain.run(asked(200, seed=1)))
    assert hanging.caught.wait(PATIENCE)
    closing, closed = in_thread(chain.close)
    hanging.release.set()
    running.join(PATIENCE)
    closing.join(PATIENCE)
    assert isinstance(results[0], ClosedError)
    assert closed == [None]


def test_a_flipped_bit_in_the_table(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.path.parent.parent, tmp_path / "engines")
    done = Built(tmp_path / "engines" / built.path.parent.name / built.path.name, built.manifest)
    (extent,) = {extent for block in built.manifest.blocks if block.rows for extent in block.extents}
    data = bytearray((done.path / WEIGHTS_FILE).read_bytes())
    data[built.manifest.extents[extent].offset + 7 * WIDTH * 4] ^= 16
    (done.path / WEIGHTS_FILE).write_bytes(data)
    for verify in ("first", "always"):
        with pytest.raises(CorruptError, match=f"extent {extent}"):
            opened(done, floor(done), loader=LoaderOptions(verify=verify))
    with opened(done, floor(done), loader=LoaderOptions(verify="never")) as chain, opened(built) as whole:
        assert_close(whole.run({"i": np.arange(8, 12)}), chain.run({"i": np.arange(8, 12)}))


def test_several_threads_read_and_the_reader_knows_them(tmp_path: Path) -> None:
    """One that finds its chain unused must leave closing to another: it cannot wait for itself."""
    helped = threading.Event()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if threading.current_thread() is not threading.main_thread() and reader.owns_this_thread():
            helped.set()
        assert helped.wait(PATIENCE)
        return os.preadv(descriptor, buffers, offset)

    (tmp_path / WEIGHTS_FILE).write_bytes(b"".join(bytes([n]) * PAGE for n in range(40)))
    reader = RowReader(WeightFile(tmp_path / WEIGHTS_FILE, preadv=preadv))
    got = {}
    pieces = [Piece(n * PAGE, PAGE, n, n + 1) for n in range(40)]
    reader.read(pieces, lambda piece, data: got.update({piece.first: bytes(data)}))
    assert got == {n: bytes([n]) * PAGE for n in range(40)}
    assert not reader.owns_this_thread()
    reader.close()


def test_what_a_signal_handler_raises_while_rows_are_read_passes(tmp_path: Path) -> None:
    """In the thread that asks."""
    with small_reader(tmp_path) as reader, pytest.raises(TimeoutError, match="my deadline"):
        reader.read([Piece(0, PAGE, 0, 1)], Raising(TimeoutError("my deadline")))


def test_what_fails_in_another_thread_is_told_as_a_fault(tmp_path: Path) -> None:
    raised = threading.Event()

    def deliver(_piece: Piece, _data: memoryview) -> None:
        if reader.owns_this_thread():
            raised.set()
            raise KeyError("lost")
        assert raised.wait(PATIENCE)

    with small_reader(tmp_path) as reader, pytest.raises(LayeringError, match="reading rows failed: KeyError"):
        reader.read([Piece(n * PAGE, PAGE, n, n + 1) for n in range(16)], deliver)


class Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, _piece: Piece, _data: memoryview) -> None:
        raise self._error


@contextmanager
def small_reader(folder: Path) -> Iterator[RowReader]:
    """Of a file of 16 pages."""
    (folder / WEIGHTS_FILE).write_bytes(bytes(16 * PAGE))
    reader = RowReader(WeightFile(folder / WEIGHTS_FILE))
    try:
        yield reader
    finally:
        reader.close()


def test_a_read_error_while_opening(built: Built, drive: Callable[[Any], None]) -> None:
    drive(Faulty({1: failure()}))  # the first shows whether direct reads work
    with pytest.raises(ReadError):
        opened(built, floor(built))


def test_threads_that_cannot_be_had(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryLimitError, match="no thread for reading rows"):
        opened(built, floor(built))
