"""Settings of the training itself: optimiser, schedule, steps, validation, checkpoints."""

import math
import re
from dataclasses import dataclass
from os.path import exists
from typing import Any, ClassVar, Literal

from raystride.model.objectives import DIVERGENCES, PAIR_LOSSES, DivergenceName, PairLossName
from raystride.pipelines.config.batch import batch_error, cut_batch
from raystride.pipelines.config.metrics import Direction, known_direction
from raystride.pipelines.config.optimizers import OPTIMIZERS, OptimizerName
from raystride.pipelines.config.parameter_groups import check_group
from raystride.pipelines.config.schedules import SCHEDULES, DecayShape, ScheduleName
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.system.hub import is_hub_name
from raystride.pipelines.system.storage.folder import absolute_uri


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimiser and learning-rate schedule."""

    name: ClassVar[str] = "optimizer"

    kind: OptimizerName = setting("adamw", fixed=True, also="optim optimizer_type optimizer_name", table=OPTIMIZERS)
    """Optimiser."""
    learning_rate: float = setting(1e-3, above=0, also="lr max_lr peak_lr base_lr init_lr", shapes_result=True)
    """Peak learning rate. With `noam`, a factor of its formula."""
    betas: tuple[float, float] = setting(
        (0.9, 0.99),
        at_least=0,
        below=1,
        also="beta1 beta2 adam_beta1 adam_beta2 adam_betas",
        shapes_result=True,
    )
    """Decay rates of AdamW's first and second moment."""
    eps: float = setting(1e-8, above=0, also="adam_epsilon epsilon adam_eps", shapes_result=True)
    """Term in AdamW's denominator that avoids division by zero."""
    weight_decay: float = setting(0.1, at_least=0, also="wd decay", shapes_result=True)
    """Decoupled weight decay. Applied to matrices only, not to biases, norms and gains."""
    momentum: float = setting(0.0, at_least=0, below=1, shapes_result=True)
    """Momentum of `sgd`, and of `muon`: 0 then stands for 0.95."""
    schedule: ScheduleName = setting(
        "cosine",
        also="lr_scheduler_type lr_scheduler scheduler lr_decay_style lr_schedule decay_type",
        shapes_result=True,
        table=SCHEDULES,
    )
    """Learning-rate schedule after the warm-up."""
    warmup_steps: int = setting(
        100,
        at_least=0,
        also="warmup warmup_iters num_warmup_steps lr_warmup_iters lr_warmup_steps warmup_updates",
        shapes_result=True,
    )
    """Steps of linear learning-rate warm-up."""
    warmup_ratio: float = setting(0.0, at_least=0, below=1, since="0.4", also="warmup_share", shapes_result=True)
    """Warm-up as a share of the run's steps, in place of `warmup_steps`. 0: by `warmup_steps`."""
    decay_steps: int = setting(0, at_least=0, also="lr_decay_iters decay_iters lr_decay_steps", shapes_result=True)
    """Step at which `cosine` and `linear` reach the minimum learning rate. 0: the last step of the run. With `wsd`, number
    of the last steps, which decay; 0: by `decay_share`."""
    decay_share: float = setting(
        0.2, above=0, at_most=1, since="0.4", also="decay_ratio cooldown_fraction wsd_decay_ratio", shapes_result=True
    )
    """Share of the run's steps over which `wsd` falls, at its end."""
    decay_shape: DecayShape = setting("linear", since="0.4", also="cooldown_shape lr_decay_shape", shapes_result=True)
    """How `wsd` falls: `linear`, `sqrt` (1 - the root of the share that is done; Hägele et al., 2024) or `cosine`."""
    min_lr_ratio: float = setting(
        0.1,
        at_least=0,
        at_most=1,
        was="optimizer.lowest_rate",
        renamed="0.3",
        also="min_lr min_lr_factor lr_min min_learning_rate lr_min_ratio alpha_f",
        shapes_result=True,
    )
    """Final learning rate of `cosine`, `linear` and `wsd`, as a fraction of the peak."""
    groups: tuple[dict[str, Any], ...] = setting(
        (), since="0.4", also="param_groups group_overrides lr_mult layer_decay no_weight_decay", shapes_result=True
    )
    """Groups of parameters with their own rate or decay. `[{pattern: "embedding.*", lr_ratio: 0.1, weight_decay: 0}]`: a
    pattern of full names (`*`, `?` and `[...]`, as in file names), the group's learning rate as a fraction of that of the
    schedule, and its decay, of biases and norms as well. The first pattern that matches a parameter holds. Left out: 1, and
    `optimizer.weight_decay` of matrices."""
    absent_gradients: Literal["auto", "skip", "zero"] = setting("auto", since="0.4", shapes_result=True)
    """A parameter of a model of your own that no sample of a step has used: `skip` leaves it as it is; `zero` lets it decay
    and move by its momentum on several workers, as 0.3 did. `auto`: as the run began; a new one skips."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or `noam`, which divides by it, has no warm-up."""
        super().__post_init__()
        if self.schedule == "noam" and not (self.warmup_steps or self.warmup_ratio):
            raise self.error("warmup_steps", "must be at least 1 with optimizer.schedule `noam`")
        object.__setattr__(self, "groups", tuple(check_group(number, group) for number, group in enumerate(self.groups)))

    def warmup(self, total_steps: int) -> int:
        """Returns the steps of the warm-up in a run of so many."""
        return round(self.warmup_ratio * total_steps) if self.warmup_ratio else self.warmup_steps

    def decay_length(self, total_steps: int) -> int:
        """Returns the number of steps of the decay of `wsd`, at the end of a run."""
        return self.decay_steps or round(self.decay_share * total_steps)


