"""What a block's ONNX file says of its streamed weights, without loading them.

May import errors and the store. A file that cannot be read, or lacks one of the weights, raises ModelError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx
import xxhash
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from trt_layering.errors import ModelError
from trt_layering.store.manifest import DTYPE_BITS

_PIECE = 8 << 20
_WORDS = {"float": "float32", "double": "float64"}


@dataclass(frozen=True)
class Kind:
    """A weight's dtype, in the manifest's word, and its elements."""

    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        return -(-self.count * DTYPE_BITS[self.dtype] // 8)


@dataclass(frozen=True)
class BlockFile:
    """An opened block; `weights` are its initializers or inputs of these names, in the order asked for."""

    path: Path
    weights: dict[str, Kind]
    _graph: onnx.GraphProto

    @staticmethod
    def open(path: Path, weights: Sequence[str]) -> BlockFile:
        try:
            graph = onnx.load(path, load_external_data=False).graph
            known = {value.name: _kind_of_input(value) for value in graph.input if value.name in weights}
            known.update((tensor.name, _kind(tensor.data_type, tensor.dims)) for tensor in graph.initializer)
            return BlockFile(path, {name: known[name] for name in weights}, graph)
        except KeyError as error:
            raise ModelError(f"the block has no weight {error}", where=str(path)) from error
        except Exception as error:  # onnx raises whatever its parts do
            raise ModelError(f"the block cannot be read: {error}", where=str(path)) from error

    @property
    def weight_bytes(self) -> int:
        return sum(kind.nbytes for kind in self.weights.values())

    def values_digest(self) -> str:
        """xxh3-128 (hex) of the weights' values, in their order. Raises OSError."""
        digest = xxhash.xxh3_128()
        tensors: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in self._graph.initializer}
        for tensor in (tensors[name] for name in self.weights):
            if uses_external_data(tensor):
                self._add(digest, ExternalDataInfo(tensor))
            else:
                digest.update(tensor.SerializeToString(deterministic=True))
        return digest.hexdigest()

    def _add(self, digest: xxhash.xxh3_128, place: ExternalDataInfo) -> None:
        with open(self.path.parent / place.location, "rb", buffering=0) as file:
            file.seek(place.offset or 0)
            left = place.length or 0
            while left and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)


def _kind_of_input(value: onnx.ValueInfoProto) -> Kind:
    tensor = value.type.tensor_type
    return _kind(tensor.elem_type, [dim.dim_value for dim in tensor.shape.dim])


def _kind(data_type: int, dims: Sequence[int]) -> Kind:
    word = str(onnx.TensorProto.DataType.Name(data_type)).lower()
    return Kind(_WORDS.get(word, word), prod(dims))
