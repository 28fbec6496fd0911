"""A run's model as MLflow loads and serves it, from a folder of safetensors, YAML and JSON.

    mlflow models serve -m runs/my-run/export/mlflow --env-manager local
    curl -d '{"dataframe_split": {"columns": ["text"], "data": [["free money"]]}}' -H 'Content-Type: application/json' \\
        http://127.0.0.1:5000/invocations
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.pyfunc.model import PythonModel

from raystride.pipelines.config import Config, PredictorConfig, SampleConfig
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.data.sources.faults import Fault
from raystride.pipelines.data.sources.fields import read_document
from raystride.pipelines.evaluate.answering import Predictor
from raystride.pipelines.evaluate.load_run import LoadedModel, load_task, load_weights
from raystride.pipelines.system.storage.folder import Folder

CONFIG, WEIGHTS, SAMPLE = "config.yaml", "weights.safetensors", "sample.json"


class MlflowModel(PythonModel):  # type: ignore[misc]
    """Predicts the rows of a data frame with the columns of the task's inputs."""

    def load_context(self, context: Any) -> None:
        """Opens the model in the artifact `run`."""
        self.open(context.artifacts["run"])

    def open(self, folder: str) -> None:
        """Opens the model in a folder."""
        place = Folder.from_uri(folder)
        config = from_yaml(Config, place.read(CONFIG).decode())
        assert place.local
        config = replace(config, plugins=tuple(_find_exported(plugin, place.local) for plugin in config.plugins))
        task = load_task(config, place)
        opened = LoadedModel(config, task, load_weights(config.model, task, place.local / WEIGHTS), step=0, place=place)
        self._predictor = Predictor(
            opened, PredictorConfig(run=config.run or "served"), SampleConfig(**place.read_json(SAMPLE))
        )

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Returns a data frame of predictions, row by row. Raises ValueError if a row is not a valid input."""
        columns, predictor, examples = self._predictor.task.asked, self._predictor, []
        rows = model_input[[column.name for column in columns]].itertuples(index=False)
        for number, row in enumerate(rows, 1):
            piece = next(iter(read_document(row, f"row {number}", columns)), Fault(f"row {number}", "is empty"))
            if isinstance(piece, Fault):
                raise ValueError(f"{piece.place}: {piece.reason}")
            examples += predictor.build_examples(piece)
        answers = pd.DataFrame(list(predictor.predict_examples(examples)))
        return answers.drop(columns=[column.name for column in columns])


def _find_exported(plugin: str, folder: Path) -> str:
    """Returns a plug-in's file in the code of the exported model, whose artifact `run` is the folder, else its name."""
    exported = folder.parents[1] / "code" / Path(plugin).name
    return str(exported) if plugin.endswith(".py") and exported.is_file() else plugin
