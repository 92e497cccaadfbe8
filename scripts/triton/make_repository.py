"""Makes a model repository for NVIDIA Triton of chains that were built, each with a budget.

    python scripts/triton/make_repository.py CHAIN [CHAIN ...] --budget 48MiB [--repository engines] [--wave 8]
        [--out triton-models]

Each chain becomes the model of that name: NAME/config.pbtxt by its manifest, and NAME/1/model.py. Requests that Triton
brings together form a wave; it does so where the first dimension of all inputs and outputs is one and the same, 1 or
open. Imports trt_layering and the standard library. What cannot be served, or does not fit the budget, is an error, and
nothing is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trt_layering as tl
from trt_layering.store.manifest import read_manifest, resolve
from trt_layering.units import format_size, parse_size

if TYPE_CHECKING:
    from trt_layering.store.manifest import Chain, Value

MODEL = Path(__file__).resolve().parent / "model.py"
TYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
"""What Triton's Python backend passes on as numpy arrays."""


def config_text(chain: Chain, repository: Path, *, budget: int | None, wave: int) -> str:
    """config.pbtxt for `chain`, which lies in `repository`. UsageError for inputs or outputs that Triton has no way to
    pass on."""
    batch = wave if has_batch(chain) else 0
    parameters = {"chain": chain.name, "repository": str(repository.resolve())}
    if budget is not None:
        parameters["budget"] = str(budget)
    lines = [
        f"name: {json.dumps(chain.name)}",
        'backend: "python"',
        f"max_batch_size: {batch}",
        *(line for value in chain.inputs for line in _tensor("input", value, batch)),
        *(line for value in chain.outputs for line in _tensor("output", value, batch)),
        *(["dynamic_batching { }"] if batch else []),
        f"instance_group [ {{ count: 1 kind: {'KIND_GPU' if chain.tensorrt else 'KIND_CPU'} }} ]",
        *(
            f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def has_batch(chain: Chain) -> bool:
    """Whether Triton may take the first dimension of everything for the number of things in a request."""
    firsts = {value.shape[0] if value.shape else None for value in (*chain.inputs, *chain.outputs)}
    [first] = firsts if len(firsts) == 1 else [None]
    return first == 1 or isinstance(first, str)


def _tensor(kind: str, value: Value, batch: int) -> Iterator[str]:
    where = f"{kind} {value.name!r}"
    if value.dtype not in TYPES or value.shape is None:
        what = value.dtype if value.shape is not None else "a tensor of any rank"
        raise tl.UsageError(
            f"Triton's Python backend cannot pass on {what}", where=where, remedy="serve this chain by itself"
        )
    shape = value.shape[1:] if batch else value.shape
    dims = ", ".join(str(dim) if isinstance(dim, int) else "-1" for dim in shape)
    ragged = " allow_ragged_batch: true" if kind == "input" and batch and "-1" in dims else ""
    # Triton has no tensors without dimensions: it takes one of one element and passes that on.
    form = f"dims: [ {dims} ]" if shape else "dims: [ 1 ] reshape { shape: [ ] }"
    name = json.dumps(value.name, ensure_ascii=False)
    yield f"{kind} [ {{ name: {name} data_type: TYPE_{TYPES[value.dtype]} {form}{ragged} }} ]"


def config_of(name: str, repository: Path, *, budget: int | None, wave: int) -> str:
    """config.pbtxt for chain `name`, once it is known to fit. Raises StoreError, UsageError and BudgetError."""
    chain = read_manifest(resolve(repository, name))
    text = config_text(chain, repository, budget=budget, wave=wave)
    needs = tl.footprint(name, repository=repository, wave=wave if has_batch(chain) else 1)
    if budget is not None and budget < needs.floor:
        raise tl.BudgetError(
            f"{name} needs {format_size(needs.floor)} and the budget is {format_size(budget)}",
            floor=needs.floor, parts={}, where="--budget", remedy="give it more, or make waves smaller with --wave",
        )  # fmt: skip
    return text


def write_model(name: str, config: str, out: Path) -> Path:
    """The folder of one model below `out`; what is there of that name is overwritten."""
    folder = out / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(MODEL, folder / "1" / "model.py")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    return folder


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chains", nargs="+", metavar="CHAIN")
    parser.add_argument("--repository", type=Path, default=Path("engines"))
    parser.add_argument("--budget", help="of each chain, like 48MiB (default: what it needs to keep everything)")
    parser.add_argument("--wave", type=int, default=8, help="most requests in a wave (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("triton-models"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    tl.share_thread_pool()
    try:
        budget = None if given.budget is None else parse_size(given.budget, what="--budget")
        configs = {name: config_of(name, given.repository, budget=budget, wave=given.wave) for name in given.chains}
    except tl.LayeringError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    for name, config in configs.items():
        print(write_model(name, config, given.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
