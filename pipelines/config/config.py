"""All settings of a training in one object, their comparison on resume, and the run's default name."""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from raystride.pipelines.config.combinations import (
    refuse_average,
    refuse_branch,
    refuse_chats,
    refuse_combinations,
    refuse_early_start,
    refuse_mesh_of_model,
    refuse_optimizer,
    refuse_schedule,
    refuse_teacher,
    refuse_with_experts,
    refuse_with_task,
)
from raystride.pipelines.config.data import DataConfig, TokenizerConfig
from raystride.pipelines.config.lora import LoraConfig, refuse_with_lora
from raystride.pipelines.config.mixture import defines_source, mixture_entries, refuse_mixture
from raystride.pipelines.config.model import ModelConfig
from raystride.pipelines.config.renamed import old_names, oldest_names, with_current_names
from raystride.pipelines.config.run import (
    DecodingConfig,
    FitConfig,
    LaunchConfig,
    ProfileConfig,
    RecordConfig,
    ResumeConfig,
    SampleConfig,
    ScalingConfig,
    is_argument,
)
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.config.train import (
    CheckpointConfig,
    GuardConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.system.credentials import redact_all_uris, strip_credentials

MAX_NAME_BYTES = 200
"""Longest name of a run: most file systems take 255 bytes, and trials and temporary files add endings."""
STORAGE_FILES = ("mlflow.db", "mlartifacts")
"""Beginnings of names that a storage uses beside its runs."""


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """All settings of a training. Frozen; `dataclasses.replace` makes a changed copy."""

    name: ClassVar[str] = ""

    plugins: tuple[str, ...] = setting((), since="0.2")
    """Modules or files that register your own tasks, sources and observers. A module is an import path (`my_project.tasks`),
    a file a path (`tasks.py`); `__main__` stands for the script that trained the run."""
    task: str = setting("language_model", fixed=True, also="task_type task_name")
    """Training task. `language_model`, another task of `pipelines/data/tasks`, or one registered by a plug-in. `auto`
    decides by the columns of the data: `completion` for chats (messages) and for pairs (prompt, completion),
    `preference` for preference pairs (prompt, chosen, rejected), and otherwise `language_model` (text)."""
    run: str | None = setting(None, also="run_name name exp_name job_name resume resume_from_checkpoint ckpt_path")
    """Name of the run and of its folder. None: the preset's name and a hash of the settings on which the result depends, so
    that other ones train another run. Length (`steps`, `epochs`, `hours`), `scaling`, `launch`, kernels and records are not
    among them."""
    storage: str = setting(
        "runs",
        also=(
            "output_dir out_dir save_dir storage_path default_root_dir work_dir dump_folder "
            "results_dir save_folder output_path"
        ),
    )
    """Folder or filesystem URI that holds runs and prepared data."""
    seed: int = setting(0, at_least=0, below=2**63, fixed=True, also="random_seed data_seed manual_seed")
    """Seed of initialisation, data order and dropout."""
    repeat: str | None = setting(None, since="0.4")
    """Name of a run of this storage that gives a new run its measured choices: number of workers and threads, linear
    products, attention. A choice that this machine does not support is logged, and made anew."""
    data: DataConfig = DataConfig()
    """Data source, validation split, and order of samples."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Conversion of text to token ids."""
    model: ModelConfig = ModelConfig()
    """Architecture and size of the network."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters (LoRA), trained while the base model stays frozen."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Loss function."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimiser and learning-rate schedule."""
    train: TrainConfig = TrainConfig()
    """Length of training, batch size and numerical precision."""
    guard: GuardConfig = GuardConfig()
    """Handling of bad steps: non-finite values and loss spikes."""
    validation: ValidationConfig = ValidationConfig()
    """Frequency of validation, best metric and early stopping."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Frequency and number of checkpoints."""
    scaling: ScalingConfig = ScalingConfig()
    """Number of workers and parallelism."""
    launch: LaunchConfig = LaunchConfig()
    """Start, restart and supervision of the workers."""
    resume: ResumeConfig = ResumeConfig()
    """Resuming: checks of the run's folder, and accepted differences."""
    record: RecordConfig = RecordConfig()
    """Logging: MLflow, TensorBoard and hardware metrics."""
    profile: ProfileConfig = ProfileConfig()
    """Profiling of selected steps."""
    sample: SampleConfig = SampleConfig()
    """Text generated at the end of training."""
    decoding: DecodingConfig = DecodingConfig()
    """Decoding of translations: greedy or beam search."""
    fit: FitConfig = FitConfig()
    """Arguments of a model and dataset of your own."""

    def __post_init__(self) -> None:
        """Raises SettingError if settings of several sections do not work together, or `run` cannot be a folder's name."""
        super().__post_init__()
        if self.lora.variants:
            variants = with_current_names(self.lora.variants, Config)
            object.__setattr__(self, "lora", replace(self.lora, variants=variants))
        workers = self.scaling.workers if self.scaling.mesh == "given" else "auto"
        if isinstance(workers, int) and workers // self.scaling.group > self.train.slots:
            raise self.scaling.error(
                "workers",
                f"must be at most train.slots, {self.train.slots}, since workers share a step's slots: raise train.slots "
                f"(and lower train.slot_size, {self.train.slot_size}, to keep the batch)",
            )
        refuse_combinations(self.train, self.scaling, self.guard, self.checkpoint, frozen=self.lora.rank > 0)
        refuse_with_lora(self.lora, self.model, self.train, self.scaling, self.task)
        refuse_with_task(self.task, self.model, self.objective, self.train)
        refuse_chats(self.task, self.data, self.tokenizer)
        refuse_mesh_of_model(self.task, self.model, self.scaling)
        refuse_with_experts(self.model, self.train, self.scaling, self.optimizer, has_adapters=self.lora.rank > 0)
        refuse_mixture(self.data, self.train.epochs)
        refuse_early_start(self.data, self.train)
        if self.profile.tool == "ncu" and self.launch.mode != "inline":
            raise self.profile.error(
                "tool", "needs launch.mode inline (--launch inline), as Nsight Compute has to start the process that trains"
            )
        if self.scaling.min_nodes > 1 and self.launch.mode == "inline":
            raise self.scaling.error("min_nodes", "must be 0 or 1 with launch.mode inline, as that has one node")
        refuse_schedule(self.optimizer, self.train)
        refuse_optimizer(self.optimizer, self.scaling, has_adapters=self.lora.rank > 0)
        refuse_average(self.train, self.validation)
        has_several_adapters = self.lora.adapters > 1
        refuse_teacher(self.task, self.objective, self.train, self.scaling, has_several_adapters=has_several_adapters)
        refuse_branch(self.train, self.run, has_several_adapters=has_several_adapters)
        ending = f"-{self.lora.adapters - 1}" if self.lora.adapters > 1 else ""
        if self.run is not None and (fault := name_fault(self.run, ending)):
            raise self.error("run", fault)

    @property
    def masks_by_place(self) -> bool:
        """Whether dropout's masks follow from their place and not from how many were drawn before."""
        masks = self.train.dropout_masks
        meshed = self.scaling.group > 1 or self.scaling.mesh == "auto"
        return meshed if masks in ("auto", "slot") else masks == "place"

    def idle_settings(self) -> Iterator[str]:
        """Yields the settings, under their full names, that change nothing in a run and are therefore not stored.

        Versions that do not know their values can then read the rest.
        """
        if self.train.dropout_masks == "slot" and not (self.model.dropout or self.lora.dropout):
            yield "train.dropout_masks"
        yield from (f"record.{name}" for name in ("owner", "tags") if not getattr(self.record, name))

    def by_source(self) -> "dict[str, Config]":
        """Returns the settings for each source of a mixture, as for a training on it alone; for one source these, as ""."""
        return {name: replace(self, data=each.data) for name, each in mixture_entries(self.data).items()} or {"": self}

    def flat(self) -> dict[str, Any]:
        """Returns every setting under its full name, `train.steps` for instance, without passwords and keys."""
        return {key: redact_all_uris(value) for key, value in _flatten(asdict(self))}

    def fixed_settings(self) -> dict[str, Any]:
        """Returns the settings, by full name, that may not differ when the run is resumed, without passwords and keys."""
        fixed = _marked_keys(type(self), "fixed")
        return {
            key: strip_credentials(value)
            for key, value in self.flat().items()
            if key in fixed or defines_source(key) or is_argument(key)
        }

    def naming_settings(self) -> dict[str, Any]:
        """Returns the settings that names are hashed from, under their first full names.

        Settings that were added later (`since`) are among them only if they differ from their defaults.
        """
        later, first = _later_defaults(type(self)), oldest_names(type(self))
        flat = self.flat() | {"validation.direction": self.validation.named_direction}  # earlier versions had no `auto`
        kept = {key: value for key, value in flat.items() if key not in later or value != later[key]}
        return {first.get(key, key): strip_credentials(value) for key, value in kept.items()}

    def free_result_settings(self) -> dict[str, Any]:
        """Returns the settings, under their full names, that a resumed run may change and that shape its result.

        A run that began with `train.dropout_masks auto` goes on with it under `slot`, so these are one.
        """
        shaping = _marked_keys(type(self), "shapes_result")
        masks = self.train.dropout_masks.replace("slot", "auto")
        flat = self.flat() | {"validation.direction": self.validation.named_direction, "train.dropout_masks": masks}
        return {key: strip_credentials(value) for key, value in flat.items() if _is_among(key, shaping)}

    def default_run(self, preset: str) -> str:
        """Returns the default name of a run: the preset's and 8 hexadecimal digits of settings that shape the result."""
        marked = _marked_keys(type(self), "fixed") | _marked_keys(type(self), "shapes_result")
        return f"{preset}-{self._hash_settings(lambda key: _is_among(key, marked))}"

    def default_run_of_0_3(self, preset: str) -> str:
        """Returns the default name of versions until 0.3: from the fixed settings and a mixture's weights alone."""
        fixed, mixed = _marked_keys(type(self), "fixed"), ("data.sources.", "data.weights", "data.curriculum")
        return f"{preset}-{self._hash_settings(lambda key: key in fixed or key.startswith(mixed) or is_argument(key))}"

    def _hash_settings(self, is_kept: Callable[[str], bool]) -> str:
        """Returns 8 hexadecimal digits of the settings with a full name that `is_kept` accepts."""
        current = old_names(type(self))
        kept = {key: value for key, value in self.naming_settings().items() if is_kept(current.get(key, (key,))[0])}
        text = json.dumps(kept, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def name_fault(name: str, ending: str = "") -> str | None:
    """Returns the rule that a run's name, its folder's, breaks; None if it can be used.

    `ending`: suffix of the names of runs that it starts.
    """
    if not name.strip() or set(name) & set("/\\") or name[0] == ".":
        return "must be a folder's name without slashes that does not begin with a dot"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        return "must not hold control characters or line breaks"
    if (size := len(name.encode("utf-8", "replace"))) > (most := MAX_NAME_BYTES - len(ending)):
        return f"must be at most {most} bytes long and has {size}"
    if name.startswith(STORAGE_FILES):
        return f"must not begin with {' or '.join(STORAGE_FILES)}, which the storage itself uses"
    return None


def _flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _later_defaults(cls: type, prefix: str = "") -> dict[str, Any]:
    """Returns the settings that were added later (`since`), with their defaults."""
    found: dict[str, Any] = {}
    for item in fields(cls):
        if isinstance(item.type, type) and issubclass(item.type, Section):
            found |= _later_defaults(item.type, f"{prefix}{item.name}.")
        elif item.metadata.get("since"):
            found[f"{prefix}{item.name}"] = item.default
    return found


def _marked_keys(cls: type, mark: str, prefix: str = "") -> set[str]:
    """Returns the full names of the settings that are declared with `mark`."""
    keys = set()
    for item in fields(cls):
        if isinstance(item.type, type) and issubclass(item.type, Section):
            keys |= _marked_keys(item.type, mark, f"{prefix}{item.name}.")
        elif item.metadata.get(mark):
            keys.add(f"{prefix}{item.name}")
    return keys


def _is_among(key: str, names: set[str]) -> bool:
    """Returns whether a full name is one of these, or that of an entry in one: `lora.variants.optimizer.learning_rate`."""
    return key in names or any(key.startswith(f"{name}.") for name in names)
