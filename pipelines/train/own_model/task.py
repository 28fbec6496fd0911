"""The task of a user's own model: `raystride.fit`, `raystride.register_model`.

    task_class = own_model_task(OwnModel(model=make_model, data=dataset, loss=loss), module="__main__")
    task = task_class(config)
    task.describe_dataset()                                   # samples, structure, parameters; refuses what cannot work
    network = task.build_model()                              # network(batch, targets) -> (loss sum, counted)

The samples are those of `own_model.samples`; nothing of them is written.
"""

import random
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.task import Facts, Inputs, Task, mean
from raystride.pipelines.observability.observers.observer import Observer
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.shared import is_in_memory, share_data

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raystride.pipelines.train.own_model.network import OwnNetwork
    from raystride.pipelines.train.own_model.optimizer import TorchOptimizer
    from raystride.pipelines.train.own_model.samples import IndexedSamples
    from raystride.pipelines.train.own_model.set_metrics import OwnSetMetrics


class OwnModelTask(Task):
    """Base class of the tasks that `own_model_task` makes."""

    own_model: ClassVar[OwnModel]
    tokenizers = ()
    reads_dataset = True
    unit = "samples"

    def __init__(self, config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> None:
        super().__init__(config, facts, encoders)
        for name in ("tensor", "pipeline", "context"):
            if getattr(config.scaling, name) > 1:
                rule = "must be 1 for a model of your own, which is not cut: use scaling.strategy `ddp` or `fsdp`"
                raise config.scaling.error(name, rule)
        if config.data.sources:
            raise config.data.error("sources", "must be empty for a model of your own: give one dataset")
        if config.train.slot_tokens:
            raise config.train.error("slot_tokens", "must be 0 for a model of your own: set train.batch")
        if config.lora.rank:
            raise config.lora.error("rank", "must be 0 for a model of your own: freeze and adapt it in `model`")
        if self.own_model.optimizer and config.scaling.kind.runs_engine:
            raise config.scaling.error("strategy", "must be another with an `optimizer` of your own: use `ddp` or `fsdp`")
        if self.own_model.optimizer and config.train.precision == "pure_bf16":
            raise config.train.error("precision", "must be another with an `optimizer` of your own: use `bf16`")

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """`val_loss`, and what the loss and `metrics` measure, with `val_`."""
        of_set = [name for names in self.describe_dataset().get("of_set", {}).values() for name in names]
        return ("val_loss", *(f"val_{name}" for name in (*self._measured_names, *of_set)))

    @property
    def targets_per_sample(self) -> float:
        """1: what a loss counts is not known before it is called."""
        return 1.0

    @property
    def summed(self) -> int:
        """A sum and a count for each further figure."""
        return 2 * len(self._measured_names)

    def open_set_metrics(self) -> "OwnSetMetrics | None":
        """Returns what collects the metrics of the whole set; None if there is none."""
        from raystride.pipelines.train.own_model.set_metrics import OwnSetMetrics

        of_set = self.describe_dataset().get("of_set", {})
        return OwnSetMetrics(of_set, self.config.validation.gather_mib) if of_set else None

    @property
    def _measured_names(self) -> list[str]:
        found = self.describe_dataset()
        return [*found["logged"], *(name for name in found["measured"] if name not in found["logged"])]

    def describe_dataset(self) -> dict[str, Any]:
        """Returns what identifies model and data, as JSON, after some steps of two and four samples on the CPU.

        Keys: `train`, `validation` (samples), `sample` (structure), `parameters` (shapes by name), `logged` (names of
        further losses), `measured` (names of `metrics`), `of_set` (names of their figures of the whole set by those of
        `metrics`, only if there are any), `moving` (whether each that forwards change is trained), `code`, `content` (hashes
        of samples of `data` and `validation`), `step_bytes` (fixed part and part by sample of what a
        step in fp32 holds besides parameters and gradients, at each moment that can be the worst), `optimizer_moments`
        (numbers that an optimiser of the user's keeps for a parameter), `numbers` (names of figures that are numbers),
        `gathered_bytes` (those that a sample gives to metrics of the whole set).

        It is computed once a process. Raises DataError, SettingError.
        """
        if "dataset" in self.facts:
            return dict(self.facts["dataset"])
        config = self.config
        key = f"description {config.fit} {config.data.validation_fraction} {config.seed} {config.train.exact}"
        if key not in self.own_model.opened:
            from raystride.pipelines.train.own_model.describe import describe_own_model

            self.own_model.opened[key] = describe_own_model(self.own_model, config)
        else:  # by other settings of `scaling`, perhaps
            from raystride.pipelines.train.own_model.describe import check_strategy

            check_strategy(self.own_model.opened[key]["parameters"], self.own_model.opened[key]["moving"], config)
        from raystride.pipelines.train.own_model.set_metrics import check_metrics

        check_metrics(self.own_model.opened[key], config.validation)
        return dict(self.own_model.opened[key])

    def shaped_by(self) -> dict[str, Any]:
        """Returns lengths and structure of the data, and the network's parameters: a resumed run must have the same."""
        described = self.describe_dataset()
        unshaped = (
            "code",
            "content",
            "step_bytes",
            "activation_bytes",
            "optimizer_moments",
            "moving",
            "numbers",
            "gathered_bytes",
        )
        return {key: value for key, value in described.items() if key not in unshaped}

    def open_samples(self, split: str) -> "IndexedSamples":
        """Returns the samples of `train` or `validation`. Raises DataError for data that is too short."""
        from raystride.pipelines.train.own_model.describe import split_indices
        from raystride.pipelines.train.own_model.samples import IndexedSamples

        own, indices = self.own_model, None
        dataset = own.open_split(split, self.config.fit)
        if own.validation is None:
            dataset = own.open_split("train", self.config.fit)
            assert dataset is not None
            indices = split_indices(len(dataset), self.config.data.validation_fraction, self.config.seed)[split]
        assert dataset is not None
        return IndexedSamples(self, dataset, indices=indices, collate=own.collate, processes=self.config.data.read_processes)

    def build_model(self) -> "OwnNetwork":
        """Returns the network with its loss, initialised under the current seed."""
        from raystride.pipelines.train.own_model.network import OwnNetwork

        random.seed(self.config.seed)
        np.random.seed(self.config.seed % 2**32)
        return OwnNetwork(
            self.own_model.make_network(self.config.fit), self.own_model, self.facts, self.config.train.precision
        )

    def build_optimizer(self, model: "nn.Module") -> "TorchOptimizer | None":
        """Returns the user's optimiser. Raises SettingError if their callable returns none."""
        from raystride.pipelines.train.own_model.optimizer import build_own_optimizer

        return build_own_optimizer(self.own_model, self.config.optimizer, model) if self.own_model.optimizer else None

    def build_observers(self) -> list[Observer]:
        """Returns the observers that the user gave, or that their callables make."""
        return [each if isinstance(each, Observer) else each() for each in self.own_model.observers]

    def learning_rate_factor(self, step: int, total_steps: int) -> float | None:
        """Returns the value of the user's schedule."""
        return float(self.own_model.schedule(step, total_steps)) if self.own_model.schedule else None

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Returns loss sum and count of a validation batch, and the sums and counts of further figures."""
        loss_sum, counted, figures = model(*inputs, targets, measures=True)
        return loss_sum, counted, figures

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns `val_loss` and the further figures."""
        names = self._measured_names
        figures = {f"val_{name}": mean(float(counts[2 * i]), float(counts[2 * i + 1])) for i, name in enumerate(names)}
        return super().score(loss_sum, targets, counts) | figures

    def take_sums(self, model: "nn.Module") -> "torch.Tensor | None":
        """Returns sums and counts of the further losses since the last call."""
        return model.take_logged() if self.describe_dataset()["logged"] else None  # type: ignore[operator, no-any-return]

    def train_scores(self, sums: list[float]) -> dict[str, float]:  # type: ignore[override]
        """Returns the further losses as `train_NAME`."""
        return {
            f"train_{name}": mean(sums[2 * i], sums[2 * i + 1]) for i, name in enumerate(self.describe_dataset()["logged"])
        }

    @classmethod
    def parts_to_send(cls) -> Mapping[str, Any]:
        """Returns what the user gave; of lists a sample, and nothing of arrays."""
        parts = {item.name: getattr(cls.own_model, item.name) for item in fields(cls.own_model) if item.name != "opened"}
        return {name: part[:1] if isinstance(part, list) else part for name, part in parts.items() if not is_in_memory(part)}

    @classmethod
    def for_workers(cls) -> "type[OwnModelTask]":
        """Returns the class with data that lies in memory in Ray's object store, where it is put once."""
        import ray

        own, key = cls.own_model, f"shared by {ray.get_runtime_context().get_job_id()}"
        if key not in own.opened:
            own.opened[key] = share_data(own.data), share_data(own.validation)
        data, validation = own.opened[key]
        return own_model_task(replace(own, data=data, validation=validation, opened={}), cls.__module__)

    @classmethod
    def for_inference(cls) -> "type[OwnModelTask]":
        """Returns the class without the data."""
        return own_model_task(replace(cls.own_model, data=(), validation=None, opened={}), cls.__module__)


def own_model_task(own_model: OwnModel, module: str) -> type[OwnModelTask]:
    """Returns a task's class for a model, as if it was defined in `module`."""
    return type("RegisteredModel", (OwnModelTask,), {"own_model": own_model, "__module__": module})
