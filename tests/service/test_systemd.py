"""What the service tells systemd, received on real sockets; the watchdog, with a clock and waits that tests move."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.service.systemd import Extension, Notifier, Watchdog, watchdog_seconds


class Manager:
    """Systemd's end of the socket `address`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        """The messages since it was asked last."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4097).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@trt-layering-{uuid.uuid4()}"
    manager = Manager(address)
    yield manager
    manager.close()


@pytest.fixture
def notifier(manager: Manager) -> Notifier:
    return Notifier(manager.address, clock=lambda: 7_654_321_999)


def test_the_states_of_a_service(manager: Manager, notifier: Notifier) -> None:
    notifier.status("loading finder")
    notifier.extend(90)
    notifier.ready("1 of 2 models serves")
    notifier.reloading()
    notifier.ready()
    notifier.alive()
    notifier.stopping("waits for 3 requests", seconds=20.5)
    assert manager.received() == [
        "STATUS=loading finder",
        "EXTEND_TIMEOUT_USEC=90000000",
        "READY=1\nSTATUS=1 of 2 models serves",
        "RELOADING=1\nMONOTONIC_USEC=7654321",
        "READY=1",
        "WATCHDOG=1",
        "STOPPING=1\nEXTEND_TIMEOUT_USEC=20500000\nSTATUS=waits for 3 requests",
    ]


def test_a_reload_tells_the_time_of_the_clock_that_systemd_has(manager: Manager) -> None:
    import time

    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    Notifier(manager.address).reloading()
    [message] = manager.received()
    told = int(message.partition("MONOTONIC_USEC=")[2])
    assert before <= told <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


@given(st.text(st.characters(exclude_categories=[])))
def test_a_status_is_one_line_that_systemd_can_read(text: str) -> None:
    manager = Manager(f"@trt-layering-{uuid.uuid4()}")
    try:
        Notifier(manager.address).ready(text * 500)
        [message] = manager.received()
    finally:
        manager.close()
    lines = message.split("\n")
    assert lines[0] == "READY=1"
    assert len(lines) == (2 if text else 1)
    assert message.replace("\n", " ").isprintable()
    assert len(message.encode()) <= 4096


def test_without_a_socket_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier.of({})
    notifier.ready("serves")
    notifier.alive()
    watchdog = Watchdog(notifier, 60.0, heartbeat=never_asked)
    watchdog.start()
    watchdog.close()
    assert not notifier.heard
    assert not Notifier.of({"NOTIFY_SOCKET": ""}).heard
    assert caplog.records == []


def never_asked() -> float:
    raise AssertionError


