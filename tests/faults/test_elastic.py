"""A node is lost under a run and another one comes: it goes on with the workers there are, to the same bits."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import pytest
from ray.cluster_utils import Cluster

from pipelines.config import Checkpoint, Config, Launch, Model, Scaling, Train, Validation
from pipelines.files import Folder
from pipelines.record import read_entries
from tests.processes import make_job, run_workers
from tests.ray_jobs.jobs import finish_job, start_job, summary, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head of one processor; the test adds another node and takes it away."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": quick}
    found = Cluster(initialize_head=True, head_node_args=head)
    yield found
    found.shutdown()


@pytest.fixture
def config(tmp_path: Path, cluster: Cluster) -> Config:
    """One or two workers with exact sums, on that cluster."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        model=Model(layers=2, heads=2, width=16, context=16, dropout=0.1),
        train=Train(steps=2500, slots=8, slot_size=1, log_every=20, exact=True),
        validation=Validation(every=0, samples=16),
        checkpoint=Checkpoint(every=100, keep=2),
        scaling=Scaling(workers=2, least_workers=1, resize_every_s=5, threads=1),
        launch=Launch(address=cluster.address, restarts=5),
    )


def _worlds(config: Config) -> list[int]:
    """With how many workers the run's attempts trained so far, in order."""
    texts = [entry["values"].get("text", "") for entry in read_entries(Folder(config.storage) / "mine")]
    return [int(text.split()[2]) for text in texts if text.startswith("training on ")]


def _wait(what: Callable[[], bool], driver: Popen[str], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_it_shrinks_and_grows_and_ends_with_the_same_bits(config: Config, cluster: Cluster) -> None:
    whole = make_job(replace(config, scaling=Scaling(workers=1, threads=1)), Path(config.storage), "whole")
    node = cluster.add_node(num_cpus=1)
    # Without a word a driver sends this machine's token, where there is one, and this cluster has none.
    driver = start_job("train", config, "--run", "mine", env={"RAY_AUTH_MODE": "disabled"})
    wait_for_checkpoint(config, "mine", 100, driver)
    cluster.remove_node(node, allow_graceful=False)
    _wait(lambda: _worlds(config)[-1:] == [1], driver)
    cluster.add_node(num_cpus=1)
    _wait(lambda: _worlds(config)[-1:] == [2], driver)
    outcome = finish_job(driver)
    assert outcome.code == 0, outcome.out + outcome.err
    assert _worlds(config) == [2, 1, 2]
    ended = summary(config, "mine")
    assert (ended["status"], ended["steps"]) == ("finished", 2500)
    alone = run_workers(whole, 1)
    for key in ("parameters_sha256", "samples_seen", "tokens_seen"):
        assert ended[key] == alone[key]
