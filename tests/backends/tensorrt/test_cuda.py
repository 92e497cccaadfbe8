"""The GPU through PyCUDA: right bytes, contexts in every thread, errors in words, nothing left."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.backends.tensorrt.rig import emulated
from tests.emulation.install import installed
from trt_layering.backends.tensorrt.cuda import PAGE, Device
from trt_layering.errors import BackendError, MemoryLimitError

DATA = bytes(range(256)) * 64


def test_a_device_says_what_it_is() -> None:
    with emulated(gpu="NVIDIA X", sm="9.0", integrated="0", memory=str(3 << 30)) as (device, _):
        assert (device.name, device.sm, device.integrated, device.shares_managed_memory) == (
            "NVIDIA X",
            "9.0",
            False,
            True,
        )
        assert device.memory_info() == (3 << 30, 3 << 30)
        assert device.total_bytes == 3 << 30


def test_there_is_no_such_gpu() -> None:
    with installed(devices="0"), pytest.raises(BackendError, match="invalid device ordinal") as caught:
        Device()
    assert caught.value.where == "GPU 0"


@pytest.mark.parametrize("seed", range(6))
def test_any_memory_goes_there_and_back(seed: int) -> None:
    with emulated(seed=str(seed)) as (device, _):
        memory = device.allocate(len(DATA), "a test")
        device.fill(memory.address, 7, len(DATA), device.compute)
        device.write(memory.address, memoryview(DATA))
        back = bytearray(len(DATA))
        device.read(memoryview(back), memory.address)
        assert bytes(back) == DATA


def _back_and_forth(device: Device) -> bytes:
    """Through memory that other work uses, asked for just before and just after."""
    memory, pinned, mark = device.allocate(len(DATA), "a test"), device.pinned(len(DATA), "a test"), device.event()
    device.fill(memory.address, 7, len(DATA), device.compute)
    device.write(memory.address, memoryview(DATA))
    device.download(pinned.memory, memory.address, device.compute)
    mark.record(device.compute)
    mark.wait()
    device.upload(memory.address, pinned.memory, device.copy)
    device.fill(memory.address, 9, 1, device.copy)
    back = bytearray(len(DATA))
    device.read(memoryview(back), memory.address)
    return bytes(back)


def test_copies_of_any_memory_wait_for_the_device() -> None:
    wanted = b"\x09" + DATA[1:]
    with emulated() as (device, machine):
        assert _back_and_forth(device) == wanted
        sites = set(machine.wait_sites)
    assert {kind for kind, _ in sites} == {"synchronize", "record"}
    for site in sites:

        def right(seed: int, site: tuple[str, str] = site) -> bool:
            with emulated(seed=str(seed)) as (device, machine), machine.without(*site):
                return _back_and_forth(device) == wanted

        assert not all(right(seed) for seed in range(30)), f"nothing fails without {site}"


def test_every_thread_may_use_it_and_none_keeps_the_context() -> None:
    with emulated() as (device, machine):
        memory = device.allocate(PAGE, "a test")
        sizes: list[int] = []

        def use() -> None:
            with device.current(), device.current():
                device.fill(memory.address, 1, PAGE, device.compute)
            assert machine.current_context() is None
            device.pinned(PAGE, "a test").free()
            device.event().free()
            sizes.append(memory.nbytes)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sizes == [PAGE] * 4


def test_another_thread_may_close_it() -> None:
    with emulated() as (device, _):
        device.allocate(PAGE, "a test"), device.pinned(PAGE, "a test"), device.event()
        closing = threading.Thread(target=device.close)
        closing.start()
        closing.join()


def test_closing_waits_for_work_and_may_be_repeated() -> None:
    with emulated() as (device, machine):
        memory, pinned = device.allocate(PAGE, "a test"), device.pinned(PAGE, "a test")
        device.upload(memory.address, pinned.memory, device.copy)
        device.close()
        device.close()
        assert not machine.allocations()


def test_two_devices_share_the_context_and_close_by_themselves() -> None:
    with emulated() as (first, _):
        second = Device()
        memory = first.allocate(PAGE, "a test")
        second.close()
        first.fill(memory.address, 1, PAGE, first.compute)


def test_memory_that_is_not_there_is_told_in_bytes() -> None:
    with emulated(memory=str(8 << 20)) as (device, _):
        kept = device.allocate(6 << 20, "a test")
        with pytest.raises(MemoryLimitError) as caught:
            device.allocate(3 << 20, "the scratch")
        kept.free()
    assert caught.value.what == "the GPU did not give 3.0 MiB for the scratch: 2.0 MiB of 8.0 MiB are free"
    assert "same memory" in caught.value.remedy


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("cuMemcpyHtoDAsync", lambda d, m, p: d.upload(m.address, p.memory, d.copy)),
        ("cuMemcpyDtoHAsync", lambda d, m, p: d.download(p.memory, m.address, d.copy)),
        ("cuMemcpyDtoDAsync", lambda d, m, p: d.copy_within(m.address, m.address, 1, d.copy)),
        ("cuMemsetD8Async", lambda d, m, p: d.fill(m.address, 1, 1, d.copy)),
        ("cuEventCreate", lambda d, m, p: d.event()),
        ("cuStreamWaitEvent", lambda d, m, p: d.copy.wait(d.event())),
        ("cuEventSynchronize", lambda d, m, p: d.event().wait()),
        ("cuMemGetInfo", lambda d, m, p: d.memory_info()),
        ("cuMemAlloc", lambda d, m, p: d.allocate(1, "a test")),
        ("cuMemHostAlloc", lambda d, m, p: d.pinned(1, "a test")),
    ],
)
def test_what_the_driver_refuses_is_told(call: str, use: Any) -> None:
    with emulated() as (device, machine):
        memory, pinned = device.allocate(PAGE, "a test"), device.pinned(PAGE, "a test")
        machine.failures[call] = "unspecified launch failure"
        with pytest.raises(BackendError, match=f"{call} failed: unspecified launch failure") as caught:
            use(device, memory, pinned)
        machine.failures.clear()
    assert caught.value.where == "Orin (nvgpu)"
    assert caught.value.remedy


def test_timed_events_tell_seconds() -> None:
    with emulated() as (device, _):
        begin, end = device.timed_event(), device.timed_event()
        begin.record(device.compute)
        end.record(device.compute)
        end.wait()
        assert end.seconds_since(begin) >= 0
        with pytest.raises(BackendError, match="comparing"):
            device.event().seconds_since(begin)


def test_host_memory_begins_at_a_page() -> None:
    with emulated(concurrent_managed="1") as (device, machine):
        for memory in (device.pinned(100, "a"), device.mapped(100, "a"), device.managed(100, "a")):
            assert memory.host_address % PAGE == 0
            assert np.frombuffer(memory.memory, np.uint8).ctypes.data == memory.host_address
            if memory.address:
                memory.memory[:4] = b"abcd"
                assert bytes(machine.view(memory.address, 4)) == b"abcd"
