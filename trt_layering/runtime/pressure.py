"""Whether the machine is short of memory, and how much of its budget a deployment uses meanwhile.

Reads /proc and /sys; imports nothing of ours. Where the kernel tells nothing, there is no pressure; nothing here fails.
"""

from __future__ import annotations

import re
from math import inf
from pathlib import Path

_STALLED = 5.0
"""Percent of the last ten seconds in which nothing could run for want of memory, from which on it is real."""
_SLOWED = 10.0
"""Percent in which something had to wait for memory, which counts where a limit was met as well."""
_CALM = 30.0
"""Seconds without pressure before memory is taken back, and between the steps in which it is."""
_LONGEST = 600.0
_STEPS = 4
_KILLS = ("oom", "oom_kill", "oom_group_kill")
_LIMITS = ("high", "max")


class Pressure:
    """What the kernel says, of the memory cgroup of this process where it has one, or of the machine. `root` is
    replaced by tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        group = _group(root)
        stalls = [group / "memory.pressure"] if group else []
        self._stalls = [*stalls, root / "proc/pressure/memory"]
        self._events = group / "memory.events" if group else None
        self._counts = self._count()

    def look(self) -> str | None:
        """In words, how short memory is; None while it is not. Events count from one look to the next."""
        before, self._counts = self._counts, self._count()
        rose = {name for name, count in self._counts.items() if count > before.get(name, count)}
        text = next((text for file in self._stalls if (text := _text(file))), "")
        some, full = _average(text, "some"), _average(text, "full")
        if rose.intersection(_KILLS):
            return "the kernel killed for want of memory"
        if full >= _STALLED:
            return f"nothing could run for want of memory in {full:g} % of the last ten seconds"
        if some >= _SLOWED and rose.intersection(_LIMITS):
            return f"the memory limit was met, and waiting for memory took {some:g} % of the last ten seconds"
        return None

    def _count(self) -> dict[str, int]:
        return {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", _text(self._events), re.MULTILINE)}


class Relief:
    """How much of the budget beyond the floors is used: nothing as soon as memory is short, and when it has not been
    for a while, more in steps. Each time that it gets short again, the while is twice as long."""

    def __init__(self) -> None:
        self.level: float | None = None
        """From 0 to 1, None for all of it."""
        self.words: str | None = None
        """Why it is not all of it."""
        self._calm_since = 0.0
        self._wait = _CALM
        self._grown_at = -inf

    def update(self, words: str | None, now: float) -> bool:
        """Take note of what `Pressure.look` says; whether `level` is another one now."""
        before = self.level
        if words is not None:
            self._calm_since = now
            if self.level != 0:
                soon = self.level is not None or now - self._grown_at < _LONGEST
                self._wait = min(2 * self._wait, _LONGEST) if soon else _CALM
                self.level, self.words = 0.0, words
        elif self.level is not None and now - self._calm_since >= self._wait:
            self._calm_since = now
            self.level += 1 / _STEPS
            if self.level >= 1:
                self.level, self.words, self._grown_at = None, None, now
        return self.level != before


def _group(root: Path) -> Path | None:
    """The folder of this process's cgroup of version 2, if it has one of its own."""
    found = re.search(r"^0::/(.+)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    return root / "sys/fs/cgroup" / found[1] if found else None


def _average(text: str, kind: str) -> float:
    found = re.search(rf"^{kind} avg10=([0-9.]+) ", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _text(file: Path | None) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace") if file else ""
    except OSError:
        return ""
