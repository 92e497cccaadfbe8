"""What is scraped: in Prometheus' format, under Triton's names and types, and only of models."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import parser

from tests.service.snapshots import MIB, Snapshots, idle, state, sweep, unavailable
from trt_layering.runtime.trace import Event, ReadEvent
from trt_layering.service import metrics

TRITON = {
    "nv_inference_request_success": "counter",
    "nv_inference_request_failure": "counter",
    "nv_inference_count": "counter",
    "nv_inference_exec_count": "counter",
    "nv_inference_request_duration_us": "counter",
    "nv_inference_queue_duration_us": "counter",
    "nv_inference_compute_infer_duration_us": "counter",
    "nv_inference_pending_request_count": "gauge",
}


def scraped(deployment: Snapshots) -> dict:
    return parsed(metrics.exposition(deployment)())


def parsed(text: bytes) -> dict:
    return {family.name: family for family in parser.text_string_to_metric_families(text.decode())}


def asked(deployment: Snapshots, path: str = "/metrics", method: str = "GET") -> httpx.Response:
    """The application's reply, without a socket."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(metrics.metrics_app(deployment))
        async with httpx.AsyncClient(transport=transport, base_url="http://metrics") as client:
            return await client.request(method, path)

    return asyncio.run(ask())


def value(families: dict, name: str, suffix: str = "", **labels: str) -> float:
    found = [
        one.value
        for one in families[name].samples
        if one.name == name + suffix and labels.items() <= one.labels.items()
    ]
    assert len(found) == 1, f"{name}{suffix} {labels}"
    return found[0]


def test_triton_s_metrics_have_its_names_types_and_labels():
    text = metrics.exposition(Snapshots([state("line"), unavailable("minilm")]))().decode()
    for name, kind in TRITON.items():
        assert f"# TYPE {name} {kind}\n" in text
        assert f'\n{name}{{model="line",version="3"}} ' in text
        assert f'\n{name}{{model="minilm",version=""}} ' in text
        assert f"{name}_total" not in text


def test_durations_are_microseconds_and_counts_those_of_the_snapshot():
    text = metrics.exposition(Snapshots([state("line", queued=7)]))().decode()
    numbers = {
        line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if 'model="line",version' in line
    }
    assert numbers["nv_inference_queue_duration_us"] == 4_000_000
    assert numbers["nv_inference_request_duration_us"] == 60_500_000
    assert numbers["nv_inference_compute_infer_duration_us"] == 27_750_000
    assert numbers["nv_inference_exec_count"] == 667
    assert numbers["nv_inference_pending_request_count"] == 7


def test_ours_are_in_base_units():
    families = scraped(Snapshots([state("line", fallbacks=("one", "two"))], budget_bytes=96 * MIB))
    own = {"model": "line", "version": "3"}
    assert value(families, "trt_layering_stall_seconds", "_total", **own) == 6.5
    assert value(families, "trt_layering_read_bytes", "_total", **own) == 9_000 * MIB
    assert value(families, "trt_layering_deadline_misses", "_total", **own) == 5
    assert value(families, "trt_layering_resident_bytes", **own) == 9 * MIB
    assert value(families, "trt_layering_floor_bytes", **own) == 18 * MIB
    assert value(families, "trt_layering_model_budget_bytes", **own) == 32 * MIB
    assert value(families, "trt_layering_budget_bytes") == 96 * MIB
    assert value(families, "trt_layering_fallbacks", **own) == 2
    assert value(families, "trt_layering_predicted_latency_seconds", **own) == 0.041
    assert value(families, "trt_layering_peak_rss_bytes") > MIB


def test_a_model_without_a_prediction_has_none():
    assert not scraped(Snapshots([unavailable()]))["trt_layering_predicted_latency_seconds"].samples


@pytest.mark.parametrize("word", metrics.STATES)
def test_each_model_is_in_one_state(word):
    samples = scraped(Snapshots([state("line", state=word)]))["trt_layering_model_state"].samples
    assert {one.labels["state"]: one.value for one in samples} == {name: float(name == word) for name in metrics.STATES}


