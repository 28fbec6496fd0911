"""A trained model, opened from its run's folder: settings, task, tokenizers and parameters.

opened = open_run(storage, "my-run", checkpoint="best")
"".join(write_text(opened.decoder, opened.task, Sample(prompt="def ")))

chosen = choose(storage, "my-run")                        # without the parameters, which `chosen.open()` loads anywhere
"""

import hashlib
import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.config.section import SettingError
from raystride.pipelines.files import Folder
from raystride.pipelines.plugins import load_plugins
from raystride.pipelines.tasks import Task, build_task
from raystride.pipelines.tasks.task import Encoder
from raystride.pipelines.tokenizers import Tokenizers

if TYPE_CHECKING:
    from torch import nn

    from raystride.model.transformer import Decoder
    from raystride.pipelines.train.checkpoint import Checkpoints, Found


@dataclass(frozen=True)
class Opened:
    """A model that is ready to use."""

    config: Config
    task: Task
    """With what it learned of the data, and its tokenizers."""
    model: "nn.Module"
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
        from raystride.model.transformer import Decoder

        if not isinstance(self.model, Decoder):
            raise SettingError(
                f"task is {self.config.task!r}: it must be one that trains a decoder; `raystride predict` is for this one",
                setting="task",
                value=self.config.task,
            )
        return self.model


@dataclass(frozen=True)
class Chosen:
    """Some checkpoints of a run. Small: it travels to workers, who all open the same one, even while the run goes on."""

    config: Config
    checkpoints: "tuple[Found, ...]"
    """The newest first; the model is their mean."""

    @property
    def step(self) -> int:
        """The step of the newest of the checkpoints."""
        return self.checkpoints[0].step

    @property
    def place(self) -> Folder:
        """Where the tokenizers' folders lie."""
        newest = self.checkpoints[0]
        return newest.data

    @property
    def task(self) -> Task:
        """The run's task, with what it learned of the data, and its tokenizers."""
        return task_at(self.config, self.place)

    @property
    def identity(self) -> str:
        """The same 16 hexadecimal digits for the same parameters."""
        files = json.dumps([found.manifest["files"] for found in self.checkpoints], sort_keys=True)
        return hashlib.sha256(files.encode()).hexdigest()[:16]

    def with_beams(self, beams: int) -> "Chosen":
        """The same choice with a translator that follows so many translations; 0: as the run's settings say."""
        decoding = replace(self.config.decoding, beams=beams or self.config.decoding.beams)
        return replace(self, config=replace(self.config, decoding=decoding))

    def open(self) -> Opened:
        """Loads the parameters, or the mean of the checkpoints'; the model is in evaluation mode, on the CPU."""
        task = self.task
        return Opened(self.config, task, _build(self, task), self.step, self.place)


def open_run(storage: Folder, run: str, checkpoint: str | int = "best", average: int = 1) -> Opened:
    """Opens a run at its `best` or `last` checkpoint, or at the mean of its newest ones (Vaswani et al., 2017, 6.1).

    Raises SettingError where there is no such run, or not that many checkpoints.
    """
    return choose(storage, run, checkpoint, average).open()


def choose(storage: Folder, run: str, checkpoint: str | int = "best", average: int = 1) -> Chosen:
    """What `open_run` opens. Raises SettingError as it does, and where a plug-in is missing."""
    folder = storage / run
    if not folder.exists("config.yaml"):
        others = [name for name in storage.names() if (storage / name).exists("config.yaml")]
        raise SettingError(
            f"--run {run}: there is no such run in {storage} (there is: {', '.join(others) or 'none'})",
            setting="run",
            value=run,
        )
    config = from_yaml(Config, folder.read("config.yaml").decode())
    load_plugins(config.plugins)  # one that is missing is said before a cluster is started
    from raystride.pipelines.train.checkpoint import Checkpoints  # and what else is missing before PyTorch is

    checkpoints = Checkpoints(folder / "checkpoints", attempt="", keep=1)
    chosen = _chosen(checkpoints, checkpoint, average)
    if isinstance(checkpoint, int) and not chosen:
        raise SettingError(f"--run {run}: it has no whole checkpoint of step {checkpoint}", setting="run", value=run)
    if len(chosen) < average:
        raise SettingError(
            f"--run {run}: it has {len(chosen)} whole checkpoint(s), and {average} are asked for; train it with a "
            f"checkpoint.every above 0 and checkpoint.keep of at least {average}",
            setting="run",
            value=run,
        )
    return Chosen(config, tuple(chosen))


def task_at(config: Config, place: Folder) -> Task:
    """The task whose facts and tokenizers lie in a folder. Raises SettingError where its plug-in is missing."""
    if place.exists("facts.json"):
        facts = place.read_json("facts.json")
        return build_task(config, facts, Tokenizers(place, facts["tokenizers"]))
    encoders = Tokenizers(place, ["tokenizer"])  # as it was before there were other tasks than language modelling
    encoder = encoders["tokenizer"]
    return build_task(config, {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}, encoders)


def _chosen(checkpoints: "Checkpoints", checkpoint: str | int, average: int) -> "list[Found]":
    if isinstance(checkpoint, int):
        return [found for found in checkpoints.whole() if found.step == checkpoint]
    best = checkpoints.at_hint("best") if checkpoint == "best" and average == 1 else None
    return [best] if best else list(islice(checkpoints.whole(), average))


def _build(chosen: Chosen, task: Task) -> "nn.Module":
    import torch

    from raystride.pipelines.strategies.spread import own_parameters
    from raystride.pipelines.train.adapters import open_base
    from raystride.pipelines.train.checkpoint import Checkpoints
    from raystride.pipelines.train.products import use_products_of

    _use_kernels(chosen.config)
    model = open_base(chosen.config, task, chosen.checkpoints[0]) if chosen.config.lora.rank else task.build_model()
    own = [parameter for _, parameter in own_parameters(model)]
    mean = [torch.zeros_like(parameter) for parameter in own] if len(chosen.checkpoints) > 1 else []
    for found in chosen.checkpoints:
        Checkpoints(found.folder, attempt="", keep=1).load(found, model)
        for total, parameter in zip(mean, own, strict=False):
            total.add_(parameter.detach(), alpha=1 / len(chosen.checkpoints))
    for parameter, value in zip(own, mean, strict=False):
        parameter.data.copy_(value)
    use_products_of(model, chosen.checkpoints[0])
    return model.eval()


def load_weights(config: Config, task: Task, file: Path) -> "nn.Module":
    """The model with the parameters of a safetensors file."""
    from safetensors.torch import load_model

    _use_kernels(config)
    model = task.build_model()
    load_model(model, file)
    return model.eval()


def _use_kernels(config: Config) -> None:
    from raystride.triton_kernels.dispatch import use_kernels, why_no_triton

    if not why_no_triton():
        # A run of another machine may have asked for kernels that this one cannot run; what it trained runs anywhere.
        use_kernels(config.model.kernels)
