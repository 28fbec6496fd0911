"""Trains several adapters on one base in one process; each is a run with its own name, checkpoints and record.

    summary = train_adapters(config, storage, Screen(), train)         # {"adapters": [{"run": "mine-0", ...}, ...], ...}
    outcomes = train_concurrently(configs, storage, Screen(), train)   # any settings that can share a base

Each run equals one of `raystride train` with its settings, and can be resumed, exported and evaluated by its name. They
train in threads that compute in turn; see `lora.lockstep`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.lora import refuse_sharing
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.console.screen import Screen, SilentScreen
from raystride.pipelines.launch.console.session import stop_signals
from raystride.pipelines.launch.inline import process_settings_kept
from raystride.pipelines.launch.preflight.check import resolve_and_check
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.run_store.naming import expand_adapters
from raystride.pipelines.observability.record.summary import RunSummary, put_summary
from raystride.pipelines.system.storage.folder import Folder

TrainFunction = Callable[..., RunSummary]
"""Type of `train_job.train`."""


def check_sharing(configs: Sequence[Config]) -> list[Config]:
    """Returns the settings for one worker in this process. Raises SettingError if they cannot share a base."""
    config = configs[0]
    if config.launch.mode != "inline":
        raise config.launch.error("mode", "must be `inline` (--launch inline) for adapters that share a base in one process")
    if config.train.compile != "none":
        raise config.train.error("compile", "must be `none` for adapters that share a base")
    for adapter_config in configs:
        refuse_sharing(adapter_config.task, adapter_config.train)
        if adapter_config.lora.dora or adapter_config.lora.init in ("pissa", "olora"):
            raise adapter_config.lora.error(
                "init", "must be `kaiming` or `gaussian`, and lora.dora false, where adapters share a base"
            )
        if adapter_config.lora.dropout or adapter_config.model.dropout:
            raise SettingError(
                f"lora.dropout is {adapter_config.lora.dropout} and model.dropout {adapter_config.model.dropout}: both must "
                "be 0 for adapters that share a base, whose masks would be another run's",
                setting="lora.dropout",
                value=adapter_config.lora.dropout,
            )
    return [
        replace(adapter_config, scaling=replace(adapter_config.scaling, workers=1, strategy="single"))
        for adapter_config in configs
    ]


def train_adapters(config: Config, storage: Folder, screen: Screen, train: TrainFunction) -> RunSummary:
    """Trains the adapters of `lora.adapters`; returns the summary of all, and stores it in the folder of the run's name.

    `train` trains one run. Raises SettingError, and the error of the first failed run when all have ended.
    """
    if config.launch.mode == "inline":  # other modes are rejected below
        # Checks the memory of one training, though all need theirs at once.
        resolve_and_check(RunContext(config, storage, screen.log), screen.warn)
    configs = expand_adapters(config)
    with stop_signals(lambda: None) as received_signals:  # the trainings' own listeners, in their threads, ask them to stop
        outcomes = train_concurrently(configs, storage, screen, train)
    summaries: list[Any] = []
    for adapter_config, outcome in zip(configs, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        summaries.append({"run": adapter_config.run, **outcome})
    stopped = any(summary.get("ending") == "stopped" for summary in summaries)
    combined: Any = {"run": config.run, "status": "stopped" if stopped else "finished", "adapters": summaries}
    put_summary(storage / str(config.run), combined)
    result: RunSummary = combined | ({"interrupted_by": received_signals[0]} if received_signals else {})
    return result


def train_concurrently(
    configs: Sequence[Config], storage: Folder, screen: Screen, train: TrainFunction
) -> list[RunSummary | BaseException]:
    """Trains all runs in this process over one base; returns the summary or the error of each.

    Raises SettingError if they cannot share a base, and DataError if data cannot be prepared.
    """
    from raystride.pipelines.train.lora.lockstep import LockstepGroup

    configs = check_sharing(configs)
    for config in configs:
        prepare_data(RunContext(config, storage, screen.log))
    lockstep_group = LockstepGroup(len(configs))
    outcomes: list[RunSummary | BaseException] = [RuntimeError("it has not begun") for _ in configs]

    def train_adapter(number: int) -> None:
        config = configs[number]
        try:
            outcome = outcomes[number] = train(config, storage, SilentScreen(), strategy=lockstep_group.strategy_for(number))
            losses = {key: outcome.get(key) for key in ("train_loss", "val_loss")}
            figures = "".join(f", {key} {value:.4f}" for key, value in losses.items() if isinstance(value, float))
            screen.log(f"adapter  {config.run}: {outcome.get('steps')} steps{figures}")
        except BaseException as error:
            outcomes[number] = error
        finally:
            lockstep_group.withdraw(number)

    threads = [threading.Thread(target=train_adapter, args=(number,), daemon=True) for number in range(len(configs))]
    with process_settings_kept():
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # the timeout lets signals be handled
                thread.join(0.5)
    return outcomes
