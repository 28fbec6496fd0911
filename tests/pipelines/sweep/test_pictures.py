"""Pictures of a sweep's page: their contents, positions and colours, read from the figures themselves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.sweep import pictures
from raystride.pipelines.sweep.pictures import (
    BEST,
    FAINT,
    MAX_LABEL_CHARACTERS,
    OTHERS,
    draw_errors,
    draw_heat_map,
    draw_speed_up,
    draw_step_parts,
    draw_tradeoff,
    format_brief,
    shorten,
)
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import HoldOut
from raystride.pipelines.sweep.views import Family, Grid, Tradeoff
from tests.pipelines.sweep.test_report_page import trial


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of a test's pictures, the newest last."""
    made: list[Any] = []
    plain = pictures.new_figure

    def kept(height: float) -> Any:
        made.append(plain(height))
        return made[-1]

    monkeypatch.setattr(pictures, "new_figure", kept)
    return made


def make_family(label: str, *workers: int, speed: float = 100.0, windows: int = 1) -> Family:
    """Returns trials with speeds that grow with the root of their workers."""
    return Family(label, tuple(trial(speed * count**0.5, count, windows=windows) for count in workers))


def error_bars(axes: Any) -> dict[str, tuple[Any, Any, str]]:
    """Returns lines with error bars by label: points, the bars' ends, and the colour."""
    found = {}
    for container in axes.containers:
        line, _, bars = container.lines
        ends = [segment[:, 1].tolist() for segment in bars[0].get_segments()]
        found[str(container.get_label())] = (line.get_xydata().tolist(), ends, line.get_color())
    return found


