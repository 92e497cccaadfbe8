"""Every use of TensorRT, PyCUDA and Polygraphy's TensorRT part exists with its signature in the versions supported.

What is checked is found, not listed: all files of the TensorRT backend, and all others that import one of the three.
"""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from polygraphy.backend import trt as polygraphy_trt

from tests import tensorrt_conformance, tensorrt_forms, tensorrt_stubs, tensorrt_tables
from tests.tensorrt_conformance import CHECKED, DESCRIBED, ROOT, VERSIONS_FILE

BACKEND = VERSIONS_FILE.parent
# They find out what is installed before any of it may be used, so they ask by names, and of libraries of unknown type.
BEFORE = {BACKEND / name for name in ("driver.py", "present.py")}
LIBRARIES = {"tensorrt", "pycuda", "polygraphy.backend.trt"}
CONSTANTS = {version: tensorrt_conformance.constants(tensorrt_tables.load(version).release) for version in CHECKED}
NAMES = set(CONSTANTS[CHECKED[0]])

Check = Callable[[str], list[str]]


def imported(file: Path) -> set[str]:
    """The full names of the modules, and of what is taken from them, that `file` imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def uses_libraries(file: Path) -> bool:
    return any(name == one or name.startswith(one + ".") for name in imported(file) for one in LIBRARIES)


def checked_files() -> list[Path]:
    others = [
        file for folder in ("trt_layering", "scripts", "tests/gpu") for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [file for file in others if file not in BEFORE and (BACKEND in file.parents or uses_libraries(file))]


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mypy keeps what it knows of the libraries: from one run of the tests to the next, where pytest keeps things."""
    kept = getattr(pytestconfig, "cache", None)
    return Path(kept.mkdir("tensorrt_conformance")) if kept else tmp_path_factory.mktemp("conformance")


@pytest.fixture
def findings(tmp_path: Path, cache: Path) -> Check:
    """What is found in a module of the given body, with all versions."""

    def check(body: str) -> list[str]:
        file = tmp_path / "sample.py"
        versions = "from trt_layering.backends.tensorrt import versions\n"
        file.write_text(f"import pycuda.driver as cuda\nimport tensorrt as trt\n{versions}\n\n{body}\n")
        return tensorrt_conformance.check_all([file], tmp_path, cache) + tensorrt_forms.refused(file, NAMES)

    return check


def test_the_backend_conforms_to_every_version(cache: Path) -> None:
    files = checked_files()
    assert VERSIONS_FILE in files
    assert tensorrt_conformance.check_all(files, ROOT, cache) == []


def test_the_backend_hides_nothing_from_the_check() -> None:
    refused = [finding for file in checked_files() for finding in tensorrt_forms.refused(file, NAMES)]
    about_versions = [finding for finding in refused if finding.startswith(VERSIONS_FILE.name)]
    assert [finding for finding in refused if finding not in about_versions] == []


def test_nothing_but_the_backend_uses_the_libraries() -> None:
    others = [file for file in sorted((ROOT / "trt_layering").rglob("*.py")) if BACKEND not in file.parents]
    assert [file for file in others if uses_libraries(file)] == []


GOOD = {
    "an engine from a plan, and its context": """
def open_engine(runtime: trt.Runtime, plan: memoryview) -> trt.IExecutionContext:
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError("no engine")
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    if context is None:
        raise ValueError("no context")
    context.set_device_memory(1 << 20, engine.device_memory_size_v2)
    return context""",
    "a shape as a tuple, and one read": """
def shape(context: trt.IExecutionContext) -> tuple[int, ...]:
    context.set_input_shape("i0", (1, 3, 224, 224))
    return tuple(context.get_tensor_shape("o0"))""",
    "a refit": """
def refit(engine: trt.ICudaEngine, address: int, stream: cuda.Stream) -> bool:
    refitter = trt.Refitter(engine, trt.Logger(trt.Logger.WARNING))
    weights = trt.Weights(trt.DataType.HALF, address, 8)
    refitter.set_named_weights("w0", weights, trt.TensorLocation.DEVICE)
    return refitter.refit_cuda_engine_async(stream.handle)""",
    "a member of the versions that have it": """
def release(refitter: trt.Refitter) -> None:
    if versions.HAS_RELEASE_REFIT_RESOURCES:
        refitter.release_refit_resources()""",
    "what follows where others have returned": """
def release(refitter: trt.Refitter) -> None:
    if not versions.HAS_RELEASE_REFIT_RESOURCES:
        return
    refitter.release_refit_resources()""",
    "a removed member, of the versions before": """
def size(engine: trt.ICudaEngine) -> int:
    if versions.AT_LEAST_11_0:
        return engine.device_memory_size_v2
    else:
        return engine.device_memory_size""",
    "a class that only some versions have": """
if versions.HAS_STREAM_READER_V2:
    class Reader(trt.IStreamReaderV2):
        def seek(self, offset: int, where: trt.SeekPosition) -> bool:
            return where == trt.SeekPosition.SET""",
    "flags by their names": """
def network(builder: trt.Builder) -> trt.INetworkDefinition:
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))""",
    "an event recorded on a stream": """
def record(stream: cuda.Stream) -> cuda.Event:
    event = cuda.Event(cuda.event_flags.BLOCKING_SYNC | cuda.event_flags.DISABLE_TIMING)
    return event.record(stream)""",
}

