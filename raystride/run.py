"""A run as a library sees it: what is written in its folder, opened by name.

run = Run.open("lm_python-1f3a90c2", "runs")
run.summary["val_loss"]; run.metrics(["train_loss", "val_loss"]).to_pandas(); model = run.load_model("best")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.files import Folder

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import nn


@dataclass(frozen=True)
class StoredCheckpoint:
    """A whole checkpoint of a run."""

    step: int
    folder: str
    """Where it lies."""


@dataclass(frozen=True)
class Run:
    """A training, finished or under way. What it tells is read when it is asked for."""

    name: str
    folder: Folder

    @classmethod
    def open(cls, name: str, storage: str = "runs") -> "Run":
        """The run of that name below a folder or filesystem URI. Raises SettingError where there is none."""
        place = Folder.at(storage)
        if not (place / name).exists("config.yaml"):
            others = [each for each in place.names() if (place / each).exists("config.yaml")]
            message = f"there is no run {name!r} in {place} (there is: {', '.join(others) or 'none'})"
            raise SettingError(message, setting="run", value=name, allowed=tuple(others))
        return cls(name, place / name)

    @property
    def storage(self) -> str:
        """The folder or filesystem URI that the run's folder lies in."""
        return self.folder.parent.uri

    @property
    def summary(self) -> dict[str, Any]:
        """The keys of `summary.json`; empty before the run has ended."""
        return dict(self.folder.read_json("summary.json")) if self.folder.exists("summary.json") else {}

    @cached_property
    def settings(self) -> Config:
        """The settings of the newest attempt. Raises FileNotFoundError where there is none."""
        return from_yaml(Config, self.folder.read("config.yaml").decode())

    def metrics(self, names: str | Sequence[str] | None = None) -> "pa.Table":
        """Measurements by step, oldest first: columns `step` (int64), `time` (seconds since 1970), and one float64 a name.

        A row a measurement, null where it lacks a name; rows without any of them are left out. Without names all there are.
        A step that was trained again after a resume stands there once, as trained last. `.to_pandas()` works.
        """
        import pyarrow as pa

        from raystride.pipelines.record.journal import stream_entries

        rows: dict[tuple[int, bool], dict[str, Any]] = {}
        for entry in stream_entries(self.folder):
            if entry["kind"] == "metrics" and entry["step"] is not None:
                values = {key: value for key, value in entry["values"].items() if isinstance(value, int | float)}
                rows[entry["step"], "val_loss" in values] = {"step": entry["step"], "time": entry["time"], **values}
        wanted = [names] if isinstance(names, str) else names
        if wanted is None:
            wanted = list(dict.fromkeys(key for row in rows.values() for key in row if key not in ("step", "time")))
        kept = [rows[key] for key in sorted(rows) if any(name in rows[key] for name in wanted)]
        columns = {"step": pa.array([row["step"] for row in kept], pa.int64())}
        columns |= {"time": pa.array([row["time"] for row in kept], pa.float64())}
        columns |= {name: pa.array([row.get(name) for row in kept], pa.float64(), from_pandas=True) for name in wanted}
        return pa.table(columns)

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """The checkpoints that were committed and not pruned, oldest first."""
        from raystride.pipelines.train.checkpoint import Checkpoints

        kept = Checkpoints(self.folder / "checkpoints", attempt="", keep=1)
        return [StoredCheckpoint(int(name.removeprefix("step-")), (kept.folder / name).uri) for name in sorted(kept.steps())]

    def load_model(self, checkpoint: str | int = "best") -> "nn.Module":
        """The trained network in evaluation mode, on the CPU: of the checkpoint `best`, `last`, or of a step.

        Raises SettingError where there is no such checkpoint.
        """
        from raystride.pipelines.evaluate.opening import open_run

        return open_run(Folder(self.storage), self.name, checkpoint).model

    @property
    def report_path(self) -> str:
        """Where the run's page is, or will be when it has ended: one self-contained HTML file."""
        return str(self.folder / "report.html")

    @property
    def mlflow_url(self) -> str | None:
        """The address of the run's page in MLflow (of a database: while `raystride ui` runs); None where MLflow has none."""
        from raystride.pipelines.record.links import run_link
        from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE

        if not self.folder.exists(MLFLOW_REFERENCE):
            return None
        return run_link(self.folder.read_json(MLFLOW_REFERENCE))
