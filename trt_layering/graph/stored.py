"""A tensor that lies in a file and is read when somebody asks for it.

May import numpy and onnx_ir. The file must stay as it is meanwhile; one that has gone raises OSError at the read.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import numpy as np
import onnx_ir as ir


class MappedFile:
    """The file at `path`, mapped once for all who read from it and only as long as one of their arrays lives.

    A mapping holds a file descriptor, and a model can have more tensors than a process may have descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: weakref.ref[mmap.mmap] | None = None

    def mapping(self) -> mmap.mmap:
        """The whole file, read-only."""
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None:
            with self.path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._mapping = weakref.ref(mapping)
        return mapping


class StoredTensor(ir.LazyTensor):
    """`shape` elements of `dtype`, little-endian and in C order, from byte `offset` of `file` on.

    `numpy()` is a read-only view of the mapped file, but for elements under a byte, which are unpacked into memory.
    Serialised, the tensor is written out; it is no reference to its file.
    """

    def __init__(self, file: MappedFile, offset: int, dtype: ir.DataType, shape: ir.Shape, name: str) -> None:
        super().__init__(self._read, dtype, shape, name=name)
        self.file = file
        self.offset = offset

    def _read(self) -> ir.TensorProtocol:
        dims = self.shape.numpy()
        if self.dtype.bitwidth < 8:
            shape = ir.Shape(dims, frozen=True)
            return ir.ExternalTensor(self.file.path, self.offset, None, self.dtype, shape=shape, name=self.name or "")
        kind = self.dtype.numpy().newbyteorder("<")
        if self.size == 0:
            return ir.Tensor(np.empty(dims, kind), self.dtype)
        array = np.frombuffer(self.file.mapping(), kind, count=self.size, offset=self.offset)
        return ir.Tensor(array.reshape(dims), self.dtype)


def unmapped(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """`tensor` such that nothing of its file stays mapped once its array has gone; onnx-ir's own keep theirs."""
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8:
        return tensor
    shape = ir.Shape(tensor.shape.numpy(), frozen=True)
    return StoredTensor(MappedFile(Path(tensor.path)), tensor.offset or 0, tensor.dtype, shape, tensor.name)
