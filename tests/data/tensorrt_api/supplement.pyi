# ruff: noqa: F811, F821
# What docstrings do not tell of TensorRT's Python interface, for those classes that we may use: the types of
# properties, special methods, enumerations inside classes, and which calls may return None. From the public reference
# of its Python API. Whether a member exists in a version is told by `tables.json` alone; a property without a type here
# is an `object`, of which nothing can be asked, until its type is added. `OrNone` marks a method that may return None.

class DataType:
    itemsize: float  # a half for types of four bits

class IHostMemory:
    dtype: DataType
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Dims:
    MAX_DIMS: int
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Dims: ...
    def __iter__(self) -> Iterator[int]: ...

class Weights:
    dtype: DataType
    nbytes: int
    size: int
    def __len__(self) -> int: ...

class ILogger:
    class Severity:
        INTERNAL_ERROR: ClassVar[ILogger.Severity]
        ERROR: ClassVar[ILogger.Severity]
        WARNING: ClassVar[ILogger.Severity]
        INFO: ClassVar[ILogger.Severity]
        VERBOSE: ClassVar[ILogger.Severity]
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...
        def __int__(self) -> int: ...

    INTERNAL_ERROR: ClassVar[ILogger.Severity]
    ERROR: ClassVar[ILogger.Severity]
    WARNING: ClassVar[ILogger.Severity]
    INFO: ClassVar[ILogger.Severity]
    VERBOSE: ClassVar[ILogger.Severity]

class Logger:
    min_severity: ILogger.Severity

class Builder:
    error_recorder: IErrorRecorder | None
    gpu_allocator: IGpuAllocator | None
    logger: ILogger
    max_threads: int
    num_DLA_cores: int
    platform_has_fast_fp16: bool
    platform_has_fast_int8: bool
    platform_has_tf32: bool
    build_serialized_network: OrNone
    build_engine_with_config: OrNone

class IBuilderConfig:
    DLA_core: int
    avg_timing_iterations: int
    builder_optimization_level: int
    default_device_type: DeviceType
    engine_capability: EngineCapability
    flags: int
    hardware_compatibility_level: HardwareCompatibilityLevel
    l2_limit_for_tiling: int
    max_aux_streams: int
    max_num_tactics: int
    num_optimization_profiles: int
    plugins_to_serialize: list[str]
    profile_stream: int
    profiling_verbosity: ProfilingVerbosity
    progress_monitor: IProgressMonitor | None
    quantization_flags: int
    runtime_platform: RuntimePlatform
    tiling_optimization_level: TilingOptimizationLevel
    get_timing_cache: OrNone

class IOptimizationProfile:
    extra_memory_target: float
    def __bool__(self) -> bool: ...

class INetworkDefinition:
    builder: Builder
    error_recorder: IErrorRecorder | None
    flags: int
    has_implicit_batch_dimension: bool
    name: str
    num_inputs: int
    num_layers: int
    num_outputs: int
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> ILayer: ...

class ILayer:
    metadata: str
    name: str
    num_inputs: int
    num_outputs: int
    precision: DataType
    precision_is_set: bool
    type: LayerType

class ITensor:
    allowed_formats: int
    broadcast_across_batch: bool
    dtype: DataType
    is_execution_tensor: bool
    is_network_input: bool
    is_network_output: bool
    is_shape_tensor: bool
    location: TensorLocation
    name: str
    shape: Dims

class OnnxParser:
    flags: int
    num_errors: int
    num_subgraphs: int

class Runtime:
    DLA_core: int
    engine_host_code_allowed: bool
    error_recorder: IErrorRecorder | None
    gpu_allocator: IGpuAllocator | None
    logger: ILogger
    max_threads: int
    num_DLA_cores: int
    tempfile_control_flags: int
    temporary_directory: str
    deserialize_cuda_engine: OrNone
    load_runtime: OrNone

class ICudaEngine:
    device_memory_size: int
    device_memory_size_v2: int
    engine_capability: EngineCapability
    error_recorder: IErrorRecorder | None
    hardware_compatibility_level: HardwareCompatibilityLevel
    has_implicit_batch_dimension: bool
    minimum_weight_streaming_budget: int
    name: str
    num_aux_streams: int
    num_io_tensors: int
    num_layers: int
    num_optimization_profiles: int
    profiling_verbosity: ProfilingVerbosity
    refittable: bool
    streamable_weights_size: int
    tactic_sources: int
    weight_streaming_budget: int
    weight_streaming_budget_v2: int
    weight_streaming_scratch_memory_size: int
    create_execution_context: OrNone
    serialize: OrNone
    serialize_with_config: OrNone

class ISerializationConfig:
    flags: int

class EngineInspector:
    error_recorder: IErrorRecorder | None
    execution_context: IExecutionContext | None

class IExecutionContext:
    active_optimization_profile: int
    all_binding_shapes_specified: bool
    all_shape_inputs_specified: bool
    debug_sync: bool
    device_memory: int
    engine: ICudaEngine
    enqueue_emits_profile: bool
    error_recorder: IErrorRecorder | None
    name: str
    nvtx_verbosity: ProfilingVerbosity
    persistent_cache_limit: int
    profiler: IProfiler | None
    temporary_allocator: IGpuAllocator | None

class Refitter:
    error_recorder: IErrorRecorder | None
    logger: ILogger
    max_threads: int
    weights_validation: bool

class IErrorRecorder:
    MAX_DESC_LENGTH: int
