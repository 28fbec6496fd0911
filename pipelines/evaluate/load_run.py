"""Loads a trained model from its run's folder: settings, task, tokenizers and parameters.

opened = open_run(storage, "my-run", checkpoint="best")
"".join(write_text(opened.decoder, opened.task, SampleConfig(prompt="def ")))

chosen = select_run(storage, "my-run")                    # without the parameters, which `chosen.open()` loads on any node
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config, FinishedRunConfig, ModelConfig
from raystride.pipelines.config.attempts import ATTEMPTS
from raystride.pipelines.config.stored_run import missing_run, read_settings
from raystride.pipelines.data.plugins import FIT, RUN_TASKS, TASKS, load_plugins
from raystride.pipelines.data.stored_code import SCRIPT, admit_stored_code
from raystride.pipelines.data.tasks import Task, build_task
from raystride.pipelines.data.tasks.contract import refuse_missing
from raystride.pipelines.data.tasks.encoder import Encoder
from raystride.pipelines.data.tokenizers import Tokenizers
from raystride.pipelines.observability.report.run_figures import step_text
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.layout import newest_committed_step

if TYPE_CHECKING:
    from torch import nn

    from raystride.model.generate import CausalNetwork
    from raystride.model.transformer import Decoder
    from raystride.pipelines.train.checkpoint.manager import ValidCheckpoint


@dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters, ready to use."""

    config: Config
    task: Task
    """With its facts about the data, and its tokenizers."""
    model: "nn.Module"
    step: int
    place: Folder
    """The parent of the tokenizers' folders."""
    last_step: int = 0
    """That of the run's newest checkpoint; 0 if it is not known."""

    @property
    def step_text(self) -> str:
        """The step in words, `step 20 of 60` if it is not the last."""
        return step_text(self.step, self.last_step)

    @property
    def encoder(self) -> Encoder:
        """The tokenizer of the input."""
        return self.task.encoders["tokenizer"]

    @property
    def decoder(self) -> "Decoder":
        """The model as a decoder of ours. Raises SettingError if it is another network."""
        from raystride.model.transformer import Decoder

        writer = self.writer
        if not isinstance(writer, Decoder):
            raise SettingError(
                f"the network of this run is a {type(writer).__name__}, for which Hugging Face has no layout; "
                "`raystride export --to state_dict` writes its parameters",
                setting="task",
                value=self.config.task,
            )
        return writer

    @property
    def writer(self) -> "Decoder | CausalNetwork":
        """The model as one that continues text. Raises SettingError if it does not."""
        if not self.task.continues_text:
            raise SettingError(
                f"task is {self.config.task!r}: it must be one that trains a decoder; `raystride predict` is for this one",
                setting="task",
                value=self.config.task,
            )
        refuse_missing(self.task, self.model, "generate")
        return self.model  # type: ignore[return-value]


@dataclass(frozen=True)
class SelectedRun:
    """Some checkpoints of a run. Small: it is sent to workers, so that all open the same ones, while the run goes on."""

    config: Config
    checkpoints: "tuple[ValidCheckpoint, ...]"
    """The newest first; the model is their mean."""
    script_task: Any = None
    """The task's class if the running script has registered it, which processes elsewhere lack."""
    last_step: int = 0
    """The step of the run's newest checkpoint."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what only a training needs: it is sent to workers."""
        return vars(self) | {"script_task": self.script_task.for_inference() if self.script_task else None}

    @property
    def step(self) -> int:
        """The step of the newest of the checkpoints."""
        return self.checkpoints[0].step

    @property
    def step_text(self) -> str:
        """The step in words, `step 20 of 60` if it is not the last."""
        return step_text(self.step, self.last_step)

    @property
    def place(self) -> Folder:
        """The parent of the tokenizers' folders."""
        newest = self.checkpoints[0]
        return newest.data

    @property
    def task(self) -> Task:
        """The run's task, with its facts about the data, and its tokenizers."""
        return load_task(self.config, self.place, self.script_task)

    @property
    def identity(self) -> str:
        """A hash of the parameters, 16 hexadecimal digits."""
        files = json.dumps([found.manifest["files"] for found in self.checkpoints], sort_keys=True)
        return hashlib.sha256(files.encode()).hexdigest()[:16]

    def with_beams(self, beams: int) -> "SelectedRun":
        """Returns the same selection with `beams` beams of a translator; 0: as in the run's settings."""
        decoding = replace(self.config.decoding, beams=beams or self.config.decoding.beams)
        return replace(self, config=replace(self.config, decoding=decoding))

    def open(self) -> LoadedModel:
        """Loads the parameters, or the mean of the checkpoints'; the model is in evaluation mode, on the CPU."""
        task = self.task
        return LoadedModel(self.config, task, _load_model(self, task), self.step, self.place, self.last_step)


