"""The order of a bench, what it makes of samples, and what it makes of subjects that fail or lie; no processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import found
from tests.store import samples
from trt_layering import child
from trt_layering.bench import results, subjects, sweep
from trt_layering.bench.worker import EndedError
from trt_layering.bench.workspace import workspace
from trt_layering.errors import BackendError, BuildError, MemoryLimitError
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import Chain, read_manifest

MIB = 1 << 20
BUDGETS = [40 * MIB, 80 * MIB]
LIBRARIES = 30 * MIB
NEEDS = Footprint(
    largest_block=MIB, activations=0, scratch=0, engines=0, weights=60 * MIB, tables=0, resident=100 * MIB
)
SECONDS = {"chain": 0.02, "sequential": 0.05, "double": 0.04, "mapped": 0.2, "memory": 0.01, "resident": 0.012}


class Held:
    """A subject that takes the time it should and says what it was asked, in a log of all of them."""

    def __init__(self, task: Mapping[str, Any], log: list[str], turn: Callable[[str], np.ndarray[Any, Any]]) -> None:
        self.kind, self.budget = str(task["kind"]), task.get("budget") or 0
        self.opened = {"peak_bytes": LIBRARIES + self.budget, "modules": ["sys"]}
        self._log, self._answer = log, turn
        self._note("open")

    def _note(self, what: str) -> None:
        self._log.append(f"{what} {self.kind} {self.budget // MIB}" if self.budget else f"{what} {self.kind}")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._note("turn")
        child.save_arrays(Path(request["answers"]), [{"y": self._answer(self.kind)}])
        streams = self.kind not in ("memory", "mapped")
        return {
            "seconds": [SECONDS[self.kind]] * request["iterations"], "bytes_read": 1000 * request["iterations"],
            "stall_seconds": 0.005 * request["iterations"] if streams else None, "mode": "ring" if streams else None,
            "weights_in_memory_bytes": self.budget // 2 if streams else None, "running_bytes": LIBRARIES + MIB,
            "fallbacks": [], "predicted_seconds": 0.015 if streams else None,
        }  # fmt: skip

    def close(self) -> None:
        self._note("close")


class Bench:
    """A sweep with stand-ins; `fails` raises for a subject that is opened, `answer` gives what each answers."""

    def __init__(self, chain: Chain, repository: Path) -> None:
        self.log: list[str] = []
        self.request = sweep.Request(
            chain=chain, repository=repository, version=1, budgets=BUDGETS, against=list(subjects.AGAINST),
            model=Path("model.onnx"), feeds={"x": np.ones((1, 3, 4), np.float32)}, iterations=4, rounds=2, loader={},
        )  # fmt: skip
        self.fails: dict[str, Exception] = {}
        self.unprepared: Exception | None = None
        self.answer: Callable[[str], np.ndarray[Any, Any]] = lambda kind: np.ones(3, np.float32)

    def start(self, label: str, task: Mapping[str, Any], *_: Any) -> Held:
        if task["kind"] in self.fails:
            raise self.fails[task["kind"]]
        return Held(task, self.log, self.answer)

    def call(self, work: child.Work, task: Mapping[str, Any]) -> Any:
        if work is subjects.prepare_mapped and self.unprepared is not None:
            raise self.unprepared
        return {subjects.imported: LIBRARIES, subjects.traced: found.timeline()}.get(work)  # type: ignore[call-overload]

    def run(self, **changes: Any) -> dict[str, Any]:
        request = sweep.Request(**{**vars(self.request), **changes})
        return sweep.sweep(request, lambda *_: None, self.start, self.call)


class NoGroup:
    def __init__(self, limit: int) -> None:
        raise OSError("no memory cgroup could be made: Permission denied")


class AnyGroup:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __enter__(self) -> AnyGroup:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(sweep, "MemoryGroup", AnyGroup)
    monkeypatch.setattr(Footprint, "of", lambda chain: NEEDS)
    return Bench(read_manifest(samples.publish_tiny(tmp_path)), tmp_path)


def test_subjects_take_turns_in_alternating_order(bench: Bench) -> None:
    bench.run(against=["double", "memory"])
    at_40 = ["open chain 40", "open double 40",
             "turn memory", "turn chain 40", "turn double 40", "turn double 40", "turn chain 40", "turn memory",
             "close double 40", "close chain 40"]  # fmt: skip
    assert bench.log == ["open memory", *at_40, *(line.replace("40", "80") for line in at_40), "close memory"]


def test_every_subject_at_every_budget_with_its_numbers(bench: Bench) -> None:
    result = bench.run()
    at = {(point["subject"], point["budget_bytes"]): point for point in result["points"]}
    each = [name for name, subject in subjects.SUBJECTS.items() if subject.for_each_budget]
    assert set(at) == {(name, b) for name in each for b in BUDGETS} | {("memory", None), ("resident", None)}
    chain = at["chain", BUDGETS[0]]
    weights = bench.request.chain.weights_bytes
    assert chain["samples"] == 8
    assert chain["median_ms"] == chain["p99_ms"] == pytest.approx(20)
    assert chain["ratio"] == pytest.approx(2.0)
    assert chain["bytes_read_per_inference"] == 1000
    assert chain["stall_share"] == pytest.approx(0.25)
    assert (chain["predicted_ms"], chain["prediction_error"]) == (pytest.approx(15), pytest.approx(-0.25))
    assert at["memory", None]["predicted_ms"] is at["memory", None]["prediction_error"] is None
    assert any("15.00 ms (-25.0%)" in line for line in results.table(result))
    assert (chain["peak_bytes"], chain["running_bytes"]) == (BUDGETS[0], MIB)
    assert chain["weights_reduction_one_copy"] == 1 - chain["weights_in_memory_bytes"] / weights
    assert chain["weights_reduction_two_copies"] == 1 - chain["weights_in_memory_bytes"] / (2 * weights)
    assert chain["peak_reduction_two_copies"] == 1 - chain["peak_bytes"] / (2 * weights)
    assert at["memory", None]["samples"] == 16
    assert at["mapped", BUDGETS[1]]["stall_share"] is None
    assert (result["baseline"], result["timeline"]["budget_bytes"]) == ("memory", BUDGETS[0])
    assert len(results.table(result)) >= len(at) + 3


def test_a_wrong_answer_fails_the_bench(bench: Bench) -> None:
    bench.answer = lambda kind: np.array([1.0, 1.0, 1.001 if kind == "double" else 1.0], np.float32)
    with pytest.raises(BackendError, match=r"double buffer at 40\.0 MiB answers otherwise than ONNX Runtime in memory"):
        bench.run()


def test_another_model_fails_the_bench(bench: Bench) -> None:
    bench.answer = lambda kind: np.zeros(4 if kind == "memory" else 3, np.float32)
    with pytest.raises(BackendError, match="answers otherwise") as caught:
        bench.run()
    assert "the model that the chain was built from" in caught.value.remedy


@pytest.mark.parametrize("error", [EndedError("it was ended by signal 9"), MemoryLimitError("memory ran out")])
def test_what_does_not_fit_the_machine_is_a_finding(bench: Bench, error: Exception) -> None:
    bench.fails = {"memory": error, "mapped": error}
    result = bench.run()
    assert {point["subject"] for point in result["points"]} == {"chain", "sequential", "double", "resident"}
    assert result["baseline"] == "resident"
    told = "\n".join(result["notes"])
    assert "ONNX Runtime in memory did not run: " in told
    assert "model mapped at 80.0 MiB did not run: " in told


def test_the_chain_itself_may_not_die(bench: Bench) -> None:
    bench.fails = {"chain": EndedError("it was ended by signal 11")}
    with pytest.raises(EndedError, match="signal 11"):
        bench.run()
    assert [line for line in bench.log if line.startswith("close")] == ["close resident", "close memory"]


def test_an_error_of_the_model_is_no_finding(bench: Bench) -> None:
    bench.fails = {"memory": BackendError("ONNX Runtime refused: no such file")}
    with pytest.raises(BackendError, match="no such file"):
        bench.run()


def test_without_memory_groups_the_mapped_model_is_left_out_in_words(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MemoryGroup", NoGroup)
    result = bench.run()
    assert "mapped" not in {point["subject"] for point in result["points"]}
    assert any("mapped is left out: no memory cgroup could be made" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BuildError("a process of its own was ended by signal 9: it said nothing"), "ended by signal 9"),
        (
            BuildError("a process of its own ended with status 1: Traceback:\n  line 5\nFail: bad"),
            "status 1.* … Fail: bad",
        ),
        (BackendError("ONNX Runtime refused: no kernel"), "no kernel"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_a_mapped_model_that_cannot_be_prepared_is_left_out_in_words(
    bench: Bench, tmp_path: Path, error: Exception, words: str
) -> None:
    bench.unprepared = error
    result = bench.run()
    assert {point["subject"] for point in result["points"]} == subjects.SUBJECTS.keys() - {"mapped"}
    [note] = [note for note in result["notes"] if "mapped is left out" in note]
    assert re.search(words, note)
    assert "\n" not in note
    assert not list(tmp_path.glob(".bench-*"))


def test_what_killed_benches_left_is_removed_and_said(bench: Bench, tmp_path: Path) -> None:
    left = tmp_path / ".bench-1-abc"
    left.mkdir()
    (left / "optimised.onnx.data").write_bytes(b"x")
    (tmp_path / ".bench-file").touch()
    with workspace(tmp_path) as of_a_living_one:
        result = bench.run(against=[])
        assert of_a_living_one.is_dir()
    assert (left.exists(), of_a_living_one.exists(), (tmp_path / ".bench-file").exists()) == (False, False, True)
    assert [note for note in result["notes"] if "removed" in note] == [
        "removed .bench-1-abc, left by a bench that was killed"
    ]


def test_alone_the_chain_is_its_own_measure(bench: Bench) -> None:
    result = bench.run(against=[])
    assert result["baseline"] == "chain"
    assert {point["ratio"] for point in result["points"]} == {1.0}


def test_where_nothing_streams_there_is_no_timeline(bench: Bench) -> None:
    assert bench.run(budgets=[100 * MIB], against=[])["timeline"] is None


SIZES = st.integers(0, 1 << 40)


@given(largest=SIZES, fixed=SIZES, weights=SIZES, more=SIZES)
def test_default_budgets_go_from_the_floor_to_everything(largest: int, fixed: int, weights: int, more: int) -> None:
    weights = max(weights, largest)
    needs = Footprint(
        largest_block=largest, activations=fixed, scratch=0, engines=0, weights=weights, tables=more,
        resident=weights + fixed + more,
    )  # fmt: skip
    budgets = sweep.default_budgets(needs)
    assert budgets == sorted(set(budgets))
    assert budgets[0] == max(1, needs.floor)
    assert budgets[-1] == max(1, needs.resident)
    assert len(budgets) <= 10
    if largest > 0 and budgets[-1] > 100 * budgets[0]:
        assert len(budgets) >= 6


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=300), st.sampled_from([0.5, 0.99, 1.0]))
def test_a_percentile_was_measured_and_covers_its_part(seconds: list[float], part: float) -> None:
    value = results.percentile(seconds, part)
    assert value in seconds
    assert sum(one <= value for one in seconds) >= math.floor(part * len(seconds))
    assert sum(one >= value for one in seconds) >= math.floor((1 - part) * len(seconds))
