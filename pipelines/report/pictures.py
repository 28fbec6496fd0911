"""The pictures of a run's page, as SVG that stands in the page itself.

    text = losses(gather_figures(stream_entries(folder)))             # SVG, or "" where there is nothing to draw

Steps are the x-axis of all but `step_parts` and `strips`.
"""

import math
from collections.abc import Sequence

from raystride.pipelines.phases import PARTS
from raystride.pipelines.report.drawing import COLOURS, bare, empty_figure, spoken, svg
from raystride.pipelines.report.figures import STRIPS, Figures, Points


def losses(figures: Figures) -> str:
    """Training and validation loss."""
    lines = {"training": figures.points("train_loss"), "validation": figures.points("val_loss")}
    return _lines(lines, "loss", marks=("validation",))


def speed(figures: Figures) -> str:
    """Tokens a second."""
    return _lines({"tokens/s": figures.points("tokens_per_second")}, "tokens/s", from_zero=True)


def mfu(figures: Figures) -> str:
    """Model FLOP utilisation, where the device's peak is known."""
    return _lines({"MFU": figures.points("mfu")}, "model FLOP utilisation", from_zero=True)


def step_parts(shares: dict[str, float]) -> str:
    """One bar: what share of the host's time each part of a step took, and the rest."""
    if not shares:
        return ""
    figure = empty_figure(1.3)
    axes = figure.subplots()
    left = 0.0
    for name, share in shares.items():
        axes.barh(0, share, left=left, color=COLOURS[name], label=f"{spoken(name)} {share:.1%}")
        left += share
    axes.set_xlim(0, 1)
    axes.set_axis_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=4, frameon=False)
    return svg(figure)


def parts_over_time(figures: Figures) -> str:
    """What share of the host's time each part of a step took, over the steps, as stacked areas."""
    lines = {name: dict(figures.points(f"phase_{name}_share")) for name in PARTS}
    steps = sorted(set.intersection(*(set(line) for line in lines.values())))
    if len(steps) < 2:
        return ""
    figure = empty_figure(2.6)
    axes = figure.subplots()
    heights = [[lines[name][step] for step in steps] for name in PARTS]
    axes.stackplot(steps, heights, colors=[COLOURS[name] for name in PARTS])
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of a step")
    axes.set_xlabel("step")
    return svg(figure)


def rank_heat(figures: Figures) -> str:
    """Each worker's own seconds a step, without waiting for others: rank by step."""
    columns = figures.workers.items()
    ranks = sorted({rank for _, own in columns for rank in own})
    if len(ranks) < 2:
        return ""
    steps = [int(step) for step, _ in columns]
    figure = empty_figure(1.0 + 0.35 * min(len(ranks), 24))
    axes = figure.subplots()
    grid = [[own.get(rank, math.nan) for _, own in columns] for rank in ranks]
    picture = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(picture, ax=axes, label="s a step")
    shown = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks(list(shown), [str(steps[i]) for i in shown])
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_ylabel("rank")
    axes.set_xlabel("step")
    return svg(figure)


def strips(figures: Figures) -> str:
    """What the devices did: a strip each for utilisation, power, temperature, throttling and memory, a line a device."""
    found = figures.devices
    if not found:
        return ""
    figure = empty_figure(1.1 * len(found) + 0.4)
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, ending in zip(rows, [each for each in STRIPS if each in found], strict=True):
        for device, points in sorted(found[ending].items()):
            axes.plot(*zip(*points.items(), strict=True), linewidth=1, label=device)
        axes.set_ylabel(STRIPS[ending], rotation=0, ha="right", fontsize=8)
        axes.set_ylim(bottom=0)
    rows[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    rows[-1].set_xlabel("seconds")
    return svg(figure)


def _lines(lines: dict[str, Points], label: str, *, marks: Sequence[str] = (), from_zero: bool = False) -> str:
    if not any(lines.values()):
        return ""
    figure = empty_figure(2.6)
    axes = figure.subplots()
    for name, points in lines.items():
        if points:
            steps, values = zip(*points, strict=True)
            finite = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(steps, finite, label=name, linewidth=1.4, marker="o" if name in marks or len(points) == 1 else "")
    if from_zero:
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend(frameon=False)
    axes.set_ylabel(label)
    axes.set_xlabel("step")
    bare(axes)
    return svg(figure)
