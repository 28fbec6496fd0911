"""SVG pictures of a run's HTML page.

    text = draw_losses(gather_figures(stream_entries(folder)))        # SVG, or "" if there is nothing to draw

The x-axis is the step, except in `draw_step_parts` and `draw_device_strips`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.report.drawing import (
    MAX_NAMED_LABELS,
    PART_COLOURS,
    new_figure,
    part_label,
    plot_confusion,
    style_axes,
    to_svg,
)
from raystride.pipelines.observability.report.figures import DEVICE_READINGS, Figures, Points


def draw_losses(figures: Figures) -> str:
    """Draws training and validation loss."""
    lines = {"training": figures.points("train_loss"), "validation": figures.points("val_loss")}
    return _draw_lines(lines, "loss", marks=("validation",))


def draw_metrics(figures: Figures) -> str:
    """Draws the task's validation metrics, but losses: shares together, others each on its own."""
    lines = {
        name.removeprefix("val_"): [(int(step), value) for step, value in line.items()]
        for name, line in figures.metrics.items()
    }
    shares = {name: points for name, points in lines.items() if all(0 <= value <= 1 for _, value in points)}
    others = [{name: points} for name, points in lines.items() if name not in shares]
    return "".join(_draw_lines(group, ", ".join(group), marks=tuple(group)) for group in [shares, *others])


def draw_confusion(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> str:
    """Draws a confusion matrix (true, predicted), in numbers of validation samples."""
    figure = new_figure(1.6 + 0.35 * min(len(labels), MAX_NAMED_LABELS))
    plot_confusion(figure.subplots(), labels, np.array(confusion))
    return to_svg(figure)


def draw_speed(figures: Figures, unit: str = "tokens") -> str:
    """Draws throughput, in the unit of `run_figures.rate_unit`."""
    return _draw_lines({f"{unit}/s": figures.points("tokens_per_second")}, f"{unit}/s", from_zero=True)


def draw_mfu(figures: Figures) -> str:
    """Draws model FLOP utilisation, if the device's peak is known."""
    return _draw_lines({"MFU": figures.points("mfu")}, "model FLOP utilisation", from_zero=True)


def draw_step_parts(shares: dict[str, float]) -> str:
    """Draws one bar with the share of the host's time of every part of a step, and the rest."""
    if not shares:
        return ""
    figure = new_figure(1.3)
    axes = figure.subplots()
    left = 0.0
    for name, share in shares.items():
        axes.barh(0, share, left=left, color=PART_COLOURS[name], label=f"{part_label(name)} {share:.1%}")
        left += share
    axes.set_xlim(0, 1)
    axes.set_axis_off()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), ncols=4, frameon=False)
    return to_svg(figure)


def draw_parts_over_time(figures: Figures) -> str:
    """Draws the share of the host's time of every part of a step, over the steps, as stacked areas."""
    lines = {name: dict(figures.points(f"phase_{name}_share")) for name in EXCLUSIVE_PHASES}
    steps = sorted(set.intersection(*(set(line) for line in lines.values())))
    if len(steps) < 2:
        return ""
    figure = new_figure(2.6)
    axes = figure.subplots()
    heights = [[lines[name][step] for step in steps] for name in EXCLUSIVE_PHASES]
    axes.stackplot(steps, heights, colors=[PART_COLOURS[name] for name in EXCLUSIVE_PHASES])
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of a step")
    axes.set_xlabel("step")
    return to_svg(figure)


def draw_rank_heatmap(figures: Figures) -> str:
    """Draws a heat map, rank by step, of the workers' own seconds per step, without waiting for others."""
    return _draw_heatmap(figures.workers.items(), "rank", "s a step")


def draw_expert_heatmap(figures: Figures) -> str:
    """Draws a heat map, expert by step, of the experts' loads over all layers; 1 is an even share."""
    return _draw_heatmap(figures.experts.items(), "expert", "load (1: even)")


def draw_norms(figures: Figures) -> str:
    """Draws heat maps, part of the network by step, of the norms of gradients and updates, as powers of ten."""
    pictures = []
    for prefix, line in figures.norms.items():
        columns = [
            (step, {part: math.log10(norm) if norm > 0 else math.nan for part, norm in norms.items()})
            for step, norms in line.items()
        ]
        rows = list(dict.fromkeys(part for _, norms in columns for part in norms))
        pictures.append(_draw_heatmap(columns, "part", f"log10 {prefix.partition('_')[0]} norm", rows))
    return "".join(pictures)


def _draw_heatmap(
    columns: Sequence[tuple[float, Mapping[Any, float]]], row: str, label: str, rows: Sequence[Any] = ()
) -> str:
    """Draws a heat map of columns by position, each with values by row; `rows` in their order, else sorted."""
    rows = rows or sorted({number for _, values in columns for number in values})
    if len(rows) < 2:
        return ""
    steps = [int(step) for step, _ in columns]
    figure = new_figure(1.0 + 0.35 * min(len(rows), 24))
    axes = figure.subplots()
    grid = [[values.get(number, math.nan) for _, values in columns] for number in rows]
    picture = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(picture, ax=axes, label=label)
    ticks = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks(list(ticks), [str(steps[i]) for i in ticks])
    axes.set_yticks(range(len(rows)), [str(number) for number in rows])
    axes.set_ylabel(row)
    axes.set_xlabel("step")
    return to_svg(figure)


def draw_device_strips(figures: Figures) -> str:
    """Draws utilisation, power, temperature, throttling and memory of the devices: a strip each, with a line per device."""
    devices = figures.devices
    if not devices:
        return ""
    figure = new_figure(1.1 * len(devices) + 0.4)
    rows = figure.subplots(len(devices), 1, sharex=True, squeeze=False)[:, 0]
    for axes, reading in zip(rows, [reading for reading in DEVICE_READINGS if reading in devices], strict=True):
        for device, points in sorted(devices[reading].items()):
            axes.plot(*zip(*points.items(), strict=True), linewidth=1, label=device)
        axes.set_ylabel(DEVICE_READINGS[reading], rotation=0, ha="right", fontsize=8)
        axes.set_ylim(bottom=0)
    rows[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    rows[-1].set_xlabel("seconds")
    return to_svg(figure)


def _draw_lines(lines: dict[str, Points], label: str, *, marks: Sequence[str] = (), from_zero: bool = False) -> str:
    if not any(lines.values()):
        return ""
    figure = new_figure(2.6)
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
    style_axes(axes)
    return to_svg(figure)
