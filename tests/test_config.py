"""YAML deployments: what is read, and the words for everything that is wrong."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.config import Duration, Loader, Model, ReadSize, Service, Share, Size, Tolerance, load, resolve_model
from trt_layering.errors import ConfigError, ModelError
from trt_layering.shapes import ShapeRange

GOOD = """\
repository: here
memory_budget: 96MiB
loader: {direct_io: never, threads: 3, read_size: 8MiB, verify: always}
models:
  - name: ocr
    onnx: models/ocr.onnx
    backend: onnxruntime
    block_size: 4MiB
    shapes:
      input1: {min: 1x1x64x32, opt: 1x1x64x160, max: 1x1x64x320}
      "b:0": 2x3
  - {name: other, onnx: o.onnx, optimise: false, split: false, build_memory: 2GiB}
  - {name: narrow, onnx: n.onnx, weights: bf16, weights_tolerance: 1e-3}
  - {name: quick, onnx: q.onnx, share: 20MiB, priority: 2.5, deadline: 100ms, wave: 8}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def test_everything_is_read(write):
    deployment = load(write(GOOD)).deployment
    assert deployment.repository == "here"
    assert deployment.memory_budget == 96 << 20
    assert deployment.loader == Loader(direct_io="never", threads=3, read_size=ReadSize(8 << 20), verify="always")
    varying = ShapeRange((1, 1, 64, 32), (1, 1, 64, 160), (1, 1, 64, 320))
    fixed = ShapeRange((2, 3), (2, 3), (2, 3))
    assert deployment.models == (
        Model(
            name="ocr", onnx="models/ocr.onnx", backend="onnxruntime", block_size=Size(4 << 20),
            shapes={"input1": varying, "b:0": fixed},
        ),
        Model(name="other", onnx="o.onnx", optimise=False, split=False, build_memory=Size(2 << 30)),
        Model(name="narrow", onnx="n.onnx", weights="bf16", weights_tolerance=Tolerance(1e-3)),
        Model(name="quick", onnx="q.onnx", share=Share(20 << 20), priority=2.5, deadline=Duration(0.1), wave=8),
    )  # fmt: skip
    assert varying.for_build() == {"min": (1, 1, 64, 32), "opt": (1, 1, 64, 160), "max": (1, 1, 64, 320)}
    assert fixed.for_build() == (2, 3)


def test_loader_defaults_are_the_runtimes():
    from trt_layering.runtime.loader import LoaderOptions

    ours, theirs = Loader(), LoaderOptions()
    assert (ours.direct_io, ours.verify) == (theirs.direct_io, theirs.verify)
    assert (str(ours.threads), str(ours.read_size)) == (theirs.threads, theirs.read_size) == ("auto", "auto")


def test_auto_may_be_said_too(write):
    path = write(GOOD.replace("threads: 3, read_size: 8MiB", "threads: auto, read_size: auto"))
    assert load(path).deployment.loader == Loader(direct_io="never", verify="always")
    settings = {setting.field: setting.value for setting in load(path).settings()}
    assert (settings["loader.threads"], settings["loader.read_size"]) == ("auto", "auto")


