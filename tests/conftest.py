"""Fixtures for every room."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import real_models

# A slow machine is no failure; a failure is to be had again by what it printed.
settings.register_profile("repository", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repository")


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The file of a pinned real model by its name in `tests.real_models`; skips where its wheel is not installed."""

    def find(name: str) -> Path:
        try:
            return real_models.locate(name)
        except importlib.metadata.PackageNotFoundError as error:
            pytest.skip(f"wheel not installed: {error.name}; install the extra `models`")

    return find


@pytest.fixture(scope="module")
def engines_take_what_the_manifest_says() -> Iterator[None]:
    """Thread pools of their own would make streaming very small chains take more memory than keeping them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trt_layering.backends.engine_overhead", lambda name: 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Closing a chain collects garbage; what other tests have left need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