_BRANCH = re.compile(r"([^/]+)(?:/step-(\d+))?")


def parse_branch(text: str) -> tuple[str, int | None]:
    """Returns the run and the step that `train.branch_from` names, None for the newest. Raises ValueError."""
    if not (found := _BRANCH.fullmatch(text)):
        raise ValueError(text)
    return found[1], None if found[2] is None else int(found[2])


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length of training and composition of a step: slots x slot_size samples."""

    name: ClassVar[str] = "train"

    steps: int = setting(
        1000,
        at_least=0,
        also=(
            "max_steps max_iters num_train_steps total_steps train_iters iterations training_steps num_steps max_duration"
        ),
    )
    """Number of optimiser steps of the whole run. 0: no limit; `epochs` or `hours` end the run."""
    branch_from: str | None = setting(None, fixed=True, since="0.4", also="fork_from")
    """Checkpoint of another run of the storage that a new run begins at: `RUN`, for its newest, or `RUN/step-500`. Weights,
    optimiser, average, step and position in the data are that checkpoint's; data, model and slots must be the parent's,
    schedule, rates and length may differ. `train.steps` counts from the parent's beginning. The parent is only read, and
    only until the new run has a checkpoint of its own."""
    epochs: float = setting(0.0, at_least=0, also="num_train_epochs num_epochs max_epochs n_epochs epoch")
    """Maximum number of passes over the training samples. 0: no limit."""
    hours: float = setting(0.0, at_least=0, also="max_time max_hours time_limit")
    """Maximum wall-clock time of this attempt in hours. The run then saves and ends. 0: no limit."""
    batch: int = setting(
        0,
        at_least=0,
        at_most=2**40,
        since="0.3",
        also=(
            "batch_size train_batch_size global_batch_size global_train_batch_size "
            "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu "
            "per_gpu_train_batch_size total_batch_size mini_batch_size bs"
        ),
    )
    """Global batch size: samples per step over all workers. It sets `slots`, to the largest divisor of the batch up to 16,
    and `slot_size`; a run stores these two in its place. 0: `slots` and `slot_size` apply. A batch that 8 or 16 divides can
    use as many workers. A sweep over `scaling.workers` keeps the batch, except with `sweep.scaling weak`. Not with
    `slot_tokens`; set `slots` then."""
    slots: int = setting(
        4,
        at_least=1,
        at_most=2**20,
        fixed=True,
        also="gradient_accumulation_steps accumulate_grad_batches grad_accum_steps grad_accumulation num_micro_batches",
    )
    """Number of fixed parts of a step's batch; the maximum number of workers. Constant over a run, for any number of
    workers; each worker accumulates gradients over its slots."""
    slot_size: int = setting(8, at_least=1, at_most=2**20, fixed=True)
    """Samples in a slot."""
    slot_tokens: int = setting(0, at_least=0, at_most=2**31 - 1, fixed=True)
    """Maximum number of tokens in a slot, padding included. A slot is then a bundle of any number of examples of similar
    length, and slot_size is not used. 0: slot_size samples of any length. For tasks with samples of different length; an
    example that exceeds the maximum forms a bundle by itself."""
    packing: Literal["none", "documents"] = setting(
        "none", fixed=True, since="0.2", also="sample_packing pack_sequences packed"
    )
    """Packing of several documents into one sample. `documents`: attention never crosses the end of a document, and
    positions restart with each. A language model's samples then hold whole documents and parts of documents, each preceded
    by the end token of the previous one; in the task `completion`, pairs follow each other without padding. `none`: a sample
    is a window of one text, and pairs are padded."""
    micro_batch_slots: int = setting(
        0, at_least=0, also="micro_batch_size microbatch_size device_train_microbatch_size rank_microbatch_size"
    )
    """Maximum number of neighbouring slots in one forward and backward. Limits memory. 0: all slots of a worker.

    With train.exact it is always one."""
    dropout_masks: Literal["slot", "auto", "order", "place"] = setting("slot", since="0.3", shapes_result=True)
    """Source of dropout's masks. `slot`: a hash of seed, step, slot, sample in the slot, layer, token and channel, so that
    neither the number of workers nor a mesh changes them; only in our networks, and not in the task `completion` with
    train.packing: others, and runs of earlier versions, have `auto`. `order`: the next numbers of a generator seeded by step
    and a micro-batch's first slot. `place`: a generator seeded by these and the layer, the same on any mesh. `auto`: `place`
    in a mesh, otherwise `order`."""
    exact: bool = setting(False, fixed=True, also="bitwise reproducible")
    """Bitwise reproducible on any number of workers. Gradients are added slot by slot along one fixed tree."""
    ema: float = setting(
        0.0, at_least=0, below=1, fixed=True, since="0.4", also="ema_decay model_ema_decay use_ema ema_momentum"
    )
    """Exponential moving average of the weights: the share of it that each step keeps, 0.999 for instance, beside the
    weights in fp32. 0: none. Used by `validation.weights`."""
    clip_norm: float = setting(
        1.0,
        at_least=0,
        also=(
            "max_grad_norm grad_clip gradient_clip_val clip_grad gradient_clipping clip_grad_norm max_norm grad_norm_clip"
        ),
        shapes_result=True,
    )
    """Maximum norm of the gradient (gradient clipping). 0: no clipping."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "pure_bf16"] = setting(
        "fp32",
        also="mixed_precision dtype fp16 bf16 tf32 amp autocast torch_dtype param_dtype training_precision",
        shapes_result=True,
    )
    """Numerical precision of parameters and computation. In brackets: the corresponding level of NVIDIA's Apex.

    `auto`: `bf16` on CPUs and GPUs with instructions for it, otherwise `fp32`; with train.exact always `fp32`. `fp32` (O0).
    `tf32`: fp32 with factors of products rounded to TF32, on NVIDIA GPUs since Ampere. `bf16` (O1): parameters and updates
    in fp32, products in bfloat16: by autocast on GPUs; on CPUs with AMX or AVX512-BF16, for those linear layers that are
    faster in bfloat16 (other CPUs multiply in fp32). `fp16` (O1): autocast to float16 with dynamic loss scaling. `pure_bf16`
    (O2): parameters and activations in bfloat16, gradients and a master copy of the parameters in fp32; with
    train.stochastic_rounding there is no master copy (O3)."""
    stochastic_rounding: bool = setting(False, shapes_result=True)
    """Round each update to bfloat16 stochastically, so that it is right on average. Used with `pure_bf16`, in place of a
    master copy (Zamirai et al., 2020)."""
    activation_checkpointing: Literal["none", "selective", "full"] = setting(
        "none", also="gradient_checkpointing activation_checkpoint recompute remat use_gradient_checkpointing"
    )
    """Activations to recompute in the backward (Chen et al., 2016). `none`: nothing is recomputed. `selective`: all except
    matrix products and attention. `full`: whole blocks."""
    compile: Literal["none", "block", "model"] = setting("none", also="torch_compile use_compile compile_model")
    """Compile every block, or the whole model, with torch.compile. The first step then takes longer."""
    log_every: int = setting(
        10, at_least=1, also="logging_steps log_interval log_every_n_steps log_freq log_every_steps metrics_log_interval"
    )
    """Steps between two logged measurements. The loop waits for the device only then."""
    log_norms: bool = setting(False, since="0.4", also="log_params_norm log_grad_norm watch")
    """Log norms of gradients and updates by part of the network as well: of each block, embedding and head, in MLflow and on
    the page. A logged step copies the parameters for it. Not in a mesh and not with `deepspeed`; an optimiser of your own
    has no norms of updates."""
    deterministic: bool = setting(True, also="use_deterministic_algorithms cudnn_deterministic full_determinism")
    """Use only deterministic operations, which give the same bits each time. Some are slower on a GPU."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, nothing ends the run, or `exact` or `precision` forbids one."""
        super().__post_init__()
        if self.branch_from is not None:
            object.__setattr__(self, "branch_from", self._written_branch())
        if self.batch:
            self._resolve_batch()
        if not (self.steps or self.epochs or self.hours):
            raise self.error("steps", "must be at least 1 where neither train.epochs nor train.hours ends the run")
        if self.exact and self.micro_batch_slots > 1:
            raise self.error("micro_batch_slots", "must be 0 or 1 with train.exact, which adds gradients slot by slot")
        if self.exact and not self.deterministic:
            raise self.error("deterministic", "must be true with train.exact")
        if self.stochastic_rounding and self.precision != "pure_bf16":
            raise self.error("stochastic_rounding", "must be false but with train.precision `pure_bf16`")

    @property
    def slot_samples(self) -> int:
        """Samples in a slot; a bundle is one."""
        return 1 if self.slot_tokens else self.slot_size

    def _written_branch(self) -> str:
        """Returns `branch_from` with the step as the folder of a checkpoint has it."""
        try:
            run, step = parse_branch(self.branch_from or "")
        except ValueError:
            raise self.error("branch_from", "must be a run's name, or one of its checkpoints, `RUN/step-500`") from None
        return run if step is None else f"{run}/step-{step:08d}"

    def _resolve_batch(self) -> None:
        if self.slot_tokens:
            raise batch_error(self.batch)
        given = {
            key: getattr(self, key) for key in ("slots", "slot_size") if getattr(self, key) != getattr(TrainConfig, key)
        }
        slots, size = cut_batch({"batch": self.batch, **given})
        for key, value in {"slots": slots, "slot_size": size, "batch": 0}.items():
            object.__setattr__(self, key, value)

    def micro_batch_samples(self, workers: int) -> int:
        """Returns the samples, or bundles of them, in the largest micro-batch of a training on this many workers."""
        slots = -(-self.slots // workers)
        return self.slot_samples * min(self.together or slots, slots)

    @property
    def samples_per_step(self) -> int:
        """Samples in a step; with `slot_tokens`, bundles of them."""
        return self.slots * self.slot_samples

    @property
    def together(self) -> int:
        """Most slots in a micro-batch; 0: no limit. Bundles of unlike lengths would only fill each other up."""
        return 1 if self.exact or self.slot_tokens else self.micro_batch_slots


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """Loss function. Validation always measures the plain loss."""

    name: ClassVar[str] = "objective"

    label_smoothing: float = setting(0.0, at_least=0, below=1, fixed=True, also="label_smoothing_factor")
    """Label smoothing (Szegedy et al., 2016, section 7). Share of a target's weight that is spread over all classes or
    tokens. In the task `preference`: probability that a pair is labelled the wrong way round (cDPO: Mitchell, 2023), below
    0.5."""
    preference: PairLossName = setting("dpo", fixed=True, since="0.3", also="loss_type pref_loss", table=PAIR_LOSSES)
    """Loss of the task `preference`."""
    beta: float = setting(0.1, above=0, fixed=True, since="0.3", also="dpo_beta pref_beta")
    """Strength of the pull towards the reference model, in the task `preference`. For IPO: tau."""
    reference_free: bool = setting(False, fixed=True, since="0.3")
    """Assume a reference model to which all answers are equally likely. It is then not computed. false: the reference is the
    model of `model.init_from` before training. For the task `preference`."""
    class_weights: Literal["none", "balanced"] = setting("none", fixed=True, also="class_weight")
    """Weights of classes in classification. `balanced`: inversely proportional to the frequency of a label."""
    loss: Literal["cross_entropy", "mse"] = setting("cross_entropy", fixed=True)
    """Loss of the task `images`. `cross_entropy`, or `mse`: mean squared error to one-hot targets."""
    teacher: str | None = setting(
        None, fixed=True, since="0.4", also="teacher_model teacher_model_name_or_path teacher_checkpoint teacher_model_path"
    )
    """Teacher of a knowledge distillation (Hinton et al., 2015): folder or hub name of a causal language model in Hugging
    Face's layout, as `raystride export --to hugging_face` writes it, with the run's vocabulary. It is frozen, and every
    worker holds all of it. None: no teacher. For the tasks `language_model` and `completion`."""
    divergence: DivergenceName = setting("forward_kl", fixed=True, since="0.4", also="kd_loss", table=DIVERGENCES)
    """Divergence between the next-token distributions of teacher and student, over the whole vocabulary."""
    kd_ratio: float = setting(0.5, above=0, at_most=1, fixed=True, since="0.4", also="kd_loss_weight distillation_alpha")
    """Weight of the divergence in the training loss; that of the labels' cross-entropy is 1 - kd_ratio."""
    temperature: float = setting(
        1.0, above=0, fixed=True, since="0.4", also="kd_temperature distillation_temperature logit_kl_temperature"
    )
    """Temperature T by which both models' logits are divided for the divergence, which is multiplied by T^2."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or belongs to a teacher and there is none."""
        super().__post_init__()
        for name in () if self.teacher else ("divergence", "kd_ratio", "temperature"):
            if getattr(self, name) != getattr(ObjectiveConfig, name):
                raise self.error(name, f"must be {getattr(ObjectiveConfig, name)} without objective.teacher")
        if self.teacher and not (is_hub_name(self.teacher) and not exists(self.teacher)):
            # Workers have other working directories than the one in which this was typed.
            object.__setattr__(self, "teacher", absolute_uri(self.teacher))


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Section):
    """Handling of bad steps: the loss or gradient is not finite, or the loss spikes.

    A bad step never changes parameters, with any policy. Steps that overflow under `fp16` while the loss scale can still be
    lowered are not bad."""

    name: ClassVar[str] = "guard"

    policy: Literal["stop", "skip", "rewind"] = setting("stop")
    """Action on a bad step. `stop`: end the run and name layer, samples and step. `skip`: drop the step, count it and
    continue. `rewind`: return to the newest checkpoint and repeat without the offending slots."""
    spike: float = setting(0.0, at_least=0, shapes_result=True)
    """Threshold of a loss spike, in standard deviations above the running mean. 0: no spike detection."""
    window: int = setting(100, at_least=2, shapes_result=True)
    """Window of the exponential running mean and deviation, in steps. No spikes are detected before the end of the first
    window."""
    max_bad_steps: int = setting(10, at_least=1, was="guard.most", renamed="0.3")
    """Maximum number of skipped steps, or of rewinds, in a run. One more ends the run."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Section):
    """Frequency and size of validation, and its consequences."""

    name: ClassVar[str] = "validation"

    every: int = setting(
        100,
        at_least=0,
        also=(
            "eval_steps eval_interval val_check_interval eval_every eval_freq validation_interval "
            "evaluation_interval val_interval eval_strategy evaluation_strategy"
        ),
    )
    """Steps between two validations. 0: only at the end."""
    every_epochs: float = setting(0.0, at_least=0, since="0.4", also="val_every_epochs check_val_every_n_epoch")
    """Epochs between two validations, in place of `validation.every`; parts of an epoch as well. 0: by steps."""
    samples: int = setting(
        512, at_least=0, also="eval_iters limit_val_batches max_eval_samples eval_samples max_val_samples"
    )
    """Number of validation samples, always the same ones. 0: all."""
    bleu_tokenizer: Literal["auto", "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "flores101", "flores200"] = setting(
        "auto", since="0.3"
    )
    """Tokenizer of the BLEU metric, as sacreBLEU names it. Part of the metric's signature. `auto` decides by the references:
    `zh` for Chinese, `char` for Japanese and Korean, otherwise `13a`. Those with `mecab` or `flores` need additional
    packages."""
    metric: str = setting("val_loss", also="metric_for_best_model monitor", shapes_result=True)
    """Metric that decides the `best` checkpoint and early stopping."""
    direction: Literal["auto", "min", "max"] = setting("auto", also="greater_is_better mode", shapes_result=True)
    """Whether a smaller or a larger metric is better. `auto`: smaller of losses (`val_loss`, `val_NAME_loss`), perplexity,
    kl and rejected_reward, larger of accuracy, macro_f1, bleu, chrf, margin and chosen_reward. Any other metric needs `min`
    or `max`."""
    patience: int = setting(0, at_least=0, also="early_stopping_patience patience_epochs")
    """Early stopping: validations without improvement before the run stops. 0: never."""
    gather_mib: int = setting(256, at_least=1, at_most=2**20, since="0.4")
    """Most MiB of predictions and labels that a validation gathers on rank 0, for metrics of the whole set of a model of
    your own (`raystride.fit`). More is refused."""
    weights: Literal["auto", "trained", "ema"] = setting("auto", since="0.4", shapes_result=True)
    """Weights that are validated and that checkpoints have as the model's, so that evaluation, prediction and export take
    them: the trained ones, or their average (`train.ema`). `auto`: the average if there is one."""
    means: tuple[str, ...] = setting((), since="0.4")
    """Metrics of a model of your own that are means over samples in spite of their names, `recall_at_5` for instance:
    numbers named f1, auc, precision, recall, map, ndcg, r2 or correlation are refused otherwise."""

    @property
    def named_direction(self) -> Literal["auto", "min", "max"]:
        """Whether a smaller or a larger metric is better; `auto` if neither the setting nor the metric's name says it."""
        return self.direction if self.direction != "auto" else known_direction(self.metric) or "auto"

    @property
    def better(self) -> Direction:
        """Whether a smaller or a larger metric is better. Raises SettingError if neither setting nor name says it."""
        if (found := self.named_direction) == "auto":
            rule = f"must be `min` or `max`, as the name {self.metric} does not say whether less or more of it is better"
            raise self.error("direction", rule, ("min", "max"))
        return found

    def cost(self, value: float | None) -> float:
        """Returns a value of the metric as `cost_of` does."""
        return cost_of(value, self.better)


