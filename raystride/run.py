"""Read access to a run by name: its summary, metrics, checkpoints and model.

run = Run.open("lm_python-1f3a90c2", "runs")
run.summary["val_loss"]; run.metrics(["train_loss", "val_loss"]).to_pandas(); model = run.load_model("best")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.storage.folder import Folder

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import nn


@dataclass(frozen=True)
class StoredCheckpoint:
    """A committed checkpoint of a run."""

    step: int
    folder: str
    """Its path or URI."""


@dataclass(frozen=True)
class Run:
    """A training run, finished or in progress. Its properties are read on access."""

    name: str
    folder: Folder

    @classmethod
    def open(cls, name: str, storage: str = "runs") -> "Run":
        """Opens the run of that name below a folder or filesystem URI. Raises SettingError if there is none."""
        place = Folder.from_uri(storage)
        if not (place / name).exists("config.yaml"):
            others = [other_name for other_name in place.names() if (place / other_name).exists("config.yaml")]
            message = f"there is no run {name!r} in {place} (there is: {', '.join(others) or 'none'})"
            raise SettingError(message, setting="run", value=name, allowed=tuple(others))
        return cls(name, place / name)

    @property
    def storage(self) -> str:
        """The parent of the run's folder, a path or filesystem URI."""
        return self.folder.parent.uri

    @property
    def summary(self) -> dict[str, Any]:
        """The keys of `summary.json`; empty before the run has ended."""
        return dict(self.folder.read_json("summary.json")) if self.folder.exists("summary.json") else {}

    @cached_property
    def settings(self) -> Config:
        """The settings of the newest attempt. Raises FileNotFoundError if there is none."""
        return from_yaml(Config, self.folder.read("config.yaml").decode())

    def metrics(self, names: str | Sequence[str] | None = None) -> "pa.Table":
        """Returns the metrics by step, oldest first: columns `step` (int64), `time` (seconds since 1970), a float64 a name.

        One row per measurement, null for a missing name; rows with none of the names are dropped. Without `names`, all
        metrics. A step that was trained again after a resume appears once, as last trained. `.to_pandas()` works.
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
        """The committed checkpoints that are not pruned, oldest first."""
        from raystride.pipelines.checkpoint.manager import Checkpoints

        kept = Checkpoints(self.folder / "checkpoints", attempt="", keep=1)
        return [
            StoredCheckpoint(int(name.removeprefix("step-")), (kept.folder / name).uri) for name in sorted(kept.list_names())
        ]

    def load_model(self, checkpoint: str | int = "best") -> "nn.Module":
        """Returns the trained network in evaluation mode, on the CPU, from the checkpoint `best`, `last`, or of a step.

        Raises SettingError if there is no such checkpoint.
        """
        from raystride.pipelines.evaluate.load_run import open_run

        return open_run(Folder(self.storage), self.name, checkpoint).model

    @property
    def report_path(self) -> str:
        """The path of the run's report, one self-contained HTML file that is written when the run ends."""
        return str(self.folder / "report.html")

    @property
    def mlflow_url(self) -> str | None:
        """The URL of the run's page in MLflow (of a database: while `raystride ui` runs); None if MLflow has none."""
        from raystride.pipelines.record.mlflow.links import run_link
        from raystride.pipelines.record.mlflow.log import MLFLOW_REFERENCE

        if not self.folder.exists(MLFLOW_REFERENCE):
            return None
        return run_link(self.folder.read_json(MLFLOW_REFERENCE))
