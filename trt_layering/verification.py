"""A built chain beside the uncut model, by Polygraphy's runner and comparator.

May import the runtime, polygraphy and onnxruntime. Raises what opening and running raise; a difference is no error but
a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from trt_layering import inputs
from trt_layering.backends.onnxruntime.runtime import PROVIDERS, reported
from trt_layering.compare import TOLERANCE, difference
from trt_layering.errors import ModelError
from trt_layering.runtime.chain import Chain, open_chain

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Verification:
    """How the chain compared: over all outputs the largest absolute difference and the largest absolute output of the
    uncut model; `passed` as Polygraphy's comparator judged; `per_output` the largest difference of each."""

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
    shapes: Mapping[str, Sequence[int]] | None = None,
    feeds: Mapping[str, Array] | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
) -> Verification:
    """Run chain `name` and the model `onnx` on the same inputs: `feeds`, or seeded ones at `shapes`.

    The model runs uncut in ONNX Runtime with the optimisation that the chain was built with, or none. The largest
    difference allowed is `tolerance` as a part of the largest absolute output; 0 wants them bit for bit alike. The
    uncut model is in memory as a whole meanwhile. Raises ModelError where the model is not the one for these inputs.
    """
    with open_chain(name, repository=repository, budget=budget) as chain:
        asked = feeds or inputs.seeded(chain.inputs, shapes or chain.manifest.memory.shapes, seed)
        got = chain.run(asked)
        wanted = _uncut(Path(onnx), chain, asked)
    return _judged(wanted, got, tolerance)


def _uncut(model: Path, chain: Chain, feeds: Mapping[str, Array]) -> dict[str, Array]:
    from polygraphy.backend.onnxrt import OnnxrtRunner

    with reported(str(model)), OnnxrtRunner(lambda: _session(model, chain.manifest.optimised)) as runner:
        results = {key: np.asarray(value) for key, value in runner.infer(dict(feeds)).items()}
    missing = [value.name for value in chain.outputs if value.name not in results]
    if missing:
        raise ModelError(
            f"the model does not give the chain's output {missing[0]!r}",
            where=str(model), remedy=f"give the file that the chain was built from, {chain.manifest.source}",
        )  # fmt: skip
    return {value.name: results[value.name] for value in chain.outputs}


def _session(model: Path, optimised: bool) -> ort.InferenceSession:
    from trt_layering.backends.onnxruntime.runtime import uncut_options

    return ort.InferenceSession(str(model), uncut_options(optimised), providers=PROVIDERS)


def _judged(wanted: Mapping[str, Array], got: Mapping[str, Array], tolerance: float) -> Verification:
    from polygraphy.comparator import SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult

    scale = {name: difference(array, array)[1] for name, array in wanted.items()}
    largest = max(scale.values(), default=0.0)
    judge = SimpleCompareFunc(check_error_stat="max", atol=tolerance * largest, rtol=0.0)
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
    passed = all(bool(result) for result in results.values()) and all(d <= tolerance * largest for d in apart.values())
    return Verification(passed, max(apart.values(), default=0.0), largest, apart)
