"""Every use of TensorRT, PyCUDA and Polygraphy's TensorRT part exists with its signature in the versions supported.

What is checked is found, not listed: all files of the TensorRT backend, and all others that import one of the three.
"""

import ast
import inspect
from dataclasses import dataclass
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

IMPORTS = """import pycuda.driver as cuda
import tensorrt as trt

from trt_layering.backends.tensorrt import versions

"""


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
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where mypy keeps what it knows of the libraries, from one version to the next."""
    return tmp_path_factory.mktemp("conformance")


def test_the_backend_conforms_to_every_version(cache: Path) -> None:
    files = checked_files()
    assert VERSIONS_FILE in files
    assert tensorrt_conformance.check_all(files, ROOT, cache) == []


def test_the_backend_hides_nothing_from_the_check() -> None:
    files = [file for file in checked_files() if file != VERSIONS_FILE]
    assert [finding for file in files for finding in tensorrt_forms.refused(file, NAMES)] == []


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
if versions.AT_LEAST_10_7:
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


@dataclass(frozen=True)
class Fault:
    body: str
    says: str  # words of the finding
    versions: str = ""  # those it is found with; none: it is found in the text, whatever the version


ALL = ", ".join(CHECKED)
BAD = {
    "a method that never was": Fault(
        """
def ask(engine: trt.ICudaEngine) -> None:
    engine.frobnicate()""",
        'no attribute "frobnicate"',
        ALL,
    ),
    "a property that never was": Fault(
        """
def ask(engine: trt.ICudaEngine) -> int:
    return engine.num_bindings""",
        'no attribute "num_bindings"',
        ALL,
    ),
    "a function that never was": Fault(
        """
def ask() -> None:
    trt.install()""",
        'no attribute "install"',
        ALL,
    ),
    "a removed property": Fault(
        """
def ask(engine: trt.ICudaEngine) -> int:
    return engine.device_memory_size""",
        'no attribute "device_memory_size"',
        "11.0, 11.4",
    ),
    "a removed flag": Fault(
        """
FLAG = trt.BuilderFlag.FP16""",
        'no attribute "FP16"',
        "11.0, 11.4",
    ),
    "a removed network flag": Fault(
        """
FLAG = trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH""",
        'no attribute "EXPLICIT_BATCH"',
        "11.0, 11.4",
    ),
    "a keyword of a wrong name": Fault(
        """
def ask(engine: trt.ICudaEngine) -> str:
    return engine.get_tensor_name(number=0)""",
        'keyword argument "number"',
        ALL,
    ),
    "an argument too many": Fault(
        """
def ask(context: trt.IExecutionContext) -> bool:
    return context.execute_async_v3(0, 1)""",
        'Too many arguments for "execute_async_v3"',
        ALL,
    ),
    "an argument too few": Fault(
        """
def ask(context: trt.IExecutionContext) -> bool:
    return context.set_tensor_address('i0')""",
        'Missing positional argument "memory"',
        ALL,
    ),
    "an argument of a wrong type": Fault(
        """
def ask(engine: trt.ICudaEngine) -> bool:
    return bool(engine.get_tensor_shape(0))""",
        'type "int"; expected "str"',
        ALL,
    ),
    "a stream for its handle": Fault(
        """
def ask(context: trt.IExecutionContext, stream: cuda.Stream) -> bool:
    return context.execute_async_v3(stream)""",
        'type "Stream"; expected "int"',
        ALL,
    ),
    "an enumeration for another": Fault(
        """
def ask(config: trt.IBuilderConfig) -> None:
    config.set_flag(trt.OnnxParserFlag.NATIVE_INSTANCENORM)""",
        'expected "BuilderFlag"',
        ALL,
    ),
    "a property that cannot be set": Fault(
        """
def ask(engine: trt.ICudaEngine) -> None:
    engine.num_io_tensors = 3""",
        "is read-only",
        ALL,
    ),
    "a property of a type not told": Fault(
        """
def ask(layer: trt.IConvolutionLayer) -> int:
    return layer.kernel_size_nd.volume""",
        '"object" has no attribute "volume"',
        ALL,
    ),
    "an engine that may be None": Fault(
        """
def ask(runtime: trt.Runtime) -> int:
    return runtime.deserialize_cuda_engine(b"").num_io_tensors""",
        '"None" of "ICudaEngine | None"',
        ALL,
    ),
    "a class without a constructor": Fault(
        """
def ask() -> trt.ICudaEngine:
    return trt.ICudaEngine()""",
        "cannot_be_made",
        ALL,
    ),
    "a new member without a version test": Fault(
        """
def ask(refitter: trt.Refitter) -> bool:
    return refitter.release_refit_resources()""",
        'no attribute "release_refit_resources"',
        "10.3, 10.7, 10.13, 10.16, 11.0",
    ),
    "a new member under an older constant": Fault(
        """
def ask(refitter: trt.Refitter) -> None:
    if versions.AT_LEAST_10_16:
        refitter.release_refit_resources()""",
        'no attribute "release_refit_resources"',
        "10.16, 11.0",
    ),
    "a new member in the other branch": Fault(
        """
def ask(refitter: trt.Refitter) -> None:
    if not versions.HAS_RELEASE_REFIT_RESOURCES:
        refitter.release_refit_resources()""",
        'no attribute "release_refit_resources"',
        "10.3, 10.7, 10.13, 10.16, 11.0",
    ),
    "a new class without a version test": Fault(
        """
class Reader(trt.IStreamReaderV2):
    pass""",
        '"trt.IStreamReaderV2" is not defined',
        "10.3",
    ),
    "an engine of unknown type": Fault(
        """
