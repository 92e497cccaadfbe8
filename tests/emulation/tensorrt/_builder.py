"""Builders, their configuration, profiles and timing caches; imports onnx and `emulated_device`. A build that fails
logs why and returns None; the EMULATED_BUILD_* switches of README.md make builds fail."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import onnx
from emulated_device import machine
from onnx import numpy_helper

from . import _enums, _tables, _values
from ._native import Native, plain
from ._network import INetworkDefinition
from ._plan import Plan, PlanTensor, PlanWeight, tensor_shape
from ._running import output_shapes

_MAGIC = b"emulated timing cache "


class IOptimizationProfile(Native):
    """False where a range is not min <= opt <= max."""

    extra_memory_target = plain("extra_memory_target", 1.0)

    def _setup(self) -> None:
        self._shapes: dict[str, list[list[int]]] = {}
        self._input_values: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._shapes[input] = _range(min, opt, max)

    def set_shape_input(self, input: str, min: Any, opt: Any, max: Any) -> None:
        self._input_values[input] = _range(min, opt, max)

    def get_shape(self, input: str) -> list[_values.Dims]:
        return [_values.Dims(shape) for shape in self._shapes.get(input, [])]

    def get_shape_input(self, input: str) -> list[list[int]]:
        return self._input_values.get(input, [])

    def __bool__(self) -> bool:
        ranges = [*self._shapes.values(), *self._input_values.values()]
        return all(low <= best <= high for one in ranges for low, best, high in zip(*one, strict=True))


def _range(*shapes: Any) -> list[list[int]]:
    lists = [[int(size) for size in shape] for shape in shapes]
    if len({len(shape) for shape in lists}) != 1 or any(size < 0 for shape in lists for size in shape):
        raise RuntimeError("Shape provided for min, opt or max is inconsistent with other shapes.")
    return lists


class ITimingCache(Native):
    def _setup(self, entries: dict[str, int]) -> None:
        self._entries = entries

    def serialize(self) -> _values.IHostMemory:
        return _values.IHostMemory(_MAGIC + json.dumps([*_of_this_device(), self._entries]).encode())

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._entries.update(input_cache._entries)
        return True

    def reset(self) -> bool:
        self._entries.clear()
        return True


def _of_this_device() -> list[str]:
    return [_tables.FULL_VERSION, machine().name, machine().sm]


class IBuilderConfig(Native):
    """The settings that change nothing here are only kept."""

    DLA_core = plain("DLA_core", -1)
    avg_timing_iterations = plain("avg_timing_iterations", 1)
    builder_optimization_level = plain("builder_optimization_level", 3)
    default_device_type = plain("default_device_type", _enums.DeviceType.GPU)
    engine_capability = plain("engine_capability", _enums.EngineCapability.STANDARD)
    hardware_compatibility_level = plain("hardware_compatibility_level", _enums.HardwareCompatibilityLevel.NONE)
    int8_calibrator = plain("int8_calibrator", None)
    max_aux_streams = plain("max_aux_streams", -1)
    max_num_tactics = plain("max_num_tactics", -1)
    profile_stream = plain("profile_stream", 0)
    profiling_verbosity = plain("profiling_verbosity", _enums.ProfilingVerbosity.LAYER_NAMES_ONLY)
    progress_monitor = plain("progress_monitor", None)
    runtime_platform = plain("runtime_platform", _enums.RuntimePlatform.SAME_AS_BUILD)
    flags = property(lambda self: self._flags, lambda self, flags: setattr(self, "_flags", int(flags)))
    num_optimization_profiles = property(lambda self: len(self._profiles))

    def _setup(self, logger: Any) -> None:
        self._logger = logger
        self._flags = 1 << int(_enums.BuilderFlag.TF32)
        self._profiles: list[IOptimizationProfile] = []
        self._limits: dict[int, int] = {}
        self._cache: ITimingCache | None = None
        self._features: set[int] = set()
        self._sources = sum(1 << int(source) for source in _enums.TacticSource.__members__.values())

    def set_flag(self, flag: Any) -> None:
        self._flags |= 1 << int(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags &= ~(1 << int(flag))

    def get_flag(self, flag: Any) -> bool:
        return bool(self._flags >> int(flag) & 1)

    def get_quantization_flag(self, flag: Any) -> bool:
        return False

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._limits[int(pool)] = int(pool_size)

    def get_memory_pool_limit(self, pool: Any) -> int:
        return self._limits.get(int(pool), machine().total_memory)

    def set_preview_feature(self, feature: Any, enable: bool) -> None:
        (self._features.add if enable else self._features.discard)(int(feature))

    def get_preview_feature(self, feature: Any) -> bool:
        return int(feature) in self._features

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        self._sources = int(tactic_sources)
        return True

    def get_tactic_sources(self) -> int:
        return self._sources

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        """Its index, or -1 where it is not valid."""
        if not profile:
            _values.error(self._logger, "4: API Usage Error", "Profile is not valid: it is not min <= opt <= max.")
            return -1
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: Any) -> ITimingCache | None:
        data = bytes(serialized_timing_cache)
        try:
            entries: dict[str, int] = {}
            if data:
                if not data.startswith(_MAGIC):
                    raise ValueError("it is corrupt")
                *made_by, entries = json.loads(data[len(_MAGIC) :])
                if made_by[0] != _tables.FULL_VERSION:
                    raise ValueError(f"TensorRT {made_by[0]} made it")
        except ValueError as error:
            _values.error(self._logger, "4: Internal Error", f"Cannot read the timing cache: {error}")
            return None
        cache = ITimingCache._new(entries)
        cache._device = made_by[1:] if data else _of_this_device()[1:]
        return cache

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache._device != _of_this_device()[1:] and not ignore_mismatch:
            _values.error(self._logger, "4: Internal Error", "The timing cache is of another device.")
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache

    def reset(self) -> None:
        self._setup(self._logger)

    def _has(self, name: str) -> bool:
        flag = getattr(_enums.BuilderFlag, name, None)
        return flag is not None and bool(self._flags >> int(flag) & 1)


class _Refused(Exception):
    """Why a build cannot be: TensorRT's code and words."""


