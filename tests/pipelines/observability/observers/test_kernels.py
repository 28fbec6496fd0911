"""The record of a run says which kernels ran, and why one did not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raystride.pipelines.config import TrainConfig, ValidationConfig
from raystride.pipelines.observability.observers.kernels import Kernels
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.record import Sender
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.triton_kernels.attention import attention
from raystride.triton_kernels.dispatch import use_kernels
from raystride.triton_kernels.gelu import gelu
from tests.processes import make_job, run_workers
from tests.receipts import taken
from tests.tiny import tiny, write_text


@pytest.fixture(autouse=True)
def choose_again_afterwards() -> Iterator[None]:
    """Leaves the process as it was."""
    yield
    use_kernels("auto")


def test_rank_zero_tags_the_run_once_and_logs_refusals() -> None:
    posted: list[Entry] = []

    def post(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        posted.extend(entries)
        return taken(entries)

    use_kernels("triton")
    gelu(torch.randn(4))
    q = torch.randn(1, 1, 2, 8)
    with pytest.warns(UserWarning, match="attention runs in PyTorch, not in Triton"):
        attention(q, q, q, mask=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    for rank in (0, 1):
        sender = Sender(post, f"rank{rank}", interval_s=0.05)
        observer = Kernels(sender)
        observer.on_start(RunFacts(run="r", attempt="a1", rank=rank))
        observer.on_log(1, {})
        observer.on_log(2, {})
        sender.close()
    (tags,) = [entry["values"] for entry in posted if entry["kind"] == "tags"]
    assert tags["raystride.kernels"].startswith("attention torch: ")
    assert tags["raystride.kernels"].endswith("gelu triton")
    (warning,) = [entry["values"]["text"] for entry in posted if entry["kind"] == "event"]
    assert warning.startswith("attention runs in PyTorch, not in Triton: ")


@pytest.mark.parametrize("choice", ["triton", "auto"])
def test_a_worker_runs_what_the_setting_says(tmp_path: Path, choice: str) -> None:
    config = tiny(
        write_text(tmp_path),
        train=TrainConfig(steps=2, slots=2, slot_size=1, log_every=1),
        validation=ValidationConfig(every=0, samples=2),
    )
    config = replace(config, model=replace(config.model, layers=1, kernels=choice))
    ran = run_workers(make_job(config, tmp_path, "mine"), world=1)["kernels"]
    assert {"attention", "layer_norm", "add_layer_norm", "gelu", "linear_cross_entropy", "adamw"} == set(ran)
    assert set(ran.values()) == {"triton" if choice == "triton" else "torch"}
