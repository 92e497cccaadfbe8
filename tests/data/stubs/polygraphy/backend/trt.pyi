# Polygraphy 0.53, of its TensorRT part the loaders that build engines from ONNX, with the arguments that are not
# deprecated or for deprecated things. A test compares the names and parameters with the Polygraphy installed.

from collections.abc import Callable, Sequence
from typing import IO

import tensorrt as trt
from typing_extensions import Self

Network = tuple[trt.Builder, trt.INetworkDefinition, trt.OnnxParser]
NetworkAndBuilder = tuple[trt.Builder, trt.INetworkDefinition] | Network
Configure = Callable[[trt.Builder, trt.INetworkDefinition], trt.IBuilderConfig]

def get_trt_logger() -> trt.ILogger: ...

class Profile(dict[str, object]):
    def __init__(self) -> None: ...
    def add(self, name: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> Self: ...
    def fill_defaults(self, network: trt.INetworkDefinition, default_shape_value: int | None = ...) -> Self: ...
    def to_trt(self, builder: trt.Builder, network: trt.INetworkDefinition) -> trt.IOptimizationProfile: ...

class NetworkFromOnnxBytes:
    def __init__(
        self,
        model_bytes: bytes | Callable[[], bytes],
        flags: Sequence[trt.OnnxParserFlag] | None = ...,
        plugin_instancenorm: bool | None = ...,
        strongly_typed: bool | None = ...,
    ) -> None: ...
    def __call__(self) -> Network: ...

class NetworkFromOnnxPath:
    def __init__(
        self,
        path: str | Callable[[], str],
        flags: Sequence[trt.OnnxParserFlag] | None = ...,
        plugin_instancenorm: bool | None = ...,
        strongly_typed: bool | None = ...,
    ) -> None: ...
    def __call__(self) -> Network: ...

class CreateConfig:
    def __init__(
        self,
        tf32: bool | None = ...,
        *,
        profiles: Sequence[Profile] | None = ...,
        load_timing_cache: str | IO[bytes] | None = ...,
        sparse_weights: bool | None = ...,
        tactic_sources: Sequence[trt.TacticSource] | None = ...,
        profiling_verbosity: trt.ProfilingVerbosity | None = ...,
        memory_pool_limits: dict[trt.MemoryPoolType, int] | None = ...,
        refittable: bool | None = ...,
        strip_plan: bool | None = ...,
        preview_features: Sequence[trt.PreviewFeature] | None = ...,
        engine_capability: trt.EngineCapability | None = ...,
        direct_io: bool | None = ...,
        builder_optimization_level: int | None = ...,
        hardware_compatibility_level: trt.HardwareCompatibilityLevel | None = ...,
        max_aux_streams: int | None = ...,
        version_compatible: bool | None = ...,
        exclude_lean_runtime: bool | None = ...,
        error_on_timing_cache_miss: bool | None = ...,
        disable_compilation_cache: bool | None = ...,
        progress_monitor: trt.IProgressMonitor | None = ...,
    ) -> None: ...
    def __call__(self, builder: trt.Builder, network: trt.INetworkDefinition) -> trt.IBuilderConfig: ...

class PostprocessConfig:
    def __init__(
        self,
        config: Configure | CreateConfig,
        func: Callable[[trt.Builder, trt.INetworkDefinition, trt.IBuilderConfig], None],
    ) -> None: ...
    def __call__(self, builder: trt.Builder, network: trt.INetworkDefinition) -> trt.IBuilderConfig: ...

class EngineBytesFromNetwork:
    def __init__(
        self,
        network: NetworkAndBuilder | Callable[[], NetworkAndBuilder],
        config: Configure | None = ...,
        save_timing_cache: str | IO[bytes] | None = ...,
    ) -> None: ...
    def __call__(self) -> trt.IHostMemory: ...

class EngineFromBytes:
    def __init__(
        self,
        serialized_engine: bytes | Callable[[], bytes],
        runtime: trt.Runtime | Callable[[], trt.Runtime] | None = ...,
    ) -> None: ...
    def __call__(self) -> trt.ICudaEngine: ...

class SaveEngine:
    def __init__(self, engine: trt.ICudaEngine | Callable[[], trt.ICudaEngine], path: str) -> None: ...
    def __call__(self) -> trt.ICudaEngine: ...
