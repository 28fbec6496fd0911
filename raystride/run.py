"""A run by its name: its summary, metrics, checkpoints and model, and the functions that use the model.

run = Run.open("lm_python-1f3a90c2", "runs")
run.summary["val_loss"]; run.metrics(["train_loss", "val_loss"]).to_pandas(); model = run.load_model("best")
predict(run, ["What is the longest river?"])[0]["label"]
"""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, overload

from raystride.pipelines.config import Config, SampleConfig, SettingError
from raystride.pipelines.config.jobs import ApplyConfig, EvaluateConfig, ExportConfig, GenerateConfig, PredictConfig
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.config.stored_run import missing_run, read_settings
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure
    from torch import nn

    from raystride.pipelines.evaluate.evaluation import EvaluationResult
    from raystride.pipelines.evaluate.prediction import PredictionResult
    from raystride.pipelines.launch.finished import Answers

Settings = Mapping[str, Any]
PathOrUri = str | os.PathLike[str]

LOSSES = ("train_loss", "val_loss")
"""Metrics that each run may be asked for, whether it validates or not."""


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
    def open(cls, name: str, storage: str | os.PathLike[str] = "runs") -> "Run":
        """Opens a run by its name.

        Args:
            name: the run's name, as `raystride runs list` shows it.
            storage: the folder or filesystem URI that contains the runs.

        Returns:
            The run.

        Raises:
            SettingError: there is no such run; the message has the nearest name.
        """
        place = Folder.from_uri(os.fspath(storage))
        if not (place / name).exists("config.yaml"):
            others = [other_name for other_name in place.names() if (place / other_name).exists("config.yaml")]
            raise missing_run(place, name, others)
        return cls(name, place / name)

    @property
    def storage(self) -> str:
        """The parent of the run's folder, a path or filesystem URI."""
        return self.folder.parent.uri

    @property
    def summary(self) -> dict[str, Any]:
        """The keys of `summary.json`; empty before the run has ended. Raises ValueError if the file is damaged."""
        return read_summary(self.folder)

    @cached_property
    def settings(self) -> Config:
        """The settings of the newest attempt. Raises FileNotFoundError if there is none, SettingError if edited."""
        return read_settings(self.folder)

    def metrics(self, names: str | Sequence[str] | None = None) -> "pa.Table":
        """Returns the metrics by step, oldest first; `.to_pandas()` works.

        A step that was trained again after a resume has the values of the last time.

        Args:
            names: names of metrics; by default all.

        Returns:
            A table with the columns `step` (int64), `time` (seconds since 1970) and a float64 per name. One row per step,
            null where a name was not measured; steps with none of the names are left out.

        Raises:
            SettingError: a run that has ended has no metric of that name; the message has the nearest one.
        """
        import pyarrow as pa

        from raystride.pipelines.observability.record.journal import stream_entries

        # Training and validation of a step are two entries, and a resume replaces each by itself.
        entries: dict[tuple[int, bool], dict[str, Any]] = {}
        for entry in stream_entries(self.folder):
            if entry["kind"] == "metrics" and entry["step"] is not None:
                values = {key: value for key, value in entry["values"].items() if isinstance(value, int | float)}
                entries[entry["step"], "val_loss" in values] = {"time": entry["time"], **values}
        rows: dict[int, dict[str, Any]] = {}
        for step, validates in sorted(entries):
            rows[step] = entries[step, validates] | rows.get(step, {"step": step})
        measured = list(dict.fromkeys(key for row in rows.values() for key in row if key not in ("step", "time")))
        wanted = measured if names is None else [names] if isinstance(names, str) else names
        for name in wanted:
            if name not in measured and name not in LOSSES and self.summary:
                message = f"{self.name} has no metric {name!r}{_suggest(name, measured)}"
                raise SettingError(message, setting="names", value=name, allowed=tuple(measured))
        kept = [row for row in rows.values() if any(name in row for name in wanted)]
        columns = {"step": pa.array([row["step"] for row in kept], pa.int64())}
        columns |= {"time": pa.array([row["time"] for row in kept], pa.float64())}
        columns |= {name: pa.array([row.get(name) for row in kept], pa.float64(), from_pandas=True) for name in wanted}
        return pa.table(columns)

    @property
    def checkpoints(self) -> list[StoredCheckpoint]:
        """The committed checkpoints that are not pruned, oldest first."""
        from raystride.pipelines.train.checkpoint.manager import Checkpoints

        kept = Checkpoints(self.folder / "checkpoints", attempt="", keep=1)
        return [
            StoredCheckpoint(int(name.removeprefix("step-")), (kept.folder / name).uri) for name in sorted(kept.list_names())
        ]

    def load_model(
        self, checkpoint: str | int = "best", *, into: "nn.Module | None" = None, plugins: Sequence[str] = ()
    ) -> "nn.Module":
        """Returns the trained network in evaluation mode, on the CPU.

        Args:
            checkpoint: `best`, `last`, or a step.
            into: a module of the same shape, which is filled and returned: where the code of the run is not at hand, such as
                that of a script that called `raystride.fit`.
            plugins: plug-ins, as modules or files, in place of those that the run's stored settings name.

        Returns:
            The module.

        Raises:
            SettingError: there is no such checkpoint, it is damaged, shapes differ, or the run names code that must not be
                loaded (docs/security.md).
        """
        from raystride.pipelines.evaluate.load_run import load_into, open_run

        if into is not None:
            return load_into(into, Folder(self.storage), self.name, checkpoint)
        model = open_run(Folder(self.storage), self.name, checkpoint, plugins=plugins).model
        return getattr(model, "users_module", model)

    def generate(self, prompt: str = "", settings: Mapping[str, Any] | None = None) -> str:
        """Returns the continuation of a prompt; see `raystride.generate`."""
        return generate(self, prompt, settings)

    @overload
    def predict(self, questions: Sequence[Any], settings: Mapping[str, Any] | None = None) -> "Answers": ...

    @overload
    def predict(self, questions: None = None, settings: Mapping[str, Any] | None = None) -> "PredictionResult": ...

    @overload
    def predict(
        self,
        questions: Any,
        settings: Mapping[str, Any] | None = None,
        *,
        fn: "Callable[[nn.Module, Any], Any]",
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> "Answers | PredictionResult": ...

    def predict(
        self,
        questions: Any = None,
        settings: Mapping[str, Any] | None = None,
        *,
        fn: "Callable[[nn.Module, Any], Any] | None" = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> "Answers | PredictionResult":
        """Returns a mapping per question or per sample, or writes predictions to files; see `raystride.predict`."""
        return predict(self, questions, settings, fn=fn, collate=collate)  # type: ignore[arg-type]

    def evaluate(self, split: str = "test", settings: Mapping[str, Any] | None = None) -> "EvaluationResult":
        """Scores the model on `train`, `validation` or `test` documents; see `raystride.evaluate`."""
        return evaluate(self, split, settings)

    def export(
        self,
        to: str = "auto",
        folder: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Exports the model, returns its folder; see `raystride.export`."""
        return export(self, to, folder, settings)

    def plot(self) -> "Figure":
        """Returns a Matplotlib figure of the losses over steps and of tokens/s: `run.plot().savefig("curve.png")`."""
        from raystride.pipelines.observability.record.journal import stream_entries
        from raystride.pipelines.observability.report.curve import draw_curve_picture
        from raystride.pipelines.observability.report.figures import gather_figures

        return draw_curve_picture(gather_figures(stream_entries(self.folder)))

    def _repr_html_(self) -> str:
        """Shows the run's figures as a table in a notebook."""
        from raystride.pipelines.observability.report.run_figures import list_run_figures

        figures = list_run_figures(self.summary)
        rows = "".join(f"<tr><td>{escape(each.label)}</td><td>{escape(each.text)}</td></tr>" for each in figures)
        shown = f"<table>{rows}</table>" if figures else "<p>no summary yet: the training has not ended</p>"
        return f"<p><b>{escape(self.name)}</b> in {escape(str(self.folder.parent))}</p>{shown}"

    @property
    def report_path(self) -> str:
        """The path of the run's report, one self-contained HTML file that is written when the run ends."""
        return str(self.folder / "report.html")

    @property
    def mlflow_url(self) -> str | None:
        """The URL of the run's page in MLflow (of a database: while `raystride ui` runs); None if MLflow has none."""
        from raystride.pipelines.observability.record.mlflow.links import run_link
        from raystride.pipelines.observability.record.mlflow.log import read_reference

        return run_link(read_reference(self.folder))


def evaluate(
    run: Run | str, split: str = "test", settings: Settings | None = None, *, storage: PathOrUri = "runs"
) -> "EvaluationResult":
    """Scores a run's model on documents.

    Args:
        run: the run, or its name.
        split: `train`, `validation` or `test`; the last needs `data.test_source`.
        settings: settings of the job `evaluate`.
        storage: the folder or filesystem URI that contains the runs, if `run` is a name.

    Returns:
        The result: `metrics` by name, `intervals` (95 %; of counts by Agresti and Coull, of others by bootstrap over
        documents, from 30 on), the `rows` that a proportion is of, `samples`, `skipped`, the `step` of the checkpoint that
        was scored and the run's `last_step`, and the `folder` and `files` with each document's prediction.

    Raises:
        SettingError: there is no such run or checkpoint, or a setting is invalid.
        DataError: there is no such split, or it cannot be read.
        CannotRun: the cluster cannot be joined or started.

    Example:
        scored = raystride.evaluate("mine", "validation")
        scored.metrics["loss"], scored.intervals["loss"]
    """
    from raystride.pipelines.launch.console.screen import SilentScreen
    from raystride.pipelines.launch.finished import evaluate_run

    given = _run_settings(run, storage) | {"split": split} | dict(settings or {})
    scored, problem = evaluate_run(load_settings(EvaluateConfig, given).settings, log=_discard_message)
    if problem:
        SilentScreen().warn(problem)
    return scored


@overload
def predict(
    run: Run | str, questions: Sequence[Any], settings: Settings | None = None, *, storage: PathOrUri = "runs"
) -> "Answers": ...


@overload
def predict(
    run: Run | str, questions: None = None, settings: Settings | None = None, *, storage: PathOrUri = "runs"
) -> "PredictionResult": ...


@overload
def predict(
    run: Run | str,
    questions: Any,
    settings: Settings | None = None,
    *,
    fn: "Callable[[nn.Module, Any], Any]",
    collate: Callable[[list[Any]], Any] | None = None,
    storage: PathOrUri = "runs",
) -> "Answers | PredictionResult": ...


def predict(
    run: Run | str,
    questions: Any = None,
    settings: Settings | None = None,
    *,
    fn: "Callable[[nn.Module, Any], Any] | None" = None,
    collate: Callable[[list[Any]], Any] | None = None,
    storage: PathOrUri = "runs",
) -> "Answers | PredictionResult":
    """Runs inference with a run's model.

    Args:
        run: the run, or its name.
        questions: texts (or data URIs and paths of images), answered in this process and in order. Without them the settings
            name files, `{"input": "mails.csv", "output": "answers"}`; all workers (with `launch.mode inline` this process)
            write their predictions to files. With `fn` any dataset that `raystride.fit` takes.
        settings: settings of the job `predict`; with `fn` also `output`, a folder for Parquet files.
        fn: called as `fn(model, batch)` without gradients, on all workers; returns a row per sample, a tensor, array, list
            or mapping of these. For models of your own, and for whatever else of a model you want over a dataset.
        collate: makes a batch for `fn` of a list of samples; by default that of the training, or PyTorch's.
        storage: the folder or filesystem URI that contains the runs, if `run` is a name.

    Returns:
        A mapping per question, such as text, label, probability; with `fn` a row per sample, in which what has no name is
        `prediction`; for files a summary of the predictions. All know `step`, that of the checkpoint, `best` where there is
        one.

    Raises:
        SettingError: there is no such run, a question is invalid, or the folder holds other predictions.
        DataError: a file cannot be read.
        CannotRun: the cluster cannot be joined or started.

    Example:
        raystride.predict("tickets", ["My invoice is wrong"])[0]["label"]
        raystride.predict("tickets", settings={"input": "mails.csv", "output": "answers"})
    """
    from raystride.pipelines.launch.finished import apply_function, predict_files, predict_inputs

    given = _run_settings(run, storage) | dict(settings or {})
    if fn is not None:
        return apply_function(load_settings(ApplyConfig, given).settings, fn, questions, collate, log=_discard_message)
    if questions is None:
        return predict_files(load_settings(PredictConfig, given).settings, log=_discard_message)
    # The settings require a question or files; the questions themselves are passed separately.
    return predict_inputs(load_settings(PredictConfig, given | {"text": ""}).settings, questions)


def generate(run: Run | str, prompt: str = "", settings: Settings | None = None, *, storage: PathOrUri = "runs") -> str:
    """Continues a prompt by a run's language model; a chat model answers it.

    The model stays in memory for the next call, also of `predict`, until another run is used.

    Args:
        run: the run, or its name.
        prompt: the text to continue, or the user's question if the model has a chat template.
        settings: settings of the job `generate`, such as `{"sample.tokens": 100, "sample.temperature": 0}`.
        storage: the folder or filesystem URI that contains the runs, if `run` is a name.

    Returns:
        The continuation, without the prompt.

    Raises:
        SettingError: there is no such run or checkpoint, or its model is no decoder.

    Example:
        raystride.generate("mine", "def main():", {"sample.tokens": 40})
    """
    from raystride.pipelines.data.tasks.text_generation import write_text
    from raystride.pipelines.evaluate.load_run import open_cached, select_named_run

    given = load_settings(GenerateConfig, _run_settings(run, storage) | dict(settings or {})).settings
    opened = open_cached(select_named_run(given))
    sample: SampleConfig = replace(given.sample, prompt=prompt)
    return "".join(write_text(opened.writer, opened.task, sample))


def export(
    run: Run | str,
    to: str = "auto",
    folder: PathOrUri | None = None,
    settings: Settings | None = None,
    *,
    storage: PathOrUri = "runs",
) -> str:
    """Writes a run's model for other programs.

    Args:
        run: the run, or its name.
        to: `hugging_face`, `mlflow`; for a model of your own `state_dict`, `torch_export`, `onnx`. `auto`: `hugging_face`,
            or `state_dict` for a model of your own.
        folder: where to write; by default `export` and the format in the run's folder.
        settings: settings of the job `export`; `push` also uploads the folder to the Hugging Face hub.
        storage: the folder or filesystem URI that contains the runs, if `run` is a name.

    Returns:
        The folder.

    Raises:
        SettingError: there is no such run, the layout cannot represent its model, or the hub refuses it.

    Example:
        folder = raystride.export("mine", "hugging_face")
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    """
    from raystride.pipelines.launch.finished import export_run, push_run

    given = _run_settings(run, storage) | {"to": to, "folder": folder} | dict(settings or {})
    chosen = load_settings(ExportConfig, given).settings
    written, opened = export_run(chosen)
    if chosen.push:
        push_run(chosen, written, opened.step)
    return str(written)


def _run_settings(run: Run | str, storage: PathOrUri) -> dict[str, Any]:
    return {"run": run.name, "storage": run.storage} if isinstance(run, Run) else {"run": run, "storage": os.fspath(storage)}


def _discard_message(_: str) -> None:
    pass


def _suggest(name: str, known: Sequence[str]) -> str:
    similar = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {similar[0]}?" if similar else ""
    return f"{meant} (there is: {', '.join(known) or 'none'})"
