"""Scores a trained model on a split of the data: metrics with intervals, all predictions, the worst examples.

python ray_jobs/evaluate.py --run NAME --split test --data.test_source test.csv
"""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raystride.pipelines.config.jobs import EvaluateConfig
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.observability.report.run_figures import step_text
from raystride.pipelines.system.commands import shell_command
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import EvaluationResult

MAX_LABEL_ROWS = 30
"""Per-label metrics are printed for at most this many labels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return command(EvaluateConfig, _run_job, arguments, program="raystride evaluate", description="Score a trained model.")


def _run_job(parsed: Parsed[EvaluateConfig]) -> int:
    settings = parsed.settings
    from raystride.pipelines.launch.finished import evaluate_run

    scored, problem = evaluate_run(settings)
    _print_table(scored, settings.split)
    if problem:
        print(problem, file=sys.stderr)
    print(f"results  {scored.folder}")
    storage = str(Folder.from_uri(settings.storage))
    print(f"mlflow   {shell_command('ui', storage=storage)}" if scored.logged else "mlflow   not logged there")
    print(f"next     {shell_command('predict', settings.run, storage, '--input FILES --output DIR')}")
    return DONE


def _print_table(scored: "EvaluationResult", split: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from raystride.pipelines.evaluate.intervals import MIN_UNITS

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in (split, "value", "95 % interval", "rows"):
        table.add_column(title, justify="left" if title == split else "right", no_wrap=True)
    per_label = [name for name in scored.metrics if "/" in name]
    hidden = per_label if len(per_label) > 2 * MAX_LABEL_ROWS else []
    for name, value in scored.metrics.items():
        if name not in hidden:
            bounds = "{:.4f} to {:.4f}".format(*scored.intervals[name]) if name in scored.intervals else "-"
            rows = f"{scored.rows[name]:,}" if name in scored.rows else ""
            table.add_row(name, "-" if math.isnan(value) else f"{value:.4f}", bounds, rows)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    speed = f", {scored.rate:,.0f} a second" if scored.rate else ""
    skipped = f"; {scored.skipped:,} documents skipped, see metrics.json" if scored.skipped else ""
    step = step_text(scored.step, scored.last_step)
    unit = "samples" if scored.documents == scored.samples else "documents"
    of = "" if unit == "samples" else f" of {scored.documents:,} documents"
    is_enough = scored.documents >= MIN_UNITS
    others = f"others by bootstrap over {unit}" if is_enough else f"no others from fewer than {MIN_UNITS} {unit}"
    print(f"{scored.samples:,} samples{of}, {step}{speed}{skipped}; intervals of counts by Agresti and Coull, {others}")
    for name, signature in scored.signatures.items():
        print(f"{name}: {signature}")
    print()
