"""Worker and GPU seconds of a run's attempts, by their workers' entries."""

import os
from pathlib import Path
from typing import Any

import pytest

from raystride.command import run as run_command
from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.recorder import Recorder
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.observability.record.usage import UsageMeter, charged_seconds, measure_attempt
from raystride.pipelines.system.storage.folder import Folder
from tests.tiny import tiny


def record(folder: Folder, attempt: str, *, device: str, end: bool, tags: dict[str, str] | None = None) -> None:
    """Records an attempt of four workers that lasts for a minute."""
    (folder / "attempts" / attempt).put("config.yaml", "")
    settings = tiny(Path("text.txt"), launch=LaunchConfig(mode="inline")).record
    parameters: dict[str, Any] = {"workers": 4, "device": device}
    recorder = Recorder(folder, folder.name, attempt, settings, folder.parent, parameters, tags or {})
    for number, seconds in enumerate((1000.0, 1030.0, 1060.0), 1):
        entry = replace_time(new_entry("metrics", {"train_loss": 1.0}, step=number), seconds)
        recorder.receive("rank0.aaaa", [entry | {"sequence": number}])
    note = replace_time(new_entry("event", {"name": "note", "text": "x"}), 9e6)
    recorder.receive("driver.bbbb", [note | {"sequence": 1}])
    if end:
        recorder.finish("stopped")
    else:
        recorder.end_writing()


def replace_time(entry: Any, time: float) -> Any:
    return entry | {"time": time}


def test_seconds_are_those_of_workers_and_of_all_attempts(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "mine"))
    record(folder, "20261101-000000-aaaa", device="cuda", end=False)  # was killed, and has no summary
    record(folder, "20261102-000000-bbbb", device="cpu", end=True)
    record(folder, "20261103-000000-cccc", device="cuda", end=True, tags={"raystride.owner": "ann"})
    summary = read_summary(folder)
    assert (summary["worker_seconds"], summary["gpu_seconds"], summary["owner"]) == (720.0, 480.0, "ann")
    assert list(summary["usage"].values()) == [
        {"seconds": 60.0, "workers": 4, "gpus": 4},
        {"seconds": 60.0, "workers": 4, "gpus": 0},
        {"seconds": 60.0, "workers": 4, "gpus": 4},
    ]


def test_nothing_is_charged_before_there_are_workers() -> None:
    meter = UsageMeter("a", 8, "cuda")
    meter.note("recorder", 5.0)
    assert charged_seconds(meter.usage()) == {}
    assert measure_attempt("a", []) == {}


def test_owners_are_listed_with_their_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, owner in (("one", "ann"), ("two", "ann"), ("three", "bob")):
        record(
            Folder(str(tmp_path / name)), "20261101-000000-aaaa", device="cuda", end=True, tags={"raystride.owner": owner}
        )
    record(Folder(str(tmp_path / "killed")), "20261101-000000-aaaa", device="cuda", end=False)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    assert run_command(["runs", "list", "--by", "owner", "--storage", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [["ann", "2", "0.13", "0.13"], ["bob", "1", "0.07", "0.07"], ["-", "2", "0.07", "0.07", "1"]]
    assert run_command(["runs", "list", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("\n")[0].split()[-2:] == ["owner", "when"]


def test_only_runs_that_were_written_since_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("new", "old"):
        record(Folder(str(tmp_path / name)), "20261101-000000-aaaa", device="cpu", end=True)
    for path in (tmp_path / "old").rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert run_command(["runs", "list", "--since", "2d", "--storage", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "new"]
    assert run_command(["runs", "list", "--since", "0", "--by", "owner", "--storage", str(tmp_path)]) == 0
    assert "no runs" in capsys.readouterr().out


def test_the_meter_of_another_hosts_clock_is_never_negative() -> None:
    meter = UsageMeter("a", 1, "cpu")
    for time in (100.0, 90.0, 120.0):
        meter.note("rank0.a", time)
    assert meter.usage()["a"]["seconds"] == 30.0
