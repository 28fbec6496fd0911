"""The pictures of a sweep's page, as SVG that stands in the page itself.

    text = speed_up(families(answer), [], [])                 # SVG, or "" where there is nothing to draw

Colours are Okabe and Ito's, which colour-blind readers tell apart; shapes and words say the same again.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raystride.pipelines.report.drawing import COLOURS, bare, empty_figure, spoken, svg
from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.model import HeldBack
from raystride.pipelines.sweep.answer import AIM
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.views import Family, Grid, Tradeoff, plain_number, step_milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

BEST, OTHERS, FAINT = "#0072b2", ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"), "#bbbbbb"
MARKERS = "osD^vP"
WIDE = 10
"""Where the largest value is so many times the smallest, the axis is logarithmic."""
LABEL = 70
"""Characters of a label at most."""
Speeds = Sequence[tuple[int, Interval]]
"""Numbers of workers, and tokens a second."""


def speed_up(families: Sequence[Family], modelled: Speeds, predicted: Speeds) -> str:
    """Speed-up and efficiency against workers, the first family in front; the model's speeds are of that family."""
    several = [family for family in families if family.results[-1].workers > family.results[0].workers]
    if not several:
        return ""
    families = several if families[0] in several else [families[0], *several]
    counts = {result.workers for family in families for result in family.results}
    figure = empty_figure(3.6 + 0.18 * min(len(families), 6))
    left, right = figure.subplots(1, 2)
    shown = sorted({*counts, *(workers for workers, _ in predicted)})
    for axes, efficiency in ((left, False), (right, True)):
        axes.plot(shown, [1.0 if efficiency else n for n in shown], color="#444444", linestyle=":", label="ideal")
        _model(axes, families[0].a_worker, modelled, predicted, efficiency)
        for number, family in reversed(list(enumerate(families))):
            _family(axes, family, number, efficiency)
        _worker_axis(axes, shown)
        bare(axes)
    left.set_ylabel("speed-up")
    right.set_ylabel("efficiency: speed-up / workers")
    right.set_ylim(0, 1.05 * right.dataLim.y1)
    _by_size(left.yaxis)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", frameon=False, fontsize=8)
    return svg(figure)


def _family(axes: "Axes", family: Family, number: int, efficiency: bool) -> None:
    named = number <= len(OTHERS)
    colour = BEST if number == 0 else OTHERS[number - 1] if named else FAINT
    workers = [result.workers for result in family.results]
    ratios = [family.speed_up(result) / (result.workers if efficiency else 1) for result in family.results]
    spreads = [
        0.0 if math.isinf(one.spread) else one.spread * ratio for one, ratio in zip(family.results, ratios, strict=True)
    ]
    label = shortened(family.label, LABEL) if named else None
    marker = MARKERS[number] if named else "."
    axes.errorbar(workers, ratios, spreads, color=colour, label=label, marker=marker, markersize=5, capsize=3, linewidth=1.3)


def _model(axes: "Axes", a_worker: float, modelled: Speeds, predicted: Speeds, efficiency: bool) -> None:
    """The model's 80 % intervals: a band over what was measured, bars beyond."""

    def ratios(speeds: Speeds) -> tuple[list[int], list[Interval]]:
        found = [
            (n, speed.times(1 / a_worker / (n if efficiency else 1))) for n, speed in sorted(speeds, key=lambda one: one[0])
        ]
        return [n for n, _ in found], [ratio for _, ratio in found]

    workers, band = ratios(modelled)
    if len(band) > 1:
        low, high = [each.low for each in band], [each.high for each in band]
        axes.fill_between(workers, low, high, color=BEST, alpha=0.2, linewidth=0, label="scaling model, 80 %")
    workers, bars = ratios(predicted)
    if bars:
        middle = [each.middle for each in bars]
        reach = [[each.middle - each.low for each in bars], [each.high - each.middle for each in bars]]
        axes.errorbar(
            workers, middle, reach, color=BEST, fmt="s--", mfc="white", capsize=4, linewidth=1, label="predicted, 80 %"
        )


