"""Work in another process comes back as it would from this one: results, our errors, and deaths in words."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from trt_layering import child
from trt_layering.errors import BudgetError, BuildError, CorruptError, DiskError, LayeringError, ModelError


def echo(task: dict[str, Any]) -> Any:
    return [task, os.getpid()]


def chatty(task: dict[str, Any]) -> str:
    """Prints in every way that libraries do."""
    print("a line")
    print("half a line", end="")
    sys.stdout.flush()
    os.write(1, b'{"result": "false"}')
    return "true"


def refuse(task: dict[str, Any]) -> None:
    raise ModelError("it makes no sense", where="there", remedy="mend it")


def corrupt(task: dict[str, Any]) -> None:
    raise CorruptError("bytes are missing")


def too_large(task: dict[str, Any]) -> None:
    raise BudgetError("too little", floor=5, parts={"a": 5}, where="here", remedy="more")


def full(task: dict[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")


def forbidden(task: dict[str, Any]) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there")


def crash(task: dict[str, Any]) -> None:
    raise ZeroDivisionError("oops")


def vanish(task: dict[str, Any]) -> None:
    os._exit(7)


def killed(task: dict[str, Any]) -> None:
    signal.raise_signal(signal.SIGKILL)


def grandchild(task: dict[str, Any]) -> None:
    child.call(vanish, {})


def importance(task: dict[str, Any]) -> str:
    with open("/proc/self/oom_score_adj") as file:
        return file.read().strip()


def test_a_result_comes_back_from_another_process() -> None:
    task = {"text": "ü", "number": 1.5, "list": [1, None, True]}
    got, process = child.call(echo, task)
    assert got == task
    assert process != os.getpid()


def test_what_is_printed_is_not_the_result() -> None:
    assert child.call(chatty, {}) == "true"


@pytest.mark.parametrize(("work", "kind"), [(refuse, ModelError), (corrupt, CorruptError), (too_large, BuildError)])
def test_our_errors_come_back_with_all_they_say(work: child.Work, kind: type[LayeringError]) -> None:
    with pytest.raises(kind) as caught:
        child.call(work, {})
    with pytest.raises(LayeringError) as here:
        work({})
    assert (caught.value.what, caught.value.where, caught.value.remedy) == (
        here.value.what,
        here.value.where,
        here.value.remedy,
    )


@pytest.mark.parametrize(("work", "remedy"), [(full, "free some space"), (forbidden, "can be written")])
def test_what_the_disk_refuses_comes_back_with_what_to_do(work: child.Work, remedy: str) -> None:
    with pytest.raises(DiskError, match="the disk refused") as caught:
        child.call(work, {})
    assert caught.value.where == "there"
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("work", "said", "status"),
    [
        (crash, "ZeroDivisionError: oops", 1),
        (vanish, "status 7: it said nothing", 7),
        (killed, "ended by signal 9", -9),
    ],
)
def test_any_other_end_is_a_build_error(work: child.Work, said: str, status: int) -> None:
    with pytest.raises(child.Died, match=said) as caught:
        child.call(work, {})
    assert caught.value.status == status
    assert caught.value.where == __name__
    assert "memory" in caught.value.remedy


def test_the_end_of_a_childs_child_is_told_by_the_child() -> None:
    with pytest.raises(BuildError, match="a process of its own ended with status 7"):
        child.call(grandchild, {})


def test_the_kernel_would_end_it_before_others() -> None:
    assert child.call(importance, {}) == "800"


# ------------------------------------------------------------------------------------------------------------- arrays

DTYPES = ["float32", "float64", "float16", "int64", "int8", "uint16", "uint64", "bool", "complex64"]
ARRAYS = st_numpy.arrays(st.sampled_from(DTYPES), st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"])), max_size=3)
TEXTS = WORDS.map(lambda words: np.array(words, object))
NAMES = st.text(min_size=1, max_size=8)


@given(trials=st.lists(st.dictionaries(NAMES, ARRAYS | TEXTS, max_size=3), max_size=3))
def test_arrays_survive_a_file(tmp_path_factory: pytest.TempPathFactory, trials: list[child.Feeds]) -> None:
    file = tmp_path_factory.getbasetemp() / "arrays.npz"
    child.save_arrays(file, trials)
    loaded = child.load_arrays(file)
    assert len(loaded) == len(trials)
    for wanted, got in zip(trials, loaded, strict=True):
        assert list(got) == list(wanted)
        for name, array in wanted.items():
            assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
            if array.dtype == object:
                assert got[name].tolist() == array.tolist()
            else:
                assert got[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_dtypes_that_numpy_lacks_survive_too(tmp_path: Any, name: str) -> None:
    import ml_dtypes

    array = np.arange(4).astype(getattr(ml_dtypes, name))
    child.save_arrays(tmp_path / "a.npz", [{"x": array}])
    [got] = child.load_arrays(tmp_path / "a.npz")
    assert got["x"].dtype == array.dtype
    assert got["x"].tobytes() == array.tobytes()