class Builder(Native):
    max_threads = plain("max_threads", 1)
    num_DLA_cores = property(lambda self: 0)
    platform_has_fast_fp16 = property(lambda self: True)
    platform_has_fast_int8 = property(lambda self: True)
    platform_has_tf32 = property(lambda self: True)
    logger = property(lambda self: self._logger)

    def __init__(self, logger: Any) -> None:
        if os.environ.get("EMULATED_CUINIT", "0") != "0":
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition._new(self, int(flags))

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig._new(self._logger)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile._new()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig, kernel_text: object = None
    ) -> _values.IHostMemory | None:
        """The plan, or None and an error in the log."""
        if network._parser is not None and network._parser() is None:
            machine().fault("a network is built whose parser is gone: its weights were the parser's")
        try:
            _strike(network)
            return _values.IHostMemory(_build(network, config).encode())
        except _Refused as error:
            _values.error(self._logger, *error.args)
            return None


def _matches(switch: str, network: INetworkDefinition) -> bool:
    pattern = os.environ.get(switch)
    if not pattern:
        return False
    names = [network.name, *(t.name for t in network._inputs + network._outputs), *(n.name for n in network._layers)]
    names += [f"weights>{pattern[8:]}"] if pattern.startswith("weights>") and _needs(network) > int(pattern[8:]) else []
    return any(fnmatch.fnmatchcase(name, pattern) for name in names) and _once_more()


def _once_more() -> bool:
    """Whether a build may still fail: EMULATED_BUILD_TIMES is a file with the number of times."""
    path = os.environ.get("EMULATED_BUILD_TIMES")
    if not path:
        return True
    left = int(Path(path).read_text())
    Path(path).write_text(str(max(0, left - 1)))
    return left > 0