def _by_size(axis: "Axis") -> None:
    """Logarithmic where what it shows is wide, with numbers that are written out."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_data_interval()
    if 0 < WIDE * low < high:
        axes = axis.axes
        (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
        axes.minorticks_off()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axis.set_major_formatter(lambda value, _: plain_number(value))


def _worker_axis(axes: "Axes", workers: Sequence[int]) -> None:
    axes.set_xlabel("workers")
    _by_size(axes.xaxis)
    every = max(1, math.ceil(len(workers) / 8))
    axes.set_xticks(workers[::every], [f"{count:,}" for count in workers[::every]])
    axes.minorticks_off()


def tradeoff(given: Tradeoff, best: Result | None, time: str) -> str:
    """Time against cost: all results, the front, and the best by the objective; "" for a single result."""
    if len(given.points) < 2:
        return ""
    figure = empty_figure(3.0)
    axes = figure.subplots()
    times, costs = [seconds for _, seconds, _ in given.points], [cost for _, _, cost in given.points]
    axes.scatter(times, costs, s=18, color=FAINT, label="trials")
    front = list(zip(*(point[1:] for point in given.front), strict=True))
    axes.step(*front, where="post", color=OTHERS[0], linewidth=1.2, marker="D", markersize=5, label="front")
    for result, seconds, cost in given.points:
        if result is best:
            label = "best: " + shortened(result.label, LABEL)
            axes.scatter([seconds], [cost], s=150, marker="*", color=BEST, zorder=3, label=label)
    axes.set_xlabel(time)
    axes.set_ylabel(given.cost)
    _by_size(axes.xaxis)
    _by_size(axes.yaxis)
    bare(axes)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=3)
    return svg(figure)


def trial_step_parts(family: Family) -> str:
    """Milliseconds of a step by part and number of workers, stacked."""
    figure = empty_figure(3.0)
    axes = figure.subplots()
    steps = [step_milliseconds(result) for result in family.results]
    places, below = range(len(steps)), [0.0] * len(steps)
    for name, colour in COLOURS.items():
        heights = [step.get(name, 0.0) for step in steps]
        if any(heights):
            axes.bar(places, heights, 0.6, bottom=below, color=colour, label=spoken(name))
            below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, height in zip(places, below, strict=True):
        axes.annotate(plain_number(height), (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(places, [str(result.workers) for result in family.results])
    axes.set_xlim(-1, len(steps))
    axes.set_xlabel("workers")
    axes.set_ylabel("ms a step")
    bare(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=8)
    return svg(figure)


def heat(grid: Grid) -> str:
    """Tokens a second over two settings; hatched where all combinations failed, empty where none was tried."""
    from matplotlib.patches import Rectangle

    figure = empty_figure(1.2 + 0.42 * len(grid.rows))
    axes = figure.subplots()
    speeds = [
        [grid.cells.get((row, column), 0.0) or math.nan for column in range(len(grid.columns))]
        for row in range(len(grid.rows))
    ]
    known = [speed for line in speeds for speed in line if not math.isnan(speed)]
    if known:
        low, high = min(known), max(known)
        image = axes.imshow(speeds, aspect="auto", cmap="cividis", vmin=low, vmax=high)
        figure.colorbar(image, ax=axes, label="tokens/s")
    for (row, column), speed in grid.cells.items():
        if speed:
            dark = speed < (low + high) / 2
            axes.text(column, row, brief(speed), ha="center", va="center", fontsize=8, color="white" if dark else "black")
        else:
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="///", edgecolor=FAINT, linewidth=0))
            axes.text(column, row, "failed", ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    _ticks(axes, grid)
    return svg(figure)


def _ticks(axes: "Axes", grid: Grid) -> None:
    columns = [shortened(label, 24) for label in grid.columns]
    slanted = sum(map(len, columns)) > 60
    axes.set_xticks(range(len(columns)), columns, fontsize=8, rotation=30 * slanted, ha="right" if slanted else "center")
    axes.set_yticks(range(len(grid.rows)), [shortened(label, 24) for label in grid.rows], fontsize=8)
    axes.set_xlabel(grid.across)
    axes.set_ylabel(grid.down)


def shortened(text: str, most: int) -> str:
    """At most so many characters of it."""
    return text if len(text) <= most else text[: most - 1] + "…"


def brief(value: float) -> str:
    """A figure in five characters or so: 1.23k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def errors(held: HeldBack) -> str:
    """Trials that the model did not see: predicted against measured, and the error by the number of workers."""
    if not held.trials:
        return ""
    figure = empty_figure(3.0)
    left, right = figure.subplots(1, 2)
    found = [predicted for _, predicted, _ in held.trials]
    measured = [1e3 * seconds for _, _, seconds in held.trials]
    reach = [[1e3 * (each.middle - each.low) for each in found], [1e3 * (each.high - each.middle) for each in found]]
    ends = [min(measured), max(measured)]
    left.plot(ends, ends, color="#444444", linestyle=":")
    left.errorbar(measured, [1e3 * each.middle for each in found], reach, fmt="o", color=BEST, markersize=4, linewidth=1)
    _by_size(left.xaxis)
    _by_size(left.yaxis)
    left.set_xlabel("measured, ms a step")
    left.set_ylabel("predicted, ms (80 %)")
    workers = sorted({work.workers for work, _, _ in held.trials})
    right.axhspan(-100 * AIM, 100 * AIM, color=FAINT, alpha=0.3, linewidth=0)
    right.scatter([work.workers for work, _, _ in held.trials], [100 * error for error in held.errors], s=20, color=BEST)
    right.set_ylabel("error, %; above 0: too slow")
    _worker_axis(right, workers)
    for axes in (left, right):
        bare(axes)
    return svg(figure)
