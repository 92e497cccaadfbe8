"""Chains behind NVIDIA Triton: what config.pbtxt says, and the model when it is called as Triton calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests import checkout
from tests.chains import WIDTH, assert_same, feed, in_this_process, layers, model, saved, uncut
from tests.triton.server import Served, module
from trt_layering.building import build
from trt_layering.errors import ReadError
from trt_layering.runtime.chain import Chain
from trt_layering.runtime.footprint import footprint
from trt_layering.store.manifest import read_manifest, resolve

maker = module(checkout.ROOT / "scripts" / "triton" / "make_repository.py", "make_repository")
WAVE = 4


@pytest.fixture(scope="module", autouse=True)
def pools_as_they_are() -> Iterator[None]:
    """One pool for all engines would be for all tests that come after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trt_layering.backends.onnxruntime.runtime.share_thread_pool", lambda: None)
        patch.setattr("trt_layering.backends.engine_overhead", lambda name: 0)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(6, batch="n"), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def repository(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    with in_this_process():
        build(source, name="layers", repository=folder, block_size="16KiB", optimise=False)
    return folder


def made(repository: Path, out: Path, *options: str) -> int:
    return int(maker.main(["layers", "--repository", str(repository), "--out", str(out), *options]))


@pytest.fixture
def served(repository: Path, tmp_path: Path) -> Iterator[Served]:
    budget = footprint("layers", repository=repository, wave=WAVE).floor
    assert made(repository, tmp_path, "--wave", str(WAVE), "--budget", str(max(budget, 1))) == 0
    model = Served(tmp_path / "layers")
    yield model
    model.finalize()


def outputs(response: Any) -> dict[str, np.ndarray[Any, Any]]:
    assert not response.has_error(), response.error().message()
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def test_requests_that_come_together_are_one_wave(served, source):
    requests = [feed(rows, seed=rows) for rows in range(1, WAVE + 1)]
    assert all(served.fits("input", "x", one["x"]) for one in requests)
    responses = served.execute(requests)
    for feeds, response in zip(requests, responses, strict=True):
        assert_same(uncut(source, feeds), outputs(response))
    assert served.model._chain.stats()["sweeps"] == 1
    assert served.model._chain.stats()["requests"] == WAVE


def test_a_request_that_does_not_fit_fails_alone(served, source):
    wrong = {"x": np.zeros((1, WIDTH + 1), np.float32)}
    good, bad, last = served.execute([feed(seed=1), wrong, feed(seed=2)])
    assert_same(uncut(source, feed(seed=1)), outputs(good))
    assert_same(uncut(source, feed(seed=2)), outputs(last))
    assert bad.error().code() is served.utils.TritonError.INVALID_ARG
    assert "'x'" in bad.error().message()
    assert bad.output_tensors() == []


def test_only_outputs_that_were_asked_for(served):
    [response] = served.execute([feed()], wanted=[])
    assert outputs(response) == {}


@pytest.mark.parametrize("count", [1, WAVE])
def test_a_failing_drive_is_told_to_every_request_and_gets_over(served, source, monkeypatch, count):
    with monkeypatch.context() as patch:
        patch.setattr(Chain, "_whole_sweep", failing)
        for response in served.execute([feed()] * count):
            assert response.error().code() is served.utils.TritonError.UNAVAILABLE
            assert "the drive failed" in response.error().message()
    [response] = served.execute([feed()])
    assert_same(uncut(source, feed()), outputs(response))


def failing(*_: Any) -> Any:
    raise ReadError("the drive failed", where="weights.bin", remedy="look at the drive")


def test_any_other_error_is_ours(served):
    served.finalize()
    [response] = served.execute([feed()])
    assert response.error().code() is served.utils.TritonError.INTERNAL
    assert "closed" in response.error().message()


def test_finalize_leaves_no_thread(repository, tmp_path):
    assert made(repository, tmp_path) == 0
    before = set(threading.enumerate())
    model = Served(tmp_path / "layers")
    model.execute([feed()])
    model.finalize()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("key", "value", "says"), [("chain", "gone", "gone"), ("budget", "1", "1 B"),
                                                    ("budget", "much", "much")])  # fmt: skip
