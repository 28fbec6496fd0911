"""Several adapters on one base in one process: a run each, with a name, checkpoints and record of its own.

    configs = many_of(config)                                 # lora.adapters and lora.each, as settings of so many runs
    summary = train_many(configs, config, storage, Screen(), train)   # {"adapters": [{"run": "mine-0", ...}, ...], ...}

Each is what `raystride train` would have made of its settings, and can be resumed, exported and scored by its name. They
train in threads, of which one computes at a time; see `train.together`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import with_settings
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.preparing import prepare_data
from raystride.pipelines.launch.screen import Quiet, Screen
from raystride.pipelines.launch.session import stop_signals
from raystride.pipelines.record.summary import RunSummary

Train = Callable[..., RunSummary]
"""`driver.train`."""
OWN = ("seed", "data.", "lora.rank", "lora.alpha", "lora.rslora", "lora.targets", "lora.init", "optimizer.", "train.", "guard.")
"""Settings in which adapters on one base may differ, or names that begin so."""
SHARED = ("lora.init_from", "train.precision", "train.compile", "train.activation_checkpointing", "train.exact", "train.deterministic")
"""Among those the ones in which they may not."""


def many_of(config: Config) -> list[Config]:
    """The settings of each of the adapters, which are trained as the runs `<run>-0`, `<run>-1`, ...

    Raises SettingError for a setting in which they cannot differ, or a way of training that they cannot share.
    """
    each, count = config.lora.each or {}, config.lora.adapters
    alone = replace(config, lora=replace(config.lora, adapters=1, each=None))
    for key in each:
        if key.startswith(SHARED) or not key.startswith(OWN):
            raise config.lora.error("each", f"names {key}, which is the base's, or how all are computed: adapters share it")
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
        if one.lora.dora or one.lora.init in ("pissa", "olora"):
            raise one.lora.error("init", "must be `kaiming` or `gaussian`, and lora.dora false, for adapters that share a base")
        if one.lora.dropout or one.model.dropout:
            raise SettingError(
                f"lora.dropout is {one.lora.dropout} and model.dropout {one.model.dropout}: both must be 0 for adapters that "
                "share a base, whose masks would be another run's"
            )
    return [replace(one, scaling=replace(one.scaling, workers=1, strategy="single")) for one in configs]


@dataclass
class _Member:
    """One of the trainings: what is known of it while it goes on, and how it ended."""

    config: Config
    outcome: RunSummary = field(default_factory=lambda: RunSummary())
    error: BaseException | None = None


def train_many(
    configs: Sequence[Config], base: Config, storage: Folder, screen: Screen, train: Train, tags: Mapping[str, str] | None = None
) -> RunSummary:
    """Trains all of them beside each other; the summary of all, which lies in the folder of `base.run` as well.

    `train` is what trains one. Raises what the first that failed raised, when all have come to an end.
    """
    from raystride.pipelines.train.together import Together

    members = [_Member(config) for config in check_sharing(configs)]
    for member in members:
        prepare_data(member.config, storage, screen)
    together = Together(len(members))
    threads = []
    for number, member in enumerate(members):
        strategy = together.member(number)
        own = partial(train, strategy=strategy, tags=tags)
        leave = partial(together.leave, number)
        threads.append(threading.Thread(target=_train_one, args=(member, storage, own, leave, screen), daemon=True))
    with stop_signals(lambda: None) as told:  # the trainings' own listeners, in their threads, ask them to stop
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)
    for member in members:
        if member.error:
            raise member.error
    summary = _of_all(base, members)
    if told:
        summary["interrupted_by"] = told[0]
    (storage / str(base.run)).put_json("summary.json", summary)
    return summary


def _train_one(member: _Member, storage: Folder, train: Train, leave: Callable[[], None], screen: Screen) -> None:
    try:
        member.outcome = train(member.config, storage, Quiet())
        figures = ", ".join(f"{key} {value:.4f}" for key in ("train_loss", "val_loss") if (value := member.outcome.get(key)))
        screen.line(f"adapter  {member.config.run}: {member.outcome.get('steps')} steps, {figures}")
    except BaseException as error:
        member.error = error
    finally:
        leave()


def _of_all(base: Config, members: Sequence[_Member]) -> RunSummary:
    """What is said of all of them together."""
    each: list[Any] = [{"run": member.config.run} | dict(member.outcome) for member in members]
    stopped = any(one.get("ending") == "stopped" for one in each)
    found: Any = {"run": base.run, "status": "stopped" if stopped else "finished", "adapters": each}
    summary: RunSummary = found
    return summary
