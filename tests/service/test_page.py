"""The status page: whole and small whatever there is to show, every text escaped, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.snapshots import MIB, Snapshots, history, idle, state, sweep, unavailable
from trt_layering.runtime.trace import Event
from trt_layering.service import charts
from trt_layering.service.page import HEADERS, page
from trt_layering.service.style import STYLE
from trt_layering.store.manifest import Value

NAMES = ["line", "minilm", "resnet152"]
EMPTY = {"meta", "path"}
NASTY = "<b>&\"'</style><script>x</script>"


class Strict(HTMLParser):
    """Refuses tags that are not balanced; keeps which there were, their attributes and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data + " "


def eight() -> Snapshots:
    names = [f"model-{place}" for place in range(8)]
    shown = [state(name, budget_bytes=(4 + place) * MIB, last_sweep=sweep(300, 4)) for place, name in enumerate(names)]
    return Snapshots(shown, history(names))


SCENES = {
    "three": lambda: Snapshots([state(name) for name in NAMES], history(NAMES)),
    "one": lambda: Snapshots([state()], history(["line"])),
    "eight": eight,
    "nothing served yet": lambda: Snapshots([idle(), idle("minilm", state="loading", version=None)]),
    "all unavailable": lambda: Snapshots([unavailable(name) for name in NAMES]),
    "unloaded after serving": lambda: Snapshots([state(state="unloaded", budget_bytes=0)], history(["line"])),
    "no models": Snapshots,
    "a budget of nothing": lambda: Snapshots([unavailable()], budget_bytes=0),
    "memory pressure": lambda: Snapshots([state()], pressure="memory is short"),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_page_is_whole_small_and_needs_nothing_else(scene):
    text = page(SCENES[scene]())
    read = Strict(text)
    assert len(text.encode()) < 60_000
    assert not read.tags & {"script", "link", "img", "iframe", "form", "object"}
    assert not {name for _, name, _ in read.attributes} & {"href", "src", "style", "onclick", "onload"}
    assert "nan" not in re.findall(r"\w+", text)


@pytest.mark.parametrize("scene", SCENES)
def test_every_picture_says_what_it_shows(scene):
    read = Strict(page(SCENES[scene]()))
    labels = [value for tag, name, value in read.attributes if (tag, name) == ("svg", "aria-label")]
    roles = [value for tag, name, value in read.attributes if (tag, name) == ("svg", "role")]
    assert len(labels) == len(roles)
    assert all(labels)


def test_texts_of_others_are_text_wherever_they_stand():
    value = Value(name=NASTY, dtype="float32", shape=(NASTY, None))
    shown = state(NASTY, backend=NASTY, reason=NASTY, fallbacks=(NASTY,), inputs=(value,), outputs=(value,))
    text = page(Snapshots([shown], history([NASTY]), pressure=NASTY))
    read = Strict(text)
    assert read.text.count(NASTY) >= 7
    assert "<b>&" not in text
    assert "<script" not in text


@given(st.text(max_size=80))
def test_any_text_is_escaped_and_shown(words):
    read = Strict(page(Snapshots([unavailable(reason=words)])))
    assert read.tags == Strict(page(Snapshots([unavailable(reason="x" if words else "")]))).tags


def test_control_characters_are_written_out():
    assert "\x1b" not in page(Snapshots([unavailable(reason="\x1b[31m\0")]))


def test_long_texts_and_lists_are_cut_short():
    many = tuple(Value(name=f"input{number}", dtype="float32", shape=(1,)) for number in range(10_000))
    text = page(Snapshots([state("n" * 128, inputs=many, fallbacks=("x" * 100_000,) * 50)]))
    assert len(text.encode()) < 30_000
    assert "and 9,992 more" in text
    assert "and 42 more" in text


def test_the_policy_allows_this_style_sheet_and_nothing_else():
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "unsafe" not in policy
    assert f"<style>{STYLE}</style>" in page(Snapshots())


def test_the_summary_says_what_is_ready_waits_and_was_missed():
    read = Strict(page(Snapshots([state(), unavailable("minilm"), idle("resnet152", queued=1)])))
    assert "2 of 3 models ready; 3 requests wait; 5 deadlines missed" in read.text
    assert "weights.bin was truncated; build the chain again" in read.text


def test_memory_says_who_has_how_much():
    read = Strict(page(Snapshots([state(), state("minilm", budget_bytes=40 * MIB)], budget_bytes=96 * MIB)))
    assert "Budget 96.0 MiB: 72.0 MiB given to models, 24.0 MiB free." in read.text
    assert "40.0 MiB, 9.0 MiB of it resident; floor 18.0 MiB" in read.text


def test_numbers_of_a_model_are_in_words_people_know():
    read = Strict(page(Snapshots([state(fallbacks=("direct I/O is not possible here",))], history(["line"]))))
    words = " ".join(read.text.split())
    parts = ["requests 1,234", "predicted 41 ms", "waiting in sweeps 23%", "in a wave 1.9, at most 4", "failed 3"]
    for part in [*parts, "deadlines missed 5", "direct I/O is not possible here", "float32 1x1x64xwidth"]:
        assert part in words


def test_without_requests_there_are_words_in_place_of_curves():
    quiet = Strict(page(Snapshots([idle()], history(["line"])[180:210])))
    assert "No requests in the last 5 min." in quiet.text
    assert "min ago" not in quiet.text


@pytest.mark.parametrize(("seconds", "since"), [(2, "60 s"), (90, "89 s"), (200, "3 min"), (301, "5 min")])
def test_curves_reach_back_as_far_as_there_are_samples(seconds, since):
    assert f"{since} ago" in Strict(page(Snapshots([state()], history(["line"], seconds)))).text


def test_a_budget_that_is_overdrawn_for_a_moment_is_drawn_within_the_bar():
    text = page(
        Snapshots([state(budget_bytes=80 * MIB), state("minilm", budget_bytes=80 * MIB)], budget_bytes=96 * MIB)
    )
    assert " free" not in Strict(text).text
    assert max(map(int, re.findall(r"M(\d+) ", text))) <= charts.WIDTH


# ------------------------------------------------------------------------------------------------------------ charts


def test_a_timeline_begins_with_the_sweep_and_tells_what_came_before():
    drawn = charts.timeline(sweep(12), most=200)
    assert drawn is not None
    assert drawn.seconds == pytest.approx(12 * 0.002 + 3 * 0.003)
    assert drawn.waited == pytest.approx(3 * 0.003)
    assert (drawn.blocks, drawn.lanes, drawn.ahead, drawn.next_reads) == (12, 2, 2, 2)
    assert [box.style for box in drawn.executions][:4] == ["odd", "even", "odd", "wait"]
    assert {box.style for box in drawn.reads} == {"odd", "even", "next-odd", "next-even"}


def test_reads_long_before_the_sweep_do_not_squeeze_it():
    early = [Event("read", 0, 7, 1.0, 1.1, MIB)]
    drawn = charts.timeline([*early, *sweep(12)], most=200)
    assert drawn is not None
    assert drawn.seconds < 0.1


@pytest.mark.parametrize("events", [(), [Event("read", 0, 0, 0.0, 1.0, 5)], [Event("execute", 0, 0, 1.0, 1.0, 0)]])
def test_nothing_executed_is_no_timeline(events):
    assert charts.timeline(events, most=100) is None


@pytest.mark.parametrize("most", [1, 7, 48, 240])
def test_a_long_sweep_is_drawn_in_few_boxes_without_a_gap(most):
    drawn = charts.timeline(sweep(500, 4), most)
    assert drawn is not None
    assert len(drawn.executions) <= most
    assert len(drawn.reads) <= max(most, drawn.lanes)
    assert drawn.executions[0].begin == 0
    assert drawn.executions[-1].end == pytest.approx(1)
    for left, right in pairwise(drawn.executions):
        assert right.begin == pytest.approx(left.end)


@given(st.lists(st.one_of(st.none(), st.floats(-1, 2)), max_size=30))
def test_curves_have_a_piece_for_each_run_and_stay_in_the_picture(heights):
    points = [(place / 30, height) for place, height in enumerate(heights)]
    drawn = charts.curve(points, "line")
    runs = sum(after is not None and before is None for before, after in pairwise([None, *heights]))
    assert drawn.count("M") == runs
    assert all(0 <= int(number) <= charts.WIDTH for number in re.findall(r"\d+", drawn.replace("h0", "")))
    assert charts.area(points, "stall").count("z") == runs


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_draws_it(tmp_path):
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page(SCENES["three"]()), encoding="utf-8")
    subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=390,900", f"--screenshot={picture}", file.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
