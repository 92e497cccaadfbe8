"""Building one plan: what is done in the child process of `plans`.

Imports TensorRT and Polygraphy only inside functions. What TensorRT refuses is returned in words, with the last lines
of its log; a full disk raises OSError. The process may die of a lack of memory at any moment.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from trt_layering.backends.tensorrt import timing_cache
from trt_layering.backends.tensorrt.block_file import BlockFile, Kind

if TYPE_CHECKING:
    import tensorrt as trt

Refit = Literal["none", "individual", "identical"]
Reason = Literal["memory", "weights", "refused"]

_QUOTED = 8
_MEMORY_RAN_OUT = (
    "could not find any implementation", "out of memory", "outofmemory", "out_of_memory", "bad_alloc",
    "insufficient memory", "memory allocation", "cudaerrormemoryallocation", "requested amount of gpu memory",
)  # fmt: skip
_DTYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT8": "int8", "INT32": "int32", "INT64": "int64",
    "UINT8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The manifest's words of TensorRT's dtypes that weights may have."""


@dataclass(frozen=True)
class Task:
    """What the child is asked for; `profile` has the min, opt and max shape of each activation input."""

    onnx: str
    draft: str
    timing_cache: str
    workspace: int
    refit: Refit
    weights: tuple[str, ...]
    profile: Mapping[str, Sequence[Sequence[int]]]


class _Refused(Exception):
    def __init__(self, reason: Reason, words: str) -> None:
        super().__init__(words)
        self.reason, self.words = reason, words


def build(task: dict[str, Any]) -> dict[str, Any]:
    """Write the plan that `task`, the fields of a `Task`, asks for to its `draft`.

    Returns "digest", "nbytes", "seconds", "scratch_bytes" and "refit_weights", or "reason" and "words" of a refusal;
    "lines" are the errors and warnings that TensorRT logged, "said" what else the user should know.
    """
    from polygraphy.exception import PolygraphyException

    said: list[str] = []
    with _logged() as lines:
        try:
            answer = _built(Task(**task), said)
        except _Refused as error:
            answer = {"reason": error.reason, "words": error.words}
        except (PolygraphyException, RuntimeError) as error:
            answer = {"reason": "refused", "words": str(error)}
        except TypeError as error:
            if "nullptr" not in str(error):
                raise
            answer = {"reason": "refused", "words": str(error)}
    if answer.get("reason") == "refused" and _memory_ran_out([*lines, answer["words"]]):
        answer["reason"] = "memory"
    return {**answer, "said": said, "lines": lines[-_QUOTED:]}


