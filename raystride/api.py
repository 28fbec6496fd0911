"""The Python API: train, prepare, check and sweep, as functions that return their results and raise their errors.

    run = train("classify_trec", {"data.source": "tickets", "train.steps": 500}, run="mine")
    run.predict(["What is the longest river?"])[0]["label"]

`config` is a preset's name, a YAML file, a mapping or a `Config`; `settings` override it, by full names (`train.steps`) or
nested. All functions raise SettingError for invalid settings, before anything starts, and DataError for invalid data.
"""

import logging
import os
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import load_settings
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch import train_job as driver
from raystride.pipelines.launch.cluster.cluster import cluster
from raystride.pipelines.launch.console.notebook import ipython_shell
from raystride.pipelines.launch.console.screen import Screen, SilentScreen
from raystride.pipelines.launch.preflight.check import resolve_resources, run_preflight
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.run_store.location import locate_run
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.system.signals import EXIT_CODES, HungUp, Terminated, exit_code_of, raise_on_signals
from raystride.pipelines.system.storage.folder import Folder
from raystride.run import PathOrUri, Run, Settings

if TYPE_CHECKING:
    from raystride.pipelines.data.prepare.one_source import PreparedData
    from raystride.pipelines.launch.preflight.checks import Check
    from raystride.pipelines.sweep.answer import Answer

ConfigLike = PathOrUri | Settings | Config
C = TypeVar("C", bound=Config)


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a training after it had saved. A KeyboardInterrupt, so that it ends a script that does not catch it.

    The message is the line that opens the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(f"raystride.Run.open({run.name!r}, {str(run.folder.parent)!r})")
        self.run = run


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a sweep before all its trials had. The same call again measures what is missing.

    `answer` is that of the trials that have ended, as `raystride.sweep` returns it.
    """

    def __init__(self, answer: "Answer", missing: int) -> None:
        super().__init__(f"{missing} trials of the sweep {answer.base.run} are missing: the same call again measures them")
        self.answer = answer


class TrainingTerminated(SystemExit):
    """SIGTERM or SIGHUP stopped a training after it had saved. A SystemExit with the exit code of a shell, 143 or 129."""

    def __init__(self, run: Run, code: int) -> None:
        super().__init__(code)
        self.run = run


class SweepTerminated(SystemExit):
    """SIGTERM or SIGHUP ended a sweep before all its trials had. A SystemExit with the exit code of a shell, 143 or 129.

    `answer` is that of the trials that have ended, as `raystride.sweep` returns it.
    """

    def __init__(self, answer: "Answer", code: int) -> None:
        super().__init__(code)
        self.answer = answer


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
    missing = read_summary(place / str(base.run)).get("unfinished", 0) if not base.sweep.shard else 0
    if missing:
        interrupted = SweepInterrupted(answer, missing)
        if ipython_shell() is None:
            raise interrupted
        logging.getLogger("raystride").warning("stopped by Ctrl-C: %s", interrupted)
    return answer


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


def _for_shared_ray(config: C) -> C:
    """Turns off `launch.fast_start` if the caller has initialised Ray: it may span hosts, which that trainer cannot."""
    if "ray" in sys.modules and config.launch.mode == "ray":
        import ray

        if ray.is_initialized():
            return replace(config, launch=replace(config.launch, fast_start=False))
    return config
