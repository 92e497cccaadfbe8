"""Weights in 16 bits: what a build stores so, what it keeps, and what it says that this cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import real_models
from tests.chains import (
    assert_close,
    assert_valid_by_themselves,
    budgets,
    cut_by,
    feed,
    in_this_process,
    layers,
    model,
    opened,
    saved,
    uncut,
)
from trt_layering import narrowing
from trt_layering.backends.base import BlockTooLarge, CutBlock, Draft
from trt_layering.backends.onnxruntime import session
from trt_layering.backends.onnxruntime.builder import OnnxRuntimeBuilder
from trt_layering.building import Built, build
from trt_layering.compare import difference
from trt_layering.costs import cost_lines, costs
from trt_layering.errors import BackendError, BuildError, UsageError
from trt_layering.runtime.footprint import Footprint
from trt_layering.verification import verify

FLOAT = TensorProto.FLOAT
info = helper.make_tensor_value_info
node = helper.make_node
KIB = 1024
CHAIN = {"fp16": 1e-2, "bf16": 5e-2}

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")
BOTH = pytest.mark.parametrize("optimise", [False, True])
KINDS = pytest.mark.parametrize("weights", ["fp16", "bf16"])


def built(proto: onnx.ModelProto, folder: Path, **options: Any) -> tuple[Path, Built]:
    path = saved(proto, folder / "model.onnx")
    with in_this_process():
        return path, build(path, repository=folder / "engines", **options)


def dtypes(done: Built) -> dict[str, str]:
    return {tensor.name: tensor.dtype for extent in done.manifest.extents for tensor in extent.tensors}


def assert_answers(path: Path, done: Built, feeds: dict[str, Any], tolerance: float) -> None:
    """At every kind of budget."""
    wanted = uncut(path, feeds, optimised=done.manifest.optimised)
    for budget in budgets(done).values():
        with opened(done, budget) as chain:
            assert_close(wanted, chain.run(feeds), tolerance)


@KINDS
@BOTH
def test_weights_take_half_and_answers_stay_near(tmp_path: Path, optimise: bool, weights: str) -> None:
    path, wide = built(layers(8), tmp_path, block_size="16KiB", optimise=optimise)
    path, done = built(layers(8), tmp_path, block_size="16KiB", optimise=optimise, weights=weights)
    manifest = done.manifest
    assert (manifest.weights, manifest.precision) == (weights, "fp32")
    assert set(dtypes(done).values()) == {{"fp16": "float16", "bf16": "bfloat16"}[weights]}
    assert manifest.weights_bytes == wide.manifest.weights_bytes // 2
    assert len(manifest.blocks) == len(wide.manifest.blocks) // 2  # of as many stored bytes
    assert [one.block for one in manifest.narrowed] == [block.name for block in manifest.blocks]
    assert all(0 < one.max_rel_diff <= narrowing.BLOCK_TOLERANCE[weights] for one in manifest.narrowed)
    assert all((one.kept, one.saved_bytes) == ((), 16 * KIB) for one in manifest.narrowed)
    assert manifest.check.tolerance == CHAIN[weights]
    assert 0 < manifest.check.max_abs_diff <= CHAIN[weights] * manifest.check.max_abs_output
    assert_answers(path, done, feed(), CHAIN[weights])
    assert_valid_by_themselves(done)


def test_a_block_that_was_cut_once_more_costs_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = OnnxRuntimeBuilder.drafts
    refusals = [0, 2]  # of blocks, by number

    def draft(self: OnnxRuntimeBuilder, cuts: Sequence[CutBlock], *rest: Any) -> list[Draft]:
        if refusals:
            error = BlockTooLarge("no memory for this one")
            error.block = refusals.pop(0)
            raise error
        return drafts(self, cuts, *rest)

    monkeypatch.setattr(OnnxRuntimeBuilder, "drafts", draft)
    path, done = built(layers(8), tmp_path, block_size="16KiB", weights="fp16")
    assert len(done.manifest.blocks) == 6
    assert [one.block for one in done.manifest.narrowed] == ["block-000", "block-002", "block-004", "block-005"]
    assert cost_lines(done.manifest)
    assert_answers(path, done, feed(), CHAIN["fp16"])


def test_what_a_block_is_said_to_cost_is_what_it_costs(tmp_path: Path) -> None:
    """One block, so that its output is the model's."""
    _, done = built(layers(2), tmp_path, weights="fp16", optimise=False)
    assert len(done.manifest.blocks) == 1
    check = done.manifest.check
    assert done.manifest.narrowed[0].max_rel_diff == pytest.approx(check.max_abs_diff / check.max_abs_output, rel=1e-3)


