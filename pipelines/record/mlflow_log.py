"""The MLflow side of a record: one run opened or reopened, and journal entries turned into its metrics, tags, artifacts.

Nothing here retries; `mlflow_follower` does. The run's folder holds `mlflow.json`: the run's id in MLflow and, as `logged`,
the number of each attempt's last segment that MLflow has. Times are the entries' own, so that MLflow, whose metrics are
unique by name, step, time and value, drops what it is sent twice after a crash between logging and noting it.

    log = MlflowLog.at(run_folder, "my-run", Record(), storage)
    log.log(entries); log.finish("finished", time.time())
"""

import logging
import os
import re
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config.run import Record
from raystride.pipelines.credentials import public
from raystride.pipelines.files import Folder
from raystride.pipelines.locks import locked
from raystride.pipelines.record.entry import Entry, Metrics, System
from raystride.pipelines.record.journal import Segment, stream_entries
from raystride.pipelines.record.links import NOTE_TAG, VIEW_TAG, describe_run, is_our_note, on_a_server, run_link, view
from raystride.pipelines.record.summary import STATUSES

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

MLFLOW_REFERENCE = "mlflow.json"
OWN_DATABASE, DATABASE_FILE, ARTIFACT_FOLDER = "storage:", "mlflow.db", "mlartifacts"
"""The `uri` in `mlflow.json` of a run in the database beside the runs, wherever the storage lies; the names of that database
and of the folder of its artifacts."""
ARTIFACTS = ("config.yaml", "environment.json", "summary.json", "curve.png", "report.html", "sample.txt", "log.txt")
"""Files of a run's folder that are logged at its end, where they are there."""
METRICS_A_CALL = 1000  # MLflow's own limits: metrics, parameters and tags of one call, and the length of their texts
PARAMETERS_A_CALL = 100
LONGEST_PARAMETER = 6000
LONGEST_TAG = 5000
LONGEST_NAME = 250
SCHEMA_TIMEOUT_S = 120.0
MAX_DATABASE_BYTES = 500
"""SQLite opens paths of at most 512 bytes, and adds endings of its own."""
ARTIFACT_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns in which MLflow 3 keeps places of artifacts."""
RUN_TAG = "raystride.opening"
# Ours is the pause and the next try: MLflow's own would hold the thread for minutes while a server is away.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowLog:
    """One run in MLflow. Methods raise MlflowException, OSError or what the database's driver raises."""

    def __init__(self, folder: Folder, run: str, uri: str, settings: Record) -> None:
        self._folder, self._run, self.uri = folder, run, uri
        self._experiment = settings.experiment
        self._client: MlflowClient | None = None
        # Not by its path: a storage may be copied or moved with its database.
        own = folder.parent.local and uri == database(folder.parent)
        self._stored_uri = OWN_DATABASE if own else public(uri)
        self.reference: dict[str, Any] = {"logged": {}}
        try:
            kept = folder.read_json(MLFLOW_REFERENCE)
            if (stored_uri(kept) or OWN_DATABASE) == self._stored_uri:
                self.reference = kept | {"uri": self._stored_uri}
        except (FileNotFoundError, ValueError):
            pass

    @classmethod
    def at(cls, folder: Folder, run: str, settings: Record, storage: Folder) -> "MlflowLog | None":
        """The log of a run, or None where MLflow is off: switched off, or no URI and a storage that holds no database.

        Raises SettingError if the URI was written down without its password and nothing gives it.
        """
        uri = settings.filled().mlflow_uri if settings.mlflow else None
        uri = uri or (database(storage) if storage.local else None)
        if uri and uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and storage.local:
            # Against the storage, since the recorder's working directory under Ray is one that nobody has chosen.
            uri = f"sqlite:///{storage.local}/{uri.removeprefix('sqlite:///')}"
        return cls(folder, run, uri, settings) if settings.mlflow and uri else None

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it was made."""
        return self.reference.get("run_id")

    @property
    def public_uri(self) -> str:
        """The tracking URI without credentials."""
        return public(self.uri)

    @property
    def link(self) -> str | None:
        """The run's page on its server; None where it is in a database, whose pages need `raystride.pipelines.record.ui`."""
        return run_link(self.reference) if on_a_server(self.reference) else None

    def connect(self) -> "tuple[MlflowClient, str]":
        """The client and the run's id. The first call makes or reopens the run; after a failure it may be called again."""
        if self._client is None:
            self._client = self._open()
        assert self.run_id is not None
        return self._client, self.run_id

    def disconnect(self) -> None:
        """Has the next call connect anew: a server that came back may have lost the run, or be another one."""
        self._client = None

    def log(self, entries: list[Entry]) -> list[str]:
        """Logs entries in calls of at most 1000 metrics; what could not be logged and never will, as sentences."""
        from mlflow.entities import RunTag

        client, run_id = self.connect()
        metrics: list[Metric] = []
        tags: dict[str, str] = {}
        problems: list[str] = []
        for entry in entries:
            if entry["kind"] == "metrics" or entry["kind"] == "system":
                metrics += list(self._metrics(entry, problems))
            elif entry["kind"] == "artifact":
                problems += self._log_artifact(entry["values"]["name"])
            elif entry["kind"] == "parameters":
                tags |= self._log_parameters(entry["values"])
            else:
                tags |= _tags(entry)
        for start in range(0, len(metrics), METRICS_A_CALL):
            problems += self._log_metrics(metrics[start : start + METRICS_A_CALL])
        if "raystride.attempt" in tags and is_our_note(client.get_run(run_id).data.tags.get(NOTE_TAG)):
            tags[NOTE_TAG] = describe_run(self._folder, tags)
        if tags:
            client.log_batch(run_id, tags=[RunTag(key, value[:LONGEST_TAG]) for key, value in tags.items()])
        return problems

    def note(self, logged: list[Segment]) -> None:
        """Keeps in the run's folder that MLflow has these segments, each attempt's in order."""
        self.reference["logged"] |= {segment.attempt: segment.number for segment in logged}
        self._keep_mark()

    def finish(self, status: str, ended_at: float) -> None:
        """Logs the usual files and ends the run with `status`, a key of `STATUSES`, at a time in seconds since 1970."""
        client, run_id = self.connect()
        for name in ARTIFACTS:
            self._log_artifact(name)
        client.set_terminated(run_id, STATUSES[status], round(ended_at * 1000))

    def _open(self) -> "MlflowClient":
        load_mlflow()
        from mlflow import MlflowClient

        with schema_lock(self.uri):
            client = MlflowClient(self.uri)
            if self._stored_uri == OWN_DATABASE:
                relocate_artifacts(self.uri)
            run = self._find_run(client) or self._make_run(client)
        _forget_artifact_place(run.info.run_id)
        self.reference |= {"run_id": run.info.run_id, "experiment_id": run.info.experiment_id}
        self._keep_mark()
        # The attempt before may have ended it.
        client.update_run(run.info.run_id, status="RUNNING")
        return client

    def _keep_mark(self) -> None:
        self._folder.put_json(MLFLOW_REFERENCE, self.reference)

    def _find_run(self, client: "MlflowClient") -> "Run | None":
        """The run of an earlier attempt, or one made just before a crash could note its id; None where MLflow lost it."""
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
        found = client.search_runs(
            [self.reference["experiment_id"]], f"tags.`{RUN_TAG}` = '{self.reference['token']}'", max_results=1
        )
        return found[0] if found else None

    def _make_run(self, client: "MlflowClient") -> "Run":
        experiment = self._experiment_id(client)
        # Noted before the run is made, so that a crash between the two leaves no second run.
        self.reference = {
            "token": secrets.token_hex(16),
            "uri": self._stored_uri,
            "experiment_id": experiment,
            "logged": {},
        }
        self._keep_mark()
        client.set_experiment_tag(experiment, VIEW_TAG, view())
        start = round(self._began() * 1000)
        return client.create_run(experiment, start, tags={RUN_TAG: self.reference["token"]}, run_name=self._run)

    def _began(self) -> float:
        """When the run began, in seconds since 1970, by its journal: MLflow may first hear of it much later."""
        first = next(stream_entries(self._folder), None)
        return float(first["time"]) if first else time.time()

    def _experiment_id(self, client: "MlflowClient") -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(client.create_experiment(self._experiment, artifact_location=artifact_place(self.uri)))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run of ours was faster
                    raise
            return self._experiment_id(client)
        _restore_experiment(client, found.experiment_id)
        return str(found.experiment_id)

    def _log_parameters(self, parameters: Mapping[str, object]) -> dict[str, str]:
        """Logs parameters; those that a resumed run changed cannot be overwritten in MLflow, and are returned as tags."""
        from mlflow.entities import Param

        client, run_id = self.connect()
        known = client.get_run(run_id).data.params
        # As the journal gives lists back: a replay must not make a setting look changed, nor two runs look different.
        listed = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
        texts = {metric_name(key): str(value)[:LONGEST_PARAMETER] for key, value in listed.items()}
        fresh = [Param(key, text) for key, text in texts.items() if key not in known]
        for start in range(0, len(fresh), PARAMETERS_A_CALL):
            client.log_batch(run_id, params=fresh[start : start + PARAMETERS_A_CALL])
        return {f"resumed.{key}": text for key, text in texts.items() if known.get(key, text) != text}

    def _metrics(self, entry: Metrics | System, problems: list[str]) -> "Iterator[Metric]":
        from mlflow.entities import Metric

        for key, value in entry["values"].items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                problems.append(f"`{key}` is {value!r} at step {entry['step']}, no number, and is not in MLflow")
                continue
            # MLflow stores infinity as 1.8e308, which flattens every curve; as NaN it shows that something broke.
            number = float("nan") if number in (float("inf"), float("-inf")) else number
            yield Metric(metric_name(key), number, round(float(entry["time"]) * 1000), int(entry["step"] or 0))

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
        # One bad value must hold up nothing else: halve until it stands alone.
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
    """Imports MLflow with our settings, which takes seconds; later calls do nothing."""
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    import mlflow  # noqa: F401

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def database(storage: Folder) -> str:
    """The URI of the database beside the runs of a local storage."""
    return f"sqlite:///{storage.local}/{DATABASE_FILE}"


