"""What people call from Python: the jobs as functions that return what they made and raise what went wrong.

    run = train("classify_trec", {"data.source": "tickets", "train.steps": 500}, run="mine")
    predict(run, ["What is the longest river?"])[0]["label"]

`config` is a preset's name, a YAML file, a mapping or a `Config`; `settings` go over it, by full names (`train.steps`) or
nested. All functions raise SettingError for what is wrong with settings, before anything starts, and DataError for data.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raystride.pipelines.cluster.cluster import CannotRun, cluster
from raystride.pipelines.config import Config, Sample, SettingError
from raystride.pipelines.config.jobs import Evaluate, Export, Generate, Predict
from raystride.pipelines.config.parse import configured
from raystride.pipelines.files import Folder
from raystride.pipelines.launch import driver
from raystride.pipelines.launch.check import checks_for, resources_for
from raystride.pipelines.launch.place import locate
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.screen import Quiet, Screen
from raystride.run import Run

if TYPE_CHECKING:
    from raystride.pipelines.evaluate.evaluation import Scored
    from raystride.pipelines.evaluate.prediction import Predicted
    from raystride.pipelines.launch.preflight import Check
    from raystride.pipelines.prepare.one_source import Prepared
    from raystride.pipelines.sweep.answer import Answer

Settings = Mapping[str, Any]
Given = str | Settings | Config
C = TypeVar("C", bound=Config)


def train(
    config: Given, settings: Settings | None = None, *, run: str | None = None, storage: str = "runs", progress: bool = False
) -> Run:
    """Trains, or goes on with a run of that name; returns it.

    It joins a Ray that is initialised already and leaves it running, else starts one for itself (none with `launch.mode
    inline`). `progress` shows what the job shows. Off the main thread Ctrl-C is the caller's.

    Raises SettingError also for a profiler that has to start the process itself, CannotRun where the cluster cannot run it,
    TrainingFailed (rank, step, cause, remedies) where the training ended by an error; everything up to its newest checkpoint
    is kept.
    """
    located, place = _located(config, settings, run, storage)
    tool = located.profile.tool
    if tool == "ncu" or (tool == "nsys" and located.launch.mode == "inline"):
        raise located.profile.error("tool", "has to start the process itself: use the command, `raystride train`")
    driver.train(_beside_others(located), place, Screen() if progress else Quiet())
    return Run(str(located.run), place / str(located.run))


def prepare(config: Given, settings: Settings | None = None, *, storage: str = "runs", progress: bool = False) -> "Prepared":
    """Prepares the data alone; the folder and its manifest. Raises CannotRun where there is no cluster to join or start."""
    located, place = _located(config, settings, None, storage)
    with cluster(located.launch):
        return prepare_data(located, place, Screen() if progress else Quiet())


def check(config: Given, settings: Settings | None = None, *, storage: str = "runs") -> "list[Check]":
    """What the preflight looks at before a training starts: name, whether it passed, what was found, the remedy.

    Raises CannotRun where the cluster cannot be joined or started; checks that fail are in what is returned.
    """
    located, place = _located(config, settings, None, storage)
    with cluster(located.launch):
        settled, there, share = resources_for(located, place, Quiet().line)
        return checks_for(settled, place, there, share)


def sweep(
    config: Given, settings: Settings | None = None, *, run: str | None = None, storage: str = "runs", progress: bool = False
) -> "Answer":
    """Measures what is missing of a sweep; its answer: `results`, `best`, `recommended` (YAML), `text`.

    Raises CannotRun where the cluster cannot be joined or started. Trials that fail are among the results, with the cause.
    """
    from raystride.pipelines.config.sweep import SweepConfig
    from raystride.pipelines.sweep.driver import located, run_trials

    parsed = configured(SweepConfig, config, _placed(settings, run, storage))
    base, place = located(parsed)
    return run_trials(_beside_others(base), place, Screen() if progress else Quiet())


def evaluate(run: Run | str, split: str = "test", settings: Settings | None = None, *, storage: str = "runs") -> "Scored":
    """Scores a run's model on `train`, `validation` or `test` documents: metrics with intervals, and where the files lie.

    Raises SettingError where there is no such run, DataError where no such split, CannotRun where no cluster.
    """
    from raystride.pipelines.launch.finished import evaluate_run

    given = _of_run(run, storage) | {"split": split} | dict(settings or {})
    scored, problem = evaluate_run(configured(Evaluate, given).settings, echo=_nothing)
    if problem:
        Quiet().warning(problem)
    return scored


def predict(
    run: Run | str, questions: Sequence[Any] | None = None, settings: Settings | None = None, *, storage: str = "runs"
) -> "list[dict[str, Any]] | Predicted":
    """Answers questions with a run's model.

    `questions` are texts (or data URIs and paths of images), answered here and in order: a mapping each, such as text,
    label, probability. Without them the settings name files, `{"input": "mails.csv", "output": "answers"}`, which all
    workers (with `launch.mode inline` this process) answer into files.

    Raises SettingError where there is no such run, a question is none, or the folder holds other answers; DataError for
    files that cannot be read, CannotRun where the cluster cannot be joined or started.
    """
    from raystride.pipelines.launch.finished import answer_questions, predict_files

    given = _of_run(run, storage) | dict(settings or {})
    if questions is None:
        return predict_files(configured(Predict, given).settings, echo=_nothing)
    # The settings want a question or files; the questions themselves are passed beside them.
    return answer_questions(configured(Predict, given | {"text": ""}).settings, questions)


def generate(run: Run | str, prompt: str = "", settings: Settings | None = None, *, storage: str = "runs") -> str:
    """What a run's language model writes after the prompt; settings as `{"sample.tokens": 100}`.

    Raises SettingError where there is no such run or checkpoint, or its model is no decoder.
    """
    from raystride.pipelines.evaluate.opening import open_run
    from raystride.pipelines.evaluate.writing import write_text

    given = configured(Generate, _of_run(run, storage) | dict(settings or {})).settings
    opened = open_run(Folder.at(given.storage), given.run, given.checkpoint, given.average)
    sample: Sample = replace(given.sample, prompt=prompt)
    return "".join(write_text(opened.decoder, opened.task, sample))


def export(
    run: Run | str,
    to: str = "hugging_face",
    folder: str | None = None,
    settings: Settings | None = None,
    *,
    storage: str = "runs",
) -> str:
    """Writes a run's model for other programs, `hugging_face` or `mlflow`; the folder that it lies in.

    With the setting `push` it is uploaded to the Hugging Face hub besides. Raises SettingError where there is no such run,
    the layout cannot say what its model is, or the hub refuses it.
    """
    from raystride.pipelines.launch.finished import export_run, push_run

    given = _of_run(run, storage) | {"to": to, "folder": folder} | dict(settings or {})
    chosen = configured(Export, given).settings
    written, opened = export_run(chosen)
    if chosen.push:
        push_run(chosen, written, opened.step)
    return str(written)


def _located(config: Given, settings: Settings | None, run: str | None, storage: str) -> tuple[Config, Folder]:
    return locate(configured(Config, config, _placed(settings, run, storage)))


def _placed(settings: Settings | None, run: str | None, storage: str) -> dict[str, Any]:
    return dict(settings or {}) | ({"run": run} if run else {}) | {"storage": storage}


def _of_run(run: Run | str, storage: str) -> dict[str, Any]:
    return {"run": run.name, "storage": run.storage} if isinstance(run, Run) else {"run": run, "storage": storage}


def _beside_others(config: C) -> C:
    """A Ray that the caller has initialised may span hosts, for which the trainer that starts fast is not made."""
    if "ray" in sys.modules and config.launch.mode == "ray":
        import ray

        if ray.is_initialized():
            return replace(config, launch=replace(config.launch, lean=False))
    return config


def _nothing(_: str) -> None:
    pass


__all__ = ["CannotRun", "SettingError", "check", "evaluate", "export", "generate", "predict", "prepare", "sweep", "train"]
