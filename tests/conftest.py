"""Fixtures for every room."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import real_models


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The file of a pinned real model by its name in `tests.real_models`; skips where its wheel is not installed."""

    def find(name: str) -> Path:
        try:
            return real_models.locate(name)
        except importlib.metadata.PackageNotFoundError as error:
            pytest.skip(f"wheel not installed: {error.name}; install the extra `models`")

    return find
