"""A trained model, opened from its run's folder: settings, task, tokenizers and parameters.

opened = open_run(storage, "my-run", checkpoint="best")
"".join(write_text(opened.decoder, opened.encoder, Sample(prompt="def ")))
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipelines.config import Config
from pipelines.config.parse import from_yaml
from pipelines.config.section import SettingError
from pipelines.files import Folder
from pipelines.tasks import Task, build_task
from pipelines.tasks.task import Encoder
from pipelines.tokenizers import Tokenizers
from pipelines.train.checkpoint import Checkpoints, Found
from triton_kernels.dispatch import use_kernels, why_no_triton

if TYPE_CHECKING:
    from model.transformer import Decoder


@dataclass(frozen=True)
class Opened:
    """A model that is ready to use."""

    config: Config
    task: Task
    """With what it learned of the data, and its tokenizers."""
    model: nn.Module
    step: int
    place: Folder
    """Where the tokenizers' folders lie."""

    @property
    def encoder(self) -> Encoder:
        """The tokenizer of what goes in."""
        return self.task.encoders["tokenizer"]

    @property
    def decoder(self) -> "Decoder":
        """The model as one that writes text. Raises SettingError where it is none."""
        from model.transformer import Decoder

        if not isinstance(self.model, Decoder):
            raise SettingError(
                f"task is {self.config.task!r}: it must be one that trains a decoder; use `predict.py --run` for this one"
            )
        return self.model


def open_run(storage: Folder, run: str, checkpoint: str = "best", average: int = 1) -> Opened:
    """Opens a run at its `best` or `last` checkpoint, or at the mean of its newest ones (Vaswani et al., 2017, 6.1).

    Raises SettingError where there is no such run, or not that many checkpoints.
    """
    folder = storage / run
    if not folder.exists("config.yaml"):
        others = [name for name in storage.names() if (storage / name).exists("config.yaml")]
        raise SettingError(f"--run {run}: there is no such run in {storage} (there is: {', '.join(others) or 'none'})")
    config = from_yaml(Config, folder.read("config.yaml").decode())
    checkpoints = Checkpoints(folder / "checkpoints", attempt="", keep=1)
    chosen = _chosen(checkpoints, checkpoint, average)
    if len(chosen) < average:
        raise SettingError(
            f"--run {run}: it has {len(chosen)} whole checkpoint(s), and {average} are asked for; train it with a "
            f"checkpoint.every above 0 and checkpoint.keep of at least {average}"
        )
    place = chosen[0].folder / chosen[0].manifest["attempt"]
    task = _task(config, place)
    return Opened(config, task, _build(config, task, checkpoints, chosen), chosen[0].step, place)


def _chosen(checkpoints: Checkpoints, checkpoint: str, average: int) -> list[Found]:
    best = checkpoints.at_hint("best") if checkpoint == "best" and average == 1 else None
    return [best] if best else [found for found, _ in zip(checkpoints.whole(), range(average), strict=False)]


def _task(config: Config, place: Folder) -> Task:
    if place.exists("facts.json"):
        facts = place.read_json("facts.json")
        return build_task(config, facts, Tokenizers(place, facts["tokenizers"]))
    encoders = Tokenizers(place, ["tokenizer"])  # as it was before there were other tasks than language modelling
    encoder = encoders["tokenizer"]
    return build_task(config, {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}, encoders)


def _build(config: Config, task: Task, checkpoints: Checkpoints, chosen: list[Found]) -> nn.Module:
    if not why_no_triton():
        # A run of another machine may have asked for kernels that this one cannot run; what it trained runs anywhere.
        use_kernels(config.model.kernels)
    model = task.build_model()
    mean = [torch.zeros_like(parameter) for parameter in model.parameters()] if len(chosen) > 1 else []
    for found in chosen:
        checkpoints.load(found, model)
        for total, parameter in zip(mean, model.parameters(), strict=False):
            total.add_(parameter.detach(), alpha=1 / len(chosen))
    for parameter, value in zip(model.parameters(), mean, strict=False):
        parameter.data.copy_(value)
    return model.eval()
