"""A training in the caller's process leaves the process as it was, and ends with its run."""

import random
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raystride
from raystride.pipelines.launch.run_store import lease
from raystride.pipelines.launch.run_store.lease import Owner, RunLocked
from raystride.pipelines.observability.record import read_entries, recorder
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.writer import CheckpointWriter
from tests.waiting import wait_until


def _read_process() -> dict[str, Any]:
    return {
        "draws": (random.random(), np.random.rand(), float(torch.rand(()))),
        "threads": torch.get_num_threads(),
        "products": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def test_generators_threads_and_products_are_the_callers_afterwards(tmp_path: Path) -> None:
    model, data = torch.nn.Linear(2, 1), {"x": np.ones((9, 2), np.float32)}
    threads, products = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_num_threads(2)
        torch.backends.cudnn.allow_tf32 = True
        _seed()
        wanted = _read_process()
        _seed()
        raystride.fit(
            model,
            data,
            lambda model, batch: model(batch["x"]).mean(),
            settings={"launch": "inline", "record.mlflow": False, "train.steps": 2, "train.batch": 4, "scaling.threads": 1},
            storage=tmp_path,
        )
        assert _read_process() == wanted
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = products


def test_a_training_that_lost_its_run_ends_and_writes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook it trained on, saved and wrote until the kernel ended."""
    monkeypatch.setattr(lease, "RENEW_S", 0.02)
    run, before, others = Folder(str(tmp_path)) / "mine", set[str](), set(threading.enumerate())

    def list_written() -> set[str]:
        return {name for name in run.sizes() if name.startswith("journal/") or name.endswith("MANIFEST.json")}

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if not before and run.exists("checkpoints/step-00000003/MANIFEST.json"):
            new = asdict(Owner.this_process("theirs")) | {"machine": "another", "host": "h2", "term": 9}
            with lease._exclusive(run):  # as a driver that takes over: not between a renewal's read and its write
                run.put_json("owner.json", new)
            before.update(list_written())
        value: torch.Tensor = model(batch["x"]).mean()
        return value

    settings = {
        "launch": "inline",
        "record.mlflow": False,
        "train.steps": 10**6,
        "train.batch": 4,
        "train.slots": 1,
        "train.log_every": 1,
        "checkpoint.every": 1,
        "data.validation_fraction": 0.2,
    }
    with pytest.raises(RunLocked, match="on h2 has taken over run mine"):
        raystride.fit(
            torch.nn.Linear(2, 1), {"x": np.ones((40, 2), np.float32)}, loss, settings=settings, storage=tmp_path, run="mine"
        )
    names = {"training", "recorder", "checkpoint", "sender-rank0"}
    wait_until(lambda: not names & {thread.name for thread in {*threading.enumerate()} - others}, "the end of its threads")
    assert len(list_written() - before) <= 2, "more than what was on its way"
    assert run.read_json("owner.json")["attempt"] == "theirs"
    assert not run.exists("summary.json")
    assert not run.exists("report.html")


def test_what_was_measured_before_a_checkpoint_is_recorded_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed in between goes on at the checkpoint, and nobody measures the steps before it again."""
    monkeypatch.setattr(recorder, "MIN_PAUSE_S", 3600.0)
    monkeypatch.setattr(recorder, "MAX_PAUSE_S", 3600.0)
    commit, found = CheckpointWriter.commit, {}

    def look(self: CheckpointWriter, *content: Any) -> None:
        entries = list(read_entries(Folder(str(tmp_path)) / "mine"))
        found[self.header["step"]] = [entry["step"] for entry in entries if "train_loss" in entry["values"]]
        commit(self, *content)

    monkeypatch.setattr(CheckpointWriter, "commit", look)
    settings = {
        "launch": "inline",
        "record.mlflow": False,
        "train.steps": 6,
        "train.batch": 4,
        "train.log_every": 1,
        "checkpoint.every": 2,
    }
    raystride.fit(
        torch.nn.Linear(2, 1),
        {"x": np.ones((9, 2), np.float32)},
        lambda model, batch: model(batch["x"]).mean(),
        settings=settings,
        storage=tmp_path,
        run="mine",
    )
    assert {step: recorded[:step] for step, recorded in found.items() if step > 1} == {
        2: [1, 2],
        4: [1, 2, 3, 4],
        6: [1, 2, 3, 4, 5, 6],
    }
