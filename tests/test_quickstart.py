"""The demonstration builds its chain once, and again when anything about it has changed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from tests import checkout
from tests.chains import in_this_process, layers, saved
from trt_layering.config import Model, Size
from trt_layering.deploying import NOTES
from trt_layering.shapes import ShapeRange

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    specification = importlib.util.spec_from_file_location("quickstart", checkout.ROOT / "scripts" / "quickstart.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(name="m", onnx=str(saved(layers(2), tmp_path / "m.onnx")), block_size=Size(16 << 10))


@pytest.fixture
def versions(quickstart: ModuleType, tmp_path: Path) -> Callable[..., list[str]]:
    """The versions there are after `model`, with some changes, was asked for."""

    def ask(model: Model, **changes: Any) -> list[str]:
        with in_this_process():
            chain = quickstart.build_if_needed(msgspec.structs.replace(model, **changes), tmp_path / "engines")
        assert chain.name == "m"
        return sorted(folder.name for folder in (tmp_path / "engines" / "m").iterdir())

    return ask


def test_it_builds_once(versions: Callable[..., list[str]], model: Model) -> None:
    assert versions(model) == versions(model) == ["1"]


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": Size(32 << 10)},
        {"shapes": {"x": ShapeRange((2, 64), (2, 64), (2, 64))}},
        {"optimise": False},
        {"split": False},
        {"build_memory": Size(2 << 30)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_changed_setting_builds_again(
    versions: Callable[..., list[str]], model: Model, changes: dict[str, Any]
) -> None:
    assert versions(model) == ["1"]
    assert versions(model, **changes) == versions(model, **changes) == ["1", "2"]
    assert versions(model) == ["1", "2", "3"]


def test_another_model_in_the_same_place_builds_again(versions: Callable[..., list[str]], model: Model) -> None:
    assert versions(model) == ["1"]
    saved(layers(2, seed=1), Path(model.onnx))
    assert versions(model) == ["1", "2"]


def test_a_chain_that_somebody_else_built_is_not_taken(
    versions: Callable[..., list[str]], model: Model, tmp_path: Path
) -> None:
    from trt_layering.building import build

    assert versions(model) == ["1"]
    with in_this_process():
        build(model.onnx, name="m", repository=tmp_path / "engines")
    assert versions(model) == ["1", "2", "3"]
    note = tmp_path / "engines" / NOTES / "m.json"
    note.write_bytes(b"\xff")
    assert versions(model) == ["1", "2", "3", "4"]
    assert json.loads(note.read_text())["version"] == "4"
