"""Tables of schedules made to do harm, or harmed: the chain opens all the same, answers as ever, and says so once."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from tests import timed
from tests.chains import assert_close, feed, layers, uncut
from trt_layering import planning
from trt_layering.planning import Forecast
from trt_layering.runtime import schedules
from trt_layering.runtime.chain import open_chain
from trt_layering.store.manifest import SCHEDULES_FILE, read_manifest

pytestmark = pytest.mark.usefixtures("engines_take_what_the_manifest_says", "quick_collections")

LAYERS = 6
Table = list[dict[str, Any]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedules")
    timed.build(folder, "a", LAYERS)
    return folder


@pytest.fixture(scope="module")
def budget(original: Path) -> int:
    return timed.needs(original, "a").fixed + 3 * timed.SIZE


@pytest.fixture(scope="module")
def told(original: Path, budget: int) -> Forecast:
    return planning.forecast("a", repository=original, budget=budget)


@pytest.fixture
def repository(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "engines"))


def path_of(repository: Path) -> Path:
    return repository / "a" / "1" / SCHEDULES_FILE


def sealed(table: Any, made_for: str) -> bytes:
    """A file that says that it is whole."""
    raw = json.dumps(table, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(raw.encode())
    return f'{{"digest":"{digest}","made_for":"{made_for}","table":{raw}}}'.encode()


def forge(path: Path, edit: Callable[[Table], object]) -> None:
    """Change the table, with a digest that is right."""
    content = json.loads(path.read_bytes())
    edit(content["table"])
    path.write_bytes(sealed(content["table"], content["made_for"]))


def assert_made_again(repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture) -> None:
    """Opening, running and telling beforehand give what they give with the right table, and each says so once."""
    with caplog.at_level(logging.WARNING, logger="trt_layering"):
        for size in (budget, told.floor_bytes):
            with open_chain("a", repository=repository, budget=size) as chain:
                for _ in range(2):
                    assert_close(uncut(layers(LAYERS), feed(), optimised=True), chain.run(feed()))
                stats = chain.stats()
            assert [note for note in stats["fallbacks"] if SCHEDULES_FILE in note] == [schedules._MADE_NOW]
        assert sum("made again" in record.getMessage() for record in caplog.records) == 2
        caplog.clear()
        assert planning.forecast("a", repository=repository, budget=budget) == told
    assert ["made again" in record.getMessage() for record in caplog.records] == [True]


def test_the_table_that_the_attacks_start_from_is_used(
    repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture
) -> None:
    for edit in (lambda table: None, lambda table: table[-1].update(seconds=table[-1]["seconds"] / 2)):
        forge(path_of(repository), edit)
        with caplog.at_level(logging.WARNING, logger="trt_layering"):
            assert planning.forecast("a", repository=repository, budget=budget).predicted_ms == told.predicted_ms
            with open_chain("a", repository=repository, budget=budget) as chain:
                assert chain.stats()["mode"] == told.mode
                assert chain.stats()["predicted_seconds"] * 1e3 == told.predicted_ms
        assert not caplog.records


# ------------------------------------------------------------------------------------------------------------ the file


def missing(path: Path) -> None:
    path.unlink()


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "elsewhere")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def padded(path: Path) -> None:
    """As it should be, but for its length."""
    path.write_bytes(path.read_bytes().ljust(schedules.LIMIT + 1))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def rubbish(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def deep(path: Path) -> None:
    path.write_bytes(b'{"table":' + b"[" * 100_000)


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"\xff\xfe":1}')


def of_the_first_form(path: Path) -> None:
    """Without a digest."""
    content = json.loads(path.read_bytes())
    del content["digest"]
    path.write_text(json.dumps(content))


def one_digit(path: Path) -> None:
    """A number changed after the table was written."""
    data = path.read_bytes()
    at = data.index(b'"resident_bytes":') + len(b'"resident_bytes":')
    path.write_bytes(data[:at] + (b"4" if data[at : at + 1] != b"4" else b"8") + data[at + 1 :])


def of_another_chain(path: Path) -> None:
    folder = path.parent
    chain = read_manifest(folder)
    quicker = msgspec.structs.replace(chain.profile, read_rate=1e9)
    schedules.write_table(folder, msgspec.structs.replace(chain, profile=quicker))


FILES = [
    missing, directory, dangling_link, hard_link, fifo, device, sparse, padded, empty, half, last_byte, rubbish, deep,
    not_utf8, of_the_first_form, one_digit, of_another_chain,
]  # fmt: skip


@pytest.mark.parametrize("attack", FILES)
def test_a_file_that_is_no_table(
    repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture, attack: Callable[[Path], None]
) -> None:
    attack(path_of(repository))
    assert_made_again(repository, budget, told, caplog)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_opened(
    repository: Path,
    budget: int,
    told: Forecast,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    real = os.open

    def refuse(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).endswith(SCHEDULES_FILE):
            raise OSError(number, os.strerror(number))
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert_made_again(repository, budget, told, caplog)


def test_a_file_that_cannot_be_read(
    repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, mode: str) -> Any:
        os.close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(schedules, "open", fail, raising=False)
    assert_made_again(repository, budget, told, caplog)


# --------------------------------------------------------------------------------------------- a digest that is right


def put(place: int, key: str, value: Any) -> Callable[[Table], object]:
    return lambda table: table[place].update({key: value})


def each(key: str, value: Any) -> Callable[[Table], object]:
    return lambda table: [choice.update({key: value}) for choice in table]


def shift(key: str, by: Any) -> Callable[[Table], object]:
    return lambda table: [choice.update({key: [one + by for one in choice[key]]}) for choice in table]


EDITS: dict[str, Callable[[Table], object]] = {
    "no choice": lambda table: table.clear(),
    "none for the floor": lambda table: table.pop(0),
    "upside down": lambda table: table.reverse(),
    "one twice": lambda table: table.insert(0, table[0]),
    "slower with more": put(-1, "seconds", 1e6),
    "negative time": put(-1, "seconds", -1.0),
    "no time": put(-1, "seconds", None),
    "endless": lambda table: [choice.update(seconds=1e308 * 10) for choice in table],
    "time in words": each("seconds", "1"),
    "true seconds": each("seconds", True),
    "true arena": put(0, "arena_bytes", True),
    "negative arena": put(0, "arena_bytes", -1),
    "no arena": put(0, "arena_bytes", 0),
    "fractions of bytes": put(0, "arena_bytes", 16384.5),
    "more than 64 bits": put(0, "streamed_bytes", 1 << 70),
    "negative bytes": put(0, "streamed_bytes", -4096),
    "other bytes": put(0, "streamed_bytes", 0),
    "no parts": each("parts", []),
    "parts that are not there": shift("parts", 1000),
    "the next parts": shift("parts", 1),
    "negative parts": shift("parts", -1),
    "true parts": lambda table: table[0]["parts"].__setitem__(1, True),
    "parts as floats": shift("parts", 0.5),
    "parts backwards": lambda table: table[0]["parts"].reverse(),
    "one part less": lambda table: [choice["parts"].pop() and choice["offsets"].pop() for choice in table],
    "no offsets": each("offsets", []),
    "one offset less": lambda table: [choice["offsets"].pop() for choice in table],
    "negative offsets": shift("offsets", -4096),
    "offsets inside pages": shift("offsets", 64),
    "offsets outside the arena": shift("offsets", 1 << 40),
    "one page too far": shift("offsets", 4096),
    "offsets as floats": shift("offsets", 0.5),
    "something missing": lambda table: [choice.pop("parts") for choice in table],
}


@pytest.mark.parametrize("name", EDITS)
def test_a_table_with_a_right_digest_and_wrong_numbers(
    repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    forge(path_of(repository), EDITS[name])
    assert_made_again(repository, budget, told, caplog)


@pytest.mark.parametrize("table", [None, 7, "table", {}, [None], [[]], [{}]])
def test_something_else_in_the_place_of_the_table(
    repository: Path, budget: int, told: Forecast, caplog: pytest.LogCaptureFixture, table: Any
) -> None:
    path = path_of(repository)
    path.write_bytes(sealed(table, json.loads(path.read_bytes())["made_for"]))
    assert_made_again(repository, budget, told, caplog)
