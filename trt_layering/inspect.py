"""What is in a built chain, in a block's engine file or in a TensorRT plan, told without running or changing anything.

May import the graph, the store, the footprint, the headers of plans and the words of `profiling`. What cannot be told
raises the error that says why: a chain or plan that is not there or damaged a StoreError, a file of no known kind a
UsageError, a damaged ONNX file a ModelError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir

from trt_layering.backends.tensorrt import plan_file
from trt_layering.costs import cost_lines, costs, halves
from trt_layering.errors import StoreError, UsageError
from trt_layering.graph.stored import StoredTensor
from trt_layering.profiling import describe
from trt_layering.runtime.footprint import Footprint
from trt_layering.shapes import format_shape
from trt_layering.store.manifest import (
    MANIFEST_FILE,
    MANIFEST_LIMIT,
    SCHEDULES_FILE,
    WEIGHTS_FILE,
    Block,
    Chain,
    Part,
    TensorRt,
    Value,
    open_plain,
    read_manifest,
    resolve,
)
from trt_layering.table import columns
from trt_layering.units import format_size
from trt_layering.words import first_of, printable

_PLANS = (".plan", ".engine", ".trt")
_HEADER = 64  # bytes
_MOST_OPERATORS = 12
_MOST_COSTS = 10  # blocks
_BINDINGS = {
    "inputs": "weights are inputs of the engines, which take them where they lie; equal blocks share a plan",
    "refit": "weights are put into the engines each time they have arrived",
    "swap": "plans hold their weights, and come and go with them",
}
_PLACEMENTS = {
    "staged": "read into pinned memory, then copied to the GPU's",
    "zero-copy": "read into pinned memory, which the GPU uses in its place",
    "managed": "read into memory that the driver manages for both",
    "pinned": "read into pinned memory",
}


@dataclass(frozen=True)
class Report:
    """`data` is what was found, with bytes and seconds as plain numbers; `lines` the same for people."""

    data: dict[str, Any]
    lines: Sequence[str]


def examine(target: str, *, repository: str | Path = "engines", version: int | None = None) -> Report:
    """Tell what `target` is: an engine file, a plan, a chain's folder or one of its files, or a chain of `repository`.

    Reads the manifest, or one file, but never weights.
    """
    path = Path(target)
    if path.is_file():
        return _file(path)
    if path.is_dir() and (path / MANIFEST_FILE).exists():
        return _chain(path)
    return _chain(resolve(Path(repository), target, version))


def _file(path: Path) -> Report:
    with path.open("rb") as file:
        head = file.read(plan_file.SAMPLE)
    if path.name in (MANIFEST_FILE, SCHEDULES_FILE, WEIGHTS_FILE):
        return _chain(path.parent)
    if head.startswith(b"ftrt") or path.suffix in _PLANS:
        return _plan(path, head)
    if path.suffix == ".onnx":
        return _onnx(path)
    remedy = f"name a chain, its folder, {MANIFEST_FILE}, an .onnx file or a TensorRT plan"
    raise UsageError(f"{path.name!r} is no file of a chain", where=str(path), remedy=remedy)


class _Table(msgspec.Struct):
    table: list[msgspec.Raw]


def _schedules(folder: Path) -> int | None:
    """For how many sizes of arena `folder` has a schedule; None where it has no table, or one that cannot be read."""
    try:
        with open(open_plain(folder / SCHEDULES_FILE), "rb") as file:
            return len(msgspec.json.decode(file.read(MANIFEST_LIMIT), type=_Table).table)
    except (OSError, StoreError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _plan(path: Path, head: bytes) -> Report:
    version = plan_file.read(head, where=str(path)).words
    size = path.stat().st_size
    data = {"kind": "plan", "path": str(path), "bytes": size, "tensorrt_version": version}
    what = f"a TensorRT plan of {format_size(size)}"
    if size <= _HEADER:
        what = f"the beginning of a TensorRT plan, the whole of which lies in {WEIGHTS_FILE}"
    return Report(data, [f"{path}: {what}, built by TensorRT {version}"])


def _chain(folder: Path) -> Report:
    chain = read_manifest(folder)
    footprint = Footprint.of(chain)
    data = {
        "kind": "chain", "name": chain.name, "version": folder.name, "path": str(folder), "format": chain.format,
        "source": chain.source, "source_digest": chain.source_digest, "precision": chain.precision,
        "optimised": chain.optimised, "block_size": chain.block_size, "weights_bytes": chain.weights_bytes,
        "floor_bytes": footprint.floor, "floor_parts": footprint.parts, "resident_bytes": footprint.resident,
        "backend": {"name": chain.backend.name, "version": chain.backend.version, **chain.backend.fingerprint},
        "inputs": [_value(value) for value in chain.inputs],
        "outputs": [_value(value) for value in chain.outputs],
        "blocks": [_block(chain, index, folder) for index in range(len(chain.blocks))],
        "joined": [_joined(part) for part in chain.joined], "schedules": _schedules(folder),
        "check": {"max_abs_diff": chain.check.max_abs_diff, "max_abs_output": chain.check.max_abs_output},
        "profile": msgspec.to_builtins(chain.profile),
        "weights": chain.weights, "narrowed": costs(chain), "halved": halves(chain),
        "tensorrt": None if chain.tensorrt is None else msgspec.to_builtins(chain.tensorrt),
    }  # fmt: skip
    return Report(data, _chain_lines(chain, footprint, data))


def _chain_lines(chain: Chain, footprint: Footprint, data: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in footprint.parts.items())
    how = "optimised" if chain.optimised else "as the model is"
    facts = [
        ("chain", f"{chain.name} version {data['version']}, {data['path']}"),
        ("made from", chain.source),
        ("by", f"{chain.backend.name} {chain.backend.version}, {chain.precision}, {how}"),
        (
            "weights",
            f"{_stored(chain)}, {format_size(chain.weights_bytes)} in blocks of up to {format_size(chain.block_size)}",
        ),
        ("joined", _joined_text(len(chain.joined))),
        ("schedules", _schedules_text(data["schedules"])),
        ("floor", f"{format_size(footprint.floor)}: {parts}"),
        ("all in memory", format_size(footprint.resident)),
        ("check", f"differs from the uncut model by {chain.check.max_abs_diff:.3g}"),
        *(engine_facts(chain.tensorrt, chain.inputs) if chain.tensorrt is not None else ()),
        *describe(chain),
        *(("input", _text(value)) for value in chain.inputs),
        *(("output", _text(value)) for value in chain.outputs),
    ]
    users = Counter(block.file for block in chain.blocks)
    blocks = [
        (
            block["name"],
            _size(block),
            f"{block['tensors']} weights",
            *((_plan_text(block, users),) if chain.tensorrt is not None else ()),
            _time(block),
            _names(block["outputs"]),
        )
        for block in data["blocks"]
    ]
    told = cost_lines(chain, _MOST_COSTS)
    return [*columns(facts), "", *columns(blocks), *(["", *told] if told else [])]


def _stored(chain: Chain) -> str:
    return "fp16 where that is computed in" if chain.precision == "fp16" else chain.weights


def engine_facts(tensorrt: TensorRt, inputs: Sequence[Value]) -> list[tuple[str, str]]:
    """How a chain of TensorRT engines gets its weights, why so, and for which shapes of `inputs` they were built."""
    facts = [
        ("binding", f"{tensorrt.binding}: {_BINDINGS[tensorrt.binding]}"),
        ("placement", f"{tensorrt.placement}: {_PLACEMENTS[tensorrt.placement]}"),
    ]
    for one in tensorrt.candidates:
        seconds = f"{one.seconds * 1e3:.2f} ms, " if one.seconds else ""
        facts.append(("tried", f"{one.binding}: {seconds}{printable(one.words)}"))
    for value in inputs:
        if (ends := tensorrt.ranges.get(value.name)) is not None:
            least, usual, most = (format_shape(shape) for shape in (ends.min, ends.opt, ends.max))
            facts.append(("shapes", f"{printable(value.name)}  {least} to {most}, mostly {usual}"))
    return facts


def _plan_bytes(chain: Chain, block: Block, folder: Path) -> int | None:
    """How large the plan of `block` is; None where the backend makes none or its file is not there."""
    if chain.tensorrt is None:
        return None
    if chain.tensorrt.binding == "swap":
        tensors = (tensor for index in block.extents for tensor in chain.extents[index].tensors)
        return next((tensor.nbytes for tensor in tensors if tensor.name.startswith(plan_file.PLAN)), None)
    try:
        return (folder / block.file).lstat().st_size
    except OSError:
        return None


def _plan_text(block: dict[str, Any], users: Mapping[str, int]) -> str:
    size = "no plan" if block["plan_bytes"] is None else f"plan of {format_size(block['plan_bytes'])}"
    others = users[block["file"]] - 1
    return f"{size}, {block['file']} shared with {others} more" if others else size


def _block(chain: Chain, index: int, folder: Path) -> dict[str, Any]:
    block = chain.blocks[index]
    seconds = chain.profile.execute_seconds
    return {
        "name": block.name, "file": block.file, "bytes": chain.block_bytes(index), "extents": list(block.extents),
        "rows": block.rows, "stored_bytes": sum(chain.extents[extent].length for extent in block.extents),
        "tensors": sum(len(chain.extents[extent].tensors) for extent in block.extents),
        "plan_bytes": _plan_bytes(chain, block, folder),
        "execute_ms": seconds[index] * 1e3 if seconds else None,
        "inputs": [_value(value) for value in block.inputs], "outputs": [_value(value) for value in block.outputs],
    }  # fmt: skip


def _joined(part: Part) -> dict[str, Any]:
    return {"name": part.block.name, "file": part.block.file, "first": part.first, "count": part.count}


def _joined_text(count: int) -> str:
    return "1 engine for a run of blocks" if count == 1 else f"{count or 'no'} engines for runs of blocks"


def _schedules_text(count: int | None) -> str:
    if count is None:
        return "none that can be read: made when the chain is opened"
    return f"for {count} {'size' if count == 1 else 'sizes'} of arena"


def _size(block: dict[str, Any]) -> str:
    return format_size(block["bytes"]) if block["rows"] is None else f"rows of {format_size(block['stored_bytes'])}"


def _time(block: dict[str, Any]) -> str:
    return "" if block["execute_ms"] is None else f"{block['execute_ms']:.2f} ms"


def _names(values: Sequence[dict[str, Any]]) -> str:
    return f"→ {first_of([value['name'] for value in values])}"


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.dtype, "shape": None if value.shape is None else list(value.shape)}


def _text(value: Value) -> str:
    shape = "of unknown rank" if value.shape is None else format_shape(value.shape)
    return f"{value.name}  {value.dtype} {shape}"


def _onnx(path: Path) -> Report:
    from trt_layering.graph.model import open_model

    model = open_model(path)
    graph = model.graph
    operators = Counter(f"{node.domain}:{node.op_type}".lstrip(":") for node in graph)
    opsets = {domain or "ai.onnx": version for domain, version in model.opset_imports.items()}
    weights = [_weight(value, path) for value in graph.initializers.values()]
    inputs, outputs = ([str(value.name) for value in values] for values in (graph.inputs, graph.outputs))
    data = {
        "kind": "onnx", "path": str(path), "ir_version": model.ir_version, "nodes": sum(operators.values()),
        "opsets": opsets, "operators": dict(operators.most_common()), "weights": weights,
        "inputs": inputs, "outputs": outputs,
    }  # fmt: skip
    total = format_size(sum(weight["bytes"] for weight in weights))
    lines = [
        f"{path}: an ONNX model of {data['nodes']} nodes with {len(weights)} weights of {total}",
        f"  opsets     {', '.join(f'{domain} {version}' for domain, version in opsets.items())}",
        f"  operators  {', '.join(f'{count} {name}' for name, count in operators.most_common(_MOST_OPERATORS))}",
        f"  inputs     {', '.join(inputs)}",
        f"  outputs    {', '.join(outputs)}",
    ]
    rows = [(weight["name"], format_size(weight["bytes"]), weight["place"]) for weight in weights]
    return Report(data, [*lines, *(f"  {line}" for line in columns(rows))])


def _weight(value: ir.Value, path: Path) -> dict[str, Any]:
    tensor = value.const_value
    assert tensor is not None, "initializers have values"
    place = "in the file"
    if isinstance(tensor, StoredTensor) and tensor.file.path.name != path.name:
        place = f"{tensor.file.path.name} at byte {tensor.offset}"
    return {"name": str(value.name), "bytes": tensor.nbytes, "place": place}
