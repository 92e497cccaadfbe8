"""`chain.json`: the typed description of a built chain, its reading and its writing, and where finished chains lie.

May import errors and words. A file that is missing, changed by one bit, of another format version, or that says what
cannot be (bytes outside `weights.bin`, files outside its folder, activations nobody makes) raises a StoreError and is
not used. `docs/format.md` is the normative text of what is here.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from math import prod
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta

from trt_layering.errors import BuildError, CorruptError, ForeignError, NotBuiltError, ReadError, UsageError
from trt_layering.words import printable

FORMAT_VERSION = 3
_READABLE = (2, 3)
MANIFEST_FILE = "chain.json"
WEIGHTS_FILE = "weights.bin"
SCHEDULES_FILE = "schedules.json"
PAGE = 4096
TENSOR_ALIGNMENT = 64
MANIFEST_LIMIT = 64 * 1024 * 1024

DTYPE_BITS = {
    "bool": 8, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 64, "complex128": 128,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "float4e2m1": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
}  # fmt: skip
"""Bits of one element of each dtype a weight may have; elements under 8 bits are packed, lowest bits first."""

GATHERED = {
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64",
}  # fmt: skip
"""Dtypes of tables that may be read by rows."""

# What decoding raises: also for nesting too deep, and, by some versions, for field names that are not UTF-8.
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
VERSION_NAME = re.compile(r"[1-9][0-9]{0,8}")

Count = Annotated[int, Meta(ge=0, le=2**62)]
Pages = Annotated[int, Meta(ge=0, le=2**62, multiple_of=PAGE)]
Text = Annotated[str, Meta(min_length=1)]
PlainName = Annotated[str, Meta(pattern=rf"^{_PLAIN_NAME.pattern}\Z")]
Hash64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hash128 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Magnitude = Annotated[float, Meta(ge=0, le=1e18)]
Finite = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
Dim = Count | Text | None
Binding = Literal["inputs", "refit", "swap"]
Placement = Literal["staged", "zero-copy", "managed", "pinned"]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Value(_Record, frozen=True):
    """An activation, a model input or a model output. `dtype` is numpy's word ("float32"), or ONNX's where numpy has
    none ("bfloat16", "string"). A dim is a number, a symbol, or None where unknown; shape None: rank unknown."""

    name: Text
    dtype: Text
    shape: Annotated[tuple[Dim, ...], Meta(max_length=64)] | None


class Tensor(_Record, frozen=True):
    """One weight; `offset` counts from the start of its extent and is a multiple of 64."""

    name: Text
    dtype: Text
    shape: Shape
    offset: Annotated[int, Meta(ge=0, le=2**62, multiple_of=TENSOR_ALIGNMENT)]
    nbytes: Count


class Extent(_Record, frozen=True):
    """A run of `weights.bin` read as a whole: `offset` and `length` are multiples of 4096; `checksum` is xxh3-64 (hex)
    of all `length` bytes, padding included."""

    offset: Pages
    length: Pages
    checksum: Hash64
    tensors: tuple[Tensor, ...]


class Block(_Record, frozen=True):
    """One block: `file` is its engine, `digest` that file's xxh3-128 (hex), `extents` index `Chain.extents` in the
    order in which they lie in the arena. `inputs` and `outputs` are activations by name.

    A block with `rows` only gathers rows of a table, its one tensor: its one output has, for each number in the input
    called `rows`, that row. It can be executed without loading the table, see `runtime.rows`.

    `weights` are tensors by name, in the order in which a TensorRT engine numbers its weights (`w0`, `w1`, ...); its
    inputs and outputs are numbered as in `inputs` and `outputs`, so that equal blocks can share one."""

    name: PlainName
    file: PlainName
    digest: Hash128
    extents: tuple[Count, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rows: Text | None = None
    weights: tuple[Text, ...] = ()


class Part(_Record, frozen=True):
    """One engine that does what the `count` blocks from `first` on do, over the same extents in the same order."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=2**31)]
    block: Block


class Backend(_Record, frozen=True):
    """What built the chain, and what its engines depend on; both must match the machine that opens it."""

    name: str
    version: str
    fingerprint: dict[str, str]


