"""An evaluation in the record of its run: `summary.json`, the journal, and through it MLflow, which may be away.

problem = keep_scores(scored, "test", storage / "my-run", 500, config.record, storage)   # None, or why MLflow lacks it
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from raystride.pipelines.config import Record, SettingError
from raystride.pipelines.credentials import hidden
from raystride.pipelines.evaluate.evaluation import Scored, Split
from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry, new_entry
from raystride.pipelines.record.journal import Journal, join, plain, stream_entries
from raystride.pipelines.record.mlflow_follower import Follower, replay_hint
from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE, MlflowLog, stored_uri

SENDER = "evaluation"


def scored_figures(scored: Scored, split: Split) -> dict[str, float]:
    """The metrics and the bounds of their intervals under the names that the record gives them: `test_accuracy_low`."""
    found = {f"{split}_{name}": value for name, value in scored.metrics.items()}
    for name, (low, high) in scored.intervals.items():
        found |= {f"{split}_{name}_low": low, f"{split}_{name}_high": high}
    return found


def keep_scores(scored: Scored, split: Split, run: Folder, step: int, record: Record, storage: Folder) -> str | None:
    """Adds an evaluation to the run's record; why MLflow lacks it, if it does. Raises OSError."""
    found = scored_figures(scored, split)
    artifacts = [f"evaluate/{split}/{name}" for name in scored.files]
    attempt = f"evaluation-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    # An attempt of its own in the journal, from which a replay tells MLflow later if it is away now.
    Journal(run, attempt).append(list(_entries(attempt, step, found, artifacts)))
    join(run)
    summary = _summary(run)
    named = {name: plain(value) for name, value in found.items() if "/" not in name}  # not each label's
    summary["metrics"] = (summary.get("metrics") or {}) | named
    run.put_json("summary.json", summary)
    return _tell_mlflow(run, record, storage)


def _entries(attempt: str, step: int, found: dict[str, float], artifacts: Iterable[str]) -> Iterable[Entry]:
    told = [new_entry("metrics", found, step), *(new_entry("artifact", {"name": name}) for name in artifacts)]
    for number, entry in enumerate(told, 1):
        entry |= {"attempt": attempt, "sender": SENDER, "sequence": number}
        yield entry


@dataclass(frozen=True)
class Reopened:
    """The MLflow run of a training that has ended, and how and when (seconds since 1970) it did, so that it stays so."""

    log: MlflowLog
    status: str
    ended_at: float

    def end(self) -> None:
        """Ends the run as it was. Raises what MLflow raises."""
        self.log.finish(self.status, self.ended_at)


def reopen(run: Folder, record: Record, storage: Folder) -> Reopened | None:
    """The MLflow run of a training; None where MLflow is off. Raises SettingError as `MlflowLog.at` does."""
    reference = run.read_json(MLFLOW_REFERENCE) if run.exists(MLFLOW_REFERENCE) else {}
    settings = replace(record, mlflow_uri=record.mlflow_uri or stored_uri(reference))
    log = MlflowLog.at(run, run.name, settings, storage)
    # Evaluations come after the training, whose end stays where it was.
    ours = (float(entry["time"]) for entry in stream_entries(run) if entry["sender"] != SENDER)
    status = _summary(run).get("status") or "stopped"
    return Reopened(log, status, max(ours, default=time.time())) if log else None


def _summary(run: Folder) -> dict[str, Any]:
    try:
        found: dict[str, Any] = run.read_json("summary.json")
        return found
    except (FileNotFoundError, ValueError):
        return {"run": run.name}


def _tell_mlflow(run: Folder, record: Record, storage: Folder) -> str | None:
    try:
        reopened = reopen(run, record, storage)
    except SettingError as error:
        return f"MLflow lacks it: {error}"
    if reopened is None:
        return None
    problems: list[str] = []
    log = reopened.log
    try:
        Follower(run, log, warn=problems.append).catch_up()
        reopened.end()
    except Exception as error:  # MLflow, its database and its server raise whatever they like
        cause = hidden(f"{type(error).__name__}: {error}")[:200]
        return f"MLflow at {log.public_uri} cannot be reached ({cause}); {replay_hint(run)} tells it later"
    return "; ".join(problems) or None
