"""The tracker hands over rank 0's figures and everyone's errors."""

from pathlib import Path

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.observers.observer import RunFacts
from raystride.pipelines.observability.observers.tracker import Tracker
from raystride.pipelines.observability.record import Recorder, Sender, read_entries
from raystride.pipelines.system.storage.folder import Folder


def record(folder: Path) -> Recorder:
    """A recorder without MLflow."""
    return Recorder(Folder(str(folder)), "r", "a1", RecordConfig(mlflow=False), Folder(str(folder.parent)), {}, {})


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
    assert "test_tracker.py" in log  # the traceback, not only the message
