"""Records an evaluation in its run: the journal, `summary.json`, and MLflow, which may be unreachable.

append_scores(result, "test", storage / "my-run", 500)                   # a segment of its own, beside those of a training
problem = merge_scores(result, "test", storage / "my-run", config.record, storage)   # None, or why MLflow lacks it
"""

import math
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raystride.pipelines.config import RecordConfig, SettingError
from raystride.pipelines.evaluate.evaluation import EvaluationResult, Split
from raystride.pipelines.observability.record.entry import Entry, new_entry
from raystride.pipelines.observability.record.journal import Journal, join_segments, stream_entries, to_json_value
from raystride.pipelines.observability.record.mlflow.database import stored_uri
from raystride.pipelines.observability.record.mlflow.follower import Follower, replay_command
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, read_reference
from raystride.pipelines.observability.record.summary import put_summary, read_summary
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken

SENDER = "evaluation"


def named_scores(scored: EvaluationResult, split: Split) -> dict[str, float]:
    """Returns the metrics and the bounds of their intervals by their names in the record: `test_accuracy_low`."""
    figures = {f"{split}_{name}": value for name, value in scored.metrics.items() if not math.isnan(value)}
    for name, (low, high) in scored.intervals.items():
        figures |= {f"{split}_{name}_low": low, f"{split}_{name}_high": high}
    return figures


def append_scores(scored: EvaluationResult, split: Split, run: Folder, step: int) -> None:
    """Adds an evaluation to the run's journal, as an attempt of its own, whoever owns the run. Raises OSError."""
    figures = named_scores(scored, split)
    artifacts = [f"evaluate/{split}/{name}" for name in scored.files]
    attempt = f"evaluation-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    Journal(run, attempt).append(list(_journal_entries(attempt, step, figures, artifacts)))


def merge_scores(scored: EvaluationResult, split: Split, run: Folder, record: RecordConfig, storage: Folder) -> str | None:
    """Adds an evaluation to the run's summary and to MLflow; returns the reason if MLflow lacks it. The caller owns the run.

    Raises OSError, SealBroken.
    """
    figures = named_scores(scored, split)
    join_segments(run)
    summary = read_summary(run) or {"run": run.name}
    logged = {name: to_json_value(value) for name, value in figures.items() if "/" not in name}  # not each label's
    summary["metrics"] = (summary.get("metrics") or {}) | logged
    put_summary(run, summary)
    return _update_mlflow(run, record, storage)


def _journal_entries(attempt: str, step: int, figures: dict[str, float], artifacts: Iterable[str]) -> Iterable[Entry]:
    entries = [new_entry("metrics", figures, step), *(new_entry("artifact", {"name": name}) for name in artifacts)]
    for number, entry in enumerate(entries, 1):
        entry |= {"attempt": attempt, "sender": SENDER, "sequence": number}
        yield entry


@dataclass(frozen=True)
class ReopenedRun:
    """The MLflow run of a training that has ended, with its final status and time (seconds since 1970), to restore them."""

    log: MlflowLog
    status: str
    ended_at: float

    def end(self) -> None:
        """Ends the run as it was. Raises the errors of MLflow."""
        self.log.end_run(self.status, self.ended_at)


def reopen_run(run: Folder, record: RecordConfig, storage: Folder) -> ReopenedRun | None:
    """Returns the MLflow run of a training; None if MLflow is off. Raises SettingError as `MlflowLog.for_run` does."""
    reference = read_reference(run)
    settings = replace(record, mlflow_uri=record.mlflow_uri or stored_uri(reference))
    log = MlflowLog.for_run(run, run.name, settings, storage)
    # Evaluations come after the training, whose end does not change.
    times = (float(entry["time"]) for entry in stream_entries(run) if entry["sender"] != SENDER)
    status = read_summary(run).get("status") or "stopped"
    return ReopenedRun(log, status, max(times, default=time.time())) if log else None


def _update_mlflow(run: Folder, record: RecordConfig, storage: Folder) -> str | None:
    try:
        reopened = reopen_run(run, record, storage)
    except (SettingError, SealBroken) as error:
        return f"MLflow lacks it: {error}"
    if reopened is None:
        return None
    problems: list[str] = []
    log = reopened.log
    try:
        Follower(run, log, warn=problems.append).catch_up()
        reopened.end()
    except Exception as error:  # MLflow, its database and its server raise whatever they like
        cause = redact(f"{type(error).__name__}: {error}")[:200]
        return f"MLflow at {log.public_uri} cannot be reached ({cause}); {replay_command(run)} tells it later"
    return "; ".join(problems) or None
