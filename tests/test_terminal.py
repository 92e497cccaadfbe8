"""Progress where there is no terminal, as lines from a thread that the test drives; and what is printed."""

from __future__ import annotations

import io
import queue
import threading

import pytest

from trt_layering.errors import LayeringError
from trt_layering.terminal import Progress, Result, Terminal


class Beats:
    """The event that ends the thread, whose waits end when the test says so."""

    def __init__(self) -> None:
        self._ends: queue.Queue[bool] = queue.Queue()
        self._waiting = threading.Semaphore(0)
        self.timeouts: list[float] = []

    def wait(self, timeout: float) -> bool:
        self.timeouts.append(timeout)
        self._waiting.release()
        return self._ends.get(timeout=30)

    def set(self) -> None:
        self._ends.put(True)

    def settle(self) -> None:
        """Until the thread waits again, so has printed what it had to."""
        assert self._waiting.acquire(timeout=30)

    def pass_by(self) -> None:
        """One interval passes."""
        self._ends.put(False)
        self.settle()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "progress"]


def test_a_line_every_few_seconds_whether_or_not_it_is_called():
    beats, stream, now = Beats(), io.StringIO(), [100.0]
    with Progress(stream, stop=beats, clock=lambda: now[0]) as progress:
        beats.settle()
        assert stream.getvalue() == ""
        steps = [("", 0, 0), ("write", 1, 4), ("write", 3, 4), ("check", 0, 2), ("", 0, 0), ("tensors", 7, 0)]
        for number, (stage, done, total) in enumerate(steps):
            if stage:
                progress(stage, done, total)
            now[0] = 103.0 + 3 * number
            beats.pass_by()
        progress("write", 4, 4)
    assert stream.getvalue().splitlines() == [
        "at work: after 3 s", "write: 25% after 6 s", "write: 75% after 9 s", "check: 0% after 12 s",
        "check: 0% after 15 s", "tensors: 7 after 18 s",
    ]  # fmt: skip
    assert set(beats.timeouts) == {3.0}
    assert threads() == []


def test_short_work_prints_nothing():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("runs", 1, 1)
    assert stream.getvalue() == ""
    assert threads() == []


def test_the_thread_ends_with_an_error_too():
    def fail() -> None:
        with Progress(io.StringIO()):
            assert threads() == ["progress"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert threads() == []


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
def test_nobody_reads_the_lines(error):
    """The thread ends in silence; what it does not suppress would be a warning, so an error."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    beats = Beats()
    with Progress(Gone(), stop=beats) as progress:
        beats.settle()
        beats._ends.put(False)
        assert progress._thread is not None
        progress._thread.join(30)
        assert threads() == []
        progress("runs", 1, 2)


def test_what_files_say_is_printed_and_not_obeyed(capfd):
    terminal = Terminal(as_json=False)
    terminal.show(Result({}, ["measured on \x1b]0;mine\x07", "→ é"]))
    terminal.failed(LayeringError("no \x1b[2J", where="there\r", remedy="none"), 1)
    out, err = capfd.readouterr()
    assert out == "measured on \\x1b]0;mine\\x07\n→ é\n"
    assert "no \\x1b[2J" in err
    assert all(line.isprintable() for line in err.splitlines())
