"""The observers that send: what arrives, from whom, and what they must not import."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config.run import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.observers.host_monitor import HostMonitor
from raystride.pipelines.observers.observer import RunFacts
from raystride.pipelines.observers.tracker import Tracker
from raystride.pipelines.record import Recorder, Sender, read_entries
from raystride.pipelines.record.sender import Entry


def record(folder: Path) -> Recorder:
    """A recorder without MLflow."""
    return Recorder(Folder(str(folder)), "r", "a1", Record(mlflow=False), Folder(str(folder.parent)), {}, {})


def test_the_tracker_sends_rank_zeros_figures_and_everyones_errors(tmp_path: Path) -> None:
    recorder = record(tmp_path / "r")
    for rank in (0, 1):
        sender = Sender(recorder.receive, f"rank{rank}", interval_s=0.05)
        tracker = Tracker(sender)
        tracker.on_start(RunFacts(run="r", attempt="a1", rank=rank))
        tracker.on_log(1, {"train_loss": 2.0})
        tracker.on_checkpoint(1, "checkpoints/step-00000001")
        try:
            raise ArithmeticError(f"boom on {rank}")
        except ArithmeticError as error:
            tracker.on_error(error)
        tracker.on_end({"steps": 1})
    assert recorder.finish("failed")["steps"] == 1
    kinds = [(entry["sender"].partition(".")[0], entry["kind"]) for entry in read_entries(Folder(str(tmp_path / "r")))]
    kinds = [(sender, kind) for sender, kind in kinds if sender != "recorder"]
    assert kinds == [("rank0", kind) for kind in ("metrics", "checkpoint", "error", "summary")] + [("rank1", "error")]
    log = (tmp_path / "r/log.txt").read_text()
    assert "boom on 1" in log
    assert "test_sending.py" in log  # the traceback, not only the message


@pytest.mark.parametrize(("nodes", "prefix"), [(1, "system/"), (2, "system/left/")])
def test_the_host_monitor_sends_mlflows_names_with_times(nodes: int, prefix: str) -> None:
    posted: list[Entry] = []

    def post(name: str, entries: list[Entry]) -> int:
        posted.extend(entries)
        return int(entries[-1]["sequence"])

    sender = Sender(post, "node", interval_s=0.05)
    monitor = HostMonitor(sender, every_s=0.05)
    monitor.on_start(RunFacts(run="r", attempt="a1", node="left", nodes=nodes))
    began = time.time()
    while sum(i * i for i in range(10_000)) and time.time() < began + 0.4:  # some load, for the processor's reading
        pass
    monitor.on_end({})
    assert sender.close()
    count = len(posted)
    assert count >= 3
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
    time.sleep(0.15)
    assert len(posted) == count  # the thread has ended


def test_mlflows_own_names_are_used() -> None:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from psutil import net_io_counters

    from raystride.pipelines.observers.host_monitor import host_reading

    theirs: set[str] = set()
    kinds: list[Any] = [CPUMonitor, DiskMonitor, NetworkMonitor]
    for monitor in (kind() for kind in kinds):
        monitor.collect_metrics()
        theirs |= set(monitor.aggregate_metrics())
    assert set(host_reading(net_io_counters())) == theirs


def test_only_the_first_worker_of_a_node_watches_it() -> None:
    monitor = HostMonitor(Sender(lambda name, entries: 0, "node"), every_s=0.01)
    monitor.on_start(RunFacts(run="r", attempt="a1", rank=3, local_rank=1))
    assert monitor._thread is None


def test_observers_and_senders_import_without_the_heavy_libraries() -> None:
    program = """
import sys
for name in ("ray", "mlflow", "psutil", "rich", "pyarrow", "matplotlib"):
    sys.modules[name] = None
from raystride.pipelines.observers.observer import RunFacts
from raystride.pipelines.observers.ray_metrics import RayMetrics
from raystride.pipelines.record import Sender
import raystride.pipelines.report
metrics = RayMetrics()
metrics.on_start(RunFacts(run="r", attempt="a1"))
metrics.on_log(1, {"train_loss": 1.0})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
