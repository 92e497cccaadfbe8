"""The command line, as people and programs call it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.backends.tensorrt import fakes
from trt_layering import arguments, cli
from trt_layering.errors import BudgetError

ROOT = Path(__file__).parent.parent
WIDTH = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four MatMuls of 64 KiB; the input's name has a colon, its batch is free."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x:0"
    for index in range(4):
        weight = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [f"m{index}"]))
        nodes.append(helper.make_node("Relu", [f"m{index}"], [f"y{index}"]))
        last = f"y{index}"
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x:0", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["n", WIDTH])],
        weights,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "four layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def repository(model, tmp_path_factory) -> Path:
    """Where the chain `four-layers` is built."""
    folder = tmp_path_factory.mktemp("cli") / "engines"
    with contextlib.redirect_stdout(io.StringIO()):
        status = cli.main(
            ["build", str(model), "--repository", str(folder), "--block-size", "64KiB", "--shape", "x:0:2x128"]
        )
    assert status == 0
    return folder


def command(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    argv = [sys.executable, "-m", "trt_layering", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **options}
    return subprocess.run(argv, text=True, env=environment, check=False, **options)


def shell(script: str, *words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The command as `"$@"` of a shell script, which may close or redirect what it inherits."""
    argv = ["sh", "-c", script, "sh", sys.executable, "-m", "trt_layering", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False, timeout=60, **options)


def as_json(capfd, *words: object) -> tuple[int, dict]:
    """Status and the one object on standard output of a command run in this process."""
    capfd.readouterr()
    status = cli.main([*map(str, words), "--json"])
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    assert "Traceback" not in err
    return status, json.loads(out)


def plainly(capfd, verb: str, name: str, repository: Path) -> list[str]:
    """Lines on standard output of a command that succeeds."""
    capfd.readouterr()
    assert cli.main([verb, name, "--repository", str(repository)]) == 0
    return capfd.readouterr().out.splitlines()


def run_words(repository: Path, *words: object) -> list[object]:
    return ["run", "four-layers", "--repository", repository, "--shape", "x:0:2x128", *words]


