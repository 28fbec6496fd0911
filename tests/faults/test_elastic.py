"""A node is lost under a run and another one comes: it goes on with the workers there are, to the same bits."""

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.signals import INTERRUPTED
from raystride.pipelines.train.checkpoint.audit import audit
from tests.another_cluster import another_cluster
from tests.processes import make_job, run_workers
from tests.ray_jobs.jobs import finish_job, run_folder, start_job, summary, wait_for, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
MORE = 5
"""Steps after which nothing more is awaited of a group."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head of one processor; the test adds another node and takes it away."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    with another_cluster(num_cpus=1, _system_config=quick) as found:
        yield found


@pytest.fixture
def config(tmp_path: Path, cluster: Any) -> Config:
    """One or two workers with exact sums, on that cluster. The run is endless, with a rate that its end does not change."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"),
        train=TrainConfig(steps=10**6, slots=8, slot_size=1, log_every=1, exact=True),
        validation=ValidationConfig(every=0, samples=16),
        checkpoint=CheckpointConfig(every=20, keep=2),
        scaling=ScalingConfig(workers=2, min_workers=1, resize_every_s=1, threads=1),
        launch=LaunchConfig(address=cluster.address, max_restarts=5),
    )


def _groups(config: Config) -> list[tuple[int, list[int]]]:
    """With how many workers each group of the run trained so far, and the steps that it made."""
    entries = [each for each in read_entries(run_folder(config, "mine")) if each["sender"].startswith("rank0")]
    groups = []
    for _, mine in itertools.groupby(entries, key=lambda each: each["sender"]):
        found = list(mine)
        texts = [each["values"].get("text", "") for each in found]
        worlds = [int(text.split()[2]) for text in texts if text.startswith("training on ")]
        steps = [each["step"] for each in found if each["kind"] == "metrics" and "train_loss" in each["values"]]
        groups += [(world, steps) for world in worlds]
    return groups


def _trains(config: Config, workers: int) -> bool:
    """Whether a group of so many has made some steps, and is the last one. Not asked often, which would slow the steps."""
    time.sleep(0.5)
    world, steps = (_groups(config) or [(0, [])])[-1]
    return world == workers and len(steps) > MORE


def test_it_shrinks_and_grows_and_ends_with_the_same_bits(config: Config, cluster: Any) -> None:
    from ray._raylet import AuthenticationMode, get_authentication_mode

    node = cluster.add_node(num_cpus=1)
    # The cluster asks for this machine's token where an earlier test of this process has had Ray ask for it, else for none.
    mode = "token" if get_authentication_mode() == AuthenticationMode.TOKEN else "disabled"
    driver = start_job("train", config, "--run", "mine", env={"RAY_AUTH_MODE": mode})
    wait_for_checkpoint(config, "mine", 20, driver)
    cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: _trains(config, 1), driver)
    cluster.add_node(num_cpus=1)
    wait_for(lambda: _trains(config, 2), driver)
    driver.send_signal(signal.SIGINT)
    outcome = finish_job(driver)
    assert outcome.code == INTERRUPTED, outcome.out + outcome.err
    ended = summary(config, "mine")
    assert (ended["status"], ended["workers"]) == ("stopped", 2)
    assert [world for world, _ in _groups(config)] == [2, 1, 2]
    (_, shrunk), (_, grown) = _groups(config)[1:]
    assert shrunk[0] % 20 == 1, "the lost node took the steps since the newest checkpoint along"
    assert grown[0] == shrunk[-1] + 1 == ended["resumed_from"] + 1, "to grow costs no step"
    whole = replace(config, scaling=ScalingConfig(workers=1, threads=1), train=replace(config.train, steps=ended["steps"]))
    alone = run_workers(make_job(whole, Path(config.storage), "whole"), 1)
    for key in ("parameters_sha256", "samples_seen", "tokens_seen"):
        assert ended[key] == alone[key]
    assert audit(run_folder(config, "mine") / "checkpoints").samples == ended["samples_seen"]
