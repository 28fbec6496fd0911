"""A training of adapters: the base under them, what of it is written down, and whether a resumed run still has the same one.

The base is frozen. It is in no optimiser, no checkpoint and no exchange of gradients; a checkpoint's manifest has the
SHA-256 of its values instead, as they are held.

    network = strategy.build(with_adapters(task.build_model, config.lora))
    begin_adapters(network, config, found, checkpoints)       # when the base has its values
    check_base(found, digest := settle_base(network), config)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import names_there
from raystride.model.lora import attach, hold_base, start_adapters, take_out
from raystride.pipelines.config import Config, Lora, SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.tasks import Task
from raystride.pipelines.train.checkpoint import Checkpoints, Found
from raystride.pipelines.train.fingerprint import base_sha256
from raystride.pipelines.train.peft import read_adapter
from raystride.pipelines.train.pretrained import start_from

HEADER = "lora"
"""Under which key a checkpoint's manifest says what its adapters belong to."""


def with_adapters(make: Callable[[], nn.Module], lora: Lora) -> Callable[[], nn.Module]:
    """What makes a network, frozen and with adapters if there are to be any. Raises SettingError for targets it lacks."""
    if not lora.rank:
        return make

    def adapted() -> nn.Module:
        model = make()
        try:
            attach(model, lora, names_there(model))
        except ValueError as error:
            raise SettingError(str(error)) from error
        return model

    return adapted


def begin_adapters(model: nn.Module, config: Config, found: Found | None, checkpoints: Checkpoints | None) -> None:
    """Gives adapters their first values, and the base the form in which it is held; it has its values already.

    `found`: the checkpoint that the run goes on from; its values are loaded later, but for what the base must know now.
    Raises SettingError where `lora.init_from` names no adapter of this kind.
    """
    lora = config.lora
    if lora.base_precision == "bf16":
        hold_base(model, torch.bfloat16)
    start_adapters(model, lora, config.seed)
    if found:
        if lora.init in ("pissa", "olora") and checkpoints:
            checkpoints.load(found, model)
    elif lora.init_from:
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
            "run, --run NAME"
        )


def open_base(config: Config, task: Task, found: Found) -> nn.Module:
    """A network with the base under a finished run's adapters, whose own values are still to be loaded.

    Raises SettingError where the base is gone, or no longer the one that they were trained on.
    """
    model = with_adapters(task.build_model, config.lora)()
    start_from(model, Folder(config.model.init_from or ""), found.data / "tokenizer", lambda _: None)
    checkpoints = Checkpoints(found.folder, attempt="", keep=1)
    begin_adapters(model, config, found, checkpoints)
    check_base(found, settle_base(model), config)
    return model
