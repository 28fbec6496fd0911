"""The command that shows runs in MLflow: a real server, and nothing left of it after Ctrl-C."""

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Sender
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow import ui
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.record.conftest import MakeRecorder
from tests.pipelines.observability.record.mlflow.test_follower import port  # noqa: F401


@pytest.mark.weekly
@pytest.mark.long
def test_the_newest_run_is_linked_and_ctrl_c_leaves_nothing(
    record: MakeRecorder,
    folder: Folder,
    storage: Folder,
    port: int,  # noqa: F811
) -> None:
    recorder = record(settings=RecordConfig())
    sender = Sender(recorder.receive, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1))
    assert sender.close(60.0)
    run_id = recorder.finish("finished")["mlflow_run_id"]
    command = [
        sys.executable,
        "-m",
        "raystride.pipelines.observability.record.mlflow.ui",
        "--storage",
        storage.uri,
        "--port",
        str(port),
    ]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert shown.stdout is not None
    line = shown.stdout.readline()
    assert folder.uri.rpartition("/")[2] in line
    assert f"http://127.0.0.1:{port}/#/experiments/" in line
    assert run_id in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
        assert b"MLflow" in page.read()
    children = psutil.Process(shown.pid).children(recursive=True)
    assert children
    shown.send_signal(signal.SIGINT)
    assert shown.wait(20) == 0
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ui.main(["--storage", str(tmp_path)]) == 2
    assert "no mlflow.db" in capsys.readouterr().err