class Memory(_Record, frozen=True):
    """Bytes beyond the arena, measured by the build's check at `shapes`: `activations` passed between blocks, `scratch`
    used inside blocks, `engines` the opened engines and the inference library's own state. Beside them, where a device
    executes: `staging` that reads land in, and `slots` for engines that come and go with their weights."""

    activations: Count
    scratch: Count
    engines: Count
    shapes: dict[str, Shape]
    staging: Count = 0
    slots: Count = 0


class Check(_Record, frozen=True):
    """How the finished chain compared with the uncut model on seeded inputs: largest absolute difference, and the
    largest absolute value of the uncut model's outputs. `tolerance` is how much an output may differ, as a part of its
    largest absolute value; 0: not by one bit."""

    max_abs_diff: Finite
    max_abs_output: Finite
    seed: Count
    tolerance: Magnitude = 1e-5


class Profile(_Record, frozen=True):
    """What this chain takes on one machine and one drive, both named so that others are noticed.

    `execute_seconds` of each of `Chain.parts`, from its weights being there until the next may begin; `read_seconds` of
    each extent by itself, in large stores of some, and of the others what they take at the rate of these. `read_rate`
    is the drive's in bytes per second while `threads` reads of up to `read_size` bytes are always under way, which were
    found best for it. While the drive reads, executing takes `execute_slowdown` times as long as alone, and reading
    `read_slowdown` times as long while a block executes. Times that were not measured are empty lists.
    `whole_seconds` is a run with everything in memory, laid out as engines like it best; 0: not measured.
    """

    execute_seconds: tuple[Magnitude, ...]
    read_seconds: tuple[Magnitude, ...]
    read_rate: Magnitude
    threads: Annotated[int, Meta(ge=1, le=64)]
    read_size: Annotated[int, Meta(ge=PAGE, le=2**40, multiple_of=PAGE)]
    execute_slowdown: Annotated[float, Meta(ge=1, le=1000)]
    read_slowdown: Annotated[float, Meta(ge=1, le=1000)]
    machine: dict[str, str]
    drive: str
    whole_seconds: Magnitude = 0.0


UNMEASURED = Profile(
    execute_seconds=(), read_seconds=(), read_rate=1e9, threads=2, read_size=4 << 20,
    execute_slowdown=1.0, read_slowdown=1.0, machine={}, drive="",
)  # fmt: skip
"""The profile of a chain that was never timed."""


class Narrowed(_Record, frozen=True):
    """What storing a block's weights in 16 bits cost: the largest difference that it made to the block's outputs on
    seeded inputs, as a part of the largest output, and the weights that stay as they were, since they cost too much;
    and the bytes that the other weights save."""

    block: PlainName
    max_rel_diff: Magnitude
    kept: tuple[Text, ...]
    saved_bytes: Count = 0


class KeptNode(_Record, frozen=True):
    """A node that stays float32, by its name and its operator, and why: in one word or two."""

    name: Text
    op_type: Text
    reason: Text


class Halved(_Record, frozen=True):
    """What computing in 16 bits does to a block: the largest difference that it made to the block's outputs on seeded
    inputs, as a part of the largest output; how many nodes compute in float16, and those that stay float32; and the
    bytes that its weights save. Where a block was cut further for want of memory, all is told of its first piece."""

    block: PlainName
    max_rel_diff: Magnitude
    halved: Count
    kept: tuple[KeptNode, ...]
    saved_bytes: Count = 0


class Range(_Record, frozen=True):
    """The shapes that a value may have, from the smallest to the largest, and the most usual."""

    min: Shape
    opt: Shape
    max: Shape


class Candidate(_Record, frozen=True):
    """A binding that the build tried: the seconds that a sweep was reckoned to take with it, 0 where it was not timed,
    and in words why it was taken or not."""

    binding: Binding
    seconds: Magnitude
    words: str


class TensorRt(_Record, frozen=True):
    """How a chain of TensorRT engines gets its weights: the `binding`, and the `placement` of the arena; the `ranges`
    for which its engines were built, of every value passed between blocks; `scratch`, the bytes that the hungriest
    engine takes while it executes; and what else was tried.

    With the binding "swap" a block's extent holds its whole plan, as one tensor of uint8 called "plan".
    """

    binding: Binding
    placement: Placement
    scratch: Count = 0
    ranges: dict[str, Range] = {}
    candidates: tuple[Candidate, ...] = ()


