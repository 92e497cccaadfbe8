"""One budget for the models of a deployment: what each gets, what it then does, and what cannot be divided."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests import timed
from tests.timed import EXECUTE, SIZE
from trt_layering import planning, sharing, telling
from trt_layering.config import Config, load
from trt_layering.errors import BudgetError, ConfigError, NotBuiltError
from trt_layering.runtime.footprint import Footprint

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says")


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """`a` has eight layers and `b` four."""
    folder = tmp_path_factory.mktemp("sharing")
    timed.build(folder, "a", 8)
    timed.build(folder, "b", 4)
    return folder


@pytest.fixture
def needs(repository) -> Footprint:
    return timed.needs(repository, "a")


@pytest.fixture
def config(repository, tmp_path):
    """A deployment of `models`, each given in YAML without braces and without its file."""

    def make(*models: str, budget: int | None = None) -> Config:
        path = tmp_path / "deploy.yaml"
        lines = [f"repository: {repository}", "models:", *(f"  - {{onnx: m.onnx, {model}}}" for model in models)]
        path.write_text("\n".join([*lines, *([] if budget is None else [f"memory_budget: {budget}"])]) + "\n")
        return load(path)

    return make


def test_shares_are_what_each_model_then_does(repository, config, needs):
    budget = needs.floor + timed.needs(repository, "b").floor + 5 * SIZE
    found = sharing.division(config("name: a", "name: b, priority: 3", budget=budget))
    assert found.fits
    assert sum(portion.share_bytes for portion in found.models) + found.left_bytes == budget
    assert found.floor_bytes == sum(portion.floor_bytes for portion in found.models)
    for portion in found.models:
        told = planning.forecast(portion.name, repository=repository, budget=portion.share_bytes)
        assert portion.predicted_ms == pytest.approx(told.predicted_ms)
        assert portion.all_resident_ms == told.all_resident_ms
        assert portion.floor_bytes == told.floor_bytes
        assert portion.meets_deadline is None


def test_a_deadline_and_a_fixed_share(repository, config, needs):
    other = timed.needs(repository, "b")
    budget = needs.resident + other.floor
    deadline = f"{EXECUTE * 8 * 1e3 + 0.1}ms"
    found = sharing.division(config(f"name: a, deadline: {deadline}", "name: b, priority: 1000", budget=budget))
    assert [portion.meets_deadline for portion in found.models] == [True, None]
    found = sharing.division(config(f"name: a, share: {needs.floor}, deadline: 9ms", "name: b", budget=budget))
    assert (found.models[0].share_bytes, found.models[0].meets_deadline) == (needs.floor, False)
    assert found.models[1].share_bytes == other.resident
    assert "9 ms, NOT met" in "\n".join(telling.division(found).lines)


def test_a_budget_that_holds_all(repository, config, needs):
    found = sharing.division(config("name: a", "name: b"), budget=1 << 30)
    assert [portion.share_bytes for portion in found.models] == [
        needs.resident, timed.needs(repository, "b").resident
    ]  # fmt: skip


def test_floors_that_do_not_fit(repository, config, needs):
    floors = needs.floor + timed.needs(repository, "b").floor
    asked = config("name: a", "name: b", budget=floors - 1)
    found = sharing.division(asked)
    assert (found.fits, found.floor_bytes, found.left_bytes) == (False, floors, None)
    assert [portion.share_bytes for portion in found.models] == [None, None]
    assert telling.division(found).status == 3
    with pytest.raises(BudgetError) as caught:
        sharing.share_of("a", asked)
    assert caught.value.floor == floors == sum(caught.value.parts.values())
    assert sharing.division(config("name: a", "name: b", budget=floors)).fits


def test_a_fixed_share_under_the_floor(config, needs):
    with pytest.raises(BudgetError) as caught:
        sharing.division(config(f"name: a, share: {needs.floor - 1}", budget=1 << 30))
    assert caught.value.floor == needs.floor
    assert "'a'" in caught.value.where


def test_models_that_are_not_built(config):
    asked = config("name: a", "name: c", "name: d", budget=1 << 30)
    with pytest.raises(NotBuiltError, match="c, d are not built") as caught:
        sharing.division(asked)
    assert f"trt-layering build {asked.path}" in caught.value.remedy


def test_nothing_to_divide(config, tmp_path):
    with pytest.raises(ConfigError, match="no memory_budget"):
        sharing.division(config("name: a"))
    empty = tmp_path / "empty.yaml"
    empty.write_text("memory_budget: 5MiB\n")
    with pytest.raises(ConfigError, match="no models"):
        sharing.division(load(empty))


def test_the_share_that_a_model_runs_with(config, caplog):
    asked = config("name: a", "name: b", budget=1 << 30)
    shares = [sharing.share_of(name, asked) for name in ("a", "b")]
    assert shares == [portion.share_bytes for portion in sharing.division(asked).models]
    assert sharing.share_of("a", config("name: a", "name: b")) is None
    assert sharing.share_of("a", config("name: a", budget=12345)) == 12345
    assert sharing.share_of("a", config("name: a, share: 1MiB")) == 1 << 20
    assert sharing.share_of("a", config("name: a, share: 1MiB", budget=2 << 20)) == 1 << 20
    with pytest.raises(BudgetError, match="all models need"):
        sharing.share_of("a", config("name: a, share: 3MiB", budget=2 << 20))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "trt_layering"):
        assert sharing.share_of("a", config("name: a", "name: c", budget=12345)) == 12345
    [record] = caplog.records
    assert "c is not built" in record.getMessage()
