"""The public names: what README and users rely on, and that importing them costs nothing."""

from __future__ import annotations

import inspect
import pickle

import pytest

import trt_layering as tl
from tests.runtime import measured
from trt_layering import errors


def test_every_public_name_is_there_and_known_to_dir() -> None:
    assert list(tl.__all__) == sorted(tl.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in tl.__all__:
        assert getattr(tl, name).__name__ == name
    assert set(tl.__all__) <= set(dir(tl))
    assert tl.__version__


def test_every_error_is_public_and_drawn_in_the_tree() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert kinds <= set(tl.__all__)
    assert errors.__doc__ is not None
    for name in kinds:
        kind = getattr(errors, name)
        assert issubclass(kind, tl.LayeringError)
        [line] = [line for line in errors.__doc__.splitlines() if name in line.split()]
        assert str(kind.exit_status) in line.replace(name, "")


@pytest.mark.parametrize("error", [
    tl.InputError("what", where="where", remedy="remedy"), tl.BudgetError("what", floor=3, parts={"arena": 3}),
])  # fmt: skip
def test_errors_reach_another_process_as_they_are(error: tl.LayeringError) -> None:
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is type(error)
    assert vars(got) == vars(error)
    assert (str(got), got.args) == (str(error), error.args)


def test_what_is_not_public_is_not_there() -> None:
    with pytest.raises(AttributeError, match="frobnicate"):
        tl.frobnicate  # noqa: B018


def test_signatures_that_must_not_change() -> None:
    build, open_chain = inspect.signature(tl.build), inspect.signature(tl.open_chain)
    assert next(iter(build.parameters)) == "model"
    assert {"name", "repository", "backend", "block_size"} <= set(build.parameters)
    assert next(iter(open_chain.parameters)) == "name"
    assert {"repository", "budget", "version", "loader"} <= set(open_chain.parameters)
    assert {"run", "stats", "close", "__enter__", "__exit__", "inputs", "outputs"} <= set(dir(tl.Chain))


def test_importing_it_imports_nothing_heavy() -> None:
    loaded = {name.partition(".")[0] for name in measured.call(measured.public_modules)}
    assert "trt_layering" in loaded
    assert not loaded & {"numpy", "onnx", "onnx_ir", "onnxruntime", "msgspec", "polygraphy", "yaml", "rich", "PIL"}
