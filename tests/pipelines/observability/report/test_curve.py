"""The loss curve as text and as a picture, whatever the points are."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raystride.pipelines.observability.report import gather_figures, save_curve_picture, text_curve

points = st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=40)


def dots(text: str) -> int:
    """Number of braille characters of the line itself, the legend's left out."""
    return sum(0x2800 < ord(character) <= 0x28FF for line in text.splitlines()[:-1] for character in line)


@given(points, points, st.integers(24, 120), st.integers(5, 40))
@example([], [(10_000, -1.005e100), (10_000_000, 0.0)], 24, 5)
def test_any_points_fit_into_the_picture(
    training: list[tuple[int, float]], validation: list[tuple[int, float]], width: int, height: int
) -> None:
    text = text_curve(training, validation, width, height)
    finite = [part for part in (training, validation) if any(math.isfinite(value) for _, value in part)]
    if not finite:
        assert "\n" not in text
        return
    lines = text.splitlines()
    assert len(lines) == height
    assert all(len(line) <= width for line in lines)


def test_a_falling_loss_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = text_curve([(step, 10 - step / 100) for step in range(0, 1000, 10)], width=60, height=12).splitlines()
    body = [line.partition("┤")[2] or line.partition("│")[2] for line in lines[:9]]
    positions = [min(i for i, character in enumerate(line) if character != " ") for line in body]
    assert positions == sorted(positions)
    assert positions[0] == 0
    assert positions[-1] > 40
    assert lines[0].startswith("  10 ┤") or lines[0].startswith("10 ┤")
    assert "0.1" in lines[8]
    assert lines[10].split() == ["0", "990"]


def test_validation_is_marked_and_what_is_not_finite_is_counted() -> None:
    text = text_curve([(1, 3.0), (2, math.nan), (3, 2.0)], [(2, 2.5), (3, math.inf)])
    assert text.count("o") >= 1
    assert "2 not finite" in text
    assert dots(text) > 0


def test_nothing_to_draw_is_said() -> None:
    assert text_curve([]) == "no loss was measured"
    assert "not finite" in text_curve([(1, math.nan)])
    with pytest.raises(ValueError, match="24 x 5"):
        text_curve([(1, 1.0)], width=10)


def entries() -> list[dict[str, Any]]:
    """A journal in which step 20 was trained twice and a value is infinite."""
    values: list[tuple[int, dict[str, Any]]] = [
        (10, {"train_loss": 3.0, "tokens_per_second": 100.0}),
        (20, {"train_loss": 9.0}),
        (20, {"train_loss": 2.0}),
    ]
    values += [(20, {"val_loss": 2.2}), (30, {"train_loss": "Infinity", "tokens_per_second": 90.0})]
    return [{"kind": "metrics", "time": 1.0, "step": step, "values": measured} for step, measured in values] + [
        {"kind": "event", "time": 2.0, "values": {"name": "end"}}
    ]


@pytest.mark.parametrize("journal", [entries(), []])
def test_the_picture_is_a_png_and_no_display_is_asked(journal: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "deep/curve.png"
    save_curve_picture(gather_figures(journal), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000
