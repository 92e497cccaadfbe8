"""The bench's chains: built once per case into `.bench/engines`, opened and fed the same way by every bench.

Imports trt_layering only inside functions, so that a child process decides itself what it loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import models
import numpy as np

REPOSITORY = models.DEFAULT_FOLDER / "engines"
BLOCK_SIZE = "16MiB"
FRACTIONS = (0.10, 0.25, 0.50, 0.75)


def feeds(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded standard normal float32 inputs of these shapes."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(tuple(shape), dtype=np.float32) for name, shape in shapes.items()}


def ensure(case: models.Case, *, block_size: str = BLOCK_SIZE, name: str | None = None, rebuild: bool = False) -> str:
    """The name of the case's finished chain in `REPOSITORY`, built in a child process where it is missing or stale."""
    import trt_layering as tl

    name = name or case.name
    if not rebuild:
        try:
            tl.floor(name, repository=REPOSITORY)
            return name
        except tl.StoreError:
            pass
    path = models.make(case.model)
    print(f"building {name} ...", flush=True)
    measure.call(build, model=str(path), name=name, block_size=block_size, shapes=dict(case.shapes))
    return name


def build(model: str, name: str, block_size: str, shapes: Mapping[str, Sequence[int]], optimise: bool = True) -> None:
    """Child function: one build."""
    import trt_layering as tl

    tl.build(
        model,
        name=name,
        repository=REPOSITORY,
        backend="onnxruntime",
        block_size=block_size,
        shapes={key: tuple(shape) for key, shape in shapes.items()},
        optimise=optimise,
    )


def folder(name: str) -> Path:
    """The newest finished version of chain `name`."""
    from trt_layering.store.manifest import resolve

    return resolve(REPOSITORY, name)


def sizes(name: str) -> tuple[int, int]:
    """Chain `name`'s floor and the bytes of its weights."""
    import trt_layering as tl
    from trt_layering.store.manifest import read_manifest

    return tl.floor(name, repository=REPOSITORY).total, read_manifest(folder(name)).weights_bytes


def budgets(floor: int, weights: int) -> list[tuple[str, int]]:
    """Named budgets from the floor up to what holds everything; fractions of the weights that lie under it left out."""
    steps = [("floor", floor)]
    steps += [(f"{fraction:.0%}", int(fraction * weights)) for fraction in FRACTIONS if fraction * weights > floor]
    return [*steps, ("all", everything(floor, weights))]


def everything(floor: int, weights: int) -> int:
    """A budget that holds all weights, once more in a layout that executes faster, and what the floor holds."""
    return 2 * weights + floor


def parser(description: str | None, default: Sequence[str]) -> argparse.ArgumentParser:
    """The command line that the benches share: cases, and whether to build their chains anew."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = f"{', '.join(models.CASES)} (default: {' '.join(default)})"
    made.add_argument("cases", nargs="*", default=list(default), type=_case, metavar="CASE", help=text)
    made.add_argument("--rebuild", action="store_true", help="build the chains anew first")
    return made


def _case(name: str) -> str:
    if name not in models.CASES:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(models.CASES)}")
    return name
