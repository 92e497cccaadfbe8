"""What is told of a budget beforehand: against the chain that is then opened, and against what the words promise."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.chains import in_this_process, layers, saved
from trt_layering import building, planning, telling
from trt_layering.config import Config, load
from trt_layering.errors import BudgetError, ConfigError, NotBuiltError, StoreError, UsageError
from trt_layering.runtime import schedules
from trt_layering.runtime.chain import open_chain
from trt_layering.runtime.footprint import Footprint
from trt_layering.store.manifest import PAGE, UNMEASURED, Memory, Profile, read_manifest, write_manifest

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

LAYERS = 8
SIZE = 16 << 10
EXECUTE = 1e-3
RATE = 8e6  # reads a layer in twice the time that it executes


def profile(chain, **others) -> Profile:
    seconds = tuple(EXECUTE * part.count for part in chain.parts)
    return msgspec.structs.replace(UNMEASURED, execute_seconds=seconds, read_rate=RATE, read_size=PAGE, **others)


def rewrite(folder: Path, **fields) -> None:
    """Change the manifest of a chain."""
    write_manifest(folder, msgspec.structs.replace(read_manifest(folder), **fields))


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """`a` and `b`, of eight layers and four, each with times that are even."""
    folder = tmp_path_factory.mktemp("planning")
    for name, count in (("a", LAYERS), ("b", 4)):
        path = saved(layers(count), folder / f"{name}.onnx")
        with in_this_process(streamed_from=0):
            built = building.build(path, name=name, repository=folder, block_size=SIZE, shapes={"x": (3, 64)})
        memory = Memory(activations=1000, scratch=2000, engines=3000, shapes={})
        rewrite(built.path, profile=profile(built.manifest), memory=memory)
    return folder


@pytest.fixture
def needs(repository) -> Footprint:
    return Footprint.of(read_manifest(repository / "a" / "1"))


@pytest.fixture
def config(repository, tmp_path):
    """A deployment of `models`, written as YAML flow mappings without the file."""

    def make(*models: str, budget: int | None = None) -> Config:
        path = tmp_path / "deploy.yaml"
        lines = [f"repository: {repository}", "models:", *(f"  - {{onnx: m.onnx, {model}}}" for model in models)]
        path.write_text("\n".join([*lines, *([] if budget is None else [f"memory_budget: {budget}"])]) + "\n")
        return load(path)

    return make


def budgets(needs: Footprint) -> list[int]:
    """From the floor to everything, and more than that."""
    steps = (needs.resident - needs.floor) // 5
    return [*range(needs.floor, needs.resident, steps), needs.resident, 2 * needs.resident]


class TestOneChain:
    def test_what_is_told_is_what_is_opened(self, repository, needs):
        for budget in budgets(needs):
            told = planning.forecast("a", repository=repository, budget=budget)
            with open_chain("a", repository=repository, budget=budget) as chain:
                stats = chain.stats()
            assert told.fits
            assert told.floor_bytes == stats["floor_bytes"]
            assert (told.arena_bytes, told.resident_bytes) == (stats["arena_bytes"], stats["resident_bytes"])
            assert (told.mode, told.activation_bytes) == (stats["mode"], stats["activation_bytes"])
            assert told.resident_bytes + told.streamed_bytes == told.weights_bytes == LAYERS * SIZE
            assert told.taken_bytes <= budget
            assert len(told.resident_blocks) * SIZE <= told.resident_bytes

    def test_the_prediction_is_the_tables(self, repository, needs):
        folder = repository / "a" / "1"
        for budget in budgets(needs)[:-2]:
            told = planning.forecast("a", repository=repository, budget=budget)
            found = schedules.scheduled(folder, read_manifest(folder), budget - needs.fixed, PAGE, "auto")
            assert told.predicted_ms == pytest.approx(found.choice.seconds * 1e3)

    def test_more_is_never_slower(self, repository, needs):
        times = [planning.forecast("a", repository=repository, budget=b).predicted_ms for b in budgets(needs)]
        assert all(later <= earlier for earlier, later in pairwise(times))
        assert times[0] > 2 * times[-1] == pytest.approx(2 * EXECUTE * LAYERS * 1e3)

    def test_without_a_budget_everything_stays(self, repository, needs):
        told = planning.forecast("a", repository=repository)
        assert (told.budget_bytes, told.taken_bytes) == (needs.resident, needs.resident)
        assert (told.mode, told.streamed_bytes, told.required_read_rate) == ("resident", 0, 0.0)
        assert told.predicted_ms == told.all_resident_ms == pytest.approx(EXECUTE * LAYERS * 1e3)
        assert told.break_even_runs is None
        assert len(told.resident_blocks) == LAYERS

    def test_the_curve_is_around_the_budget(self, repository, needs):
        budget = needs.floor + SIZE
        told = planning.forecast("a", repository=repository, budget=budget)
        assert [point.budget_bytes for point in told.curve] == [needs.floor, budget, 2 * budget, needs.resident]
        for point in told.curve:
            there = planning.forecast("a", repository=repository, budget=point.budget_bytes)
            assert (point.predicted_ms, point.streamed_bytes) == (there.predicted_ms, there.streamed_bytes)

    def test_a_budget_under_the_floor(self, repository, needs):
        told = planning.forecast("a", repository=repository, budget=needs.floor - 1)
        assert (told.fits, told.floor_bytes) == (False, needs.floor)
        for key in ("taken_bytes", "arena_bytes", "resident_bytes", "streamed_bytes", "resident_blocks", "mode",
                    "predicted_ms", "required_read_rate", "break_even_runs"):  # fmt: skip
            assert getattr(told, key) is None
        with pytest.raises(BudgetError) as caught:
            open_chain("a", repository=repository, budget=needs.floor - 1)
        assert (told.refusal, told.remedy) == (caught.value.what, caught.value.remedy)
        assert [point.budget_bytes for point in told.curve] == [needs.floor, 2 * needs.floor - 2, needs.resident]

    def test_the_required_rate_is_the_least_that_hides_all_reads(self, repository, needs):
        budget = needs.fixed + 4 * SIZE
        needed = planning.forecast("a", repository=repository, budget=budget).required_read_rate
        for rate, hidden in ((needed * 1.02, True), (needed / 1.1, False)):
            told = planning.forecast("a", repository=repository, budget=budget, read_rate=rate)
            assert (told.predicted_ms <= 1.01 * told.all_resident_ms) == hidden
            assert told.assumed_read_rate == rate
            assert told.measured_read_rate == RATE
        assert needed > RATE

    def test_no_rate_hides_reads_where_nothing_is_executed(self, repository, tmp_path, needs):
        copied = copy(repository, tmp_path)
        rewrite(copied, profile=msgspec.structs.replace(read_manifest(copied).profile, execute_seconds=(0.0,) * LAYERS))
        told = planning.forecast("a", repository=tmp_path, budget=needs.floor)
        assert told.required_read_rate is None
        assert "no drive would do" in "\n".join(telling.forecast(told).lines)

    def test_after_how_many_runs_loading_everything_is_quicker(self, repository, needs):
        seen = set()
        for budget in budgets(needs)[:-2]:
            told = planning.forecast("a", repository=repository, budget=budget)

            if told.predicted_ms == pytest.approx(told.all_resident_ms):
                assert told.break_even_runs is None
                continue
            runs, stays = told.break_even_runs, told.resident_bytes / RATE * 1e3
            loading = [LAYERS * SIZE / RATE * 1e3 + n * told.all_resident_ms for n in (runs - 1, runs)]
            streaming = [stays + n * told.predicted_ms for n in (runs - 1, runs)]
            assert loading[1] < streaming[1] * (1 + 1e-12)
            assert runs == 1 or loading[0] >= streaming[0]
            seen.add(runs)
        assert len(seen) > 2

    def test_reads_that_are_hidden_never_break_even(self, repository, needs):
        told = planning.forecast("a", repository=repository, budget=needs.fixed + 6 * SIZE, read_rate=100 * RATE)
        assert told.streamed_bytes
        assert told.predicted_ms == pytest.approx(told.all_resident_ms)
        assert told.break_even_runs is None or told.break_even_runs > 1000

    def test_a_chain_that_was_never_timed(self, repository, tmp_path):
        rewrite(copy(repository, tmp_path), profile=UNMEASURED)
        with pytest.raises(StoreError, match="never timed") as caught:
            planning.forecast("a", repository=tmp_path)
        assert "trt-layering profile a" in caught.value.remedy

    def test_a_profile_of_another_machine_or_drive(self, repository, tmp_path):
        folder = copy(repository, tmp_path)
        measured = read_manifest(folder).profile
        rewrite(folder, profile=msgspec.structs.replace(measured, drive="a floppy disk"))
        with pytest.raises(StoreError, match="a floppy disk") as caught:
            planning.forecast("a", repository=tmp_path)
        assert "trt-layering profile a" in str(caught.value)
        assert planning.forecast("a", repository=tmp_path, read_rate=RATE).fits
        rewrite(folder, profile=msgspec.structs.replace(measured, machine={"processor": "abacus"}))
        with pytest.raises(StoreError, match="abacus"):
            planning.forecast("a", repository=tmp_path, read_rate=RATE)

    def test_nonsense(self, repository):
        for budget in (0, -5, "4 parsecs", True, 1.5):
            with pytest.raises(UsageError, match="budget"):
                planning.forecast("a", repository=repository, budget=budget)  # type: ignore[arg-type]
        for rate in (0, -1, float("nan"), float("inf"), 1e13):
            with pytest.raises(UsageError, match="rate"):
                planning.forecast("a", repository=repository, read_rate=rate)
        with pytest.raises(NotBuiltError, match="nobody"):
            planning.forecast("nobody", repository=repository)


def copy(repository: Path, to: Path) -> Path:
    """The folder of a copy of chain `a`."""
    import shutil

    return Path(shutil.copytree(repository / "a" / "1", to / "a" / "1"))


class TestSeveralModels:
    def needs_of(self, repository, name: str) -> Footprint:
        return Footprint.of(read_manifest(repository / name / "1"))

    def test_shares_are_what_each_model_then_does(self, repository, config, needs):
        budget = needs.floor + self.needs_of(repository, "b").floor + 5 * SIZE
        found = planning.division(config("name: a", "name: b, priority: 3", budget=budget))
        assert found.fits
        assert sum(portion.share_bytes for portion in found.models) + found.left_bytes == budget
        assert found.floor_bytes == sum(portion.floor_bytes for portion in found.models)
        for portion in found.models:
            told = planning.forecast(portion.name, repository=repository, budget=portion.share_bytes)
            assert portion.predicted_ms == pytest.approx(told.predicted_ms)
            assert portion.all_resident_ms == told.all_resident_ms
            assert portion.floor_bytes == told.floor_bytes
            assert portion.meets_deadline is None

    def test_a_deadline_and_a_fixed_share(self, repository, config, needs):
        other = self.needs_of(repository, "b")
        budget = needs.resident + other.floor
        deadline = f"{EXECUTE * LAYERS * 1e3 + 0.1}ms"
        found = planning.division(config(f"name: a, deadline: {deadline}", "name: b, priority: 1000", budget=budget))
        assert [portion.meets_deadline for portion in found.models] == [True, None]
        found = planning.division(config(f"name: a, share: {needs.floor}, deadline: 9ms", "name: b", budget=budget))
        assert (found.models[0].share_bytes, found.models[0].meets_deadline) == (needs.floor, False)
        assert found.models[1].share_bytes == other.resident
        assert "9 ms, NOT met" in "\n".join(telling.division(found).lines)

    def test_a_budget_that_holds_all(self, repository, config, needs):
        found = planning.division(config("name: a", "name: b"), budget=1 << 30)
        assert [portion.share_bytes for portion in found.models] == [
            needs.resident, self.needs_of(repository, "b").resident
        ]  # fmt: skip

    def test_floors_that_do_not_fit(self, repository, config, needs):
        floors = needs.floor + self.needs_of(repository, "b").floor
        asked = config("name: a", "name: b", budget=floors - 1)
        found = planning.division(asked)
        assert (found.fits, found.floor_bytes, found.left_bytes) == (False, floors, None)
        assert [portion.share_bytes for portion in found.models] == [None, None]
        assert telling.division(found).status == 3
        with pytest.raises(BudgetError) as caught:
            planning.share_of("a", asked)
        assert caught.value.floor == floors == sum(caught.value.parts.values())
        assert planning.division(config("name: a", "name: b", budget=floors)).fits

    def test_a_fixed_share_under_the_floor(self, config, needs):
        with pytest.raises(BudgetError) as caught:
            planning.division(config(f"name: a, share: {needs.floor - 1}", budget=1 << 30))
        assert caught.value.floor == needs.floor
        assert "'a'" in caught.value.where

    def test_models_that_are_not_built(self, config):
        asked = config("name: a", "name: c", "name: d", budget=1 << 30)
        with pytest.raises(NotBuiltError, match="c, d are not built") as caught:
            planning.division(asked)
        assert f"trt-layering build {asked.path}" in caught.value.remedy

    def test_nothing_to_divide(self, config, tmp_path):
        with pytest.raises(ConfigError, match="no memory_budget"):
            planning.division(config("name: a"))
        empty = tmp_path / "empty.yaml"
        empty.write_text("memory_budget: 5MiB\n")
        with pytest.raises(ConfigError, match="no models"):
            planning.division(load(empty))

    def test_the_share_that_a_model_runs_with(self, config, caplog):
        asked = config("name: a", "name: b", budget=1 << 30)
        shares = [planning.share_of(name, asked) for name in ("a", "b")]
        assert shares == [portion.share_bytes for portion in planning.division(asked).models]
        assert planning.share_of("a", config("name: a", "name: b")) is None
        assert planning.share_of("a", config("name: a", budget=12345)) == 12345
        assert not caplog.records
        with caplog.at_level(logging.WARNING, "trt_layering"):
            assert planning.share_of("a", config("name: a", "name: c", budget=12345)) == 12345
        [record] = caplog.records
        assert "c is not built" in record.getMessage()


def test_words_for_people(repository, needs):
    """A verdict first, then what is behind it, then what other budgets would do."""
    for budget, verdict, words in (
        (needs.floor + 2 * SIZE, "fits: ", "consecutive runs on"),
        (needs.resident, "fits: ", "everything stays in memory"),
        (needs.floor - 1, "does not fit: ", "to do: give at least"),
    ):
        result = telling.forecast(planning.forecast("a", repository=repository, budget=budget))
        assert result.lines[0].startswith(verdict)
        assert words in "\n".join(result.lines)
        assert result.lines[-1].endswith("everything")
        assert result.status == (0 if budget >= needs.floor else 3)
