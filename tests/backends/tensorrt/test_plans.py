"""Plans are built once and kept whole; memory that runs out is met with less workspace, and then with words."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.tensorrt import work
from tests.backends.tensorrt.blocks import request
from trt_layering import child
from trt_layering.backends.tensorrt import plans
from trt_layering.backends.tensorrt.plans import BlockTooLarge, PlanBuilder, PlanRequest
from trt_layering.errors import BuildError, ModelError
from trt_layering.store.manifest import PAGE, Range

MIB = 1 << 20
GPU = {"gpu": "Orin (nvgpu)", "sm": "8.7"}
Work = Callable[[dict[str, Any]], Any]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What children were asked for so far."""
    file = tmp_path / "tried"
    monkeypatch.setenv("TRIED", str(file))
    return lambda: file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch, tried: Any) -> Callable[[Work], None]:
    """Children do this from now on."""
    return lambda does: monkeypatch.setattr(plans.plan_work, "build", does)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "engines"


def builder(repository: Path, version: str = "10.3.0", gpu: dict[str, str] = GPU, **options: Any) -> PlanBuilder:
    return PlanBuilder(repository, version, gpu, **{"available": lambda: 1 << 40, "most": 64 * MIB, **options})


# ------------------------------------------------------------------------------------------------------------ kept


def test_a_plan_is_built_once(tmp_path: Path, repository: Path, doing: Any, tried: Any) -> None:
    doing(work.built)
    asked = request(tmp_path)
    plan = builder(repository).plan(asked)
    assert plan.path.read_bytes() == work.PLAN
    assert (plan.nbytes, plan.workspace, plan.seconds) == (len(work.PLAN), 64 * MIB, 0.25)
    assert (plan.scratch_bytes, plan.refit_weights) == (77, ())
    assert builder(repository).plan(asked) == plan
    assert tried() == [f"none {64 * MIB}"]


def changes(folder: Path) -> Iterator[tuple[PlanRequest, tuple[Any, ...]]]:
    wider = {"i0": Range(min=(1, 4), opt=(2, 4), max=(9, 4))}
    yield request(folder), ("10.3.0",)
    yield request(folder), ("10.7.0",)
    yield request(folder), ("10.3.0", {**GPU, "sm": "8.9"})
    yield request(folder, key="k1"), ()
    yield request(folder, profile=wider), ()
    yield request(folder, "swap"), ()
    yield request(folder, "swap", seed=1), ()  # other values of the weights, which the plan has in it
    yield request(folder, "refit"), ()
    yield request(folder, "refit", seed=1), ()
    yield request(folder, "refit", shared=True), ()


def test_whatever_a_plan_depends_on_makes_another(tmp_path: Path, repository: Path, doing: Any, tried: Any) -> None:
    doing(work.built)
    found = {builder(repository, *machine).plan(asked).path for asked, machine in changes(tmp_path)}
    assert len(found) == len(tried()) == len(list(changes(tmp_path)))


@pytest.mark.parametrize(("binding", "shared"), [("inputs", False), ("refit", True)])
def test_equal_blocks_share_a_plan_that_holds_no_weights(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, binding: Any, shared: bool
) -> None:
    doing(work.built)
    first, second = (request(tmp_path, binding, shared=shared, seed=seed, name=f"block-{seed:03d}") for seed in (0, 1))
    assert builder(repository).plan(first) == builder(repository).plan(second)
    assert len(tried()) == 1


def cut_short(plan: Path) -> None:
    os.truncate(plan, 5)


def bit_of_the_plan(plan: Path) -> None:
    data = bytearray(plan.read_bytes())
    data[3] ^= 1
    plan.write_bytes(data)


def number_in_the_notes(plan: Path) -> None:
    notes = plan.with_suffix(".json")
    notes.write_bytes(notes.read_bytes().replace(b":77", b":78"))


def notes_cut_short(plan: Path) -> None:
    os.truncate(plan.with_suffix(".json"), 20)


def no_plan(plan: Path) -> None:
    plan.unlink()


