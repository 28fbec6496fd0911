"""Scores a trained model on a split of the data: metrics with their intervals, all predictions, the worst examples.

python ray_jobs/evaluate.py --run NAME --split test --data.test_source test.csv
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["evaluate", *sys.argv[1:]]))

from raystride.pipelines.commands import pasted
from raystride.pipelines.config.jobs import Evaluate
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.exit_codes import DONE, guarded

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import Scored

PER_LABEL = 30
"""Labels that the table has lines for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return command(Evaluate, _evaluate, arguments, program="raystride evaluate", description="Score a trained model.")


def _evaluate(parsed: Parsed[Evaluate]) -> int:
    return guarded(lambda: _evaluated(parsed.settings))


def _evaluated(settings: Evaluate) -> int:
    from raystride.pipelines.launch.finished import evaluate_run

    scored, problem = evaluate_run(settings)
    _print_table(scored, settings.split)
    if problem:
        print(problem, file=sys.stderr)
    print(f"results  {scored.folder}")
    storage = str(Folder.at(settings.storage))
    print(f"mlflow   {pasted('ui', storage=storage)}" if scored.logged else "mlflow   not logged there")
    print(f"next     {pasted('predict', settings.run, storage, '--input FILES --output DIR')}")
    return DONE


def _print_table(scored: "Scored", split: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in (split, "value", "95 % interval"):
        table.add_column(title, justify="left" if title == split else "right", no_wrap=True)
    per_label = [name for name in scored.metrics if "/" in name]
    hidden = per_label if len(per_label) > 2 * PER_LABEL else []
    for name, value in scored.metrics.items():
        if name not in hidden:
            low, high = scored.intervals[name]
            table.add_row(name, f"{value:.4f}", f"{low:.4f} to {high:.4f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    speed = f", {scored.rate:,.0f} a second" if scored.rate else ""
    skipped = f"; {scored.skipped:,} documents skipped, see metrics.json" if scored.skipped else ""
    print(f"{scored.samples:,} samples{speed}{skipped}; intervals by bootstrap over samples")
    for name, signature in scored.signatures.items():
        print(f"{name}: {signature}")
    print()
