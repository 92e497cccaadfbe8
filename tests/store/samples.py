"""Small stores for the tests: made in code, every part of the format in them, and forged at will."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from trt_layering.store.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    UNMEASURED,
    WEIGHTS_FILE,
    Backend,
    Block,
    Chain,
    Check,
    Extent,
    Memory,
    Value,
    read_manifest,
    tensor_nbytes,
)
from trt_layering.store.writer import StoreWriter

X = Value(name="x", dtype="float32", shape=(1, "n", None))
H = Value(name="h:0/out", dtype="float32", shape=None)
Y = Value(name="y", dtype="bfloat16", shape=(1, 10))

TENSORS: tuple[tuple[tuple[str, str, tuple[int, ...]], ...], ...] = (
    (("a/w", "float32", (33, 40)), ("a/b", "float32", (40,))),
    (("shared", "int64", (7,)), ("empty", "float16", (0, 4))),
    (("c/w", "uint8", (3, 5, 7)), ("c/scale", "bfloat16", ())),
)


def chain_of(extents: tuple[Extent, ...], blocks: tuple[Block, ...], **changes: Any) -> Chain:
    fields: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "name": "tiny",
        "source": "tiny.onnx",
        "source_digest": "0" * 32,
        "backend": Backend(name="onnxruntime", version="1.0", fingerprint={"cpu": "any"}),
        "precision": "fp32",
        "optimised": True,
        "block_size": 1 << 20,
        "inputs": (X,),
        "outputs": (Y,),
        "extents": extents,
        "blocks": blocks,
        "memory": Memory(activations=128, scratch=64, engines=0, shapes={"x": (1, 3, 4)}),
        "profile": msgspec.structs.replace(UNMEASURED, execute_seconds=(0.001,) * len(blocks)),
        "check": Check(max_abs_diff=0.0, max_abs_output=1.5, seed=0),
    }
    return Chain(**(fields | changes))


def fill(writer: StoreWriter, seed: int = 0) -> Chain:
    """Writes the three extents and three engines of the tiny chain; the chain to publish."""
    rng = np.random.default_rng(seed)
    for tensors in TENSORS:
        sized = [(*tensor, tensor_nbytes(tensor[1], tensor[2]) or 0) for tensor in tensors]
        writer.add_extent((name, dtype, shape, lambda n=nbytes: [rng.bytes(n)]) for name, dtype, shape, nbytes in sized)
    ends = ((X, H), (H, Y))
    blocks = tuple(engine(writer, f"block-{i:03}", seed, ((0, 1), (1, 2))[i], *ends[i]) for i in range(2))
    return chain_of(writer.extents, blocks, whole=(engine(writer, "whole-000", seed, (0, 1, 2), X, Y),))


def engine(writer: StoreWriter, name: str, seed: int, extents: tuple[int, ...], given: Value, made: Value) -> Block:
    file = writer.engine_file(name, ".onnx")
    file.write_bytes(f"{name} of {seed}".encode())
    digest = writer.digest(file)
    return Block(name=name, file=file.name, digest=digest, extents=extents, inputs=(given,), outputs=(made,))


def publish_tiny(repository: Path, seed: int = 0, name: str = "tiny") -> Path:
    with StoreWriter(repository, name) as writer:
        return writer.publish(fill(writer, seed))


def forge(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites `chain.json` after `edit`, with a digest that is right: what a malicious author would do."""
    path = folder / MANIFEST_FILE
    chain = json.loads(path.read_bytes())["chain"]
    edit(chain)
    write_raw(folder, json.dumps(chain, separators=(",", ":")).encode())


def write_raw(folder: Path, chain: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(chain).encode()
    (folder / MANIFEST_FILE).unlink()  # writing over a file makes some file systems wait for the drive
    (folder / MANIFEST_FILE).write_bytes(b'{"digest":"' + digest + b'","chain":' + chain + b"}")


def assert_whole(folder: Path) -> Chain:
    """The chain in `folder`, every byte of which was checked with code that shares nothing with the reader."""
    chain = read_manifest(folder)
    weights = (folder / WEIGHTS_FILE).read_bytes()
    assert len(weights) == sum(extent.length for extent in chain.extents)
    for extent in chain.extents:
        assert xxhash.xxh3_64_hexdigest(weights[extent.offset : extent.offset + extent.length]) == extent.checksum
    blocks = (*chain.blocks, *chain.whole)
    for block in blocks:
        assert xxhash.xxh3_128_hexdigest((folder / block.file).read_bytes()) == block.digest
    assert {path.name for path in folder.iterdir()} == {MANIFEST_FILE, WEIGHTS_FILE, *(b.file for b in blocks)}
    return chain
