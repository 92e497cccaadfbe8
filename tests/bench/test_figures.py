"""Pictures of a bench are pictures, whatever was found, and nothing in them lies on top of each other."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import found
from trt_layering.bench import figures
from trt_layering.errors import LayeringError

WIDE = [
    found.point("chain", 20, 20, 900.0),
    found.point("chain", 2000, 2000, 9.0),
    found.point("memory", None, 4000, 8),
]
FINDINGS = {
    "everything": found.everything(),
    "one budget": [found.point("chain", 20, 20, 3.5)],
    "no plain ONNX Runtime": [found.point("chain", 20, 20, 3.5), found.point("chain", 60, 60, 2.5)],
    "wide ranges": WIDE,
    "quick": [found.point("chain", 1, 0.01, 0.003), found.point("chain", 2, 0.5, 0.001)],
    "less than its libraries": [found.point("chain", 1, -1.0, 2.0), found.point("chain", 2, 1.0, 1.0)],
}


def assert_picture(path: Path) -> None:
    if path.suffix == ".svg":
        root = ET.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter())) > 100
    else:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width > 1000
        assert height > 500
    assert path.stat().st_size < 150_000


@pytest.mark.parametrize("suffix", [".svg", ".png"])
@pytest.mark.parametrize("points", FINDINGS.values(), ids=FINDINGS)
def test_a_curve_is_drawn(tmp_path: Path, points: list[dict[str, Any]], suffix: str) -> None:
    path = tmp_path / f"curve{suffix}"
    assert figures.draw_curve(found.result(points), path) == path
    assert_picture(path)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_timeline_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline{suffix}"
    assert figures.draw_timeline(found.result([]), path) == path
    assert_picture(path)


def test_the_same_results_are_the_same_svg(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figures.draw_curve(found.result(found.everything()), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LayeringError, match="Matplotlib") as caught:
        figures.draw_curve(found.result(found.everything()), tmp_path / "curve.svg")
    assert "pip install" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(LayeringError, match="cannot be written"):
        figures.draw_timeline(found.result([]), tmp_path / "nowhere" / "timeline.svg")


@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.06, 0.12])), max_size=7).map(
        lambda labels: sorted(labels, key=lambda label: label[0])
    )
)
def test_labels_keep_apart_and_in_order(labels: list[tuple[float, float]]) -> None:
    sizes = [size for _, size in labels]
    placed = figures.spread_out([wanted for wanted, _ in labels], sizes)
    for (low, under), (high, over) in zip(
        list(zip(placed, sizes, strict=True))[:-1], list(zip(placed, sizes, strict=True))[1:], strict=True
    ):
        assert high - low >= (under + over) / 2 - 1e-9
    assert all(centre + size / 2 <= 1 + 1e-9 for centre, size in zip(placed, sizes, strict=True))


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), max_size=12))
def test_events_at_once_lie_in_different_lanes(spans: list[tuple[float, float]]) -> None:
    events = [found.event("read", 0, 0, begin, begin + length) for begin, length in spans]
    lanes = figures._lanes(events)
    for first, (one, lane) in enumerate(zip(events, lanes, strict=True)):
        for other, beside in list(zip(events, lanes, strict=True))[first + 1 :]:
            apart = one["end"] <= other["begin"] + 1e-8 or other["end"] <= one["begin"] + 1e-8
            assert apart or lane != beside
