"""Shows a storage's runs in MLflow on this machine; runs whose process is gone are ended there as KILLED first.

raystride ui --storage runs --port 5000
"""

from collections.abc import Sequence

from raystride.pipelines.config.words import last_value
from raystride.pipelines.launch.run_store.commands import end_killed_runs_in_mlflow
from raystride.pipelines.observability.record.mlflow import ui
from raystride.pipelines.system.storage.folder import Folder


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    end_killed_runs_in_mlflow(Folder.from_uri(last_value(arguments, "storage") or "runs"))
    return ui.main(list(arguments))
