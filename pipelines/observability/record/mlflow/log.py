"""Logs journal entries to one MLflow run as metrics, tags, parameters and artifacts.

Nothing here retries; `follower` does. The run's folder holds `mlflow.json`: the run's id in MLflow, as `logged` the number
of each attempt's last segment that MLflow has, and as `ended` whether it has the run's end. Times are those of the entries.
MLflow's metrics are unique by name, step, time and value, so it drops those sent twice after a crash between logging and
recording the mark.

    log = MlflowLog.for_run(run_folder, "my-run", RecordConfig(), storage)
    log.log(entries); log.end_run("finished", time.time())
"""

import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import Entry, Metrics, System
from raystride.pipelines.observability.record.journal import Segment, stream_entries
from raystride.pipelines.observability.record.mlflow.database import (
    OWN_DATABASE,
    artifact_root,
    database_uri,
    is_plain_file,
    relocate_artifacts,
    schema_lock,
    stored_uri,
)
from raystride.pipelines.observability.record.mlflow.links import (
    NOTE_TAG,
    VIEW_TAG,
    describe_run,
    is_on_server,
    is_our_note,
    run_link,
    runs_table_view,
)
from raystride.pipelines.observability.record.mlflow.names import (
    MAX_NAME_LENGTH,
    is_measured_once,
    metric_name,
    section_name,
)
from raystride.pipelines.observability.record.mlflow.schema import ensure_schema
from raystride.pipelines.observability.record.summary import STATUSES
from raystride.pipelines.system.credentials import public_uri
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed, read_sealed

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric, Run

MLFLOW_REFERENCE = "mlflow.json"
ARTIFACTS = ("config.yaml", "environment.json", "summary.json", "curve.png", "report.html", "sample.txt", "log.txt")
"""Files of a run's folder that are logged at its end, if they exist."""
METRICS_PER_CALL = 1000  # MLflow's own limits: metrics, parameters and tags of one call, and the length of their texts
PARAMETERS_PER_CALL = 100
MAX_PARAMETER_LENGTH = 6000
MAX_TAG_LENGTH = 5000
RUN_TAG = "raystride.opening"
SECTION_NAMES = "sections"
"""The `names` in `mlflow.json` of a run with the figures' names of `section_name`."""
DATA_SETTINGS = ("data.source", "data.sources", "data.kind", "data.split")
"""Parameters that describe the data set of a run."""
MAX_DIGEST_LENGTH = 36
# The follower pauses and retries: MLflow's own retries would block the thread for minutes while a server is unreachable.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def read_reference(folder: Folder) -> dict[str, Any]:
    """Returns the content of a run's `mlflow.json`, {} before MLflow has the run. Raises SealBroken with the remedy."""
    try:
        return read_sealed(folder, MLFLOW_REFERENCE, f"remove it, and `runs replay {folder.name}` fills a new run in MLflow")
    except FileNotFoundError:
        return {}


