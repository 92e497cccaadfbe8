"""What the child does, against the emulated TensorRT: flags, the timing cache, and every weight accounted for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.backends.tensorrt.blocks import WEIGHTS, block, request
from tests.emulation import install
from trt_layering.backends.tensorrt import plan_work, timing_cache
from trt_layering.backends.tensorrt.plans import BlockTooLarge, PlanBuilder

MIB = 1 << 20


@contextmanager
def emulated(**switches: str) -> Iterator[Any]:
    """Polygraphy keeps the TensorRT that it first saw, so it is imported anew."""
    with install.installed(**switches) as machine:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("polygraphy")}
        try:
            yield machine
        finally:
            for name in [name for name in sys.modules if name.startswith("polygraphy")]:
                del sys.modules[name]
            sys.modules.update(hidden)


@pytest.fixture(scope="module", params=["10.3", "10.16", "11.4"])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with emulated(tensorrt=request.param) as found:
        yield found


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(refit: str, **changed: Any) -> dict[str, Any]:
        file = block(tmp_path / f"{refit}.onnx", "inputs" if refit == "inputs" else "constants")
        fields = {
            "onnx": str(file), "draft": str(tmp_path / "draft"), "timing_cache": str(tmp_path / "timing" / "cache"),
            "workspace": MIB, "refit": "none" if refit == "inputs" else refit, "weights": list(WEIGHTS),
            "profile": {"i0": [[1, 4], [2, 4], [8, 4]]},
        }  # fmt: skip
        return {**fields, **changed}

    return make


def described(path: str) -> dict[str, Any]:
    """What the emulation wrote into its plan."""
    data = Path(path).read_bytes()
    found, _ = json.JSONDecoder().raw_decode(data[data.index(b"{") :].decode(errors="replace"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("refit", "flag", "stripped"),
    [
        ("inputs", "", False),
        ("none", "", False),
        ("identical", "REFIT_IDENTICAL", True),
        ("individual", "REFIT_INDIVIDUAL", True),
    ],
)
def test_each_binding_has_its_flags(machine: Any, task: Any, refit: str, flag: str, stripped: bool) -> None:
    asked = task(refit)
    answer = plan_work.build(asked)
    assert "reason" not in answer, answer
    assert answer["nbytes"] == Path(asked["draft"]).stat().st_size
    assert answer["refit_weights"] == (list(WEIGHTS) if stripped else [])
    assert answer["scratch_bytes"] > 0
    assert answer["said"] == answer["lines"] == []
    plan = described(asked["draft"])
    assert (plan["refit"], plan["stripped"]) == (flag, stripped)
    inputs = {tensor["name"]: tensor["profiles"] for tensor in plan["tensors"] if tensor["is_input"]}
    assert inputs["i0"] == [[[1, 4], [2, 4], [8, 4]]]
    assert inputs.keys() == {"i0", *(WEIGHTS if refit == "inputs" else ())}


def test_constants_beside_the_weights_are_told_where_a_refit_would_ask_for_them(machine: Any, task: Any) -> None:
    answer = plan_work.build(task("identical", weights=["w0"]))
    assert (answer["reason"], answer["words"]) == ("weights", "a refit would have to give what is not streamed: w1")
    assert plan_work.build(task("individual", weights=["w0"]))["refit_weights"] == ["w0"]


def test_a_weight_that_tensorrt_does_not_know_is_told(machine: Any, task: Any) -> None:
    answer = plan_work.build(task("individual", weights=["w0", "w9"]))
    assert (answer["reason"], answer["words"]) == ("weights", "TensorRT cannot mark as refittable: w9")
    assert "w9" in " ".join(answer["lines"])


class Asking:
    """A refitter that asks for `asked`: name, dtype, count."""

    def __init__(self, *asked: tuple[str, str, int]) -> None:
        self._asked = {name: (dtype, count) for name, dtype, count in asked}

    def get_all_weights(self) -> list[str]:
        return list(self._asked)

    def get_weights_prototype(self, name: str) -> Any:
        dtype, count = self._asked[name]
        kind = type("DataType", (), {"name": dtype})
        return type("Weights", (), {"dtype": kind, "size": count})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([("w0", "FLOAT", 32)], "a refit would not reach w1, which TensorRT has built in"),
        ([("w0", "HALF", 32), ("w1", "FLOAT", 8)], "a refit of w0 takes 32 of HALF, where it has 32 of float32"),
        ([("w0", "FLOAT", 32), ("w1", "FLOAT", 9)], "a refit of w1 takes 9 of FLOAT, where it has 8 of float32"),
        ([("w0", "FLOAT", 32), ("w1", "FLOAT", 8), ("x", "FLOAT", 1)], "what is not streamed: x"),
    ],
)
def test_every_weight_is_accounted_for(tmp_path: Path, asked: Any, words: str) -> None:
    known = plan_work.BlockFile.open(block(tmp_path / "b.onnx", "constants"), list(WEIGHTS)).weights
    with pytest.raises(plan_work._Refused, match=words):
        plan_work._accounted(Asking(*asked), known)  # type: ignore[arg-type]
    assert plan_work._accounted(Asking(("w1", "FLOAT", 8), ("w0", "FLOAT", 32)), known) == ["w1", "w0"]  # type: ignore[arg-type]


def test_too_little_workspace_is_a_lack_of_memory(machine: Any, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_WORKSPACE_NEED", str(2 * MIB))
    answer = plan_work.build(task("none"))
    assert answer["reason"] == "memory"
    assert "Could not find any implementation for node" in " ".join(answer["lines"])
    assert "reason" not in plan_work.build(task("none", workspace=2 * MIB))


def test_an_operator_that_tensorrt_lacks_is_told(machine: Any, task: Any, tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("i0", "o0")]
    graph = helper.make_graph(
        [helper.make_node("FusedMatMul", ["i0"], ["o0"], domain="com.microsoft")], "b", *zip(ends)
    )
    onnx.save(helper.make_model(graph), tmp_path / "odd.onnx")
    answer = plan_work.build(task("none", onnx=str(tmp_path / "odd.onnx"), weights=[]))
    assert answer["reason"] == "refused"
    assert "FusedMatMul" in " ".join(answer["lines"])


def test_an_activation_that_is_a_shape_is_told(machine: Any, task: Any, tmp_path: Path) -> None:
    inputs = [
        helper.make_tensor_value_info("i0", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("i1", TensorProto.INT64, [2]),
    ]
    output = helper.make_tensor_value_info("o0", TensorProto.FLOAT, ["a", "b"])
    graph = helper.make_graph([helper.make_node("Reshape", ["i0", "i1"], ["o0"])], "b", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "shape.onnx")
    answer = plan_work.build(task("none", onnx=str(tmp_path / "shape.onnx"), weights=[]))
    assert answer["reason"] == "refused"
    assert "TensorRT takes i1 for shapes" in answer["words"]


# ------------------------------------------------------------------------------------------------- the timing cache


def entries(task: dict[str, Any]) -> int:
    data, words = timing_cache.read(Path(task["timing_cache"]))
    assert not words
    found = json.loads(data[data.index(b"[") :])
    return len(found[-1])


def test_the_timing_cache_grows_over_builds(machine: Any, task: Any) -> None:
    asked = task("inputs")
    plan_work.build(asked)
    before = entries(asked)
    assert before > 0
    assert plan_work.build(asked)["said"] == []
    assert entries(asked) == before
    plan_work.build(task("individual"))
    assert entries(asked) >= before


def test_what_others_have_written_meanwhile_is_kept(machine: Any, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another build replaces the cache while this one builds."""
    asked = task("inputs")
    with monkeypatch.context() as patch:
        keep = timing_cache.keep

        def another_first(config: Any, file: Path) -> None:
            patch.setattr(timing_cache, "keep", keep)
            plan_work.build({**asked, "draft": asked["draft"] + "-2", "onnx": other})
            keep(config, file)

        other = str(renamed(Path(asked["onnx"])))
        patch.setattr(timing_cache, "keep", another_first)
        plan_work.build(asked)
    assert entries(asked) == 4


