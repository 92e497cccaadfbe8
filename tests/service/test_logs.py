"""The service's log: one line an event, what the journal reads of it, and what must never be in it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.errors import CorruptError
from trt_layering.service.logs import Form, event, is_journal, logging_to

log = logging.getLogger("trt_layering")
ANY_TEXT = st.text(st.characters(exclude_categories=[]))
SECRET = "hunter2-0123456789abcdef"


def logged(*arguments: Any, form: Form = "text", level: int = logging.INFO, **fields: object) -> str:
    """What one event of `level` writes."""
    stream = io.StringIO()
    with logging_to(stream, form=form, environment={}):
        if fields:
            event(log, level, *arguments, **fields)
        else:
            log.log(level, *arguments)
    return stream.getvalue()


def line(text: str) -> str:
    """The one line of `text`, without its time."""
    assert text.endswith("\n")
    assert text.count("\n") == 1
    time, _, rest = text[:-1].partition(" ")
    assert datetime.fromisoformat(time.replace("Z", "+00:00")).tzinfo is not None
    return rest


class TestPeople:
    def test_a_line(self) -> None:
        assert line(logged("model loaded", model="finder", version=3, seconds=0.25, resident=True, reason=None)) == (
            "info model loaded model=finder version=3 seconds=0.25 resident=true reason=none"
        )

    def test_words_with_blanks_are_quoted(self) -> None:
        assert (
            line(logged("failed", reason='it said "no"', empty="")) == r'info failed reason="it said \"no\"" empty=""'
        )

    def test_an_error_is_one_line_with_where_it_came_from(self) -> None:
        stream = io.StringIO()
        with logging_to(stream, environment={}):
            try:
                raise CorruptError("the store changed", where="engines/finder/1", remedy="build it again")
            except CorruptError as error:
                log.exception("model %s: %s", "finder", error)
        told = line(stream.getvalue())
        ours = "the store changed; where: engines/finder/1; to do: build it again"
        assert told.startswith(f'error model finder: {ours} error="CorruptError: {ours} at test_logs.py:')
        assert told.endswith(' test_an_error_is_one_line_with_where_it_came_from"')

    def test_what_is_long_is_cut(self) -> None:
        told = logged("%s", "x" * 100_000)
        assert len(told) < 8300
        assert told.endswith(" (cut)\n")


class TestPrograms:
    def test_an_object_a_line(self) -> None:
        told = logged("model loaded", form="json", model="finder", share=float("inf"), version=np.int64(3))
        assert told.count("\n") == 1
        found = json.loads(told)
        assert datetime.fromisoformat(found.pop("time").replace("Z", "+00:00")).tzinfo is not None
        assert found == {
            "level": "info", "logger": "trt_layering", "message": "model loaded", "model": "finder", "share": "inf",
            "version": 3,
        }  # fmt: skip

    def test_a_field_cannot_take_the_place_of_what_is_always_there(self) -> None:
        found = json.loads(logged("stopped", form="json", level=logging.ERROR, logger="x", message="y", time="z"))
        assert (found["level"], found["logger"], found["message"]) == ("error", "trt_layering", "stopped")

    def test_an_error(self) -> None:
        stream = io.StringIO()
        with logging_to(stream, form="json", environment={}):
            try:
                raise OSError(5, "drive\ngone")
            except OSError:
                log.exception("read failed")
        assert json.loads(stream.getvalue())["error"].startswith("OSError: [Errno 5] drive\ngone at test_logs.py:")


@pytest.mark.parametrize("form", ["text", "json"])
class TestEveryForm:
    @given(ANY_TEXT, ANY_TEXT, ANY_TEXT)
    def test_names_bring_no_lines_of_their_own(self, form: Form, name: str, key: str, value: str) -> None:
        for told in (logged("%s", name, form=form), logged(name, form=form, **{f"f{key}": value})):
            assert told.endswith("\n")
            assert told[:-1].isprintable()

    @pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
    def test_tensors_are_told_by_their_type(self, form: Form, dtype: str) -> None:
        tensor = np.arange(77, 83).reshape(2, 3).astype(dtype)
        for told in (
            logged("out: %s", tensor, form=form),
            logged("out: %(out)s", {"out": tensor}, form=form),
            logged("out", form=form, out=tensor),
        ):
            assert f"(ndarray {dtype} 2x3)" in told
            assert "77, 78" not in told
            assert "[77" not in told
        assert "[1.5" not in logged("out: %s %s", [1.5, 2.5], (1.5,), form=form)
        assert "RIFF" not in logged("body: %s", b"RIFF", form=form)

    def test_numbers_of_arrays_are_numbers(self, form: Form) -> None:
        assert "took 1.50 s for 7" in logged("took %.2f s for %d", np.float32(1.5), np.int64(7), form=form)

    @pytest.mark.parametrize("name", ["token", "service_token", "Authorization", "password", "api_key"])
    def test_secrets_are_left_out(self, form: Form, name: str) -> None:
        told = logged("refused", form=form, **{name: SECRET})
        assert SECRET not in told
        assert "(hidden)" in told
        for words in (f"header Authorization: Bearer {SECRET} refused", f'{{"a": "bearer {SECRET}"}}'):
            told = logged("%s", words, form=form)
            assert SECRET not in told
            assert "refused" in told or '"}' in told.replace("\\", "")
            assert SECRET not in logged("refused", form=form, header=words)

    def test_a_message_that_does_not_fit_is_told_as_it_is(self, form: Form) -> None:
        assert "took %d s" in logged("took %d s", "long", form=form)
        assert "took %(s)d" in logged("took %(s)d", {"t": 1}, form=form)


class TestPriorities:
    @pytest.fixture
    def journal(self, tmp_path: Path) -> Iterator[IO[str]]:
        with (tmp_path / "journal").open("w+") as stream:
            yield stream

    def names(self, stream: IO[str]) -> dict[str, str]:
        status = os.fstat(stream.fileno())
        return {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_levels_are_priorities_in_the_journal(self, journal: IO[str], form: Form) -> None:
        with logging_to(journal, form=form, level=logging.DEBUG, environment=self.names(journal)):
            for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
                log.log(level, "<0>hello")
        journal.seek(0)
        lines = journal.read().splitlines()
        assert [text[:3] for text in lines] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
        if form == "text":  # the journal has the time and the level
            assert {text[3:] for text in lines} == {"<0>hello"}
        else:
            assert json.loads(lines[0][3:])["message"] == "<0>hello"

    def test_anything_else_is_not_the_journal(self, journal: IO[str], tmp_path: Path) -> None:
        names = self.names(journal)
        assert is_journal(journal, names)
        assert not is_journal(journal, {})
        assert not is_journal(io.StringIO(), names)
        with (tmp_path / "other").open("w") as other:
            assert not is_journal(other, names)
        assert not is_journal(other, names)  # closed


class TestScope:
    def test_libraries_and_warnings_speak_in_the_same_form(self) -> None:
        stream = io.StringIO()
        with logging_to(stream, environment={}), warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.getLogger("uvicorn.error").info("Uvicorn running")
            logging.getLogger("uvicorn.error").warning("slow\nclient")
            warnings.warn("old\nway", stacklevel=1)
        lines = stream.getvalue().splitlines()
        assert re.sub(r"^\S+ ", "", lines[0]) == r"warning slow\nclient"
        assert len(lines) == 2
        assert r"old\nway" in lines[1]

    def test_what_was_set_before_is_set_again(self) -> None:
        root = logging.getLogger()
        before = root.handlers[:], root.level, log.level, logging.raiseExceptions, warnings.showwarning
        with logging_to(io.StringIO(), level=logging.DEBUG, environment={}):
            assert log.isEnabledFor(logging.DEBUG)
        assert (root.handlers[:], root.level, log.level, logging.raiseExceptions, warnings.showwarning) == before

    def test_a_stream_that_is_gone_stops_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Gone(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError

        with logging_to(Gone(), environment={}):
            log.info("hello")
        assert capfd.readouterr().err == ""
