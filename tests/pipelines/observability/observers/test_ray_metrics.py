"""Ray's gauges, read where Prometheus reads them: at the metrics port of a real node."""

import re
import urllib.request

import pytest

from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.observers.ray_metrics import RayMetrics
from tests.deploy.monitoring import find_queried_metrics
from tests.waiting import wait_until

FIGURES = {"train_loss": 2.5, "val_loss": 2.75, "tokens_per_second": 100.0, "mfu": 0.25, "data_wait_share": 0.5}
GPUS = {"ray_node_gpus_utilization", "ray_node_gram_used"}
"""What only a node with GPUs exports."""


def exported_gauges(address: str) -> dict[str, dict[tuple[str | None, str | None], float]]:
    """Returns the node's Prometheus metrics by name, then by run and rank."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, dict[tuple[str | None, str | None], float]] = {}
    for line in lines:
        if parts := re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line):
            tags = dict(re.findall(r'(\w+)="([^"]*)"', parts[2]))
            found.setdefault(parts[1], {})[tags.get("run"), tags.get("rank")] = float(parts[3])
    return found


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_a_node_exports_what_the_dashboard_asks_for_by_run_and_rank() -> None:
    import ray

    ranks = [RayMetrics(), RayMetrics()]
    for rank, metrics in enumerate(ranks):
        metrics.on_start(RunFacts(run="r", attempt="a1", rank=rank, world=2))
        metrics.on_log(3, FIGURES | {"step_seconds_p50": 1.0 + rank})
    node = ray.nodes()[0]
    wanted = set().union(*find_queried_metrics().values()) - GPUS
    address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    found = wait_until(
        lambda: found if wanted <= (found := exported_gauges(address)).keys() else None, str(wanted), pause_s=0.5
    )
    assert found["ray_raystride_loss"] == {("r", "0"): 2.5}
    assert found["ray_raystride_step"] == {("r", "0"): 3.0}
    assert found["ray_raystride_step_seconds"] == {("r", "0"): 1.0, ("r", "1"): 2.0}
    assert found["ray_raystride_data_wait_share"] == {("r", "0"): 0.5, ("r", "1"): 0.5}


def test_outside_ray_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    metrics = RayMetrics()
    metrics.on_start(RunFacts(run="r", attempt="a1"))
    metrics.on_log(3, FIGURES)
    assert "ray" not in sys.modules
