"""Fixtures for every room."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from tests import real_models

# A slow machine is no failure; a failure is to be had again by what it printed.
settings.register_profile("repository", deadline=None, print_blob=True)
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
