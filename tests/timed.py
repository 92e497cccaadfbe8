"""Chains whose profile says even times, so that what follows from it can be told in the head."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.chains import in_this_process, layers, saved
from trt_layering import building
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.schedules import write_table
from trt_layering.store.manifest import PAGE, UNMEASURED, Memory, read_manifest, write_manifest

SIZE = 16 << 10
"""Bytes of one layer, which is one block."""
EXECUTE = 1e-3
"""Seconds that it executes."""
RATE = 8e6
"""Bytes per second, at which reading a layer takes twice as long."""


def build(repository: Path, name: str, layer_count: int) -> None:
    """A chain of equal layers, that takes 6000 bytes beside its weights."""
    path = saved(layers(layer_count), repository / f"{name}.onnx")
    with in_this_process(streamed_from=0):
        built = building.build(path, name=name, repository=repository, block_size=SIZE, shapes={"x": (3, 64)})
    seconds = tuple(EXECUTE * part.count for part in built.manifest.parts)
    profile = msgspec.structs.replace(UNMEASURED, execute_seconds=seconds, read_rate=RATE, read_size=PAGE)
    memory = Memory(activations=1000, scratch=2000, engines=3000, shapes={})
    rewrite(built.path, profile=profile, memory=memory)


def rewrite(folder: Path, **fields: object) -> None:
    """Change fields of a chain's manifest, and make its table anew."""
    chain = msgspec.structs.replace(read_manifest(folder), **fields)
    write_manifest(folder, chain)
    write_table(folder, chain)


def needs(repository: Path, name: str) -> Footprint:
    return Footprint.of(read_manifest(repository / name / "1"))
