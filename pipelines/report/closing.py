"""The last screen of every job: the curve, a sample, the key figures, and three lines on where to look and what to do next.

print(closing_screen(summary, run_folder, text_curve(points, validation), sample="def main():"))
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from raystride.pipelines.commands import pasted
from raystride.pipelines.files import Folder
from raystride.pipelines.record.summary import RunSummary

SAMPLE_LINES = 12
LINE = 100
MATTERS = 0.05
"""Share of a group's time that a slow worker must cost before the screen says so."""
WELL = ("finished", "done", "stopped_early")


def closing_screen(
    summary: RunSummary,
    run_folder: Folder,
    curve: str = "",
    sample: str = "",
    link: str | None = None,
    next_job: str = "",
) -> str:
    """The text that a job ends with; its last three lines are always: results, MLflow, next.

    `summary` holds the keys of `summary.json`; `link` is the run's page on a tracking server, where there is one; `next_job`
    is the command to suggest, when not given the one that fits the run's status and whether it writes samples.
    """
    parts = [part for part in (curve, _sample(sample), _figures(summary), _straggler(summary)) if part]
    return "\n\n".join([*parts, "\n".join(_last_lines(summary, run_folder, link, next_job, writes=bool(sample)))])


def _last_lines(summary: RunSummary, run_folder: Folder, link: str | None, next_job: str, *, writes: bool) -> list[str]:
    storage, run = str(run_folder.parent), run_folder.name
    if summary.get("mlflow_run_id") is None:
        tracking = "not logged there"
    elif link:
        tracking = link
    else:
        tracking = pasted("ui", storage=storage)
    if not next_job:
        if summary.get("status") not in WELL:
            next_job = f"{pasted('train', run, storage)}   # resumes it"
        elif writes:
            next_job = pasted("generate", run, storage)
        else:
            next_job = pasted("evaluate", run, storage, "--split validation")
    return [f"results  {run_folder}", f"mlflow   {tracking}", f"next     {next_job}"]


def _sample(text: str) -> str:
    """The first lines of a sample, set off by a bar at the left."""
    lines = text.strip("\n").splitlines()
    if not "".join(lines).strip():
        return ""
    # What a model writes may hold control characters, which must not reach the terminal.
    shown = ["".join(c if c.isprintable() or c == "\t" else "�" for c in line)[:LINE] for line in lines[:SAMPLE_LINES]]
    return "\n".join(["sample", *(f"  │ {line}" for line in shown), *(["  │ ..."] if len(lines) > SAMPLE_LINES else [])])


FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("status", "status", str),
    ("steps", "steps", lambda value: f"{value:,}"),
    ("train_loss", "training loss", lambda value: f"{value:.4f}"),
    ("val_loss", "validation loss", lambda value: f"{value:.4f}"),
    ("tokens_seen", "tokens seen", lambda value: f"{value:,}"),
    ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
    ("mfu", "MFU", lambda value: f"{value:.1%}"),
    ("step_seconds_p50", "step, median", lambda value: f"{value * 1000:.1f} ms"),
    ("step_seconds_p95", "step, 95 %", lambda value: f"{value * 1000:.1f} ms"),
    ("data_wait_share", "waiting for data", lambda value: f"{value:.1%}"),
    ("seconds_to_first_step", "first step after", lambda value: f"{value:.1f} s"),
    ("peak_memory_bytes", "peak memory", lambda value: f"{value / 2**30:.2f} GiB"),
    ("joules_per_token", "energy a token", lambda value: f"{value:.3g} J"),
    ("average_power_watts", "average power", lambda value: f"{value:,.0f} W"),
    ("throttled_seconds", "throttled", lambda value: f"{value:,.1f} s"),
    ("gpu_idle_share", "GPUs idle", lambda value: f"{value:.1%}"),
    ("resumed_from", "resumed from", str),
)


def figures(summary: RunSummary) -> dict[str, str]:
    """The known figures of a summary as people read them, by what people call them."""
    known = {label: _shown(form, value) for key, label, form in FIGURES if (value := summary.get(key)) is not None}
    others = {name: value for name, value in (summary.get("metrics") or {}).items() if name not in summary}
    return known | {name: _shown(lambda value: f"{value:.4g}", value) for name, value in others.items()}


def _figures(summary: RunSummary) -> str:
    """The known figures, two a line; then those of a mixture's sources, a line each figure."""
    known, by_source = figures(summary), defaultdict[str, list[str]](list)
    for name in [name for name in summary.get("metrics") or {} if "/" in name]:
        figure, _, source = name.partition("/")
        by_source[figure].append(f"{source} {known.pop(name)}")
    cells = [f"{label:<17}{value:<18}" for label, value in known.items()]
    lines = ["  ".join(cells[i : i + 2]).rstrip() for i in range(0, len(cells), 2)]
    return "\n".join([*lines, *(f"{figure:<17}{', '.join(some)}" for figure, some in by_source.items())])


def _straggler(summary: RunSummary) -> str:
    """A sentence on the slowest worker, where it cost the others much."""
    share = summary.get("straggler_loss_share")
    if not isinstance(share, float) or share <= MATTERS:
        return ""
    who = f"rank {summary.get('slowest_rank')} on {summary.get('slowest_node')}"
    return f"{who} was slower than the others, who waited for it: the group lost {share:.0%} of its time by that"


def _shown(form: Callable[[Any], str], value: Any) -> str:
    try:
        return form(value)
    except (TypeError, ValueError):  # a figure that is not finite is a string in the summary
        return str(value)
