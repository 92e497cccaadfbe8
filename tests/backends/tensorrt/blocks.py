"""Blocks in their canonical form, as files, and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trt_layering.backends.tensorrt.plans import PlanRequest
from trt_layering.store.manifest import Binding, Range

WEIGHTS = {"w0": (4, 8), "w1": (8,)}


def block(path: Path, form: Literal["inputs", "constants"], *, seed: int = 0) -> Path:
    """A file of o0 = relu(i0 · w0 + w1), i0 being [n, 4]; constants lie in a file beside it."""
    rng = np.random.default_rng(seed)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in (("i0", 4), ("o0", 8))
    ]
    values = [numpy_helper.from_array(rng.random(shape, np.float32), name) for name, shape in WEIGHTS.items()]
    weights = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in WEIGHTS.items()]
    nodes = [
        helper.make_node("MatMul", ["i0", "w0"], ["v0"], name="n0"),
        helper.make_node("Add", ["v0", "w1"], ["v1"], name="n1"),
        helper.make_node("Relu", ["v1"], ["o0"], name="n2"),
    ]
    inputs, constants = ([ends[0], *weights], []) if form == "inputs" else ([ends[0]], values)
    graph = helper.make_graph(nodes, "block", inputs, [ends[1]], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.with_suffix(".data").unlink(missing_ok=True)
    onnx.save(
        model,
        path,
        save_as_external_data=form == "constants",
        location=path.with_suffix(".data").name,
        size_threshold=0,
    )
    return path


def request(folder: Path, binding: Binding = "inputs", *, seed: int = 0, **changed: Any) -> PlanRequest:
    """Of a new file in `folder`; `changed` fields are as given."""
    file = block(folder / f"{binding}-{seed}.onnx", "inputs" if binding == "inputs" else "constants", seed=seed)
    ranges = {"i0": Range(min=(1, 4), opt=(2, 4), max=(8, 4))}
    fields: dict[str, Any] = {
        "name": "block-000", "onnx": file, "binding": binding, "shared": False, "weights": tuple(WEIGHTS),
        "profile": ranges, "key": "k0",
    }  # fmt: skip
    return PlanRequest(**{**fields, **changed})
