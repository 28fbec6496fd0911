"""The description of a run that MLflow shows on its page: where its files lie, what it runs on, Ray's page, what to do next.

tags = {"raystride.attempt": "a1", "raystride.strategy": "ddp", "raystride.workers": "2", "raystride.device": "cpu"}
describe(Folder("/data/runs/mine"), tags)                      # markdown: a table of two columns and a command
"""

from collections.abc import Mapping

from pipelines.files import Folder

TAG = "mlflow.note.content"
"""The tag that MLflow shows as description."""
HEAD = "| Raystride | |"
"""The first line of ours: a description that begins otherwise was written by a person, and stays."""


def describe(run_folder: Folder, tags: Mapping[str, str]) -> str:
    """The description in markdown, from the tags of the run's newest attempt."""
    known = {key.removeprefix("raystride."): value for key, value in tags.items()}
    storage, _, run = run_folder.uri.rpartition("/")
    rows = {"folder": f"`{run_folder}`"}
    if "ray_job" in known:
        rows["Ray job"] = f"[{known['ray_job_id']}]({known['ray_job']}): log, state and metrics, while the cluster lives"
    rows["newest attempt"] = f"`{known['attempt']}`"
    if "workers" in known:
        rows["trained by"] = f"{known['workers']} worker(s) on {known['device']}, {known['strategy']}"
    if "commit" in known:
        rows["source"] = f"commit `{known['commit'][:12]}`{', with changes' if known.get('dirty') == 'True' else ''}"
    rows["report"] = "`report.html` among the artifacts, once the run has ended"
    table = [HEAD, "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows.items())]
    return "\n".join([*table, "", f"`python ray_jobs/runs.py show {run} --storage {storage}`"])


def is_ours(note: str | None) -> bool:
    """Whether a description may be replaced: there is none, or it is an earlier one of ours."""
    return not note or note.startswith(HEAD)
