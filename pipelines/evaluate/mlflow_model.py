"""A run's model for MLflow: a folder that `mlflow models serve` answers with, and the same logged to the run.

    write_mlflow_model(opened, folder, Sample())
    log_mlflow_model(opened, reopened, Sample())              # "models:/m-9c0f...", the model `model` of the MLflow run

Nothing in it is unpickled: it is `served.py` with our packages beside it, parameters in safetensors, and JSON and YAML.
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

import raystride
from raystride.pipelines.config import Sample
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.evaluate.opening import Opened
from raystride.pipelines.evaluate.recording import Reopened
from raystride.pipelines.evaluate.served import CONFIG, SAMPLE, WEIGHTS, Served
from raystride.pipelines.files import Folder
from raystride.pipelines.plugins import plugin_code

CODE = Path(raystride.__file__).parent
REQUIREMENTS = ("mlflow", "torch", "numpy", "pandas", "pyarrow", "PyYAML", "safetensors", "tokenizers", "tiktoken", "Pillow")
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
"""An image for the example that a model of images is described with."""
EXAMPLES = {"image": PIXEL, "tools": "[]"}
"""Of kinds of columns that take not any text."""


def write_mlflow_model(opened: Opened, folder: Folder, sample: Sample) -> Folder:
    """Writes the model into a folder, which is made anew, and returns it. `sample` says how a decoder writes."""
    import mlflow

    folder.remove()
    with tempfile.TemporaryDirectory() as scratch, _described(opened, sample) as arguments:
        place = Path(scratch) / "model"
        mlflow.pyfunc.save_model(str(place), **arguments)
        for path in sorted(place.rglob("*")):
            if path.is_file():
                folder.upload(path, str(path.relative_to(place)))
    return folder


def log_mlflow_model(opened: Opened, reopened: Reopened, sample: Sample) -> str:
    """Logs the model to the run; its URI. The run stays ended as it was. Raises what MLflow raises."""
    import mlflow

    _, run_id = reopened.log.connect()
    before = mlflow.get_tracking_uri()
    # `log_model` takes no client: where it logs to is a global of the process.
    mlflow.set_tracking_uri(reopened.log.uri)
    try:
        with _described(opened, sample) as arguments, mlflow.start_run(run_id=run_id):
            logged = mlflow.pyfunc.log_model(name="model", **arguments)
        reopened.end()
    finally:
        mlflow.set_tracking_uri(before)
    return str(logged.model_uri)


@contextmanager
def _described(opened: Opened, sample: Sample) -> Iterator[dict[str, Any]]:
    """What MLflow is told of the model, whose files lie in a temporary folder during the block."""
    # It would draw a bar for each of its copies.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import pandas as pd  # type: ignore[import-untyped]
    from mlflow.models import infer_signature

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        place = str(Path(scratch) / "run")
        _write_files(opened, sample, Folder.at(place))
        served = Served()
        served.open(place)
        columns = opened.task.asked
        example = pd.DataFrame({each.name: [EXAMPLES.get(each.kind, "an example")] for each in columns})
        yield {
            "python_model": str(CODE / "pipelines" / "evaluate" / "served.py"),
            "artifacts": {"run": place},
            "code_paths": [str(CODE), *plugin_code(opened.config.plugins)],
            "signature": infer_signature(example, served.predict(None, example)),
            "input_example": example,
            "pip_requirements": list(_requirements()),
        }


def _write_files(opened: Opened, sample: Sample, folder: Folder) -> None:
    from safetensors.torch import save_model

    assert folder.local
    folder.put(CONFIG, to_yaml(opened.config))
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
