"""A training of adapters: the base under them, what of it is written down, and whether a resumed run still has the same one.

The base is frozen. It is in no optimiser, no checkpoint and no exchange of gradients; a checkpoint's manifest has the
SHA-256 of its values instead, as they are held.

    network = strategy.build(MakeAdapted(task, config, job.prepared / "tokenizer", log))
    begin_adapters(network, config, found, checkpoints)
    check_base(found, digest := settle_base(network), config)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import names_there
from raystride.model.lora import attach, hold_base, start_adapters, take_out
from raystride.model.side_by_side import over_same_base
from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.tasks import Task
from raystride.pipelines.train.base_run import start_with
from raystride.pipelines.train.checkpoint import Checkpoints, Found
from raystride.pipelines.train.fingerprint import base_sha256
from raystride.pipelines.train.peft import read_adapter

HEADER = "lora"
"""Under which key a checkpoint's manifest says what its adapters belong to."""


@dataclass(frozen=True)
class MakeAdapted:
    """What makes a frozen network with the base's weights, and adapters without values."""

    task: Task
    """Makes the plain network, and knows what ids and labels mean."""
    config: Config
    tokenizer: Folder
    """That of the run's data."""
    log: Callable[[str], None]

    def __call__(self) -> nn.Module:
        """The network. Raises SettingError for targets that it lacks, or a base that is no such."""
        model = self._attached(self.task.build_model())
        start_with(model, self.config.model.init_from or "", self.task, self.tokenizer, self.log)
        if self.config.lora.base_precision == "bf16":
            hold_base(model, torch.bfloat16)
        return model

    def over(self, other: nn.Module) -> nn.Module:
        """The same over the base of another network, which the two share. Raises SettingError for targets that it lacks."""
        return self._attached(over_same_base(other))

    def _attached(self, model: nn.Module) -> nn.Module:
        try:
            attach(model, self.config.lora, names_there(model))
        except ValueError as error:
            raise SettingError.of(error) from error
        return model


def network_maker(task: Task, config: Config, tokenizer: Folder, log: Callable[[str], None]) -> Callable[[], nn.Module]:
    """What makes the network of a run: a plain one, or one with adapters over a base; `tokenizer` is that of the data."""
    return MakeAdapted(task, config, tokenizer, log) if config.lora.rank else task.build_model


def begin_adapters(model: nn.Module, config: Config, found: Found | None, checkpoints: Checkpoints) -> None:
    """Gives adapters their first values.

    `found`: the checkpoint that the run goes on from; its values are loaded later, but for what the base must know now.
    Raises SettingError where `lora.init_from` names no adapter of this kind.
    """
    lora = config.lora
    start_adapters(model, lora, config.seed)
    if found and lora.init in ("pissa", "olora"):
        checkpoints.load(found, model)
    elif lora.init_from and not found:
        read_adapter(model, lora, Folder(lora.init_from))


def settle_base(model: nn.Module) -> str:
    """The hash of the base as it is held; what adapters began with is then taken out of it. All workers call it together."""
    digest = base_sha256(model)
    take_out(model)
    return digest


def check_base(found: Found | None, digest: str, config: Config) -> None:
    """Raises SettingError where a run that goes on has another base than the one that its adapters were trained on."""
    before: Any = (found.manifest.get(HEADER) or {}).get("base") if found else None
    if before and before != digest:
        raise SettingError(
            f"model.init_from is {config.model.init_from!r}: its weights are not those that this run's adapters were "
            f"trained on (base {before[:12]} before, {digest[:12]} now). Put the earlier weights there, or start another "
            "run, --run NAME",
            setting="model.init_from",
            value=config.model.init_from,
        )


def open_base(config: Config, task: Task, found: Found) -> nn.Module:
    """A network with the base under a finished run's adapters, whose own values are still to be loaded.

    Raises SettingError where the base is gone, or no longer the one that they were trained on.
    """
    model = MakeAdapted(task, config, found.data / "tokenizer", lambda _: None)()
    checkpoints = Checkpoints(found.folder, attempt="", keep=1)
    begin_adapters(model, config, found, checkpoints)
    check_base(found, settle_base(model), config)
    return model
