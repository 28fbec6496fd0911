"""Addresses of the pages that show runs: in MLflow a run, the table of all, several compared; in Ray's dashboard a job.

A reference is what a run's `mlflow.json` holds: which run it is in MLflow. One in a tracking server has its page there; for
one in a database the address is that of MLflow's UI as `raystride ui` starts it: on loopback, at
port 5000 unless it was given another.

    run_link({"uri": "http://host:5000", "experiment_id": "1", "run_id": "9c"})   # http://host:5000/#/experiments/1/runs/9c?...
    comparison_link([one, other])                                # http://host:5000/#/compare-runs?runs=[...]&experiments=[...]
    job_link("http://127.0.0.1:8265", "raysubmit_x")             # http://127.0.0.1:8265/#/jobs/raysubmit_x
"""

import json
from collections.abc import Iterable, Mapping
from shlex import quote as in_shell
from typing import Any
from urllib.parse import quote

from raystride.pipelines.files import Folder

UI_PORT = 5000
SIDE = "workflowType=machine_learning"
"""Which side of MLflow's UI opens: without it that for language models' traces, where a run is called an evaluation."""
VIEW = "raystride"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
"""The tag of an experiment in which MLflow's UI looks for the view that an address names."""
METRICS = (
    "train_loss",
    "val_loss",
    "run_tokens_per_second",
    "run_mfu",
    "run_step_seconds_p50",
    "run_data_wait_share",
    "run_peak_memory_bytes",
)
PARAMETERS = ("train.steps", "train.precision", "optimizer.learning_rate")
TAGS = ("raystride.strategy", "raystride.workers", "raystride.device", "raystride.commit")


def view() -> str:
    """The table of runs as we want it seen: its columns, the newest run first; the text of `VIEW_TAG`.

    MLflow keeps columns in the browser. The exception is what its Share button makes: a tag of the experiment that holds the
    state of its web page as JSON (fields read in the source of MLflow 3.17; seen in a browser).
    """
    groups = (("metrics", METRICS), ("params", PARAMETERS), ("tags", TAGS))
    columns = [f"{kind}.`{name}`" for kind, names in groups for name in names]
    shown = {"selectedColumns": columns, "columnOrder": columns}
    return json.dumps(shown | {"orderByKey": "attributes.start_time", "orderByAsc": False})


def run_link(reference: Mapping[str, Any], port: int = UI_PORT) -> str | None:
    """The run's page; None where MLflow does not have it (yet)."""
    if "run_id" not in reference:
        return None
    return f"{_server(reference, port)}/#/experiments/{reference['experiment_id']}/runs/{reference['run_id']}?{SIDE}"


def runs_link(reference: Mapping[str, Any], port: int = UI_PORT) -> str:
    """The table of all runs of the run's experiment, with the columns of `view`."""
    return f"{_server(reference, port)}/#/experiments/{reference['experiment_id']}/runs?viewStateShareKey={VIEW}&{SIDE}"


def comparison_link(references: Iterable[Mapping[str, Any]], port: int = UI_PORT) -> str | None:
    """The page that compares runs, such as a sweep's; None for fewer than two, or where no single server has them all."""
    known = [reference for reference in references if "run_id" in reference]
    if len(known) < 2 or len({reference["uri"] for reference in known}) > 1:
        return None
    runs = _listed(reference["run_id"] for reference in known)
    experiments = _listed(dict.fromkeys(reference["experiment_id"] for reference in known))
    return f"{_server(known[0], port)}/#/compare-runs?runs={runs}&experiments={experiments}&{SIDE}"


def on_a_server(reference: Mapping[str, Any]) -> bool:
    """Whether the run is in a tracking server, which has pages without our starting a UI."""
    return str(reference.get("uri", "")).startswith("http")


def job_link(dashboard: str, job: str) -> str:
    """The page of a job in Ray's dashboard at an address such as `http://127.0.0.1:8265`; `job` is its submission's name."""
    return f"{dashboard.rstrip('/')}/#/jobs/{quote(job)}"


def _server(reference: Mapping[str, Any], port: int) -> str:
    return str(reference["uri"]).rstrip("/") if on_a_server(reference) else f"http://127.0.0.1:{port}"


def _listed(texts: Iterable[str]) -> str:
    """A JSON list of texts for an address, whose quotation references terminals would otherwise end the link at."""
    return json.dumps(list(texts), separators=(",", ":")).replace('"', "%22")


NOTE_TAG = "mlflow.note.content"
"""The tag that MLflow shows as description."""
NOTE_HEAD = "| Raystride | |"
"""The first line of ours: a description that begins otherwise was written by a person, and stays."""


def describe_run(run_folder: Folder, tags: Mapping[str, str]) -> str:
    """The description in markdown, from the tags of the run's newest attempt."""
    known = {key.removeprefix("raystride."): value for key, value in tags.items()}
    storage, run = run_folder.parent, run_folder.name
    rows = {"folder": f"`{run_folder}`"}
    if "ray_job" in known:
        rows["Ray job"] = f"[{known['ray_job_id']}]({known['ray_job']}): log, state and metrics, while the cluster lives"
    rows["newest attempt"] = f"`{known['attempt']}`"
    if "workers" in known:
        rows["trained by"] = f"{known['workers']} worker(s) on {known['device']}, {known['strategy']}"
    source = [f"Raystride {known['version']}"] if "version" in known else []
    if "commit" in known:
        source.append(f"commit `{known['commit'][:12]}`{', with changes' if known.get('dirty') == 'True' else ''}")
    if source:
        rows["source"] = ", ".join(source)
    rows["report"] = "`report.html` among the artifacts, once the run has ended"
    table = [NOTE_HEAD, "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    return "\n".join([*table, "", f"`raystride runs show {in_shell(run)} --storage {in_shell(str(storage))}`"])


def is_our_note(note: str | None) -> bool:
    """Whether a description may be replaced: there is none, or it is an earlier one of ours."""
    return not note or note.startswith(NOTE_HEAD)
