"""Stores with plans that were made to do harm, or harmed: refused with one of our errors before TensorRT sees them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attacks.test_hostile_store import ATTACKS
from tests.backends.tensorrt import fakes
from tests.backends.tensorrt.stores import plan, publish
from tests.store.samples import forge
from trt_layering import backends
from trt_layering.errors import CorruptError, ForeignError, StoreError
from trt_layering.store.manifest import WEIGHTS_FILE, plain_digest, read_manifest

PLAN = "block-000.plan"
EVIL = "\x1b]0;owned\x07\x9b2J\u202e"


@pytest.fixture(autouse=True)
def _orin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(np, "__version__", "1.26.4")
    fakes.machine(monkeypatch, tmp_path / "libraries", version="10.3.0")


def refusal(folder: Path) -> StoreError | None:
    error = store_error(folder)
    assert error is None or all((error.what, error.where, error.remedy, str(error).replace("\n", "").isprintable()))
    return error


def store_error(folder: Path) -> StoreError | None:
    try:
        backends.check(folder, read_manifest(folder))
    except StoreError as error:
        return error
    return None


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_header_changed_anywhere_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Bytes replaced, put in or taken out in the beginning of a plan, the digest as it was."""
    folder = publish(tmp_path_factory.mktemp("changed"))
    whole = plan()
    start = data.draw(st.integers(0, 40))
    changed = whole[:start] + data.draw(st.binary(max_size=8)) + whole[start + data.draw(st.integers(0, 8)) :]
    (folder / PLAN).write_bytes(changed)
    assert (refusal(folder) is None) == (changed == whole)


@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(max_size=100), magic=st.booleans())
def test_garbage_whose_digest_is_right_is_refused_or_a_header(
    garbage: bytes, magic: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What a malicious author would do: the manifest says that this garbage is meant."""
    folder = publish(tmp_path_factory.mktemp("meant"))
    content = b"ftrt" * magic + garbage
    (folder / PLAN).write_bytes(content)
    digest = plain_digest(folder / PLAN)
    forge(folder, lambda chain: [block.update(digest=digest) for block in chain["blocks"]])
    if refusal(folder) is None:
        assert content[24:27] == bytes((10, 3, 0))


@pytest.mark.parametrize("name", [PLAN, WEIGHTS_FILE])
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("binding", ["inputs", "swap"])
def test_plans_that_are_no_files_by_themselves(
    tmp_path: Path, attack: Callable[[Path], None], name: str, binding: Any
) -> None:
    folder = publish(tmp_path / "repository", binding=binding)
    attack(folder / name)
    assert isinstance(refusal(folder), CorruptError)


def test_a_plan_of_a_terabyte_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    folder = publish(tmp_path)
    os.truncate(folder / PLAN, 0)
    os.truncate(folder / PLAN, 1 << 40)
    error = refusal(folder)
    assert error is not None
    assert "nothing but zeros" in error.what


@pytest.mark.parametrize(
    "edit",
    [
        lambda chain: chain["backend"].update(version=EVIL),
        lambda chain: chain["backend"].update(version="9" * 100_000),
        lambda chain: chain["backend"].update(version=""),
        lambda chain: chain["backend"].update(fingerprint={}),
        lambda chain: chain["backend"].update(fingerprint={"gpu": EVIL, "sm": EVIL * 1000}),
        lambda chain: chain["backend"].update(fingerprint={EVIL: EVIL}),
        lambda chain: chain["tensorrt"].update(binding="swap"),
        lambda chain: chain["tensorrt"].update(binding=EVIL),
        lambda chain: chain.update(tensorrt=None),
        lambda chain: chain["blocks"][0].update(extents=[]),
        lambda chain: chain["extents"][0]["tensors"][0].update(name="plan"),
    ],
)
@pytest.mark.parametrize("binding", ["inputs", "swap"])
def test_a_manifest_that_lies_of_its_plans(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], binding: Any
) -> None:
    folder = publish(tmp_path, binding=binding)
    forge(folder, edit)
    error = refusal(folder)
    assert error is None or isinstance(error, CorruptError | ForeignError)
    if error is not None:
        assert len(str(error)) < 2000