@BOTH
def test_no_tolerance_keeps_everything(tmp_path: Path, optimise: bool) -> None:
    path, done = built(layers(4), tmp_path, block_size="16KiB", optimise=optimise, weights="fp16", weights_tolerance=0)
    assert set(dtypes(done).values()) == {"float32"}
    assert [(len(one.kept), one.saved_bytes, one.max_rel_diff) for one in done.manifest.narrowed] == [(1, 0, 0.0)] * 4
    assert done.manifest.check.tolerance == (1e-5 if optimise else 0.0)
    assert_answers(path, done, feed(), 1e-5 if optimise else 0.0)


@BOTH
def test_a_weight_out_of_range_is_kept(tmp_path: Path, optimise: bool, caplog: pytest.LogCaptureFixture) -> None:
    proto = layers(4)
    large, tiny = (numpy_helper.to_array(proto.graph.initializer[index]).copy() for index in (1, 2))
    large[3, 5] = 1e6
    tiny *= 1e-9
    for index, array in ((1, large), (2, tiny)):
        proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(array, f"w{index}"))
    with caplog.at_level(logging.INFO, logger="trt_layering"):
        path, done = built(proto, tmp_path, block_size="16KiB", optimise=optimise, weights="fp16")
    assert dtypes(done) == {"w0": "float16", "w1": "float32", "w2": "float32", "w3": "float16"}
    assert "w1 stays float32" in caplog.text
    assert {name for one in done.manifest.narrowed for name in one.kept} == {"w1", "w2"}
    assert_answers(path, done, feed(), 1e-2)


def sensitive() -> onnx.ModelProto:
    """Two branches of which the output keeps only the difference: "w" is rounded on one side, "v" harms nothing."""
    rng = np.random.default_rng(0)
    w, v = (rng.standard_normal((64, 64), np.float32) for _ in range(2))
    weights = [numpy_helper.from_array(array, name) for name, array in (("w", w), ("same", w + 0), ("v", v * 1e-3))]
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["x", "other"], ["b"]), node("Sub", ["a", "b"], ["c"])]
    nodes += [node("MatMul", ["x", "v"], ["d"]), node("Add", ["c", "d"], ["y"])]
    weights[1].name = "other"
    weights[1].raw_data = (w * np.float32(1 + 2**-13)).tobytes()
    return model(nodes, [info("x", FLOAT, [3, 64])], [info("y", FLOAT, [3, 64])], weights)


def test_of_a_block_that_differs_too_much_the_worst_weights_are_kept(tmp_path: Path) -> None:
    path, done = built(sensitive(), tmp_path, weights="fp16", optimise=False)
    assert dtypes(done) == {"w": "float32", "other": "float32", "v": "float16"}
    [one] = done.manifest.narrowed
    assert set(one.kept) == {"w", "other"}
    assert 0 < one.max_rel_diff <= 1e-3
    assert_answers(path, done, feed(), 1e-2)
    path, loose = built(sensitive(), tmp_path, weights="fp16", optimise=False, weights_tolerance=1e-4)
    assert loose.manifest.narrowed[0].max_rel_diff <= 1e-4


