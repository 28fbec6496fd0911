"""The pictures of a run's page, as SVG that stands in the page itself.

    text = losses(entries)                                    # SVG, or "" where there is nothing to draw

Entries are those of the journal; steps are the x-axis of all but `step_parts`.
"""

import math
from collections.abc import Sequence
from typing import Any

from raystride.pipelines.phases import PARTS
from raystride.pipelines.report.curve import Points, series
from raystride.pipelines.report.drawing import COLOURS, bare, empty_figure, spoken, svg

STRIPS = {
    "utilization_percentage": "utilisation, %",
    "power_usage_watts": "power, W",
    "temperature_celsius": "temperature, °C",
    "throttled": "throttled",
    "memory_usage_megabytes": "memory, MB",
}
"""Endings of the names under `system/` that the strips show, and their labels."""

Entries = Sequence[dict[str, Any]]


def losses(entries: Entries) -> str:
    """Training and validation loss."""
    lines = {"training": series(entries, "train_loss"), "validation": series(entries, "val_loss")}
    return _lines(lines, "loss", marks=("validation",))


def speed(entries: Entries) -> str:
    """Tokens a second."""
    return _lines({"tokens/s": series(entries, "tokens_per_second")}, "tokens/s", from_zero=True)


def mfu(entries: Entries) -> str:
    """Model FLOP utilisation, where the device's peak is known."""
    return _lines({"MFU": series(entries, "mfu")}, "model FLOP utilisation", from_zero=True)


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


def parts_over_time(entries: Entries) -> str:
    """What share of the host's time each part of a step took, over the steps, as stacked areas."""
    lines = {name: dict(series(entries, f"phase_{name}_share")) for name in PARTS}
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


def rank_heat(entries: Entries) -> str:
    """Each worker's own seconds a step, without waiting for others: rank by step."""
    cells = {(int(e["values"]["rank"]), int(e["step"])): e["values"] for e in entries if e["kind"] == "rank" and e["step"]}
    ranks, steps = sorted({rank for rank, _ in cells}), sorted({step for _, step in cells})
    if len(ranks) < 2 or not steps:
        return ""
    figure = empty_figure(1.0 + 0.35 * min(len(ranks), 24))
    axes = figure.subplots()
    grid = [[_own_seconds(cells.get((rank, step))) for step in steps] for rank in ranks]
    picture = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(picture, ax=axes, label="s a step")
    shown = range(0, len(steps), max(1, len(steps) // 8))
    axes.set_xticks(list(shown), [str(steps[i]) for i in shown])
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_ylabel("rank")
    axes.set_xlabel("step")
    return svg(figure)


def _own_seconds(values: dict[str, Any] | None) -> float:
    return float(values["own_s"]) / max(1, int(values["steps"])) if values else math.nan


def strips(entries: Entries) -> str:
    """What the devices did: a strip each for utilisation, power, temperature, throttling and memory, a line a device."""
    found: dict[str, dict[str, Points]] = {}
    begin = min((entry["time"] for entry in entries), default=0.0)
    for entry in (entry for entry in entries if entry["kind"] == "system"):
        for name, value in entry["values"].items():
            ending = next((each for each in STRIPS if name.endswith(each)), None)
            if ending and isinstance(value, int | float):
                device = name.removeprefix("system/").removesuffix(ending).rstrip("_")
                found.setdefault(ending, {}).setdefault(device, []).append((entry["time"] - begin, float(value)))
    if not found:
        return ""
    figure = empty_figure(1.1 * len(found) + 0.4)
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, ending in zip(rows, [each for each in STRIPS if each in found], strict=True):
        for device, points in sorted(found[ending].items()):
            axes.plot(*zip(*points, strict=True), linewidth=1, label=device)
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
