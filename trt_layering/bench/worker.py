"""A process that holds one subject open and runs it when told to, and the parent's hold on it.

Requests and answers are JSON, one a line, over the child's standard input and output. May import `child`, errors, the
meter and, in the child, subjects. A child that ends without an answer raises EndedError in the parent, one that does
not answer in time is ended and raises it, too; the child's own errors are raised as they were. A child whose parent is
gone ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from trt_layering import child
from trt_layering.errors import BackendError, LayeringError

if TYPE_CHECKING:
    from trt_layering.bench.cgroup import MemoryGroup

_START = """
import sys
if sys.argv[1]:
    with open(sys.argv[1], "w") as procs:
        procs.write("0")
from trt_layering.bench.worker import main
main()
"""
_PATIENCE = 600.0
_TAIL = 2000


class EndedError(BackendError):
    """A subject's process ended, or had to be ended, before it answered."""


class Worker:
    """The parent's side: a process of its own for `task`, inside memory group `group` if given, until `close`."""

    def __init__(
        self, label: str, task: Mapping[str, Any], group: MemoryGroup | None = None, patience: float = _PATIENCE
    ) -> None:
        """`label` names it in errors; it must answer within `patience` seconds. The subject is open after this."""
        self._label = label
        self._patience = patience
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        command = [sys.executable, "-c", _START, str(group.procs) if group else ""]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, env=child.environment()
        )
        try:
            self.opened = self.ask(task)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The child's answer to `request`. Raises what the child raised of ours, and EndedError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer: dict[str, Any] = json.loads(self._line())
        if "error" in answer:
            raise child.as_raised(answer)
        return answer

    def _line(self) -> bytes:
        """The next whole line of the child's."""
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + self._patience
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._process.kill()
                raise self._ended(f"did not answer within {self._patience:.0f} seconds")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise self._ended()
            line += part
        return line

    def _ended(self, how: str = "") -> EndedError:
        how = how or child.how_it_ended(self._process.wait())
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _TAIL))
        last = self._said.read().decode(errors="replace").strip().splitlines()[-1:]
        return EndedError(
            f"its process {how}: {''.join(last) or 'it said nothing'}",
            where=self._label,
            remedy="signal 9 mostly means that memory ran out: stop other programs, or leave this subject out",
        )

    def close(self) -> None:
        """End the child; it has nothing to lose."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was still to be written to a child that is gone
                    continue

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """The child: its task is the first line; then requests, until there are no more. What libraries print goes to
    standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    child.end_with_the_parent()
    child.offer_to_the_kernel()
    from trt_layering.bench.subjects import opened

    try:
        subject, answer = opened(json.loads(sys.stdin.readline()))
        print(json.dumps(answer), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(subject.answer(json.loads(line))), file=answers, flush=True)
    except (OSError, MemoryError, LayeringError) as error:
        print(json.dumps(child.as_told(error)), file=answers, flush=True)
