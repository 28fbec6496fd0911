"""Checks of settings that do not work together: each error says why, and names the nearest that works.

refuse_combinations(config.train, config.scaling, config.guard, config.checkpoint)   # raises SettingError
refuse_with_task(config.task, config.model, config.objective, config.train)          # likewise

Combinations that a device does not support are refused by `cluster.resources.resolve_allocation`.
"""

from raystride.model.objectives import PAIR_LOSSES
from raystride.model.shape import ENCODERS
from raystride.pipelines.config.data import DataConfig, TokenizerConfig
from raystride.pipelines.config.model import DECODERS_ONLY, ModelConfig
from raystride.pipelines.config.optimizers import OPTIMIZERS
from raystride.pipelines.config.run import ScalingConfig
from raystride.pipelines.config.schedules import SCHEDULES
from raystride.pipelines.config.section import names_with
from raystride.pipelines.config.strategies import STRATEGIES
from raystride.pipelines.config.train import (
    CheckpointConfig,
    GuardConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
    parse_branch,
)

DECODERS = ("language_model", "completion", "preference")
"""Tasks that train a decoder."""
DISTILLED = ("language_model", "completion")
"""Tasks with next-token targets, which a teacher can train."""
MESHLESS = ("images", "preference")
"""Our tasks with networks that are not cut over a mesh."""
MESHED_DECODERS = tuple(task for task in DECODERS if task not in MESHLESS)
"""Tasks that train a decoder that can be."""
OTHERS = ("classification", "translation", "images")
"""Our tasks that do not; of a task of one's own nothing is known here."""


def refuse_combinations(
    train: TrainConfig, scaling: ScalingConfig, guard: GuardConfig, checkpoint: CheckpointConfig, *, frozen: bool = False
) -> None:
    """Raises SettingError for settings that are valid one by one and cannot work together.

    `frozen`: sharded parameters have no gradient, as with adapters.
    """
    workers = scaling.workers if isinstance(scaling.workers, int) else 0
    if scaling.group > 1:
        _refuse_with_mesh(train, scaling, workers)
        workers //= scaling.group  # what follows is of groups of workers
    if not scaling.kind.has_several_workers and workers > 1:
        raise scaling.error(
            "strategy", f"must be {names_with(STRATEGIES, 'has_several_workers')} for scaling.workers {workers}"
        )
    if not scaling.kind.is_hybrid and scaling.shard_workers:
        hybrid = names_with(STRATEGIES, "is_hybrid")
        raise scaling.error("shard_workers", f"must be 0 but with scaling.strategy {hybrid}, not `{scaling.strategy}`")
    if scaling.shard_workers and scaling.min_workers:
        raise scaling.error("shard_workers", "must be 0 with scaling.min_workers, whose number of workers changes")
    if workers and scaling.shard_workers and workers % scaling.shard_workers:
        raise scaling.error("shard_workers", f"must divide scaling.workers, {workers}")
    if scaling.offload and not scaling.kind.is_sharded:
        sharded = names_with(STRATEGIES, "is_sharded")
        raise scaling.error("offload", f"must be false with scaling.strategy `{scaling.strategy}`: use {sharded}")
    if train.exact:
        _refuse_with_exact(train, scaling, frozen)
    if train.ema and scaling.kind.runs_engine:
        raise train.error("ema", f"must be 0 with scaling.strategy `{scaling.strategy}`, which keeps none: use `fsdp`")
    if train.ema and train.stochastic_rounding:
        raise train.error("ema", "must be 0 with train.stochastic_rounding, whose weights are rounded by chance")
    if train.log_norms and not scaling.keeps_parameters_whole:
        raise train.error("log_norms", "must be false with deepspeed or a mesh, whose workers have parts of parameters")
    if train.stochastic_rounding and scaling.kind.is_sharded:
        raise train.error("stochastic_rounding", "must be false here: both sharded strategies keep a master copy, in shards")
    if guard.policy == "rewind" and not checkpoint.every:
        raise guard.error("policy", "must be `stop` or `skip` with checkpoint.every 0: there is nothing to go back to")
    if scaling.kind.runs_engine:
        _refuse_with_engine(train, scaling.strategy)


