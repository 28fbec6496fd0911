"""Little is answered in the process that asks, and Ray only where it is worth its start, or asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raystride.pipelines.cluster import answering
from raystride.pipelines.cluster.answering import MAX_INLINE_BYTES, make_part_runner
from raystride.pipelines.config import PredictorConfig
from raystride.pipelines.config.jobs import EvaluateConfig, PredictConfig
from raystride.pipelines.config.run import PredictorLaunchConfig
from raystride.pipelines.evaluate.load_run import select_run
from raystride.pipelines.evaluate.parts import PredictJob
from raystride.pipelines.sources.pieces import Part, Slice
from raystride.pipelines.sources.source import standard_library_files
from raystride.pipelines.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.evaluate.conftest import texts, trained, write_rows

__all__ = ["trained"]

PROGRAM = """
import json, sys
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.jobs import PredictConfig
from raystride.pipelines.launch.finished import predict_files
found = predict_files(load_settings(PredictConfig, json.loads(sys.argv[1])).settings)
print(json.dumps([found.rows, "ray" in sys.modules]))
"""


@pytest.mark.long
def test_thousands_of_short_texts_start_no_ray(trained: Folder, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "questions.jsonl", texts(1800))
    given = {"run": "labels", "storage": str(trained), "input": str(source), "output": str(tmp_path / "out")}
    command = [sys.executable, "-c", PROGRAM, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1800, False]


@pytest.mark.parametrize(
    ("size", "settings", "mode", "address", "here"),
    [
        (MAX_INLINE_BYTES, {}, "auto", None, True),
        (MAX_INLINE_BYTES + 1, {}, "auto", None, False),
        (1, {}, "ray", None, False),
        (1, {}, "auto", "127.0.0.1:6379", False),
        (1, {"workers": 2}, "auto", None, False),
        (MAX_INLINE_BYTES + 1, {}, "inline", None, True),
    ],
)
def test_where_it_is_answered(
    trained: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    settings: dict[str, int],
    mode: str,
    address: str | None,
    here: bool,
) -> None:
    """A cluster that cannot be joined tells that one was asked for."""
    monkeypatch.setattr(answering, "cluster", _no_cluster)
    chosen = select_run(trained, "labels", "last", 1)
    asked = PredictorConfig(run="labels", **settings)  # type: ignore[arg-type]
    run_parts = make_part_runner(asked, PredictorLaunchConfig(mode=mode, address=address))  # type: ignore[arg-type]
    job = PredictJob(chosen=chosen, settings=asked, folder=Folder(str(tmp_path)), readers={})
    part = Part(0, (Slice(standard_library_files()[0], 0, 0, size),), None)
    with pytest.raises(KeyError if here else ConnectionError):  # there is no reader, or no cluster
        run_parts(job, [part])


def _no_cluster(_: object) -> None:
    raise ConnectionError


def test_jobs_on_trained_models_choose_by_themselves() -> None:
    assert EvaluateConfig(run="a").launch.mode == PredictConfig(run="a", text="b").launch.mode == "auto"
    with refused("workers", 2):
        make_part_runner(PredictorConfig(run="a", workers=2), PredictorLaunchConfig(mode="inline"))
