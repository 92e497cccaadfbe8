"""What each model gets of a deployment's budget, and for how many requests at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import timed
from tests.timed import SIZE
from trt_layering import config
from trt_layering.errors import BudgetError, NotBuiltError
from trt_layering.runtime.chain import open_chain
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.parts import Candidate, Part, divided, require_fit, together
from trt_layering.store.manifest import UNMEASURED

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` has eight layers and `b` four."""
    folder = tmp_path_factory.mktemp("parts")
    timed.build(folder, "a", 8)
    timed.build(folder, "b", 4)
    return folder


def candidate(repository: Path, name: str, **more: Any) -> Candidate:
    return Candidate.of(config.Model(name=name, onnx="", **more), repository / name / "1")


@settings(max_examples=40)
@given(beyond=st.integers(0, 14 * SIZE), waves=st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_parts_fit_together_and_each_its_model(repository: Path, beyond: int, waves: tuple[int, int]) -> None:
    models = [candidate(repository, name, wave=wave) for name, wave in zip("ab", waves, strict=True)]
    budget = together(models) + beyond
    parts = divided(models, budget)
    assert sum(part.budget or 0 for part in parts.values()) <= budget
    for one, most in zip(models, waves, strict=True):
        part = parts[one.model.name]
        needs = Footprint.of(one.manifest, part.wave)
        assert part.budget is not None
        assert needs.floor <= part.budget
        assert 1 <= part.wave <= most
        assert needs.arena(part.budget, one.manifest) >= needs.largest_block
        assert one.outlook.for_waves(part.wave).outcome(part.budget).taken <= part.budget


def test_waves_are_as_large_as_there_is_room_for(repository: Path) -> None:
    models = [candidate(repository, name, wave=4) for name in "ab"]
    assert {part.wave for part in divided(models, together(models)).values()} == {1}
    roomy = sum(one.outlook.for_waves(4).needs.floor for one in models)
    assert {part.wave for part in divided(models, roomy).values()} == {4}
    part = divided(models, roomy)["a"]
    with open_chain("a", repository=repository, budget=part.budget, wave=part.wave) as chain:
        assert chain.room(4) == 4
        assert chain.room(2) == 2


def test_what_does_not_fit(repository: Path) -> None:
    models = [candidate(repository, "a"), candidate(repository, "b", share=config.Share(100 * SIZE))]
    assert divided(models, None) == {"a": Part(), "b": Part(100 * SIZE)}
    require_fit(models, None)
    require_fit(models, together(models))
    for refused in (require_fit, divided):
        with pytest.raises(BudgetError, match="the models need") as caught:
            refused(models, together(models) - 1)
        assert caught.value.floor == together(models) == sum(caught.value.parts.values())
    with pytest.raises(BudgetError):
        divided([candidate(repository, "a", share=config.Share(1))], 1 << 30)
    with pytest.raises(NotBuiltError):
        candidate(repository, "c")


def test_a_chain_that_was_never_timed_gets_its_part(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "engines")
    timed.rewrite(tmp_path / "engines" / "a" / "1", profile=UNMEASURED)
    models = [candidate(tmp_path / "engines", name) for name in "ab"]
    parts = divided(models, 1 << 30)
    assert parts["a"].budget == models[0].resident
    assert divided(models, together(models))["a"].budget == models[0].floor
