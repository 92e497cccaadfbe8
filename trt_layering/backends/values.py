"""Values of a graph in the manifest's words. May import onnx_ir, the graph's words and the manifest's types; a value of
unknown type raises BuildError."""

from __future__ import annotations

import onnx_ir as ir

from trt_layering.errors import BuildError
from trt_layering.graph.dtypes import word
from trt_layering.store.manifest import Value


def as_value(value: ir.Value) -> Value:
    """The manifest's description of `value`. Raises BuildError if its type is unknown or not a tensor's."""
    dtype = value.dtype
    if value.name is None or dtype is None or not isinstance(value.type, ir.TensorType):
        raise BuildError(
            f"the type of {value.name!r} is not known or not a tensor's", remedy="give the model types, or simplify it"
        )
    dims = None if value.shape is None else tuple(d if isinstance(d, int) else d.value or None for d in value.shape)
    return Value(name=value.name, dtype=word(dtype), shape=dims)
