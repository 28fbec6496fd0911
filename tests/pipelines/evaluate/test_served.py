"""A served model answers requests by their content, and opens no path that they name."""

import io
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raystride.pipelines.config import Config, ModelConfig, RecordConfig, SampleConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.evaluate.load_run import LoadedModel
from raystride.pipelines.system.storage.folder import Folder

SHAPE = (1, 4, 6)


def _picture() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a served model of images, with a picture."""
    from raystride.pipelines.evaluate.mlflow_model import _write_files

    folder = tmp_path_factory.mktemp("served")
    config = Config(
        task="images",
        run="pictures",
        model=ModelConfig(channels=(4,), hidden=(8,)),
        record=RecordConfig(mlflow_uri="https://me:hunter2@tracking"),
    )
    task = build_task(config, {"labels": ["no", "yes"], "image": list(SHAPE)})
    _write_files(
        LoadedModel(config, task, task.build_model().eval(), 0, Folder(str(folder))), SampleConfig(), Folder(str(folder))
    )
    (folder / "picture.png").write_bytes(_picture())
    return folder


def _post_images(place: Path, *images: object) -> Any:
    import pandas as pd  # type: ignore[import-untyped]

    from raystride.pipelines.evaluate.served import MlflowModel

    served = MlflowModel()
    served.open(str(place))
    return served.predict(None, pd.DataFrame({"image": list(images)}))


def test_bytes_and_data_uris_are_answered(place: Path) -> None:
    uri = f"data:image/png;base64,{b64encode(_picture()).decode()}"
    first, second = json.loads(_post_images(place, uri, _picture()).to_json(orient="records"))
    assert first == second
    assert first["label"] in ("no", "yes")


@pytest.mark.parametrize(
    "name", ["{place}/picture.png", "/no/such/file", "http://127.0.0.1:1/x", "/dev/zero", "picture.png"]
)
def test_all_paths_in_requests_are_refused(place: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody learns by it which files there are."""
    monkeypatch.chdir(place)
    name = name.format(place=place)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (all of it is compared)
        _post_images(place, name)
    assert str(raised.value) == f"row 1: column 'image' names {name!r}, which is refused: no file is read here"


def test_its_settings_hold_no_password(place: Path) -> None:
    from raystride.pipelines.evaluate.served import CONFIG

    assert "mlflow_uri: https://***@tracking" in (place / CONFIG).read_text()
