"""The protocol's datatypes, in the manifest's words and numpy's. May import errors and `backends.arena`; a dtype that
the protocol has not raises ModelError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_layering.backends.arena import dtype_of
from trt_layering.errors import ModelError


@dataclass(frozen=True)
class Datatype:
    """`name` is the protocol's ("FP32"), `word` the manifest's ("float32"), `config` that of model configurations
    ("TYPE_FP32"). `nbytes` is of one element, 0 for BYTES. `in_json`: whether JSON may hold its elements."""

    name: str
    word: str
    config: str
    nbytes: int
    in_json: bool = True

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy's; objects, which are str, for BYTES."""
        return np.dtype(object) if self.nbytes == 0 else dtype_of(self.word)


DATATYPES: Mapping[str, Datatype] = {
    one.name: one
    for one in (
        Datatype("BOOL", "bool", "TYPE_BOOL", 1),
        *(Datatype(f"UINT{bits}", f"uint{bits}", f"TYPE_UINT{bits}", bits // 8) for bits in (8, 16, 32, 64)),
        *(Datatype(f"INT{bits}", f"int{bits}", f"TYPE_INT{bits}", bits // 8) for bits in (8, 16, 32, 64)),
        Datatype("FP16", "float16", "TYPE_FP16", 2, in_json=False),
        Datatype("BF16", "bfloat16", "TYPE_BF16", 2, in_json=False),
        Datatype("FP32", "float32", "TYPE_FP32", 4),
        Datatype("FP64", "float64", "TYPE_FP64", 8),
        Datatype("BYTES", "string", "TYPE_STRING", 0),
    )
}
"""By the protocol's name."""

_BY_WORD = {one.word: one for one in DATATYPES.values()}


def datatype_of(word: str, where: str) -> Datatype:
    """The datatype that the manifest calls `word`. ModelError if the protocol has none, about the value `where`."""
    if word not in _BY_WORD:
        raise ModelError(
            f"the protocol has no datatype for {word}",
            where=where,
            remedy="give the model a Cast there, or run it here",
        )
    return _BY_WORD[word]
