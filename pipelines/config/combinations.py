"""Which task, strategy, precision and the rest go together, and for what does not, why, and the nearest that does.

refuse_combinations(config.train, config.scaling, config.guard, config.checkpoint)   # raises SettingError
refuse_with_task(config.task, config.model, config.objective, config.train)          # likewise

What depends on the device, which settings alone do not know, is refused by `cluster.resources.resolve`.
"""

from raystride.pipelines.config.model import Model
from raystride.pipelines.config.run import Scaling
from raystride.pipelines.config.train import Checkpoint, Guard, Objective, Train

SHARDED = ("fsdp", "deepspeed")
"""Strategies whose micro-batches communicate, so that all workers must run equally many."""

DECODERS = ("language_model", "completion")
"""Tasks that train a decoder."""
OTHERS = ("classification", "translation", "images")
"""Our tasks that do not; of a task of one's own nothing is known here."""


def refuse_combinations(train: Train, scaling: Scaling, guard: Guard, checkpoint: Checkpoint) -> None:
    """Raises SettingError for settings that are right one by one and cannot work together."""
    workers = scaling.workers if isinstance(scaling.workers, int) else 0
    if scaling.strategy == "single" and workers > 1:
        raise scaling.error("strategy", f"must be `ddp`, `fsdp` or `deepspeed` for scaling.workers {workers}")
    if scaling.strategy != "fsdp" and scaling.shard_workers:
        raise scaling.error("shard_workers", f"must be 0 but with scaling.strategy `fsdp`, not `{scaling.strategy}`")
    if scaling.shard_workers and scaling.least_workers:
        raise scaling.error("shard_workers", "must be 0 with scaling.least_workers, whose number of workers changes")
    if workers and scaling.shard_workers and workers % scaling.shard_workers:
        raise scaling.error("shard_workers", f"must divide scaling.workers, {workers}")
    if scaling.offload and scaling.strategy not in SHARDED:
        raise scaling.error(
            "offload", f"must be false with scaling.strategy `{scaling.strategy}`: use `fsdp` or `deepspeed`"
        )
    if train.exact:
        _refuse_with_exact(train, scaling)
    if train.stochastic_rounding and scaling.strategy in SHARDED:
        raise train.error("stochastic_rounding", "must be false here: both sharded strategies keep a master copy, in shards")
    if guard.policy == "rewind" and not checkpoint.every:
        raise guard.error("policy", "must be `stop` or `skip` with checkpoint.every 0: there is nothing to go back to")
    if scaling.strategy == "deepspeed":
        _refuse_with_deepspeed(train)


def refuse_with_task(task: str, model: Model, objective: Objective, train: Train) -> None:
    """Raises SettingError for settings that one of our tasks would not use."""
    if task not in (*DECODERS, *OTHERS):
        return
    if objective.loss == "mse" and task != "images":
        raise objective.error("loss", f"must be `cross_entropy` but with task `images`, not `{task}`")
    if objective.class_weights == "balanced" and task != "classification":
        raise objective.error("class_weights", f"must be `none` but with task `classification`, not `{task}`")
    if objective.label_smoothing and task in DECODERS:
        raise objective.error("label_smoothing", f"must be 0 with task `{task}`, whose network does not smooth")
    if model.pooling == "windows" and task != "classification":
        raise model.error("pooling", f"must be another but with task `classification`, not `{task}`")
    if model.init_from and task not in DECODERS:
        raise model.error("init_from", f"must be None with task `{task}`: the models that can be read are decoders")
    if train.slot_tokens and task == "images":  # windows are refused by the task itself
        raise train.error("slot_tokens", f"must be 0 with task `{task}`, whose samples are equally long")


def _refuse_with_exact(train: Train, scaling: Scaling) -> None:
    if scaling.strategy in SHARDED:
        raise scaling.error(
            "strategy", "adds gradients up in an order that follows the number of workers; with train.exact use `ddp`"
        )
    if train.compile != "none":
        raise train.error(
            "compile", "must be `none` with train.exact: what the compiler makes is not shown to keep the bits"
        )


def _refuse_with_deepspeed(train: Train) -> None:
    if train.precision == "fp16":
        raise train.error("precision", "must be another with scaling.strategy `deepspeed`: use `bf16`, or strategy `fsdp`")
    if train.compile != "none":
        raise train.error("compile", "must be `none` with scaling.strategy `deepspeed`; `fsdp` can compile")
