"""Prepares a model for ONNX Runtime's CPU provider on this machine, and writes its blocks.

May import the graph room, onnx-ir and onnxruntime. A graph that ONNX Runtime refuses raises BackendError.

Preparing is ONNX Runtime's own optimisation with the real weights: fusions, constants folded, convolutions in blocked
layouts with reordered weights. Blocks are cut inside the prepared graph, so seams cost neither fusions nor layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from trt_layering.backends.base import CutBlock, Draft, Places, Progress
from trt_layering.backends.onnxruntime import machine
from trt_layering.backends.onnxruntime.session import inline
from trt_layering.backends.onnxruntime.windows import prepared_windows
from trt_layering.graph.cuts import Cut
from trt_layering.graph.dtypes import word
from trt_layering.graph.tables import rows_input
from trt_layering.shapes import ShapeRange
from trt_layering.store.manifest import WEIGHTS_FILE

log = logging.getLogger("trt_layering")

_STREAMED_FROM = 1024


class OnnxRuntimeBuilder:
    """See `backends.base.Builder`."""

    name = "onnxruntime"
    suffix = ".onnx"
    joins = True

    version = staticmethod(machine.version)
    fingerprint = staticmethod(machine.fingerprint)

    def prepare(self, model: ir.Model, work: Path, memory: int, progress: Progress) -> list[ir.Model]:
        """Windows of `model` as ONNX Runtime optimises them, typed; their folded weights are files in `work`."""
        return prepared_windows(model, work, memory, progress, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)

    def streamed(self, graph: ir.Graph) -> dict[str, int]:
        """Bytes of the initializers that go to the weight store. The others stay in their block's file: small ones,
        which some kernels read when a session is made, before any weights have been loaded, and those of a dtype that
        cannot be given by reference."""
        sizes = {}
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _STREAMED_FROM:
                continue
            if _numpy_can_alias(tensor.dtype):
                sizes[name] = tensor.nbytes
            else:
                log.warning("%s stays in memory: weights of %s cannot be streamed", name, word(tensor.dtype))
        return sizes

    def legal(self, graph: ir.Graph, cuts: Iterable[Cut]) -> list[Cut]:
        """All of them."""
        return list(cuts)

    def drafts(self, cuts: Sequence[CutBlock], ranges: Mapping[str, ShapeRange], progress: Progress) -> list[Draft]:
        """Each block as an ONNX file of its own."""
        return [self.draft(cut) for cut in cuts]

    def draft(self, cut: CutBlock) -> Draft:
        """`cut` as an ONNX model whose weights, as far as they have places, are external data in `weights.bin`."""
        graph = cut.graph.graph
        values = ((name, graph.initializers[name].const_value) for name in cut.weights)
        return Draft(
            stored={name: tensor for name, tensor in values if tensor is not None},
            inputs=list(graph.inputs),
            outputs=list(graph.outputs),
            engine=f"{id(cut):x}",
            write=partial(write_model, cut.graph),
            rows=rows_input(graph),
        )

    def tensorrt(self) -> None:
        """There is none here."""

    def published(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def _numpy_can_alias(dtype: ir.DataType) -> bool:
    return dtype == ir.DataType.BFLOAT16 or (
        dtype.bitwidth >= 8 and dtype.numpy().kind in "biuf" and "float8" not in word(dtype)
    )


def write_model(block: ir.Model, path: Path, places: Places) -> None:
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