def open_cached(chosen: SelectedRun) -> LoadedModel:
    """Opens a selection as `SelectedRun.open` does, and keeps its model in memory for the next call in this process.

    One model is kept: that of the last call. Its parameters must not be changed.
    """
    global _cached
    key = (chosen.identity, chosen.place.uri, repr(chosen.config.model), repr(chosen.config.lora))
    with _cache_lock:
        task = chosen.task
        if _cached is None or _cached[0] != key:
            _cached = None  # before the next one is loaded, so that there are never two
            _cached = (key, _load_model(chosen, task))
        return LoadedModel(chosen.config, task, _cached[1], chosen.step, chosen.place, chosen.last_step)


_cached: "tuple[tuple[str, ...], nn.Module] | None" = None
_cache_lock = Lock()


def open_run(
    storage: Folder, run: str, checkpoint: str | int = "best", average: int = 1, plugins: Sequence[str] = ()
) -> LoadedModel:
    """Opens a run at its `best` or `last` checkpoint, or at the mean of its newest ones (Vaswani et al., 2017, 6.1).

    Raises SettingError if there is no such run, or not that many checkpoints.
    """
    return select_run(storage, run, checkpoint, average, plugins).open()


def select_run(
    storage: Folder, run: str, checkpoint: str | int = "best", average: int = 1, plugins: Sequence[str] = ()
) -> SelectedRun:
    """Selects the checkpoints that `open_run` opens.

    `plugins` are the caller's, in place of those that the run names. Raises SettingError as `open_run` does, and if code of
    the run is missing or must not be loaded (`stored_code`).
    """
    config = _load_config(storage, run)
    config = replace(config, plugins=tuple(plugins)) if plugins else config
    load_plugins(config.plugins)  # a missing one is reported before a cluster is started
    config = admit_stored_code(config)
    chosen = _select_checkpoints(storage, run, checkpoint, average)
    last_step = newest_committed_step(storage / run / "checkpoints") or 0
    return SelectedRun(config, chosen, _find_script_task(config.task, config.plugins, storage / run), last_step)


def select_named_run(settings: FinishedRunConfig) -> SelectedRun:
    """Selects the run, checkpoints and plug-ins that a job's settings name. Raises SettingError as `select_run` does."""
    storage = Folder.from_uri(settings.storage)
    return select_run(storage, settings.run, settings.checkpoint, settings.average, settings.plugins)


def _load_config(storage: Folder, run: str) -> Config:
    folder = storage / run
    if not folder.exists("config.yaml") and not (folder / ATTEMPTS).names():
        existing_runs = [name for name in storage.names() if (storage / name).exists("config.yaml")]
        raise missing_run(storage, run, existing_runs)
    return read_settings(folder)


def _find_script_task(task: str, plugins: tuple[str, ...], folder: Folder) -> Any:
    """Returns the class of a run's task if this script has registered it. Raises SettingError for a run of another `fit`."""
    if task != FIT:
        return TASKS.get(task) if SCRIPT in plugins else None
    if folder.uri not in RUN_TASKS:
        raise SettingError(
            f"run {folder.name} was trained by raystride.fit, and this process does not know its model: call fit with the "
            "same arguments again, which returns a complete run, or load_model(into=MODULE)",
            setting="run",
            value=folder.name,
        )
    return RUN_TASKS[folder.uri]


def load_into(module: "nn.Module", storage: Folder, run: str, checkpoint: str | int = "best") -> "nn.Module":
    """Fills a module with a run's parameters, and buffers if they are saved; returns it in evaluation mode.

    Needs none of the run's code. Raises SettingError if there is no such run or checkpoint, or the module has others.
    """
    from torch import nn

    from raystride.pipelines.train.checkpoint.manager import Checkpoints
    from raystride.pipelines.train.strategies.parameter_layout import saved_buffers, saved_parameters

    _load_config(storage, run)
    (found,) = _select_checkpoints(storage, run, checkpoint, 1)
    tensors = found.manifest["tensors"]
    stored = {name.removeprefix("model."): entry["size"] for name, entry in tensors.items() if name.startswith("model.")}
    holder: Any = nn.Module()
    holder.module, holder.saves_buffers = module, True
    if not all(name.startswith("module.") for name in stored):  # a network of a task
        holder = module
    own = {name: list(value.shape) for name, value in (*saved_parameters(holder), *saved_buffers(holder))}
    if differing := sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name)):
        given, wanted = (sizes.get(differing[0], "missing") for sizes in (own, stored))
        name = differing[0].removeprefix("module.")
        raise SettingError(
            f"into is not the network of run {run}: {name} is {given}, and {wanted} there ({len(differing)} differ)",
            setting="into",
            value=given,
            allowed=wanted,
        )
    Checkpoints(found.folder, attempt="", keep=1).load(found, holder)
    return module.eval()