def refuse_with_task(task: str, model: ModelConfig, objective: ObjectiveConfig, train: TrainConfig) -> None:
    """Raises SettingError for settings that one of our tasks would not use."""
    if task not in (*DECODERS, *OTHERS):
        return
    if objective.loss == "mse" and task != "images":
        raise objective.error("loss", f"must be `cross_entropy` but with task `images`, not `{task}`")
    if objective.class_weights == "balanced" and task != "classification":
        raise objective.error("class_weights", f"must be `none` but with task `classification`, not `{task}`")
    _refuse_with_preference(task, model, objective)
    if objective.label_smoothing and task in DECODERS and task != "preference":
        raise objective.error("label_smoothing", f"must be 0 with task `{task}`, whose network does not smooth")
    if model.pooling == "windows" and task != "classification":
        raise model.error("pooling", f"must be another but with task `classification`, not `{task}`")
    if task in OTHERS and model.norm == "sandwich":
        raise model.error("norm", f"must be another with task `{task}`: only decoders have `sandwich`")
    _refuse_with_encoder(task, model)
    for name in DECODERS_ONLY if task in OTHERS else ():
        if name == "window" and model.architecture == "modernbert":
            continue
        if getattr(model, name) != getattr(ModelConfig, name):
            raise model.error(name, f"must be {getattr(ModelConfig, name)} with task `{task}`: only decoders have it")
    if train.slot_tokens and task == "images":  # windows are refused by the task itself
        raise train.error("slot_tokens", f"must be 0 with task `{task}`, whose samples are equally long")


def _refuse_with_encoder(task: str, model: ModelConfig) -> None:
    """Raises SettingError for settings of encoders with another task than the classification of texts."""
    if task == "classification":
        return
    if model.architecture in ENCODERS:
        if model.init_from:
            raise model.error(
                "init_from", f"must be a decoder with task `{task}`: its network is an encoder, for task `classification`"
            )
        raise model.error(
            "architecture", f"must be another with task `{task}`: `{model.architecture}` is for task `classification`"
        )
    if model.head_dense != "none":
        raise model.error("head_dense", f"must be `none` but with task `classification`, not `{task}`")


def refuse_chats(task: str, data: DataConfig, tokenizer: TokenizerConfig) -> None:
    """Raises SettingError for chats that nothing would write."""
    if task not in (*DECODERS, *OTHERS):
        return
    if data.messages_column is None:
        if data.tools_column:
            raise data.error("tools_column", "needs data.messages_column, which names the chats that use the tools")
        return
    if task != "completion":
        raise data.error("messages_column", f"must be None but with task `completion`, not `{task}`")
    if tokenizer.kind != "file" or tokenizer.chat_template == "none":
        raise data.error(
            "messages_column", "needs a tokenizer with a chat template: tokenizer.kind `file`, and tokenizer.chat_template"
        )


def _refuse_with_preference(task: str, model: ModelConfig, objective: ObjectiveConfig) -> None:
    """Raises SettingError for settings of preferences with another task, and for those that contradict each other."""
    if task != "preference":
        for name in ("preference", "beta", "reference_free"):
            if getattr(objective, name) != getattr(ObjectiveConfig, name):
                raise objective.error(
                    name, f"must be {getattr(ObjectiveConfig, name)} but with task `preference`, not `{task}`"
                )
        return
    if model.logit_softcap:
        raise model.error("logit_softcap", "must be 0 with task `preference`, whose losses are of logits as they are")
    if objective.label_smoothing and not PAIR_LOSSES[objective.preference].smooths:
        raise objective.error(
            "label_smoothing", f"must be 0 with objective.preference `{objective.preference}`, which does not smooth"
        )
    if objective.label_smoothing >= 0.5:
        raise objective.error("label_smoothing", "must be below 0.5 with task `preference`: at half, pairs say nothing")