def legend_labels(figure: Any) -> list[str]:
    """Returns the texts of a figure's legend."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_speed_up_needs_a_family_with_several_numbers_of_workers(figures: list[Any]) -> None:
    assert draw_speed_up([make_family("a", 2), make_family("b", 4)], [], []) == ""
    assert draw_speed_up([], [], []) == ""
    draw_speed_up([make_family("a", 2), make_family("b", 1, 4), make_family("c", 8)], [], [])
    assert legend_labels(figures[0]) == ["a", "b", "ideal"], "the best is there all the same, others with one number are not"


def test_speed_up_and_efficiency_stand_beside_the_ideal(figures: list[Any]) -> None:
    one, four = trial(100, 1), trial(300, 4)
    draw_speed_up([Family("best", (one, four)), make_family("next", 2, 8)], [], [(32, Interval(400.0, 800.0, 1600.0))])
    left, right = figures[0].axes
    ideals = [axes.get_lines()[0].get_xydata().tolist() for axes in (left, right)]
    shown = [1, 2, 4, 8, 32]
    assert ideals == [[[n, n] for n in shown], [[n, 1.0] for n in shown]]
    ratio = four.speed / one.speed
    for axes, of_four in ((left, ratio), (right, ratio / 4)):
        points, ends, colour = error_bars(axes)["best"]
        assert points == [[1, pytest.approx(1.0)], [4, pytest.approx(of_four)]]
        assert ends[1] == pytest.approx([of_four * (1 - four.spread), of_four * (1 + four.spread)])
        assert colour == BEST
    points, ends, colour = error_bars(left)["next"]
    assert points == [[2, pytest.approx(2.0)], [8, pytest.approx(4.0)]]
    assert ends[0] == pytest.approx([2.0, 2.0]), "one window has no spread"
    assert colour == OTHERS[0]
    points, ends, _ = error_bars(left)["predicted, 80 %"]
    worker = one.speed
    assert (points, ends) == ([[32, pytest.approx(800 / worker)]], [pytest.approx([400 / worker, 1600 / worker])])
    points, ends, _ = error_bars(right)["predicted, 80 %"]
    assert points == [[32, pytest.approx(800 / worker / 32)]]
    assert right.get_ylim()[0] == 0
    assert right.get_ylim()[1] > 1
    assert set(legend_labels(figures[0])) == {"best", "next", "predicted, 80 %", "ideal"}


def test_the_models_band_spans_measured_numbers_of_workers_in_their_order(figures: list[Any]) -> None:
    family, speeds = make_family("a", 1, 2), [(2, Interval(150.0, 160.0, 170.0)), (1, Interval(90.0, 100.0, 110.0))]
    draw_speed_up([family], speeds, [])
    (band,) = [
        collection for collection in figures[0].axes[0].collections if collection.get_label() == "scaling model, 80 %"
    ]
    corners = {tuple(corner) for corner in np.round(band.get_paths()[0].vertices, 6).tolist()}
    assert corners == {(1, 0.9), (1, 1.1), (2, 1.5), (2, 1.7)}
    draw_speed_up([family], speeds[:1], [])
    assert legend_labels(figures[1]) == ["a", "ideal"], "one number alone makes no band"


def test_seven_families_have_six_names_and_colours_and_the_rest_is_faint(figures: list[Any]) -> None:
    draw_speed_up([make_family(f"family {number}", 1, 2, speed=100.0 + number) for number in range(7)], [], [])
    left = figures[0].axes[0]
    assert legend_labels(figures[0]) == [f"family {number}" for number in range(6)] + ["ideal"]
    colours = {str(label): colour for label, (_, _, colour) in error_bars(left).items()}
    assert [colours[f"family {number}"] for number in range(6)] == [BEST, *OTHERS]
    assert sorted(colours.values()) == sorted([BEST, *OTHERS, FAINT])


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1, 10], "linear"), ([1, 10.1], "log"), ([0, 1000], "linear"), ([-1, 1000], "linear"), ([3, 4], "linear")],
)
def test_an_axis_is_logarithmic_if_it_is_wide_and_above_0(values: list[float], scale: str) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot(values, [1, 2])
    pictures._set_log_scale(axes.xaxis)
    assert (axes.get_xscale(), axes.get_yscale()) == (scale, "linear")
    other = Figure().subplots()
    other.plot([1, 2], values)
    pictures._set_log_scale(other.yaxis)
    assert (other.get_xscale(), other.get_yscale()) == ("linear", scale)


@pytest.mark.parametrize(("widest", "ticks"), [(200, {1, 2, 5, 10, 20, 50, 100, 200}), (1000, {1, 10, 100, 1000})])
def test_a_logarithmic_axis_names_twos_and_fives_unless_it_is_very_wide(widest: int, ticks: set[int]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([1, widest], [1, 2])
    pictures._set_log_scale(axes.xaxis)
    shown = {round(tick) for tick in axes.get_xticks() if 1 <= tick <= widest}
    assert shown == ticks
    assert axes.xaxis.get_major_formatter()(1000.0, 0) == "1,000"


@pytest.mark.parametrize(("count", "every"), [(8, 1), (9, 2), (17, 3)])
def test_an_axis_of_workers_has_eight_numbers_at_most(count: int, every: int) -> None:
    from matplotlib.figure import Figure

    axes, workers = Figure().subplots(), [1000 + number for number in range(count)]
    axes.plot(workers, workers)
    pictures._set_worker_axis(axes, workers)
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"{number:,}" for number in workers[::every]]
    assert axes.get_xlabel() == "workers"


def test_a_tradeoff_has_all_trials_its_front_and_the_best_as_a_star(figures: list[Any]) -> None:
    slow, middle, fast = (trial(speed) for speed in (1.0, 2.0, 3.0))
    given_points = ((slow, 30.0, 1.0), (middle, 20.0, 4.0), (fast, 10.0, 2.0))
    assert draw_tradeoff(Tradeoff("price", given_points[:1]), slow, "seconds") == ""
    assert draw_tradeoff(Tradeoff("price", given_points), fast, "seconds")
    (axes,) = figures[0].axes
    points, star = axes.collections
    assert points.get_offsets().tolist() == [[30, 1], [20, 4], [10, 2]]
    assert star.get_offsets().tolist() == [[10, 2]]
    (front,) = axes.get_lines()
    assert front.get_xydata().tolist() == [[10, 2], [30, 1]]
    assert front.get_drawstyle() == "steps-post"
    assert legend_labels(figures[0]) == ["trials", "front", f"best: {fast.label}"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("seconds", "price")
    draw_tradeoff(Tradeoff("price", given_points[:2]), None, "seconds")
    assert legend_labels(figures[1]) == ["trials", "front"]


def test_parts_of_a_step_are_stacked_to_its_milliseconds(figures: list[Any]) -> None:
    results = [
        replace(trial(1, 1), step_seconds=(0.1,), shares={"forward": 0.75, "rest": 0.25, "reduce": 0.0}),
        replace(trial(1, 4), step_seconds=(0.2,), shares={"forward": 0.25, "rest": 0.25, "reduce": 0.5}),
    ]
    assert draw_step_parts(Family("", tuple(results)))
    (axes,) = figures[0].axes
    boxes = [[(bar.get_y(), bar.get_height()) for bar in bars] for bars in axes.containers]
    assert boxes == [
        [pytest.approx((0, 75)), pytest.approx((0, 50))],
        [pytest.approx((75, 0)), pytest.approx((50, 100))],
        [pytest.approx((75, 25)), pytest.approx((150, 50))],
    ]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [
        ("100", (0, pytest.approx(100))),
        ("200", (1, pytest.approx(200))),
    ]
    assert legend_labels(figures[0]) == ["rest", "communication", "forward"], "as they lie, and none without a part"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4"]
    assert axes.get_xlim() == (-1, 2)


def test_a_grid_shows_speeds_failures_and_nothing_if_nothing_was_tried(figures: list[Any]) -> None:
    cells = {(0, 0): 1000.0, (0, 1): 2000.0, (1, 0): 3000.0, (1, 1): 0.0}
    assert draw_heat_map(Grid("down", "across", ("r", "s"), ("a", "b", "c"), cells))
    axes = figures[0].axes[0]
    (image,) = axes.get_images()
    shown = np.ma.filled(image.get_array().astype(float), np.nan)
    np.testing.assert_array_equal(shown, [[1000, 2000, np.nan], [3000, np.nan, np.nan]])
    assert image.get_clim() == (1000, 3000)
    texts = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
    assert texts == {
        (0, 0): ("1k", "white"),
        (1, 0): ("2k", "black"),
        (0, 1): ("3k", "black"),
        (1, 1): ("failed", "black"),
    }
    (hatched,) = axes.patches
    assert (hatched.get_xy(), hatched.get_hatch()) == ((0.5, 0.5), "///")
    assert (axes.get_xlim(), axes.get_ylim()) == ((-0.5, 2.5), (1.5, -0.5))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("across", "down")
    assert [text.get_text() for text in axes.get_yticklabels()] == ["r", "s"]
    assert draw_heat_map(Grid("down", "across", ("r",), ("a",), {(0, 0): 0.0}))
    assert not figures[1].axes[0].get_images()


@pytest.mark.parametrize(("lengths", "slanted"), [((20, 20, 20), False), ((20, 20, 21), True), ((100, 24, 12), False)])
def test_long_columns_are_cut_and_slanted_if_they_have_no_room(
    figures: list[Any], lengths: tuple[int, ...], slanted: bool
) -> None:
    labels = tuple("abc"[number] * length for number, length in enumerate(lengths))
    draw_heat_map(Grid("down", "across", ("r",), labels, {(0, 0): 1.0}))
    ticks = figures[0].axes[0].get_xticklabels()
    assert [len(text.get_text()) for text in ticks] == [min(24, length) for length in lengths]
    assert {(text.get_rotation(), text.get_ha()) for text in ticks} == {(30.0, "right") if slanted else (0.0, "center")}


def test_errors_are_drawn_against_measurements_and_the_target(figures: list[Any]) -> None:
    trials = [
        (SimpleNamespace(workers=4), Interval(0.08, 0.11, 0.13), 0.1),
        (SimpleNamespace(workers=2), Interval(0.1, 0.18, 0.2), 0.2),
    ]
    assert draw_errors(HoldOut((), ())) == ""
    assert draw_errors(HoldOut(tuple(trials), ()))  # type: ignore[arg-type]
    left, right = figures[0].axes
    ((points, ends, colour),) = error_bars(left).values()
    assert points == [pytest.approx([100, 110]), pytest.approx([200, 180])]
    assert ends == [pytest.approx([80, 130]), pytest.approx([100, 200])]
    assert colour == BEST
    assert left.get_lines()[0].get_xydata().tolist() == [pytest.approx([100, 100]), pytest.approx([200, 200])]
    (scattered,) = right.collections
    assert scattered.get_offsets().tolist() == [pytest.approx([4, 10]), pytest.approx([2, -10])]
    (aim,) = right.patches
    assert (aim.get_y(), aim.get_height()) == pytest.approx((-10, 20))
    assert [text.get_text() for text in right.get_xticklabels()] == ["2", "4"]


@given(text=st.text(max_size=2 * MAX_LABEL_CHARACTERS), most=st.integers(1, 2 * MAX_LABEL_CHARACTERS))
def test_a_shortened_text_has_its_beginning_and_says_that_more_follows(text: str, most: int) -> None:
    found = shorten(text, most)
    assert len(found) == min(len(text), most)
    assert found == text or (found[-1] == "…" and text.startswith(found[:-1]))


@pytest.mark.parametrize(
    ("value", "text"),
    [(999, "999"), (1e3, "1k"), (1234, "1.23k"), (1e6, "1M"), (999_000, "999k"), (1e9, "1G"), (2.5e10, "25G"), (0.5, "0.5")],
)
def test_a_brief_figure_has_three_digits_and_its_unit(value: float, text: str) -> None:
    assert format_brief(value) == text