BAD = {
    "a method that never was": "def ask(engine: trt.ICudaEngine) -> None:\n    engine.frobnicate()",
    "a property that never was": "def ask(engine: trt.ICudaEngine) -> int:\n    return engine.num_bindings",
    "a function that never was": "def ask() -> None:\n    trt.install()",
    "a removed property": "def ask(engine: trt.ICudaEngine) -> int:\n    return engine.device_memory_size",
    "a removed flag": "FLAG = trt.BuilderFlag.FP16",
    "a removed network flag": "FLAG = trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
    "a keyword of a wrong name": "def ask(engine: trt.ICudaEngine) -> str:\n    return engine.get_tensor_name(number=0)",
    "an argument too many": "def ask(context: trt.IExecutionContext) -> bool:\n    return context.execute_async_v3(0, 1)",
    "an argument too few": "def ask(context: trt.IExecutionContext) -> bool:\n    return context.set_tensor_address('i0')",
    "an argument of a wrong type": "def ask(engine: trt.ICudaEngine) -> bool:\n    return bool(engine.get_tensor_shape(0))",
    "a stream for its handle": """
def ask(context: trt.IExecutionContext, stream: cuda.Stream) -> bool:
    return context.execute_async_v3(stream)""",
    "an enumeration for another": """
def ask(config: trt.IBuilderConfig) -> None:
    config.set_flag(trt.OnnxParserFlag.NATIVE_INSTANCENORM)""",
    "a property that cannot be set": "def ask(engine: trt.ICudaEngine) -> None:\n    engine.num_io_tensors = 3",
    "a property of a type not told": """
def ask(layer: trt.IConvolutionLayer) -> int:
    return layer.kernel_size_nd.volume""",
    "an engine that may be None": """
def ask(runtime: trt.Runtime) -> int:
    return runtime.deserialize_cuda_engine(b"").num_io_tensors""",
    "a class without a constructor": "def ask() -> trt.ICudaEngine:\n    return trt.ICudaEngine()",
    "a new member without a version test": """
def ask(refitter: trt.Refitter) -> bool:
    return refitter.release_refit_resources()""",
    "a new member under an older constant": """
def ask(refitter: trt.Refitter) -> None:
    if versions.AT_LEAST_10_16:
        refitter.release_refit_resources()""",
    "a new member in the other branch": """
def ask(refitter: trt.Refitter) -> None:
    if not versions.HAS_RELEASE_REFIT_RESOURCES:
        refitter.release_refit_resources()""",
    "a new class without a version test": """
class Reader(trt.IStreamReaderV2):
    pass""",
    "an engine of unknown type": """
from typing import Any
def ask(engine: Any) -> None:
    engine.device_memory_size()""",
    "one out of a list of unknown type": """
from typing import Any
def ask(engines: list[Any]) -> None:
    for engine in engines:
        engine.device_memory_size()""",
    "a function without types": "def ask(engine):\n    engine.frobnicate()",
    "what no version reaches": """
def ask(engine: trt.ICudaEngine, number: int) -> None:
    if isinstance(number, str):
        engine.frobnicate()""",
    "a call of a name in a string": "def ask() -> None:\n    getattr(trt, 'install')()",
    "a look whether it is there": "def ask(engine: trt.ICudaEngine) -> bool:\n    return hasattr(engine, 'device_memory_size')",
    "a module's insides": "def ask() -> object:\n    return trt.__dict__['install']",
    "a module by its name": "import importlib\nlibrary = importlib.import_module('tensorrt')",
    "a hushed error": "def ask(engine: trt.ICudaEngine) -> None:\n    engine.frobnicate()  # type: ignore[attr-defined]",
    "a version test of its own": "def ask() -> bool:\n    return trt.__version__ > '11'",
    "a version test kept for later": "NEW = versions.AT_LEAST_11_0",
    "two version tests in one": """
def ask(other: bool) -> int:
    if versions.AT_LEAST_11_0 and other:
        return 1
    return 0""",
    "all names at once": "from tensorrt import *",
    "a flag as a number": "def ask(builder: trt.Builder) -> object:\n    return builder.create_network(1 << 0)",
    "a flag as a plain number": "def ask(builder: trt.Builder) -> object:\n    return builder.create_network(flags=2)",
    "flags set as a number": "def ask(config: trt.IBuilderConfig) -> None:\n    config.flags = 1 << 19",
    "flags shifted without int": """
def ask(builder: trt.Builder) -> object:
    return builder.create_network(1 << trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)""",
    "a CUDA call that never was": "def ask(stream: cuda.Stream) -> None:\n    stream.wait()",
    "a CUDA keyword of a wrong name": "EVENT = cuda.Event(flag=1)",
    "a host copy to a stream's handle": """
def ask(stream: cuda.Stream, target: int) -> None:
    cuda.memcpy_htod_async(target, b"", stream.handle)""",
    "a part of Polygraphy that never was": "from polygraphy.backend.trt import Refit",
    "a Polygraphy keyword of a wrong name": """
from polygraphy.backend.trt import CreateConfig
CONFIG = CreateConfig(refit=True)""",
}


