"""The pictures of a sweep's page, as SVG for embedding.

    text = draw_speed_up(build_families(answer), [], [])      # SVG, or "" if there is nothing to draw

Colours are Okabe and Ito's, which colour-blind readers can distinguish; shapes and words repeat the information.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raystride.pipelines.observability.report.drawing import PART_COLOURS, new_figure, part_label, style_axes, to_svg
from raystride.pipelines.sweep.answer import TARGET_ERROR
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import HoldOut
from raystride.pipelines.sweep.space import format_value
from raystride.pipelines.sweep.views import (
    Family,
    Grid,
    Tradeoff,
    format_number,
    order_values,
    step_milliseconds,
    varied_settings,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BEST, OTHERS, FAINT = "#0072b2", ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), "#bbbbbb"
MARKERS = "osD^vP"
LOG_AXIS_RATIO = 10
"""An axis is logarithmic if its largest value is this many times the smallest."""
MAX_TICKS = 6
"""Maximum of values of a setting that all have a tick."""
MAX_PANELS = 3
"""Maximum of settings over which the quality is drawn."""
MAX_LABEL_CHARACTERS = 70
"""Maximum of characters of a label."""
Speeds = Sequence[tuple[int, Interval]]
"""Numbers of workers, and tokens a second."""


def draw_speed_up(families: Sequence[Family], modelled: Speeds, predicted: Speeds) -> str:
    """Draws speed-up and efficiency against workers, the first family in front; the model's speeds are of that family."""
    scaled = [family for family in families if family.results[-1].workers > family.results[0].workers]
    if not scaled:
        return ""
    families = scaled if families[0] in scaled else [families[0], *scaled]
    counts = {result.workers for family in families for result in family.results}
    figure = new_figure(3.6 + 0.18 * min(len(families), 6))
    left, right = figure.subplots(1, 2)
    worker_counts = sorted({*counts, *(workers for workers, _ in predicted)})
    for axes, efficiency in ((left, False), (right, True)):
        axes.plot(
            worker_counts, [1.0 if efficiency else n for n in worker_counts], color="#444444", linestyle=":", label="ideal"
        )
        _draw_model(axes, families[0].speed_per_worker, modelled, predicted, efficiency)
        for number, family in reversed(list(enumerate(families))):
            _draw_family(axes, family, number, efficiency)
        _set_worker_axis(axes, worker_counts)
        style_axes(axes)
    left.set_ylabel("speed-up")
    right.set_ylabel("efficiency: speed-up / workers")
    right.set_ylim(0, 1.05 * right.dataLim.y1)
    _set_log_scale(left.yaxis)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", frameon=False, fontsize=8)
    return to_svg(figure)


def _draw_family(axes: "Axes", family: Family, number: int, efficiency: bool) -> None:
    is_named = number <= len(OTHERS)
    colour = BEST if number == 0 else OTHERS[number - 1] if is_named else FAINT
    workers = [result.workers for result in family.results]
    ratios = [family.speed_up(result) / (result.workers if efficiency else 1) for result in family.results]
    spreads = [
        0.0 if math.isinf(one.spread) else one.spread * ratio for one, ratio in zip(family.results, ratios, strict=True)
    ]
    label = shorten(family.label, MAX_LABEL_CHARACTERS) if is_named else None
    marker = MARKERS[number] if is_named else "."
    axes.errorbar(workers, ratios, spreads, color=colour, label=label, marker=marker, markersize=5, capsize=3, linewidth=1.3)


def _draw_model(axes: "Axes", speed_per_worker: float, modelled: Speeds, predicted: Speeds, efficiency: bool) -> None:
    """Draws the model's 80 % intervals: a band over measured numbers of workers, bars beyond."""

    def ratios(speeds: Speeds) -> tuple[list[int], list[Interval]]:
        found = [
            (n, speed.scale(1 / speed_per_worker / (n if efficiency else 1)))
            for n, speed in sorted(speeds, key=lambda one: one[0])
        ]
        return [n for n, _ in found], [ratio for _, ratio in found]

    workers, band = ratios(modelled)
    if len(band) > 1:
        low, high = [speed.low for speed in band], [speed.high for speed in band]
        axes.fill_between(workers, low, high, color=BEST, alpha=0.2, linewidth=0, label="scaling model, 80 %")
    workers, bars = ratios(predicted)
    if bars:
        middle = [speed.middle for speed in bars]
        reach = [[speed.middle - speed.low for speed in bars], [speed.high - speed.middle for speed in bars]]
        axes.errorbar(
            workers, middle, reach, color=BEST, fmt="s--", mfc="white", capsize=4, linewidth=1, label="predicted, 80 %"
        )


