"""What is told of a budget beforehand: against the chain that is then opened, and against what the words promise."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests import timed
from tests.timed import EXECUTE, RATE, SIZE, rewrite
from trt_layering import planning, telling
from trt_layering.errors import BudgetError, NotBuiltError, StoreError, UsageError
from trt_layering.runtime import schedules
from trt_layering.runtime.chain import open_chain
from trt_layering.runtime.footprint import Footprint
from trt_layering.schedule.table import make_table
from trt_layering.store.manifest import PAGE, UNMEASURED, read_manifest

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

LAYERS = 8


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    timed.build(folder, "a", LAYERS)
    return folder


@pytest.fixture
def needs(repository) -> Footprint:
    return timed.needs(repository, "a")


def budgets(needs: Footprint) -> list[int]:
    """From the floor to everything, and more than that."""
    steps = (needs.resident - needs.floor) // 5
    return [*range(needs.floor, needs.resident, steps), needs.resident, 2 * needs.resident]


def test_what_is_told_is_what_is_opened(repository, needs):
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


def test_the_prediction_is_the_tables(repository, needs):
    folder = repository / "a" / "1"
    for budget in budgets(needs)[:-2]:
        told = planning.forecast("a", repository=repository, budget=budget)
        found = schedules.scheduled(folder, read_manifest(folder), budget - needs.fixed, PAGE, "auto")
        assert told.predicted_ms == pytest.approx(found.choice.seconds * 1e3)


def test_more_is_never_slower(repository, needs):
    times = [planning.forecast("a", repository=repository, budget=b).predicted_ms for b in budgets(needs)]
    assert all(later <= earlier for earlier, later in pairwise(times))
    assert times[0] > 2 * times[-1] == pytest.approx(2 * EXECUTE * LAYERS * 1e3)


def test_without_a_budget_everything_stays(repository, needs):
    told = planning.forecast("a", repository=repository)
    assert (told.budget_bytes, told.taken_bytes) == (needs.resident, needs.resident)
    assert (told.mode, told.streamed_bytes, told.required_read_rate) == ("resident", 0, 0.0)
    assert told.predicted_ms == told.all_resident_ms == pytest.approx(EXECUTE * LAYERS * 1e3)
    assert told.break_even_runs is None
    assert len(told.resident_blocks) == LAYERS


def test_the_curve_is_around_the_budget(repository, needs):
    budget = needs.floor + SIZE
    told = planning.forecast("a", repository=repository, budget=budget)
    assert [point.budget_bytes for point in told.curve] == [needs.floor, budget, 2 * budget, needs.resident]
    for point in told.curve:
        there = planning.forecast("a", repository=repository, budget=point.budget_bytes)
        assert (point.predicted_ms, point.streamed_bytes) == (there.predicted_ms, there.streamed_bytes)


def test_a_budget_under_the_floor(repository, needs):
    told = planning.forecast("a", repository=repository, budget=needs.floor - 1)
    assert (told.fits, told.floor_bytes) == (False, needs.floor)
    for key in ("taken_bytes", "arena_bytes", "resident_bytes", "streamed_bytes", "resident_blocks", "mode",
                "predicted_ms", "required_read_rate", "break_even_runs"):  # fmt: skip
        assert getattr(told, key) is None
    with pytest.raises(BudgetError) as caught:
        open_chain("a", repository=repository, budget=needs.floor - 1)
    assert (told.refusal, told.remedy) == (caught.value.what, caught.value.remedy)
    assert [point.budget_bytes for point in told.curve] == [needs.floor, 2 * needs.floor - 2, needs.resident]


def test_the_required_rate_is_the_least_that_hides_all_reads(repository, needs):
    budget = needs.fixed + 4 * SIZE
    needed = planning.forecast("a", repository=repository, budget=budget).required_read_rate
    for rate, hidden in ((needed * 1.02, True), (needed / 1.1, False)):
        told = planning.forecast("a", repository=repository, budget=budget, read_rate=rate)
        assert (told.predicted_ms <= 1.01 * told.all_resident_ms) == hidden
        assert told.assumed_read_rate == rate
        assert told.measured_read_rate == RATE
    assert needed > RATE


def test_no_rate_hides_reads_where_nothing_is_executed(repository, tmp_path, needs):
    copied = copy(repository, tmp_path)
    nothing = (0.0,) * len(read_manifest(copied).parts)
    rewrite(copied, profile=msgspec.structs.replace(read_manifest(copied).profile, execute_seconds=nothing))
    told = planning.forecast("a", repository=tmp_path, budget=needs.floor)
    assert told.required_read_rate is None
    assert "no drive would do" in "\n".join(telling.forecast(told).lines)


def test_after_how_many_runs_loading_everything_is_quicker(repository, needs):
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


def test_weights_that_stay_in_two_places_count_once(repository, needs):
    """Loading everything then reads less than what stays: one run is the least there is."""
    outlook = planning.Outlook.of(repository / "a" / "1")
    choice = replace(outlook.outcome(needs.floor).choice, resident_bytes=2 * LAYERS * SIZE)
    assert outlook._break_even(choice) == 1


def test_blocks_without_weights_in_the_arena_do_not_stay(repository, tmp_path, needs):
    """Neither those that read rows nor those that have none."""
    folder = copy(repository, tmp_path)
    chain = read_manifest(folder)
    blocks = list(chain.blocks)
    blocks[1] = msgspec.structs.replace(blocks[1], rows="x")
    blocks[2] = msgspec.structs.replace(blocks[2], extents=())
    changed = msgspec.structs.replace(
        chain, blocks=tuple(blocks), joined=(),
        profile=msgspec.structs.replace(chain.profile, execute_seconds=(EXECUTE,) * LAYERS),
    )  # fmt: skip
    outlook = outlook_of(changed)
    everything = outlook.needs.resident
    for budget, without in ((everything - 1, (1, 2)), (everything, (2,))):
        stays = [block.name for index, block in enumerate(blocks) if index not in without]
        assert list(outlook.forecast(budget).resident_blocks) == stays
    loaded = outlook_of(msgspec.structs.replace(changed, optimised=False))
    told = loaded.forecast(loaded.needs.resident)
    found = schedules.scheduled(folder, loaded.manifest, changed.loaded_bytes, PAGE, "auto")
    assert len(told.resident_blocks) == LAYERS - 1
    assert (told.mode, told.arena_bytes) == (found.schedule.mode, found.schedule.arena_bytes) == ("resident", 7 * SIZE)
    assert (told.resident_bytes, told.streamed_bytes) == (found.schedule.resident_bytes, 0)
    assert told.predicted_ms == told.all_resident_ms == found.choice.seconds * 1e3
    assert loaded.forecast(loaded.needs.resident - 1).arena_bytes == 6 * SIZE


def outlook_of(chain):
    parts, pace = schedules.partition(chain), schedules.pace(chain)
    return planning.Outlook(chain, Footprint.of(chain), parts, make_table(parts, pace), pace)


def test_what_everything_in_memory_takes_is_what_was_measured(repository, tmp_path, needs):
    """By the engines that are then opened, which are quicker than the blocks."""
    folder = copy(repository, tmp_path)
    measured = EXECUTE * LAYERS / 2
    rewrite(folder, profile=msgspec.structs.replace(read_manifest(folder).profile, whole_seconds=measured))
    told = planning.forecast("a", repository=tmp_path)
    assert told.predicted_ms == told.all_resident_ms == measured * 1e3
    with open_chain("a", repository=tmp_path) as chain:
        assert chain.stats()["predicted_seconds"] == measured
    less = planning.forecast("a", repository=tmp_path, budget=needs.resident - 1)
    assert less.predicted_ms == pytest.approx(2 * measured * 1e3)
    assert less.all_resident_ms == measured * 1e3
    assert planning.Outlook.of(folder).curve[-1] == (needs.resident, measured)
    with open_chain("a", repository=repository) as chain:
        assert chain.stats()["predicted_seconds"] is None


def test_an_extent_by_itself_says_what_an_idle_drive_costs(repository):
    chain = read_manifest(repository / "a" / "1")
    read, idle = SIZE / RATE, 3e-4
    times = [read + idle * (index - 2) for index in range(len(chain.extents))]
    profile = msgspec.structs.replace(chain.profile, read_seconds=tuple(times), read_size=2 * PAGE)
    pace = schedules.pace(msgspec.structs.replace(chain, profile=profile))
    assert pace.first_read == pytest.approx(1.5 * idle)  # of -2, -1, 0, 1, 2, 3, 4 and 5 times as much
    assert pace.read_size == 2 * PAGE
    assert schedules.pace(chain).first_read == 0


def test_reads_that_are_hidden_never_break_even(repository, needs):
    told = planning.forecast("a", repository=repository, budget=needs.fixed + 6 * SIZE, read_rate=100 * RATE)
    assert told.streamed_bytes
    assert told.predicted_ms == pytest.approx(told.all_resident_ms)
    assert told.break_even_runs is None or told.break_even_runs > 1000


def test_a_chain_that_was_never_timed(repository, tmp_path):
    rewrite(copy(repository, tmp_path), profile=UNMEASURED)
    with pytest.raises(StoreError, match="never timed") as caught:
        planning.forecast("a", repository=tmp_path)
    assert "trt-layering profile a" in caught.value.remedy


def test_a_profile_of_another_machine_or_drive(repository, tmp_path):
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


def test_nonsense(repository):
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
    return Path(shutil.copytree(repository / "a" / "1", to / "a" / "1"))


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
