"""Several adapters on one base in one process: a run each, with a name, checkpoints and record of its own.

    summary = train_many(config, storage, Screen(), train)    # {"adapters": [{"run": "mine-0", ...}, ...], ...}
    outcomes = train_beside(configs, storage, Screen(), train)    # of any settings that can share a base

Each is what `raystride train` would have made of its settings, and can be resumed, exported and scored by its name. They
train in threads, of which one computes at a time; see `train.together`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.lora import refuse_sharing
from raystride.pipelines.config.parse import with_settings
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.screen import Quiet, Screen
from raystride.pipelines.launch.session import stop_signals
from raystride.pipelines.record.summary import RunSummary

Train = Callable[..., RunSummary]
"""`driver.train`."""


def many_of(config: Config) -> list[Config]:
    """The settings of each of the adapters, which are trained as the runs `<run>-0`, `<run>-1`, ...

    Raises SettingError for a value that a setting cannot have.
    """
    each, count = config.lora.each or {}, config.lora.adapters
    alone = replace(config, lora=replace(config.lora, adapters=1, each=None))
    found = [with_settings(alone, {key: values[number] for key, values in each.items()}) for number in range(count)]
    return [replace(one, run=f"{config.run}-{number}") for number, one in enumerate(found)]


def check_sharing(configs: Sequence[Config]) -> list[Config]:
    """The settings as one worker of this process trains them. Raises SettingError for what they cannot share."""
    config = configs[0]
    if config.launch.mode != "inline":
        raise config.launch.error("mode", "must be `inline` (--launch inline) for adapters that share a base in one process")
    if config.train.compile != "none":
        raise config.train.error("compile", "must be `none` for adapters that share a base")
    for one in configs:
        refuse_sharing(one.task, one.train)
        if one.lora.dora or one.lora.init in ("pissa", "olora"):
            raise one.lora.error("init", "must be `kaiming` or `gaussian`, and lora.dora false, where adapters share a base")
        if one.lora.dropout or one.model.dropout:
            raise SettingError(
                f"lora.dropout is {one.lora.dropout} and model.dropout {one.model.dropout}: both must be 0 for adapters "
                "that share a base, whose masks would be another run's",
                setting="lora.dropout",
                value=one.lora.dropout,
            )
    return [replace(one, scaling=replace(one.scaling, workers=1, strategy="single")) for one in configs]


def train_many(config: Config, storage: Folder, screen: Screen, train: Train) -> RunSummary:
    """Trains the adapters of `lora.adapters`; the summary of all, which lies in the folder of the run's name as well.

    `train` is what trains one. Raises SettingError, and what the first that failed raised, when all have come to an end.
    """
    configs = many_of(config)
    with stop_signals(lambda: None) as told:  # the trainings' own listeners, in their threads, ask them to stop
        outcomes = train_beside(configs, storage, screen, train)
    each: list[Any] = []
    for one, outcome in zip(configs, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        each.append({"run": one.run, **outcome})
    stopped = any(one.get("ending") == "stopped" for one in each)
    found: Any = {"run": config.run, "status": "stopped" if stopped else "finished", "adapters": each}
    (storage / str(config.run)).put_json("summary.json", found)
    summary: RunSummary = found | ({"interrupted_by": told[0]} if told else {})
    return summary


def train_beside(
    configs: Sequence[Config], storage: Folder, screen: Screen, train: Train
) -> list[RunSummary | BaseException]:
    """Trains all of them in this process, over one base; of each its summary, or what it raised.

    Raises SettingError for what they cannot share, and DataError where data cannot be prepared.
    """
    from raystride.pipelines.train.together import Together

    configs = check_sharing(configs)
    for config in configs:
        prepare_data(config, storage, screen)
    together = Together(len(configs))
    outcomes: list[RunSummary | BaseException] = [RuntimeError("it has not begun") for _ in configs]

    def body(number: int) -> None:
        config = configs[number]
        try:
            outcome = outcomes[number] = train(config, storage, Quiet(), strategy=together.member(number))
            losses = {key: outcome.get(key) for key in ("train_loss", "val_loss")}
            figures = "".join(f", {key} {value:.4f}" for key, value in losses.items() if isinstance(value, float))
            screen.line(f"adapter  {config.run}: {outcome.get('steps')} steps{figures}")
        except BaseException as error:
            outcomes[number] = error
        finally:
            together.leave(number)

    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(configs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # so that signals are handled meanwhile
            thread.join(0.5)
    return outcomes