def refuse_teacher(
    task: str, objective: ObjectiveConfig, train: TrainConfig, scaling: ScalingConfig, *, has_several_adapters: bool
) -> None:
    """Raises SettingError for a teacher if the network has no next-token targets, or a worker only some of its logits."""
    if not objective.teacher:
        return
    if task not in (*DISTILLED, "auto"):
        raise objective.error(
            "teacher", f"must be None but with task {' or '.join(f'`{name}`' for name in DISTILLED)}, not `{task}`"
        )
    if not scaling.keeps_parameters_whole:
        raise objective.error("teacher", "must be None with deepspeed or a mesh: use `ddp` or `fsdp`")
    if has_several_adapters:
        raise objective.error("teacher", "must be None with lora.adapters above 1: train each adapter in a run by itself")
    if train.compile == "model":
        raise train.error("compile", "must be `none` or `block` with objective.teacher, whose loss is not compiled")


def refuse_early_start(data: DataConfig, train: TrainConfig) -> None:
    """Raises SettingError for settings that need data to be completely prepared."""
    if not data.start_after_mib:
        if data.follow:
            raise data.error("follow", "needs data.start_after_mib, MiB of text with which training begins")
        return
    if data.follow and data.validation == "tail":
        raise data.error(
            "follow", "must be false with data.validation `tail`: what grows has no end; use `hash` or `source`"
        )
    if data.near_duplicates:
        raise data.error("start_after_mib", "must be 0 with data.near_duplicates, for which all documents are read first")
    if data.sources:
        raise data.error("start_after_mib", "must be 0 with data.sources, whose sizes are asked for first")
    if train.slot_tokens:
        raise data.error("start_after_mib", "must be 0 with train.slot_tokens, for which all lengths must be known")
    if train.epochs:
        raise data.error("start_after_mib", "must be 0 with train.epochs, whose end is not known then: give train.steps")


