"""The fast-start trainer and Ray's own train the same bits; where Ray is another, the stock one is made."""

import sys
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.cluster.cluster import QUIET
from raystride.pipelines.cluster.recorder_handle import RecorderHandle
from raystride.pipelines.cluster.resources import Share
from raystride.pipelines.cluster.trainer import make_trainer, train_on_ray
from raystride.pipelines.config import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.worker.job import Job
from tests.processes import make_job
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `cluster` sets for every job."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


def _trained(job: Job, fast_start: bool) -> dict[str, Any]:
    storage = Folder(job.folder.uri.rpartition("/")[0])
    recorder = RecorderHandle.start(job.folder, job.run, job.attempt, Record(mlflow=False), storage, parameters={}, tags={})
    return recorder.finish("finished", train_on_ray(job, Share(2, "cpu", 1), recorder, fast_start=fast_start))


@pytest.mark.timeout(600)
def test_lean_and_stock_trainer_give_the_same(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path))
    fast_start, stock = (
        _trained(make_job(config, tmp_path, name), name == "fast_start") for name in ("fast_start", "stock")
    )
    assert (fast_start["steps"], fast_start["workers"], fast_start["ending"]) == (6, 2, "done")
    measured = {key for key in fast_start if "seconds" in key or key.endswith(("_per_second", "_bytes", "_share", "_rank"))}
    assert set(fast_start) == set(stock)
    for key in set(fast_start) - measured - {"run"}:
        assert fast_start[key] == stock[key], key
    assert fast_start["parameters_sha256"]


def _settings() -> dict[str, Any]:
    from ray.train import RunConfig, ScalingConfig

    return {"scaling_config": ScalingConfig(num_workers=1), "run_config": RunConfig(name="name")}


def _kind(fast_start: bool) -> str:
    return type(make_trainer(lambda config: None, _settings(), fast_start=fast_start)).__name__


def test_each_is_made_where_it_is_asked_for() -> None:
    assert _kind(fast_start=True) == "FastStartTrainer"
    assert _kind(fast_start=False) == "TorchTrainer"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("ray.train.v2._internal.execution.failure_handling", "create_failure_policy"),
        ("ray.train.v2._internal.callbacks", "BackendSetupCallback"),
        ("ray.train.v2._internal.constants", "ENV_VARS_TO_PROPAGATE"),
    ],
)
def test_another_ray_gets_the_stock_trainer(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    __import__(module)
    monkeypatch.delattr(sys.modules[module], name)
    monkeypatch.delitem(sys.modules, "raystride.pipelines.cluster.internals", raising=False)
    assert _kind(fast_start=True) == "TorchTrainer"
