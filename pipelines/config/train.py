"""Settings of the training itself: optimiser, schedule, steps, validation, checkpoints."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from raystride.pipelines.config.section import Section, setting


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section):
    """The update rule and its learning rate over time."""

    name: ClassVar[str] = "optimizer"

    kind: Literal["adamw", "sgd"] = setting("adamw", fixed=True)
    """AdamW (Loshchilov and Hutter, 2019) or plain stochastic gradient descent."""
    learning_rate: float = setting(1e-3, above=0)
    """Highest learning rate; a factor of the formula under `noam`."""
    betas: tuple[float, float] = setting((0.9, 0.99), at_least=0, below=1)
    """AdamW's decay of the first and second moment."""
    eps: float = setting(1e-8, above=0)
    """AdamW's term that keeps the denominator from zero."""
    weight_decay: float = setting(0.1, at_least=0)
    """Decoupled decay, of matrices only: biases, norms and gains are left alone."""
    momentum: float = setting(0.0, at_least=0, below=1)
    """Momentum of `sgd`."""
    schedule: Literal["cosine", "linear", "constant", "noam"] = setting("cosine")
    """The learning rate after the warm-up."""
    warmup_steps: int = setting(100, at_least=0)
    """Steps over which the learning rate rises from near zero."""
    decay_steps: int = setting(0, at_least=0)
    """Step at which `cosine` and `linear` reach their lowest rate; 0: the end of the run."""
    lowest_rate: float = setting(0.1, at_least=0, at_most=1)
    """Where `cosine` and `linear` end, as a share of the highest rate."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, or `noam` has no warm-up, whose length its formula needs."""
        super().__post_init__()
        if self.schedule == "noam" and self.warmup_steps < 1:
            raise self.error("warmup_steps", "must be at least 1 with optimizer.schedule `noam`")


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """How long to train and what a step is made of: batch = slots x slot_size samples."""

    name: ClassVar[str] = "train"

    steps: int = setting(1000, at_least=0)
    """Optimiser updates in the whole run; 0: until `epochs` or `hours` end it."""
    epochs: float = setting(0.0, at_least=0)
    """Passes over the training samples after which to end; 0: no such bound."""
    hours: float = setting(0.0, at_least=0)
    """Wall-clock hours of this attempt after which to save and end; 0: no such bound."""
    slots: int = setting(4, at_least=1, at_most=2**20, fixed=True)
    """Fixed parts of a step's batch; the most workers that can share it. Constant over a run, whatever the workers."""
    slot_size: int = setting(8, at_least=1, at_most=2**20, fixed=True)
    """Samples in a slot."""
    slot_tokens: int = setting(0, at_least=0, at_most=2**31 - 1, fixed=True)
    """Most tokens in a slot, padding included: a slot is then a bundle of examples of like length, however many they are,
    and slot_size is not used; 0: slot_size samples, whatever their length. For tasks whose samples differ in length; one
    that is longer by itself is a bundle of its own."""
    packing: Literal["none", "documents"] = setting("none", fixed=True, since="0.2")
    """With `documents`, attention never crosses a document's end, and positions begin anew with each: a language model's
    windows hold whole documents and parts of them, which begin with the end token of the one before; in a task `completion`
    pairs follow each other without padding. `none`: a window is one text, and pairs are padded."""
    micro_batch_slots: int = setting(0, at_least=0)
    """Neighbouring slots that run as one forward and backward, limited by memory; 0: all that a worker has.

    With train.exact it is always one."""
    dropout_masks: Literal["auto", "order", "place"] = setting("auto", since="0.3")
    """Which numbers dropout takes: those that come next in the `order` of a generator seeded by step and slot, or those that
    their `place` (step, slot, layer, token) names, so that they are the same on any mesh. `auto`: `place` in a mesh."""
    exact: bool = setting(False, fixed=True)
    """End with the same bits on any number of workers: gradients are added slot by slot along one tree."""
    clip_norm: float = setting(1.0, at_least=0)
    """Largest norm of the gradient; 0: no clipping."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "pure_bf16"] = setting("fp32")
    """How numbers are held and multiplied; in brackets the level of NVIDIA's Apex that is the like.

    `auto`: `bf16` on processors and GPUs that have instructions for it, else `fp32`; with train.exact always `fp32`.
    `fp32` (O0). `tf32`: fp32 whose products round their factors to TF32, on NVIDIA GPUs since Ampere. `bf16` (O1):
    parameters and updates in fp32, products in bfloat16: by autocast on GPUs; on CPUs with AMX or AVX512-BF16 those of
    linear layers that are faster so (other CPUs multiply in fp32). `fp16` (O1): autocast to float16, with a loss scale that
    finds its own value.
    `pure_bf16` (O2): parameters and activations in bfloat16, gradients and a master copy of the parameters in fp32; with
    train.stochastic_rounding there is no master copy (O3)."""
    stochastic_rounding: bool = setting(False)
    """With `pure_bf16`: round each update to bfloat16 up or down by chance, so that it is right on average, instead of
    keeping a master copy (Zamirai et al., 2020)."""
    activation_checkpointing: Literal["none", "selective", "full"] = setting("none")
    """What is computed again in the backward instead of kept (Chen et al., 2016): nothing, all but products and attention,
    or whole blocks."""
    compile: Literal["none", "block", "model"] = setting("none")
    """Compile every block, or the whole model, by torch.compile; the first step then takes longer."""
    log_every: int = setting(10, at_least=1)
    """Steps between two measurements; the only time the loop waits for the device."""
    deterministic: bool = setting(True)
    """Use only operations that give the same bits each time; some are slower on a GPU."""

    def __post_init__(self) -> None:
        """Raises SettingError where a field is out of range, nothing ends the run, or `exact` or `precision` forbids one."""
        super().__post_init__()
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

    @property
    def batch(self) -> int:
        """Samples in a step."""
        return self.slots * self.slot_samples

    @property
    def together(self) -> int:
        """Most slots in a micro-batch; 0: no limit. Bundles of unlike lengths would only fill each other up."""
        return 1 if self.exact or self.slot_tokens else self.micro_batch_slots


@dataclass(frozen=True, kw_only=True)
class Objective(Section):
    """What is minimised, beyond what the task says. Validation measures the plain loss, whatever stands here."""

    name: ClassVar[str] = "objective"

    label_smoothing: float = setting(0.0, at_least=0, below=1, fixed=True)
    """Share of a target's weight that is spread over all classes or tokens (Szegedy et al., 2016, section 7). With task
    `preference`, how likely a pair is taken to stand the wrong way round (cDPO: Mitchell, 2023), below 0.5."""
    preference: Literal["dpo", "ipo"] = setting("dpo", fixed=True, since="0.3")
    """Loss of the task `preference`: DPO (Rafailov et al., 2023), or IPO (Azar et al., 2023), of means over ids."""
    beta: float = setting(0.1, above=0, fixed=True, since="0.3")
    """With task `preference`, how strongly the model is held to the reference; IPO's tau."""
    reference_free: bool = setting(False, fixed=True, since="0.3")
    """With task `preference`, take all answers to be equally likely to the reference, which is then not computed; else it is
    the model of `model.init_from` as it was."""
    class_weights: Literal["none", "balanced"] = setting("none", fixed=True)
    """`balanced`: in classification, examples count in inverse proportion to how often their label occurs."""
    loss: Literal["cross_entropy", "mse"] = setting("cross_entropy", fixed=True)
    """Loss of the task `images`: cross-entropy, or the mean squared distance to one-hot targets."""


