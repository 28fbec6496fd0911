"""A run's model for MLflow: a folder for `mlflow models serve`, and the same logged to the run.

    write_mlflow_model(opened, folder, SampleConfig())
    log_mlflow_model(opened, reopened, SampleConfig())  # "models:/m-9c0f...", the model `model` of the MLflow run

Nothing in it is unpickled: it is a file of code with our packages beside it, parameters in safetensors, and JSON and YAML.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from raystride.locations import PACKAGE
from raystride.pipelines.config import SampleConfig
from raystride.pipelines.config.parse import to_stored_yaml
from raystride.pipelines.data.plugins import plugin_paths
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.evaluate.recording import ReopenedRun
from raystride.pipelines.evaluate.served import CONFIG, SAMPLE, WEIGHTS, MlflowModel
from raystride.pipelines.system.storage.folder import Folder

REQUIREMENTS = ("mlflow", "torch", "numpy", "pandas", "pyarrow", "PyYAML", "safetensors", "tokenizers", "tiktoken", "Pillow")
MODEL_CODE = '''"""The model of a Raystride run, for MLflow."""

import mlflow
from raystride.exported import MlflowModel

mlflow.models.set_model(MlflowModel())
'''
"""Python file that MLflow runs to load the model. It lies in users' folders, so it names one module that does not move."""
EXAMPLE_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""Image of the input example of an image model."""
EXAMPLE_VALUES = {"image": EXAMPLE_IMAGE, "tools": "[]"}
"""For kinds of columns that do not accept any text."""


def write_mlflow_model(opened: LoadedModel, folder: Folder, sample: SampleConfig) -> Folder:
    """Replaces a folder by the model, and returns it. `sample` configures a decoder's text."""
    import mlflow

    folder.remove()
    with tempfile.TemporaryDirectory() as scratch, _mlflow_arguments(opened, sample) as arguments:
        place = Path(scratch) / "model"
        mlflow.pyfunc.save_model(str(place), **arguments)
        for path in sorted(place.rglob("*")):
            if path.is_file():
                folder.upload(path, str(path.relative_to(place)))
    return folder


def log_mlflow_model(opened: LoadedModel, reopened: ReopenedRun, sample: SampleConfig) -> str:
    """Logs the model to the run without changing its end; returns the model's URI. Raises the errors of MLflow."""
    import mlflow

    _, run_id = reopened.log.connect()
    previous_uri = mlflow.get_tracking_uri()
    # `log_model` takes no client: its target is a global of the process.
    mlflow.set_tracking_uri(reopened.log.uri)
    try:
        with _mlflow_arguments(opened, sample) as arguments, mlflow.start_run(run_id=run_id):
            logged = mlflow.pyfunc.log_model(name="model", **arguments)
        reopened.end()
    finally:
        mlflow.set_tracking_uri(previous_uri)
    return str(logged.model_uri)


@contextmanager
def _mlflow_arguments(opened: LoadedModel, sample: SampleConfig) -> Iterator[dict[str, Any]]:
    """Yields MLflow's arguments for the model; its files are in a temporary folder during the block."""
    # MLflow would draw a bar for each of its copies.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import pandas as pd  # type: ignore[import-untyped]
    from mlflow.models import infer_signature

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        place = str(Path(scratch) / "run")
        _write_files(opened, sample, Folder.from_uri(place))
        served = MlflowModel()
        served.open(place)
        columns = opened.task.asked
        example = pd.DataFrame({column.name: [EXAMPLE_VALUES.get(column.kind, "an example")] for column in columns})
        (code := Path(scratch) / "served.py").write_text(MODEL_CODE)
        yield {
            "python_model": str(code),
            "artifacts": {"run": place},
            "code_paths": [str(PACKAGE), *plugin_paths(opened.config.plugins)],
            "signature": infer_signature(example, served.predict(None, example)),
            "input_example": example,
            "pip_requirements": list(_requirements()),
        }


def _write_files(opened: LoadedModel, sample: SampleConfig, folder: Folder) -> None:
    from safetensors.torch import save_model

    assert folder.local
    folder.put(CONFIG, to_stored_yaml(opened.config))
    save_model(opened.model, str(folder.local / WEIGHTS))
    folder.put_json(SAMPLE, asdict(sample))
    folder.put_json("facts.json", dict(opened.task.facts) | {"tokenizers": list(opened.task.tokenizers)})
    for tokenizer in opened.task.tokenizers:
        for name in (opened.place / tokenizer).names():
            (folder / tokenizer).put(name, (opened.place / tokenizer).read(name))


def _requirements() -> Iterator[str]:
    for name in REQUIREMENTS:
        try:
            yield f"{name}=={version(name)}"
        except PackageNotFoundError:
            continue