class Chain(_Record, frozen=True):
    """All that is known of a built chain. `extents` follow each other in `weights.bin` without gaps, from byte 0.

    `whole` is the same computation over the same extents in as few blocks as it was prepared in, for when all weights
    stay in memory and seams would only cost; it is empty where `blocks` are no more than that. `joined` are engines
    for runs of `blocks`, of which a schedule may use any in place of those. `weights` is how weights of float32 are
    stored: "fp32", "fp16" or "bf16"; `narrowed` says what that cost, and `halved` what precision "fp16" does.
    `tensorrt` is there for chains of that backend.
    """

    format: int
    name: PlainName
    source: str
    source_digest: str
    backend: Backend
    precision: str
    optimised: bool
    block_size: Count
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    extents: tuple[Extent, ...]
    blocks: tuple[Block, ...]
    memory: Memory
    profile: Profile
    check: Check
    whole: tuple[Block, ...] = ()
    joined: tuple[Part, ...] = ()
    weights: Literal["fp32", "fp16", "bf16"] = "fp32"
    narrowed: tuple[Narrowed, ...] = ()
    halved: tuple[Halved, ...] = ()
    tensorrt: TensorRt | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a schedule may execute: `blocks`, each a part by itself, then `joined`."""
        return (*(Part(first=i, count=1, block=block) for i, block in enumerate(self.blocks)), *self.joined)

    @property
    def usual_shapes(self) -> dict[str, Shape]:
        """The most usual shapes of the inputs, where engines were built for ranges of them."""
        ranges = {} if self.tensorrt is None else self.tensorrt.ranges
        return {value.name: ranges[value.name].opt for value in self.inputs if value.name in ranges}

    def block_bytes(self, index: int) -> int:
        """Arena bytes that block `index` needs: its extents one after the other; none where it reads rows."""
        block = self.blocks[index]
        return 0 if block.rows is not None else sum(self.extents[e].length for e in block.extents)

    @property
    def loaded_bytes(self) -> int:
        """Arena bytes that all blocks need beside each other, with the tables of those that can read rows."""
        return sum(self.extents[e].length for block in self.blocks for e in block.extents)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all extents, each counted once."""
        return sum(e.length for e in self.extents)


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    digest: str
    chain: msgspec.Raw


class _Format(msgspec.Struct):
    format: int


# ---------------------------------------------------------------------------------------------- reading and writing


def read_manifest(folder: Path) -> Chain:
    """The chain that `folder` (`<repository>/<name>/<version>`) holds. Reads `chain.json` alone: the files it names are
    for `reader.check_store`. Raises NotBuiltError where there is no finished chain, CorruptError, ForeignError,
    ReadError."""
    folder = Path(folder)
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        state = "an unfinished build" if folder.is_dir() else "no such folder"
        raise NotBuiltError(f"there is no finished chain: {state}", where=str(folder), remedy=rebuild_remedy(folder))
    with _reading(path), open(open_plain(path), "rb") as file:
        data = file.read(MANIFEST_LIMIT + 1)
    return _decode(data, path)


def write_manifest(folder: Path, chain: Chain) -> None:
    """Writes `chain.json` into `folder`: afterwards it is on the disk, and at no moment is a part of it there. Raises
    BuildError for a chain that `read_manifest` would refuse; OSError where the disk refuses."""
    raw = msgspec.json.encode(chain)
    data = msgspec.json.encode(_Envelope(xxhash.xxh3_128_hexdigest(raw), msgspec.Raw(raw)))
    path = Path(folder) / MANIFEST_FILE
    try:
        _decode(data, path)
    except (CorruptError, ForeignError) as error:
        raise BuildError(f"the chain makes no sense: {error.what}", where=error.where) from error
    draft = path.with_name(MANIFEST_FILE + ".draft")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
    sync_folder(path.parent)


