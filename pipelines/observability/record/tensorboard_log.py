"""TensorBoard's event files by PyTorch's writer: figures, and settings as hyperparameters and as a table of text.

One file for each attempt, `tensorboard/events.out.tfevents.<time>.<host>.<process>.<number>.<attempt>`, with the times of
the journal's entries. `purge_step` hides the points of earlier attempts from the attempt's first step on, so that each step
of a resumed run is there once. A recorder that takes over from a dead one, or that met a full disk, replaces the attempt's
file by one with all entries of its journal. Readings of machines have no step: they get the newest step of the training.
TensorBoard can follow a file on local storage while it grows; on remote storage the file is a copy, renewed now and then.

PyTorch is imported at the first figures, and only if the files are asked for.

    log = TensorboardLog(run_folder, "a1")
    log.add(entries); log.close()                          # tensorboard --logdir runs
"""

import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.journal import list_segments, read_segment
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PLACE = "tensorboard"
COPY_S = 60.0
"""Minimum seconds between two copies to remote storage, each of the whole file."""


def check_tensorboard(settings: RecordConfig) -> None:
    """Raises SettingError if TensorBoard's files are asked for and its package is not installed."""
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise settings.error(
            "tensorboard", 'needs TensorBoard, which is not installed: pip install "raystride[tensorboard]", or leave it out'
        )


class TensorboardLog:
    """The event file of one attempt. Methods raise OSError; the next call then begins the file anew."""

    def __init__(self, run_folder: Folder, attempt: str) -> None:
        self._run_folder, self._attempt = run_folder, attempt
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._copied_at = 0.0
        # Only remote storage needs it; it is removed when nothing refers to it.
        self._scratch = None if run_folder.local else tempfile.TemporaryDirectory()

    def add(self, entries: list[Entry]) -> None:
        """Writes the entries of the journal's newest segment; the file begins with the attempt's first figures."""
        if self._writer is None:
            if not any(entry["kind"] == "metrics" for entry in entries):
                return
            entries = self._read_journal()
        try:
            writer = self._writer or self._open_writer(entries)
            self._write(writer, entries)
            writer.flush()
        except OSError:
            self._drop_writer()
            raise
        if time.monotonic() - self._copied_at > COPY_S:
            self._copy()

    def close(self) -> None:
        """Writes the entries that earlier calls could not write, and closes the file."""
        if self._writer is None:
            self.add(self._read_journal())
        if self._writer is not None:
            self._writer.flush()
            self._copy()
            self._writer.close()
            self._writer = None

    @property
    def _local(self) -> Path:
        return Path(self._scratch.name if self._scratch else str(self._run_folder.local)) / PLACE

    def _read_journal(self) -> list[Entry]:
        found = [segment for segment in list_segments(self._run_folder) if segment.attempt == self._attempt]
        return [entry for segment in found for entry in read_segment(self._run_folder, segment)]

    def _open_writer(self, entries: list[Entry]) -> "SummaryWriter":
        """Begins the file with the attempt's settings; removes files of the attempt that are there."""
        from torch.utils.tensorboard import SummaryWriter

        for folder in (self._run_folder / PLACE, Folder(str(self._local))):
            for name in folder.names():
                if name.endswith(f".{self._attempt}"):
                    folder.remove(name)
        first = next(entry for entry in entries if entry["kind"] == "metrics")
        self._step = int(first["step"] or 0)
        self._writer = SummaryWriter(str(self._local), purge_step=self._step, filename_suffix=f".{self._attempt}")
        for entry in entries:
            if entry["kind"] == "parameters":
                self._write_settings(self._writer, entry["values"], float(first["time"]))
        return self._writer

    def _write(self, writer: "SummaryWriter", entries: list[Entry]) -> None:
        """Writes the figures of the entries, those of a machine at the newest step of the training."""
        for entry in entries:
            if entry["kind"] != "metrics" and entry["kind"] != "system":
                continue
            if entry["kind"] == "metrics" and entry["step"] is not None:
                self._step = int(entry["step"])
            for name, value in entry["values"].items():
                if (number := _parse_number(value)) is not None:
                    writer.add_scalar(name, number, self._step, float(entry["time"]))

    def _write_settings(self, writer: "SummaryWriter", settings: Mapping[str, object], when: float) -> None:
        """Writes the settings for TensorBoard's page of hyperparameters, and as a table for its page of texts."""
        from torch.utils.tensorboard.summary import hparams

        # Not `add_hparams`, which makes a run of its own in a folder below.
        _, start, _ = hparams({name: _shown_value(value) for name, value in settings.items()}, {})
        file_writer: Any = writer.file_writer
        file_writer.add_summary(start, self._step, when)
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *rows]), self._step, when)

    def _drop_writer(self) -> None:
        """Closes the file if it is open; it has bytes left that the disk does not take."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None

    def _copy(self) -> None:
        if self._scratch:
            (path,) = self._local.iterdir()
            self._run_folder.upload(path, f"{PLACE}/{path.name}")
            self._copied_at = time.monotonic()


def _parse_number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _shown_value(value: object) -> Any:
    """Returns finite numbers as they are, and everything else as text: PyTorch shows a bool as 0 or 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else str(value)