def test_the_arguments_of_a_build(write):
    """All that `build` takes but where, and each as the file says."""
    from trt_layering.building import build

    first, other, narrow, _ = load(write(GOOD)).deployment.models
    assert set(first.for_build()) == set(inspect.signature(build).parameters) - {"repository", "progress"}
    assert first.for_build() == {
        "model": Path("models/ocr.onnx"), "name": "ocr", "backend": "onnxruntime", "precision": "fp32",
        "block_size": 4 << 20, "optimise": True, "split": True, "memory": 1 << 30,
        "weights": "fp32", "weights_tolerance": None, "binding": "auto", "placement": "auto",
        "shapes": {"input1": {"min": (1, 1, 64, 32), "opt": (1, 1, 64, 160), "max": (1, 1, 64, 320)}, "b:0": (2, 3)},
    }  # fmt: skip
    built = other.for_build()
    assert (built["optimise"], built["split"], built["memory"], built["shapes"]) == (False, False, 2 << 30, {})
    assert (narrow.for_build()["weights"], narrow.for_build()["weights_tolerance"]) == ("bf16", 1e-3)


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"),
    [
        ("read_size:", "read_sise:", 3, "loader.read_sise", "did you mean 'read_size'?"),
        ("memory_budget", "memory_bugdet", 2, "memory_bugdet", "did you mean 'memory_budget'?"),
        ("    backend:", "    back_end:", 7, "models[0].back_end", "did you mean 'backend'?"),
        ("4MiB", "4MiBB", 8, "models[0].block_size", "'4MiBB' is not a size"),
        ("4MiB", "[4]", 8, "models[0].block_size", "Expected a size"),
        ("4MiB", "0", 8, "models[0].block_size", "above zero"),
        ("96MiB", "1.5", 2, "memory_budget", "Expected a size, got 1.5"),
        ("threads: 3", "threads: three", 3, "loader.threads", "Expected 1 to 64 parallel reads, or auto, got 'three'"),
        ("threads: 3", "threads: 65", 3, "loader.threads", "Expected 1 to 64 parallel reads"),
        ("threads: 3", "threads: true", 3, "loader.threads", "Expected 1 to 64 parallel reads"),
        ("threads: 3", "threads: 0", 3, "loader.threads", "Expected 1 to 64 parallel reads"),
        ("direct_io: never", "direct_io: off", 3, "loader.direct_io", "choose one of auto, always, never"),
        (
            "backend: onnxruntime",
            "backend: trt",
            7,
            "models[0].backend",
            "choose one of auto, onnxruntime, tensorrt",
        ),
        ("4MiB", "4MiB\n    binding: refitted", 9, "models[0].binding", "choose one of auto, inputs, refit, swap"),
        ("4MiB", "4MiB\n    placement: 1", 9, "models[0].placement", "choose one of auto, staged, zero-copy, managed"),
        ("read_size: 8MiB", "read_size: 5000", 3, "loader.read_size", "5000 is no multiple of 4096 bytes"),
        ("read_size: 8MiB", "read_size: 5kB", 3, "loader.read_size", "'5kB' is no multiple of 4096 bytes"),
        ("read_size: 8MiB", "read_size: 0", 3, "loader.read_size", "above zero"),
        ("read_size: 8MiB", "read_size: automatic", 3, "loader.read_size", "'automatic' is not a size"),
        ("read_size: 8MiB", "read_size: [4]", 3, "loader.read_size", "Expected a size"),
        ("opt: 1x1x64x160", "opt: 1x1x64x999", 10, "models[0].shapes.input1", "out of order"),
        ("opt: 1x1x64x160", "opt: 1x1", 10, "models[0].shapes.input1", "differ in rank"),
        ("opt: 1x1x64x160, ", "", 10, "models[0].shapes.input1", "lacks opt"),
        ("opt:", "best:", 10, "models[0].shapes.input1", "unknown key 'best'"),
        ("2x3", "2x", 11, "models[0].shapes.b:0", "is not a shape"),
        ("2x3", "2x0", 11, "models[0].shapes.b:0", "zero"),
        ("name: other", "name: ocr", 12, "models[1].name", "two models are called 'ocr'"),
        ("name: other", "name: ../other", 12, "models[1].name", "letters, digits"),
        ("name: other, ", "", 12, "models[1]", "'name' is missing"),
        ("optimise: false", "optimise: 3", 12, "models[1].optimise", "Expected true or false"),
        ("weights: bf16", "weights: int4", 13, "models[2].weights", "choose one of fp32, fp16, bf16"),
        ("1e-3", "1%", 13, "models[2].weights_tolerance", "a number from 0 to 1"),
        ("1e-3", "1.5", 13, "models[2].weights_tolerance", "a number from 0 to 1"),
        ("1e-3", ".nan", 13, "models[2].weights_tolerance", "a number from 0 to 1"),
        ("1e-3", "true", 13, "models[2].weights_tolerance", "a number from 0 to 1"),
        ("1e-3", "[1]", 13, "models[2].weights_tolerance", "Expected"),
        ("share: 20MiB", "share: some", 14, "models[3].share", "'some' is not a size"),
        ("share: 20MiB", "share: 0", 14, "models[3].share", "above zero"),
        ("share: 20MiB", "share: null", 14, "models[3].share", "Expected a size"),
        ("priority: 2.5", "priority: 0", 14, "models[3].priority", "Expected a number > 0.0"),
        ("priority: 2.5", "priority: -1", 14, "models[3].priority", "Expected a number > 0.0"),
        ("priority: 2.5", "priority: .nan", 14, "models[3].priority", "Expected a number > 0.0"),
        ("priority: 2.5", "priority: .inf", 14, "models[3].priority", "Expected a number <= 1000000.0"),
        ("priority: 2.5", "priority: high", 14, "models[3].priority", "Expected a number, got text"),
        ("deadline: 100ms", "deadline: 100", 14, "models[3].deadline", "100 is not a time"),
        ("deadline: 100ms", "deadline: 0ms", 14, "models[3].deadline", "above zero"),
        ("deadline: 100ms", "deadline: -1ms", 14, "models[3].deadline", "is not a time"),
        ("deadline: 100ms", "deadline: [1]", 14, "models[3].deadline", "is not a time"),
        ("wave: 8", "wave: 0", 14, "models[3].wave", ">= 1"),
        ("wave: 8", "wave: 65", 14, "models[3].wave", "<= 64"),
        ("96MiB", "9" * 400, 2, "memory_budget", "at most 4 EiB"),
        ("    block_size: 4MiB", "    onnx: x", 8, "models[0].onnx", "written twice, first on line 6"),
    ],
)
def test_mistakes_are_told_with_line_and_field(write, old, new, line, field, words):
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.where == f"{path}:{line}: {field}"
    assert words in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "# nothing\n", "words", "- 1", "5", "models: 5", "models: [5]", "models: [{}]", "a: [", "a: b: c", "\x00",
        "\t", "1: 2", "? [1]\n: 2", "a: 1\n---\nb: 2", "!!python/object/apply:os.system [ls]", "2000-99-99: 1",
        "memory_budget: 2000-99-99", "memory_budget: .nan", "memory_budget: -1", "models: &a [*a]", "&a {b: *a}",
        "[" * 9999, 'repository: "\\U00999999"', "loader: {<<: {a: 1}}", "repository: [a]",
    ],
)  # fmt: skip
def test_nonsense_is_a_configuration_error(write, text):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert "deployment.yaml" in caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("!!timestamp abc", "'abc' is no timestamp"),
        ("!!bool abc", "'abc' is no bool"),
        ("!!int abc", "'abc' is no int"),
        ("!!int ''", "'' is no int"),
        ("!!float ''", "'' is no float"),
        ("2000-99-99", "'2000-99-99' is no timestamp"),
        ("9" * 5000, "' is no int"),
        ('"a\\0b"', "no text in UTF-8"),
        ('"\\ud800"', "no text in UTF-8"),
        ('{"\\0": 1}', "no text in UTF-8"),
        ('"\\UFFFFFFFF"', "no such character"),
    ],
)
def test_values_that_are_none_are_told_with_the_line(write, value, words):
    path = write(f"memory_budget: 96MiB\nrepository: {value}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.where == f"{path}:2"
    assert words in caught.value.what
    assert len(caught.value.what) < 200


@pytest.mark.parametrize(
    ("field", "words"),
    [("memory_budget: {}", "Expected a size"), ("models: [{{name: a, onnx: b, shapes: {{x: {}}}}}]", "is not a shape")],
)
def test_aliases_of_aliases(write, field, words):
    """Written out, each list is ten times as long as the one before."""

    def told(levels: int) -> str:
        lists = [f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
        with pytest.raises(ConfigError) as caught:
            load(write(field.format(f"[&a0 [x], {', '.join(lists)}]")))
        return caught.value.what

    assert told(100) == "a configuration of over 1 MiB, with what its aliases stand for"
    assert words in told(5)
    assert len(told(5)) < 200


@given(st.data())
def test_a_broken_file_never_gives_anything_else(tmp_path_factory, data):
    """Any single byte changed: the file still loads, or it is a ConfigError."""
    raw = bytearray(GOOD.encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("config") / "c.yaml"
    path.write_bytes(raw)
    with suppress(ConfigError):
        load(path)


def test_missing_files_and_folders(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load(path)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="1 MiB"):
        load(path)


def test_settings_tell_where_each_came_from(write):
    path = write(GOOD)
    settings = {setting.field: (setting.value, setting.origin) for setting in load(path).settings()}
    assert settings["memory_budget"] == ("96.0 MiB", f"{path}:2")
    assert settings["loader.threads"] == ("3", f"{path}:3")
    assert settings["models[0].shapes.b:0"] == ("2x3", f"{path}:11")
    assert settings["models[0].precision"] == ("fp32", "default")
    assert settings["models[1].optimise"] == ("false", f"{path}:12")
    keys = ("share", "priority", "deadline", "wave")
    shared = [settings[f"models[{index}].{key}"][0] for index in (1, 3) for key in keys]
    assert shared == ["auto", "1", "none", "4", "20.0 MiB", "2.5", "100 ms", "8"]


def test_the_service(write):
    text = """\
service: {host: "::1", port: 0, metrics_port: null, max_queue: 2, max_body: 1MiB, request_timeout: 500ms, drain: 2s,
  token_file: secret}
"""
    assert load(write(text)).deployment.service == Service(
        host="::1", port=0, metrics_port=None, max_queue=2, max_body=Size(1 << 20), request_timeout=Duration(0.5),
        drain=Duration(2), token_file="secret",
    )  # fmt: skip
    assert load(write("repository: here")).deployment.service == Service()
    assert load(write("service: {port: 0, metrics_port: 0}")).deployment.service.metrics_port == 0


@pytest.mark.parametrize(
    ("said", "field", "words"),
    [
        ("port: http", "port", "Expected a whole number, got text"),
        ("port: -1", "port", ">= 0"),
        ("port: 65536", "port", "<= 65535"),
        ("port: 8002", "metrics_port", "the same port, 8002"),
        ("metrics_port: none", "metrics_port", "Expected a whole number, or null, got text"),
        ("host: 5", "host", "Expected text"),
        ("host: ''", "host", "length >= 1"),
        ("max_queue: 0", "max_queue", ">= 1"),
        ("max_body: 0", "max_body", "above zero"),
        ("max_body: much", "max_body", "'much' is not a size"),
        ("request_timeout: 60", "request_timeout", "60 is not a time"),
        ("drain: 0s", "drain", "above zero"),
        ("token_file: [a]", "token_file", "Expected text, or null"),
        ("tokenfile: a", "tokenfile", "did you mean 'token_file'?"),
    ],
)
def test_mistakes_of_the_service(write, said, field, words):
    path = write(f"repository: here\nservice: {{{said}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.where == f"{path}:2: service.{field}"
    assert words in str(caught.value)


def test_choosing_a_model(write):
    config = load(write(GOOD))
    assert config.model("other").onnx == "o.onnx"
    with pytest.raises(ConfigError, match="did you mean 'other'"):
        config.model("othr")
    with pytest.raises(ConfigError, match="ocr, other"):
        config.model(None)
    assert load(write("models: [{name: a, onnx: b}]")).model(None).name == "a"
    with pytest.raises(ConfigError, match="0 models"):
        load(write("repository: a")).model(None)


def test_files_inside_packages(tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "m.onnx").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_model("package:pack/m.onnx") == tmp_path / "pack" / "m.onnx"
    assert resolve_model("any/path.onnx") == Path("any/path.onnx")
    with pytest.raises(ModelError, match=r"pack/n\.onnx"):
        resolve_model("package:pack/n.onnx")


def test_kept_configurations_load():
    found = sorted(Path(__file__).parent.parent.glob("configs/*.yaml"))
    assert found
    for path in found:
        assert load(path).deployment.models