@dataclass(frozen=True, kw_only=True)
class Guard(Section):
    """What happens when a step is bad: its loss or gradient is not a finite number, or its loss is a spike.

    A bad step never changes parameters, whatever the policy. Steps that overflow under `fp16` while the loss scale can still
    be lowered are no bad ones."""

    name: ClassVar[str] = "guard"

    policy: Literal["stop", "skip", "rewind"] = setting("stop")
    """`stop`: end the run and name layer, samples and step. `skip`: drop the step, count it, go on. `rewind`: go back to the
    newest checkpoint and come again without the offending slots."""
    spike: float = setting(0.0, at_least=0)
    """A loss so many standard deviations above its running mean is a spike; 0: none is."""
    window: int = setting(100, at_least=2)
    """Steps over which that mean and deviation run (exponentially), and before which nothing is called a spike."""
    most: int = setting(10, at_least=1)
    """So many steps may be skipped, or times gone back, in a run; one more ends it."""


@dataclass(frozen=True, kw_only=True)
class Validation(Section):
    """When to validate, on how much, and what follows from it."""

    name: ClassVar[str] = "validation"

    every: int = setting(100, at_least=0)
    """Steps between two validations; 0: only at the end."""
    samples: int = setting(512, at_least=0)
    """Validation samples, always the same; 0: all of them."""
    metric: str = setting("val_loss")
    """The metric by which a checkpoint is `best` and by which training may stop early."""
    direction: Literal["min", "max"] = setting("min")
    """Whether a smaller or a larger metric is better."""
    patience: int = setting(0, at_least=0)
    """Validations without improvement after which to stop early; 0: never."""

    def cost(self, value: float | None) -> float:
        """Returns a value of the metric as `cost_of` does."""
        return cost_of(value, self.direction)


def cost_of(value: float | None, direction: Literal["min", "max"] = "min") -> float:
    """Returns a figure as one of which less is better; infinite, and so never the best, if it is none or not finite."""
    if value is None or not math.isfinite(value):
        return math.inf
    return value if direction == "min" else -value


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """When to save, and how much to keep."""

    name: ClassVar[str] = "checkpoint"

    every: int = setting(200, at_least=0)
    """Steps between two checkpoints; 0: none at all, not even at the end."""
    keep: int = setting(3, at_least=1)
    """Newest checkpoints whose data is kept, besides the best; manifests are kept for ever."""
    failures: int = setting(3, at_least=1, since="0.2")
    """Saves in a row that the storage may refuse before the run fails. Each is a warning, and the next save tries again; the
    last one of a run must succeed."""
