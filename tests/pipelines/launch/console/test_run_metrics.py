"""The driver's metrics of a run, as a scrape of Ray's would show them."""

import re
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.launch.console import run_metrics
from raystride.pipelines.launch.console.run_metrics import DRIVER_GAUGES, RUN_STATE, RunMetrics
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.console.session import SessionHooks, Watcher
from raystride.pipelines.observability.record.state import SAVE_REFUSED, StateTracker
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job
from tests.tiny import tiny
from tests.waiting import wait_until


class Shown:
    """What was set last, by metric and state; in place of Ray's library, which answers only in a cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, float] = {}
        self.labels: set[tuple[str, ...]] = set()
        from ray.util import metrics

        def set_value(gauge: Any, value: float, tags: dict[str, str] | None = None) -> None:
            name = gauge.info["name"]
            self.values[name + (f" {tags['state']}" if tags else "")] = value
            self.labels.add(tuple(sorted(gauge.info["default_tags"].items())))

        monkeypatch.setattr(metrics.Gauge, "set", set_value)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def make(folder: Path, clock: list[float], **checkpoint: Any) -> RunMetrics:
    config = tiny(folder / "text.txt")
    config = replace(config, checkpoint=replace(config.checkpoint, **{"every": 100, "minutes": 0.0} | checkpoint))
    place = Folder(str(folder))
    job = Job(
        config=config, run="mine", attempt="a", folder=place / "mine", prepared=place, device="cpu", threads=1,
        labels={"owner": "me", "tags": "project=x"},
    )  # fmt: skip
    return RunMetrics(job, place, lambda: clock[0])


def state_of(shown: Shown) -> list[str]:
    return [name.split()[1] for name, value in shown.values.items() if name.startswith(f"{RUN_STATE} ") and value == 1]


def test_a_run_waits_trains_and_ends(tmp_path: Path, shown: Shown) -> None:
    clock, reasons = [1000.0], [None, "waiting for 2 workers", "waiting for 2 workers", None]
    metrics = make(tmp_path, clock)
    hooks = metrics.attach(SessionHooks(SilentScreen(), Watcher(), pending_reason=lambda: reasons.pop(0)))
    assert state_of(shown) == ["starting"]
    for expected, waited in (("starting", 0.0), ("waiting", 0.0), ("waiting", 60.0)):
        assert hooks.pending_reason() is None or expected == "waiting"
        hooks.watcher.on_state({"step": None}, lambda: None)
        assert (state_of(shown), shown.values["raystride_waiting_seconds"]) == ([expected], waited)
        clock[0] += 60.0
    hooks.watcher.on_state({"step": 1}, lambda: None)
    assert (state_of(shown), shown.values["raystride_waiting_seconds"]) == (["training"], 0.0)
    hooks.watcher.on_failure(ValueError("x"))
    assert state_of(shown) == ["failed"]
    assert shown.labels == {(("owner", "me"), ("run", "mine"), ("tags", "project=x"))}
    assert shown.values["raystride_storage_free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    known = {name for name in shown.values if not name.startswith(RUN_STATE)}
    assert known <= {name for name, _ in DRIVER_GAUGES.values()}


@pytest.mark.parametrize(
    ("checkpoint", "interval"), [({}, 200.0), ({"minutes": 1.0}, 60.0), ({"every_epochs": 1.0, "minutes": 10.0}, 600.0)]
)
def test_the_age_of_a_checkpoint_and_its_interval_are_by_the_drivers_clock(
    tmp_path: Path, shown: Shown, checkpoint: dict[str, Any], interval: float
) -> None:
    clock = [0.0]
    metrics = make(tmp_path, clock, **checkpoint)
    for second in range(0, 400, 10):  # a step takes two seconds, and a checkpoint is there after the first 100
        clock[0] = float(second)
        step = second // 2 + 1
        metrics.on_state({"step": step, "checkpoint_step": 100 if step > 100 else None}, lambda: None)
    assert shown.values["raystride_checkpoint_age_seconds"] == 190.0
    assert shown.values["raystride_checkpoint_interval_seconds"] == interval


def test_without_checkpoints_there_is_no_age(tmp_path: Path, shown: Shown) -> None:
    make(tmp_path, [0.0], every=0).on_state({"step": 5}, lambda: None)
    assert "raystride_checkpoint_age_seconds" not in shown.values


def test_refused_saves_and_checkpoints_are_counted_from_the_record() -> None:
    tracker = StateTracker(10)
    for kind, values, step in (
        ("event", {"name": "warning", "text": f"{SAVE_REFUSED}4 could not be written (OSError: x); 1 in a row"}, None),
        ("event", {"name": "warning", "text": "the disk is slow"}, None),
        ("checkpoint", {"path": "step-00000006"}, 6),
    ):
        tracker.ingest({"kind": kind, "values": values, "step": step, "time": 1.0})  # type: ignore[arg-type, misc]
    state = tracker.snapshot()
    assert (state["failed_saves"], state["checkpoint_step"]) == (1, 6)


def test_the_states_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[4] / "docs" / "operating.md").read_text()
    assert f"{', '.join(run_metrics.STATES[:2])},\n{', '.join(run_metrics.STATES[2:])}" in page


@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
def test_a_node_exports_the_drivers_metrics_with_owner_and_tags(tmp_path: Path) -> None:
    import ray

    clock = [0.0]
    metrics = make(tmp_path, clock, every=2)
    for step, saved in ((1, None), (3, 2)):
        metrics.on_state({"step": step, "checkpoint_step": saved, "groups": 3, "mlflow_backlog": 7}, lambda: None)
        clock[0] += 4.0
    node = ray.nodes()[0]
    wanted = {f"ray_{name}" for name, _ in DRIVER_GAUGES.values()} | {f"ray_{RUN_STATE}"}
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def read() -> dict[str, str] | None:
        with urllib.request.urlopen(address, timeout=10) as page:
            lines = [line for line in page.read().decode().splitlines() if 'run="mine"' in line]
        found = {line.partition("{")[0] + "".join(re.findall(r'state="\w+"', line)): line for line in lines}
        return found if wanted <= {name.partition("state=")[0] for name in found} else None

    found = wait_until(read, str(wanted), pause_s=0.5)
    assert found is not None
    assert all('owner="me"' in line and 'tags="project=x"' in line for line in found.values())
    figures = {name.removeprefix("ray_raystride_"): float(line.rpartition(" ")[2]) for name, line in found.items()}
    assert (figures["restarts"], figures["mlflow_backlog_entries"]) == (2.0, 7.0)
    assert (figures["checkpoint_age_seconds"], figures["checkpoint_interval_seconds"]) == (0.0, 4.0)
    assert (figures['run_statestate="training"'], figures['run_statestate="waiting"']) == (1.0, 0.0)