from typing import Any
def ask(engine: Any) -> None:
    engine.device_memory_size()""",
        "engine.device_memory_size is asked of a value of unknown type",
        ALL,
    ),
    "one out of a list of unknown type": Fault(
        """
from typing import Any
def ask(engines: list[Any]) -> None:
    for engine in engines:
        engine.device_memory_size()""",
        "engine.device_memory_size is asked of a value of unknown type",
        ALL,
    ),
    "a function without types": Fault(
        """
def ask(engine):
    engine.frobnicate()""",
        "missing a type annotation",
        ALL,
    ),
    "what no version reaches": Fault(
        """
def ask(engine: trt.ICudaEngine, number: int) -> None:
    if isinstance(number, str):
        engine.frobnicate()""",
        "Statement is unreachable",
        ALL,
    ),
    "a call of a name in a string": Fault(
        """
def ask() -> None:
    getattr(trt, 'install')()""",
        "getattr()",
    ),
    "a look whether it is there": Fault(
        """
def ask(engine: trt.ICudaEngine) -> bool:
    return hasattr(engine, 'device_memory_size')""",
        "hasattr()",
    ),
    "a module's insides": Fault(
        """
def ask() -> object:
    return trt.__dict__['install']""",
        "__dict__ shows",
    ),
    "a module by its name": Fault(
        """
import importlib
library = importlib.import_module('tensorrt')""",
        "import_module()",
    ),
    "a hushed error": Fault(
        """
def ask(engine: trt.ICudaEngine) -> None:
    engine.frobnicate()  # type: ignore[attr-defined]""",
        "no error is hushed",
    ),
    "a version test of its own": Fault(
        """
def ask() -> bool:
    return trt.__version__ > '11'""",
        "asked for in versions.py alone",
    ),
    "tensorrt under another name": Fault("import tensorrt as library", "called trt"),
    "a part of tensorrt by itself": Fault("from tensorrt import Runtime", "imported whole"),
    "a version test kept for later": Fault(
        """
NEW = versions.AT_LEAST_11_0""",
        "in the test of an `if` only",
    ),
    "two version tests in one": Fault(
        """
def ask(other: bool) -> int:
    if versions.AT_LEAST_11_0 and other:
        return 1
    return 0""",
        "`if not …:` alone",
    ),
    "all names at once": Fault(
        """
from tensorrt import *""",
        "imported one by one",
    ),
    "a flag as a number": Fault(
        """
def ask(builder: trt.Builder) -> object:
    return builder.create_network(1 << 0)""",
        "flags by their names",
    ),
    "a flag as a plain number": Fault(
        """
def ask(builder: trt.Builder) -> object:
    return builder.create_network(flags=2)""",
        "flags by their names",
    ),
    "flags set as a number": Fault(
        """
def ask(config: trt.IBuilderConfig) -> None:
    config.flags = 1 << 19""",
        "flags by their names",
    ),
    "flags shifted without int": Fault(
        """
def ask(builder: trt.Builder) -> object:
    return builder.create_network(1 << trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)""",
        "Unsupported operand types for <<",
        ALL,
    ),
    "a CUDA call that never was": Fault(
        """
def ask(stream: cuda.Stream) -> None:
    stream.wait()""",
        'no attribute "wait"',
        ALL,
    ),
    "a CUDA keyword of a wrong name": Fault(
        """
EVENT = cuda.Event(flag=1)""",
        'keyword argument "flag"',
        ALL,
    ),
    "a host copy to a stream's handle": Fault(
        """
def ask(stream: cuda.Stream, target: int) -> None:
    cuda.memcpy_htod_async(target, b"", stream.handle)""",
        'expected "Stream | None"',
        ALL,
    ),
    "a part of Polygraphy that never was": Fault(
        """
from polygraphy.backend.trt import Refit""",
        'no attribute "Refit"',
        ALL,
    ),
    "a Polygraphy keyword of a wrong name": Fault(
        """
from polygraphy.backend.trt import CreateConfig
CONFIG = CreateConfig(refit=True)""",
        'keyword argument "refit"',
        ALL,
    ),
}


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, list[str]]:
    """What is found in a module for each of GOOD and BAD, all checked together."""
    folder = tmp_path_factory.mktemp("modules")
    names = {what: f"module_{number}" for number, what in enumerate([*GOOD, *BAD])}
    bodies = GOOD | {what: fault.body for what, fault in BAD.items()}
    for what, name in names.items():
        (folder / f"{name}.py").write_text(IMPORTS + bodies[what], encoding="utf-8")
    files = [folder / f"{name}.py" for name in names.values()]
    found = tensorrt_conformance.check_all(files, folder, cache)
    found += [finding for file in files for finding in tensorrt_forms.refused(file, NAMES)]
    return {what: [finding for finding in found if finding.startswith(f"{name}.py:")] for what, name in names.items()}


@pytest.mark.parametrize("what", GOOD)
def test_what_is_right_passes(what: str, findings: dict[str, list[str]]) -> None:
    assert findings[what] == []


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_found(what: str, findings: dict[str, list[str]]) -> None:
    fault = BAD[what]
    [found] = [finding for finding in findings[what] if fault.says in finding]
    assert found.endswith(f"(with {fault.versions})") == bool(fault.versions)


def test_the_constants_are_those_of_the_tables() -> None:
    """A constant is true from the version on that has what it is named for."""
    has = {version: tensorrt_tables.load(version).classes for version in CHECKED}
    for version, classes in has.items():
        constants = CONSTANTS[version]
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