def stored_uri(reference: Mapping[str, Any]) -> str | None:
    """Returns the tracking URI that a reference names; None for the database of the storage that its run lies in.

    Earlier versions wrote the path of that database, which is another one if the storage was copied.
    """
    uri = reference.get("uri")
    own = uri is None or uri == OWN_DATABASE or (uri.startswith("sqlite:///") and Path(uri).name == DATABASE_FILE)
    return None if own else uri


def artifact_place(uri: str) -> str | None:
    """Where a database's experiments keep artifacts: `mlartifacts` beside it; None for a server, which has its own place."""
    return str(Path(uri.removeprefix("sqlite:///")).parent / ARTIFACT_FOLDER) if uri.startswith("sqlite:///") else None


def relocate_artifacts(uri: str) -> None:
    """Updates the places of artifacts in a storage's own database, if it was copied or moved with them.

    MLflow keeps absolute places of artifacts in experiments, runs and logged models. Call it under `schema_lock`.
    """
    place, path = artifact_place(uri), Path(uri.removeprefix("sqlite:///"))
    assert place is not None
    if not path.exists():
        return
    with closing(sqlite3.connect(path, timeout=SCHEMA_TIMEOUT_S)) as connection, connection:
        tables = {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
        columns = [(table, column) for table, column in ARTIFACT_COLUMNS if table in tables]
        for table, column in columns:
            found_places = f"select distinct {column} from {table} where {column} is not null"  # noqa: S608, constants
            for (old,) in connection.execute(found_places).fetchall():
                base, found, rest = old.rpartition(f"/{ARTIFACT_FOLDER}")
                before = f"{base}{found}".removeprefix("file://")
                if not found or rest[:1] not in ("", "/") or before == place or _is_same_folder(before, place):
                    continue
                update = f"update {table} set {column} = ? where {column} = ?"  # noqa: S608, constants
                connection.execute(update, (f"{place}{rest}", old))


def _is_same_folder(first: str, second: str) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _forget_artifact_place(run_id: str) -> None:
    """Drops the place of the run's artifacts that MLflow keeps for this process: it may be that of another copy."""
    from mlflow.tracking._tracking_service import utils

    getattr(utils, "_artifact_repos_cache", {}).pop(run_id, None)


def _restore_experiment(client: "MlflowClient", experiment: str) -> None:
    if client.get_experiment(experiment).lifecycle_stage == "deleted":
        client.restore_experiment(experiment)


def metric_name(key: str) -> str:
    """The key in characters that MLflow takes everywhere, as a clean relative path."""
    parts = [re.sub(r"[^\w.\-: ]", "_", part, flags=re.ASCII).replace(":", "_") for part in key.split("/")]
    return "/".join(part for part in parts if part.strip(". "))[:LONGEST_NAME] or "unnamed"


@contextmanager
def schema_lock(uri: str) -> "Iterator[None]":
    """Keeps two processes from making one SQLite file's tables at once, on which one would die. Raises TimeoutError."""
    if not uri.startswith("sqlite:///"):
        yield
        return
    path = Path(uri.removeprefix("sqlite:///") + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, SCHEMA_TIMEOUT_S, TimeoutError(f"another process holds {path} for {SCHEMA_TIMEOUT_S:.0f} s")):
        yield


def _tags(entry: Entry) -> dict[str, str]:
    values = entry["values"]
    if entry["kind"] == "tags":
        return {metric_name(key): str(value) for key, value in values.items()}
    if entry["kind"] == "checkpoint":
        return {"raystride.checkpoint": str(values["path"])}
    if entry["kind"] == "error":
        return {"raystride.error": str(values["text"])[-LONGEST_TAG:]}
    return {}
