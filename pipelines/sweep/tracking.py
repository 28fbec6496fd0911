"""A sweep in MLflow: a run for the sweep, and under it one for each trial.

    tracking = Tracking(folder, base, storage)
    tracking.trial(result, number=1)                          # between two trials, so that no measurement is disturbed
    tracking.end("finished")

Trials write their journals only; what they measured comes to MLflow from there, once they ended. A server that is away costs
a warning; what it missed is told at the end, and when the sweep is started again.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from raystride.pipelines.config.sweep import SweepConfig
from raystride.pipelines.credentials import hidden
from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry, new_entry
from raystride.pipelines.record.links import comparison_link
from raystride.pipelines.record.mlflow_follower import Follower
from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE, MlflowLog
from raystride.pipelines.sweep.result import Result

SUMMARY = "summary.json"


class Tracking:
    """Logs to MLflow what a sweep does, where `record.mlflow` says so."""

    def __init__(self, folder: Folder, base: SweepConfig, storage: Folder) -> None:
        assert base.run
        self._base, self._storage = base, storage
        self._log = MlflowLog.at(folder, base.run, base.record, storage)
        self._introduced = self._away = False
        self._try(lambda: None)

    @property
    def run_id(self) -> str | None:
        """The sweep's run in MLflow, if there is one."""
        return self._log.run_id if self._log else None

    @property
    def link(self) -> str | None:
        """The address at which a browser shows the sweep's run; None where MLflow is off, or the run in a database."""
        return self._log.link if self._log else None

    def trial(self, result: Result, number: int) -> Result:
        """Logs a trial that ended, the so-many-th; the result with its run's id, or as it was where MLflow is away."""
        folder = self._storage / result.run
        if not folder.exists("journal") or not self._try(lambda: self._log_trial(result, folder, number)):
            return result
        return replace(result, mlflow_run_id=folder.read_json(MLFLOW_REFERENCE).get("run_id"))

    def end(self, status: str) -> None:
        """Logs the sweep's files, and ends its run with `status`, a key of `record.STATUSES`."""
        if log := self._log:
            self._try(lambda: log.finish(status, time.time()))

    def artifact(self, name: str) -> None:
        """Logs a file of the sweep's folder."""
        self._try(lambda: self._put(new_entry("artifact", {"name": name})))

    def comparison(self, results: list[Result]) -> str | None:
        """The page that shows the trials side by side."""
        folders = [self._storage / result.run for result in results]
        return comparison_link(folder.read_json(MLFLOW_REFERENCE) for folder in folders if folder.exists(MLFLOW_REFERENCE))

    def _introduce(self) -> None:
        """Tells once what is swept."""
        if not self._introduced:
            settings = self._base.flat()
            told = {name: value for name, value in settings.items() if name.startswith(("sweep.", "data.", "model."))}
            self._put(new_entry("parameters", told))
            self._put(new_entry("tags", {"raystride.kind": "sweep"}))
            self._introduced = True

    def _log_trial(self, result: Result, folder: Folder, number: int) -> None:
        log = MlflowLog.at(folder, result.run, self._base.record, self._storage)
        assert log
        Follower(folder, log, _warn).catch_up()
        told = {"raystride.trial": result.label, "raystride.outcome": result.status}
        log.log([new_entry("tags", {"mlflow.parentRunId": str(self.run_id), **told})])
        status = folder.read_json(SUMMARY).get("status", "failed") if folder.exists(SUMMARY) else "failed"
        log.finish(status, time.time())
        if result.speed:  # last, so that what failed before is told again without a second point
            self._put(new_entry("metrics", {"trial_tokens_per_second": result.speed}, number))

    def _put(self, entry: Entry) -> None:
        assert self._log
        for problem in self._log.log([entry]):
            _warn(problem)

    def _try(self, action: Callable[[], object]) -> bool:
        """Whether MLflow is on and could be told; warns once an outage."""
        if not self._log:
            return False
        try:
            self._introduce()
            action()
        except Exception as error:  # MLflow, its database and its server raise whatever they like
            self._log.disconnect()
            if not self._away:
                cause = hidden(f"{type(error).__name__}: {error}")[:200]
                _warn(f"MLflow at {self._log.public_uri} cannot be told; the same command again tells it ({cause})")
            self._away = True
            return False
        self._away = False
        return True


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
