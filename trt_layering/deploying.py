"""The models of a deployment, built one after the other: what is up to date stays, and one that fails stops no other.

May import backends, building, config, the graph's reader, the store, table, terminal and words. What keeps a model from
being built is told as its outcome, not raised. A note beside the chains says what each was built from and how; where it
cannot be written or read, the model is built again the next time.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from trt_layering import backends
from trt_layering.errors import LayeringError
from trt_layering.store.manifest import Chain, file_digest, finished_versions, read_manifest, resolve
from trt_layering.store.reader import check_store
from trt_layering.table import columns
from trt_layering.terminal import Result, explain
from trt_layering.words import printable

if TYPE_CHECKING:
    from trt_layering.backends.base import Progress
    from trt_layering.building import Built
    from trt_layering.config import Model

log = logging.getLogger("trt_layering")

NOTES = ".built"
"""The folder beside the chains that has one note for each."""
_KEYS = {"memory": "build_memory"}
"""Settings that deployments call otherwise than `build` does."""
_FAILED, _INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Outcome:
    """What became of one model: `version` is the finished one that serves it now, if there is any, and `why` what
    failed, or why it had to be built."""

    name: str
    state: Literal["built", "up to date", "failed", "interrupted", "not begun"]
    version: int | None = None
    seconds: float = 0.0
    why: str = ""


def build_all(
    models: Sequence[Model],
    repository: Path,
    progress: Callable[[str], AbstractContextManager[Progress]],
    tell: Callable[[str], None],
) -> list[Outcome]:
    """Build those of `models` that are not up to date in `repository`, in their order; an outcome for each.

    `progress` gives, for a model's name, what is told how far its build is; `tell` gets a line or more as things
    happen. A KeyboardInterrupt ends the build under way; its model and those after it are told so.
    """
    outcomes: list[Outcome] = []
    try:
        for model in models:
            outcomes.append(_built_or_why_not(model, repository, progress, tell))
    except KeyboardInterrupt:
        rest = [model.name for model in models[len(outcomes) :]]
        outcomes += [Outcome(name, "interrupted" if name == rest[0] else "not begun") for name in rest]
    return outcomes


def _built_or_why_not(
    model: Model,
    repository: Path,
    progress: Callable[[str], AbstractContextManager[Progress]],
    tell: Callable[[str], None],
) -> Outcome:
    begin = time.monotonic()
    try:
        why = stale(model, repository)
        if why is None:
            version = int(resolve(repository, model.name).name)
            tell(f"{model.name}: up to date, version {version}")
            return Outcome(model.name, "up to date", version)
        tell(f"{model.name}: building, since {why}")
        with progress(model.name) as report:
            built = build(model, repository, report)
        seconds = time.monotonic() - begin
        tell(f"{model.name}: built version {built.path.name} in {seconds:.1f} s")
        return Outcome(model.name, "built", int(built.path.name), seconds, why)
    except Exception as error:
        explained = explain(error)
        tell(f"{model.name}: failed: {explained}")
        return Outcome(model.name, "failed", _newest(repository, model), time.monotonic() - begin, explained.what)


def _newest(repository: Path, model: Model) -> int | None:
    try:
        return next(reversed(finished_versions(repository, model.name)), None)
    except LayeringError:
        return None


def told(outcomes: Sequence[Outcome]) -> Result:
    """A line for each model and one about all; status 1 if any failed, 130 if it was interrupted."""
    rows: list[tuple[str, ...]] = [("model", "state", "version", "seconds", "why")]
    rows += [
        (
            one.name, one.state, "none" if one.version is None else str(one.version),
            f"{one.seconds:.1f}" if one.seconds else "-", one.why,
        )
        for one in outcomes
    ]  # fmt: skip
    states = [one.state for one in outcomes]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    status = _INTERRUPTED if "interrupted" in states else _FAILED if "failed" in states else 0
    return Result({"models": [asdict(one) for one in outcomes]}, [*columns(rows), "", ", ".join(counts)], status)


# --------------------------------------------------------------------------------------- one model, and its note


def build(model: Model, repository: Path, progress: Progress) -> Built:
    """Build `model` and note how, for `stale`. Raises what `building.build` does."""
    from trt_layering import building

    wanted = model.for_build()
    built = building.build(**wanted, repository=repository, progress=progress)
    note = _note(wanted, _sources(wanted["model"]), built.path, built.manifest)
    _write_note(_note_file(repository, model.name), note)
    return built


def stale(model: Model, repository: Path) -> str | None:
    """Why `model` has to be built in `repository`, in words; None if its newest finished version was built from the
    same bytes with the same settings by what this machine would build it with, and is whole.

    Its engines are read and compared with their digests; of its weights, only that they are as many bytes as they
    should be. Raises UsageError, ModelError and BackendError for what could not be built either.
    """
    if _newest(repository, model) is None:
        return "there is no finished version"
    try:
        folder = resolve(repository, model.name)
        chain = read_manifest(folder)
        check_store(folder, chain)
    except LayeringError as error:
        return f"the one there cannot be used: {error.what}"
    wanted = model.for_build()
    note, before = _note(wanted, _sources(wanted["model"]), folder, chain), _read_note(repository, model.name)
    if (before.get("version"), before.get("chain")) != (note["version"], note["chain"]):
        return f"nothing is known of how version {folder.name} was built"
    if before.get("sources") != note["sources"] or chain.source_digest != note["sources"][wanted["model"].name]:
        return "the model has changed"
    changed = sorted(_changed(before.get("settings"), note["settings"]))
    return f"it was built with another {', '.join(changed)}" if changed else _foreign(wanted["backend"], chain)


def _foreign(backend: str, chain: Chain) -> str | None:
    """What of the machine that built `chain` is not as it is here."""
    here, there = backends.builder(backend), chain.backend
    if here.name != there.name:
        return f"it was built for {there.name}, and this machine has {here.name}"
    if here.version() != there.version:
        return f"it was built by {here.name} {there.version}, and this machine has {here.version()}"
    changed = sorted(_changed(there.fingerprint, here.fingerprint()))
    return f"it was built on a machine with another {', '.join(changed)}" if changed else None


def _changed(before: object, now: Mapping[str, object]) -> Iterable[str]:
    known = before if isinstance(before, Mapping) else {}
    return (key for key in {*known, *now} if known.get(key) != now.get(key))


def _note(wanted: Mapping[str, Any], sources: Mapping[str, str], folder: Path, chain: Chain) -> dict[str, Any]:
    """What is compared: how `folder` was built, and what marks its chain out, which measuring it again leaves alone."""
    settings = {_KEYS.get(key, key): value for key, value in wanted.items() if key not in ("model", "name")}
    marks = xxhash.xxh3_128_hexdigest(msgspec.json.encode((chain.extents, chain.blocks)))
    note = {"version": folder.name, "chain": marks, "sources": sources, "settings": settings}
    plain: dict[str, Any] = json.loads(json.dumps(note, default=str))
    return plain


def _sources(model: Path) -> dict[str, str]:
    """The digests of the files of `model`, by their paths from its folder. Raises ModelError and ReadError."""
    from trt_layering.graph.model import open_model
    from trt_layering.graph.stored import StoredTensor

    graph = open_model(model).graph
    tensors = (value.const_value for part in (graph, *graph.subgraphs()) for value in part.initializers.values())
    files = {model.absolute(), *(tensor.file.path for tensor in tensors if isinstance(tensor, StoredTensor))}
    return {os.path.relpath(file, model.absolute().parent): file_digest(file) for file in sorted(files)}


def _note_file(repository: Path, name: str) -> Path:
    return Path(repository) / NOTES / f"{name}.json"


def _read_note(repository: Path, name: str) -> dict[str, Any]:
    try:
        note = json.loads(_note_file(repository, name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _write_note(file: Path, note: Mapping[str, Any]) -> None:
    draft = file.with_name(f"{file.name}.{os.getpid()}.draft")
    try:
        file.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps(note, indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        log.warning("%s cannot be written, so the model will be built again: %s", file, printable(str(error)))
