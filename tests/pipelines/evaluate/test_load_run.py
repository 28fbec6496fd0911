"""A run is opened at the requested checkpoint, with its own tokenizer; missing runs are named."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raystride
from raystride.pipelines.config import CheckpointConfig, TokenizerConfig, ValidationConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.evaluate.load_run import open_cached, open_run, select_run
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.errors import refused
from tests.flips import flip_bit
from tests.processes import make_job
from tests.tiny import tiny, write_text


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A storage with a run whose best checkpoint is not its last, and one without checkpoints."""
    path = tmp_path_factory.mktemp("opening")
    # By a metric that is best where it is largest, the falling loss is best at the first validation.
    validation = ValidationConfig(every=2, samples=16, direction="max")
    config = tiny(
        write_text(path),
        validation=validation,
        tokenizer=TokenizerConfig(kind="characters"),
        checkpoint=CheckpointConfig(every=2),
    )
    for name, every in (("trained", 2), ("unsaved", 0)):
        job = make_job(replace(config, checkpoint=CheckpointConfig(every=every)), path, name)
        job.folder.put("config.yaml", to_yaml(job.config))
        training = build_training(job, WorkerInfo(), [], lambda: False, lambda _: None)
        training.run()
        job.folder.put_json("trained.json", parameters_sha256(training.model))
    return Folder(str(path))


def test_the_last_checkpoint_is_the_trained_model(storage: Folder) -> None:
    opened = open_run(storage, "trained", "last")
    assert opened.step == 6
    assert not opened.model.training
    assert parameters_sha256(opened.model) == json.loads((storage / "trained").read("trained.json"))


def test_the_best_checkpoint_is_where_the_metric_was_best(storage: Folder) -> None:
    opened = open_run(storage, "trained")
    assert opened.step == 2
    last = open_run(storage, "trained", "last").model.state_dict()
    assert any(not torch.equal(value, last[name]) for name, value in opened.model.state_dict().items())


def test_the_tokenizer_is_the_one_it_was_trained_with(storage: Folder) -> None:
    encoder = open_run(storage, "trained").encoder
    assert encoder.decode(encoder.encode("the quick fox").tolist()) == "the quick fox"
    assert encoder.vocabulary_size < 60


def test_it_opens_without_the_data_it_was_prepared_from(storage: Folder, tmp_path: Path) -> None:
    shutil.copytree(f"{storage}/trained", tmp_path / "trained")
    assert open_run(Folder(str(tmp_path)), "trained", "last").step == 6


def test_a_run_that_is_not_there_names_those_that_are(storage: Folder) -> None:
    with refused("run", "nobody", names=["no run 'nobody'", "trained, unsaved"]):
        open_run(storage, "nobody")


def test_an_empty_storage_has_none(tmp_path: Path) -> None:
    with refused("run", "nobody", names=["none"]):
        open_run(Folder(str(tmp_path)), "nobody")


def test_a_run_without_a_checkpoint_says_how_to_get_one(storage: Folder) -> None:
    with refused("run", "unsaved", names=["checkpoint.every"]):
        open_run(storage, "unsaved")


def test_a_damaged_best_is_not_replaced_by_another(storage: Folder, tmp_path: Path) -> None:
    shutil.copytree(f"{storage}/trained", tmp_path / "trained")
    (data,) = (tmp_path / "trained" / "checkpoints" / "step-00000002").glob("*/rank-0.bin")
    flip_bit(data, data.stat().st_size - 1)
    run = raystride.Run.open("trained", str(tmp_path))
    with refused("checkpoint", "best", names=["step-00000002", "rank-0.bin differs", "--checkpoint last", "4, 6"]):
        run.load_model()
    with refused("checkpoint", 2, names=["step-00000002", "rank-0.bin differs"]):
        run.load_model(2)
    assert parameters_sha256(run.load_model("last")) == json.loads((storage / "trained").read("trained.json"))


def test_a_model_is_loaded_once_until_another_one_is_asked_for(storage: Folder) -> None:
    best = select_run(storage, "trained", "best")
    kept = open_cached(best)
    again = open_cached(best.with_beams(3))
    assert again.model is kept.model
    assert again.config.decoding.beams == 3
    last = open_cached(select_run(storage, "trained", "last"))
    assert parameters_sha256(last.model) != parameters_sha256(kept.model)
    assert open_cached(best).model is not kept.model, "one at a time is kept"
    assert parameters_sha256(open_cached(best).model) == parameters_sha256(best.open().model)


def test_means_of_several_checkpoints_are_not_taken_for_each_other(storage: Folder) -> None:
    """Their newest checkpoint is the same."""
    chosen = [select_run(storage, "trained", "last", average) for average in (1, 2, 3, 2, 1)]
    wanted = [parameters_sha256(one.open().model) for one in chosen]
    assert [parameters_sha256(open_cached(one).model) for one in chosen] == wanted
    assert len(set(wanted)) == len({one.identity for one in chosen}) == 3
