"""Scores a trained model on a split of the data: metrics with their intervals, all predictions, the worst examples.

python ray_jobs/evaluate.py --run NAME --split test --data.test_source test.csv
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Answering, Launch, Section, SettingError, setting
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.files import Folder

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import Scored

PER_LABEL = 30
"""Labels that the table has lines for."""


@dataclass(frozen=True, kw_only=True)
class TestData(Section):
    """What the run does not know of its data."""

    name: ClassVar[str] = "data"

    test_source: str | None = setting(None)
    """The source of the test set, where the run's settings name none, or another one; in the form of `data.source`."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(Answering):
    """Which run's model, and on what."""

    split: Literal["test", "validation", "train"] = setting("test")
    """Which documents: those of `data.test_source`, or those that the run validated or trained on."""
    data: TestData = TestData()
    """The test set."""
    launch: Launch = Launch()
    """Where the workers run; `--launch inline` answers in this process."""


def evaluate(parsed: Parsed[Evaluate]) -> int:
    """Opens the run and scores it; returns the exit code."""
    from raystride.pipelines.launch.exit_codes import guarded

    return guarded(lambda: _evaluate(parsed.settings))


def _evaluate(settings: Evaluate) -> int:
    from raystride.pipelines.cluster.answering import answerers
    from raystride.pipelines.evaluate.evaluation import evaluate
    from raystride.pipelines.evaluate.opening import choose
    from raystride.pipelines.evaluate.recording import keep
    from raystride.pipelines.launch.owner import read_owner

    storage = Folder.at(settings.storage)
    run = storage / settings.run
    owner = read_owner(run)
    if owner and owner.alive:
        raise SettingError(f"--run {settings.run} is being trained by process {owner.pid} on {owner.host}: wait for its end")
    chosen = choose(storage, settings.run, settings.checkpoint, settings.average)
    if settings.data.test_source:
        data = replace(chosen.config.data, test_source=settings.data.test_source)
        chosen = replace(chosen, config=replace(chosen.config, data=data))
    with answerers(settings, settings.launch) as run_parts:
        scored = evaluate(chosen, settings, settings.split, run, run_parts)
    _print_table(scored, settings.split)
    problem = keep(scored, settings.split, run, chosen.step, chosen.config.record, storage)
    if problem:
        print(problem, file=sys.stderr)
    logged = chosen.config.record.mlflow and not problem
    print(f"results  {scored.folder}")
    print(f"mlflow   python -m raystride.pipelines.record.ui --storage {storage}" if logged else "mlflow   not logged there")
    print(f"next     python ray_jobs/predict.py --run {settings.run} --storage {storage} --input FILES --output DIR")
    return 0


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


if __name__ == "__main__":
    sys.exit(command(Evaluate, evaluate, program="evaluate.py", description="Score a trained model."))
