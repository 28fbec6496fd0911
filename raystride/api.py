"""The Python API: each job as a function that returns its result and raises its errors.

    run = train("classify_trec", {"data.source": "tickets", "train.steps": 500}, run="mine")
    predict(run, ["What is the longest river?"])[0]["label"]

`config` is a preset's name, a YAML file, a mapping or a `Config`; `settings` override it, by full names (`train.steps`) or
nested. All functions raise SettingError for invalid settings, before anything starts, and DataError for invalid data.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from raystride.pipelines.config import Config, SampleConfig, SettingError
from raystride.pipelines.config.jobs import ApplyConfig, EvaluateConfig, ExportConfig, GenerateConfig, PredictConfig
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch import train_job as driver
from raystride.pipelines.launch.cluster.cluster import CannotRun, cluster
from raystride.pipelines.launch.console.notebook import ipython_shell
from raystride.pipelines.launch.console.screen import Screen, SilentScreen
from raystride.pipelines.launch.preflight.check import resolve_resources, run_preflight
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.system.signals import EXIT_CODES, HungUp, Terminated, exit_code_of, raise_on_signals
from raystride.pipelines.system.storage.folder import Folder
from raystride.run import Run, SweepInterrupted, SweepTerminated, TrainingInterrupted, TrainingTerminated

if TYPE_CHECKING:
    from torch import nn

    from raystride.pipelines.data.prepare.one_source import PreparedData
    from raystride.pipelines.evaluate.evaluation import EvaluationResult
    from raystride.pipelines.evaluate.prediction import PredictionResult
    from raystride.pipelines.launch.preflight.checks import Check
    from raystride.pipelines.sweep.answer import Answer

Settings = Mapping[str, Any]
PathOrUri = str | os.PathLike[str]
ConfigLike = PathOrUri | Settings | Config
C = TypeVar("C", bound=Config)


def train(
    config: ConfigLike,
    settings: Settings | None = None,
    *,
    run: str | None = None,
    storage: PathOrUri = "runs",
    init_from: PathOrUri | None = None,
    progress: bool = False,
) -> Run:
    """Trains a run, or resumes the run of that name; returns it.

    Joins a Ray that is already initialised and leaves it running, else starts its own (none with `launch.mode inline`).
    In the main thread Ctrl-C, SIGTERM and SIGHUP make it save and raise; in other threads the caller handles signals.

    Args:
        config: a preset's name, a YAML file, a mapping or a `Config`.
        settings: overrides of `config`, by full names or nested.
        run: the run's name; by default it is derived from the settings.
        storage: the folder or filesystem URI that contains the runs.
        init_from: the setting `model.init_from`, the pretrained model to start from; network and tokenizer are taken from
            its folder.
        progress: whether to print the job's output.

    Returns:
        The run, finished; in IPython also one that Stop ended early, with a warning.

    Raises:
        SettingError: a setting is invalid, before anything starts.
        DataError: the data cannot be read as the settings say.
        CannotRun: the cluster cannot run it.
        TrainingFailed: the training ended by an error. Everything up to its newest checkpoint is kept.
        TrainingInterrupted: Ctrl-C, after all workers have saved.
        TrainingTerminated: SIGTERM or SIGHUP, after all workers have saved.

    Example:
        run = raystride.train("finetune", {"data.source": "chats.jsonl"}, init_from="/models/SmolLM2", run="tuned")
        run.summary["val_loss"]
    """
    given = dict(settings or {}) | ({"model.init_from": init_from} if init_from else {})
    return _train_located(*_locate_run(config, given, run, storage), progress=progress)


def _train_located(located: Config, place: Folder, *, progress: bool) -> Run:
    """Trains settings with a name and absolute paths. Raises as `train` does."""
    tool = located.profile.tool
    if tool == "ncu" or (tool == "nsys" and located.launch.mode == "inline"):
        raise located.profile.error("tool", "has to start the process itself: use the command, `raystride train`")
    summary = driver.train(_for_shared_ray(located), place, Screen() if progress else SilentScreen())
    trained = Run(str(located.run), place / str(located.run))
    _raise_interruption(trained, summary.get("interrupted_by"))
    return trained


def prepare(
    config: ConfigLike, settings: Settings | None = None, *, storage: PathOrUri = "runs", progress: bool = False
) -> "PreparedData":
    """Prepares the data of a training; a training with the same data settings then starts at once.

    Args:
        config: a preset's name, a YAML file, a mapping or a `Config`.
        settings: overrides of `config`, by full names or nested.
        storage: the folder or filesystem URI that contains the runs, and the prepared data in `.prepared`.
        progress: whether to print the job's output.

    Returns:
        The prepared data: its `folder`, its `manifest` and whether it was `reused`.

    Raises:
        SettingError: a setting is invalid.
        DataError: the data cannot be read as the settings say.
        CannotRun: no cluster can be joined or started.

    Example:
        data = raystride.prepare("lm_python", {"data.source": "texts/*.txt"})
        data.manifest.vocabulary_size
    """
    located, place = _locate_run(config, settings, None, storage)
    with cluster(located.launch):
        return prepare_data(RunContext(located, place, (Screen() if progress else SilentScreen()).log))


def check(config: ConfigLike, settings: Settings | None = None, *, storage: PathOrUri = "runs") -> "list[Check]":
    """Runs the preflight checks of a training, without training.

    Args:
        config: a preset's name, a YAML file, a mapping or a `Config`.
        settings: overrides of `config`, by full names or nested.
        storage: the folder or filesystem URI that contains the runs.

    Returns:
        The checks, each with `name`, `passed`, `found` (what was asked for, beside what there is) and `remedy`.

    Raises:
        SettingError: a setting is invalid.
        DataError: the first rows of the data cannot be read as the settings say.
        CannotRun: the cluster cannot be joined or started. Checks that fail are in the result.

    Example:
        failed = [check for check in raystride.check("lm_124m", {"data.source": "texts"}) if not check.passed]
    """
    located, place = _locate_run(config, settings, None, storage)
    with cluster(located.launch):
        return run_preflight(resolve_resources(RunContext(located, place, SilentScreen().log)))


def sweep(
    config: ConfigLike,
    settings: Settings | None = None,
    *,
    run: str | None = None,
    storage: PathOrUri = "runs",
    progress: bool = False,
) -> "Answer":
    """Measures the trials of a sweep that are missing, and answers which settings are best.

    Args:
        config: a preset's name, a YAML file, a mapping or a `Config`.
        settings: overrides of `config`, by full names or nested, with those of `sweep`.
        run: the sweep's name; by default it is derived from the settings.
        storage: the folder or filesystem URI that contains the runs.
        progress: whether to print the job's output.

    Returns:
        The answer: `best` (None if no trial was measured) and `results` by trial, `recommended` (settings as YAML, for
        `train`), `text`. Failed trials are among the results, with the cause.

    Raises:
        SettingError: a setting is invalid, or the space is empty.
        DataError: no trial's data can be read.
        CannotRun: the cluster cannot be joined or started.
        SweepInterrupted: Ctrl-C, with the answer of the trials so far. In IPython that is returned instead, with a warning.
        SweepTerminated: SIGTERM or SIGHUP, likewise.

    Example:
        answer = raystride.sweep("lm_python", {"sweep.space": {"optimizer.learning_rate": [1e-3, 3e-3]}})
        answer.best and answer.best.settings
    """
    from raystride.pipelines.config.sweep import SweepJobConfig
    from raystride.pipelines.sweep.sweep_job import answer_so_far, resolve_storage, run_trials

    parsed = load_settings(SweepJobConfig, config, _with_run_and_storage(settings, run, storage))
    base, place = resolve_storage(parsed)
    try:
        with raise_on_signals():
            answer = run_trials(_for_shared_ray(base), place, Screen() if progress else SilentScreen())
    except (Terminated, HungUp) as signalled:
        raise SweepTerminated(answer_so_far(base, place), exit_code_of(signalled)) from None
    # Ray Tune handles Ctrl-C itself: it ends the trial and returns. A trial that failed is no missing one.
    missing = (place / str(base.run)).read_json("summary.json").get("unfinished", 0) if not base.sweep.shard else 0
    if missing:
        interrupted = SweepInterrupted(answer, missing)
        if ipython_shell() is None:
            raise interrupted
        logging.getLogger("raystride").warning("stopped by Ctrl-C: %s", interrupted)
    return answer


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
        The result: `metrics` by name, `intervals` (95 %, by bootstrap over documents), `samples`, `skipped`, and the
        `folder` and `files` with each document's prediction.

    Raises:
        SettingError: there is no such run or checkpoint, or a setting is invalid.
        DataError: there is no such split, or it cannot be read.
        CannotRun: the cluster cannot be joined or started.

    Example:
        scored = raystride.evaluate("mine", "validation")
        scored.metrics["loss"], scored.intervals["loss"]
    """
    from raystride.pipelines.launch.finished import evaluate_run

    given = _run_settings(run, storage) | {"split": split} | dict(settings or {})
    scored, problem = evaluate_run(load_settings(EvaluateConfig, given).settings, log=_discard_message)
    if problem:
        SilentScreen().warn(problem)
    return scored


