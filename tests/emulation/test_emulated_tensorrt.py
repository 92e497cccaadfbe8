"""The emulated TensorRT behaves as documented, in each version, and breaks loudly where it would be misused."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

EMULATION = Path(__file__).parent
VERSIONS = ("10.3", "10.7", "10.13", "10.16", "11.0", "11.4")
FACTS = json.loads((EMULATION.parent / "data" / "tensorrt_api" / "tables.json").read_text())
ROWS, COLUMNS = 4, 8

pytestmark = pytest.mark.filterwarnings("ignore:Context managers for TensorRT types:DeprecationWarning")


def take(*packages: str) -> dict[str, ModuleType]:
    """Remove the modules of these packages from `sys.modules`."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in packages}


LOADED: dict[str, dict[str, ModuleType]] = {}
"""Version → its modules, imported once; each test gets a new machine."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Imports the emulated TensorRT of a version, on a new machine described by switches."""
    before = take("tensorrt", "emulated_device", "polygraphy")
    monkeypatch.syspath_prepend(str(EMULATION))

    def import_(version: str, **switches: str) -> ModuleType:
        for name, value in {"EMULATED_TENSORRT": version, **switches}.items():
            monkeypatch.setenv(name, value)
        take("tensorrt", "emulated_device", "polygraphy")
        sys.modules.update(LOADED.get(version, {}))
        importlib.import_module("emulated_device").replace_machine()
        found = importlib.import_module("tensorrt")
        LOADED[version] = {n: m for n, m in sys.modules.items() if n.split(".")[0] in ("tensorrt", "emulated_device")}
        return found

    yield import_
    take("tensorrt", "emulated_device", "polygraphy")
    sys.modules.update(before)


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest, load: Callable[..., ModuleType]) -> ModuleType:
    """The emulated TensorRT of each version."""
    return load(request.param)


@pytest.fixture
def newest(load: Callable[..., ModuleType]) -> ModuleType:
    return load("11.4")


def machine() -> Any:
    return importlib.import_module("emulated_device").machine()


def idle() -> None:
    """Let streams do nothing before somebody waits for them."""
    machine()._drift = lambda: None


def fault() -> type[Exception]:
    return importlib.import_module("emulated_device").EmulationFault