def cost_of(value: float | None, direction: Direction = "min") -> float:
    """Returns a figure such that less is better; infinite, and so never the best, if it is none or not finite."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if direction == "min" else -value


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Frequency of checkpoints, and number of checkpoints to keep."""

    name: ClassVar[str] = "checkpoint"

    every: int = setting(
        200,
        at_least=0,
        also=(
            "save_steps save_interval save_every every_n_train_steps checkpoint_interval "
            "ckpt_interval checkpoint_frequency save_freq save_strategy checkpointing_steps"
        ),
    )
    """Steps between two checkpoints. 0: no checkpoints, not even at the end."""
    every_epochs: float = setting(0.0, at_least=0, since="0.4", also="every_n_epochs save_every_epochs")
    """Epochs between two checkpoints, in place of `checkpoint.every` if that is not 0; parts of an epoch as well. 0: by
    steps."""
    minutes: float = setting(10.0, at_least=0, since="0.4", also="save_interval_minutes checkpoint_interval_minutes")
    """Minutes after the beginning of a checkpoint at which the next one begins, within a step or two. 0: never. Rank 0's
    clock decides, and never before the previous save has ended. No result depends on it. Without effect if
    `checkpoint.every` is 0, as in trials of a sweep."""
    keep: int = setting(
        3,
        at_least=1,
        also="save_total_limit save_top_k num_to_keep keep_last_n keep_latest_k max_to_keep save_num_checkpoints_to_keep",
    )
    """Number of newest checkpoints to keep, besides the best. Manifests are never deleted."""
    failures: int = setting(3, at_least=1, since="0.2")
    """Consecutive failed saves after which the run fails. Each failure before is a warning, and the next save tries again;
    the last save of a run must succeed. Saves by `checkpoint.minutes` do not count."""
