"""Models, data and losses of users' own: `fit` trains them, `register_model` names them for other jobs.

run = fit(model=make_model, data=dataset, loss=loss, settings={"train.steps": 1000}, run="mine")
register_model("mine", model=make_model, data=dataset, loss=loss)    # in a plug-in: raystride train --task mine
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.plugins import FIT, RUN_TASKS, SOURCES, TASKS, register_task
from raystride.pipelines.data.stored_code import SCRIPT
from raystride.pipelines.launch.console.screen import Screen, SilentScreen
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.task import own_model_task
from raystride.run import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.pipelines.observability.observers.observer import Observer

    Model = Callable[..., nn.Module] | nn.Module
    Loss = Callable[[nn.Module, Any], Any]
    Metrics = Callable[[nn.Module, Any], Mapping[str, Any]]
    Optimizer = Callable[[nn.Module, float], torch.optim.Optimizer] | type[torch.optim.Optimizer] | torch.optim.Optimizer
    Schedule = Callable[[int, int], float] | torch.optim.lr_scheduler.LRScheduler

_one_at_a_time = threading.RLock()
"""Trainings by `fit` in several threads follow each other: all register the same task."""


def fit(
    model: "Model",
    data: Any,
    loss: "Loss",
    *,
    validation: Any = None,
    metrics: "Metrics | None" = None,
    collate: "Callable[[list[Any]], Any] | None" = None,
    optimizer: "Optimizer | None" = None,
    schedule: "Schedule | None" = None,
    observers: "Sequence[Observer | Callable[[], Observer]]" = (),
    settings: Mapping[str, Any] | None = None,
    run: str | None = None,
    storage: str | os.PathLike[str] = "runs",
    progress: bool = False,
) -> Run:
    """Trains any PyTorch module on any indexed data, or resumes the run of that name; returns it.

    Order, resuming, record, checkpoints, strategies and sweeps are those of every run; see docs/own-model.md.

    Args:
        model: a callable that returns the module, or the module itself, of which every worker trains a copy. The setting
            `fit.model_args` holds the callable's keyword arguments.
        data: samples: a list, a dataset with `len()` and `[i]`, a mapping or tuple of arrays of equal length, a
            `pyarrow.Table`, a pandas DataFrame, a Hugging Face dataset, a `torch.utils.data.DataLoader` (its dataset,
            collate and batch size are taken), or a callable that returns a dataset on each worker (arguments:
            `fit.data_args`). A stream (an iterator, a generator's function, an iterable or Ray data set) is
            written into the storage first, as its rows must be indexed.
        loss: called as `loss(model, batch)`, with the batch on the device. Returns the mean over the batch's samples (a
            scalar), `(sum, count)` where samples differ in what they count, or a mapping with one of these as `loss` and
            further losses by name, which are recorded. A loss of PyTorch, `nn.CrossEntropyLoss()`, is called as
            `loss(model(inputs), labels)` with samples that are pairs.
        validation: held-out samples, as `data`; by default the setting `data.validation_fraction` of `data`.
        metrics: called as `metrics(model, batch)` without gradients; returns by name the mean over the batch's samples,
            `(sum, count)`, or for a figure of the whole set `(function, predictions, labels)`, where the function is called
            with those of all samples, or is a torchmetrics object. Recorded with `val_` in front, and usable as
            `validation.metric`, with `validation.direction`.
        collate: makes a batch of a list of samples; by default PyTorch's `default_collate`.
        optimizer: called as `optimizer(model, learning_rate)`; returns a `torch.optim.Optimizer`, also with several groups.
            Or its class, or one that has made no step, for the parameters of `model`. By default the settings of
            `optimizer`.
        schedule: called as `schedule(step, total_steps)`; returns the factor of the learning rate at a step, from 0 on. Or
            a scheduler of PyTorch that is a function of the step. By default the settings of `optimizer`.
        observers: `raystride.Observer` objects, of which each worker has copies, or callables that make them.
        settings: any settings of a training, by full names or nested.
        run: the run's name; by default it is derived from the settings.
        storage: the folder or filesystem URI that contains the runs.
        progress: whether to print the job's output.

    Returns:
        The run; `run.load_model()` is the trained module.

    Raises:
        SettingError: a setting is invalid, or model, loss or metrics do not return what they must, or a resumed run has data
            of another length or a model of other shapes. Before anything starts.
        DataError: data cannot be read.
        CannotRun: the cluster cannot run it.
        TrainingFailed: the training ended by an error. Everything up to its newest checkpoint is kept.
        TrainingInterrupted: Ctrl-C, after all workers have saved.
        TrainingTerminated: SIGTERM or SIGHUP, after all workers have saved.

    Example:
        run = raystride.fit(
            model=lambda: torch.nn.Linear(8, 1),
            data={"x": features, "y": targets},
            loss=lambda model, batch: torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"]),
            settings={"train.batch": 64, "train.steps": 100},
        )
    """
    from raystride import api

    given = dict(settings or {})
    if given.setdefault("task", FIT) != FIT:
        rule = "must be left out: raystride.fit has a task of its own"
        raise SettingError(f"task is {given['task']!r}: it {rule}", setting="task", value=given["task"], allowed=rule)
    place, screen = Folder.from_uri(os.fspath(storage)), Screen() if progress else SilentScreen()
    own = OwnModel(model, data, loss, validation, metrics, collate, optimizer, schedule, tuple(observers))  # type: ignore[arg-type]
    own, given = _adopt(own, given)
    data, validation = (_store_stream(part, place, screen.log) for part in (own.data, own.validation))
    with _one_at_a_time:
        own_model = replace(own, data=data, validation=validation)
        _register(FIT, own_model, SCRIPT)
        located, place = api._locate_run(given, None, run, storage)
        RUN_TASKS[(place / str(located.run)).uri] = TASKS[FIT]
        return api._train_located(located, place, progress=progress)


def register_model(
    name: str,
    *,
    model: "Model",
    data: Any,
    loss: "Loss",
    validation: Any = None,
    metrics: "Metrics | None" = None,
    collate: "Callable[[list[Any]], Any] | None" = None,
    optimizer: "Optimizer | None" = None,
    schedule: "Schedule | None" = None,
) -> None:
    """Registers a model with its data and loss as `task: NAME`.

    In a module that `plugins` names, every job finds it: `raystride train --plugins '["mine.py"]' --task NAME`, sweeps,
    `raystride.sweep({"task": NAME, ...})`. In a script only that script can open the run again.

    Args:
        name: the task's name.
        model: as of `fit`; likewise all that follow.
        data: samples, or a callable that returns them.
        loss: called as `loss(model, batch)`.
        validation: held-out samples.
        metrics: called as `metrics(model, batch)`.
        collate: makes a batch of a list of samples.
        optimizer: called as `optimizer(model, learning_rate)`.
        schedule: called as `schedule(step, total_steps)`.

    Raises:
        ValueError: another task has that name.

    Example:
        raystride.register_model("digits", model=DigitsNetwork, data=load_digits, loss=cross_entropy)
    """
    own_model = OwnModel(model, data, loss, validation, metrics, collate, optimizer, schedule)  # type: ignore[arg-type]
    own_model, _ = _adopt(own_model, {})
    _register(name, own_model, sys._getframe(1).f_globals.get("__name__", SCRIPT))


def _adopt(own: OwnModel, settings: dict[str, Any]) -> tuple[OwnModel, dict[str, Any]]:
    """Returns the parts with PyTorch's loaders, optimisers, schedulers and losses adopted, and settings with what these say.

    Raises SettingError for those that cannot be.
    """
    if "torch" not in sys.modules:
        return own, settings
    from raystride.pipelines.train.own_model.adopted import adopt

    return adopt(own, settings)


def _store_stream(given: Any, storage: Folder, log: Callable[[str], None]) -> Any:
    """Returns data as it is, or the rows of a stream once they are written into the storage."""
    from raystride.pipelines.train.own_model.streams import is_stream, store_stream

    if not is_stream(given):
        return given
    rows = store_stream(given, storage, log)
    log(f"data: the {len(rows):,} rows of a {type(given).__name__} are written to {rows}, as samples must be indexed")
    return rows


def _register(name: str, own_model: OwnModel, module: str) -> None:
    for part, given in (("model", own_model.model), ("loss", own_model.loss)):
        if not callable(given):
            rule = "must be callable"
            raise SettingError(f"{part} {rule}, and is {type(given).__name__}", setting=part, value=given, allowed=rule)
    task_class = own_model_task(own_model, module)
    register_task(name)(task_class)
    SOURCES[name] = (_document_source(name, module), "")


def _document_source(name: str, module: str) -> Callable[[], Iterator[Any]]:
    """Returns the source of a registered model's name: its samples are read as they are, and no documents."""

    def documents() -> Iterator[Any]:
        raise NotImplementedError(f"{name} is a model of your own, whose samples are not documents")
        yield

    documents.__module__ = module
    return documents
