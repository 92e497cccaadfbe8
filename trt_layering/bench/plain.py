"""Plain ONNX Runtime over the uncut model: in memory, and mapped from its file. Imports onnxruntime in functions only.

What ONNX Runtime raises comes as BackendError or MemoryLimitError, from `mapped_session` as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime as ort

PROCESS_BYTES = 96 << 20
"""What a Python process with ONNX Runtime takes: the limit of a mapped model's group is this beside the budget."""
_LEAST_EXTERNAL = "1024"  # bytes from which on a tensor of the optimised model is external data


def in_memory(model: str) -> ort.InferenceSession:
    """A session as users have it by default: optimised, weights copied and prepacked."""
    import onnxruntime as ort

    from trt_layering.backends.onnxruntime.runtime import PROVIDERS, reported, uncut_options

    with reported(f"the uncut model {model}"):
        return ort.InferenceSession(model, uncut_options(optimised=True), providers=PROVIDERS)


def optimise(model: str, target: str) -> None:
    """Writes `model`, optimised with its real weights, to `target` with external data beside it."""
    import onnxruntime as ort

    from trt_layering.backends.onnxruntime.runtime import reported

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    options.optimized_model_filepath = target
    options.add_session_config_entry("session.disable_prepacking", "1")
    external = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{external}_file_name", f"{Path(target).name}.data")
    options.add_session_config_entry(f"{external}_min_size_in_bytes", _LEAST_EXTERNAL)
    with reported(f"the uncut model {model}"):
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def mapped_session(model: str, level: str) -> ort.InferenceSession:
    """A session that leaves external weights where ONNX Runtime maps them; `level` names a GraphOptimizationLevel."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