def _set_log_scale(axis: "Axis") -> None:
    """Makes an axis logarithmic if its data spans a wide range, with numbers in full."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_data_interval()
    if 0 < LOG_AXIS_RATIO * low < high:
        axes = axis.axes
        (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
        axes.minorticks_off()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axis.set_major_formatter(lambda value, _: format_number(value))


def _set_worker_axis(axes: "Axes", workers: Sequence[int]) -> None:
    axes.set_xlabel("workers")
    _set_log_scale(axes.xaxis)
    step = max(1, math.ceil(len(workers) / 8))
    axes.set_xticks(workers[::step], [f"{count:,}" for count in workers[::step]])
    axes.minorticks_off()


def draw_tradeoff(tradeoff: Tradeoff, best: Result | None, time: str) -> str:
    """Draws time against cost: all results, the front, and the best by the objective; "" for a single result."""
    if len(tradeoff.points) < 2:
        return ""
    figure = new_figure(3.0)
    axes = figure.subplots()
    times, costs = [seconds for _, seconds, _ in tradeoff.points], [cost for _, _, cost in tradeoff.points]
    axes.scatter(times, costs, s=18, color=FAINT, label="trials")
    front = list(zip(*(point[1:] for point in tradeoff.front), strict=True))
    axes.step(*front, where="post", color=OTHERS[0], linewidth=1.2, marker="D", markersize=5, label="front")
    for result, seconds, cost in tradeoff.points:
        if result is best:
            label = "best: " + shorten(result.label, MAX_LABEL_CHARACTERS)
            axes.scatter([seconds], [cost], s=150, marker="*", color=BEST, zorder=3, label=label)
    axes.set_xlabel(time)
    axes.set_ylabel(tradeoff.cost)
    _set_log_scale(axes.xaxis)
    _set_log_scale(axes.yaxis)
    style_axes(axes)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=3)
    return to_svg(figure)


def draw_quality(results: Sequence[Result], best: Result | None) -> str:
    """Draws the loss or metric of all trials over each setting that varies, `MAX_PANELS` at most; "" for a single result.

    Trials that were stopped early are faint, since theirs is the figure of fewer steps.
    """
    shown = [result for result in results if result.is_measured and math.isfinite(result.quality)]
    varied = list(varied_settings(shown).items())[:MAX_PANELS]
    if not varied:
        return ""
    figure = new_figure(3.0)
    for axes, (name, values) in zip(figure.subplots(1, len(varied), sharey=True, squeeze=False)[0], varied, strict=True):
        texts = order_values(values)
        in_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
        places = {text: float(values[text]) if in_numbers else float(index) for index, text in enumerate(texts)}
        for label, colour, status in (("trials", OTHERS[0], "measured"), ("stopped early", FAINT, "stopped_early")):
            points = [(places[str(one.settings[name])], one.quality) for one in shown if one.status == status]
            if points:
                axes.scatter(*zip(*points, strict=True), s=22, color=colour, label=label)
        if best in shown:
            place = places[str(best.settings[name])]
            axes.scatter([place], [best.quality], s=150, marker="*", color=BEST, zorder=3, label="best")
        if in_numbers:
            _set_log_scale(axes.xaxis)
            if len(texts) <= MAX_TICKS:
                axes.set_xticks([places[text] for text in texts], [format_value(values[text]) for text in texts])
        else:
            axes.set_xticks(range(len(texts)), [shorten(text, 14) for text in texts])
        axes.set_xlabel(name)
        style_axes(axes)
    first = figure.axes[0]
    first.set_ylabel(shown[0].quality_name)
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower left", frameon=False, fontsize=8, ncols=3)
    return to_svg(figure)


def draw_step_parts(family: Family) -> str:
    """Draws the milliseconds of a step by part and number of workers, stacked."""
    figure = new_figure(3.0)
    axes = figure.subplots()
    steps = [step_milliseconds(result) for result in family.results]
    positions, bottoms = range(len(steps)), [0.0] * len(steps)
    for name, colour in PART_COLOURS.items():
        heights = [step.get(name, 0.0) for step in steps]
        if any(heights):
            axes.bar(positions, heights, 0.6, bottom=bottoms, color=colour, label=part_label(name))
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    for position, height in zip(positions, bottoms, strict=True):
        axes.annotate(format_number(height), (position, height), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(positions, [str(result.workers) for result in family.results])
    axes.set_xlim(-1, len(steps))
    axes.set_xlabel("workers")
    axes.set_ylabel("ms a step")
    style_axes(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    return to_svg(figure)


def draw_heat_map(grid: Grid, unit: str = "tokens") -> str:
    """Draws `unit` a second over two settings; hatched if all combinations failed, empty if none was tried."""
    from matplotlib.patches import Rectangle

    figure = new_figure(1.2 + 0.42 * len(grid.rows))
    axes = figure.subplots()
    speeds = [
        [grid.cells.get((row, column), 0.0) or math.nan for column in range(len(grid.columns))]
        for row in range(len(grid.rows))
    ]
    known_speeds = [speed for line in speeds for speed in line if not math.isnan(speed)]
    if known_speeds:
        low, high = min(known_speeds), max(known_speeds)
        image = axes.imshow(speeds, aspect="auto", cmap="cividis", vmin=low, vmax=high)
        figure.colorbar(image, ax=axes, label=f"{unit}/s")
    for (row, column), speed in grid.cells.items():
        if speed:
            is_dark = speed < (low + high) / 2
            axes.text(
                column, row, format_brief(speed), ha="center", va="center", fontsize=8, color="white" if is_dark else "black"
            )
        else:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="///", edgecolor=FAINT, linewidth=0))
            axes.text(column, row, "failed", ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    _set_ticks(axes, grid)
    return to_svg(figure)


def _set_ticks(axes: "Axes", grid: Grid) -> None:
    columns = [shorten(label, 24) for label in grid.columns]
    is_slanted = sum(map(len, columns)) > 60
    axes.set_xticks(
        range(len(columns)), columns, fontsize=8, rotation=30 * is_slanted, ha="right" if is_slanted else "center"
    )
    axes.set_yticks(range(len(grid.rows)), [shorten(label, 24) for label in grid.rows], fontsize=8)
    axes.set_xlabel(grid.column_setting)
    axes.set_ylabel(grid.row_setting)


def shorten(text: str, max_characters: int) -> str:
    """Returns the text, cut to `max_characters`."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def format_brief(value: float) -> str:
    """Returns a figure in about five characters: 1.23k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def draw_errors(held_out: HoldOut) -> str:
    """Draws trials that the model did not see: predicted against measured, and the error by the number of workers."""
    if not held_out.trials:
        return ""
    figure = new_figure(3.0)
    left, right = figure.subplots(1, 2)
    predictions = [predicted for _, predicted, _ in held_out.trials]
    measured = [1e3 * seconds for _, _, seconds in held_out.trials]
    reach = [
        [1e3 * (interval.middle - interval.low) for interval in predictions],
        [1e3 * (interval.high - interval.middle) for interval in predictions],
    ]
    ends = [min(measured), max(measured)]
    left.plot(ends, ends, color="#444444", linestyle=":")
    left.errorbar(
        measured, [1e3 * interval.middle for interval in predictions], reach, fmt="o", color=BEST, markersize=4, linewidth=1
    )
    _set_log_scale(left.xaxis)
    _set_log_scale(left.yaxis)
    left.set_xlabel("measured, ms a step")
    left.set_ylabel("predicted, ms (80 %)")
    workers = sorted({work.workers for work, _, _ in held_out.trials})
    right.axhspan(-100 * TARGET_ERROR, 100 * TARGET_ERROR, color=FAINT, alpha=0.3, linewidth=0)
    right.scatter(
        [work.workers for work, _, _ in held_out.trials],
        [100 * error for error in held_out.relative_errors],
        s=20,
        color=BEST,
    )
    right.set_ylabel("error, %; above 0: too slow")
    _set_worker_axis(right, workers)
    for axes in (left, right):
        style_axes(axes)
    return to_svg(figure)
