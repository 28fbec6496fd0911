"""Settings of adapters: small matrices beside the frozen ones of a base (LoRA, Hu et al., 2021), by PEFT's names."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from raystride.pipelines.config.model import ModelConfig
from raystride.pipelines.config.run import ScalingConfig
from raystride.pipelines.config.section import Section, names_with, setting
from raystride.pipelines.config.strategies import STRATEGIES
from raystride.pipelines.config.train import TrainConfig
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.storage.folder import absolute_uri

ALL_LINEAR = "all-linear"
_OF_ADAPTERS = ("rank", "alpha", "rslora", "targets", "init")
OWN = ("seed", "data.", "optimizer.", "train.", "guard.", *(f"lora.{name}" for name in _OF_ADAPTERS))
"""Settings in which adapters on one base may differ, or names that begin so."""
_OF_STEPS = ("precision", "compile", "activation_checkpointing", "exact", "deterministic")
SHARED = ("lora.init_from", *(f"train.{name}" for name in _OF_STEPS))
"""Among those the ones in which they may not."""

_ALONE = ("preference", "classification", "translation", "images")
"""Our tasks with networks that cannot train concurrently; nothing is known here of a task of one's own."""


def is_shared(key: str) -> bool:
    """Whether adapters that are trained beside each other on one base all have the same value of a setting."""
    return key.startswith(SHARED) or not key.startswith(OWN)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """LoRA adapters: adapted layers and their parameters. The base is the model of `model.init_from`."""

    name: ClassVar[str] = "lora"

    rank: int = setting(0, at_least=0, fixed=True, since="0.3", also="lora_r lora_rank r")
    """Rank of the adapters. A weight changes by scale x B A; the rank is the number of rows of A and of columns of B. 0: no
    adapters, all weights are trained."""
    alpha: float = setting(16.0, above=0, fixed=True, since="0.3", also="lora_alpha")
    """Numerator of the adapters' scale, alpha / rank."""
    dropout: float = setting(0.0, at_least=0, below=1, fixed=True, since="0.3", also="lora_dropout")
    """Dropout probability of an adapter's input in training."""
    targets: tuple[str, ...] | str = setting(
        ALL_LINEAR, fixed=True, since="0.3", also="target_modules lora_target_modules lora_target"
    )
    """Layers with an adapter, by name. Names are Hugging Face's (`q_proj`, `mlp.down_proj`) or ours (`attention.q`,
    `feed_forward.down`), complete or the part after a dot. `all-linear`: all linear layers except the head."""
    rslora: bool = setting(False, fixed=True, since="0.3")
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski, 2023). Large ranks then learn as fast as small ones."""
    dora: bool = setting(False, fixed=True, since="0.3")
    """Learn the norm of each row of the changed weight (DoRA, Liu et al., 2024)."""
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = setting("kaiming", fixed=True, since="0.3")
    """Initialisation of A and B. `kaiming` (PEFT's `true`) and `gaussian`: A is random and B is 0. `pissa`: the largest
    singular vectors of the weight (Meng et al., 2024). `olora`: its QR decomposition (Buyukakyuz, 2024)."""
    base_precision: Literal["fp32", "bf16"] = setting("fp32", fixed=True, since="0.3")
    """Storage precision of the frozen matrices. `bf16` takes half the memory. Adapters are always fp32."""
    init_from: str | None = setting(None, fixed=True, since="0.3")
    """Folder of an adapter in PEFT's layout that a new run starts from. None: initialised by `lora.init`."""
    adapters: int = setting(1, at_least=1, at_most=256, since="0.3", shapes_result=True)
    """Number of adapters trained concurrently on one base, each as a separate run. `lora.variants` sets their
    differences."""
    variants: dict[str, Any] | None = setting(None, since="0.3", was="lora.each", renamed="0.3", shapes_result=True)
    """Settings in which the concurrent adapters differ. Setting names, each with a list of `lora.adapters` values."""

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or does not work with another of this section."""
        super().__post_init__()
        if not self.targets:
            raise self.error("targets", f"must name at least one layer, or be `{ALL_LINEAR}`")
        if self.init in ("pissa", "olora"):
            if self.dora:
                raise self.error("init", "must be `kaiming` or `gaussian` with lora.dora: PEFT's layout cannot hold both")
            if self.base_precision != "fp32":
                raise self.error(
                    "init", "must be `kaiming` or `gaussian` with lora.base_precision `bf16`, which rounds what is left"
                )
            if self.init_from:
                raise self.error("init", "must be `kaiming` with lora.init_from, which says how A and B begin")
        if not self.rank and self.adapters > 1:
            raise self.error("adapters", "must be 1 with lora.rank 0")
        if not self.rank and self.init_from:
            raise self.error("init_from", "needs the lora.rank of that adapter, above 0")
        self._check_variants()
        if self.init_from:
            # Workers have other working directories than the one in which this was typed.
            object.__setattr__(self, "init_from", absolute_uri(self.init_from))

    def _check_variants(self) -> None:
        variants = self.variants or {}
        if self.adapters == 1 and variants:
            raise self.error("variants", "needs lora.adapters, how many values each of its settings has")
        if self.adapters > 1 and not variants:
            raise self.error("adapters", "needs lora.variants: the settings in which the adapters differ")
        for key, values in variants.items():
            if is_shared(key):
                raise self.error("variants", f"names {key}, which is the base's, or how all are computed: adapters share it")
            if not isinstance(values, list | tuple) or len(values) != self.adapters:
                raise self.error("variants", f"must give `{key}` a list of lora.adapters, {self.adapters}, values")

    @property
    def all_linear(self) -> bool:
        """Whether every linear layer but the head gets an adapter."""
        return self.targets in (ALL_LINEAR, (ALL_LINEAR,))

    @property
    def named_layers(self) -> tuple[str, ...]:
        """The layers that are named one by one."""
        if self.all_linear:
            return ()
        return (self.targets,) if isinstance(self.targets, str) else self.targets

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


def refuse_with_lora(lora: LoraConfig, model: ModelConfig, train: TrainConfig, scaling: ScalingConfig, task: str) -> None:
    """Raises SettingError for settings that do not work with adapters, with the nearest that do."""
    if not lora.rank:
        return
    if not model.init_from:
        raise lora.error("rank", "needs model.init_from, the base: a folder of Hugging Face's, or a run's")
    if scaling.kind.runs_engine:
        others = names_with(STRATEGIES, "runs_engine", False)
        raise scaling.error("strategy", f"must be {others} with lora.rank, whose base has no gradient")
    for name in ("pipeline", "context"):
        if getattr(scaling, name) > 1:
            raise scaling.error(name, "must be 1 with lora.rank: use scaling.tensor, `ddp` or `fsdp`")
    if scaling.mesh == "auto":
        raise scaling.error("mesh", "must be `given` with lora.rank")
    if scaling.tensor > 1:
        if scaling.strategy == "fsdp":
            raise scaling.error("strategy", "must be `ddp` with lora.rank and scaling.tensor")
        if lora.dora:
            raise lora.error("dora", "must be false with scaling.tensor, where no worker has a whole row of each weight")
        if lora.init in ("pissa", "olora"):
            raise lora.error("init", "must be `kaiming` or `gaussian` with scaling.tensor: no worker has the whole weights")
    if train.precision == "pure_bf16":
        raise train.error("precision", "must be `bf16` with lora.rank; lora.base_precision bf16 holds the base in bfloat16")
    if lora.adapters > 1:
        refuse_sharing(task, train)
        if scaling.strategy not in ("auto", "single") or scaling.workers not in ("auto", 1):
            raise lora.error("adapters", "must be 1 with several workers: many at once share one worker's base")
        for section, share in ((model, model.dropout), (lora, lora.dropout)):
            if share:
                raise section.error("dropout", "must be 0 with lora.adapters above 1, whose masks would be another run's")
        if lora.dora or lora.init in ("pissa", "olora"):
            raise lora.error("adapters", "must be 1 with lora.dora, and with lora.init `pissa` and `olora`")


def refuse_sharing(task: str, train: TrainConfig) -> None:
    """Raises SettingError for a task or settings with which adapters cannot share a base in one process."""
    if task in _ALONE:
        raise SettingError(
            f"task is {task!r}: it must be `language_model` or `completion` for adapters that share a base",
            setting="task",
            value=task,
        )
    if train.exact:
        raise train.error("exact", "must be false for adapters that share a base, whose sums are in the order of PyTorch")
