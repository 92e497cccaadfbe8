"""Stores whose engines are made-up plans: a right header, and bytes as dense as a real plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.store.samples import H, X, Y, chain_of
from trt_layering.store.manifest import Backend, Block, Candidate, Range, TensorRt
from trt_layering.store.writer import StoreWriter

SPAN = Range(min=(1, 1, 4), opt=(1, 8, 4), max=(1, 32, 4))
VERSION = (10, 3, 0, 26)
FINGERPRINT = {"gpu": "Orin (nvgpu)", "sm": "8.7", "memory": "integrated", "machine": "aarch64"}
CANDIDATES = (
    Candidate(binding="inputs", seconds=0.0125, words="taken: the fastest that answers rightly"),
    Candidate(binding="refit", seconds=0.02, words="slower"),
    Candidate(binding="swap", seconds=0.0, words="block-001 differs by 0.3 from ONNX Runtime's answer"),
)


def plan(size: int = 1 << 17, *, version: tuple[int, int, int, int] = VERSION, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).bytes(size)
    return (b"ftrt" + noise[4:24] + bytes(version) + noise[28:])[:size]


def publish(repository: Path, *, binding: Literal["inputs", "swap"] = "inputs", **changes: Any) -> Path:
    """Two blocks: with `inputs` of one plan that they share, with `swap` of plans in `weights.bin`."""
    with StoreWriter(repository, "tiny") as writer:
        for seed in range(2):
            data = plan(seed=seed) if binding == "swap" else bytes(4096)
            writer.add_extent([("plan" if binding == "swap" else "w", "uint8", (len(data),), lambda d=data: [d])])
        file = writer.engine_file("block-000", ".plan")
        file.write_bytes(plan())
        ends, digest = ((X, H), (H, Y)), writer.digest(file)
        blocks = tuple(
            Block(name=f"block-{i:03}", file=file.name, digest=digest, extents=(i,), inputs=(ends[i][0],),
                  outputs=(ends[i][1],), weights=("w",) if binding == "inputs" else ())
            for i in range(2)
        )  # fmt: skip
        fields: dict[str, Any] = {
            "backend": Backend(name="tensorrt", version="10.3.0", fingerprint=FINGERPRINT),
            "tensorrt": TensorRt(
                binding=binding, placement="staged", candidates=CANDIDATES,
                ranges={value.name: SPAN for value in (X, H)},
            ),
        }  # fmt: skip
        return writer.publish(chain_of(writer.extents, blocks, **(fields | changes)))