def _decode(data: bytes, path: Path) -> Chain:
    if len(data) > MANIFEST_LIMIT:
        raise _corrupt(path, f"is larger than {MANIFEST_LIMIT} bytes")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        canonical = msgspec.json.encode(envelope) == data
    except _UNREADABLE as error:
        raise _corrupt(path, f"is not a manifest: {error}") from error
    if not canonical or xxhash.xxh3_128_hexdigest(bytes(envelope.chain)) != envelope.digest:
        raise _corrupt(path, "was changed after it was written: its digest does not match")
    try:
        version = msgspec.json.decode(envelope.chain, type=_Format).format
        if version not in _READABLE:
            raise ForeignError(
                f"the chain has format {version}; this version of trt-layering reads formats "
                f"{' and '.join(map(str, _READABLE))}",
                where=str(path), remedy=rebuild_remedy(path.parent),
            )  # fmt: skip
        chain = msgspec.json.decode(envelope.chain, type=Chain)
    except _UNREADABLE as error:
        raise _corrupt(path, f"is not a manifest: {error}") from error
    fault = next(_faults(chain), None)
    if fault is not None:
        raise _corrupt(path, f"makes no sense: {fault}")
    return chain


def _faults(chain: Chain) -> Iterator[str]:
    """What in `chain` contradicts itself; what one field alone can say wrongly is in the types."""
    yield from _extent_faults(chain)
    yield from _file_faults(chain)
    yield from _value_faults(chain)
    yield from _part_faults(chain)
    yield from _tensorrt_faults(chain)
    names = {block.name for block in chain.blocks}
    for told, what in ((chain.narrowed, "narrow weights cost"), (chain.halved, "float16 does to")):
        if strangers := {one.block for one in told} - names:
            yield f"it tells what {what} {min(strangers)!r}, which is no block"
    for times, count, what in (
        (chain.profile.execute_seconds, len(chain.parts), "blocks"),
        (chain.profile.read_seconds, len(chain.extents), "extents"),
    ):
        if len(times) not in (0, count):
            yield f"{len(times)} times for {count} {what}"


def _extent_faults(chain: Chain) -> Iterator[str]:
    end = 0
    for index, extent in enumerate(chain.extents):
        if extent.offset != end or extent.length == 0:
            yield f"extent {index} has {extent.length} bytes from {extent.offset}; the one before it ends at {end}"
        end = extent.offset + extent.length
        filled = 0
        for tensor in extent.tensors:
            where = f"tensor {tensor.name!r} of extent {index}"
            if tensor.nbytes != tensor_nbytes(tensor.dtype, tensor.shape):
                yield f"{where} has {tensor.nbytes} bytes, which is not {tensor.dtype!r} of shape {tensor.shape}"
            if tensor.offset < filled or tensor.offset + tensor.nbytes > extent.length:
                yield f"{where} lies over another tensor or outside its extent"
            filled = tensor.offset + tensor.nbytes


def _file_faults(chain: Chain) -> Iterator[str]:
    digests: dict[str, str] = {}
    names: set[str] = set()
    for block in (*chain.blocks, *chain.whole, *(part.block for part in chain.joined)):
        if block.name in names:
            yield f"two blocks are called {block.name!r}"
        names.add(block.name)
        if (
            block.file in (MANIFEST_FILE, WEIGHTS_FILE, SCHEDULES_FILE)
            or digests.setdefault(block.file, block.digest) != block.digest
        ):
            yield f"block {block.name!r} names {block.file!r} as its engine, which is something else"
        if any(index >= len(chain.extents) for index in block.extents):
            yield f"block {block.name!r} names an extent that is not there"
        elif len(set(block.extents)) != len(block.extents):
            yield f"block {block.name!r} names an extent twice"
        else:
            weights = [tensor.name for index in block.extents for tensor in chain.extents[index].tensors]
            if len(set(weights)) != len(weights):
                yield f"block {block.name!r} has two weights of one name"


def _part_faults(chain: Chain) -> Iterator[str]:
    """What keeps a joined block from standing for its blocks, or a block with rows from being one."""
    for block in (*chain.whole, *(part.block for part in chain.joined)):
        if block.rows is not None:
            yield f"block {block.name!r} is no single block and gathers rows"
    for block in chain.blocks:
        tensors = [tensor for index in block.extents for tensor in chain.extents[index].tensors]
        if block.rows is not None and not _gathers_rows(block, tensors):
            yield f"block {block.name!r} cannot gather rows: it needs one table, one input of indices and one output"
    for part in chain.joined:
        end = part.first + part.count
        blocks = chain.blocks[part.first : end]
        inside = {value.name for block in blocks for value in block.outputs}
        before = {value.name for block in chain.blocks[: part.first] for value in block.outputs}
        before.update(value.name for value in chain.inputs)
        after = {value.name for block in chain.blocks[end:] for value in block.inputs}
        after.update(value.name for value in chain.outputs)
        made = {value.name for value in part.block.outputs}
        if (
            part.count < 2
            or len(blocks) != part.count
            or any(block.rows is not None for block in blocks)
            or part.block.extents != tuple(dict.fromkeys(index for block in blocks for index in block.extents))
            or not {value.name for value in part.block.inputs} <= before
            or not inside & after <= made <= inside
        ):
            yield f"block {part.block.name!r} does not stand for its {part.count} blocks from {part.first}"