def load_task(config: Config, place: Folder, task_class: Any = None) -> Task:
    """Loads the task with its facts and tokenizers from a folder; `task_class`: if the plug-ins do not register it.

    Raises SettingError if its plug-in is missing.
    """
    build = task_class or build_task
    if place.exists("facts.json"):
        facts = place.read_json("facts.json")
        return build(config, facts, Tokenizers(place, facts["tokenizers"]))  # type: ignore[no-any-return]
    encoders = Tokenizers(place, ["tokenizer"])  # format of versions with language modelling only
    encoder = encoders["tokenizer"]
    return build(config, {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}, encoders)  # type: ignore[no-any-return]


def _select_checkpoints(storage: Folder, run: str, checkpoint: str | int, average: int) -> "tuple[ValidCheckpoint, ...]":
    """Returns as many whole checkpoints of a run, the newest first.

    Raises SettingError if there are fewer, or the named one is not whole, and Unreadable.
    """
    from raystride.pipelines.train.checkpoint.manager import Checkpoints  # after other errors, as it takes PyTorch's import

    checkpoints = Checkpoints(storage / run / "checkpoints", attempt="", keep=1)
    if isinstance(checkpoint, int):
        chosen = [checkpoints.find_step(checkpoint)]
    elif average > 1:
        chosen = list(islice(checkpoints.find_whole(), average))
    else:
        best = checkpoints.find_best() if checkpoint == "best" else None
        found = best or checkpoints.find_newest()
        chosen = [found] if found else []
    if len(chosen) < average:
        raise SettingError(
            f"--run {run}: it has {len(chosen)} whole checkpoint(s), and {average} are asked for; train it with a "
            f"checkpoint.every above 0 and checkpoint.keep of at least {average}",
            setting="run",
            value=run,
        )
    return tuple(chosen)


def _load_model(chosen: SelectedRun, task: Task) -> "nn.Module":
    import torch

    from raystride.pipelines.train.checkpoint.manager import Checkpoints
    from raystride.pipelines.train.lora.base import open_base
    from raystride.pipelines.train.strategies.parameter_layout import saved_parameters
    from raystride.pipelines.train.worker.matmul_backend import use_saved_backends

    _use_kernels(chosen.config.model)
    model = open_base(chosen.config, task, chosen.checkpoints[0]) if chosen.config.lora.rank else task.build_model()
    own_values = [parameter for _, parameter in saved_parameters(model)]
    mean = [torch.zeros_like(parameter) for parameter in own_values] if len(chosen.checkpoints) > 1 else []
    for found in chosen.checkpoints:
        Checkpoints(found.folder, attempt="", keep=1).load(found, model)
        for total, parameter in zip(mean, own_values, strict=False):
            total.add_(parameter.detach(), alpha=1 / len(chosen.checkpoints))
    for parameter, value in zip(own_values, mean, strict=False):
        parameter.data.copy_(value)
    use_saved_backends(model, chosen.checkpoints[0])
    return model.eval()


def load_weights(settings: ModelConfig, task: Task, file: Path) -> "nn.Module":
    """Returns the model with the parameters of a safetensors file."""
    from safetensors.torch import load_model

    _use_kernels(settings)
    model = task.build_model()
    load_model(model, file)
    return model.eval()


def _use_kernels(model: ModelConfig) -> None:
    """Takes kernels as the settings say; with `auto` those that are proved on this machine's GPU."""
    import torch

    from raystride.pipelines.train.worker.kernel_proof import proved_here
    from raystride.triton_kernels.dispatch import triton_unavailable_reason, use_kernels

    if not triton_unavailable_reason():
        # A run of another machine may have set kernels that this one cannot run; its model runs anywhere.
        is_auto = model.kernels == "auto" and torch.cuda.is_available()
        use_kernels(model.kernels, proved_here(torch.device("cuda")) if is_auto else frozenset())
