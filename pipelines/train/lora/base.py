"""Frozen base of adapters: storage dtype, checksum, and its verification on resume.

The base is in no optimiser, no checkpoint and no exchange of gradients; a checkpoint's manifest has the SHA-256 of its
values, in their storage dtype, instead.

    network = strategy.build_network(AdaptedModelFactory(task, config, job.prepared / "tokenizer", log))
    init_adapters(network, config, found, checkpoints)
    check_base(found, digest := finalize_base(network), config.model)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters, cast_base, start_adapters, subtract_initial_delta
from raystride.model.side_by_side import share_base
from raystride.pipelines.config import Config, LoraConfig, ModelConfig, SettingError
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.manager import Checkpoints, ValidCheckpoint
from raystride.pipelines.train.checkpoint.pieces import base_sha256
from raystride.pipelines.train.lora.init_from_run import init_weights
from raystride.pipelines.train.lora.peft import read_adapter

HEADER = "lora"
"""Key of a checkpoint's manifest with the facts about its adapters' base."""


@dataclass(frozen=True)
class AdaptedModelFactory:
    """Builds a frozen network with the base's weights, and adapters without values."""

    task: Task
    """Builds the plain network, and defines ids and labels."""
    config: Config
    tokenizer: Folder
    """The tokenizer of the run's data."""
    log: Callable[[str], None]

    def __call__(self) -> nn.Module:
        """Builds the network. Raises SettingError for targets that it lacks, or an unsuitable base."""
        model = self._attach_adapters(self.task.build_model())
        # Mapped weights may have any alignment, and the alignment can change bits of a product.
        share = not self.config.train.exact
        init_weights(model, self.config.model.init_from or "", self.task, self.tokenizer, self.log, share_frozen=share)
        if self.config.lora.base_precision == "bf16":
            cast_base(model, torch.bfloat16)
        return model

    def build_over(self, other: nn.Module) -> nn.Module:
        """Builds it over another network's base, which the two share. Raises SettingError for targets that it lacks."""
        return self._attach_adapters(share_base(other))

    def _attach_adapters(self, model: nn.Module) -> nn.Module:
        try:
            attach_adapters(model, self.config.lora, hf_names(model))
        except ValueError as error:
            raise SettingError.from_error(error) from error
        return model


def network_factory(task: Task, config: Config, tokenizer: Folder, log: Callable[[str], None]) -> Callable[[], nn.Module]:
    """Returns the factory of a run's network: plain, or with adapters over a base; `tokenizer` is that of the data."""
    return AdaptedModelFactory(task, config, tokenizer, log) if config.lora.rank else task.build_model


def init_adapters(
    model: nn.Module, lora: LoraConfig, seed: int, found: ValidCheckpoint | None, checkpoints: Checkpoints
) -> None:
    """Gives adapters their first values.

    `found`: the checkpoint to resume from; its values are loaded later, except those that the base needs now. Raises
    SettingError if `lora.init_from` names no adapter of this kind.
    """
    start_adapters(model, lora, seed)
    if found and lora.init in ("pissa", "olora"):
        checkpoints.load_newest(found, model)
    elif lora.init_from and not found:
        read_adapter(model, lora, Folder(lora.init_from))


def finalize_base(model: nn.Module) -> str:
    """Returns the hash of the base in its storage dtype; then subtracts the adapters' initial delta from it. Collective."""
    digest = base_sha256(model)
    subtract_initial_delta(model)
    return digest


def check_base(found: ValidCheckpoint | None, digest: str, model: ModelConfig) -> None:
    """Raises SettingError if a resumed run's base differs from the one that its adapters were trained on."""
    before: Any = (found.manifest.get(HEADER) or {}).get("base") if found else None
    if before and before != digest:
        raise SettingError(
            f"model.init_from is {model.init_from!r}: its weights are not those that this run's adapters were "
            f"trained on (base {before[:12]} before, {digest[:12]} now). Put the earlier weights there, or start another "
            "run, --run NAME",
            setting="model.init_from",
            value=model.init_from,
        )


def open_base(config: Config, task: Task, found: ValidCheckpoint) -> nn.Module:
    """Builds a network with the base of a finished run's adapters; their trained values are not yet loaded.

    Raises SettingError if the base is missing, or not the one that they were trained on.
    """
    model = AdaptedModelFactory(task, config, found.data / "tokenizer", lambda _: None)()
    checkpoints = Checkpoints(found.folder, attempt="", keep=1)
    init_adapters(model, config.lora, config.seed, found, checkpoints)
    check_base(found, finalize_base(model), config.model)
    return model