class TestVerbs:
    def test_build(self, capfd, model, tmp_path):
        status, told = as_json(
            capfd, "build", model, "--name", "m", "--repository", tmp_path, "--block-size", "64KiB", "--no-optimise",
            "--minShapes=x:0:1x128", "--max-shape", "x:0:4x128",
        )  # fmt: skip
        assert status == 0
        [built] = told["models"]
        assert (built["name"], built["version"], built["blocks"], built["max_abs_diff"]) == ("m", 1, 4, 0.0)
        assert built["weights_bytes"] == 4 * WIDTH * WIDTH * 4
        assert Path(built["path"], "chain.json").is_file()

    def test_build_with_narrow_weights(self, capfd, model, tmp_path):
        words = ["build", model, "--repository", tmp_path, "--block-size", "64KiB", "--weights", "fp16"]
        status, told = as_json(capfd, *words, "--weights-tolerance", "2e-3")
        assert status == 0
        [built] = told["models"]
        assert (built["weights"], built["weights_bytes"]) == ("fp16", 4 * WIDTH * WIDTH * 2)
        assert [one["block"] for one in built["narrowed"]] == ["block-000", "block-001"]
        for one in built["narrowed"]:
            assert (one["bytes_before"], one["bytes_after"], one["kept"]) == (2 * 64 << 10, 64 << 10, [])
            assert 0 < one["max_rel_diff"] <= 2e-3
        chain = as_json(capfd, "inspect", built["path"])[1]
        assert (chain["weights"], chain["narrowed"]) == ("fp16", built["narrowed"])
        assert as_json(capfd, "verify", built["name"], "--repository", tmp_path, "--onnx", model)[0] == 0
        for verb in (words, ["inspect", built["path"]]):
            assert cli.main([*map(str, verb)]) == 0
            assert "weights in fp16 change a block's output by" in capfd.readouterr().out
        status, told = as_json(capfd, *words, "--weights-tolerance", "nan")
        assert (status, told["error"]["remedy"]) == (2, "give one like 1e-3")

    def test_run_on_random_inputs(self, capfd, repository):
        status, told = as_json(capfd, *run_words(repository, "--iterations", 3, "--seed", 5))
        again = as_json(capfd, *run_words(repository, "--seed", 5))[1]
        other = as_json(capfd, *run_words(repository, "--seed", 6))[1]
        assert status == 0
        assert told["iterations"] == told["stats"]["sweeps"] == 3
        assert told["outputs"]["y3"]["shape"] == [2, WIDTH]
        assert told["outputs"] == again["outputs"] != other["outputs"]

    def test_run_on_a_file(self, capfd, repository, model, tmp_path):
        import onnxruntime

        x = np.random.default_rng(1).standard_normal((3, WIDTH), dtype=np.float32)
        np.save(tmp_path / "in.npy", x)
        for output in ("out.npz", "out.npy"):
            words = ("--input", f"x:0={tmp_path}/in.npy", "--output", tmp_path / output)
            assert as_json(capfd, *run_words(repository, *words))[0] == 0
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        [wanted] = session.run(None, {"x:0": x})
        with np.load(tmp_path / "out.npz") as outputs:
            assert outputs.files == ["y3"]
            np.testing.assert_allclose(outputs["y3"], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    def test_run_at_the_floor_and_with_every_loader_flag(self, capfd, repository):
        floor = as_json(capfd, "inspect", "four-layers", "--repository", repository)[1]["floor_bytes"]
        status, told = as_json(
            capfd,
            *run_words(
                repository, "--budget", floor, "--direct-io", "never", "--loader-threads", 1, "--read-size", "64KiB",
                "--checksums", "always", "--chain-version", 1,
            ),
        )  # fmt: skip
        assert status == 0
        assert told["stats"]["budget_bytes"] == floor

    def test_run_in_waves(self, capfd, repository):
        """Each request has inputs of its own; what is told of outputs is the last one's."""
        status, told = as_json(capfd, *run_words(repository, "--wave", 3, "--iterations", 5, "--seed", 5))
        assert (status, told["wave"], told["iterations"], told["stats"]["requests"]) == (0, 3, 5, 5)
        assert told["requests_per_second"] > 0
        assert told["outputs"] == as_json(capfd, *run_words(repository, "--seed", 9))[1]["outputs"]
        assert as_json(capfd, *run_words(repository, "--wave", 3))[1]["iterations"] == 3
        assert cli.main([*map(str, run_words(repository, "--wave", 2, "--iterations", 4))]) == 0
        out = capfd.readouterr().out
        assert "later waves, median, for each request" in out
        assert "requests per second" in out

    def test_run_with_a_trace(self, capfd, repository, tmp_path, monkeypatch):
        monkeypatch.setattr("trt_layering.backends.engine_overhead", lambda name: 0)  # or keeping all would take less
        floor = as_json(capfd, "inspect", "four-layers", "--repository", repository)[1]["floor_bytes"]
        words = ("--budget", floor, "--trace", tmp_path / "t.json", "--iterations", 2)
        assert as_json(capfd, *run_words(repository, *words))[0] == 0
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        assert [event["cat"] for event in events if event["ph"] == "X"].count("execute") == 8
        assert {event["ph"] for event in events} == set("MXsfC")

    def test_schedule(self, capfd, repository):
        """The keys that programs rely on, for a budget that holds all, one that does not, and one under the floor."""
        words = ("schedule", "four-layers", "--repository", repository)
        status, whole = as_json(capfd, *words)
        numbers = {"resident_bytes", "streamed_bytes", "arena_bytes", "predicted_ms"}
        assert status == 0
        assert whole["fits"]
        assert whole["resident_bytes"] == whole["weights_bytes"] == 4 * WIDTH * WIDTH * 4
        assert (whole["streamed_bytes"], whole["required_read_rate"], whole["break_even_runs"]) == (0, 0, None)
        assert whole["predicted_ms"] == whole["all_resident_ms"] > 0
        assert whole["measured_read_rate"] > 0
        floor = whole["floor_bytes"]
        status, told = as_json(capfd, *words, "--budget", floor, "--read-rate", "2GB/s", "--chain-version", 1)
        assert (status, told["fits"], told["assumed_read_rate"]) == (0, True, 2e9)
        assert told["activation_bytes"] == whole["activation_bytes"]
        assert told["predicted_ms"] >= told["all_resident_ms"]
        assert not {key for key in numbers if told[key] is None}
        status, told = as_json(capfd, *words, "--budget", floor - 1)
        assert (status, told["fits"], told["floor_bytes"]) == (3, False, floor)
        assert {key for key in {*numbers, "required_read_rate", "break_even_runs"} if told[key] is not None} == set()

    def test_verify(self, capfd, repository, model):
        words = ("verify", "four-layers", "--repository", repository, "--onnx", model)
        status, told = as_json(capfd, *words)
        assert (status, told["passed"]) == (0, True)
        assert told["max_abs_diff"] <= 1e-5 * told["max_abs_output"]
        assert set(told["per_output"]) == {"y3"}

    def test_verify_finds_another_model(self, capfd, repository, model, tmp_path):
        other = onnx.load(model)
        weight = other.graph.initializer[2]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
        onnx.save(other, tmp_path / "other.onnx")
        words = ("verify", "four-layers", "--repository", repository, "--onnx", tmp_path / "other.onnx")
        status, told = as_json(capfd, *words)
        assert (status, told["passed"]) == (1, False)

    def test_verify_of_a_version(self, capfd, model, tmp_path):
        """Version 1 is of the model, version 2 of another one."""
        other = onnx.load(model)
        weight = other.graph.initializer[2]
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
        onnx.save(other, tmp_path / "other.onnx")
        place = ("--name", "m", "--repository", tmp_path, "--shape", "x:0:2x128")
        for source in (model, tmp_path / "other.onnx"):
            assert as_json(capfd, "build", source, *place)[0] == 0
        words = ("verify", "m", "--repository", tmp_path, "--onnx", model)
        assert as_json(capfd, *words, "--chain-version", 1)[0] == 0
        assert as_json(capfd, *words)[0] == as_json(capfd, *words, "--chain-version", 2)[0] == 1

    def test_verify_says_one_line(self, repository, model):
        done = command("verify", "four-layers", "--repository", repository, "--onnx", model)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.startswith("four-layers agrees with") for line in done.stdout.splitlines()] == [True]

    def test_inspect(self, capfd, repository, model):
        status, chain = as_json(capfd, "inspect", "four-layers", "--repository", repository)
        assert (status, chain["kind"], len(chain["blocks"])) == (0, "chain", 4)
        assert as_json(capfd, "inspect", chain["path"])[1] == chain
        for file in ("weights.bin", "chain.json", "schedules.json"):
            assert as_json(capfd, "inspect", f"{chain['path']}/{file}")[1] == chain
        assert chain["schedules"] >= 1
        assert [(part["first"], part["count"]) for part in chain["joined"]] == [(0, 4)]
        lines = plainly(capfd, "inspect", "four-layers", repository)
        assert any(f"for {chain['schedules']} size" in line for line in lines)
        assert any("1 engine for a run of blocks" in line for line in lines)
        block = as_json(capfd, "inspect", f"{chain['path']}/{chain['blocks'][1]['file']}")[1]
        assert block["kind"] == "onnx"
        size = WIDTH * WIDTH * 4
        assert [(weight["bytes"], weight["place"]) for weight in block["weights"]] == [
            (size, f"weights.bin at byte {size}")
        ]
        assert as_json(capfd, "inspect", model)[1]["operators"] == {"MatMul": 4, "Relu": 4}

    def test_profile(self, capfd, repository, monkeypatch):
        from trt_layering import profiling

        monkeypatch.setattr(profiling.measure, "__kwdefaults__", {"seconds": 0.0})
        status, told = as_json(capfd, "profile", "four-layers", "--repository", repository, "--chain-version", 1)
        assert (status, told["name"], len(told["execute_seconds"])) == (0, "four-layers", 5)
        kept = as_json(capfd, "inspect", "four-layers", "--repository", repository)[1]["profile"]
        assert {"name": "four-layers", **kept} == told
        assert kept["machine"]["processor"] in "\n".join(plainly(capfd, "profile", "four-layers", repository))
        assert any("MB/s" in line for line in plainly(capfd, "inspect", "four-layers", repository))

    def test_doctor(self, capfd, tmp_path, monkeypatch):
        from trt_layering import doctor

        monkeypatch.setattr(doctor.drive.measure, "__kwdefaults__", {"file_bytes": 4 << 20, "seconds": 0.02})
        config = tmp_path / "c.yaml"
        config.write_text(f"repository: {tmp_path}/e\nmemory_budget: 5MiB\n")
        status, told = as_json(capfd, "doctor", config)
        assert status == 0
        assert {"ONNX Runtime", "drive reads"} <= {finding["name"] for finding in told["findings"]}
        assert {"field": "memory_budget", "value": "5.0 MiB", "origin": f"{config}:2"} in told["settings"]

    def test_everything_reads_well_without_json_too(self, capfd, repository, model):
        for words, wanted in (
            (run_words(repository, "--iterations", 2), "later runs, median"),
            (["verify", "four-layers", "--repository", repository, "--onnx", model], "agrees with"),
            (["inspect", "four-layers", "--repository", repository], "block-001"),
            (["inspect", model], "4 MatMul"),
            (["schedule", "four-layers", "--repository", repository], "fits: "),
        ):
            assert cli.main([*map(str, words)]) == 0
            assert wanted in capfd.readouterr().out


