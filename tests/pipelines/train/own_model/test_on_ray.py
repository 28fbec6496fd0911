"""Own models on a Ray cluster: data in its store and from Ray Data, functions over data. One cluster for all of it."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import raystride
from raystride.pipelines.config import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model import shared
from raystride.pipelines.train.own_model.dataset import open_dataset
from raystride.pipelines.train.own_model.shared import SharedDataset, share_data
from raystride.pipelines.train.own_model.streams import store_stream
from tests.pipelines.evaluate.test_apply_own_model import INLINE, SETTINGS
from tests.pipelines.train.own_model.models import DATA, make_mlp, masked_loss
from tests.pipelines.train.own_model.test_rows import KINDS, double_in_place

X = np.arange(12, dtype=np.float32).reshape(6, 2)
Y = np.arange(6)


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch, ray_cluster: None) -> None:
    monkeypatch.setattr(shared, "MIN_BYTES", 1)


def _type_names(sample: Any) -> Any:
    values = sample.values() if isinstance(sample, dict) else sample
    return [type(value).__name__ for value in values]


@pytest.mark.parametrize(
    "made",
    [
        lambda: {"x": X, "y": Y},
        lambda: {"x": torch.from_numpy(X), "y": torch.from_numpy(Y), "z": torch.ones(6, dtype=torch.bfloat16)},
        lambda: (X, torch.from_numpy(Y)),
        lambda: [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)],
        lambda: pa.table({"x": X.tolist(), "y": Y}),
        lambda: pd.DataFrame({"x": list(X), "y": Y}),
    ],
    ids=["arrays", "tensors", "tuple", "list", "table", "frame"],
)
def test_samples_are_those_of_the_data_and_writable(made: Callable[[], Any]) -> None:
    by_reference = share_data(made())
    assert isinstance(by_reference, SharedDataset)
    import ray

    dataset, plain = open_dataset(ray.get(ray.put(by_reference))), open_dataset(made())
    assert len(dataset) == len(plain) == 6
    for index in (0, 5, 2):
        found, wanted = dataset[index], plain[index]
        assert _type_names(found) == _type_names(wanted)
        assert str(found) == str(wanted)
        for value in found.values() if isinstance(found, dict) else found:
            if isinstance(value, np.ndarray | torch.Tensor) and value.ndim:
                value[...] = 0  # and not the next time
        assert str(dataset[index]) == str(wanted)


@pytest.mark.parametrize(
    "data", [lambda: [1], torch.utils.data.TensorDataset(torch.ones(2)), range(5)], ids=["call", "own", "range"]
)
def test_other_data_stays_as_it_is(data: Any) -> None:
    assert share_data(data) is data


def test_little_data_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MIN_BYTES", 10_000)
    data = {"x": X}
    assert share_data(data) is data


def test_what_travels_is_small() -> None:
    import ray

    reference = share_data({"x": np.zeros((1000, 1000), np.float32)})
    assert len(reference) == 1000
    assert len(ray.cloudpickle.dumps(reference)) < 2000


def test_a_ray_data_set_is_written_in_its_order(tmp_path: Path, ray_cluster: None) -> None:
    import ray

    dataset = ray.data.range(3000, override_num_blocks=7).map_batches(lambda batch: {"x": batch["id"] * 2.0})
    before = dataset.context.execution_options.preserve_order
    rows = store_stream(dataset, Folder(str(tmp_path)))
    assert [rows[i]["x"] for i in (0, 1, 2999)] == [0.0, 2.0, 5998.0]
    assert dataset.context.execution_options.preserve_order == before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> raystride.Run:
    """A trained run."""
    storage = tmp_path_factory.mktemp("runs")
    return raystride.fit(make_mlp, DATA, masked_loss, settings=SETTINGS, run="own", storage=storage)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tensors", "table"])
def test_a_collate_in_place_on_ray(kind: str, tmp_path: Path) -> None:
    """Each row is doubled once in each epoch: in the store, whose memory is read-only, they are as they were."""

    def loss(model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(batch["x"]).square().mean(), "largest": batch["x"].max()}

    found = raystride.fit(
        lambda: torch.nn.Linear(2, 1),
        KINDS[kind](tmp_path),
        loss,
        validation=KINDS[kind](tmp_path),
        collate=double_in_place,
        settings={"record.mlflow": False, "train.batch": 6, "train.steps": 3, "train.log_every": 1, "scaling.workers": 1},
        run="in place",
        storage=tmp_path,
    )
    assert found.metrics("train_largest").to_pydict()["train_largest"] == [24.0] * 3


@pytest.mark.long
def test_workers_of_ray_give_the_same_rows(run: raystride.Run, ray_cluster: None) -> None:
    scale = 3.0
    fn = lambda model, batch: {"y": scale * model(batch["x"])}  # noqa: E731  # by value, with what it refers to
    on_ray = raystride.predict(run, DATA, {"launch.mode": "ray", "batch": 7}, fn=fn)
    inline = raystride.predict(run, DATA, INLINE, fn=fn)
    assert [row["y"].tolist() for row in on_ray] == [row["y"].tolist() for row in inline]  # type: ignore[union-attr]


def test_a_function_that_cannot_be_pickled_is_refused_by_name(run: raystride.Run, ray_cluster: None) -> None:
    lock = threading.Lock()
    with pytest.raises(SettingError, match=r"fn cannot be sent to Ray's workers, .* \(fn\.lock: TypeError"):
        raystride.predict(run, DATA, {"launch.mode": "ray"}, fn=lambda model, batch: (lock, model(batch["x"]))[1])


COLLECTED = """
import gc, logging, os, sys
import ray
from raystride.pipelines.launch.cluster.cluster import start_local_ray

start_local_ray(num_cpus=1, log_to_driver=False, logging_level=logging.ERROR)
gc.disable()
cycle = [ray.put(number) for number in range(100)]
cycle.append(cycle)
del cycle
if (copy := os.fork()) == 0:
    gc.collect()
    os._exit(0)
os.waitpid(copy, 0)
answered, _ = ray.wait([ray.remote(lambda: 1).remote()], timeout=60)
print(len(answered), flush=True)
os._exit(0)  # ray.shutdown would wait as well
"""


def test_a_copy_of_a_process_collects_no_references_of_ray() -> None:
    """It answered on the sockets that it shares with the process, whose next call of Ray then waited for ever."""
    ended = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False)
    assert ended.stdout == "1\n", ended.stderr