class MlflowLog:
    """One run in MLflow. Methods raise MlflowException, OSError or errors of the database's driver, and SealBroken for an
    `mlflow.json` that is not as it was written.
    """

    def __init__(self, folder: Folder, run: str, uri: str, settings: RecordConfig) -> None:
        self._folder, self._run, self.uri = folder, run, uri
        self._experiment = settings.experiment
        self._client: MlflowClient | None = None
        # The own database is not stored by path: a storage may be copied or moved with it.
        own = folder.parent.local and uri == database_uri(folder.parent)
        self._stored_uri = OWN_DATABASE if own else public_uri(uri)
        self.reference: dict[str, Any] = {"logged": {}}
        self._notes: list[str] = []
        """What connecting has changed, for the next call of `log`."""
        self._damage: SealBroken | None = None
        """Raised when the log connects: a run trains on without MLflow."""
        try:
            stored = read_reference(folder)
            if stored and (stored_uri(stored) or OWN_DATABASE) == self._stored_uri:
                self.reference = stored | {"uri": self._stored_uri}
        except SealBroken as error:
            self._damage = error

    @classmethod
    def for_run(cls, folder: Folder, run: str, settings: RecordConfig, storage: Folder) -> "MlflowLog | None":
        """Returns the log of a run; None if MLflow is off, or there is no URI and the storage cannot hold a database.

        Raises SettingError if the URI was stored without its password and no setting or variable gives it.
        """
        uri = settings.with_secrets().mlflow_uri if settings.mlflow else None
        uri = uri or (database_uri(storage) if storage.local else None)
        if uri and uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and storage.local:
            # Relative to the storage, since the recorder's working directory under Ray is arbitrary.
            uri = f"sqlite:///{storage.local}/{uri.removeprefix('sqlite:///')}"
        return cls(folder, run, uri, settings) if settings.mlflow and uri else None

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it is created."""
        return self.reference.get("run_id")

    @property
    def lacks_end(self) -> bool:
        """Whether MLflow lacks the run's end, and perhaps more: its driver was killed, or MLflow was away."""
        return self.run_id is None or self.reference.get("ended") is False  # versions before 0.4 wrote nothing of it

    @property
    def _has_sections(self) -> bool:
        """Whether the run has the names of `section_name`; one that an earlier version began has those of the journal."""
        return self.reference.get("names") == SECTION_NAMES

    @property
    def public_uri(self) -> str:
        """The tracking URI without credentials."""
        return public_uri(self.uri)

    @property
    def link(self) -> str | None:
        """Link of the run's page on its server; None for a database (see `record.mlflow.ui`)."""
        return run_link(self.reference) if is_on_server(self.reference) else None

    def connect(self) -> "tuple[MlflowClient, str]":
        """Returns client and run id; the first call creates or reopens the run. It may be repeated after an error."""
        if self._client is None:
            self._client = self._open_run()
        assert self.run_id is not None
        return self._client, self.run_id

    def disconnect(self) -> None:
        """Makes the next call connect again: a server that came back may have lost the run, or be another one."""
        self._client = None

    def log(self, entries: list[Entry]) -> list[str]:
        """Logs entries in calls of at most 1,000 metrics; returns permanent failures, and what became of a database, as
        sentences."""
        from mlflow.entities import RunTag

        client, run_id = self.connect()
        metrics: list[Metric] = []
        tags: dict[str, str] = {}
        problems, self._notes = self._notes, []
        for entry in entries:
            if entry["kind"] == "metrics" or entry["kind"] == "system":
                metrics += list(self._to_metrics(entry, problems))
                if self._has_sections and (once := {k: v for k, v in entry["values"].items() if is_measured_once(k)}):
                    tags |= self._log_parameters({section_name(key): value for key, value in once.items()})
            elif entry["kind"] == "artifact":
                problems += self._log_artifact(entry["values"]["name"])
            elif entry["kind"] == "parameters":
                tags |= self._log_parameters(entry["values"])
            else:
                tags |= _tags_of_entry(entry)
        for start in range(0, len(metrics), METRICS_PER_CALL):
            problems += self._log_metrics(metrics[start : start + METRICS_PER_CALL])
        if "raystride.attempt" in tags:
            run = client.get_run(run_id)
            if is_our_note(run.data.tags.get(NOTE_TAG)):
                tags[NOTE_TAG] = describe_run(self._folder, tags)
            self._log_data(tags.get("raystride.data"), run)
        if tags:
            client.log_batch(run_id, tags=[RunTag(key, value[:MAX_TAG_LENGTH]) for key, value in tags.items()])
        return problems

    def save_mark(self, logged: list[Segment]) -> None:
        """Records in `mlflow.json` that MLflow has these segments, each attempt's in order."""
        self.reference["logged"] |= {segment.attempt: segment.number for segment in logged}
        self._save_reference()

    def end_run(self, status: str, ended_at: float) -> None:
        """Logs the usual files and ends the run with `status`, a key of `STATUSES`, at a time in seconds since 1970."""
        client, run_id = self.connect()
        for name in ARTIFACTS:
            self._log_artifact(name)
        client.set_terminated(run_id, STATUSES[status], round(ended_at * 1000))
        self.reference["ended"] = True
        self._save_reference()

    def _open_run(self) -> "MlflowClient":
        if self._damage:
            raise self._damage
        load_mlflow()
        from mlflow import MlflowClient

        with schema_lock(self.uri):
            is_own = self._stored_uri == OWN_DATABASE
            if is_own or is_plain_file(self.uri):
                ensure_schema(self.uri, self._notes.append, is_own=is_own)
            if is_own:
                relocate_artifacts(self.uri, self.reference.get("run_id", ""))
            client = MlflowClient(self.uri)
            run = self._find_run(client) or self._make_run(client)
        _drop_cached_artifact_location(run.info.run_id)
        self.reference |= {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id, "ended": False}
        self._save_reference()
        # The previous attempt may have ended it.
        client.update_run(run.info.run_id, status="RUNNING")
        return client

    def _save_reference(self) -> None:
        put_sealed(self._folder, MLFLOW_REFERENCE, self.reference)

    def _find_run(self, client: "MlflowClient") -> "Run | None":
        """Returns the run of an earlier attempt, or one created just before a crash; None if MLflow has lost it."""
        from mlflow.exceptions import MlflowException

        if "run_id" in self.reference:
            try:
                run = client.get_run(self.reference["run_id"])
                _restore_experiment(client, run.info.experiment_id)  # its runs come back with it
                run = client.get_run(run.info.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None
            if run.info.lifecycle_stage == "deleted":
                client.restore_run(run.info.run_id)
            return run
        if "experiment_id" not in self.reference:
            return None
        _restore_experiment(client, self.reference["experiment_id"])
        runs = client.search_runs(
            [self.reference["experiment_id"]], f"tags.`{RUN_TAG}` = '{self.reference['token']}'", max_results=1
        )
        return runs[0] if runs else None

    def _make_run(self, client: "MlflowClient") -> "Run":
        experiment = self._experiment_id(client)
        # Saved before the run is created, so that a crash between the two does not lead to a second run.
        self.reference = {
            "token": secrets.token_hex(16),
            "uri": self._stored_uri,
            "experiment_id": experiment,
            "logged": {},
            "names": SECTION_NAMES,
        }
        self._save_reference()
        client.set_experiment_tag(experiment, VIEW_TAG, runs_table_view())
        start = round(self._start_time() * 1000)
        return client.create_run(experiment, start, tags={RUN_TAG: self.reference["token"]}, run_name=self._run)

    def _start_time(self) -> float:
        """Returns the run's start in seconds since 1970 from its journal, since MLflow may be reachable only much later."""
        first = next(stream_entries(self._folder), None)
        return float(first["time"]) if first else time.time()

    def _experiment_id(self, client: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment)
        if experiment is None:
            try:
                return str(client.create_experiment(self._experiment, artifact_location=artifact_root(self.uri)))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run created it first
                    raise
            return self._experiment_id(client)
        _restore_experiment(client, experiment.experiment_id)
        return str(experiment.experiment_id)

    def _log_parameters(self, parameters: Mapping[str, object]) -> dict[str, str]:
        """Logs parameters; returns those that a resumed run changed as tags, since MLflow does not overwrite parameters."""
        from mlflow.entities import Param

        client, run_id = self.connect()
        existing = client.get_run(run_id).data.params
        # Tuples become lists, as in the journal: a replay must not make a setting look changed, nor two runs different.
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
        texts = {metric_name(key): str(value)[:MAX_PARAMETER_LENGTH] for key, value in listed.items()}
        fresh = [Param(key, text) for key, text in texts.items() if key not in existing]
        for start in range(0, len(fresh), PARAMETERS_PER_CALL):
            client.log_batch(run_id, params=fresh[start : start + PARAMETERS_PER_CALL])
        return {f"resumed.{key}": text for key, text in texts.items() if existing.get(key, text) != text}

    def _log_data(self, fingerprint: str | None, run: "Run") -> None:
        """Logs the prepared data as the run's data set, once for each fingerprint."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if not fingerprint or any(known.dataset.digest == fingerprint[:MAX_DIGEST_LENGTH] for known in _datasets(run)):
            return
        source = {key: text for key, text in run.data.params.items() if key in DATA_SETTINGS}
        name = source.get("data.source", "") if source.get("data.sources", "{}") in ("{}", "None", "") else "mixture"
        dataset = Dataset(
            name=(name or "data")[:MAX_NAME_LENGTH],
            digest=fingerprint[:MAX_DIGEST_LENGTH],
            source_type="raystride",
            source=json.dumps(source),
        )
        context = InputTag("mlflow.data.context", "training")
        self.connect()[0].log_inputs(run.info.run_id, [DatasetInput(dataset, [context])])

    def _to_metrics(self, entry: Metrics | System, problems: list[str]) -> "Iterator[Metric]":
        from mlflow.entities import Metric

        for key, value in entry["values"].items():
            if self._has_sections and is_measured_once(key):
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                problems.append(f"`{key}` is {value!r} at step {entry['step']}, no number, and is not in MLflow")
                continue
            # MLflow stores infinity as 1.8e308, which flattens every curve; NaN shows that a value was not finite.
            number = float("nan") if number in (float("inf"), float("-inf")) else number
            name = section_name(key) if self._has_sections else key
            yield Metric(metric_name(name), number, round(float(entry["time"]) * 1000), int(entry["step"] or 0))

    def _log_metrics(self, metrics: "list[Metric]") -> list[str]:
        from mlflow.exceptions import MlflowException

        client, run_id = self.connect()
        try:
            client.log_batch(run_id, metrics)
            return []
        except MlflowException as error:
            refused = error.error_code == "INVALID_PARAMETER_VALUE"
            if not refused or client.get_run(run_id).info.lifecycle_stage == "deleted":
                raise
            if len(metrics) == 1:
                return [f"MLflow refuses `{metrics[0].key}` at step {metrics[0].step}: {error.message}"]
        # One bad value must not block the others: bisect until it is alone.
        half = len(metrics) // 2
        return self._log_metrics(metrics[:half]) + self._log_metrics(metrics[half:])

    def _log_artifact(self, name: str) -> list[str]:
        client, run_id = self.connect()
        if os.path.isabs(name) or ".." in name.split("/"):
            return [f"artifact {name} is not inside the run's folder, and is not in MLflow"]
        if not self._folder.exists(name):
            return [f"artifact {name} is not in {self._folder}"]
        place = os.path.dirname(name) or None
        if self._folder.local:
            client.log_artifact(run_id, str(self._folder.local / name), place)
            return []
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / os.path.basename(name)
            self._folder.download(name, copy)
            client.log_artifact(run_id, str(copy), place)
        return []


def load_mlflow() -> None:
    """Imports MLflow with the variables in `ENVIRONMENT`, which takes seconds; later calls do nothing."""
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    import mlflow  # noqa: F401

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _drop_cached_artifact_location(run_id: str) -> None:
    """Drops the run's artifact location from MLflow's cache in this process: it may be that of another copy."""
    from mlflow.tracking._tracking_service import utils

    getattr(utils, "_artifact_repos_cache", {}).pop(run_id, None)


def _restore_experiment(client: "MlflowClient", experiment: str) -> None:
    if client.get_experiment(experiment).lifecycle_stage == "deleted":
        client.restore_experiment(experiment)


def _datasets(run: "Run") -> "list[DatasetInput]":
    return list(run.inputs.dataset_inputs) if run.inputs else []


def _tags_of_entry(entry: Entry) -> dict[str, str]:
    values = entry["values"]
    if entry["kind"] == "tags":
        return {metric_name(key): str(value) for key, value in values.items()}
    if entry["kind"] == "checkpoint":
        return {"raystride.checkpoint": str(values["path"])}
    if entry["kind"] == "error":
        return {"raystride.error": str(values["text"])[-MAX_TAG_LENGTH:]}
    return {}
