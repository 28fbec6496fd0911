"""A run's model as MLflow loads and serves it: from this very file, and from safetensors and JSON beside it.

    mlflow models serve -m runs/my-run/export/mlflow --env-manager local
    curl -d '{"dataframe_split": {"columns": ["text"], "data": [["free money"]]}}' -H 'Content-Type: application/json' \\
        http://127.0.0.1:5000/invocations
"""

from typing import Any

import mlflow
import pandas as pd  # type: ignore[import-untyped]
from mlflow.pyfunc.model import PythonModel

from raystride.pipelines.config import Answering, Config, Sample
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.evaluate.answering import Answerer
from raystride.pipelines.evaluate.opening import Opened, load_weights, task_at
from raystride.pipelines.files import Folder
from raystride.pipelines.sources.faults import Fault
from raystride.pipelines.sources.fields import document

CONFIG, WEIGHTS, SAMPLE = "config.yaml", "weights.safetensors", "sample.json"


class Served(PythonModel):  # type: ignore[misc]
    """Answers the rows of a data frame whose columns are those of a question."""

    def load_context(self, context: Any) -> None:
        """Opens the model in the artifact `run`."""
        self.open(context.artifacts["run"])

    def open(self, folder: str) -> None:
        """Opens the model in a folder."""
        place = Folder.at(folder)
        config = from_yaml(Config, place.read(CONFIG).decode())
        task = task_at(config, place)
        assert place.local
        opened = Opened(config, task, load_weights(config, task, place.local / WEIGHTS), step=0, place=place)
        self._answerer = Answerer(opened, Answering(run=config.run or "served"), Sample(**place.read_json(SAMPLE)))

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """A data frame of answers to one of questions, row by row. Raises ValueError where a row is no question."""
        columns, answerer, examples = self._answerer.task.asked, self._answerer, []
        rows = model_input[[column.name for column in columns]].itertuples(index=False)
        for number, row in enumerate(rows, 1):
            found = next(document(row, f"row {number}", columns), Fault(f"row {number}", "is empty"))
            if isinstance(found, Fault):
                raise ValueError(f"{found.place}: {found.reason}")
            examples += answerer.examples(found)
        answers = pd.DataFrame(list(answerer.answers(examples)))
        return answers.drop(columns=[column.name for column in columns])


mlflow.models.set_model(Served())
