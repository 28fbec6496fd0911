"""A sweep in MLflow: a run for the sweep, and under it one for each trial.

    tracking = SweepTracking(folder, base, storage)
    tracking.log_trial(result, number=1)                      # between two trials, so that no measurement is disturbed
    tracking.end("finished")

Trials write their journals only; their measurements are logged to MLflow from there, after they ended. An unreachable
server causes a warning; missed entries are logged at the end, and when the sweep is started again.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.provenance import find_owner, owner_tags
from raystride.pipelines.observability.record.entry import Entry, new_entry
from raystride.pipelines.observability.record.mlflow.follower import Follower
from raystride.pipelines.observability.record.mlflow.links import comparison_link
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, read_reference
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.output import print_warning
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken

SUMMARY = "summary.json"


class SweepTracking:
    """Logs a sweep to MLflow, if `record.mlflow` is set."""

    def __init__(self, folder: Folder, base: SweepJobConfig, storage: Folder) -> None:
        assert base.run
        self._base, self._storage = base, storage
        self._log = MlflowLog.for_run(folder, base.run, base.record, storage)
        self._has_logged_settings = self._is_unreachable = False
        self._attempt(lambda: None)

    @property
    def run_id(self) -> str | None:
        """The sweep's run in MLflow, if any."""
        return self._log.run_id if self._log else None

    @property
    def link(self) -> str | None:
        """Browser address of the sweep's run; None if MLflow is off, or the run is in a database."""
        return self._log.link if self._log else None

    def log_trial(self, result: Result, number: int) -> Result:
        """Logs trial `number`, now ended; returns the result with its run's id, or unchanged if MLflow is unreachable."""
        folder = self._storage / result.run
        if not folder.exists("journal") or not self._attempt(lambda: self._log_trial(result, folder, number)):
            return result
        return replace(result, mlflow_run_id=read_reference(folder).get("run_id"))

    def end(self, status: str) -> None:
        """Logs the sweep's files, and ends its run with `status`, a key of `record.STATUSES`."""
        if log := self._log:
            self._attempt(lambda: log.end_run(status, time.time()))

    def log_artifact(self, name: str) -> None:
        """Logs a file of the sweep's folder."""
        self._attempt(lambda: self._log_entry(new_entry("artifact", {"name": name})))

    def comparison_url(self, results: list[Result]) -> str | None:
        """Returns the page that shows the trials side by side."""
        try:
            return comparison_link([read_reference(self._storage / result.run) for result in results])
        except SealBroken as error:
            print_warning(str(error))
            return None

    def _log_settings(self) -> None:
        """Logs the sweep's settings once."""
        if not self._has_logged_settings:
            settings = self._base.flat()
            logged = {name: value for name, value in settings.items() if name.startswith(("sweep.", "data.", "model."))}
            self._log_entry(new_entry("parameters", logged))
            charged = owner_tags(find_owner(self._base.record), self._base.record)
            self._log_entry(new_entry("tags", {"raystride.kind": "sweep", **charged}))
            self._has_logged_settings = True

    def _log_trial(self, result: Result, folder: Folder, number: int) -> None:
        log = MlflowLog.for_run(folder, result.run, self._base.record, self._storage)
        assert log
        Follower(folder, log, print_warning).catch_up()
        tags = {"raystride.trial": result.label, "raystride.outcome": result.status}
        log.log([new_entry("tags", {"mlflow.parentRunId": str(self.run_id), **tags})])
        status = read_summary(folder).get("status", "failed")
        log.end_run(status, time.time())
        if result.speed:  # last, so that a retry after a failure adds no second point
            self._log_entry(new_entry("metrics", {"trial_tokens_per_second": result.speed}, number))

    def _log_entry(self, entry: Entry) -> None:
        assert self._log
        for problem in self._log.log([entry]):
            print_warning(problem)

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Returns True if MLflow is on and the action succeeded; warns once an outage."""
        if not self._log:
            return False
        try:
            self._log_settings()
            action()
        except Exception as error:  # MLflow, its database and its server raise whatever they like
            self._log.disconnect()
            if not self._is_unreachable:
                cause = redact(f"{type(error).__name__}: {error}")[:200]
                print_warning(f"MLflow at {self._log.public_uri} cannot be told; the same command again tells it ({cause})")
            self._is_unreachable = True
            return False
        self._is_unreachable = False
        return True
