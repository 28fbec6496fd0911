"""The table of all peers: medians with their range, the best in bold, where a peer is better, and a picture.

A result is `{"round": 0, "way": "lightning", "row": "start", "figures": {"start": 4.1}}`, or has `failed` with the reason.

    print(table(results)); print(verdicts(results)); draw(results, Path("peers.png"))
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pairs import Spread
from benchmarks.peers.ways import WAYS, Ours

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A figure."""

    title: str
    row: str
    """What of `--rows` brings it."""
    form: str = ".1f"
    more: bool = False
    """More is better."""
    marked: bool = True
    """The best is in bold."""
    drawn: bool = True


COLUMNS = {
    "lines": Column("lines of one's own", "lines", ".0f", drawn=False),
    "start": Column("start to first step, s", "start"),
    "speed 1": Column("tokens/s, 1 worker", "speed", ",.0f", more=True),
    "speed 2": Column("tokens/s, 2 workers", "speed", ",.0f", more=True),
    "speed 10m": Column("tokens/s, 10 M parameters", "large", ",.0f", more=True),
    "tuning": Column("tokens/s, LoRA on 135 M", "finetuning", ".0f", more=True),
    "tuning memory": Column("its peak memory, MiB", "finetuning", ",.0f", drawn=False),
    "reach": Column("start to loss 1.95, s", "reach", ".0f"),
    "loss": Column("loss at the end", "reach", ".3f", drawn=False),
    "resume": Column("restart after SIGKILL to next step, s", "resume"),
    "bits": Column("bits after it", "resume", marked=False, drawn=False),
    "preparation": Column("preparation, MB/s", "preparation", more=True),
    "memory": Column("peak memory, MiB", "memory", ",.0f"),
    "prediction": Column("batch prediction", "prediction", marked=False, drawn=False),
}


def numbers(results: Sequence[Result], way: str, column: str) -> list[float]:
    """Values of a figure, by round."""
    found = [result["figures"].get(column) for result in results if result["way"] == way and "figures" in result]
    return [float(value) for value in found if isinstance(value, int | float)]


def cell(results: Sequence[Result], way: str, column: str) -> str:
    """A figure as the table shows it."""
    kind = COLUMNS[column]
    if values := numbers(results, way, column):
        return f"{values[0]:{kind.form}}" if len(values) == 1 else Spread.of(values).text(kind.form)
    own = [result for result in results if result["way"] == way]
    words = {str(result["figures"][column]) for result in own if column in result.get("figures", {})}
    if words:
        return ", ".join(sorted(words))
    return "failed" if any("failed" in result and result["row"] in (kind.row, "ready") for result in own) else ""


def best(results: Sequence[Result], column: str) -> list[str]:
    """The ways whose medians are the best, as shown."""
    kind = COLUMNS[column]
    medians = {way: statistics.median(values) for way in WAYS if (values := numbers(results, way, column))}
    if not medians or not kind.marked:
        return []
    top = (max if kind.more else min)(medians.values())
    return [way for way, median in medians.items() if f"{median:{kind.form}}" == f"{top:{kind.form}}"]


def table(results: Sequence[Result]) -> str:
    """Markdown with a row a way, and below it what failed."""
    present = [way for way in WAYS if any(result["way"] == way for result in results)]
    shown = [name for name, kind in COLUMNS.items() if any(result["row"] == kind.row for result in results)]
    tops = {name: best(results, name) for name in shown}
    lines = ["| | " + " | ".join(COLUMNS[name].title for name in shown) + " |", "| --- |" + " ---: |" * len(shown)]
    for way in present:
        cells = [
            f"**{text}**" if way in tops[name] and text else text for name in shown for text in [cell(results, way, name)]
        ]
        lines.append(f"| {WAYS[way].title} | " + " | ".join(cells) + " |")
    failures = {
        f"{WAYS[result['way']].title}, {result['row']}: {result['failed']}" for result in results if "failed" in result
    }
    counts = {len(values) for way in present for name in shown if (values := numbers(results, way, name))}
    if max(counts, default=1) > 1:
        lines += ["", f"Medians [lowest, highest] of {max(counts)} rounds."]
    return "\n".join(lines + [""] * bool(failures) + sorted(failures))


def verdicts(results: Sequence[Result]) -> str:
    """A line a figure: the best of ours beside the best peer, and which is better."""
    lines = []
    for name, kind in COLUMNS.items():
        sides: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for way in WAYS if kind.marked else ():
            if values := numbers(results, way, name):
                sides[isinstance(WAYS[way], Ours)][way] = statistics.median(values)
        if not sides[True] or not sides[False]:
            continue
        choose = max if kind.more else min
        ours, peer = (choose(side, key=side.__getitem__) for side in (sides[True], sides[False]))
        mine, other = sides[True][ours], sides[False][peer]
        better = "equal" if mine == other else "ours is better" if (mine > other) == kind.more else "the peer is better"
        texts = [f"{WAYS[way].title} {value:{kind.form}}" for way, value in ((ours, mine), (peer, other))]
        lines.append(f"{kind.title}: {better} ({', '.join(texts)})")
    return "\n".join(lines)


def draw(results: Sequence[Result], file: Path) -> None:
    """Bars of every figure by way, ours dark; the whiskers are the lowest and highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from raystride.pipelines.observability.report.drawing import PART_COLOURS, WIDTH_INCHES, style_axes

    names = [name for name, kind in COLUMNS.items() if kind.drawn and any(numbers(results, way, name) for way in WAYS)]
    ways = [way for way in WAYS if any(numbers(results, way, name) for name in names)]
    across = min(4, len(names))
    down = -(-len(names) // across)
    figure = Figure(figsize=(WIDTH_INCHES * 1.3, down * (0.7 + 0.24 * len(ways))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False, sharey=True).flatten()
    for panel, name in zip(panels, names, strict=False):
        for place, way in enumerate(ways):
            if values := numbers(results, way, name):
                spread = Spread.of(values)
                reach = [[spread.median - spread.low], [spread.high - spread.median]]
                colour = PART_COLOURS["backward" if isinstance(WAYS[way], Ours) else "forward"]
                panel.barh(place, spread.median, xerr=reach, color=colour, ecolor="#777777", height=0.7)
                panel.text(0, place, f" {spread.median:{COLUMNS[name].form}}", va="center", fontsize=7, color=_ink(colour))
        panel.set_title(f"{COLUMNS[name].title}\n({'more' if COLUMNS[name].more else 'less'} is better)", fontsize=8)
        panel.set_yticks(range(len(ways)), [WAYS[way].title for way in ways], fontsize=8)
        panel.tick_params(axis="x", labelsize=7)
        style_axes(panel)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    panels[0].invert_yaxis()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150, facecolor="white")


def _ink(colour: str) -> str:
    return "white" if colour == "#332288" else "black"