class Log:
    """A logger of the emulated version that keeps what it is told."""

    def __init__(self, trt: ModuleType) -> None:
        said = self.said = []

        class Keeping(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                said.append((severity.name, msg))

        self.logger = Keeping()

    @property
    def last(self) -> str:
        return self.said[-1][1] if self.said else ""


RANDOM = np.random.default_rng(7)
W = RANDOM.standard_normal((ROWS, COLUMNS)).astype(np.float32)
B = RANDOM.standard_normal(COLUMNS).astype(np.float32)
X = RANDOM.standard_normal((2, ROWS)).astype(np.float32)


def linear(weights: str = "constants", kind: int = TensorProto.FLOAT, batch: str | int = "n") -> onnx.ModelProto:
    """o0 = i0 @ w0 + w1, the weights as constants or as inputs."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    values = {"w0": W.astype(dtype), "w1": B.astype(dtype)}
    inputs = [helper.make_tensor_value_info("i0", kind, [batch, ROWS])]
    constants = []
    for name, value in values.items():
        if weights == "constants":
            constants.append(numpy_helper.from_array(value, name))
        else:
            inputs.append(helper.make_tensor_value_info(name, kind, value.shape))
    nodes = [
        helper.make_node("MatMul", ["i0", "w0"], ["a"], name="multiply"),
        helper.make_node("Add", ["a", "w1"], ["o0"], name="shift"),
    ]
    outputs = [helper.make_tensor_value_info("o0", kind, [batch, COLUMNS])]
    return model_of(helper.make_graph(nodes, "linear", inputs, outputs, constants))


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def parsed(trt: ModuleType, model: onnx.ModelProto, log: Log) -> SimpleNamespace:
    """Builder, network, parser and configuration of a model."""
    builder = trt.Builder(log.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log.logger)
    assert parser.parse(model.SerializeToString()), log.said
    return SimpleNamespace(
        builder=builder, network=network, parser=parser, config=builder.create_builder_config(), log=log
    )


def profile(made: SimpleNamespace, **ranges: tuple[tuple[int, ...], ...]) -> int:
    one = made.builder.create_optimization_profile()
    for name, shapes in ranges.items():
        one.set_shape(name, *shapes)
    return made.config.add_optimization_profile(one)


BATCHES = ((1, ROWS), (2, ROWS), (4, ROWS))


def build(
    trt: ModuleType,
    model: onnx.ModelProto | None = None,
    flags: tuple[str, ...] = (),
    log: Log | None = None,
    mark: tuple[str, ...] = (),
) -> Any:
    """The plan of a model, its first input in `BATCHES`."""
    made = parsed(trt, model or linear(), log or Log(trt))
    profile(made, i0=BATCHES)
    for name in flags:
        made.config.set_flag(getattr(trt.BuilderFlag, name))
    for name in mark:
        assert made.network.mark_weights_refittable(name)
    return made.builder.build_serialized_network(made.network, made.config)


class Running:
    """An engine, a context with scratch of its own, and buffers."""

    def __init__(self, trt: ModuleType, plan: Any, log: Log | None = None) -> None:
        self.trt, self.machine = trt, machine()
        self.log = log or Log(trt)
        self.runtime = trt.Runtime(self.log.logger)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        assert self.engine is not None, self.log.said
        self.context = self.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        size = self.engine.device_memory_size_v2
        self.scratch = self.machine.allocate(size, "device")
        self.context.set_device_memory(self.scratch, size)
        self.stream = self.machine.new_stream(blocking=False)
        self.addresses: dict[str, int] = {}

    def put(self, name: str, value: np.ndarray) -> int:
        address = self.room(name, value.nbytes)
        self.machine.view(address, value.nbytes)[:] = np.ascontiguousarray(value).view(np.uint8).ravel()
        return address

    def room(self, name: str, nbytes: int) -> int:
        if name not in self.addresses:
            self.addresses[name] = self.machine.allocate(nbytes, "device")
            if name in [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]:
                assert self.context.set_tensor_address(name, self.addresses[name])
        return self.addresses[name]

    def ready(self, value: np.ndarray = X) -> None:
        assert self.context.set_input_shape("i0", value.shape)
        self.put("i0", value)
        self.room("o0", 4 * COLUMNS * 4)

    def output(self) -> np.ndarray:
        return self.machine.view(self.addresses["o0"], X.shape[0] * COLUMNS * 4).view(np.float32).reshape(-1, COLUMNS)

    def run(self) -> np.ndarray:
        assert self.context.execute_async_v3(self.stream.handle), self.log.said
        self.stream.synchronize()
        return self.output().copy()


def close_to(expected: np.ndarray) -> Any:
    return pytest.approx(expected, rel=1e-5, abs=1e-5)


# What the bindings look like


def test_every_name_is_in_the_facts_of_the_version(trt: ModuleType) -> None:
    tables = sys.modules["tensorrt._tables"]
    for cls in trt.IMPLEMENTED:
        described = tables.CLASSES.get(cls.__name__)
        assert (described is not None) == hasattr(trt, cls.__name__)
        for name in set(vars(cls)) if described else ():
            assert name.startswith("_") or name in described["members"] or name in trt.ILogger.Severity.__members__
    for name, described in tables.CLASSES.items():
        for member, fact in described["members"].items():
            assert member == "__init__" or inspect.getattr_static(getattr(trt, name), member, None) is not None
            if isinstance(fact, int):
                assert int(getattr(getattr(trt, name), member)) == fact
    assert trt.__version__ == FACTS["versions"][tables.VERSION]


def test_parameters_are_called_as_in_the_facts(trt: ModuleType) -> None:
    tables = sys.modules["tensorrt._tables"]
    checked = 0
    for cls in trt.IMPLEMENTED:
        for name, fact in tables.CLASSES.get(cls.__name__, {"members": {}})["members"].items():
            function = getattr(vars(cls).get(name), "__wrapped__", None)
            if function is None or not isinstance(fact, list):
                continue
            documented = set(re.findall(r"(\w+)(?=: )", " ".join(fact)))
            emulated = set(inspect.signature(function).parameters) - {"self"}
            assert documented <= emulated, (cls, name)
            checked += 1
    assert checked > 60


def test_members_come_and_go_with_versions(load: Callable[..., ModuleType]) -> None:
    old = load("10.3")
    assert hasattr(old.BuilderFlag, "FP16")
    assert hasattr(old, "IStreamReader")
    assert not hasattr(old, "IStreamReaderV2")
    assert int(old.BuilderFlag.REFIT_INDIVIDUAL) == 23
    new = load("11.4")
    assert not hasattr(new.BuilderFlag, "FP16")
    assert not hasattr(new, "IStreamReader")
    assert hasattr(new.Refitter, "release_refit_resources")
    assert not hasattr(new.ICudaEngine, "device_memory_size")
    assert int(new.BuilderFlag.REFIT_INDIVIDUAL) == 22
    assert int(new.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 0


def test_unknown_attributes_and_arguments_are_refused(newest: ModuleType) -> None:
    log = Log(newest)
    config = newest.Builder(log.logger).create_builder_config()
    with pytest.raises(AttributeError):
        config.int8_calibrator = None
    with pytest.raises(AttributeError):
        config.max_workspace_size = 1
    with pytest.raises(TypeError, match="incompatible function arguments"):
        config.set_memory_pool_limit(newest.MemoryPoolType.WORKSPACE, 1.5)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        config.set_flag(4)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        config.set_memory_pool_limit(newest.MemoryPoolType.WORKSPACE, size=1)
    with pytest.raises(TypeError, match="No constructor"):
        newest.IBuilderConfig()
    with pytest.raises(fault(), match="not emulated"):
        config.can_run_on_DLA(None)


def test_a_logger_must_call_the_constructor_of_its_base(newest: ModuleType) -> None:
    class Forgetful(newest.ILogger):
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="must be called"):
        Forgetful()


def test_types_have_sizes_and_names_of_numpy(newest: ModuleType) -> None:
    assert newest.DataType.BF16.itemsize == 2
    assert newest.nptype(newest.float16) is np.float16
    with pytest.raises(TypeError):
        newest.nptype(newest.bfloat16)
    assert newest.volume((2, 3, 4)) == 24
    with pytest.raises(TypeError):
        1 << newest.BuilderFlag.REFIT


def test_a_plan_is_a_buffer_and_nothing_more(newest: ModuleType) -> None:
    plan = build(newest)
    assert plan
    assert plan.nbytes == len(bytes(plan)) == memoryview(plan).nbytes
    for use in (lambda: len(plan), lambda: plan[:4], lambda: plan + b"", lambda: iter(plan)):
        with pytest.raises(TypeError):
            use()


# Polygraphy, unchanged


def test_polygraphy_builds_and_loads(trt: ModuleType, tmp_path: Path) -> None:
    poly = importlib.import_module("polygraphy.backend.trt")
    importlib.import_module("polygraphy.logger").G_LOGGER.module_severity = 50
    cache = tmp_path / "timing.cache"
    plans = []
    for _ in range(2):
        config = poly.CreateConfig(
            profiles=[poly.Profile().add("i0", *BATCHES)],
            memory_pool_limits={trt.MemoryPoolType.WORKSPACE: 1 << 20},
            load_timing_cache=str(cache),
            refittable=True,
            strip_plan=True,
            builder_optimization_level=2,
            profiling_verbosity=trt.ProfilingVerbosity.DETAILED,
        )
        network = poly.NetworkFromOnnxBytes(linear().SerializeToString(), strongly_typed=True)
        plans.append(bytes(poly.EngineBytesFromNetwork(network, config, save_timing_cache=str(cache))()))
    assert plans[0] == plans[1]
    assert b"MatMul" in cache.read_bytes()
    engine = poly.EngineFromBytes(plans[0])()
    assert engine.refittable
    saved = tmp_path / "block.plan"
    poly.SaveEngine(engine, str(saved))()
    assert saved.read_bytes() == plans[0]


def test_polygraphy_reports_a_model_that_is_not_parsed(newest: ModuleType) -> None:
    poly = importlib.import_module("polygraphy.backend.trt")
    importlib.import_module("polygraphy.logger").G_LOGGER.module_severity = 60
    error = importlib.import_module("polygraphy.exception").PolygraphyException
    with pytest.raises(error):
        poly.NetworkFromOnnxBytes(b"no model", strongly_typed=True)()


# Parsing and building


def test_operators_of_other_domains_are_not_parsed(trt: ModuleType) -> None:
    graph = linear().graph
    graph.node[1].domain = "com.microsoft"
    log = Log(trt)
    network = trt.Builder(log.logger).create_network(0)
    parser = trt.OnnxParser(network, log.logger)
    assert not parser.parse(model_of(graph).SerializeToString())
    assert parser.num_errors == 1
    assert parser.get_error(0).code() == trt.ErrorCode.UNSUPPORTED_NODE
    assert parser.get_error(0).node_name() == "shift"
    assert "No importer" in parser.get_error(0).desc()


def test_external_data_is_found_beside_the_file(newest: ModuleType, tmp_path: Path) -> None:
    model = linear()
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    log = Log(newest)
    for where in ("file", "bytes"):
        network = newest.Builder(log.logger).create_network(0)
        parser = newest.OnnxParser(network, log.logger)
        path = str(tmp_path / "m.onnx")
        parsed = parser.parse_from_file(path) if where == "file" else parser.parse(Path(path).read_bytes(), path)
        assert parsed
        assert network.num_layers == 2
        assert network.get_output(0).shape == (-1, COLUMNS)
    parser = newest.OnnxParser(newest.Builder(log.logger).create_network(0), log.logger)
    assert not parser.parse_from_file(str(tmp_path / "none.onnx"))


def test_a_network_whose_parser_is_gone_is_a_fault(newest: ModuleType) -> None:
    made = parsed(newest, linear(batch=2), Log(newest))
    del made.parser
    gc.collect()
    with pytest.raises(fault(), match="parser is gone"):
        made.builder.build_serialized_network(made.network, made.config)


def test_weakly_typed_networks_are_refused_before_11(trt: ModuleType) -> None:
    log = Log(trt)
    made = parsed(trt, linear(batch=2), log)
    network = made.builder.create_network(0)
    parser = trt.OnnxParser(network, log.logger)
    assert parser.parse(linear(batch=2).SerializeToString())
    plan = made.builder.build_serialized_network(network, made.config)
    assert (plan is None) == trt.__version__.startswith("10.")


def test_dynamic_inputs_need_a_profile_that_fits(newest: ModuleType) -> None:
    log = Log(newest)
    made = parsed(newest, linear(), log)
    assert made.builder.build_serialized_network(made.network, made.config) is None
    assert "no optimization profile has been defined" in log.last
    assert profile(made, i0=((3, ROWS), (2, ROWS), (4, ROWS))) == -1
    assert "min <= opt <= max" in log.last
    assert profile(made, i0=((1, 5), (2, 5), (4, 5))) == 0
    assert made.builder.build_serialized_network(made.network, made.config) is None
    with pytest.raises(RuntimeError, match="inconsistent"):
        profile(made, i0=((1, 4), (2, 4), (4,)))


def test_weights_as_inputs_need_no_range(newest: ModuleType) -> None:
    running = Running(newest, build(newest, linear("inputs")))
    running.put("w0", W)
    running.put("w1", B)
    running.ready()
    assert running.run() == close_to(X @ W + B)
    running.put("w0", 2 * W)
    assert running.run() == close_to(X @ (2 * W) + B)


def test_refit_allows_one_profile(trt: ModuleType) -> None:
    log = Log(trt)
    made = parsed(trt, linear(), log)
    profile(made, i0=BATCHES)
    profile(made, i0=BATCHES)
    assert made.builder.build_serialized_network(made.network, made.config) is not None
    made.config.set_flag(trt.BuilderFlag.REFIT)
    assert made.builder.build_serialized_network(made.network, made.config) is None
    assert "one optimization profile" in log.last
    made.config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    assert made.builder.build_serialized_network(made.network, made.config) is None
    assert "exclude" in log.last


def test_too_little_workspace_finds_no_implementation(newest: ModuleType) -> None:
    log = Log(newest)
    made = parsed(newest, linear(batch=2), log)
    made.config.set_memory_pool_limit(newest.MemoryPoolType.WORKSPACE, 2 * (W.nbytes + B.nbytes + X.nbytes) - 1)
    assert made.builder.build_serialized_network(made.network, made.config) is None
    assert "Could not find any implementation for node shift" in log.last
    made.config.set_memory_pool_limit(newest.MemoryPoolType.WORKSPACE, 2 * (W.nbytes + B.nbytes + X.nbytes))
    assert made.builder.build_serialized_network(made.network, made.config) is not None


def test_switches_make_builds_fail(load: Callable[..., ModuleType], tmp_path: Path) -> None:
    times = tmp_path / "times"
    times.write_text("1")
    trt = load("10.3", EMULATED_BUILD_NONE="lin*", EMULATED_BUILD_TIMES=str(times))
    assert build(trt) is None
    assert build(trt) is not None
    os.environ["EMULATED_BUILD_NONE"] = "other"
    times.write_text("1")
    assert build(trt) is not None
    os.environ["EMULATED_BUILD_RAISE"] = "shift"
    with pytest.raises(RuntimeError):
        build(trt)
    del os.environ["EMULATED_BUILD_RAISE"]


@pytest.mark.parametrize("switch", [{"EMULATED_BUILD_KILL": "linear"}, {"EMULATED_BUILD_MEMORY": "1000"}])
def test_switches_kill_the_builder(switch: dict[str, str]) -> None:
    path = os.pathsep.join([str(EMULATION), str(EMULATION.parents[1])])
    program = f"import sys; sys.path.insert(0, {str(EMULATION)!r})\n" + (
        "import importlib.util as u\n"
        f"s = u.spec_from_file_location('here', {__file__!r}); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        "import tensorrt; m.build(tensorrt)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path, **switch}, timeout=60, check=False
    )
    assert done.returncode == -9


def test_a_timing_cache_of_elsewhere_is_not_taken(load: Callable[..., ModuleType]) -> None:
    old = load("10.3")
    log = Log(old)
    config = old.Builder(log.logger).create_builder_config()
    mine = bytes(config.create_timing_cache(b"").serialize())
    assert config.set_timing_cache(config.create_timing_cache(mine), False)
    assert config.create_timing_cache(b"rubbish") is None
    other = load("10.3", EMULATED_GPU="Xavier")
    config = other.Builder(Log(other).logger).create_builder_config()
    cache = config.create_timing_cache(mine)
    assert not config.set_timing_cache(cache, False)
    assert config.set_timing_cache(cache, True)
    new = load("10.7")
    assert new.Builder(Log(new).logger).create_builder_config().create_timing_cache(mine) is None


# Plans


def damaged(plan: bytes) -> Iterator[bytes]:
    yield b""
    yield plan[:20]
    yield plan[:-1]
    yield b"x" + plan[1:]
    yield plan[:300] + bytes([plan[300] ^ 1]) + plan[301:]
    yield plan.replace(b"\n", b"\r\n")


def test_bad_plans_give_none_and_a_reason(trt: ModuleType) -> None:
    log = Log(trt)
    runtime = trt.Runtime(log.logger)
    for data in damaged(bytes(build(trt))):
        before = len(log.said)
        assert runtime.deserialize_cuda_engine(data) is None
        assert log.said[before:][0][0] == "ERROR"
    assert not machine().allocations("library")


def test_plans_of_another_version_or_device_give_none(load: Callable[..., ModuleType]) -> None:
    old = load("10.3")
    plan = bytes(build(old))
    assert plan[:4] == b"ftrt"
    assert plan[24:27] == bytes([10, 3, 0])
    new = load("10.7")
    log = Log(new)
    assert new.Runtime(log.logger).deserialize_cuda_engine(plan) is None
    assert "got 10.3.0" in log.last
    same = load("10.3", EMULATED_SM="8.6")
    log = Log(same)
    assert same.Runtime(log.logger).deserialize_cuda_engine(plan) is None
    assert "got compute 8.7" in log.last


def test_a_plan_may_be_overwritten_once_it_is_an_engine(newest: ModuleType) -> None:
    buffer = bytearray(bytes(build(newest)))
    running = Running(newest, buffer)
    buffer[:] = b"\0" * len(buffer)
    running.ready()
    assert running.run() == close_to(X @ W + B)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plan_may_come_in_pieces(load: Callable[..., ModuleType], version: str) -> None:
    trt = load(version)
    plan = bytes(build(trt))
    base = getattr(trt, "IStreamReaderV2", None) or trt.IStreamReader

    class Reader(base):
        def __init__(self) -> None:
            base.__init__(self)
            self.at = 0
            self.short = 0

        def read(self, size: int, stream: int = 0) -> bytes:
            piece = plan[self.at : min(self.at + size, len(plan) - self.short)]
            self.at += len(piece)
            return piece

        def seek(self, offset: int, where: Any) -> bool:
            assert where == trt.SeekPosition.SET
            self.at = offset
            return True

    runtime = trt.Runtime(Log(trt).logger)
    assert runtime.deserialize_cuda_engine(Reader()) is not None
    short = Reader()
    short.short = 1
    assert runtime.deserialize_cuda_engine(short) is None


def test_engines_take_device_memory_and_give_it_back(load: Callable[..., ModuleType]) -> None:
    trt = load("10.3", EMULATED_MEMORY="4096")
    log = Log(trt)
    runtime = trt.Runtime(log.logger)
    plan = build(trt)
    engines = [runtime.deserialize_cuda_engine(plan) for _ in range(9)]
    assert None in engines
    assert "OutOfMemory" in log.last
    held = machine().used
    assert held > 0
    contexts = [engine.create_execution_context() for engine in engines if engine is not None]
    assert None in contexts
    engines.clear()
    contexts.clear()
    gc.collect()
    assert machine().used == 0


# Executing


def test_an_engine_tells_its_tensors(trt: ModuleType) -> None:
    running = Running(trt, build(trt))
    engine, context = running.engine, running.context
    assert [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)] == ["i0", "o0"]
    assert engine.get_tensor_mode("i0") == trt.TensorIOMode.INPUT
    assert engine.get_tensor_mode("o0") == trt.TensorIOMode.OUTPUT
    assert engine.get_tensor_dtype("i0") == trt.float32
    assert engine.get_tensor_shape("i0") == (-1, ROWS)
    assert [tuple(shape) for shape in engine.get_tensor_profile_shape("i0", 0)] == list(BATCHES)
    assert engine.get_tensor_location("i0") == trt.TensorLocation.DEVICE
    assert not engine.refittable
    assert context.infer_shapes() == ["i0"]
    assert context.get_tensor_shape("o0") == (-1, COLUMNS)
    assert not context.set_input_shape("i0", (5, ROWS))
    assert "does not satisfy any optimization profiles" in running.log.last
    assert not context.execute_async_v3(running.stream.handle)
    assert context.set_input_shape("i0", (3, ROWS))
    assert context.infer_shapes() == []
    assert context.get_tensor_shape("o0") == (3, COLUMNS)
    assert not context.execute_async_v3(running.stream.handle)


def test_memory_is_read_when_the_stream_gets_there(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    held = machine().new_stream(blocking=False)
    event = machine().new_event()
    held.enqueue(lambda: running.put("i0", 3 * X), "copy")
    event.record(held)
    running.stream.wait_for(event)
    assert running.context.execute_async_v3(running.stream.handle)
    running.context.set_tensor_address("i0", running.scratch)  # addresses and shapes count as they were
    running.context.set_input_shape("i0", (4, ROWS))
    running.stream.synchronize()
    assert running.output() == close_to(3 * X @ W + B)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.FLOAT])
def test_halves_are_computed(newest: ModuleType, kind: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    running = Running(newest, build(newest, linear(kind=kind)))
    running.ready(X.astype(dtype))
    running.run()
    size = X.shape[0] * COLUMNS * dtype.itemsize
    found = running.machine.view(running.addresses["o0"], size).view(dtype).reshape(-1, COLUMNS)
    assert found.astype(np.float32) == pytest.approx(X @ W + B, abs=2e-2)


@pytest.mark.parametrize(
    "kind", [TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.INT8]
)
def test_other_types_pass(newest: ModuleType, kind: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    graph = helper.make_graph(
        [helper.make_node("Transpose", ["i0"], ["o0"], perm=[1, 0])],
        "turn",
        [helper.make_tensor_value_info("i0", kind, ["n", ROWS])],
        [helper.make_tensor_value_info("o0", kind, None)],
    )
    running = Running(newest, build(newest, model_of(graph)))
    value = (np.arange(2 * ROWS).reshape(2, ROWS) % 2).astype(dtype)
    running.ready(value)
    assert running.context.get_tensor_shape("o0") == (ROWS, 2)
    running.run()
    found = running.machine.view(running.addresses["o0"], value.nbytes).view(dtype).reshape(ROWS, 2)
    assert np.array_equal(found, value.T)


def test_shape_tensors_are_read_from_the_host(newest: ModuleType) -> None:
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["i0", "i1"], ["o0"])],
        "reshape",
        [
            helper.make_tensor_value_info("i0", TensorProto.FLOAT, ["n", ROWS]),
            helper.make_tensor_value_info("i1", TensorProto.INT64, [2]),
        ],
        [helper.make_tensor_value_info("o0", TensorProto.FLOAT, None)],
    )
    made = parsed(newest, model_of(graph), Log(newest))
    assert made.network.get_input(1).is_shape_tensor
    one = made.builder.create_optimization_profile()
    one.set_shape("i0", *BATCHES)
    one.set_shape_input("i1", [1, 1], [2, 4], [16, 16])
    made.config.add_optimization_profile(one)
    running = Running(newest, made.builder.build_serialized_network(made.network, made.config))
    assert running.engine.get_tensor_location("i1") == newest.TensorLocation.HOST
    running.ready()
    wanted = np.array([4, 2], np.int64)
    running.context.set_tensor_address("i1", wanted.ctypes.data)
    assert running.context.get_tensor_shape("o0") == (4, 2)
    running.run()
    assert np.array_equal(running.output().ravel()[:8], X.ravel())


def test_scratch_must_be_there_and_large_enough(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    size = running.engine.device_memory_size_v2
    running.context.set_device_memory(running.scratch, size - 1)
    with pytest.raises(fault(), match="bytes of scratch"):
        running.context.execute_async_v3(running.stream.handle)
    running.context.set_device_memory(0, size)
    with pytest.raises(fault(), match="bytes of scratch"):
        running.context.execute_async_v3(running.stream.handle)
    with pytest.raises(fault(), match="aligned"):
        running.context.set_device_memory(running.scratch + 16, size)
    running.context.set_device_memory(running.scratch, size)
    running.machine.free(running.scratch)
    with pytest.raises(fault(), match="no live allocation"):
        running.context.execute_async_v3(running.stream.handle)


def test_scratch_is_spoilt(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    memory = running.machine.view(running.scratch, running.engine.device_memory_size_v2)
    memory[:] = 0
    running.run()
    assert not np.any(memory == 0)


def test_memory_given_back_too_early_is_a_fault(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    idle()
    running.context.execute_async_v3(running.stream.handle)
    with pytest.raises(fault(), match="freed while a pending"):
        running.machine.free(running.addresses["i0"])


def test_addresses_must_be_aligned_to_256(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    address = running.machine.allocate(1024, "device")
    with pytest.raises(fault(), match="not aligned"):
        running.context.set_tensor_address("i0", address + 64)
    assert not running.context.set_tensor_address("none", address)


def test_outputs_must_not_be_where_inputs_are(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    running.context.set_tensor_address("o0", running.addresses["i0"])
    with pytest.raises(fault(), match="is written where"):
        running.context.execute_async_v3(running.stream.handle)


def test_shared_scratch_needs_an_order(newest: ModuleType) -> None:
    plan = build(newest)
    first, second = Running(newest, plan), Running(newest, plan)
    for one in (first, second):
        one.ready()
    second.context.set_device_memory(first.scratch, first.engine.device_memory_size_v2)
    idle()
    first.context.execute_async_v3(first.stream.handle)
    with pytest.raises(fault(), match="may run at the same time"):
        second.context.execute_async_v3(second.stream.handle)
    event = machine().new_event()
    event.record(first.stream)
    second.stream.wait_for(event)
    assert second.context.execute_async_v3(second.stream.handle)
    second.stream.synchronize()
    assert second.output() == close_to(X @ W + B)


def test_an_engine_must_outlive_its_work(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    running.ready()
    idle()
    running.context.execute_async_v3(running.stream.handle)
    running.context = running.engine = None
    gc.collect()
    assert any("died while" in text for text in running.machine.faults)


# Refitting


REFITS = {"REFIT": ["w0", "w1"], "REFIT_IDENTICAL": ["w0", "w1"], "REFIT_INDIVIDUAL": ["w0"]}


@pytest.mark.parametrize("kind", REFITS)
def test_which_weights_can_be_refitted(trt: ModuleType, kind: str) -> None:
    running = Running(trt, build(trt, flags=(kind,), mark=("w0",)))
    refitter = trt.Refitter(running.engine, running.log.logger)
    assert refitter.get_all_weights() == REFITS[kind]
    prototype = refitter.get_weights_prototype("w0")
    assert (prototype.dtype, prototype.size) == (trt.float32, W.size)
    assert refitter.get_weights_prototype("none").size == -1
    assert not refitter.set_named_weights("none", trt.Weights(W))
    assert not refitter.set_named_weights("w0", trt.Weights(W[:2]))
    assert not refitter.set_named_weights("w0", trt.Weights(W.astype(np.float16)))
    assert refitter.set_named_weights("w0", trt.Weights(W))
    assert refitter.get_missing_weights() == []


def test_an_engine_built_without_refit_has_no_refitter(newest: ModuleType) -> None:
    running = Running(newest, build(newest))
    with pytest.raises(TypeError, match="nullptr"):
        newest.Refitter(running.engine, running.log.logger)


def test_only_names_of_weights_can_be_marked(newest: ModuleType) -> None:
    made = parsed(newest, linear(), Log(newest))
    assert not made.network.mark_weights_refittable("a")
    assert made.network.mark_weights_refittable("w1")
    assert made.network.are_weights_marked_refittable("w1")


@pytest.mark.parametrize("location", ["HOST", "DEVICE"])
def test_weights_are_read_when_the_stream_gets_there(trt: ModuleType, location: str) -> None:
    running = Running(trt, build(trt, flags=("REFIT",)))
    running.ready()
    refitter = trt.Refitter(running.engine, running.log.logger)
    host = np.zeros_like(W)
    address = running.put("staging", host) if location == "DEVICE" else host.ctypes.data
    weights = trt.Weights(trt.DataType.FLOAT, address, W.size)
    assert refitter.set_named_weights("w0", weights, getattr(trt.TensorLocation, location))

    def arrive() -> None:
        if location == "DEVICE":
            running.put("staging", 2 * W)
        else:
            host[:] = 2 * W

    running.stream.enqueue(arrive, "copy")
    assert refitter.refit_cuda_engine_async(running.stream.handle)
    assert running.run() == close_to(X @ (2 * W) + B)
    if location == "HOST":
        host[:] = 3 * W
        assert running.run() == close_to(X @ (2 * W) + B)
        assert refitter.refit_cuda_engine()
        assert running.run() == close_to(X @ (3 * W) + B)


def test_weights_never_set_stay_as_they_were(newest: ModuleType) -> None:
    for flags in (("REFIT",), ("REFIT", "STRIP_PLAN")):
        running = Running(newest, build(newest, flags=flags))
        running.ready()
        refitter = newest.Refitter(running.engine, running.log.logger)
        assert refitter.set_named_weights("w0", newest.Weights(2 * W))
        assert refitter.get_missing_weights() == []
        assert refitter.refit_cuda_engine()
        found = running.run()
        if "STRIP_PLAN" in flags:
            assert np.isnan(found).all()
        else:
            assert found == close_to(X @ (2 * W) + B)


def test_stripped_plans_are_small_and_whole_after_a_refit(trt: ModuleType) -> None:
    whole, stripped = build(trt, flags=("REFIT",)), build(trt, flags=("REFIT", "STRIP_PLAN"))
    assert whole.nbytes - stripped.nbytes >= W.nbytes
    running = Running(trt, stripped)
    running.ready()
    refitter = trt.Refitter(running.engine, running.log.logger)
    for name, value in {"w0": W, "w1": B}.items():
        assert refitter.set_named_weights(name, trt.Weights(value))
    assert refitter.refit_cuda_engine()
    assert running.run() == close_to(X @ W + B)


def test_identical_refits_with_other_weights_are_silently_wrong(newest: ModuleType) -> None:
    running = Running(newest, build(newest, flags=("REFIT_IDENTICAL", "STRIP_PLAN")))
    running.ready()
    refitter = newest.Refitter(running.engine, running.log.logger)
    for factor in (1, 2):
        kept = {"w0": factor * W, "w1": B}
        for name, value in kept.items():
            assert refitter.set_named_weights(name, newest.Weights(value))
        assert refitter.refit_cuda_engine()
        assert (running.run() == close_to(X @ (factor * W) + B)) == (factor == 1)
    assert not running.machine.faults


def test_a_refit_beside_an_execution_is_a_fault(newest: ModuleType) -> None:
    running = Running(newest, build(newest, flags=("REFIT",)))
    running.ready()
    refitter = newest.Refitter(running.engine, running.log.logger)
    refitter.set_named_weights("w0", newest.Weights(W))
    idle()
    running.context.execute_async_v3(running.stream.handle)
    other = running.machine.new_stream(blocking=False)
    with pytest.raises(fault(), match="refitted while work"):
        refitter.refit_cuda_engine_async(other.handle)
    with pytest.raises(fault(), match="refitted while work"):
        refitter.refit_cuda_engine()
    running.stream.synchronize()
    assert refitter.refit_cuda_engine()


def test_an_execution_must_come_after_the_refit(newest: ModuleType) -> None:
    running = Running(newest, build(newest, flags=("REFIT",)))
    running.ready()
    refitter = newest.Refitter(running.engine, running.log.logger)
    refitter.set_named_weights("w0", newest.Weights(2 * W))
    copies = running.machine.new_stream(blocking=False)
    idle()
    refitter.refit_cuda_engine_async(copies.handle)
    with pytest.raises(fault(), match="a refit of it may run"):
        running.context.execute_async_v3(running.stream.handle)
    event = running.machine.new_event()
    event.record(copies)
    running.stream.wait_for(event)
    assert running.run() == close_to(X @ (2 * W) + B)


def test_a_refit_that_fails_may_be_partial(load: Callable[..., ModuleType]) -> None:
    trt = load("10.3", EMULATED_REFIT_FAIL="1")
    running = Running(trt, build(trt, flags=("REFIT",)))
    running.ready()
    refitter = trt.Refitter(running.engine, running.log.logger)
    twice = {"w0": 2 * W, "w1": 2 * B}
    for name, value in twice.items():
        refitter.set_named_weights(name, trt.Weights(value))
    assert not refitter.refit_cuda_engine()
    assert running.run() == close_to(X @ (2 * W) + B)
    assert refitter.refit_cuda_engine()
    assert running.run() == close_to(X @ (2 * W) + 2 * B)


def test_batch_normalization_loses_the_names_of_its_weights(newest: ModuleType) -> None:
    names = ["scale", "bias", "mean", "variance"]
    graph = helper.make_graph(
        [helper.make_node("BatchNormalization", ["i0", *names], ["o0"])],
        "normalise",
        [helper.make_tensor_value_info("i0", TensorProto.FLOAT, ["n", ROWS])],
        [helper.make_tensor_value_info("o0", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.ones(ROWS, np.float32), name) for name in names],
    )
    running = Running(newest, build(newest, model_of(graph), flags=("REFIT",)))
    found = newest.Refitter(running.engine, running.log.logger).get_all_weights()
    assert len(found) == 4
    assert all(name.startswith("tmp_refittable_weight") for name in found)


def test_a_refitter_holds_what_it_was_given_and_its_engine(newest: ModuleType) -> None:
    running = Running(newest, build(newest, flags=("REFIT",)))
    refitter = newest.Refitter(running.engine, running.log.logger)
    for _ in range(3):
        refitter.set_named_weights("w0", newest.Weights(W.copy()))
    assert len(refitter._kept) == 3
    running.context = running.engine = None
    gc.collect()
    assert machine().allocations("library")
    del refitter
    gc.collect()
    assert not machine().allocations("library")


def test_without_a_driver_nothing_is_built_or_run(load: Callable[..., ModuleType]) -> None:
    trt = load("10.3", EMULATED_CUINIT="100")
    with pytest.raises(TypeError, match="nullptr"):
        trt.Builder(Log(trt).logger)
    with pytest.raises(fault(), match="without a driver"):
        trt.Runtime(Log(trt).logger).deserialize_cuda_engine(b"")