@pytest.mark.parametrize(("pressure", "told"), [(None, 0), ("memory is short", 1)])
def test_memory_pressure_is_a_number(pressure, told):
    assert value(scraped(Snapshots(pressure=pressure)), "trt_layering_memory_pressure") == told


@given(st.dictionaries(st.integers(1, 100), st.integers(1, 1000), max_size=6))
def test_wave_sizes_are_a_histogram_of_them(sizes):
    families = scraped(Snapshots([state("line", wave_sizes=sizes)]))
    name = "trt_layering_wave_size"
    assert value(families, name, "_count") == sum(sizes.values())
    assert value(families, name, "_sum") == sum(size * count for size, count in sizes.items())
    for bound in ("1.0", "8.0", "64.0", "+Inf"):
        under = sum(count for size, count in sizes.items() if size <= float(bound))
        assert value(families, name, "_bucket", le=bound) == under


def test_blocks_of_the_last_sweep_are_counted_once_however_often_it_is_scraped():
    deployment = Snapshots([state("line", last_sweep=sweep(12))])
    written = metrics.exposition(deployment)
    name = "trt_layering_block_load_seconds"
    first = parsed(written())
    assert value(first, name, "_count") == 12  # without the reads for the next sweep
    assert value(first, name, "_sum") == pytest.approx(12 * 0.004)
    assert value(first, name, "_bucket", le="0.0025") == 0
    assert parsed(written())[name].samples == first[name].samples
    deployment.states = [state("line", last_sweep=sweep(12, number=8, begin=200.0))]
    assert value(parsed(written()), name, "_count") == 24


def test_a_block_s_load_lasts_from_its_first_byte_to_its_last():
    reads = [
        ReadEvent("read", 0, 1, 1.0, 1.5, 10, extent=0),
        ReadEvent("read", 0, 1, 1.25, 3.0, 10, extent=1),
        ReadEvent("read", 1, 1, 5.0, 9.0, 0),  # one that failed
        Event("execute", 0, 1, 3.0, 4.0, 0),
    ]
    assert metrics.load_seconds(reads) == [2.0]


@given(st.lists(st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()), unique=True, max_size=3))
def test_whatever_models_are_called_the_text_is_valid(names):
    families = scraped(Snapshots([idle(name) for name in names]))
    told = {one.labels["model"] for one in families["trt_layering_queue_depth"].samples}
    assert told == set(names)


def test_labels_are_models_versions_and_states_only():
    reasons = [unavailable("line", reason="a" * 50), state("minilm", fallbacks=("b" * 50,))]
    families = scraped(Snapshots(reasons, pressure="c" * 50))
    labels = {(key, text) for family in families.values() for one in family.samples for key, text in one.labels.items()}
    assert {key for key, _ in labels} == {"model", "version", "state", "le"}
    assert {text for key, text in labels if key == "model"} == {"line", "minilm"}


def test_every_family_says_what_it_is_and_stands_once():
    text = metrics.exposition(Snapshots([state(), idle("minilm")]))().decode()
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    assert all(family.documentation for family in parser.text_string_to_metric_families(text))


def test_the_application_has_the_metrics_and_nothing_else():
    deployment = Snapshots([state()])
    reply = asked(deployment)
    assert (reply.status_code, reply.headers["content-type"]) == (200, metrics.CONTENT_TYPE)
    assert "nv_inference_count" in reply.text
    assert asked(deployment, "/").status_code == 404
    assert asked(deployment, method="POST").status_code == 405


def test_a_scrape_that_fails_is_an_answer_without_a_traceback(caplog):
    reply = asked(Snapshots([replace(state(), wave_sizes=None)]))
    assert reply.status_code == 500
    assert "Traceback" not in reply.text
    assert "could not be collected" in caplog.text


def test_a_scrape_after_a_failed_one_works():
    deployment = Snapshots([replace(state(), wave_sizes=None)])
    written = metrics.exposition(deployment)
    with pytest.raises(AttributeError):
        written()
    deployment.states = [state()]
    assert b"nv_inference_count" in written()
