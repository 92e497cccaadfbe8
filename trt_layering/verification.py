"""A built chain beside the uncut model, by Polygraphy's runner and comparator.

May import the graph, the runtime, polygraphy and onnxruntime. Raises what opening and running raise, and ModelError
where the model is none or not the one for this chain; a difference is no error but a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from trt_layering import inputs
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, reported
from trt_layering.compare import difference
from trt_layering.errors import BackendError, ModelError
from trt_layering.graph.model import open_model
from trt_layering.runtime.chain import open_chain
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import Chain

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Verification:
    """How the chain compared: over all outputs the largest absolute difference and the largest absolute output of the
    uncut model; `passed` as Polygraphy's comparator judged each output; `per_output` the largest difference of each."""

    passed: bool
    max_abs_diff: float
    max_abs_output: float
    per_output: dict[str, float]


def verify(
    name: str,
    onnx: str | Path,
    *,
    repository: str | Path = "engines",
    budget: int | str | None = None,
    version: int | None = None,
    loader: LoaderOptions | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    feeds: Mapping[str, Array] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Verification:
    """Run chain `name` and the model `onnx` on the same inputs: `feeds`, or seeded ones at `shapes`.

    The model runs uncut in ONNX Runtime with the optimisation that the chain was built with, or none. The largest
    difference allowed in each output is `tolerance` as a part of that output's largest absolute value, by default what
    the build allowed; 0 wants them bit for bit alike. The uncut model is in memory as a whole meanwhile. `version` and
    `loader` are those of `open_chain`. Raises ModelError where the model is not the one for this chain.
    """
    model = Path(onnx)
    ends = _ends(model)
    with open_chain(name, repository=repository, budget=budget, version=version, loader=loader) as chain:
        manifest = chain.manifest
        _require_same_ends(model, ends, manifest)
        asked = feeds or inputs.seeded(chain.inputs, shapes or manifest.memory.shapes, seed)
        got = chain.run(asked)
    with _polygraphy_silent():
        wanted = _uncut(model, manifest, asked)
        return _judged(wanted, got, manifest.check.tolerance if tolerance is None else tolerance)


@contextmanager
def _polygraphy_silent() -> Iterator[None]:
    """Its log, some of which it prints on standard output; what is critical is raised as well."""
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        yield


def _ends(model: Path) -> dict[str, set[str]]:
    """The names of the inputs and of the outputs of `model`, whose weights are not read."""
    graph = open_model(model).graph
    fed = {str(value.name) for value in graph.inputs if not value.is_initializer()}
    return {"input": fed, "output": {str(value.name) for value in graph.outputs}}


def _require_same_ends(model: Path, ends: Mapping[str, set[str]], chain: Chain) -> None:
    for kind, values in (("input", chain.inputs), ("output", chain.outputs)):
        apart = ends[kind].symmetric_difference(value.name for value in values)
        if apart:
            name = min(apart)
            whose = "the model" if name in ends[kind] else "the chain"
            raise _other_model(f"only {whose} has the {kind} {name!r}", model, chain)


def _other_model(what: str, model: Path, chain: Chain) -> ModelError:
    remedy = f"give the file that the chain {chain.name!r} was built from, {chain.source}"
    return ModelError(what, where=str(model), remedy=remedy)


def _uncut(model: Path, chain: Chain, feeds: Mapping[str, Array]) -> dict[str, Array]:
    from polygraphy.backend.onnxrt import OnnxrtRunner

    try:
        with reported(str(model)), OnnxrtRunner(lambda: _session(model, chain.optimised)) as runner:
            results = {key: np.asarray(value) for key, value in runner.infer(dict(feeds)).items()}
    except BackendError as error:  # the chain ran on these inputs
        raise _other_model(f"the model does not run as the chain did: {error.__cause__}", model, chain) from error
    return {value.name: results[value.name] for value in chain.outputs}


def _session(model: Path, optimised: bool) -> ort.InferenceSession:
    from trt_layering.backends.onnxruntime.runtime import uncut_options

    return ort.InferenceSession(str(model), uncut_options(optimised), providers=PROVIDERS)


def _judged(wanted: Mapping[str, Array], got: Mapping[str, Array], tolerance: float) -> Verification:
    from polygraphy.comparator import SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult

    scale = {name: difference(array, array)[1] for name, array in wanted.items()}
    largest = max(scale.values(), default=0.0)
    allowed = {name: tolerance * part for name, part in scale.items()}
    judge = SimpleCompareFunc(check_error_stat="max", atol=allowed, rtol=0.0)
    # Polygraphy lets nothing pass that is not finite, though it be the same: `difference` alone judges that, and text.
    numeric = [
        n for n, array in wanted.items() if array.dtype.kind not in "OUS" and array.size and np.isfinite(array).all()
    ]
    with np.errstate(all="ignore"):  # for statistics that nobody asked for
        results = judge(
            IterationResult({name: wanted[name] for name in numeric}),
            IterationResult({name: got[name] for name in numeric}),
        )
    apart = {name: difference(array, got[name])[0] for name, array in wanted.items()}
    passed = all(bool(result) for result in results.values()) and all(apart[name] <= allowed[name] for name in wanted)
    return Verification(passed, max(apart.values(), default=0.0), largest, apart)
