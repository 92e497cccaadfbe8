"""What a prepared graph depends on: ONNX Runtime's version and the CPU's instruction sets. Imports onnxruntime."""

from __future__ import annotations

import platform
from pathlib import Path

import onnxruntime as ort

_INSTRUCTION_SETS = (
    "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni",
    "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip


def version() -> str:
    """ONNX Runtime's version."""
    return str(ort.__version__)


def fingerprint() -> dict[str, str]:
    """The processor's family and those of its instruction sets that ONNX Runtime chooses layouts and kernels by."""
    return {"machine": platform.machine(), "instructions": " ".join(s for s in _INSTRUCTION_SETS if s in _cpu_flags())}


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