def test_a_chain_that_cannot_be_opened_fails_the_loading(repository, tmp_path, monkeypatch, key, value, says):
    assert made(repository, tmp_path, "--budget", "64MiB") == 0
    path = tmp_path / "layers" / "config.pbtxt"
    lines = [line for line in path.read_text().splitlines() if f'"{key}"' not in line]
    path.write_text("\n".join([*lines, f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}']))
    monkeypatch.setattr("trt_layering.runtime.chain._require_fit", refusing)
    with pytest.raises(Exception, match=says) as failure:
        Served(tmp_path / "layers")
    assert type(failure.value).__name__ == "TritonModelException"


def refusing(folder: Path, manifest: Any, runtime: Any) -> None:
    from trt_layering.errors import BudgetError

    raise BudgetError("the budget of 1 B is under the floor", floor=2, parts={})


class TestConfiguration:
    """What the generator makes of a chain's manifest."""

    def test_it_is_what_the_chain_says(self, served, repository):
        assert served.config["max_batch_size"] == WAVE
        assert served.config["backend"] == "python"
        assert "dynamic_batching" in served.config
        assert served.config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [str(WIDTH)]}]
        assert served.config["parameters"]["repository"] == {"string_value": str(repository.resolve())}

    @pytest.mark.parametrize(
        ("shapes", "batch"),
        [([["n", 4], ["n", 2]], True), ([[1, 4], [1, "m"]], True), ([["n", 4], ["m", 2]], False),
         ([[2, 4], [2, 2]], False), ([[1, 4], ["n", 2]], False), ([["n"], ["n"]], True), ([[], []], False),
         ([[None, 4], [None, 4]], False)],
    )  # fmt: skip
    def test_waves_only_where_the_first_dimension_is_one(self, repository, shapes, batch):
        chain = with_shapes(read_manifest(resolve(repository, "layers")), shapes)
        assert maker.has_batch(chain) is batch

    @pytest.mark.parametrize(("shape", "dims", "form"), [([], ["1"], "reshape"), (["n"], ["1"], "reshape"),
                                                         ([2, "w"], ["2", "-1"], None)])  # fmt: skip
    def test_shapes(self, repository, tmp_path, shape, dims, form):
        from tests.triton.server import read_config

        chain = with_shapes(read_manifest(resolve(repository, "layers")), [shape, shape])
        path = tmp_path / "config.pbtxt"
        path.write_text(maker.config_text(chain, repository, budget=None, wave=WAVE))
        [value] = read_config(path)["input"]
        assert value["dims"] == dims
        assert ("reshape" in value) is (form == "reshape")

    def test_requests_of_unlike_shapes_come_together(self, repository, tmp_path):
        from tests.triton.server import read_config

        chain = with_shapes(read_manifest(resolve(repository, "layers")), [["n", "w"], ["n", 2]])
        path = tmp_path / "config.pbtxt"
        path.write_text(maker.config_text(chain, repository, budget=None, wave=WAVE))
        config = read_config(path)
        assert config["input"][0]["allow_ragged_batch"] is True
        assert "allow_ragged_batch" not in config["output"][0]

    @pytest.mark.parametrize(("dtype", "shape"), [("bfloat16", [1]), ("string", [1]), ("float32", None)])
    def test_what_triton_cannot_pass_on_is_refused(self, repository, dtype, shape):
        import msgspec

        chain = read_manifest(resolve(repository, "layers"))
        [value] = chain.inputs
        odd = msgspec.structs.replace(value, dtype=dtype, shape=None if shape is None else tuple(shape))
        with pytest.raises(maker.tl.UsageError, match="cannot pass on") as failure:
            maker.config_text(msgspec.structs.replace(chain, inputs=(odd,)), repository, budget=None, wave=1)
        assert failure.value.where == "input 'x'"

    def test_names_are_quoted(self, repository, tmp_path):
        import msgspec

        from tests.triton.server import read_config

        name = 'a "b"\\\n\x01ü'
        chain = read_manifest(resolve(repository, "layers"))
        [value] = chain.inputs
        path = tmp_path / "config.pbtxt"
        odd = msgspec.structs.replace(chain, inputs=(msgspec.structs.replace(value, name=name),))
        path.write_text(maker.config_text(odd, repository, budget=None, wave=1), encoding="utf-8")
        assert read_config(path)["input"][0]["name"] == name


def with_shapes(chain: Any, shapes: list[list[Any]]) -> Any:
    import msgspec

    ends = [
        (msgspec.structs.replace(value, shape=tuple(shape)),)
        for value, shape in zip((*chain.inputs, *chain.outputs), shapes, strict=True)
    ]
    return msgspec.structs.replace(chain, inputs=ends[0], outputs=ends[1])


class TestRefusals:
    """Said before anything is written."""

    @pytest.mark.parametrize(("options", "status", "says"), [
        (["--budget", "much"], 2, "much"), (["--wave", "0"], 2, "wave"),
    ])  # fmt: skip
    def test_usage(self, repository, tmp_path, capsys, options, status, says):
        assert made(repository, tmp_path / "out", *options) == status
        assert says in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_one_chain_of_several_that_is_not_there(self, repository, tmp_path, capsys):
        options = ["layers", "nowhere", "--repository", str(repository), "--out", str(tmp_path / "out")]
        assert maker.main(options) == 4
        assert "nowhere" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def test_a_budget_under_the_floor(self, repository, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(maker.tl, "footprint", lambda *_, **__: type("Needs", (), {"floor": 5 << 20}))
        assert made(repository, tmp_path / "out", "--budget", "4MiB") == 3
        assert "needs 5.0 MiB and the budget is 4.0 MiB" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_scalar_goes_through(tmp_path):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in ("x", "y")]
    path = saved(model([helper.make_node("Tanh", ["x"], ["y"])], *[[end] for end in ends]), tmp_path / "tanh.onnx")
    with in_this_process():
        build(path, name="layers", repository=tmp_path / "engines", optimise=False)
    assert made(tmp_path / "engines", tmp_path / "out") == 0
    served = Served(tmp_path / "out" / "layers")
    feeds = {"x": np.array(0.5, np.float32)}
    assert served.fits("input", "x", feeds["x"])
    [response] = served.execute([feeds])
    served.finalize()
    assert_same(uncut(path, feeds), outputs(response))