class TestConfiguration:
    @pytest.fixture
    def config(self, model, tmp_path):
        path = tmp_path / "deploy.yaml"
        path.write_text(
            f"repository: {tmp_path}/engines\nmemory_budget: 64MiB\nloader: {{direct_io: never}}\nmodels:\n"
            f"  - {{name: a, onnx: {model}, block_size: 64KiB, shapes: {{'x:0': 1x128}}}}\n"
            f"  - {{name: b, onnx: {model}, block_size: 128KiB, optimise: false}}\n"
        )
        return path

    def test_the_same_things_from_a_file(self, capfd, config, tmp_path):
        _, told = as_json(capfd, "build", config)
        assert [(built["name"], built["blocks"]) for built in told["models"]] == [("a", 4), ("b", 2)]
        assert as_json(capfd, "build", config, "--name", "b", "--block-size", "64KiB")[1]["models"][0]["blocks"] == 4
        _, divided = as_json(capfd, "schedule", config)
        shares = {portion["name"]: portion["share_bytes"] for portion in divided["models"]}
        for name in ("a", "b"):
            _, told = as_json(capfd, "run", config, "--name", name)
            assert told["stats"]["budget_bytes"] == shares[name]
        _, told = as_json(capfd, "run", config, "--name", "a", "--budget", "32MiB")
        assert told["stats"]["budget_bytes"] == 32 << 20
        assert as_json(capfd, "verify", config, "--name", "a")[1]["passed"]

    def test_one_budget_for_several_models(self, capfd, config):
        assert as_json(capfd, "build", config)[0] == 0
        status, told = as_json(capfd, "schedule", config)
        assert (status, told["fits"], told["budget_bytes"]) == (0, True, 64 << 20)
        assert sum(portion["share_bytes"] for portion in told["models"]) + told["left_bytes"] == 64 << 20
        assert all(portion["predicted_ms"] > 0 for portion in told["models"])
        _, one = as_json(capfd, "schedule", config, "--name", "b")
        assert (one["name"], one["budget_bytes"]) == ("b", told["models"][1]["share_bytes"])
        status, told = as_json(capfd, "schedule", config, "--budget", told["floor_bytes"] - 1)
        assert (status, told["fits"], told["left_bytes"]) == (3, False, None)
        assert cli.main(["schedule", str(config)]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert lines[0].startswith("fits: 2 models get ")
        assert [line.split()[0] for line in lines[2:]] == ["model", "a", "b", "all"]

    def test_what_cannot_be_divided(self, capfd, config):
        for more, status, words in (
            ((), 4, "a, b are not built"),
            (("--chain-version", 1), 2, "one model"),
            (("--read-rate", "1GB"), 2, "one model"),
        ):
            got, told = as_json(capfd, "schedule", config, *more)
            assert got == status
            assert words in told["error"]["what"]
        config.write_text(config.read_text().replace("memory_budget: 64MiB\n", ""))
        status, told = as_json(capfd, "schedule", config)
        assert (status, "no memory_budget" in told["error"]["what"]) == (2, True)

    def test_verify_reads_as_the_file_says(self, capfd, config, monkeypatch):
        from trt_layering import verification
        from trt_layering.runtime.loader import LoaderOptions

        assert as_json(capfd, "build", config, "--name", "a")[0] == 0
        real, asked = verification.open_chain, []
        monkeypatch.setattr(verification, "open_chain", lambda *a, **k: asked.append(k["loader"]) or real(*a, **k))
        assert as_json(capfd, "verify", config, "--name", "a")[0] == 0
        assert asked == [LoaderOptions(direct_io="never")]

    def test_tensorrt_where_it_cannot_be_used(self, capfd, model, tmp_path, monkeypatch):
        fakes.cuda(monkeypatch, None)
        file = tmp_path / "later.yaml"
        file.write_text(f"models: [{{name: a, onnx: {model}, backend: tensorrt}}]\n")
        for words in (["build", file], ["build", model, "--backend", "tensorrt"]):
            status, told = as_json(capfd, *words, "--repository", tmp_path)
            assert status == 1
            assert told["error"]["what"].startswith("no NVIDIA driver")
            assert told["error"]["remedy"]

    def test_flags_of_tensorrt_win_over_the_file(self, tmp_path):
        file = tmp_path / "one.yaml"
        file.write_text("models: [{name: a, onnx: a.onnx, backend: tensorrt, binding: swap, placement: managed}]\n")
        said = ["build", str(file), "--binding", "refit", "--precision", "fp16"]
        _, [model] = arguments.models_to_build(arguments.parsed(said, cli._VERBS))
        found = (model.backend, model.binding, model.placement, model.precision)
        assert found == ("tensorrt", "refit", "managed", "fp16")

    def test_a_model_must_be_chosen(self, capfd, config):
        status, told = as_json(capfd, "run", config)
        assert status == 2
        assert "a, b" in told["error"]["remedy"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "status", "said"),
        [
            ([], 2, "VERB"),
            (["biuld"], 2, "invalid choice"),
            (["build"], 2, "required"),
            (["build", "none.onnx"], 1, "none.onnx"),
            (["build", "none.yaml"], 2, "none.yaml"),
            (["build", "words.onnx"], 1, "words.onnx"),
            (["build", "m.onnx", "--block-size", "4 parsecs"], 2, "--block-size"),
            (["build", "m.onnx", "--memory", "0"], 2, "--memory"),
            (["build", "m.onnx", "--shape", "1x3"], 2, "name"),
            (["build", "m.onnx", "--shape", "x:1", "--shape", "x:2"], 2, "twice"),
            (["build", "m.onnx", "--min-shape", "x:1"], 2, "--max-shape"),
            (["build", "m.onnx", "--min-shape", "x:2", "--max-shape", "x:1"], 2, "out of order"),
            (["build", "m.onnx", "--backend", "tpu"], 2, "choose from"),
            (["build", "m.onnx", "--name", "../x"], 2, "../x"),
            (["run", "four-layers", "--name", "x"], 2, "--name"),
            (["run", "four-layers", "--iterations", "0"], 2, "--iterations"),
            (["run", "four-layers", "--iterations", "many"], 2, "--iterations"),
            (["run", "four-layers", "--wave", "0"], 2, "--wave"),
            (["run", "four-layers", "--wave", "-8"], 2, "--wave"),
            (["run", "four-layers", "--wave", "65"], 2, "--wave must be 1 to 64"),
            (["run", "four-layers", "--wave", "1000000000"], 2, "--wave must be 1 to 64"),
            (["run", "four-layers", "--wave", "1.5"], 2, "--wave"),
            (["run", "four-layers", "--wave", "8", "--iterations", "0"], 2, "--iterations"),
            (["run", "four-layers", "--wave", "8", "--budget", "4KiB"], 3, "waves"),
            (["run", "four-layers", "--trace", "none/t.json"], 2, "no folder"),
            (["run", "four-layers", "--trace", "."], 2, "no plain file"),
            (["run", "four-layers", "--std", "0"], 2, "--std"),
            (["run", "four-layers", "--mean", "a"], 2, "--mean"),
            (["run", "four-layers", "--loader-threads", "0"], 2, "threads"),
            (["run", "four-layers", "--read-size", "5"], 2, "read_size"),
            (["run", "four-layers", "--input", "q=in.npy"], 2, "q"),
            (["run", "four-layers", "--input", "in.npy"], 2, "float64"),
            (["run", "four-layers", "--shape", "x:0:2x5"], 2, "128"),
            (["run", "four-layers", "--output", "out.txt"], 2, ".npz"),
            (["run", "four-layers", "--output", "none/out.npz"], 2, "no folder 'none'"),
            (["run", "four-layers", "--seed", "-1"], 2, "--seed"),
            (["run", "four-layers", "--seed", "one"], 2, "--seed"),
            (["run", "four-layers", "--budget", "4KiB"], 3, "floor"),
            (["run", "four-layers", "--budget", "9" * 400], 2, "at most 4 EiB"),
            (["run", "four-layers", "--shape", "x:0:999999999999x128"], 2, "takes 476837.16 GiB, more than there is"),
            (["run", "four-layers", "--shape", "x:0:99999999999999999x128"], 2, "takes over 4 EiB"),
            (["run", "four-layers", "--input", "x:0=\udcff.npy"], 2, "not UTF-8"),
            (["run", "four\0layers"], 2, "not UTF-8"),
            (["build", "\udcff.onnx"], 2, "not UTF-8"),
            (["run", "nobody"], 4, "nobody"),
            (["run", "four-layers", "--chain-version", "9"], 4, "9"),
            (["run", "../four-layers"], 2, "four-layers"),
            (["verify", "four-layers"], 2, "--onnx"),
            (["verify", "four-layers", "--onnx", "none.onnx"], 1, "the model cannot be read"),
            (["verify", "four-layers", "--onnx", "words.onnx"], 1, "not an ONNX model"),
            (["verify", "four-layers", "--onnx", "m.onnx", "--seed", "-1"], 2, "--seed"),
            (["schedule", "nobody"], 4, "nobody"),
            (["schedule", "none.yaml"], 2, "none.yaml"),
            (["schedule", "four-layers", "--name", "x"], 2, "--name"),
            (["schedule", "four-layers", "--budget", "0"], 2, "--budget"),
            (["schedule", "four-layers", "--budget", "little"], 2, "--budget"),
            (["schedule", "four-layers", "--read-rate", "fast"], 2, "--read-rate"),
            (["schedule", "four-layers", "--read-rate", "0"], 2, "--read-rate"),
            (["schedule", "four-layers", "--read-rate", "5TB"], 2, "--read-rate"),
            (["schedule", "four-layers", "--read-rate", "1B/s"], 2, "--read-rate"),
            (["inspect", "nobody"], 4, "nobody"),
            (["profile", "nobody"], 4, "nobody"),
            (["profile", "../x"], 2, "../x"),
            (["profile", "four-layers", "--chain-version", "9"], 4, "no version 9"),
            (["inspect", "words.onnx"], 1, "words.onnx"),
            (["inspect", "in.npy"], 2, "no file of a chain"),
            (["inspect", "short.plan"], 4, "header"),
            (["doctor", "words.onnx"], 2, "words.onnx"),
        ],
    )
    def test_are_told_with_the_right_status(self, capfd, repository, tmp_path, monkeypatch, words, status, said):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "engines").symlink_to(repository)
        (tmp_path / "words.onnx").write_text("not a model")
        (tmp_path / "short.plan").write_bytes(b"ftrt" + bytes(10))
        np.save(tmp_path / "in.npy", np.zeros((1, WIDTH)))
        assert cli.main(words) == status
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert said in err
        assert "Traceback" not in err
        got, told = as_json(capfd, *words)
        assert got == told["status"] == status
        assert told["error"]["what"] in err

    @pytest.mark.parametrize("words", [["run", "x", "--json=1"], ["--json", "run", "x"], ["--json=1"]])
    def test_json_where_it_does_not_belong(self, capfd, words):
        assert cli.main(words) == 2
        out, err = capfd.readouterr()
        assert json.loads(out)["error"]["what"] in err

    def test_an_output_file_that_cannot_be_written(self, capfd, repository, tmp_path):
        (tmp_path / "full.npz").symlink_to("/dev/full")
        status, told = as_json(capfd, *run_words(repository, "--output", tmp_path / "full.npz"))
        assert status == 1
        assert told["error"]["what"] == "the outputs cannot be written: No space left on device"
        assert told["error"]["where"] == f"{tmp_path}/full.npz"

    def test_an_output_file_is_refused_before_any_run(self, capfd, repository, monkeypatch):
        from trt_layering.runtime.chain import Chain

        monkeypatch.setattr(Chain, "run", lambda *_: pytest.fail("it ran"))
        for file in ("out.txt", "none/out.npz"):
            assert as_json(capfd, *run_words(repository, "--output", file))[0] == 2

    def test_libraries_do_not_speak_before_the_error(self, model, tmp_path):
        """onnx_ir logs a warning about an output that no node gives."""
        broken = onnx.load(model)
        broken.graph.output[0].name = "nowhere"
        onnx.save(broken, tmp_path / "broken.onnx")
        done = command("build", tmp_path / "broken.onnx", "--repository", tmp_path)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert "nowhere" in done.stderr

    def test_a_damaged_store(self, capfd, repository, tmp_path):
        copy = tmp_path / "engines"
        shutil.copytree(repository, copy)
        with (copy / "four-layers" / "1" / "weights.bin").open("r+b") as file:
            file.seek(5000)
            file.write(b"\xff")
        status, told = as_json(capfd, *run_words(copy))
        assert (status, told["error"]["kind"]) == (4, "CorruptError")

    def test_the_floor_and_its_parts(self, capfd, repository):
        _, told = as_json(capfd, *run_words(repository, "--budget", "4KiB"))
        assert told["error"]["floor_bytes"] == sum(told["error"]["parts"].values())

    @pytest.mark.parametrize(
        ("error", "status", "said"),
        [
            (KeyboardInterrupt(), 130, "interrupted"),
            (MemoryError(), 1, "memory"),
            (BudgetError("too little", floor=5, parts={"a": 5}), 3, "too little"),
            (ZeroDivisionError("oops"), 1, "a fault of trt-layering itself: ZeroDivisionError: oops"),
            (OSError(28, "No space left on device", "/x/y"), 1, "/x/y"),
            (ModuleNotFoundError("no", name="polygraphy"), 1, "pip install polygraphy"),
            (RecursionError("deep"), 1, "deep"),
        ],
    )
    def test_nothing_escapes(self, capfd, monkeypatch, error, status, said):
        def fail(_):
            raise error

        monkeypatch.setitem(cli._VERBS, "inspect", fail)
        assert cli.main(["inspect", "x"]) == status
        err = capfd.readouterr().err
        assert said in err
        assert "Traceback" not in err
        assert as_json(capfd, "inspect", "x")[0] == status

    def test_a_traceback_on_request(self, capfd, monkeypatch):
        def fail(_):
            raise ZeroDivisionError

        monkeypatch.setitem(cli._VERBS, "inspect", fail)
        monkeypatch.setenv("TRT_LAYERING_TRACEBACK", "1")
        assert cli.main(["inspect", "x"]) == 1
        assert "Traceback" in capfd.readouterr().err


