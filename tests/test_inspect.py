"""What is told of TensorRT chains and plans, without TensorRT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backends.tensorrt.stores import plan, publish
from tests.store.samples import publish_tiny
from trt_layering.errors import CorruptError
from trt_layering.inspect import examine
from trt_layering.store.manifest import Halved, KeptNode


def told(folder: Path) -> tuple[dict, str]:
    report = examine(str(folder))
    json.dumps(report.data)
    assert all(line.isprintable() for line in report.lines)
    return report.data, "\n".join(" ".join(line.split()) for line in report.lines)


def test_a_chain_whose_blocks_share_an_engine(tmp_path):
    data, text = told(publish(tmp_path))
    assert data["tensorrt"]["binding"] == "inputs"
    assert [one["binding"] for one in data["tensorrt"]["candidates"]] == ["inputs", "refit", "swap"]
    assert [block["plan_bytes"] for block in data["blocks"]] == [1 << 17] * 2
    assert {block["file"] for block in data["blocks"]} == {"block-000.plan"}
    for words in (
        "binding inputs: weights are inputs of the engines",
        "placement staged: read into pinned memory, then copied",
        "tried inputs: 12.50 ms, taken: the fastest that answers rightly",
        "tried swap: block-001 differs by 0.3",
        "shapes x 1x1x4 to 1x32x4, mostly 1x8x4",
        "plan of 128.0 KiB, block-000.plan shared with 1 more",
    ):
        assert words in text


def test_a_chain_whose_plans_are_its_weights(tmp_path):
    data, text = told(publish(tmp_path, binding="swap"))
    assert [block["plan_bytes"] for block in data["blocks"]] == [1 << 17] * 2
    assert "binding swap: plans hold their weights" in text
    assert told(tmp_path / "tiny/1/weights.bin")[0] == data


def test_a_plan_that_is_gone_is_no_reason_to_tell_nothing(tmp_path):
    folder = publish(tmp_path)
    (folder / "block-000.plan").unlink()
    data, text = told(folder)
    assert data["blocks"][0]["plan_bytes"] is None
    assert "no plan" in text


def test_what_stays_float32_is_told_by_operator(tmp_path):
    kept = [KeptNode(name=f"n{i}", op_type="Softmax", reason="compared") for i in range(2)]
    kept.append(KeptNode(name="q", op_type="Quantize\x1b[2J", reason="type"))
    halved = (
        Halved(block="block-000", max_rel_diff=0.002, halved=5, kept=tuple(kept), saved_bytes=1 << 20),
        Halved(block="block-001", max_rel_diff=0.005, halved=4, kept=()),
    )
    data, text = told(publish(tmp_path, precision="fp16", halved=halved))
    assert [one["halved"] for one in data["halved"]] == [5, 4]
    assert data["halved"][0]["kept"][0] == {"name": "n0", "op_type": "Softmax", "reason": "compared"}
    assert "9 nodes compute in float16, 3 stay float32; that changes a block's output by 0.005" in text
    assert "block-000 5 1.0 MiB 0.002 2 Softmax (compared), 1 Quantize\\x1b[2J (type)" in text
    assert "weights fp16 where that is computed in" in text


def test_other_chains_have_no_plans(tmp_path):
    data, text = told(publish_tiny(tmp_path))
    assert data["tensorrt"] is None
    assert {block["plan_bytes"] for block in data["blocks"]} == {None}
    assert not {"binding", "placement"} & {line.partition(" ")[0] for line in text.splitlines()}


def test_a_plan_by_itself(tmp_path):
    (tmp_path / "any").write_bytes(plan())
    data, text = told(tmp_path / "any")
    assert (data["tensorrt_version"], data["bytes"]) == ("10.3.0.26", 1 << 17)
    assert "a TensorRT plan of 128.0 KiB, built by TensorRT 10.3.0.26" in text


@pytest.mark.parametrize("name", ["a.plan", "a.engine", "a.trt"])
def test_a_plan_that_is_none_any_more_is_told_by_its_name(tmp_path, name):
    (tmp_path / name).write_bytes(plan().decode("utf-8", "replace").encode())
    with pytest.raises(CorruptError, match="ef bf bd") as caught:
        examine(str(tmp_path / name))
    assert caught.value.where == str(tmp_path / name)
