"""The host monitor sends what it reads under MLflow's names, with times, once a node."""

import threading
import time
from typing import Any

import pytest

from raystride.pipelines.observability.observers.host_monitor import HostMonitor
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.record import Sender
from raystride.pipelines.observability.record.sender import Entry, Receipt
from raystride.pipelines.system import service_thread
from tests.receipts import taken
from tests.waiting import wait_until


@pytest.mark.parametrize(("nodes", "prefix"), [(1, "system/"), (2, "system/left/")])
def test_the_host_monitor_sends_mlflows_names_with_times(nodes: int, prefix: str) -> None:
    posted: list[Entry] = []

    def post(name: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
        posted.extend(entries)
        return taken(entries)

    sender = Sender(post, "node", interval_s=0.05)
    monitor = HostMonitor(sender, every_s=0.05)
    monitor.on_start(RunFacts(run="r", attempt="a1", node="left", nodes=nodes))
    began = time.time()
    while sum(i * i for i in range(10_000)) and len(posted) < 3:  # some load, for the processor's reading
        pass
    monitor.on_end({})
    assert sender.close(60.0)
    assert len(posted) >= 3
    for entry in posted:
        assert entry["kind"] == "system"
        assert began <= entry["time"] <= time.time()
        assert {name.removeprefix(prefix) for name in entry["values"]} >= {
            "cpu_utilization_percentage",
            "system_memory_usage_megabytes",
            "system_memory_usage_percentage",
            "disk_usage_percentage",
        }
        assert 0 < entry["values"][f"{prefix}system_memory_usage_percentage"] < 100
    assert max(entry["values"][f"{prefix}cpu_utilization_percentage"] for entry in posted) > 0
    assert "host-monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_reading_that_fails_is_said_once_and_the_next_ones_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    posted: list[Entry] = []
    failures, usage = iter([True, True]), psutil.disk_usage

    def disk_usage(path: str) -> Any:
        if next(failures, False):
            raise FileNotFoundError(path)
        return usage(path)

    monkeypatch.setattr(psutil, "disk_usage", disk_usage)
    monkeypatch.setattr(service_thread, "FIRST_PAUSE_S", 0.01)
    sender = Sender(lambda _, entries, *more: posted.extend(entries) or taken(entries), "node", interval_s=0.01)  # type: ignore[func-returns-value]
    monitor = HostMonitor(sender, every_s=0.01)
    monitor.on_start(RunFacts(run="r", attempt="a1"))
    wait_until(lambda: len(posted) >= 3, "readings")
    monitor.on_end({})
    assert sender.close(60.0)
    (warning,) = [entry["values"]["text"] for entry in posted if entry["kind"] == "event"]
    assert warning == "host-monitor: FileNotFoundError: /; tried again"
    assert [entry["step"] for entry in posted if entry["kind"] == "system"][:2] == [0, 1]


def test_mlflows_own_names_are_used() -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from psutil import net_io_counters

    from raystride.pipelines.observability.observers.host_monitor import read_host

    theirs: set[str] = set()
    kinds: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor]
    for monitor in (kind() for kind in kinds):
        monitor.collect_metrics()
        theirs |= set(monitor.aggregate_metrics())
    assert set(read_host(net_io_counters())) == theirs


def test_only_the_first_worker_of_a_node_watches_it() -> None:
    monitor = HostMonitor(Sender(lambda *posted: taken([]), "node"), every_s=0.01)
    monitor.on_start(RunFacts(run="r", attempt="a1", rank=3, local_rank=1))
    assert monitor._thread is None
