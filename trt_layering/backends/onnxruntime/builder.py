"""Prepares a model for ONNX Runtime's CPU provider on this machine, and writes its blocks.

May import the graph room, onnx-ir and onnxruntime. A graph that ONNX Runtime refuses raises BackendError.

Preparing is ONNX Runtime's own optimisation with the real weights: fusions, constants folded, convolutions in blocked
layouts with reordered weights. Blocks are cut inside the prepared graph, so seams cost neither fusions nor layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.base import Progress
from trt_layering.backends.onnxruntime import machine
from trt_layering.backends.onnxruntime.session import inline
from trt_layering.backends.onnxruntime.windows import prepared_windows
from trt_layering.store.manifest import WEIGHTS_FILE


class OnnxRuntimeBuilder:
    """See `backends.base.Builder`."""

    name = "onnxruntime"
    suffix = ".onnx"

    version = staticmethod(machine.version)
    fingerprint = staticmethod(machine.fingerprint)

    def prepare(self, model: ir.Model, work: Path, memory: int, progress: Progress) -> list[ir.Model]:
        """Windows of `model` as ONNX Runtime optimises them, typed; their folded weights are files in `work`."""
        return prepared_windows(model, work, memory, progress, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)

    def write_engine(self, block: ir.Model, path: Path, places: Mapping[str, tuple[int, int]]) -> None:
        """Write `block` as an ONNX model whose weights in `places` are external data in `weights.bin`."""
        for name, value in block.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = (
                ir.ExternalTensor(WEIGHTS_FILE, *places[name], tensor.dtype, shape=shape, name=name)
                if name in places
                else inline(tensor)
            )
        used = {node.domain for node in block.graph.all_nodes()}
        for domain in [domain for domain in block.graph.opset_imports if domain not in used and domain]:
            del block.graph.opset_imports[domain]
        ir.save(block, path)
