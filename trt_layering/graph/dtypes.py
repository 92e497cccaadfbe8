"""The manifest's words for ONNX's dtypes. May import onnx_ir; nothing here raises."""

from __future__ import annotations

import onnx_ir as ir

_WORDS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}


def word(dtype: ir.DataType) -> str:
    """The manifest's word for `dtype`."""
    return _WORDS.get(dtype, dtype.name.lower())
