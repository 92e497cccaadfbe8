"""From a model to a TensorRT chain, under the emulation: what is asked for, what is chosen, what is said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.chains import assert_close, feed, in_this_process, layers, model, opened, saved, uncut
from tests.emulation.install import installed
from trt_layering.building import Built, build
from trt_layering.errors import BackendError, BuildError, InputError, ModelError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Context managers for TensorRT types:DeprecationWarning")
SHAPES = {"x": {"min": "1x64", "opt": "3x64", "max": "5x64"}}
QUICK = {"binding": "inputs", "placement": "zero-copy"}


@pytest.fixture
def emulation() -> Iterator[Any]:
    with installed(tensorrt="11.4") as machine:
        yield machine
        machine.assert_clean()


def built(path: Path, home: Path, **options: Any) -> Built:
    options = {"block_size": "16KiB", "shapes": SHAPES, **options}
    with in_this_process():
        return build(path, name="m", repository=home, backend="tensorrt", **options)


def answers(chain: Built, path: Path) -> None:
    with opened(chain) as running:
        assert_close(uncut(path, feed()), running.run(feed()))


def test_auto_tries_every_binding_and_says_what_came_of_it(tmp_path: Path, emulation: Any) -> None:
    path = saved(layers(4), tmp_path / "m.onnx")
    chain = built(path, tmp_path / "engines")
    how = chain.manifest.tensorrt
    assert how is not None
    assert [candidate.binding for candidate in how.candidates] == ["inputs", "refit", "swap"]
    quickest = min(how.candidates, key=lambda candidate: candidate.seconds)
    assert quickest.binding == how.binding
    assert all(candidate.seconds > 0 and candidate.words for candidate in how.candidates)
    assert how.ranges["x"].min == (1, 64)
    assert how.ranges["x"].max == (5, 64)
    assert set(how.ranges) == {"x", "y", *(value.name for b in chain.manifest.blocks for value in b.outputs)}
    answers(chain, path)


def test_equal_blocks_share_a_plan(tmp_path: Path, emulation: Any) -> None:
    path = saved(layers(4), tmp_path / "m.onnx")
    chain = built(path, tmp_path / "engines", **QUICK)
    assert len({block.file for block in chain.manifest.blocks}) == 1
    assert [block.weights for block in chain.manifest.blocks] == [("w0",), ("w1",), ("w2",), ("w3",)]
    assert len(list(chain.path.glob("*.plan"))) == 1
    answers(chain, path)


def test_a_binding_that_cannot_be_had_is_left_out_with_the_reason(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_REFIT_FAIL", "1")
    path = saved(layers(3), tmp_path / "m.onnx")
    how = built(path, tmp_path / "engines").manifest.tensorrt
    assert how is not None
    refit = next(candidate for candidate in how.candidates if candidate.binding == "refit")
    assert refit.seconds == 0
    assert "did not take the weights over" in refit.words
    assert how.binding != "refit"


def test_a_block_too_large_for_the_memory_is_cut_once_more(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EMULATED_BUILD_NONE", "weights>20000")
    path = saved(layers(4), tmp_path / "m.onnx")
    with caplog.at_level(logging.WARNING):
        chain = built(path, tmp_path / "engines", block_size="32KiB", **QUICK)
    assert len(chain.manifest.blocks) == 4
    assert "cut into smaller blocks" in caplog.text
    answers(chain, path)


def test_a_block_that_cannot_be_cut_names_what_it_takes_and_what_to_do(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_BUILD_NONE", "weights>100")
    with pytest.raises(BuildError, match="memory ran out each time that block-000") as caught:
        built(saved(layers(2), tmp_path / "m.onnx"), tmp_path / "engines")
    assert "16.0 KiB of weights" in caught.value.what
    assert "--block-size" in caught.value.remedy
    assert not list((tmp_path / "engines").glob("m/*"))


def test_a_disk_that_refuses_plans_is_told_as_such(tmp_path: Path, emulation: Any) -> None:
    home = tmp_path / "engines"
    home.mkdir()
    (home / ".plans").touch()
    with pytest.raises(BuildError, match="cannot write the chain: File exists") as caught:
        built(saved(layers(2), tmp_path / "m.onnx"), home)
    assert "--repository" in caught.value.remedy
    assert not list(home.glob("m/*"))


def test_plans_that_cannot_be_removed_do_not_fail_the_build(
    tmp_path: Path, emulation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "engines"
    others = home / ".plans" / "others"
    (others / "needless").mkdir(parents=True)
    path = saved(layers(2), tmp_path / "m.onnx")
    with caplog.at_level(logging.WARNING):
        answers(built(path, home, **QUICK), path)
    assert "others" in caplog.text


def test_wrong_answers_of_a_binding_keep_it_out(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_layering.backends.tensorrt.bindings import Execution

    real = Execution.execute

    def idle(self: Execution, block: Any, live: Any, placed: Any) -> Any:
        if any(name.startswith("w") for name in self._addresses):
            return {value.name: placed[value.name] for value in block.outputs}
        return real(self, block, live, placed)

    monkeypatch.setattr(Execution, "execute", idle)
    how = built(saved(layers(2), tmp_path / "m.onnx"), tmp_path / "engines").manifest.tensorrt
    assert how is not None
    assert how.binding != "inputs"
    assert "differs from ONNX Runtime" in how.candidates[0].words


@pytest.mark.parametrize("binding", ["inputs", "refit"])
def test_wrong_answers_with_everything_in_memory_are_found(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch, binding: str
) -> None:
    from trt_layering.backends.tensorrt.runtime import TensorRt

    load = TensorRt._load
    monkeypatch.setattr(TensorRt, "_load", lambda self, extent, *rest: load(self, self._chain.extents[0], *rest))
    with pytest.raises(BuildError, match="differs by") as caught:
        built(saved(layers(3), tmp_path / "m.onnx"), tmp_path / "engines", **{**QUICK, "binding": binding})
    assert caught.value.where == "the engines with everything in memory"


def test_a_gpu_that_fails_in_the_first_run_is_told_as_it_is(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_layering.backends.tensorrt.runtime import TensorRt

    ready, failures = TensorRt.ready, [BackendError("the GPU has fallen off the bus")]

    def fail_once(self: TensorRt) -> None:
        if failures:
            raise failures.pop()
        ready(self)

    monkeypatch.setattr(TensorRt, "ready", fail_once)
    with pytest.raises(BackendError, match="fallen off the bus"):
        built(saved(layers(2), tmp_path / "m.onnx"), tmp_path / "engines", **QUICK)


def test_a_placement_that_the_gpu_lacks_is_refused_before_any_work(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_layering.building.open_model", None)
    with pytest.raises(BackendError, match="managed memory") as caught:
        built(tmp_path / "m.onnx", tmp_path / "engines", placement="managed")
    assert "--placement staged" in caught.value.remedy


def test_plans_come_through_pinned_memory_whatever_was_asked(
    tmp_path: Path, emulation: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chain = built(saved(layers(2), tmp_path / "m.onnx"), tmp_path / "engines", binding="swap", placement="zero-copy")
    assert chain.manifest.tensorrt is not None
    assert chain.manifest.tensorrt.placement == "pinned"
    assert "placement zero-copy is for weights alone" in caplog.text


def test_inputs_outside_the_shapes_are_refused_before_any_work(tmp_path: Path, emulation: Any) -> None:
    path = saved(layers(2), tmp_path / "m.onnx")
    with opened(built(path, tmp_path / "engines", **QUICK)) as running:
        with pytest.raises(InputError, match="6x64 is outside what the engines were built for, 1x64 to 5x64"):
            running.run(feed(6))
        assert_close(uncut(path, feed(5)), running.run(feed(5)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimise": False}, "always optimises"),
        ({"precision": "int8"}, "no precision 'int8'"),
        ({"weights": "bf16"}, "no weights stored as bf16"),
        ({"precision": "fp16", "weights": "fp16"}, "no weights stored as fp16"),
        ({"binding": "pointer"}, "binding cannot be 'pointer'"),
        ({"placement": "pinned"}, "placement cannot be 'pinned'"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, emulation: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        built(saved(layers(2), tmp_path / "m.onnx"), tmp_path / "engines", **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"binding": "refit"}, "for the backend tensorrt"),
        ({"placement": "staged"}, "for the backend tensorrt"),
        ({"precision": "fp16"}, "computes in fp32"),
    ],
)
def test_what_only_tensorrt_has_is_refused_of_others(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(saved(layers(2), tmp_path / "m.onnx"), repository=tmp_path, backend="onnxruntime", **options)


def test_an_operator_that_tensorrt_lacks_is_named(tmp_path: Path, emulation: Any) -> None:
    weight = numpy_helper.from_array(np.ones((4, 4), np.int8), "w")
    nodes = [helper.make_node("MatMulInteger", ["x", "w"], ["y"])]
    ends = [
        [helper.make_tensor_value_info(name, kind, [2, 4])]
        for name, kind in (("x", TensorProto.INT8), ("y", TensorProto.INT32))
    ]
    path = saved(model(nodes, *ends, [weight]), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="MatMulInteger"):
        built(path, tmp_path / "engines", shapes={})


def test_a_build_that_was_interrupted_goes_on_where_it_was(
    tmp_path: Path, emulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of different widths, so that no plan serves two; each is built once, whichever build that is in. What a
    killed process leaves is in test_plans."""
    from trt_layering.backends.tensorrt import plan_work

    path, home = saved(_narrowing([64, 48, 80, 32, 64]), tmp_path / "m.onnx"), tmp_path / "engines"
    options = {**QUICK, "block_size": "8KiB", "shapes": {"x": "2x64"}}
    real, asked = plan_work.build, []

    def third_interrupts(task: dict[str, Any]) -> dict[str, Any]:
        asked.append(task["onnx"])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(task)

    monkeypatch.setattr(plan_work, "build", third_interrupts)
    with pytest.raises(KeyboardInterrupt):
        built(path, home, **options)
    kept = _plans(home)
    assert len(kept) == 2
    chain = built(path, home, **options)
    plans = {block.file for block in chain.manifest.blocks}
    assert len(plans) > 3
    assert len(asked) == len(plans) + 1  # the one that was interrupted, a second time
    assert not _plans(home)
    with opened(chain) as running:
        feeds = {"x": np.random.default_rng(1).standard_normal((2, 64), np.float32)}
        assert_close(uncut(path, feeds), running.run(feeds))


def _plans(home: Path) -> dict[str, int]:
    return {str(plan): os.stat(plan).st_mtime_ns for plan in home.glob(".plans/*/plan")}


def _narrowing(widths: list[int]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    names = ["x", *(f"h{n}" for n in range(1, len(widths) - 1)), "y"]
    nodes, weights = [], []
    for n, (wide, narrow) in enumerate(pairwise(widths)):
        weights.append(numpy_helper.from_array(rng.standard_normal((wide, narrow), np.float32), f"w{n}"))
        nodes += [
            helper.make_node("MatMul", [names[n], f"w{n}"], [f"m{n}"]),
            helper.make_node("Tanh", [f"m{n}"], [names[n + 1]]),
        ]
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, width])]
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    return model(nodes, *ends, weights)
