"""A trace holds what happened, has the form that ui.perfetto.dev reads, and costs nothing where there is none."""

from __future__ import annotations

import errno
import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chains import assert_same, budgets, feed, in_this_process, layers, opened, saved, uncut
from tests.runtime.drives import Faulty, failure
from trt_layering.building import Built, build
from trt_layering.errors import LayeringError, ReadError, UsageError
from trt_layering.runtime import chain as chain_module
from trt_layering.runtime import loader as loader_module
from trt_layering.runtime import supply
from trt_layering.runtime.footprint import Footprint
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.runtime.pace import Stretch
from trt_layering.runtime.trace import Event, ReadEvent, Trace, writable
from trt_layering.store.manifest import PAGE
from trt_layering.store.reader import WeightFile

COUNT = 6

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(layers(COUNT), tmp_path_factory.mktemp("model") / "layers.onnx")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    with in_this_process():
        return build(
            source, repository=tmp_path_factory.mktemp("engines"), block_size="16KiB", optimise=False,
            shapes={"x": (3, 64)},
        )  # fmt: skip


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Lets chains read through a stand-in for `os.preadv`."""

    def use(preadv: Any) -> None:
        monkeypatch.setattr(supply, "WeightFile", partial(WeightFile, preadv=preadv))

    return use


def assert_well_formed(told: dict[str, Any], arena_bytes: int) -> list[dict[str, Any]]:
    """What ui.perfetto.dev must be given; returns what is drawn."""
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    names = {event["tid"]: event["args"]["name"] for event in told["traceEvents"] if event["name"] == "thread_name"}
    drawn = [event for event in told["traceEvents"] if event["ph"] != "M"]
    assert {event["ph"] for event in drawn} <= set("XsfCi")
    assert all(event["pid"] == 1 and event["ts"] >= 0 for event in drawn)
    assert [event["ts"] for event in drawn] == sorted(event["ts"] for event in drawn)
    slices: dict[int, list[tuple[float, float]]] = {}
    for event in drawn:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(slices) <= set(names)
    for track in slices.values():
        ends = sorted(track)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(ends)), "slices overlap"
    assert_flows_have_both_ends(drawn, slices)
    counts = [event["args"]["bytes"] for event in drawn if event["ph"] == "C"]
    assert all(0 <= count <= arena_bytes for count in counts)
    return drawn


def assert_flows_have_both_ends(drawn: list[dict[str, Any]], slices: dict[int, list[tuple[float, float]]]) -> None:
    flows: dict[int, dict[str, Any]] = {}
    for event in drawn:
        if event["ph"] in "sf":
            assert event["ph"] not in flows.setdefault(event["id"], {}), "an end is there twice"
            flows[event["id"]][event["ph"]] = event
            inside = [begin <= event["ts"] <= end for begin, end in slices[event["tid"]]]
            assert any(inside), "an arrow that ends in nothing"
    for ends in flows.values():
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["s"]["tid"] != ends["f"]["tid"] == 0
        assert ends["f"]["bp"] == "e"


# --------------------------------------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("mode", ["floor", "middle", "all in the arena", "resident"])
def test_every_execution_and_every_read(source: Path, built: Built, mode: str) -> None:
    trace, asked = Trace(), [feed(seed=seed) for seed in range(5)]
    options = LoaderOptions(threads=3, read_size=PAGE)
    with opened(built, budgets(built)[mode], loader=options, trace=trace) as chain:
        for one in asked:
            assert_same(uncut(source, one), chain.run(one))
        chain.run_many(asked, wave=5)
    stats = chain.stats()
    executed = [(e.sweep, e.block, e.request) for e in trace.events if e.kind == "execute"]
    assert len(executed) == 10 * stats["blocks"] <= 10 * COUNT
    assert len(set(executed)) == len(executed)
    assert executed == sorted(executed)
    reads = [e for e in trace.events if isinstance(e, ReadEvent)]
    assert all(e.kind == "read" and e.bytes == e.length == PAGE for e in reads)
    if stats["mode"] != "resident" or reads:
        assert sum(e.bytes for e in reads) == stats["bytes_read"]
    waits = [e for e in trace.events if e.kind == "wait"]
    assert sum(e.end - e.begin for e in waits) == pytest.approx(stats["stall_seconds"])
    assert sum(e.end - e.begin for e in trace.events if e.kind == "execute") == pytest.approx(stats["execute_seconds"])
    assert trace.arena_bytes == stats["arena_bytes"]
    assert list(trace.blocks) == [block.name for block in chain._blocks]
    drawn = assert_well_formed(trace.chrome(), stats["arena_bytes"])
    flows = sum(event["ph"] == "s" for event in drawn)
    read_for = {(e.sweep, e.block) for e in reads} & {(sweep, block) for sweep, block, _ in executed}
    assert flows == len(read_for), "an arrow for each block that was read for the sweep"
    if mode == "floor":
        assert flows == stats["sweeps"] * COUNT


def test_a_wave_has_one_arrow_a_block(built: Built) -> None:
    trace, needs = Trace(), Footprint.of(built.manifest, 4)
    with opened(built, max(needs.floor, 1), trace=trace, wave=4) as chain:
        chain.run_many([feed(seed=seed) for seed in range(8)], wave=4)
    drawn = assert_well_formed(trace.chrome(), trace.arena_bytes)
    requests = Counter((e.sweep, e.request) for e in trace.events if e.kind == "execute")
    assert requests == {(sweep, request): COUNT for sweep in (0, 1) for request in range(4)}
    assert sum(event["ph"] == "f" for event in drawn) == 2 * COUNT


def test_at_the_floor_the_arena_never_holds_two_blocks(built: Built) -> None:
    trace = Trace()
    with opened(built, budgets(built)["floor"], trace=trace) as chain:
        chain.run(feed())
    counts = [e["args"]["bytes"] for e in trace.chrome()["traceEvents"] if e["ph"] == "C"]
    assert max(counts) == trace.arena_bytes
    assert counts.count(0) >= COUNT, "each block takes the place of the one before it"


@pytest.mark.parametrize("number", range(1, 3 * COUNT, 4))
def test_failed_reads_are_there_and_bring_nothing(built: Built, drive: Callable[[Any], None], number: int) -> None:
    drive(Faulty({number: failure()}))
    trace, failed = Trace(), 0
    with opened(built, budgets(built)["floor"], trace=trace) as chain:
        for _ in range(4):
            try:
                chain.run(feed())
            except ReadError:
                failed += 1
        stats = chain.stats()
    reads = [e for e in trace.events if isinstance(e, ReadEvent)]
    assert [e.bytes for e in reads].count(0) == 1 >= failed
    assert sum(e.bytes for e in reads) + PAGE >= stats["bytes_read"]
    drawn = assert_well_formed(trace.chrome(), trace.arena_bytes)
    assert [e["args"]["failed"] for e in drawn if e["ph"] == "X" and e["cat"] == "read"].count(True) == 1


@settings(max_examples=60)
@given(data=st.data(), blocks=st.integers(1, 5), threads=st.integers(1, 3), pages=st.integers(1, 6))
def test_any_recording_is_well_formed(data: st.DataObject, blocks: int, threads: int, pages: int) -> None:
    """Reads of several threads, some of which fail, and executions, in any order in time and cut off anywhere."""
    trace = Trace(most=data.draw(st.integers(1, 40)))
    trace.open("any", [f"b{n}" for n in range(blocks)], pages * PAGE)
    clocks = [data.draw(st.floats(0, 1e6)) for _ in range(threads + 1)]
    for g in range(data.draw(st.integers(0, 12))):
        sweep, block = divmod(g, blocks)
        for track in data.draw(st.lists(st.integers(0, threads), max_size=4)):
            begin = clocks[track] + data.draw(st.floats(0, 1))
            clocks[track] = end = begin + data.draw(st.floats(0, 1))
            if track == 0:
                trace.add(Event(data.draw(st.sampled_from(["wait", "execute"])), block, sweep, begin, end, 0))
                continue
            first = data.draw(st.integers(0, pages - 1))
            length = data.draw(st.integers(1, pages - first)) * PAGE
            arrived = data.draw(st.booleans()) * length
            completes = bool(arrived) and data.draw(st.booleans())
            trace.add(
                ReadEvent(
                    "read", block, sweep, begin, end, arrived, target=first * PAGE, length=length,
                    thread=track - 1, completes=completes,
                )
            )  # fmt: skip
    told = trace.chrome()
    drawn = [event for event in told["traceEvents"] if event["ph"] in "XC"]
    assert all(event.get("dur", 0) >= 0 <= event["ts"] for event in drawn)
    assert all(0 <= e["args"]["bytes"] <= pages * PAGE for e in drawn if e["ph"] == "C")
    ends = Counter((event["id"], event["ph"]) for event in told["traceEvents"] if event["ph"] in "sf")
    assert all(count == 1 and ends[number, "f" if end == "s" else "s"] == 1 for (number, end), count in ends.items())


def test_a_slow_drive_is_an_instant(built: Built) -> None:
    trace = Trace()
    trace.open("c", ["b"], PAGE)
    trace.add(Event("execute", 0, 0, 5.0, 6.0, 0))
    trace.add_slowdown(Stretch(end=5.5, rate=1e6, usual=4e6))
    [instant] = [event for event in trace.chrome()["traceEvents"] if event["ph"] == "i"]
    assert (instant["ts"], instant["s"]) == (5e5, "p")
    assert instant["args"] == {"bytes_per_second": 1_000_000, "usual": 4_000_000}


def test_nothing_is_recorded_where_nobody_asked(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((chain_module, "Event"), (loader_module, "ReadEvent")):
        monkeypatch.setattr(module, name, None)
    with opened(built, budgets(built)["floor"]) as chain:
        chain.run(feed())


def test_threads_add_while_others_look() -> None:
    trace = Trace()
    trace.open("c", ["b"], PAGE)
    threads = [
        threading.Thread(target=lambda: [trace.add(Event("execute", 0, 0, 1.0, 2.0, 0)) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(trace.chrome()["traceEvents"]) >= 1
    assert len(trace.events) == 8000


# -------------------------------------------------------------------------------------------------------------- limits


def test_a_full_trace_keeps_the_beginning_and_says_so(built: Built) -> None:
    trace = Trace(most=10)
    with opened(built, budgets(built)["floor"], trace=trace) as chain:
        chain.run(feed())
        chain.run(feed())
        assert "the trace ends after 10 events" in chain.stats()["fallbacks"][-1]
    assert len(trace.events) == 10
    told = trace.chrome()
    assert_well_formed(told, trace.arena_bytes)
    assert told["otherData"]["note"] == trace.note


def test_one_trace_is_of_one_chain(built: Built) -> None:
    trace, before = Trace(), threading.active_count()
    with opened(built, trace=trace):
        pass
    with pytest.raises(UsageError, match="records the chain 'layers' already") as caught:
        opened(built, budgets(built)["floor"], trace=trace)
    assert caught.value.remedy
    assert threading.active_count() == before


@pytest.mark.parametrize("most", [0, -1, 1.5, "9", True, None])
def test_sizes_that_are_none(most: Any) -> None:
    with pytest.raises(UsageError, match="1 event or more"):
        Trace(most)


# --------------------------------------------------------------------------------------------------------------- files


def recorded() -> Trace:
    trace = Trace()
    trace.open("c", ["b"], PAGE)
    trace.add(Event("execute", 0, 0, 1.0, 2.0, 0))
    return trace


def test_writing_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "t.json")
    trace = recorded()
    trace.write(tmp_path / "link.json")
    assert json.loads((tmp_path / "t.json").read_text()) == trace.chrome()
    assert (tmp_path / "link.json").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "t.json"]


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise failure(errno.ENOSPC)

    (tmp_path / "t.json").write_text("old")
    monkeypatch.setattr("trt_layering.runtime.trace.os.fsync", full)
    with pytest.raises(LayeringError, match="No space left on device") as caught:
        recorded().write(tmp_path / "t.json")
    assert caught.value.remedy
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_where_no_trace_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for path, said in (
        (tmp_path, "no plain file"),
        ("/dev/full", "no plain file"),
        (tmp_path / "none" / "t.json", "no folder"),
        (tmp_path / "round" / "t.json", "no folder|no file can be called that"),
        ("a\0b", "no file can be called that"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            writable(path)
        assert caught.value.remedy
        with pytest.raises(UsageError):
            recorded().write(path)