@pytest.mark.parametrize("damage", [cut_short, bit_of_the_plan, number_in_the_notes, notes_cut_short, no_plan])
def test_a_damaged_plan_is_built_again_and_told(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    doing(work.built)
    asked = request(tmp_path)
    plan = builder(repository).plan(asked)
    damage(plan.path)
    assert builder(repository).plan(asked) == plan
    assert plan.path.read_bytes() == work.PLAN
    assert len(tried()) == 2
    assert "the kept plan of block-000 (inputs) is damaged and is built again" in caplog.text


def test_a_killed_build_resumes_with_what_it_finished(tmp_path: Path, repository: Path, doing: Any, tried: Any) -> None:
    lines = [
        "from pathlib import Path",
        "from tests.backends.tensorrt import work, test_plans",
        "from trt_layering.backends.tensorrt import plans",
        "plans.plan_work.build = work.ends_the_build",
        f"builder = test_plans.builder(Path({str(repository)!r}))",
        f"[builder.plan(test_plans.request(Path({str(tmp_path)!r}), key=f'k{{n}}')) for n in range(5)]",
    ]
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], env=child.environment(), check=False)
    assert ended.returncode == -9
    assert len(tried()) == 3
    doing(work.built)
    resumed = builder(repository)
    assert len({resumed.plan(request(tmp_path, key=f"k{n}")).path for n in range(5)}) == 5
    assert len(tried()) == 6  # the third is built again
    assert not list(repository.rglob("draft-*"))