def _refuse_with_mesh(train: TrainConfig, scaling: ScalingConfig, workers: int) -> None:
    """Raises SettingError for settings that no mesh supports, whatever the model."""
    group = scaling.group
    if workers and workers % group:
        nearest = max(group, round(workers / group) * group)
        raise scaling.error(
            "workers",
            f"must be a multiple of scaling.pipeline x expert x context x tensor, {group}; the nearest is {nearest}",
        )
    if not scaling.kind.is_meshed:
        raise scaling.error("strategy", f"must be {names_with(STRATEGIES, 'is_meshed')} in a mesh, not `{scaling.strategy}`")
    if scaling.min_workers:
        raise scaling.error("min_workers", "must be 0 in a mesh, which cannot shrink by one worker")
    if train.compile != "none":
        raise train.error("compile", "must be `none` in a mesh: the exchanges between its workers are not compiled")
    if scaling.pipeline == 1:
        return
    if scaling.strategy == "fsdp" and scaling.schedule == "zbv":
        raise scaling.error("schedule", "must be `1f1b` or `interleaved` with scaling.strategy `fsdp`")
    if train.exact and scaling.schedule != "1f1b":
        raise scaling.error("schedule", f"must be `1f1b` with train.exact, not `{scaling.schedule}`")
    if train.together > 1:
        raise train.error("micro_batch_slots", "must be 0 or 1 with scaling.pipeline, whose micro-batches are slots")
    groups = max(1, workers // group)
    least = scaling.stages
    if train.slots < least * groups:
        raise train.error(
            "slots",
            f"must be at least {least * groups}: scaling.pipeline {scaling.pipeline} with schedule `{scaling.schedule}` "
            f"wants {least} for each of {groups} group(s) of workers",
        )
    if scaling.schedule == "interleaved" and train.slots % (groups * scaling.pipeline):
        nearest = max(1, round(train.slots / (groups * scaling.pipeline))) * groups * scaling.pipeline
        raise train.error(
            "slots", f"must be a multiple of {groups * scaling.pipeline} with schedule `interleaved`; take {nearest}"
        )


def refuse_with_experts(
    model: ModelConfig, train: TrainConfig, scaling: ScalingConfig, optimizer: OptimizerConfig, *, has_adapters: bool
) -> None:
    """Raises SettingError for settings that do not work with a mixture of experts, or only with one."""
    if not model.experts:
        if scaling.expert > 1:
            raise scaling.error("expert", "must be 1 without model.experts, a mixture of experts")
        return
    if model.experts % scaling.expert:
        nearest = _nearest(model.experts, scaling.expert)
        raise scaling.error("expert", f"must divide model.experts, {model.experts}; the nearest is {nearest}")
    for name in ("tensor", "pipeline", "context"):
        if getattr(scaling, name) > 1:
            raise scaling.error(name, "must be 1 with model.experts: use scaling.expert, `ddp` or `fsdp`")
    if scaling.kind.runs_engine:
        raise scaling.error("strategy", f"must be {names_with(STRATEGIES, 'runs_engine', False)} with model.experts")
    if train.compile != "none":
        raise train.error("compile", "must be `none` with model.experts, whose numbers of tokens change in every step")
    if OPTIMIZERS[optimizer.kind].needs_whole_matrices:
        others = names_with(OPTIMIZERS, "needs_whole_matrices", False)
        raise optimizer.error("kind", f"must be {others} with model.experts, whose matrices are stacked")
    if scaling.expert == 1:
        return
    if has_adapters:
        raise scaling.error("expert", "must be 1 with lora.rank: use `ddp` or `fsdp`")
    if model.dropout:
        raise scaling.error("expert", "must be 1 with model.dropout, whose masks are of a slot's samples together")


def refuse_mesh_of_model(task: str, model: ModelConfig, scaling: ScalingConfig) -> None:
    """Raises SettingError for a mesh that cannot cut this model, with the nearest that can."""
    if scaling.group == 1:
        return
    if task in MESHLESS:
        raise scaling.error(
            "tensor", f"and scaling.pipeline and scaling.context must be 1 with task `{task}`: use `ddp` or `fsdp`"
        )
    if task in OTHERS and scaling.pipeline * scaling.context > 1:
        name = "pipeline" if scaling.pipeline > 1 else "context"
        why = "stages of one decoder" if scaling.pipeline > 1 else "samples long enough to share their tokens"
        raise scaling.error(name, f"must be 1 with task `{task}`, which has no {why}")
    if model.architecture in ENCODERS and scaling.tensor > 1:
        raise scaling.error("tensor", f"must be 1 with model.architecture `{model.architecture}`: use `ddp` or `fsdp`")
    for name, count in (("heads", model.heads), ("kv_heads", model.kv_heads or model.heads)):
        if count % scaling.tensor:
            raise scaling.error(
                "tensor", f"must divide model.{name}, {count}; the nearest is {_nearest(count, scaling.tensor)}"
            )
    if model.logit_softcap and scaling.tensor > 1:
        raise scaling.error(
            "tensor", "must be 1 with model.logit_softcap: no bound is on logits that are spread over workers"
        )
    if not model.layers and scaling.tensor > 1:
        raise scaling.error("tensor", "must be 1 with model.layers 0")
    stages = scaling.stages
    if scaling.pipeline > 1 and model.layers < stages:
        most = model.layers * scaling.pipeline // stages
        raise scaling.error(
            "pipeline",
            f"makes {stages} stages with schedule `{scaling.schedule}`, of model.layers {model.layers}: nearest is {most}",
        )
    if scaling.context > 1 and model.context % (2 * scaling.context):
        half = model.context // 2 if model.context % 2 == 0 else 1
        raise scaling.error(
            "context",
            f"must divide half of model.context, {model.context}; the nearest is {_nearest(half, scaling.context)}",
        )
    if scaling.context > 1 and scaling.context_exchange == "heads":
        heads = (model.kv_heads or model.heads) // scaling.tensor
        if heads % scaling.context:
            raise scaling.error(
                "context_exchange",
                f"must be `ring` or `keys`: {heads} heads of keys a worker cannot be shared by {scaling.context}",
            )


def _nearest(count: int, wanted: int) -> int:
    """The divisor of `count` nearest to `wanted`, the smaller of two."""
    return min((each for each in range(1, count + 1) if count % each == 0), key=lambda each: (abs(each - wanted), each))


def _refuse_with_exact(train: TrainConfig, scaling: ScalingConfig, frozen: bool) -> None:
    if scaling.kind.is_sharded and not frozen:
        raise scaling.error(
            "strategy", "adds gradients up in an order that follows the number of workers; with train.exact use `ddp`"
        )
    if train.compile != "none":
        raise train.error(
            "compile", "must be `none` with train.exact: what the compiler makes is not shown to keep the bits"
        )


def _refuse_with_engine(train: TrainConfig, strategy: str) -> None:
    if train.precision == "fp16":
        raise train.error("precision", f"must be another with scaling.strategy `{strategy}`: use `bf16`, or strategy `fsdp`")
    if train.compile != "none":
        raise train.error("compile", f"must be `none` with scaling.strategy `{strategy}`; `fsdp` can compile")


def refuse_schedule(optimizer: OptimizerConfig, train: TrainConfig) -> None:
    """Raises SettingError for a schedule that needs the run's end if that is unknown, or is longer than the run."""
    is_endless = not train.steps and not train.epochs
    if is_endless and optimizer.warmup_ratio:
        raise optimizer.error("warmup_ratio", "must be 0 when only train.hours ends the run: give optimizer.warmup_steps")
    if is_endless and optimizer.schedule == "wsd":
        raise optimizer.error("schedule", "must not be `wsd` when only train.hours ends the run: give train.steps")
    if is_endless and SCHEDULES[optimizer.schedule].falls and not optimizer.decay_steps:
        raise optimizer.error("decay_steps", "must be given for a schedule that falls when only train.hours ends the run")
    if optimizer.schedule == "wsd" and train.steps:
        warmup, decay = optimizer.warmup(train.steps), optimizer.decay_length(train.steps)
        if warmup + decay > train.steps:
            name = "decay_steps" if optimizer.decay_steps else "decay_share"
            raise optimizer.error(
                name,
                f"gives a decay of {decay:,} steps, and with a warm-up of {warmup:,} that is more than train.steps, "
                f"{train.steps:,}: lower it or optimizer.warmup_steps",
            )


def refuse_average(train: TrainConfig, validation: ValidationConfig) -> None:
    """Raises SettingError if an average is to be evaluated and there is none."""
    if validation.weights == "ema" and not train.ema:
        raise validation.error("weights", "must be `auto` or `trained` without train.ema, 0.999 for instance")


def refuse_branch(train: TrainConfig, run: str | None, *, has_several_adapters: bool) -> None:
    """Raises SettingError for a branch of the run itself, and for several adapters at once."""
    if not train.branch_from:
        return
    if run == parse_branch(train.branch_from)[0]:
        raise train.error(
            "branch_from", f"must be another run than this one, {run}: give the branch its own name, --run NAME"
        )
    if has_several_adapters:
        raise train.error("branch_from", "must be None with lora.adapters above 1: branch each adapter's run by itself")


def refuse_optimizer(optimizer: OptimizerConfig, scaling: ScalingConfig, *, has_adapters: bool) -> None:
    """Raises SettingError for an optimiser of whole matrices if no worker has or gathers trained ones."""
    if not OPTIMIZERS[optimizer.kind].needs_whole_matrices:
        return
    others = names_with(OPTIMIZERS, "needs_whole_matrices", False)
    if has_adapters:
        raise optimizer.error("kind", f"must be {others} with lora.rank: adapters are trained, and no matrix of blocks")
    if not scaling.keeps_parameters_whole:
        raise optimizer.error("kind", f"must be {others} with deepspeed or a mesh: use `ddp` or `fsdp` for {optimizer.kind}")