def _tensorrt_faults(chain: Chain) -> Iterator[str]:
    """What keeps engines of TensorRT from being given their weights and the sizes of what they make."""
    how = chain.tensorrt
    if (chain.backend.name == "tensorrt") != (how is not None):
        yield f"it says how TensorRT executes it or is of TensorRT, not both; it is of {chain.backend.name!r}"
    for block in chain.blocks:
        tensors = [tensor for index in block.extents for tensor in chain.extents[index].tensors]
        names = [tensor.name for tensor in tensors]
        missing = set(block.weights) - set(names)
        if missing:
            yield f"block {block.name!r} has no weight {min(missing)!r}"
        elif how is not None and how.binding != "swap" and sorted(block.weights) != sorted(names):
            yield f"block {block.name!r} numbers other weights than it has"
        if how is not None and how.binding == "swap" and not (len(tensors) == 1 and _is_plan(tensors[0])):
            yield f"block {block.name!r} has no plan of its own"
    if how is not None:
        yield from _range_faults(chain, how.ranges)


def _range_faults(chain: Chain, ranges: dict[str, Range]) -> Iterator[str]:
    """What keeps memory from being taken for all that passes between blocks."""
    for name, span in ranges.items():
        ordered = all(low <= usual <= high for low, usual, high in zip(span.min, span.opt, span.max, strict=False))
        if not len(span.min) == len(span.opt) == len(span.max) or not ordered or prod(span.max) > 2**62:
            yield f"the range of {name!r} is none"
    for value in (*chain.inputs, *(value for block in chain.blocks for value in block.outputs)):
        known = value.shape is not None and all(isinstance(dim, int) for dim in value.shape)
        if not known and value.name not in ranges:
            yield f"the size of {value.name!r} is not known"
        if value.shape is not None and value.name in ranges and len(ranges[value.name].max) != len(value.shape):
            yield f"the range of {value.name!r} is of another rank"


def _is_plan(tensor: Tensor) -> bool:
    return tensor.dtype == "uint8" and len(tensor.shape) == 1 and tensor.name.startswith("plan")


def _gathers_rows(block: Block, tensors: list[Tensor]) -> bool:
    if [value.name for value in block.inputs] != [block.rows] or len(block.outputs) != 1 or len(tensors) != 1:
        return False
    (table,) = tensors
    known = table.dtype in GATHERED and block.outputs[0].dtype == table.dtype and table.nbytes > 0
    return known and len(table.shape) > 0 and block.inputs[0].dtype in ("int32", "int64")


def _value_faults(chain: Chain) -> Iterator[str]:
    inputs = [value.name for value in chain.inputs]
    if len(set(inputs)) != len(inputs):
        yield "two inputs have one name"
    yield from _flow_faults(chain, chain.blocks)
    if chain.whole:
        yield from _flow_faults(chain, chain.whole)
    every = (*chain.blocks, *chain.whole, *(part.block for part in chain.joined))
    blocks = (value for block in every for value in (*block.inputs, *block.outputs))
    for value in (*chain.inputs, *chain.outputs, *blocks):
        if value.dtype not in DTYPE_BITS and value.dtype != "string":
            yield f"{value.name!r} has the unknown dtype {value.dtype!r}"