def _strike(network: INetworkDefinition) -> None:
    if _matches("EMULATED_BUILD_KILL", network):
        os.kill(os.getpid(), signal.SIGKILL)
    if _matches("EMULATED_BUILD_RAISE", network):
        raise RuntimeError("emulated failure of the builder")
    if _matches("EMULATED_BUILD_NONE", network):
        raise _Refused("10: Internal Error", "Could not find any implementation for node emulated.")


def _needs(network: INetworkDefinition) -> int:
    """Bytes of the constants and of the inputs with static shapes."""
    graph = network._model.graph
    sizes = [(t.data_type, list(t.dims)) for t in graph.initializer]
    sizes += [(v.type.tensor_type.elem_type, tensor_shape(v)) for v in graph.input if -1 not in tensor_shape(v)]
    return sum(_values.nbytes(_values.ONNX_TO_TRT.get(kind, "INT64"), shape) for kind, shape in sizes)


def _build(network: INetworkDefinition, config: IBuilderConfig) -> Plan:
    refit = _check_flags(network, config)
    profiles = _check_profiles(network, config)
    _check_workspace(network, config)
    tensors = [
        PlanTensor(
            t.name, True, t._value.type.tensor_type.elem_type, list(t.shape), t.is_shape_tensor, profiles[t.name]
        )
        for t in network._inputs
    ]
    tensors += [
        PlanTensor(t.name, False, t._value.type.tensor_type.elem_type, list(t.shape), False) for t in network._outputs
    ]
    stripped = config._has("STRIP_PLAN")
    model, weights, values = _take_weights(network, refit, stripped)
    plan = Plan(
        network.name, machine().sm, machine().name, refit, stripped, [], len(network), tensors, weights, model, values
    )
    plan.scratch = [scratch_bytes(plan, index) for index in range(max(1, len(config._profiles)))]
    if config._cache is not None and not config._has("DISABLE_TIMING_CACHE"):
        for node in network._model.graph.node:
            signature = node.SerializeToString() + b"".join(map(str.encode, node.input))
            config._cache._entries[f"{node.op_type}-{zlib.crc32(signature):08x}"] = 1
    return plan


def _check_flags(network: INetworkDefinition, config: IBuilderConfig) -> str:
    always_strong = _tables.at_least(11, 0)
    if not always_strong and not network.get_flag(_enums.NetworkDefinitionCreationFlag.STRONGLY_TYPED):
        raise _Refused("3: API Usage Error", "Only strongly typed networks are emulated.")
    if not len(network):
        raise _Refused("4: Internal Error", "Network must have at least one output.")
    for name in ("FP16", "BF16", "INT8", "FP8", "INT4", "OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS"):
        if config._has(name):
            raise _Refused("3: API Usage Error", f"{name} must not be set for a strongly typed network.")
    kinds = [name for name in ("REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL") if config._has(name)]
    if len(kinds) > 1:
        raise _Refused("3: API Usage Error", f"{' and '.join(kinds)} exclude each other.")
    if kinds and len(config._profiles) > 1:
        raise _Refused("4: API Usage Error", "A refittable engine can have one optimization profile only.")
    return kinds[0] if kinds else "REFIT_IDENTICAL" if config._has("STRIP_PLAN") else ""


def _check_profiles(network: INetworkDefinition, config: IBuilderConfig) -> dict[str, list[list[list[int]]]]:
    found: dict[str, list[list[list[int]]]] = {}
    for tensor in network._inputs:
        declared, name = list(tensor.shape), tensor.name
        dynamic = -1 in declared
        if (dynamic or tensor.is_shape_tensor) and not config._profiles:
            raise _Refused(
                "4: API Usage Error",
                "Network has dynamic or shape inputs, but no optimization profile has been defined.",
            )
        found[name] = []
        for profile in config._profiles or [IOptimizationProfile._new()]:
            if tensor.is_shape_tensor:
                shapes = profile._input_values.get(name)
            else:
                shapes = profile._shapes.get(name) or (None if dynamic else [declared] * 3)
            if shapes is None:
                raise _Refused("4: API Usage Error", f"The optimization profile has no range for input {name}.")
            _check_range(name, None if tensor.is_shape_tensor else declared, shapes)
            found[name].append(shapes)
    return found