@overload
def predict(
    run: Run | str, questions: Sequence[Any], settings: Settings | None = None, *, storage: PathOrUri = "runs"
) -> list[dict[str, Any]]: ...


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
) -> "list[dict[str, Any]] | PredictionResult": ...


def predict(
    run: Run | str,
    questions: Any = None,
    settings: Settings | None = None,
    *,
    fn: "Callable[[nn.Module, Any], Any] | None" = None,
    collate: Callable[[list[Any]], Any] | None = None,
    storage: PathOrUri = "runs",
) -> "list[dict[str, Any]] | PredictionResult":
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
        `prediction`; for files a summary of the predictions.

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
    from raystride.pipelines.evaluate.load_run import open_cached, select_run

    given = load_settings(GenerateConfig, _run_settings(run, storage) | dict(settings or {})).settings
    opened = open_cached(select_run(Folder.from_uri(given.storage), given.run, given.checkpoint, given.average))
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


def _raise_interruption(run: Run, received: str | None) -> None:
    """Raises what the signal would have raised without a training that had to save first."""
    if not received or threading.current_thread() is not threading.main_thread():
        return
    if received != "SIGINT":
        raise TrainingTerminated(run, EXIT_CODES[received])
    interrupted = TrainingInterrupted(run)
    if ipython_shell() is None:
        raise interrupted
    logging.getLogger("raystride").warning("stopped by Ctrl-C and saved; it is returned, and this opens it: %s", interrupted)


def _locate_run(config: ConfigLike, settings: Settings | None, run: str | None, storage: PathOrUri) -> tuple[Config, Folder]:
    return locate_run(load_settings(Config, config, _with_run_and_storage(settings, run, storage)))


def _with_run_and_storage(settings: Settings | None, run: str | None, storage: PathOrUri) -> dict[str, Any]:
    return dict(settings or {}) | ({"run": run} if run else {}) | {"storage": os.fspath(storage)}


def _run_settings(run: Run | str, storage: PathOrUri) -> dict[str, Any]:
    return {"run": run.name, "storage": run.storage} if isinstance(run, Run) else {"run": run, "storage": os.fspath(storage)}


def _for_shared_ray(config: C) -> C:
    """Turns off `launch.fast_start` if the caller has initialised Ray: it may span hosts, which that trainer cannot."""
    if "ray" in sys.modules and config.launch.mode == "ray":
        import ray

        if ray.is_initialized():
            return replace(config, launch=replace(config.launch, fast_start=False))
    return config


def _discard_message(_: str) -> None:
    pass


__all__ = ["CannotRun", "SettingError", "check", "evaluate", "export", "generate", "predict", "prepare", "sweep", "train"]