@BOTH
def test_a_tied_weight_is_stored_once_and_kept_everywhere(tmp_path: Path, optimise: bool) -> None:
    nodes = [node("MatMul", [f"h{i}", "w"], [f"m{i}"]) for i in range(3)]
    nodes += [node("Tanh", [f"m{i}"], [f"h{i + 1}"]) for i in range(3)]
    w = np.random.default_rng(0).standard_normal((64, 64), np.float32) / 8
    ends = [info("h0", FLOAT, ["n", 64])], [info("h3", FLOAT, ["n", 64])]
    for array, dtype in ((w, "float16"), (w * np.where(np.eye(64), 1e7, 1).astype(np.float32), "float32")):
        with cut_by(lambda legal: legal):
            path, done = built(
                model(nodes, *ends, [numpy_helper.from_array(array, "w")]), tmp_path, optimise=optimise, weights="fp16"
            )
        assert len(done.manifest.blocks) >= 3
        assert dtypes(done) == {"w": dtype}
        assert len(done.manifest.extents) == 1
        assert_answers(path, done, {"h0": feed()["x"]}, 1e-2)


@KINDS
@BOTH
def test_rows_of_a_table_cross_a_seam_narrow_and_exact(tmp_path: Path, optimise: bool, weights: str) -> None:
    rng = np.random.default_rng(0)
    table = numpy_helper.from_array(rng.standard_normal((256, 64), np.float32), "table")
    w = numpy_helper.from_array(rng.standard_normal((64, 64), np.float32) / 8, "w")
    nodes = [node("Gather", ["table", "ids"], ["rows"]), node("MatMul", ["rows", "w"], ["y"])]
    proto = model(nodes, [info("ids", TensorProto.INT64, ["n"])], [info("y", FLOAT, ["n", 64])], [table, w])
    with cut_by(lambda legal: legal):
        path, done = built(proto, tmp_path, optimise=optimise, weights=weights)
    first = done.manifest.blocks[0]
    assert [value.dtype for value in first.outputs] == [{"fp16": "float16", "bf16": "bfloat16"}[weights]]
    assert_answers(path, done, {"ids": np.array([0, 7, 255])}, CHAIN[weights])


def test_a_kernel_that_refuses_a_narrow_weight_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.open_session

    def refusing(graph: Any, options: Any, saved: Path | None = None) -> Any:
        tensor = graph.graph.initializers["w1"].const_value if "w1" in graph.graph.initializers else None
        if tensor is not None and tensor.dtype.name == "FLOAT16":
            raise BackendError("ONNX Runtime refused: w1 must be a constant")
        return real(graph, options, saved)

    monkeypatch.setattr(narrowing, "open_session", refusing)
    path, done = built(layers(4), tmp_path, weights="fp16", optimise=False)
    assert [name for name, dtype in dtypes(done).items() if dtype == "float32"] == ["w1"]
    assert_answers(path, done, feed(), 1e-2)


def test_blocks_whose_answers_are_random_keep_all_and_the_build_ends(tmp_path: Path) -> None:
    proto = layers(3)
    proto.graph.node.insert(2, helper.make_node("RandomNormalLike", ["h1"], ["noise"], scale=1.0))
    proto.graph.node[3].input[0] = "noise"
    with pytest.raises(BuildError, match="'y' differs by"):
        built(proto, tmp_path, block_size="16KiB", weights="fp16", optimise=False)


