"""Metrics and status page of a deployment that serves."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import parser

from tests import chains
from trt_layering import building, config
from trt_layering.runtime.deployment import Deployment
from trt_layering.service.metrics import exposition
from trt_layering.service.page import page


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    model = chains.saved(chains.layers(6), folder / "layers.onnx")
    with chains.in_this_process():
        building.build(model, name="layers", repository=folder / "engines", block_size=20_000)
    return folder / "engines"


def test_what_a_deployment_did_is_scraped_and_shown(repository):
    models = (config.Model(name="layers", onnx="layers.onnx"), config.Model(name="absent", onnx="absent.onnx"))
    with Deployment(config.Deployment(repository=str(repository), models=models)) as deployment:
        deployment.load("layers")
        for _ in range(3):
            deployment.submit("layers", chains.feed()).result()
        text, shown = exposition(deployment)().decode(), page(deployment)
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert 'nv_inference_request_success{model="layers",version="1"} 3.0\n' in text
    samples = families["nv_inference_request_duration_us"].samples
    assert [one.value > 0 for one in samples if one.labels["model"] == "layers"] == [True]
    assert "1 of 2 models ready" in shown
    assert "<b>last sweep</b>" in shown
