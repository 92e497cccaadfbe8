"""How much memory this process takes and how much the machine has left. Reads /proc; imports nothing of ours.

Where /proc lacks a file (not Linux), the numbers are 0, which callers show as unknown.
"""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")


def current_rss_bytes() -> int:
    """Resident set size of this process, in bytes."""
    return _field(_STATUS, "VmRSS")


def peak_rss_bytes() -> int:
    """Largest resident set size since the process began or since `reset_peak`, in bytes."""
    return _field(_STATUS, "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Let `peak_rss_bytes` count from here on; without effect where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def available_bytes() -> int:
    """What the machine can still give: MemAvailable, or less where a memory cgroup allows less; 0 if unknown."""
    available = _field(_MEMINFO, "MemAvailable")
    room = _cgroup_room()
    return available if room is None else min(available, room)


def _field(file: Path, name: str) -> int:
    try:
        text = file.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_room() -> int | None:
    """Bytes, at least 1, that this process's memory cgroup (version 2 or 1) and those above allow; None: no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            top, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif controllers == "":
            top, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        else:
            continue
        group = top / path.lstrip("/")
        groups = [group, *(above for above in group.parents if above.is_relative_to(top))]
        rooms = [room for above in groups if (room := _room(above, limit, usage)) is not None]
        if rooms:
            return max(1, min(rooms))
    return None


def _room(group: Path, limit: str, usage: str) -> int | None:
    """Bytes until the limit of one group, page cache it could drop not counted."""
    try:
        room = int((group / limit).read_text()) - int((group / usage).read_text())
        stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
        return room + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