def test_two_builds_at_once_share_the_work(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("FIFO", str(fifo))
    doing(work.waits)
    waiting = threading.Event()
    monkeypatch.setattr(plans.log, "warning", lambda words, *more: waiting.set() if "waiting" in words else None)
    asked, found = request(tmp_path), []
    threads = [
        threading.Thread(target=lambda: found.append(builder(repository).plan(asked)), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert waiting.wait(60)
    fifo.write_text("go")
    for thread in threads:
        thread.join(60)
    assert len(tried()) == 1
    assert found[0] == found[1]


# -------------------------------------------------------------------------------------------------- memory runs out


@pytest.mark.parametrize("does", [work.killed, work.without_memory, work.no_implementation])
@pytest.mark.parametrize(("fits", "tries"), [(32, 2), (16, 3)])
def test_less_workspace_is_tried(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, monkeypatch: pytest.MonkeyPatch,
    does: Work, fits: int, tries: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("FITS", str(fits * MIB))
    doing(does)
    assert builder(repository).plan(request(tmp_path)).workspace == fits * MIB
    assert tried() == [f"none {size * MIB}" for size in (64, 32, 16)[:tries]]


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        (work.killed, "the process was ended by signal 9"),
        (work.without_memory, "memory ran out"),
        (work.no_implementation, "Could not find any implementation for node /conv1."),
    ],
)
def test_a_block_too_large_is_told_with_bytes_and_levers(
    tmp_path: Path, repository: Path, doing: Any, monkeypatch: pytest.MonkeyPatch, does: Work, reason: str
) -> None:
    monkeypatch.setenv("FITS", "0")
    doing(does)
    with pytest.raises(BlockTooLarge) as caught:
        builder(repository, available=lambda: 3 << 30).plan(request(tmp_path))
    assert caught.value.what == (
        "memory ran out each time that block-000 was built for inputs: it has 160 B of weights, and 3.00 GiB are "
        "available"
    )
    assert [f"a workspace of {size}.0 MiB" in caught.value.where for size in (64, 32, 16)] == [True] * 3
    assert caught.value.where.count(reason) == 3
    assert all(lever in caught.value.remedy for lever in ("--block-size", "stop other programs", "swap space"))
    assert not list(repository.rglob("plan"))


@given(available=st.integers(0, 1 << 36), most=st.integers(8 * MIB, 1 << 33), weights=st.integers(0, 1 << 32))
def test_the_workspace_leaves_room(available: int, most: int, weights: int) -> None:
    made = PlanBuilder(Path("nowhere"), "10.3.0", GPU, available=lambda: available, most=most)
    asked = PlanRequest("b", Path("b"), "swap", False, (), {}, "k")
    workspace = made._workspace(asked, weights)
    assert 8 * MIB <= workspace <= most
    assert workspace % PAGE == 0 or workspace == most
    assert workspace == 8 * MIB or workspace + 4 * weights < available


def test_where_little_is_left_the_least_is_tried_once(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FITS", "0")
    doing(work.killed)
    with pytest.raises(BlockTooLarge, match="what is available is not known"):
        builder(repository, available=lambda: 0).plan(request(tmp_path))
    assert tried() == [f"none {8 * MIB}"]


# ------------------------------------------------------------------------------------------------------ refusals


def test_what_tensorrt_refuses_is_told_and_not_tried_again(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, caplog: pytest.LogCaptureFixture
) -> None:
    doing(work.refused)
    with pytest.raises(BuildError, match=r"Could not parse \| E no importer for Foo") as caught:
        builder(repository).plan(request(tmp_path))
    assert not isinstance(caught.value, BlockTooLarge)
    assert len(tried()) == 1
    assert "heed this" in caplog.text
    assert not list(repository.rglob("draft-*"))


def test_an_engine_of_one_block_is_refitted_with_the_same_weights(
    tmp_path: Path, repository: Path, doing: Any, tried: Any
) -> None:
    doing(work.built)
    for shared in (False, True):
        plan = builder(repository).plan(request(tmp_path, "refit", shared=shared))
        assert plan.refit_weights == ("w0", "w1")
    assert [line.split()[0] for line in tried()] == ["identical", "individual"]


def test_constants_that_a_refit_would_ask_for_are_left_out_of_it(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    doing(work.not_identical)
    builder(repository).plan(request(tmp_path, "refit"))
    builder(repository).plan(request(tmp_path, "refit"))
    assert [line.split()[0] for line in tried()] == ["identical", "individual"]
    assert "block-000 is built with weights marked one by one" in caplog.text
    assert "c0, c1" in caplog.text


@pytest.mark.parametrize("shared", [False, True])
def test_a_refit_that_misses_a_weight_is_refused(
    tmp_path: Path, repository: Path, doing: Any, tried: Any, shared: bool
) -> None:
    doing(work.no_weights)
    for _ in range(2):
        with pytest.raises(BuildError, match="individual would not reach w1"):
            builder(repository).plan(request(tmp_path, "refit", shared=shared))
    assert len(tried()) == (1 if shared else 2)  # it is not built again to be refused


def test_a_child_that_breaks_is_told(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.broken)
    with pytest.raises(BuildError, match="ZeroDivisionError: oops"):
        builder(repository).plan(request(tmp_path))


def test_a_full_disk_is_told(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.disk_is_full)
    with pytest.raises(BuildError, match="No space left on device"):
        builder(repository).plan(request(tmp_path))


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.built)
    repository.write_text("a file")
    with pytest.raises(BuildError, match="cannot write the chain"):
        builder(repository).plan(request(tmp_path))


@pytest.mark.parametrize("weights", [("w0", "w9")])
def test_a_block_without_its_weights_is_told(tmp_path: Path, repository: Path, weights: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match="the block has no weight 'w9'"):
        builder(repository).plan(request(tmp_path, weights=weights))


def test_a_block_that_is_no_onnx_is_told(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "none.onnx").write_bytes(b"\xff\xff")
    with pytest.raises(ModelError, match="the block cannot be read"):
        builder(repository).plan(request(tmp_path, onnx=tmp_path / "none.onnx"))


def test_a_block_that_builds_for_long_is_told(
    tmp_path: Path, repository: Path, doing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("FIFO", str(fifo))
    doing(work.waits)
    told: list[str] = []

    def tell(words: str, *more: Any) -> None:
        told.append(words % more)
        if len(told) == 2:
            fifo.write_text("go")

    monkeypatch.setattr(plans.log, "warning", tell)
    builder(repository, patience=0.01).plan(request(tmp_path))
    assert told[:2] == [
        f"block-000 (inputs) still builds after {time}; TensorRT tries many kernels" for time in ("10 ms", "20 ms")
    ]


# --------------------------------------------------------------------------------------------------------- pruning


def test_pruning_removes_what_was_asked_for_and_no_more(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.built)
    interrupted = builder(repository)
    kept = interrupted.plan(request(tmp_path, key="k1"))
    interrupted.close()
    finished = builder(repository)
    gone = finished.plan(request(tmp_path))
    stray = kept.path.with_name("draft-1")
    stray.write_bytes(b"of a killed build")
    assert finished.prune() > len(work.PLAN)
    assert not gone.path.parent.exists()
    assert kept.path.exists()
    assert not stray.exists()


def test_what_another_build_uses_stays_until_it_is_pruned(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.built)
    first, second = builder(repository), builder(repository)
    plan = first.plan(request(tmp_path))
    assert second.plan(request(tmp_path)) == plan
    alone = first.plan(request(tmp_path, key="k1"))
    assert first.prune() == 0
    assert plan.path.exists()
    assert second.prune() > 2 * len(work.PLAN)
    assert not plan.path.exists()
    assert not alone.path.exists()


def test_a_plan_asked_for_again_is_no_longer_needless(tmp_path: Path, repository: Path, doing: Any) -> None:
    doing(work.built)
    first, second = builder(repository), builder(repository)
    plan = first.plan(request(tmp_path))
    second.plan(request(tmp_path, key="k1"))
    first.prune()
    third = builder(repository)
    third.plan(request(tmp_path))
    second.close()
    third.close()
    builder(repository).prune()
    assert plan.path.exists()