def renamed(file: Path) -> Path:
    """A block that differs in one node."""
    model = onnx.load(file)
    model.graph.node[-1].op_type = "Sigmoid"
    other = file.with_name("other.onnx")
    onnx.save(model, other)
    return other


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign"])
def test_a_damaged_timing_cache_is_told_and_begun_anew(machine: Any, task: Any, damage: str) -> None:
    asked = task("inputs")
    plan_work.build(asked)
    file, data = Path(asked["timing_cache"]), Path(asked["timing_cache"]).read_bytes()
    before = entries(asked)
    flipped = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    file.write_bytes({"cut": data[:-4], "bit": flipped, "empty": b"", "foreign": b"x" * 400}[damage])
    answer = plan_work.build(asked)
    assert answer["said"] == [f"the timing cache {file} is damaged and is begun anew"]
    assert entries(asked) == before


def test_a_timing_cache_that_cannot_be_kept_is_told_and_the_plan_is_there(machine: Any, task: Any) -> None:
    asked = task("inputs")
    Path(asked["timing_cache"]).parent.touch()
    answer = plan_work.build(asked)
    assert answer["nbytes"] == Path(asked["draft"]).stat().st_size > 0
    assert any("cannot be kept" in words and "timing" in words for words in answer["said"])


def test_a_timing_cache_that_tensorrt_refuses_is_told_and_begun_anew(machine: Any, task: Any, tmp_path: Path) -> None:
    asked = task("inputs")
    file, body = Path(asked["timing_cache"]), b"whole, and not TensorRT's"
    file.parent.mkdir()
    file.write_bytes(timing_cache._HEAD + timing_cache.xxhash.xxh3_128_digest(body) + body)
    answer = plan_work.build(asked)
    assert answer["said"] == [f"TensorRT does not take the timing cache {file}, which is begun anew"]
    assert entries(asked) > 0


