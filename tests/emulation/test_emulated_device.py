"""The emulation is as strict as it says: misuse is a fault, and only what CUDA orders is in order."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.emulation.install import environment, installed


@pytest.fixture
def machine() -> Iterator[Any]:
    """The emulation installed, with a context pushed."""
    with installed() as machine:
        import pycuda.driver as cuda

        cuda.init()
        context = cuda.Device(0).retain_primary_context()
        context.push()
        yield machine
        cuda.Context.pop()


def _misuses(cuda: Any) -> dict[str, Any]:
    memory = cuda.mem_alloc(4096)
    pinned = cuda.pagelocked_empty(8192, np.uint8)
    stream = cuda.Stream(1)
    freed = cuda.mem_alloc(64)
    freed.free()

    def free_too_early() -> None:
        for _ in range(40):  # some run at once
            cuda.memcpy_htod_async(memory, pinned[:4096], stream)
        pinned.base.free()

    return {
        "in no live allocation": lambda: cuda.memcpy_htod(int(freed), bytes(64)),
        "of 4096 bytes": lambda: cuda.memcpy_htod_async(memory, pinned, stream),
        "not pinned": lambda: cuda.memcpy_htod_async(memory, np.zeros(4096, np.uint8), stream),
        "of the other side": lambda: cuda.memset_d8_async(pinned.ctypes.data, 0, 4, stream),
        "while a pending": free_too_early,
    }


@pytest.mark.parametrize(
    "words", ["in no live allocation", "of 4096 bytes", "not pinned", "of the other side", "while a pending"]
)
def test_misuse_is_a_fault(machine: Any, words: str) -> None:
    import emulated_device
    import pycuda.driver as cuda

    with pytest.raises(emulated_device.EmulationFault, match=words):
        _misuses(cuda)[words]()
    assert any(words in fault for fault in machine.faults)


def test_a_thread_needs_a_context_and_must_not_keep_it(machine: Any) -> None:
    import pycuda.driver as cuda

    context = cuda.Context.get_current()

    def without() -> None:
        with pytest.raises(AssertionError, match="without a context"):
            cuda.mem_alloc(4)

    for use in (without, context.push):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert [fault.split(":")[0] for fault in machine.faults] == [
        "cuMemAlloc in a thread without a context",
        "a thread ended with a context pushed",
    ]


def test_allocating_during_a_run_and_what_is_left_are_faults(machine: Any) -> None:
    import pycuda.driver as cuda

    memory = cuda.mem_alloc(10)
    machine.no_more_allocations = True
    with pytest.raises(AssertionError, match="during a run"):
        cuda.mem_alloc(10)
    with pytest.raises(AssertionError, match="10 bytes of device memory were never freed"):
        machine.assert_clean()
    memory.free()


def test_work_waits_for_nothing_but_events_and_the_null_stream() -> None:
    def order(flags: int, waits: bool, seed: int) -> str:
        with installed(seed=str(seed)) as machine:
            import pycuda.driver as cuda

            cuda.init()
            cuda.Device(0).retain_primary_context().push()
            first, second, event, ran = cuda.Stream(flags), cuda.Stream(flags), cuda.Event(), []
            machine.stream(first.handle).enqueue(lambda: ran.append("a"), "a")
            event.record(first)
            if waits:
                second.wait_for_event(event)
            machine.stream(second.handle).enqueue(lambda: ran.append("b"), "b")
            machine.stream(0).enqueue(lambda: ran.append("0"), "0")
            machine.synchronize()
            cuda.Context.pop()
            return "".join(ran)

    free = {order(1, False, seed) for seed in range(20)}
    assert {"ab0", "0ab"} <= free
    assert any(ran.index("b") < ran.index("a") for ran in free)
    assert all(ran.index("a") < ran.index("b") for ran in {order(1, True, seed) for seed in range(20)})
    assert all(ran.endswith("0") for ran in {order(0, False, seed) for seed in range(20)})


def test_the_driver_answers_here_and_in_children() -> None:
    script = (
        "import ctypes; c = ctypes.CDLL('libcuda.so.1'); print(c.cuInit(0)); import pycuda.driver as d; d.init(); "
        "print(d.Device(0).name())"
    )
    with installed(gpu="NVIDIA Y"):
        assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.split("\n")[:2] == ["0", "NVIDIA Y"]
    refused = environment(cuinit="100")
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, env=refused).stdout[:3] == b"100"


def test_nothing_of_it_stays() -> None:
    path, before = list(sys.path), set(sys.modules)
    with installed():
        import pycuda.driver

        pycuda.driver.init()
    assert sys.path == path
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("pycuda", "emulated_device")}
