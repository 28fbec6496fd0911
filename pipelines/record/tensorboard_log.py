"""TensorBoard's event files, which follow a run's journal: figures, settings as hyperparameters and as a table of text.

One file an attempt, `tensorboard/events.out.tfevents.<seconds since 1970>.<attempt>`, points with their entries' own times.
It holds nothing but what the journal says: a recorder that takes over from a dead one, or that met a full disk, writes the
whole file anew, with the same bytes. It opens with the mark at which TensorBoard forgets what earlier attempts did beyond
that step, so what a resumed run does again is there once. Readings of the machines have no step of the training: they stand
at the newest one. On local storage TensorBoard can watch the file grow; to remote storage it is copied now and then.

    log = TensorboardLog(run_folder, "a1")
    log.add(entries); log.close()                          # tensorboard --logdir runs
"""

import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config.run import Record
from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.journal import read_segment, segments

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

PLACE = "tensorboard"
COPY_S = 60.0
"""Least seconds between two copies to remote storage, where every copy is that of the whole file."""


def check_tensorboard(settings: Record) -> None:
    """Raises SettingError where TensorBoard's files are asked for and its package is not there."""
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise settings.error(
            "tensorboard", 'needs TensorBoard, which is not installed: pip install "raystride[tensorboard]", or leave it out'
        )


class TensorboardLog:
    """The event file of one attempt. Methods raise OSError; the next call then begins the file anew."""

    def __init__(self, run_folder: Folder, attempt: str) -> None:
        self._run_folder, self._attempt = run_folder, attempt
        self._writer: RecordWriter | None = None
        self._name = ""
        self._step = 0
        self._copied_at = 0.0
        # Only remote storage needs it; it is removed when nothing refers to it.
        self._scratch = None if run_folder.local else tempfile.TemporaryDirectory()

    def add(self, entries: list[Entry]) -> None:
        """Writes what the newest segment of the journal holds; the file begins with the attempt's first figures."""
        if self._writer is None:
            if not any(entry["kind"] == "metrics" for entry in entries):
                return
            entries = self._begin()
        self._write(_events(entries, self._step))
        self._step = _newest_step(entries, self._step)
        if time.monotonic() - self._copied_at > COPY_S:
            self._copy()

    def close(self) -> None:
        """Writes what earlier calls could not, and ends the file."""
        if self._writer is None:
            self.add(self._journal())
        if self._writer is not None:
            self._copy()
            self._writer.close()
            self._writer = None

    @property
    def _path(self) -> Path:
        return Path(self._scratch.name if self._scratch else str(self._run_folder.local)) / PLACE / self._name

    def _journal(self) -> list[Entry]:
        found = [segment for segment in segments(self._run_folder) if segment.attempt == self._attempt]
        return [entry for segment in found for entry in read_segment(self._run_folder, segment)]

    def _begin(self) -> list[Entry]:
        """Opens the file and writes what comes before all figures; the entries that shall follow, all of the attempt's."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        entries = self._journal()
        first = next(entry for entry in entries if entry["kind"] == "metrics")
        when, self._step = float(first["time"]), int(first["step"] or 0)
        self._name = f"events.out.tfevents.{int(when):010}.{self._attempt}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = RecordWriter(self._path.open("wb"))
        head = [
            Event(wall_time=when, file_version="brain.Event:2"),
            # TensorBoard forgets what earlier attempts did beyond this step.
            Event(wall_time=when, step=self._step, session_log=SessionLog(status=SessionLog.START)),
        ]
        settings = [_parameters(entry["values"]) for entry in entries if entry["kind"] == "parameters"]
        self._write(head + [Event(wall_time=when, step=self._step, summary=summary) for summary in settings])
        return entries

    def _write(self, events: "Iterable[Event]") -> None:
        assert self._writer is not None
        try:
            for event in events:
                self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError:
            with suppress(OSError):  # it has bytes left that the disk does not take
                self._writer.close()
            self._writer = None
            raise

    def _copy(self) -> None:
        if self._scratch:
            self._run_folder.upload(self._path, f"{PLACE}/{self._name}")
            self._copied_at = time.monotonic()


def _events(entries: list[Entry], step: int) -> "Iterator[Event]":
    """The figures of entries as events, those of a machine at the step of the training's newest ones."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    for entry in entries:
        if entry["kind"] not in ("metrics", "system"):
            continue
        step = _newest_step([entry], step)
        numbers = ((name, _number(value)) for name, value in entry["values"].items())
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers if number is not None]
        yield Event(wall_time=float(entry["time"]), step=step, summary=Summary(value=values))


def _newest_step(entries: list[Entry], before: int) -> int:
    steps = [entry["step"] for entry in entries if entry["kind"] == "metrics" and entry["step"] is not None]
    return int(steps[-1]) if steps else before


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _parameters(parameters: Mapping[str, object]) -> "Summary":
    """The settings for TensorBoard's page of hyperparameters, and as a table for its page of texts."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    start = SessionStartInfo()
    for name, value in parameters.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, int | float) and math.isfinite(value):
            start.hparams[name].number_value = value
        else:
            start.hparams[name].string_value = str(value)
    table = "\n".join(
        ["| setting | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in parameters.items())]
    )
    hyperparameters = metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
    text = create_summary_metadata(display_name=None, description=None)
    return Summary(
        value=[
            Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=hyperparameters, tensor=metadata.NULL_TENSOR),
            Summary.Value(tag="settings", metadata=text, tensor=make_tensor_proto(table)),
        ]
    )