def _built(task: Task, said: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    draft = Path(task.draft)
    data = _serialized(task, said)
    digest = xxhash.xxh3_128_hexdigest(data)
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds, nbytes = time.perf_counter() - began, draft.stat().st_size
    return {"digest": digest, "nbytes": nbytes, "seconds": seconds, **_asked_for(task, data)}


def _serialized(task: Task, said: list[str]) -> trt.IHostMemory:
    from polygraphy.backend.trt import EngineBytesFromNetwork, NetworkFromOnnxPath

    builder, network, parser = NetworkFromOnnxPath(task.onnx, strongly_typed=True)()
    _check_inputs(network, task)
    config = _config(builder, network, task, said)
    data = EngineBytesFromNetwork((builder, network, parser), config=lambda *_: config)()
    try:
        timing_cache.keep(config, Path(task.timing_cache))
    except OSError as error:
        words = f"{error.strerror or error}: {error.filename or task.timing_cache}"
        said.append(f"the timing cache cannot be kept, so the next build takes as long as this one: {words}")
    return data


def _check_inputs(network: trt.INetworkDefinition, task: Task) -> None:
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    shapes = [tensor.name for tensor in inputs if tensor.is_shape_tensor]
    if shapes:
        raise _Refused("refused", f"TensorRT takes {', '.join(shapes)} for shapes, which must not come from the GPU")
    if task.refit == "individual":
        unknown = [name for name in task.weights if not network.mark_weights_refittable(name)]
        if unknown:
            raise _Refused("weights", f"TensorRT cannot mark as refittable: {', '.join(unknown)}")


def _config(builder: trt.Builder, network: trt.INetworkDefinition, task: Task, said: list[str]) -> trt.IBuilderConfig:
    """One stream, no TF32, and the flags that `task.refit` needs; with a copy of the timing cache, since Polygraphy
    would replace the file neither at once nor only where it is whole."""
    import tensorrt as trt
    from polygraphy.backend.trt import CreateConfig, Profile

    profile = Profile()
    for name, (least, usual, most) in task.profile.items():
        profile.add(name, min=tuple(least), opt=tuple(usual), max=tuple(most))
    file = Path(task.timing_cache)
    known, damage = timing_cache.read(file)
    with tempfile.TemporaryFile() as copy:
        copy.write(known)
        create = CreateConfig(
            profiles=[profile],
            memory_pool_limits={trt.MemoryPoolType.WORKSPACE: task.workspace},
            load_timing_cache=copy,
            strip_plan=task.refit != "none",
            profiling_verbosity=trt.ProfilingVerbosity.LAYER_NAMES_ONLY,
            max_aux_streams=0,
        )
        config = create(builder, network)
    if task.refit == "individual":
        config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    if task.refit == "identical":
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    said += filter(None, [damage or timing_cache.take_over(config, known, file)])
    return config


def _asked_for(task: Task, data: trt.IHostMemory) -> dict[str, Any]:
    """What the plan's engine needs: bytes of scratch, and every weight of a refit, each accounted for."""
    import tensorrt as trt
    from polygraphy.backend.trt import get_trt_logger

    engine = trt.Runtime(get_trt_logger()).deserialize_cuda_engine(data)
    if engine is None:
        raise _Refused("refused", "TensorRT cannot deserialize the plan that it built")
    found: list[str] = []
    if task.refit != "none":
        refitter = trt.Refitter(engine, get_trt_logger())
        found = _accounted(refitter, BlockFile.open(Path(task.onnx), task.weights).weights)
    return {"scratch_bytes": engine.device_memory_size_v2, "refit_weights": found}


def _accounted(refitter: trt.Refitter, known: Mapping[str, Kind]) -> list[str]:
    """The names that `refitter` asks for, which are those of `known`. Refused where they are not, or of another dtype
    or count."""
    asked = list(refitter.get_all_weights())
    foreign, missing = [name for name in asked if name not in known], [name for name in known if name not in asked]
    if foreign:
        raise _Refused("weights", f"a refit would have to give what is not streamed: {', '.join(foreign)}")
    if missing:
        raise _Refused("weights", f"a refit would not reach {', '.join(missing)}, which TensorRT has built in")
    for name in asked:
        prototype = refitter.get_weights_prototype(name)
        dtype, count, kind = prototype.dtype.name, prototype.size, known[name]
        if (_DTYPES.get(dtype, dtype), count) != (kind.dtype, kind.count):
            words = f"a refit of {name} takes {count} of {dtype}, where it has {kind.count} of {kind.dtype}"
            raise _Refused("weights", words)
    return asked


def _memory_ran_out(lines: Sequence[str]) -> bool:
    return any(sign in line.lower() for line in lines for sign in _MEMORY_RAN_OUT)


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The errors and warnings that TensorRT and Polygraphy log meanwhile."""
    from polygraphy.logger import G_LOGGER

    lines: list[str] = []
    handler = _Lines(lines)
    logger = logging.getLogger("Polygraphy")
    logger.addHandler(handler)
    logger.propagate = False
    G_LOGGER.module_severity = G_LOGGER.WARNING
    G_LOGGER.use_python_logging_system = True
    G_LOGGER.colors = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
