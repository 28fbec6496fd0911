"""What a storage's MLflow database holds of a run.

run = only_run(config, "name"); run.data.metrics["val/loss"]; artifacts(config, run)["config.yaml"]
"""

import tempfile
from pathlib import Path
from typing import Any

from raystride.pipelines.config import Config


def only_run(config: Config, name: str) -> Any:
    """The one MLflow run of that name; there must be no second."""
    client = _client(config)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"attributes.run_name = '{name}'")
    return run


def artifacts(config: Config, run: Any) -> dict[str, bytes]:
    """The run's files at the top of its artifacts, as MLflow gives them out."""
    client = _client(config)
    with tempfile.TemporaryDirectory() as folder:
        names = [item.path for item in client.list_artifacts(run.info.run_id) if not item.is_dir]
        return {name: Path(client.download_artifacts(run.info.run_id, name, folder)).read_bytes() for name in names}


def _client(config: Config) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{config.storage}/mlflow.db")