class TestProcesses:
    def test_help_and_version(self):
        for words in (["--help"], ["--version"], ["build", "--help"], ["run", "--help"]):
            done = command(*words)
            assert (done.returncode, done.stderr) == (0, "")
            assert "trt-layering" in done.stdout

    @pytest.mark.parametrize("more", [[], ["--json"]])
    def test_nobody_reads_the_output(self, repository, more):
        read, write = os.pipe()
        os.close(read)
        done = command("inspect", "four-layers", "--repository", repository, *more, stdout=write)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")

    @pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["inspect", "--help"], ["run", "--json"]])
    def test_the_output_cannot_be_written(self, repository, words):
        done = shell('exec "$@" >/dev/full', words[0], "four-layers", "--repository", repository, *words[1:])
        assert done.returncode == 1
        assert done.stderr.splitlines() == [
            "error: the result cannot be written: No space left on device",
            "  where: standard output",
            "  to do: let it go to a file on a drive with free space",
        ]

    @pytest.mark.parametrize("to", ["&-", "/dev/full"])
    def test_standard_error_cannot_be_written(self, repository, to):
        done = shell(f'exec "$@" 2>{to}', *run_words(repository, "--json"))
        assert (done.returncode, json.loads(done.stdout)["iterations"]) == (0, 1)
        done = shell(f'exec "$@" 2>{to}', "run", "nobody", "--repository", repository, "--json")
        assert (done.returncode, json.loads(done.stdout)["status"]) == (4, 4)
        done = shell(f'exec "$@" 2>{to}', "run", "nobody", "--repository", repository)
        assert (done.returncode, done.stdout) == (4, "")

    def test_standard_output_is_closed(self, repository):
        done = shell('exec "$@" >&-', "inspect", "four-layers", "--repository", repository, "--json")
        assert (done.returncode, done.stderr) == (0, "")

    def test_no_file_takes_the_place_of_a_closed_stream(self):
        """What libraries print would go into that file."""
        program = (
            "import os, sys; from trt_layering import cli; from trt_layering.terminal import Result\n"
            "cli._VERBS['inspect'] = lambda _: Result({'number': os.open(os.devnull, os.O_RDONLY)}, [])\n"
            "sys.exit(cli.main(['inspect', 'x', '--json']))\n"
        )
        argv = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", program]
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, timeout=60)
        assert json.loads(done.stdout)["number"] > 2

    @pytest.mark.parametrize(
        "words", [["run", "x"], ["doctor"], ["build", "x.onnx"], ["run", "x", "--repository", "y"]]
    )
    def test_the_current_folder_is_gone(self, tmp_path, words):
        (tmp_path / "gone").mkdir()
        done = shell('rmdir "$PWD" && exec "$@"', *words, "--json", cwd=tmp_path / "gone")
        assert done.returncode == 1
        assert json.loads(done.stdout)["error"] == {
            "kind": "LayeringError", "what": "the current folder is gone", "where": f"{tmp_path}/gone",
            "remedy": "change to a folder that exists",
        }  # fmt: skip

    def test_interrupted_while_it_is_imported(self):
        program = (
            "import runpy, sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'trt_layering.terminal':\n"
            "            raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            "runpy.run_module('trt_layering', run_name='__main__')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")

    def test_interrupted_by_a_signal(self, repository, tmp_path):
        """The command waits for its input, which is a pipe: opening that tells that it is at work."""
        os.mkfifo(tmp_path / "in.npy")
        words = run_words(repository, "--input", f"x:0={tmp_path}/in.npy")
        process = subprocess.Popen(
            [sys.executable, "-m", "trt_layering", *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        with (tmp_path / "in.npy").open("wb"):
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (130, "", "error: interrupted\n")

    def test_libraries_cannot_spoil_the_object(self):
        program = (
            "import os, sys; from trt_layering import cli; from trt_layering.terminal import Result\n"
            "def noisy(_):\n"
            "    print('from Python'); os.write(1, b'from C\\n'); os.system('echo from a child')\n"
            "    return Result({'n': float('nan')}, [])\n"
            "cli._VERBS['inspect'] = noisy\n"
            "sys.exit(cli.main(['inspect', 'x', '--json']))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
        )
        assert json.loads(done.stdout) == {"n": None}
        for words in ("from Python", "from C", "from a child"):
            assert words in done.stderr

    def test_running_imports_little(self, repository):
        program = (
            "import sys; from trt_layering import cli\n"
            f"status = cli.main({[*map(str, run_words(repository, '--json'))]!r})\n"
            "print(*sorted(sys.modules), file=sys.stderr)\n"
            "sys.exit(status)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
        )
        modules = set(done.stderr.split())
        assert "onnxruntime" in modules
        assert not modules & {"onnx", "onnx_ir", "polygraphy", "rich", "PIL", "yaml"}

    def test_output_that_is_not_utf8(self, repository):
        done = command("inspect", "four-layers", "--repository", repository, env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0
        assert "block-000" in done.stdout


class TestProgress:
    def test_bars_on_a_terminal(self, model, tmp_path):
        leader, follower = pty.openpty()
        shown = bytearray()

        def read() -> None:  # a terminal that nobody reads from fills up, and then writing to it waits
            with contextlib.suppress(OSError):
                while part := os.read(leader, 65536):
                    shown.extend(part)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        done = command(
            "build", model, "--repository", tmp_path, stderr=follower, env={"TERM": "xterm", "COLUMNS": "80"}
        )
        os.close(follower)
        reader.join()
        os.close(leader)
        assert done.returncode == 0
        assert "100%" in shown.decode()
        assert "built four-layers" in done.stdout
