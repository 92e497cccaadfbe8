"""What the Open Inference Protocol says of a server and its models: metadata, configuration, statistics and the
repository's index; and the small requests about the repository. Imports the package's version, datatypes and manifest
types. Requests that cannot be read raise ProtocolError; a model with dtypes that the protocol has not, ModelError.

What is returned is ready for `msgspec.json.encode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from trt_layering import __version__
from trt_layering.service.datatypes import datatype_of
from trt_layering.service.protocol import Parameter, decoded
from trt_layering.service.refusals import Limits, ProtocolError
from trt_layering.store.manifest import Value

NAME = "trt-layering"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
Object = dict[str, Any]


class Described(Protocol):
    """What a model has to say of itself; `runtime.deployment.ModelState` does."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int | None: ...
    @property
    def state(self) -> Literal["loading", "ready", "unloaded", "unavailable"]: ...
    @property
    def reason(self) -> str: ...
    @property
    def inputs(self) -> tuple[Value, ...]: ...
    @property
    def outputs(self) -> tuple[Value, ...]: ...
    @property
    def backend(self) -> str: ...


class Counted(Described, Protocol):
    """What it has done; `requests` counts failures too. Times are sums over sweeps, of waiting over requests."""

    @property
    def requests(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def deadline_misses(self) -> int: ...
    @property
    def sweeps(self) -> int: ...
    @property
    def wave_sizes(self) -> Mapping[int, int]: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def execute_seconds(self) -> float: ...
    @property
    def queue_seconds(self) -> float: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...


def server_metadata() -> Object:
    """For GET /v2."""
    return {"name": NAME, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: Described) -> Object:
    """For GET /v2/models/{m}."""
    return {
        "name": model.name,
        "versions": [_version(model)] if model.version is not None else [],
        "platform": _platform(model),
        "inputs": [_tensor_metadata(value) for value in model.inputs],
        "outputs": [_tensor_metadata(value) for value in model.outputs],
    }


def _tensor_metadata(value: Value) -> Object:
    datatype = datatype_of(value.dtype, f"the value {value.name!r}")
    return {"name": value.name, "datatype": datatype.name, "shape": _dims(value)}


def _dims(value: Value) -> list[int]:
    """-1 where a dim may vary; a shape of unknown rank becomes one such dim."""
    return [-1] if value.shape is None else [dim if isinstance(dim, int) else -1 for dim in value.shape]


def model_config(model: Described) -> Object:
    """For GET /v2/models/{m}/config. `max_batch_size` is 0: shapes are whole, as in the metadata."""
    return {
        "name": model.name,
        "platform": _platform(model),
        "backend": model.backend,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [{**_tensor_config(value), "format": "FORMAT_NONE", "optional": False} for value in model.inputs],
        "output": [_tensor_config(value) for value in model.outputs],
        "instance_group": [{"name": model.name, "kind": _instance_kind(model), "count": 1}],
        "model_transaction_policy": {"decoupled": False},
        "parameters": {},
    }


def _tensor_config(value: Value) -> Object:
    datatype = datatype_of(value.dtype, f"the value {value.name!r}")
    return {"name": value.name, "data_type": datatype.config, "dims": _dims(value)}


def _instance_kind(model: Described) -> str:
    return "KIND_GPU" if model.backend == "tensorrt" else "KIND_CPU"


def statistics(models: Iterable[Counted]) -> Object:
    """For GET /v2/models/stats and /v2/models/{m}/stats. What was not measured is left out or counts nothing; under
    `trt_layering` stands what only chains have."""
    return {"model_stats": [_model_statistics(model) for model in models]}


def _model_statistics(model: Counted) -> Object:
    answered = model.requests - model.failures
    computed = model.stall_seconds + model.execute_seconds
    none = _duration(0, 0.0)
    return {
        "name": model.name,
        "version": _version(model),
        "inference_count": answered,
        "execution_count": model.sweeps,
        "inference_stats": {
            "success": _duration(answered, model.queue_seconds + computed),
            "fail": _duration(model.failures, 0.0),
            "queue": _duration(model.requests, model.queue_seconds),
            "compute_input": none,
            "compute_infer": _duration(model.sweeps, computed),
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [{"type": "CPU", "id": 0, "byte_size": model.resident_bytes}],
        "trt_layering": {
            "deadline_misses": model.deadline_misses,
            "wave_sizes": {str(size): count for size, count in sorted(model.wave_sizes.items())},
            "stall_ns": _nanoseconds(model.stall_seconds),
            "execute_ns": _nanoseconds(model.execute_seconds),
            "bytes_read": model.bytes_read,
        },
    }


def _duration(count: int, seconds: float) -> Object:
    return {"count": count, "ns": _nanoseconds(seconds)}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def repository_index(models: Iterable[Described], *, ready: Literal["any", "only"]) -> list[Object]:
    """For POST /v2/repository/index: all models, or only those that serve."""
    shown = [model for model in models if ready == "any" or model.state == "ready"]
    return [_index_entry(model) for model in shown]


def _index_entry(model: Described) -> Object:
    states = {"ready": "READY", "loading": "LOADING"}
    reason = model.reason or ("unloaded" if model.state == "unloaded" else "")
    state = states.get(model.state, "UNAVAILABLE")
    return {"name": model.name, "version": _version(model), "state": state, "reason": reason}


def _version(model: Described) -> str:
    return "" if model.version is None else str(model.version)


def _platform(model: Described) -> str:
    return f"trt_layering_{model.backend}"


class _Index(msgspec.Struct):
    ready: bool = False


class _Repository(msgspec.Struct):
    parameters: dict[str, Parameter] = {}


_INDEX, _REPOSITORY = msgspec.json.Decoder(_Index), msgspec.json.Decoder(_Repository)


def parse_index(body: bytes, limits: Limits) -> Literal["any", "only"]:
    """Which models a request for the index asks for; an empty body: any. Raises ProtocolError."""
    return "only" if body and decoded(body, _INDEX, limits).ready else "any"


def check_load(body: bytes, limits: Limits) -> None:
    """ProtocolError if a request to load a model brings a configuration or files of its own."""
    _only((), body, limits)


def check_unload(body: bytes, limits: Limits) -> None:
    """ProtocolError if a request to unload a model asks for more than that."""
    _only(("unload_dependents",), body, limits)


def _only(known: Sequence[str], body: bytes, limits: Limits) -> None:
    found = decoded(body, _REPOSITORY, limits).parameters if body else {}
    for name in found:
        if name not in known:
            raise ProtocolError("unsupported", f"a model is loaded as it was built, without {name[:80]!r}",
                                where="parameters", remedy="build the model anew, then load it")  # fmt: skip