def test_a_timing_cache_of_another_gpu_is_told_and_begun_anew(task: Any) -> None:
    asked = task("inputs")
    with emulated(gpu="NVIDIA L4", sm="8.9"):
        plan_work.build(asked)
    with emulated():
        answer = plan_work.build(asked)
        assert "begun anew" in " ".join(answer["said"])
        assert entries(asked) > 0
        assert plan_work.build(asked)["said"] == []


# --------------------------------------------------------------------------------------------------- from end to end


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Path]:
    with install.installed():
        yield tmp_path / "engines"


def builder(repository: Path) -> PlanBuilder:
    return PlanBuilder(repository, "10.3.0", {"gpu": "Orin (nvgpu)", "sm": "8.7"}, available=lambda: 4 << 30)


@pytest.mark.parametrize("binding", ["inputs", "refit", "swap"])
def test_a_child_builds_and_the_plan_is_kept(tmp_path: Path, repository: Path, binding: Any) -> None:
    asked = request(tmp_path, binding)
    plan = builder(repository).plan(asked)
    assert plan.path.read_bytes()[:4] == b"ftrt"
    assert plan.refit_weights == (("w0", "w1") if binding == "refit" else ())
    (timing,) = (repository / ".timing-caches").iterdir()
    assert timing.name == "10.3.0-Orin-nvgpu-8.7.cache"
    assert builder(repository).plan(asked) == plan


def test_a_killed_child_is_followed_by_one_with_less(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = tmp_path / "times"
    times.write_text("2")
    monkeypatch.setenv("EMULATED_BUILD_TIMES", str(times))
    monkeypatch.setenv("EMULATED_BUILD_KILL", "*")
    assert builder(repository).plan(request(tmp_path)).workspace == 256 << 20


def test_a_block_that_never_fits_is_told_in_tensorrts_words(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMULATED_BUILD_NONE", "*")
    with pytest.raises(BlockTooLarge, match="block-000 was built for swap") as caught:
        builder(repository).plan(request(tmp_path, "swap"))
    assert caught.value.where.count("Could not find any implementation for node") == 3
    assert (repository / ".plans").is_dir()
    assert not list(repository.rglob("plan.json"))
