"""TensorBoard's event files, read back by TensorBoard's own reader."""

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Recorder, Sender
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.observability.record.tensorboard_log import TensorboardLog, check_tensorboard
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.observability.record.conftest import MakeRecorder
from tests.waiting import wait_until

SETTINGS = RecordConfig(mlflow=False, tensorboard=True)
PARAMETERS = {"train.steps": 100, "train.exact": False, "train.precision": "fp32"}


def train(recorder: Recorder, first: int, last: int, began: float) -> None:
    """Sends the figures of some steps, a reading of the machine after each, and ends the record."""
    sender = Sender(recorder.receive, "rank0")
    for step in range(first, last + 1):
        sender.put(new_entry("metrics", {"train_loss": began / step, "word": "no number"}, step=step, time=began + step / 8))
        sender.put(new_entry("system", {"system/cpu": float(step)}, step=7, time=began + step / 8))
    assert sender.close(60.0)
    recorder.finish("finished")


def read(place: Path) -> Any:
    """TensorBoard's reader, with all that lies in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(place / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def points(place: Path, tag: str) -> list[tuple[int, float, float]]:
    """Step, value and time of every point that TensorBoard shows."""
    return [(point.step, point.value, point.wall_time) for point in read(place).Scalars(tag)]


def test_a_resumed_run_has_every_step_once_with_its_own_time(record: MakeRecorder, folder: Folder) -> None:
    train(record("a1", SETTINGS, parameters=PARAMETERS), 1, 8, began=1e9)
    train(record("a2", SETTINGS, parameters=PARAMETERS), 6, 10, began=2e9)  # 6 to 8 again, from a checkpoint at 5
    begun = {step: 1e9 if step < 6 else 2e9 for step in range(1, 11)}
    expected = [(step, pytest.approx(begun[step] / step), begun[step] + step / 8) for step in begun]
    assert points(Path(folder.uri), "train_loss") == expected
    assert [step for step, _, _ in points(Path(folder.uri), "system/cpu")] == list(range(1, 11))


def test_settings_are_there_as_hyperparameters_and_as_text(record: MakeRecorder, folder: Folder) -> None:
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    train(record(settings=SETTINGS, parameters=PARAMETERS), 1, 1, began=1e9)
    reader = read(Path(folder.uri))
    assert set(reader.Tags()["scalars"]) == {"train_loss", "system/cpu"}
    start = parse_session_start_info_plugin_data(reader.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    kinds = {
        name: (value.WhichOneof("kind"), getattr(value, value.WhichOneof("kind"))) for name, value in start.hparams.items()
    }
    assert kinds["train.steps"] == ("number_value", 100.0)
    assert kinds["train.exact"] == ("string_value", "False")
    assert kinds["train.precision"] == ("string_value", "fp32")
    (text,) = reader.Tensors("settings/text_summary")
    assert b"| train.precision | fp32 |" in text.tensor_proto.string_val[0]


@settings(max_examples=15)
@given(cuts=st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_recorder_that_takes_over_leaves_one_file_with_the_same_points(
    cuts: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = []
    for name, taken_over in (("whole", [False] * len(cuts)), ("cut", cuts)):
        folder = Folder(str(tmp_path_factory.mktemp(name)))
        journal, log = Journal(folder, "a1"), TensorboardLog(folder, "a1")
        for step, new in enumerate(taken_over, start=1):
            if new:  # the one before died after the journal had the segment, or before: its file says nothing of that
                log = TensorboardLog(folder, "a1")
            entry = {"attempt": "a1", "sender": "r", "sequence": step, "kind": "metrics", "time": step / 2, "step": step}
            entries = [entry | {"values": {"loss": 1.5 * step, "word": "NaN" if step == 2 else 2.0}}]
            journal.append(entries)
            log.add(entries)
        log.close()
        (path,) = (Path(folder.uri) / "tensorboard").iterdir()
        assert path.name.endswith(".a1")
        shown.append(points(Path(folder.uri), "loss"))
        assert len(points(Path(folder.uri), "word")) == len(cuts)
    assert shown[0] == shown[1] == [(step, 1.5 * step, step / 2) for step in range(1, len(cuts) + 1)]


def test_what_a_full_disk_did_not_take_is_written_later(record: MakeRecorder, folder: Folder) -> None:
    in_the_way = Path(folder.uri) / "tensorboard"
    recorder = record(settings=SETTINGS)
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file where the folder should be")
    sender = Sender(recorder.receive, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1.0}, step=1, time=1.0))
    sender.put(new_entry("error", {"text": "urgent"}))
    assert sender.flush(60.0)
    wait_until(lambda: bool(recorder.state()["warnings"]), "the fault was not said")
    assert "TensorBoard" in recorder.state()["warnings"][0]
    in_the_way.unlink()
    sender.put(new_entry("metrics", {"train_loss": 2.0}, step=2, time=2.0))
    assert sender.close(60.0)
    recorder.finish("finished")
    assert [step for step, _, _ in points(Path(folder.uri), "train_loss")] == [1, 2]


def test_what_a_disk_that_fills_up_cut_off_is_written_anew(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    journal, log, write, written = Journal(folder, "a1"), TensorboardLog(folder, "a1"), RecordWriter.write, [0]

    def write_some(self: RecordWriter, data: bytes) -> None:
        written[0] += 1
        if written[0] == 5:
            raise OSError(errno.ENOSPC, "no space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", write_some)
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # the writer's thread ends by the error
    failed = 0
    for step in range(1, 9):
        entry = {"attempt": "a1", "sender": "r", "sequence": step, "kind": "metrics", "time": step / 2, "step": step}
        journal.append([entry | {"values": {"loss": 1.5}}])
        try:
            log.add([entry | {"values": {"loss": 1.5}}])
        except OSError:
            failed += 1
    log.close()
    assert failed == 1
    assert len(list((Path(folder.uri) / "tensorboard").iterdir())) == 1
    assert [step for step, _, _ in points(Path(folder.uri), "loss")] == list(range(1, 9))


def test_pytorch_is_imported_only_if_the_files_are_asked_for() -> None:
    program = """
import sys
from raystride.pipelines.observability.record import recorder, tensorboard_log
from raystride.pipelines.system.storage.folder import Folder
log = tensorboard_log.TensorboardLog(Folder(sys.argv[1]), "a1")
log.add([])
assert "torch" not in sys.modules and "tensorboard" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, "/nowhere"], check=True, timeout=120)


def test_without_its_package_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raystride.pipelines.observability.record.tensorboard_log.find_spec", lambda name: None)
    check_tensorboard(RecordConfig())
    with refused("record.tensorboard", True, names=["pip install"]):
        check_tensorboard(SETTINGS)


def test_remote_storage_gets_a_copy(tmp_path: Path) -> None:
    storage = Folder("memory://bucket/tensorboard-runs")
    recorder = Recorder(storage / "r", "r", "a1", SETTINGS, storage, PARAMETERS, {})
    train(recorder, 1, 3, began=1e9)
    (name,) = (storage / "r" / "tensorboard").names()
    (storage / "r" / "tensorboard").download(name, tmp_path / "tensorboard" / name)
    assert [step for step, _, _ in points(tmp_path, "train_loss")] == [1, 2, 3]