def test_what_is_right_passes(findings: Check) -> None:
    assert (
        findings(
            "\n\n".join(
                body.replace("def ", f"def f{number}_") if not body.lstrip().startswith("if ") else body
                for number, body in enumerate(GOOD.values())
            )
        )
        == []
    )


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_found(what: str, findings: Check) -> None:
    assert findings(BAD[what])


def test_a_finding_says_which_versions_lack_it(findings: Check) -> None:
    [found] = findings(BAD["a new member under an older constant"])
    assert 'has no attribute "release_refit_resources"' in found
    assert found.endswith("(with 10.16, 11.0)")


def test_the_constants_are_those_of_the_tables() -> None:
    """A constant is true from the version on that has what it is named for."""
    has = {version: tensorrt_tables.load(version).classes for version in CHECKED}
    for version, classes in has.items():
        constants = CONSTANTS[version]
        assert constants["HAS_STREAM_READER_V2"] == ("IStreamReaderV2" in classes)
        assert constants["HAS_RUNTIME_CONFIG"] == ("create_runtime_config" in classes["ICudaEngine"].members)
        assert constants["HAS_LOAD_INITIALIZER"] == ("load_initializer" in classes["OnnxParser"].members)
        assert constants["HAS_TILING"] == ("tiling_optimization_level" in classes["IBuilderConfig"].members)
        assert constants["ONLY_STRONGLY_TYPED"] == ("FP16" not in classes["BuilderFlag"].members)
        assert constants["HAS_RELEASE_REFIT_RESOURCES"] == ("release_refit_resources" in classes["Refitter"].members)


def test_the_supplement_tells_of_nothing_that_is_not_there() -> None:
    known = [tensorrt_tables.load(version).classes for version in tensorrt_tables.versions()]
    named = {name for classes in known for name in classes}
    for name in sorted(named):
        members = {member for classes in known if name in classes for member in classes[name].members}
        assert set(tensorrt_stubs.supplemented(name)) <= members


def described(file: Path) -> dict[str, tuple[list[str], list[str]]]:
    """The classes a stub of Polygraphy describes, with the parameters of their constructor and of a call."""
    classes = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = {one.name: one.args for one in node.body if isinstance(one, ast.FunctionDef)}
            names = {name: [arg.arg for arg in (*args.args, *args.kwonlyargs)] for name, args in methods.items()}
            classes[node.name] = (names.get("__init__", []), names.get("__call__", []))
    return classes


def test_polygraphy_has_what_its_stub_describes() -> None:
    for name, (made, called) in described(DESCRIBED / "polygraphy" / "backend" / "trt.pyi").items():
        cls = getattr(polygraphy_trt, name)
        takes = {
            p for base in cls.__mro__ if "__init__" in vars(base) for p in inspect.signature(base.__init__).parameters
        }
        assert set(made) <= takes, name
        if called:
            assert called == list(inspect.signature(cls.call_impl).parameters), name
