"""The bench's chains: built once per case into `.bench/engines`, opened and fed the same way by every bench.

Imports trt_layering only inside functions, so that a child process decides itself what it loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import measure
import models
import numpy as np

if TYPE_CHECKING:
    from trt_layering import Footprint

REPOSITORY = models.DEFAULT_FOLDER / "engines"
BLOCK_SIZE = "auto"
LARGE = ("resnet152", "vgg19", "encoder-1", "encoder-128", "densenet201", "yolov4")
FRACTIONS = (0.10, 0.25, 0.50, 0.75)


def feeds(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded standard normal float32 inputs of these shapes."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(tuple(shape), dtype=np.float32) for name, shape in shapes.items()}


def ensure(
    case: models.Case,
    *,
    block_size: str = BLOCK_SIZE,
    name: str | None = None,
    rebuild: bool = False,
    weights: str = "fp32",
) -> str:
    """The name of the case's finished chain in `REPOSITORY`, built in a child process where it is missing or stale."""
    import trt_layering as tl

    name = name or case.name
    if not rebuild:
        try:
            tl.footprint(name, repository=REPOSITORY)
            return name
        except tl.StoreError:
            pass
    path = models.make(case.model)
    print(f"building {name} ...", flush=True)
    measure.call(build, model=str(path), name=name, block_size=block_size, shapes=dict(case.shapes), weights=weights)
    return name


def build(
    model: str,
    name: str,
    block_size: str,
    shapes: Mapping[str, Sequence[int]],
    optimise: bool = True,
    weights: str = "fp32",
) -> None:
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
        weights=weights,
    )


def share_thread_pool() -> None:
    """As the child processes do, so that footprints are reckoned as theirs."""
    import trt_layering as tl

    tl.share_thread_pool()


def folder(name: str) -> Path:
    """The newest finished version of chain `name`."""
    from trt_layering.store.manifest import resolve

    return resolve(REPOSITORY, name)


def footprint(name: str) -> Footprint:
    """What chain `name` needs in memory."""
    import trt_layering as tl

    return tl.footprint(name, repository=REPOSITORY)


def budgets(needs: Footprint) -> list[tuple[str, int]]:
    """Named budgets from the floor up: fractions of the weights (where such a budget is under the floor, the arena
    alone has that fraction, and a + says so), all weights in the arena, and everything resident."""
    steps = [("floor", needs.floor)]
    for part in FRACTIONS:
        label, budget = f"{part:.0%}", int(part * needs.weights)
        steps.append((label, budget) if budget >= needs.floor else (f"{label}+", needs.fixed + budget))
    steps = [(label, budget) for label, budget in steps if budget >= needs.floor]
    return [*steps, ("weights", needs.fixed + needs.weights), ("all", needs.resident)]


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
