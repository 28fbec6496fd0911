"""The closing screen of a job: loss curve, sample, key figures, and three lines with results, MLflow and the next command.

print(closing_screen(summary, run_folder, text_curve(points, validation), sample="def main():"))
"""

from collections import defaultdict

from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.observability.report.origin import load_origin
from raystride.pipelines.observability.report.run_figures import format_metric, list_run_figures
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.storage.folder import Folder

MAX_SAMPLE_LINES = 12
MAX_LINE_LENGTH = 100
MIN_STRAGGLER_LOSS = 0.05
"""Share of a group's time that a slow worker must cost before the screen says so."""
SUCCESSES = ("finished", "done", "stopped_early")


def closing_screen(
    summary: RunSummary,
    run_folder: Folder,
    curve: str = "",
    sample: str = "",
    link: str | None = None,
    next_job: str = "",
    *,
    has_test_data: bool = False,
) -> str:
    """Returns the closing screen of a job; its last three lines are always: results, MLflow, next.

    `summary` holds the keys of `summary.json`; lines about the data come from the run's folder. `link` is the run's page on
    a tracking server, if there is one; `next_job` is the command to suggest, by default one that fits the run's status,
    whether it writes samples, and whether it `has_test_data`, on which `raystride evaluate` scores it.
    """
    parts = [curve, _sample_text(sample), _data_text(run_folder), _figures_text(summary), _straggler_sentence(summary)]
    split = "" if has_test_data else "--split validation"
    lines = _last_lines(summary, run_folder, link, next_job, split, writes=bool(sample))
    return "\n\n".join([*filter(None, parts), "\n".join(lines)])


def _last_lines(
    summary: RunSummary, run_folder: Folder, link: str | None, next_job: str, split: str, *, writes: bool
) -> list[str]:
    storage, run = str(run_folder.parent), run_folder.name
    if summary.get("mlflow_run_id") is None:
        tracking = "not logged"
    elif link:
        tracking = link
    else:
        tracking = shell_command("ui", storage=storage)
    if not next_job:
        if summary.get("status") not in SUCCESSES:
            next_job = f"{shell_command('train', run, storage)}   # resumes it"
        elif summary.get("unit") == "samples":  # a model of the user's own
            next_job = f"raystride.Run.open({run!r}, {storage!r}).load_model()"
        elif writes:
            next_job = shell_command("generate", run, storage)
        else:
            next_job = shell_command("evaluate", run, storage, split).rstrip()
    return [f"results  {run_folder}", f"mlflow   {tracking}", f"next     {next_job}"]


def _data_text(run_folder: Folder) -> str:
    """Returns the lines about the run's data."""
    return "\n".join(
        f"{'' if number else 'data':<9}{line}" for number, line in enumerate(load_origin(run_folder).data_lines)
    )


def _sample_text(text: str) -> str:
    """Returns the first lines of a sample, with a bar at the left."""
    lines = text.strip("\n").splitlines()
    if not "".join(lines).strip():
        return ""
    # A model's output may hold control characters, which must not reach the terminal.
    visible_lines = [
        "".join(c if c.isprintable() or c == "\t" else "�" for c in line)[:MAX_LINE_LENGTH]
        for line in lines[:MAX_SAMPLE_LINES]
    ]
    return "\n".join(
        ["sample", *(f"  │ {line}" for line in visible_lines), *(["  │ ..."] if len(lines) > MAX_SAMPLE_LINES else [])]
    )


def format_figures(summary: RunSummary) -> dict[str, str]:
    """Returns the known figures of a summary as text, by their labels, and those of a mixture's sources by their names."""
    by_source = {name: format_metric(value) for name, value in (summary.get("metrics") or {}).items() if "/" in name}
    return {figure.label: figure.text for figure in list_run_figures(summary)} | by_source


def _figures_text(summary: RunSummary) -> str:
    """Returns the known figures, two per line, then those of a mixture's sources, one figure per line."""
    figures, by_source = list_run_figures(summary), defaultdict[str, list[str]](list)
    for name, value in (summary.get("metrics") or {}).items():
        figure, slash, source = name.partition("/")
        if slash:
            by_source[figure].append(f"{source} {format_metric(value)}")
    width = max([16, *(len(figure.label) for figure in figures)]) + 1
    cells = [f"{figure.label:<{width}}{figure.text:<18}" for figure in figures]
    lines = ["  ".join(cells[i : i + 2]).rstrip() for i in range(0, len(cells), 2)]
    return "\n".join([*lines, *(f"{figure:<{width}}{', '.join(texts)}" for figure, texts in by_source.items())])


def _straggler_sentence(summary: RunSummary) -> str:
    """Returns a sentence on the slowest worker if it cost the group more than `MIN_STRAGGLER_LOSS`, else ""."""
    share = summary.get("straggler_loss_share")
    if not isinstance(share, float) or share <= MIN_STRAGGLER_LOSS:
        return ""
    worker = f"rank {summary.get('slowest_rank')} on {summary.get('slowest_node')}"
    return f"{worker} was slower than the others, who waited for it: the group lost {share:.0%} of its time by that"
