"""URLs of runs in MLflow (a run, the table of runs, a comparison) and of jobs in Ray's dashboard.

A reference is the content of a run's `mlflow.json`, which identifies its MLflow run. A run in a tracking server has its page
there; for a run in a database the URL is that of MLflow's UI as `raystride ui` starts it, on loopback at port 5000 by
default.

    run_link({"uri": "http://host:5000", "experiment_id": "1", "run_id": "9c"})   # http://host:5000/#/experiments/1/runs/9c?...
    comparison_link([one, other])                                # http://host:5000/#/compare-runs?runs=[...]&experiments=[...]
    job_link("http://127.0.0.1:8265", "raysubmit_x")             # http://127.0.0.1:8265/#/jobs/raysubmit_x
"""

import json
from collections.abc import Iterable, Mapping
from shlex import quote as in_shell
from typing import Any
from urllib.parse import quote

from raystride.pipelines.system.storage.folder import Folder

UI_PORT = 5000
WORKFLOW_QUERY = "workflowType=machine_learning"
"""Query that opens MLflow's UI for training runs; without it that for LLM traces opens, which calls a run an evaluation."""
VIEW_KEY = "raystride"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
"""Tag of an experiment that holds the view named in a URL, for MLflow's UI."""
VIEW_METRICS = (
    "train/loss",
    "val/loss",
    "val/accuracy",
    "val/perplexity",
    "run_tokens_per_second",
    "run_mfu",
    "run_step_seconds_p50",
    "run_data_wait_share",
    "run_peak_memory_bytes",
)
VIEW_PARAMETERS = ("train.steps", "train.precision", "optimizer.learning_rate")
VIEW_TAGS = ("raystride.strategy", "raystride.workers", "raystride.device", "raystride.commit")


def runs_table_view() -> str:
    """Returns the view of the table of runs, its columns and the newest run first, as the text of `VIEW_TAG`.

    MLflow stores columns in the browser. The exception is its Share button, which writes the state of its web page as JSON
    to a tag of the experiment (fields as in the source of MLflow 3.17; seen in a browser).
    """
    groups = (("metrics", VIEW_METRICS), ("params", VIEW_PARAMETERS), ("tags", VIEW_TAGS))
    columns = [f"{kind}.`{name}`" for kind, names in groups for name in names]
    view_state = {"selectedColumns": columns, "columnOrder": columns}
    return json.dumps(view_state | {"orderByKey": "attributes.start_time", "orderByAsc": False})


def run_link(reference: Mapping[str, Any], port: int = UI_PORT) -> str | None:
    """Returns the link of the run's page; None if MLflow does not have the run (yet)."""
    if "run_id" not in reference:
        return None
    experiment = f"{_ui_address(reference, port)}/#/experiments/{reference['experiment_id']}"
    return f"{experiment}/runs/{reference['run_id']}?{WORKFLOW_QUERY}"


def runs_link(reference: Mapping[str, Any], port: int = UI_PORT) -> str:
    """Returns the link of the table of all runs of the experiment, with the columns of `runs_table_view`."""
    experiment = f"{_ui_address(reference, port)}/#/experiments/{reference['experiment_id']}"
    return f"{experiment}/runs?viewStateShareKey={VIEW_KEY}&{WORKFLOW_QUERY}"


def comparison_link(references: Iterable[Mapping[str, Any]], port: int = UI_PORT) -> str | None:
    """Returns the link of the page that compares runs; None for fewer than two, or if no single server has them all."""
    logged = [reference for reference in references if "run_id" in reference]
    if len(logged) < 2 or len({reference["uri"] for reference in logged}) > 1:
        return None
    runs = _to_url_json(reference["run_id"] for reference in logged)
    experiments = _to_url_json(dict.fromkeys(reference["experiment_id"] for reference in logged))
    return f"{_ui_address(logged[0], port)}/#/compare-runs?runs={runs}&experiments={experiments}&{WORKFLOW_QUERY}"


def is_on_server(reference: Mapping[str, Any]) -> bool:
    """Returns whether the run is in a tracking server, so that its page exists without `raystride ui`."""
    return str(reference.get("uri", "")).startswith("http")


def job_link(dashboard: str, job: str) -> str:
    """Returns the link of a job in Ray's dashboard at an URL such as `http://127.0.0.1:8265`; `job` is its submission id."""
    return f"{dashboard.rstrip('/')}/#/jobs/{quote(job)}"


def _ui_address(reference: Mapping[str, Any], port: int) -> str:
    return str(reference["uri"]).rstrip("/") if is_on_server(reference) else f"http://127.0.0.1:{port}"


def _to_url_json(texts: Iterable[str]) -> str:
    """Returns a JSON list of texts for a URL, with escaped quotation marks, at which terminals would end the link."""
    return json.dumps(list(texts), separators=(",", ":")).replace('"', "%22")


NOTE_TAG = "mlflow.note.content"
"""Tag that MLflow shows as the description of a run."""
NOTE_HEADER = "| Raystride | |"
"""First line of a generated description; any other description was written by a person and is kept."""


def describe_run(run_folder: Folder, tags: Mapping[str, str]) -> str:
    """Returns the run's description in Markdown, from the tags of its newest attempt."""
    facts = {key.removeprefix("raystride."): value for key, value in tags.items()}
    storage, run = run_folder.parent, run_folder.name
    rows = {"folder": f"`{run_folder}`"}
    if "ray_job" in facts:
        rows["Ray job"] = f"[{facts['ray_job_id']}]({facts['ray_job']}): log, state and metrics, while the cluster lives"
    rows["newest attempt"] = f"`{facts['attempt']}`"
    if "workers" in facts:
        rows["trained by"] = f"{facts['workers']} worker(s) on {facts['device']}, {facts['strategy']}"
    source = [f"Raystride {facts['version']}"] if "version" in facts else []
    if "commit" in facts:
        source.append(f"commit `{facts['commit'][:12]}`{', with changes' if facts.get('dirty') == 'True' else ''}")
    if source:
        rows["source"] = ", ".join(source)
    rows["report"] = "`report.html` among the artifacts, once the run has ended"
    table = [NOTE_HEADER, "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    return "\n".join([*table, "", f"`raystride runs show {in_shell(run)} --storage {in_shell(str(storage))}`"])


def is_our_note(note: str | None) -> bool:
    """Returns whether a description may be replaced: it is empty, or an earlier generated one."""
    return not note or note.startswith(NOTE_HEADER)