def _check_range(name: str, declared: list[int] | None, shapes: list[list[int]]) -> None:
    if not all(low <= best <= high for low, best, high in zip(*shapes, strict=True)):
        raise _Refused("4: API Usage Error", f"The profile of input {name} is not min <= opt <= max.")
    for shape in shapes if declared is not None else []:
        if len(shape) != len(declared) or any(d not in (-1, size) for d, size in zip(declared, shape, strict=True)):
            raise _Refused("4: API Usage Error", f"The profile of input {name} has {shape}, the network {declared}.")


def _check_workspace(network: INetworkDefinition, config: IBuilderConfig) -> None:
    limit = config.get_memory_pool_limit(_enums.MemoryPoolType.WORKSPACE)
    need = int(os.environ.get("EMULATED_WORKSPACE_NEED") or 2 * _needs(network))
    if limit < need:
        name = network._layers[-1].name
        raise _Refused("10: Internal Error", f"Could not find any implementation for node {name}.")
    memory = os.environ.get("EMULATED_BUILD_MEMORY")
    if memory and 3 * _needs(network) + min(limit, machine().total_memory) > int(memory):
        os.kill(os.getpid(), signal.SIGKILL)


def _take_weights(network: INetworkDefinition, refit: str, stripped: bool) -> tuple[bytes, list[PlanWeight], bytes]:
    """The model with its weights as inputs, their descriptions, the values that are stored."""
    model = onnx.ModelProto()
    model.CopyFrom(network._model)
    weights, values = [], []
    for name, tensor in network._weights().items():
        refittable = bool(refit) and (refit != "REFIT_INDIVIDUAL" or name in network._marked)
        data = numpy_helper.to_array(tensor).tobytes()
        stored = not (stripped and refittable)
        shape = list(tensor.dims)
        weights.append(PlanWeight(name, tensor.data_type, shape, len(data), zlib.crc32(data), refittable, stored))
        values.append(data if stored else b"")
        model.graph.initializer.remove(next(t for t in model.graph.initializer if t.name == name))
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, shape))
    return model.SerializeToString(deterministic=True), weights, b"".join(values)


def scratch_bytes(plan: Plan, profile: int) -> int:
    """The scratch that a profile needs: as much as the outputs at their largest."""
    inputs = [t for t in plan.tensors if t.is_input]
    largest = {t.name: tuple(t.profiles[profile][2]) for t in inputs}
    return scratch_for(plan, largest)


def scratch_for(plan: Plan, chosen: dict[str, tuple[int, ...]]) -> int:
    """The scratch for inputs of these shapes (values, for shape tensors)."""
    shapes, values = shapes_and_values(plan, chosen)
    found = output_shapes(plan.model, shapes, values)
    outputs = [t for t in plan.tensors if not t.is_input]
    sizes = [_values.nbytes(_values.ONNX_TO_TRT.get(t.onnx_type, "INT64"), found[t.name]) for t in outputs]
    return max(1, -(-sum(map(abs, sizes)) // 512)) * 512


def shapes_and_values(plan: Plan, chosen: dict[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """What `output_shapes` takes."""
    inputs = [t for t in plan.tensors if t.is_input]
    shapes = tuple((t.name, tuple(t.shape) if t.is_shape_tensor else chosen[t.name]) for t in inputs)
    values = tuple((t.name, chosen[t.name]) for t in inputs if t.is_shape_tensor)
    return shapes, values
