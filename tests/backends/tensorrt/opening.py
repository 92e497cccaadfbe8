"""Chains of TensorRT engines, built and opened on the emulated GPU, and small models that are odd in one way each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.chains import WIDTH, Feeds, in_this_process, model
from tests.emulation.install import installed
from trt_layering.building import Built, build
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import Binding, Placement, write_manifest

BOUND: tuple[tuple[Binding, Placement], ...] = (
    ("inputs", "staged"), ("inputs", "zero-copy"), ("inputs", "managed"),
    ("refit", "staged"), ("refit", "zero-copy"), ("refit", "managed"), ("swap", "pinned"),
)  # fmt: skip
VERSIONS = ("10.3", "10.7", "10.13", "10.16", "11.0", "11.4")
BLOCK = "16KiB"
_STAGING = 256 << 10


@contextmanager
def emulated_gpu(**switches: str) -> Iterator[Any]:
    """The emulated machine; on leaving, nothing may be misused or left."""
    with installed(**switches) as machine:
        yield machine
        machine.assert_clean()


def make(path: Path, repository: Path, binding: str, *, version: str = "10.3", **options: Any) -> Built:
    """The model at `path`, built for `binding` without child processes."""
    options = {"block_size": BLOCK, "placement": "staged", "split": False, **options}
    with emulated_gpu(tensorrt=version), in_this_process():
        return build(path, repository=repository, backend="tensorrt", binding=binding, **options)


def put(built: Built, placement: Placement, folder: Path, memory: str = "integrated") -> Built:
    """A copy of a chain in `folder`, with its weights to pass through `placement` of a GPU with such `memory`, and with
    little to read into, so that reads wait for each other."""
    path = folder / built.path.parent.name / built.path.name
    shutil.copytree(built.path, path)
    manifest, replace = built.manifest, msgspec.structs.replace
    assert manifest.tensorrt is not None
    staging = _STAGING if placement == "staged" else 0
    manifest = replace(
        manifest,
        tensorrt=replace(manifest.tensorrt, placement=placement),
        backend=replace(manifest.backend, fingerprint={**manifest.backend.fingerprint, "memory": memory}),
        memory=replace(manifest.memory, staging=staging),
    )
    write_manifest(path, manifest)
    return Built(path, manifest)


def switches_for(placement: Placement, memory: str = "integrated", seed: int = 0) -> dict[str, str]:
    """A machine that has `placement`."""
    integrated = "1" if memory == "integrated" else "0"
    return {"integrated": integrated, "concurrent_managed": "1", "seed": str(seed)}


SMALL_READS = LoaderOptions(threads=2, read_size=4096, verify="always")


def of_the_driver(chain: Chain) -> list[str]:
    """What is said of memory beyond what was planned; a drive may be slow meanwhile, which is said as well."""
    return [words for words in chain.stats()["fallbacks"] if "the GPU gave" in words]


# Models


def _value(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _weights(*names: str, seed: int = 0) -> list[onnx.TensorProto]:
    rng = np.random.default_rng(seed)
    return [numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH), np.float32) / 8, name) for name in names]


def _chained(count: int, begin: str, end: str, prefix: str = "") -> tuple[list[onnx.NodeProto], list[str]]:
    """Layers from `begin` to `end`, and the names of their weights."""
    nodes, at, names = [], begin, []
    for index in range(count):
        out = end if index == count - 1 else f"{prefix}h{index}"
        names.append(f"{prefix}w{index}")
        nodes.append(helper.make_node("MatMul", [at, names[-1]], [f"{prefix}m{index}"]))
        nodes.append(helper.make_node("Tanh", [f"{prefix}m{index}"], [out]))
        at = out
    return nodes, names


def several_ends() -> onnx.ModelProto:
    """Two inputs that come in at different places; outputs from the first and the last block, and one used inside."""
    first, names = _chained(2, "x", "inner")
    second, more = _chained(2, "mixed", "y", "b")
    nodes = [
        helper.make_node("Identity", ["h0"], ["early"]), helper.make_node("Add", ["inner", "z"], ["mixed"]),
    ]  # fmt: skip
    ends = [_value("x", ["n", WIDTH]), _value("z", ["n", WIDTH])]
    outs = [_value("y", ["n", WIDTH]), _value("inner", ["n", WIDTH]), _value("early", ["n", WIDTH])]
    return model([*first[:2], nodes[0], *first[2:], nodes[1], *second], ends, outs, _weights(*names, *more))


def shared_weights() -> onnx.ModelProto:
    """One weight used in two blocks, far from each other."""
    nodes, names = _chained(3, "x", "t")
    nodes.append(helper.make_node("MatMul", ["t", "w0"], ["y"]))
    return model(nodes, [_value("x", ["n", WIDTH])], [_value("y", ["n", WIDTH])], _weights(*names))


def without_weights() -> onnx.ModelProto:
    """Between blocks with weights, one without."""
    nodes, names = _chained(1, "x", "a")
    nodes += [helper.make_node("Softmax", ["a"], ["s"], axis=1), helper.make_node("Sqrt", ["s"], ["r"])]
    more, others = _chained(1, "r", "y", "b")
    return model([*nodes, *more], [_value("x", ["n", WIDTH])], [_value("y", ["n", WIDTH])], _weights(*names, *others))


def rows() -> onnx.ModelProto:
    """Rows of a table, then layers."""
    nodes, names = _chained(2, "e", "y")
    table = numpy_helper.from_array(np.random.default_rng(1).standard_normal((4096, WIDTH), np.float32), "table")
    gather = helper.make_node("Gather", ["table", "ids"], ["e"], axis=0)
    ends = [_value("ids", ["n"], TensorProto.INT64)]
    return model([gather, *nodes], ends, [_value("y", ["n", WIDTH])], [table, *_weights(*names)])


def kinds() -> onnx.ModelProto:
    """A mask of bool and counts of int64 beside floats, and outputs of both kinds."""
    nodes, names = _chained(2, "chosen", "y")
    head = [
        helper.make_node("Cast", ["counts"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Where", ["mask", "x", "f"], ["chosen"]),
    ]
    tail = [
        helper.make_node("Greater", ["y", "f"], ["above"]),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ]
    ends = [
        _value("x", ["n", WIDTH]), _value("mask", ["n", WIDTH], TensorProto.BOOL),
        _value("counts", ["n", WIDTH], TensorProto.INT64),
    ]  # fmt: skip
    outs = [
        _value("y", ["n", WIDTH]), _value("above", ["n", WIDTH], TensorProto.BOOL),
        _value("best", ["n"], TensorProto.INT64),
    ]  # fmt: skip
    return model([*head, *nodes, *tail], ends, outs, _weights(*names))


def scalars() -> onnx.ModelProto:
    """A scalar in, a scalar out, and one between blocks."""
    nodes, names = _chained(2, "scaled", "y")
    head = [helper.make_node("Mul", ["x", "by"], ["scaled"])]
    middle = [helper.make_node("ReduceMean", ["h0"], ["mean"], keepdims=0)]
    tail = [helper.make_node("Mul", ["mean", "by"], ["s"])]
    ends = [_value("x", ["n", WIDTH]), _value("by", [])]
    return model(
        [*head, *nodes[:2], *middle, *nodes[2:], *tail],
        ends,
        [_value("y", ["n", WIDTH]), _value("s", [])],
        _weights(*names),
    )


def narrow() -> onnx.ModelProto:
    """Activations of bfloat16 between blocks."""
    nodes, names = _chained(2, "x", "y")
    nodes[1].output[0] = "wide"
    casts = [
        helper.make_node("Cast", ["wide"], ["b"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["b"], ["h0"], to=TensorProto.FLOAT),
    ]
    return model(
        [*nodes[:2], *casts, *nodes[2:]], [_value("x", ["n", WIDTH])], [_value("y", ["n", WIDTH])], _weights(*names)
    )


def seeded(proto: onnx.ModelProto, size: int, seed: int) -> Feeds:
    """Inputs of `proto`, `size` being the dim that varies."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [size if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type == TensorProto.FLOAT:
            feeds[value.name] = np.asarray(rng.standard_normal(shape, np.float32), np.float32)
        else:
            high = 2 if kind.elem_type == TensorProto.BOOL else 512
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            feeds[value.name] = rng.integers(0, high, shape).astype(dtype)
    return feeds


ODD: dict[str, Callable[[], onnx.ModelProto]] = {
    "several ends": several_ends, "shared weights": shared_weights, "without weights": without_weights, "rows": rows,
    "kinds": kinds, "scalars": scalars, "narrow": narrow,
}  # fmt: skip


def spans(proto: onnx.ModelProto, low: int = 1, usual: int = 2, high: int = 5) -> dict[str, Any]:
    """For `build`'s `shapes`: ranges of the inputs whose size varies."""
    found = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            shapes = [[n if dim.dim_param else dim.dim_value for dim in dims] for n in (low, usual, high)]
            found[value.name] = dict(zip(("min", "opt", "max"), shapes, strict=True))
    return found
