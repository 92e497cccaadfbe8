"""Arenas on a GPU: under any schedule, threads and order of deferred work, engines find the bytes of their block."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.tensorrt.rig import Uneven, emulated, streaming
from tests.runtime.drives import Faulty, failure
from tests.runtime.test_loader import LINE, Blocks, Store
from trt_layering.backends.tensorrt.memory import (
    ManagedArena,
    StagedArena,
    make_arena,
    size_of,
    staging_size,
)
from trt_layering.errors import BackendError, CorruptError, LayeringError, MemoryLimitError, ReadError
from trt_layering.runtime.loader import LoaderOptions
from trt_layering.store.manifest import PAGE

PLACEMENTS = ["staged", "zero-copy", "managed", "pinned"]
SHARED: Blocks = [[0, 3], [1], [3, 2], [4], [3, 5], [6], [7]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"), pages=[3, 1, 4, 1, 5, 2, 6, 2])


@given(
    placement=st.sampled_from(PLACEMENTS),
    blocks=st.sampled_from([LINE, SHARED]),
    arena=st.none() | st.integers(8, 30),
    threads=st.integers(1, 4),
    verify=st.sampled_from(["first", "always", "never"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_engines_find_their_bytes(store, placement, blocks, arena, threads, verify, seed) -> None:
    options = LoaderOptions(threads=threads, read_size=2 * PAGE, verify=verify)
    with (
        emulated(seed=str(seed), concurrent_managed="1") as (device, machine),
        streaming(device, machine, store, blocks, arena, placement, options, preadv=Uneven(seed)) as rig,
    ):
        for sweep in range(3):
            rig.sweep(sweep * len(blocks))


def _fails(store: Store, seed: int, site: tuple[str, str] | None, sites: set[tuple[str, str]]) -> bool:
    options = LoaderOptions(threads=2, read_size=2 * PAGE, verify="always" if seed % 2 else "never")
    try:
        with emulated(seed=str(seed)) as (device, machine):
            if site is not None:
                machine.ignored_waits.add(site)
            with streaming(device, machine, store, LINE, 14, "staged", options) as rig:
                for sweep in range(2):
                    rig.sweep(sweep * len(LINE))
            sites.update(s for s in machine.wait_sites if s[1].startswith("memory.py"))
    except (AssertionError, CorruptError, LayeringError):
        return True
    return False


@functools.cache
def _sites(store: Store) -> frozenset[tuple[str, str]]:
    sites: set[tuple[str, str]] = set()
    assert not any(_fails(store, seed, None, sites) for seed in range(4))
    return frozenset(sites)


def test_every_wait_and_every_record_is_needed(store: Store) -> None:
    sites = _sites(store)
    assert {(kind, site.split()[1]) for kind, site in sites} == {
        ("synchronize", "landing"), ("record", "copy_in"), ("record", "publish"), ("wait_for_event", "arrive"),
        ("record", "pieces"), ("synchronize", "pieces"), ("synchronize", "close"),
    }  # fmt: skip
    for site in sorted(sites):
        assert any(_fails(store, seed, site, set()) for seed in range(400)), f"nothing fails without {site}"


def test_a_failed_read_is_told_and_the_next_sweep_is_right(store: Store) -> None:
    faulty = Faulty({6: failure()})
    options = LoaderOptions(threads=2, read_size=2 * PAGE)
    with (
        emulated() as (device, machine),
        streaming(device, machine, store, LINE, None, "staged", options, preadv=faulty) as rig,
    ):
        with pytest.raises(ReadError):
            rig.sweep(0)
        rig.sweep(len(LINE))


def test_a_failing_gpu_is_told_by_the_run(store: Store) -> None:
    options = LoaderOptions(threads=2, read_size=2 * PAGE)
    with emulated() as (device, machine), streaming(device, machine, store, LINE, None, "staged", options) as rig:
        rig.sweep(0)
        machine.failures["cuMemcpyHtoDAsync"] = "an illegal memory access was encountered"
        with pytest.raises(BackendError, match="illegal memory access"):
            rig.sweep(len(LINE))


def test_managed_memory_is_refused_where_the_processor_must_not_touch_it() -> None:
    with emulated() as (device, _), pytest.raises(BackendError, match="managed memory") as caught:
        ManagedArena(device, PAGE)
    assert "zero-copy" in caught.value.remedy


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_arena_that_does_not_fit_is_refused_with_bytes_and_remedy(placement: Any) -> None:
    with (
        emulated(memory=str(1 << 20), concurrent_managed="1") as (device, _),
        pytest.raises(MemoryLimitError, match=r"2\.0 MiB for the arena") as caught,
    ):
        make_arena(placement, device, 2 << 20, 1, 1, PAGE)
    assert "1.0 MiB are free" in caught.value.what
    assert "budget" in caught.value.remedy


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_arena_takes_what_is_accounted_for(placement: Any) -> None:
    with emulated(concurrent_managed="1") as (device, _):
        before = device.memory_info()[0]
        arena = make_arena(placement, device, 10 * PAGE, 3, 2, 4 * PAGE)
        taken = before - device.memory_info()[0]
        arena.close()
        arena.close()
        assert device.memory_info()[0] == before
    assert 10 * PAGE <= taken <= 10 * PAGE + PAGE + staging_size(placement, 2, 4 * PAGE)


def test_pinned_memory_is_aligned_for_direct_reads() -> None:
    with emulated() as (device, _):
        arena = StagedArena(device, 4 * PAGE, 1, 3, 2 * PAGE)
        for _ in range(3):
            for thread in range(3):
                memory = arena.landing(thread, 0, 2 * PAGE).memory
                assert np.frombuffer(memory, np.uint8).ctypes.data % PAGE == 0
        arena.close()


def test_a_read_that_does_not_fit_its_slot_is_a_fault() -> None:
    with emulated() as (device, _):
        arena = StagedArena(device, 4 * PAGE, 1, 1, PAGE)
        with pytest.raises(BackendError, match="does not fit"):
            arena.landing(0, 0, 2 * PAGE)
        arena.close()


@pytest.mark.parametrize(("dtype", "size"), [("float32", 24), ("float16", 12), ("bfloat16", 12), ("bool", 6)])
def test_weights_know_their_size_and_place(dtype: str, size: int) -> None:
    assert size_of(dtype, (2, 3)) == size
    with emulated(concurrent_managed="1") as (device, machine):
        for placement in PLACEMENTS:
            arena = make_arena(placement, device, 2 * PAGE, 1, 1, PAGE)
            weight = arena.weight(PAGE, dtype, (2, 3))
            assert (weight.nbytes, weight.shape, weight.dtype) == (size, (2, 3), dtype)
            look = machine.view if weight.location == "device" else machine.host_view
            assert look(weight.address, size).size == size
            arena.close()


def test_threads_may_check_at_the_same_time() -> None:
    data = np.random.default_rng(0).bytes(8 * PAGE)
    wrong = []
    with emulated(seed="5") as (device, _):
        arena = StagedArena(device, 8 * PAGE, 1, 2, PAGE)
        for target in range(0, 8 * PAGE, PAGE):
            landing = arena.landing(0, target, PAGE)
            landing.memory[:] = data[target : target + PAGE]
            landing.put()

        def check(first: int) -> None:
            if b"".join(bytes(piece) for piece in arena.pieces(first, 4 * PAGE)) != data[first : first + 4 * PAGE]:
                wrong.append(first)

        threads = [threading.Thread(target=check, args=[first]) for first in (0, 2 * PAGE, 4 * PAGE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        arena.close()
    assert not wrong
