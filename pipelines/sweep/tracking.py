"""A sweep in MLflow: a run for the sweep, and under it one for each trial.

    tracking = Tracking(folder, base, storage)
    tracking.trial(result, number=1)                          # between two trials, so that no measurement is disturbed
    tracking.end("finished")

Trials write their journals only; what they measured comes to MLflow from there, once they ended. A server that is away costs
a warning, and what it missed is told at the end.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipelines.config.sweep import SweepConfig
from pipelines.files import Folder
from pipelines.record.follower import Follower
from pipelines.record.links import comparison_link
from pipelines.record.mlflow_log import MARK, MlflowLog
from pipelines.sweep.result import Result

SUMMARY = "summary.json"


class Tracking:
    """Logs to MLflow what a sweep does, where `record.mlflow` says so."""

    def __init__(self, folder: Folder, base: SweepConfig, storage: Folder) -> None:
        assert base.run
        self._storage, self._settings = storage, base.record
        self._log = MlflowLog.at(folder, base.run, base.record, storage)
        parameters = {name: value for name, value in base.flat().items() if name.startswith(("sweep.", "data.", "model."))}
        self._try(lambda: self._put("parameters", parameters))
        self._try(lambda: self._put("tags", {"raystride.kind": "sweep"}))

    @property
    def run_id(self) -> str | None:
        """The sweep's run in MLflow, if there is one."""
        return self._log.run_id if self._log else None

    @property
    def link(self) -> str | None:
        """Where a browser shows it."""
        return self._log.link if self._log else None

    def trial(self, result: Result, number: int) -> Result:
        """Logs a trial that ended, the so-many-th; the result with its run's id."""
        if result.speed:
            self._try(lambda: self._put("metrics", {"trial_tokens_per_second": result.speed}, number))
        folder = self._storage / result.run
        if not self._log or not folder.exists("journal"):
            return result
        if not self._try(lambda: self._log_trial(result, folder)):
            return result
        return replace(result, mlflow_run_id=folder.read_json(MARK).get("run_id"))

    def end(self, status: str) -> None:
        """Logs the sweep's files, and ends its run."""
        if self._log:
            log = self._log
            self._try(lambda: log.finish(status, time.time()))

    def artifact(self, name: str) -> None:
        """Logs a file of the sweep's folder."""
        self._try(lambda: self._put("artifact", {"name": name}))

    def comparison(self, results: list[Result]) -> str | None:
        """The page that shows the trials side by side."""
        folders = [self._storage / result.run for result in results]
        return comparison_link(folder.read_json(MARK) for folder in folders if folder.exists(MARK))

    def _log_trial(self, result: Result, folder: Folder) -> None:
        log = MlflowLog.at(folder, result.run, self._settings, self._storage)
        assert log
        Follower(folder, log, _warn).catch_up()
        told = {"raystride.trial": result.label, "raystride.outcome": result.status}
        log.log([_entry("tags", {"mlflow.parentRunId": self.run_id, **told})])
        status = folder.read_json(SUMMARY).get("status", "failed") if folder.exists(SUMMARY) else "failed"
        log.finish(status, time.time())

    def _put(self, kind: str, values: dict[str, Any], step: int | None = None) -> None:
        if self._log:
            for problem in self._log.log([_entry(kind, values, step)]):
                _warn(problem)

    def _try(self, action: Callable[[], object]) -> bool:
        """Whether it could be done."""
        try:
            action()
        except Exception as error:  # MLflow, its database and its server raise whatever they like
            _warn(f"MLflow cannot be told ({type(error).__name__}: {str(error)[:200]})")
            return False
        return True


def _entry(kind: str, values: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    return {"kind": kind, "values": values, "step": step, "time": time.time()}


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