def _flow_faults(chain: Chain, blocks: tuple[Block, ...]) -> Iterator[str]:
    known = {value.name for value in chain.inputs}
    for block in blocks:
        for value in block.inputs:
            if value.name not in known:
                yield f"block {block.name!r} needs {value.name!r}, which no earlier block makes"
        for value in block.outputs:
            if value.name in known:
                yield f"block {block.name!r} makes {value.name!r}, which is there already"
            known.add(value.name)
    for value in chain.outputs:
        if value.name not in known:
            yield f"no block makes the output {value.name!r}"


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes that a weight of `dtype` and `shape` takes, packed where elements are under 8 bits; None: unknown dtype."""
    bits = DTYPE_BITS.get(dtype)
    return None if bits is None else -(-prod(shape) * bits // 8)


# ---------------------------------------------------------------------------------------------------- the repository


def resolve(repository: Path, name: str, version: int | None = None) -> Path:
    """Folder of the newest finished version of `name`, or of `version`. A version is a folder itself, never a link to
    one. Raises UsageError for a name no chain can have, NotBuiltError with what there is instead."""
    repository = Path(repository)
    home = repository / check_name(name)
    finished = finished_versions(repository, name)
    if version is None and finished:
        return home / str(finished[-1])
    if version in finished:
        return home / str(version)
    remedy = rebuild_remedy(home / "1")
    if finished:
        there = ", ".join(map(str, finished))
        raise NotBuiltError(
            f"chain {name!r} has no version {version}; finished are {there}", where=str(home), remedy=remedy
        )
    others = ", ".join(finished_chains(repository)) or "none"
    raise NotBuiltError(f"chain {name!r} is not built; chains there: {others}", where=str(repository), remedy=remedy)


def finished_versions(repository: Path, name: str) -> list[int]:
    """Versions of `name` whose build finished, oldest first; empty where there is none."""
    home = Path(repository) / check_name(name)
    found = [e for e in _entries(home) if VERSION_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(int(entry.name) for entry in found if os.path.lexists(os.path.join(entry, MANIFEST_FILE)))


def finished_chains(repository: Path) -> list[str]:
    """Names of the chains in `repository` that have a finished version, sorted."""
    names = [entry.name for entry in _entries(Path(repository)) if _PLAIN_NAME.fullmatch(entry.name)]
    return sorted(name for name in names if finished_versions(repository, name))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise NotBuiltError(f"chains cannot be listed: {error.strerror}", where=str(folder)) from error


def check_name(name: str) -> str:
    """`name`, if a chain, a block or a file of theirs can be called that. Raises UsageError."""
    if not isinstance(name, str) or _PLAIN_NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} cannot name a chain or a file of one",
            remedy="use up to 128 of the letters a-z A-Z, digits, '.', '_' and '-', not beginning with '.'",
        )
    return name


def rebuild_remedy(folder: Path) -> str:
    """What to tell someone whose chain in `folder` (`<repository>/<name>/<version>`) cannot be used."""
    home = Path(folder).absolute().parent
    name, repository = shlex.quote(home.name), shlex.quote(str(home.parent))
    return f"build it: trt-layering build MODEL.onnx --name {name} --repository {repository}"


# ------------------------------------------------------------------------------------------------- files of a version


def open_plain(path: Path) -> int:
    """A descriptor to read `path`, which must be a file by itself: not a link of either kind (it would lie outside its
    folder too), not a device. The caller closes it. Raises CorruptError; ReadError if this process may not open it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise _corrupt(path, "is missing") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _corrupt(path, "is a symbolic link" if error.errno == errno.ELOOP else "is not a file") from error
        raise _unreadable(path, "opened", error) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    raise _corrupt(path, "is a hard link" if stat.S_ISREG(status.st_mode) else "is not a file")


def file_digest(path: Path) -> str:
    """xxh3-128 (hex) of the bytes of any file, links followed. Raises ReadError."""
    with _reading(path), open(path, "rb", buffering=0) as file:
        return _digest(file)


def plain_digest(path: Path) -> str:
    """The same of a version's file, opened by `open_plain`. Raises CorruptError and ReadError."""
    with _reading(path), open(open_plain(path), "rb", buffering=0) as file:
        return _digest(file)


def _digest(file: FileIO) -> str:
    digest = xxhash.xxh3_128()
    while piece := file.read(1024 * 1024):
        digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(path, "read", error) from error


def sync_folder(folder: Path) -> None:
    """Puts the names in `folder` on the disk, as fsync of a file puts its bytes. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, done: str, error: OSError) -> ReadError:
    return ReadError(
        f"{path.name} cannot be {done}: {error.strerror or error}",
        where=str(path), remedy="look at its permissions, and at the drive's health (dmesg)",
    )  # fmt: skip


def _corrupt(path: Path, what: str) -> CorruptError:
    # What is told may quote a hostile file.
    return CorruptError(f"{path.name} {printable(what)}", where=str(path), remedy=rebuild_remedy(path.parent))