@pytest.mark.parametrize("address", ["/nowhere/at all", "vsock:2:1234", "@" + "n" * 200, "@", "a\0b"])
def test_a_socket_that_nobody_reads_is_one_warning(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier.of({"NOTIFY_SOCKET": address})
    notifier.ready()
    notifier.alive()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "systemd cannot be told READY=1" in record.getMessage()


def test_a_manager_that_comes_back_and_goes_again_is_told_of_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = tmp_path / "notify"
    notifier = Notifier(str(address))
    notifier.alive()
    manager = Manager(str(address))
    notifier.alive()
    assert manager.received() == ["WATCHDOG=1"]
    manager.close()
    notifier.alive()
    notifier.alive()
    assert len(caplog.records) == 2


class TestExtension:
    def test_each_step_gives_more_time_but_not_each_sends(self, manager: Manager, notifier: Notifier) -> None:
        now = 0.0
        step = Extension(notifier, 100.0, clock=lambda: now)
        step("building finder", 0, 0)
        step("building finder", 1, 20)
        now = 9.9
        step("building finder", 2, 20)
        now = 10.0
        step("building finder", 3, 20)
        assert manager.received() == [
            "EXTEND_TIMEOUT_USEC=100000000",
            "STATUS=building finder",
            "EXTEND_TIMEOUT_USEC=100000000",
            "STATUS=building finder: 3 of 20",
        ]

    @given(st.lists(st.floats(0, 99)))
    def test_steps_that_come_in_time_never_let_the_time_run_out(self, pauses: list[float]) -> None:
        now, ends = 0.0, 0.0

        class Listening(Notifier):
            def extend(self, seconds: float) -> None:
                nonlocal ends
                ends = now + seconds

        step = Extension(Listening(None), 110.0, clock=lambda: now)
        for pause in [0.0, *pauses]:
            now += pause
            assert now <= ends or ends == 0.0
            step("building", 0, 0)
            assert now <= ends


class Waits:
    """The watchdog's waits, which end one by one as a test lets them; before each, all is at rest."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._rested = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._stopped = False

    def wait(self, timeout: float) -> bool:
        self.asked.append(timeout)
        self._rested.release()
        self._go.acquire()
        return self._stopped

    def set(self) -> None:
        self._stopped = True
        self._go.release()

    def at_rest(self) -> None:
        assert self._rested.acquire(timeout=30)

    def next(self) -> None:
        self._go.release()
        self.at_rest()


class Executor:
    """The time, and when the executing thread last gave a sign of life."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.beat = 1000.0


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def fed(manager: Manager, notifier: Notifier, executor: Executor) -> Iterator[Callable[..., list[str]]]:
    """A watchdog of 60 s that has started; called, it passes the time to the next feeding and tells what was sent."""
    waits = Waits()
    watchdog = Watchdog(notifier, 60.0, lambda: executor.beat, clock=lambda: executor.now, stop=waits)
    watchdog.start()
    waits.at_rest()
    assert manager.received() == ["WATCHDOG=1"]

    def passed(*, beats: bool) -> list[str]:
        executor.now += waits.asked[-1]
        if beats:
            executor.beat = executor.now
        waits.next()
        return manager.received()

    yield passed
    watchdog.close()
    watchdog.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "trt-layering-watchdog"]
    assert set(waits.asked) == {15.0}


class TestWatchdog:
    def test_it_is_fed_while_the_executing_thread_lives(self, fed: Callable[..., list[str]]) -> None:
        assert [fed(beats=True) for _ in range(5)] == [["WATCHDOG=1"]] * 5

    def test_it_starves_once_the_thread_hangs_and_is_fed_again_once_it_goes_on(
        self, fed: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert [fed(beats=False) for _ in range(6)] == [["WATCHDOG=1"]] * 2 + [[]] * 4
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "no sign of life from the executing thread for 45 s" in caplog.text
        assert fed(beats=True) == ["WATCHDOG=1"]
        assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]

    def test_a_drive_that_stalls_for_ten_seconds_does_not_starve_it(
        self, fed: Callable[..., list[str]], executor: Executor
    ) -> None:
        executor.beat -= 10
        assert fed(beats=False) == ["WATCHDOG=1"]

    def test_without_a_wish_of_systemds_there_is_no_thread(self, notifier: Notifier, manager: Manager) -> None:
        watchdog = Watchdog(notifier, None, never_asked)
        watchdog.start()
        watchdog.close()
        assert manager.received() == []

    def test_one_that_never_started_can_be_closed(self, notifier: Notifier) -> None:
        Watchdog(notifier, 60.0, never_asked).close()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "41"}, 1.5),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "42"}, None),
        ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": "41"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "me"}, None),
    ],
)
def test_what_systemd_wants_of_which_process(environment: dict[str, str], seconds: float | None) -> None:
    mine = {**environment}
    if mine.get("WATCHDOG_PID", "").isdigit():
        mine["WATCHDOG_PID"] = str(os.getpid() + int(mine["WATCHDOG_PID"]) - 41)
    assert watchdog_seconds(mine) == seconds
    if "WATCHDOG_PID" in environment:
        assert watchdog_seconds(environment, pid=41) == seconds