def test_an_answer_that_is_too_far_off_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="'y' differs by") as caught:
        built(sensitive(), tmp_path, weights="fp16", weights_tolerance=1.0, optimise=False)
    assert "block-000" in caught.value.where
    assert "--weights-tolerance" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "int4"}, "'int4'"),
        ({"weights": "fp16", "weights_tolerance": float("nan")}, "nan"),
        ({"weights": "fp16", "weights_tolerance": -1e-3}, "-0.001"),
        ({"weights": "bf16", "weights_tolerance": 1.5}, "1.5"),
        ({"weights_tolerance": 1e-3}, "stay as they are"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        built(layers(1), tmp_path, **options)
    assert caught.value.remedy
    assert not (tmp_path / "engines" / "model").exists()


def test_bfloat16_needs_an_opset_that_has_it(tmp_path: Path) -> None:
    proto = layers(2)
    proto.opset_import[0].version = 12
    with pytest.raises(UsageError, match="opset 12") as caught:
        built(proto, tmp_path, weights="bf16")
    assert "fp16" in caught.value.remedy
    path, done = built(proto, tmp_path, weights="fp16")
    assert_answers(path, done, feed(), 1e-2)


def test_costs_in_words_and_numbers(tmp_path: Path) -> None:
    _, done = built(layers(24), tmp_path, block_size="16KiB", weights="fp16")
    told = costs(done.manifest)
    assert len(told) == 12
    assert {(one["bytes_before"], one["bytes_after"]) for one in told} == {(32 * KIB, 16 * KIB)}
    summary, header, *rows = cost_lines(done.manifest)
    assert "; the blocks:" in summary
    assert [row.split()[0] for row in rows] == [one["block"] for one in told]
    summary, header, *rows, more = cost_lines(done.manifest, 10)
    assert "the 10 of 12 blocks that change most" in summary
    assert (len(rows), more) == (10, "  and 2 more")
    assert {"before", "after"} <= set(header.split())
    worst = max(told, key=lambda one: one["max_rel_diff"])
    assert rows[0].split()[0] == worst["block"]
    _, plain = built(layers(2), tmp_path)
    assert (costs(plain.manifest), cost_lines(plain.manifest)) == ([], [])


def test_scratch_holds_the_widened_weights_of_one_node(tmp_path: Path) -> None:
    """Of one block with four, in two shapes: by child processes, where memory is measured."""
    rng = np.random.default_rng(0)
    shapes = [(1024, 2048), (2048, 1024)] * 2
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 32, f"w{i}") for i, shape in enumerate(shapes)
    ]
    nodes = [node("MatMul", [f"h{i}", f"w{i}"], [f"h{i + 1}"]) for i in range(4)]
    proto = model(nodes, [info("h0", FLOAT, [1, 1024])], [info("h4", FLOAT, [1, 1024])], weights)
    path = saved(proto, tmp_path / "model.onnx")
    done = build(path, repository=tmp_path / "engines", weights="fp16", split=False, block_size="16MiB")
    assert len(done.manifest.blocks) == 1
    widened = 1024 * 2048 * 4
    needs = Footprint.of(done.manifest)
    assert widened <= needs.scratch < 1.5 * widened
    assert needs.largest_block == 2 * widened


@pytest.mark.parametrize("name", ["minilm", "common"])
def test_real_models(name: str, real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A table of two thirds and matrices; convolutions in ONNX Runtime's own layout, LSTMs and a large Gemm."""
    feeds, path = real_models.feeds(name), real_model(name)
    shapes = {key: array.shape for key, array in feeds.items()}
    with in_this_process():
        done = build(
            path, name=name, repository=tmp_path, block_size="4MiB", weights="fp16", shapes=shapes, memory="4GiB"
        )
    manifest = done.manifest
    saved_bytes = sum(one.saved_bytes for one in manifest.narrowed)
    assert saved_bytes > 0.6 * manifest.weights_bytes
    assert max(one.max_rel_diff for one in manifest.narrowed) <= 1e-3
    wanted = uncut(path, feeds, optimised=True)
    for budget in (Footprint.of(manifest).floor, None):
        with opened(done, budget) as chain:
            got = chain.run(feeds)
        for key, array in wanted.items():
            diff, largest = difference(array, got[key])
            assert diff <= 1e-2 * largest
    assert verify(name, path, repository=tmp_path, shapes=shapes).passed
