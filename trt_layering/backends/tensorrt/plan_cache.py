"""Finished plans in a folder that outlives builds, so that an interrupted build resumes with them.

May import errors and the store. An entry that is damaged is none, and said; what the disk refuses is a BuildError. Any
number of processes may use one folder: an entry is built by one of them while the others that want it wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from trt_layering.errors import LayeringError
from trt_layering.store.manifest import Count, Hash128, Magnitude, Text, plain_digest, sync_folder
from trt_layering.store.writer import disk_errors, locked

log = logging.getLogger("trt_layering")

_PLAN, _NOTES, _REFUSAL, _NEEDLESS = "plan", "plan.json", "refused", "needless"
_DRAFTS = "draft-*"


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of a plan: `digest` is the xxh3-128 (hex) of its `nbytes` bytes, `workspace` the bytes that
    building it might use, which took `seconds`; `scratch_bytes` and `refit_weights` are what its engine asks for."""

    digest: Hash128
    nbytes: Count
    workspace: Count
    seconds: Magnitude
    scratch_bytes: Count
    refit_weights: tuple[Text, ...]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    digest: str
    notes: msgspec.Raw


class Entry:
    """One plan's place in the cache, while its lock is held."""

    def __init__(self, folder: Path, words: str) -> None:
        self.plan = folder / _PLAN
        self.draft = folder / f"draft-{os.getpid()}"
        self._folder, self._words = folder, words

    def find(self) -> Notes | None:
        """The notes of the plan that lies there whole. What does not is removed; that it was damaged is logged."""
        if not os.path.lexists(self._folder / _NOTES):
            return None
        try:
            notes = _decode((self._folder / _NOTES).read_bytes())
            if plain_digest(self.plan) == notes.digest:
                return notes
            damage = "the plan is not as it was written"
        except (OSError, LayeringError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            damage = str(error).partition("\n")[0]
        log.warning("the kept plan of %s is damaged and is built again: %s", self._words, damage)
        (self._folder / _NOTES).unlink()
        return None

    def refusal(self) -> str:
        """Why there can be no such plan, as `refuse` was told; "" where that is not known."""
        try:
            return (self._folder / _REFUSAL).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def refuse(self, words: str) -> None:
        """Remember that there can be no such plan."""
        write_at_once(self._folder / _REFUSAL, words.encode())

    def keep(self, notes: Notes) -> None:
        """Make what lies at `draft` the plan. It counts once all of it and its notes are on the disk."""
        raw = msgspec.json.encode(notes)
        data = msgspec.json.encode(_Envelope(xxhash.xxh3_128_hexdigest(raw), msgspec.Raw(raw)))
        (self._folder / _NOTES).unlink(missing_ok=True)
        os.rename(self.draft, self.plan)
        write_at_once(self._folder / _NOTES, data)


class PlanCache:
    """The folder of plans. It is in use from the first entry until `prune` or `close`; nothing is removed from a folder
    that another process uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: set[str] = set()
        self._use = contextlib.ExitStack()

    @contextlib.contextmanager
    def entry(self, name: str, words: str) -> Iterator[Entry]:
        """The place called `name`, locked; `words` say whose it is. Waits while another process has it, which is
        logged."""
        folder = self._folder / name
        with disk_errors(folder):
            self._begin()
            self._asked.add(name)
            folder.mkdir(exist_ok=True)
            (folder / _NEEDLESS).unlink(missing_ok=True)
        with _held(folder, words), disk_errors(folder):
            _remove_drafts(folder)
            try:
                yield Entry(folder, words)
            finally:
                _remove_drafts(folder)

    def prune(self) -> int:
        """Remove the plans asked for so far, which a published chain has copies of, and what killed builds left of
        others; the bytes that this frees. While another process uses the folder they stay, for its `prune` to remove.
        """
        freed = 0
        with disk_errors(self._folder):
            for name in self._asked:
                (self._folder / name / _NEEDLESS).touch()
            self.close()
            if self._folder.is_dir():
                with locked(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
                    freed = sum(map(_remove_needless, self._folder.iterdir())) if alone else 0
        return freed

    def close(self) -> None:
        """What was built stays for the next build."""
        self._asked.clear()
        self._use.close()

    def _begin(self) -> None:
        if not self._asked:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._use.enter_context(locked(self._folder, fcntl.LOCK_SH))


def write_at_once(path: Path, data: bytes) -> None:
    """Write `data` so that at no moment a part of it is there under this name. Raises OSError."""
    draft = path.with_name(f"draft-{os.getpid()}-{path.name}")
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
    sync_folder(path.parent)


def _decode(data: bytes) -> Notes:
    envelope = msgspec.json.decode(data, type=_Envelope)
    if xxhash.xxh3_128_hexdigest(bytes(envelope.notes)) != envelope.digest:
        raise msgspec.ValidationError("its notes are not as they were written")
    return msgspec.json.decode(envelope.notes, type=Notes)


@contextlib.contextmanager
def _held(folder: Path, words: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)):
            log.warning("waiting for another build, which has %s", words)
            stack.enter_context(locked(folder, fcntl.LOCK_EX))
        yield


def _remove_drafts(folder: Path) -> None:
    for draft in folder.glob(_DRAFTS):
        draft.unlink()


def _remove_needless(entry: Path) -> int:
    """Remove `entry` whole where nobody needs it, else only what killed builds left of it; the bytes freed."""
    needless = (entry / _NEEDLESS).exists()
    doomed = sorted(entry.iterdir() if needless else entry.glob(_DRAFTS), reverse=True)  # notes before their plan
    freed = sum(file.stat().st_size for file in doomed)
    for file in doomed:
        file.unlink()
    if needless:
        entry.rmdir()
    return freed
