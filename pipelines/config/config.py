"""All settings of a training in one object, what may change on resume, and the run's default name."""

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from raystride.pipelines.config.combinations import (
    refuse_chats,
    refuse_combinations,
    refuse_early_start,
    refuse_mesh_of_model,
    refuse_with_task,
)
from raystride.pipelines.config.data import Data, Tokenizer
from raystride.pipelines.config.lora import Lora, refuse_with_lora
from raystride.pipelines.config.mixture import defines_source, mixture_entries, refuse_mixture
from raystride.pipelines.config.model import Model
from raystride.pipelines.config.profile import Profile
from raystride.pipelines.config.renamed import old_names
from raystride.pipelines.config.run import Decoding, Launch, Record, Sample, Scaling
from raystride.pipelines.config.section import Section, setting
from raystride.pipelines.config.train import Checkpoint, Guard, Objective, Optimizer, Train, Validation
from raystride.pipelines.credentials import masked_all, stripped

MAX_NAME_BYTES = 200
"""Longest name of a run: most file systems take 255 bytes, and trials and temporary files add endings."""
STORAGE_FILES = ("mlflow.db", "mlartifacts")
"""Beginnings of names that a storage uses beside its runs."""


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything that a training is told. Frozen; `dataclasses.replace` makes a changed copy."""

    name: ClassVar[str] = ""

    plugins: tuple[str, ...] = setting((), since="0.2")
    """Modules (`my_project.tasks`) or files (`tasks.py`) that register tasks, sources and observers of your own; `__main__`
    stands for the script that trained the run."""
    task: str = setting("language_model", fixed=True)
    """What is trained: `language_model`, another of the tasks in `pipelines/tasks`, or one that a plug-in registers."""
    run: str | None = setting(None)
    """The run's name and folder; when not given, the preset's name and a hash of the settings that may not change."""
    storage: str = setting("runs")
    """Folder or filesystem URI under which runs and prepared data lie."""
    seed: int = setting(0, at_least=0, below=2**63, fixed=True)
    """Seed of initialisation, order and dropout."""
    data: Data = Data()
    """What is read and how it becomes samples."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes ids."""
    model: Model = Model()
    """The network."""
    lora: Lora = Lora()
    """Adapters that are trained in its place."""
    objective: Objective = Objective()
    """What is minimised."""
    optimizer: Optimizer = Optimizer()
    """The update rule and its learning rate."""
    train: Train = Train()
    """How long to train, and what a step is made of."""
    guard: Guard = Guard()
    """What happens when a step is bad."""
    validation: Validation = Validation()
    """When to validate."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save."""
    scaling: Scaling = Scaling()
    """How many workers."""
    launch: Launch = Launch()
    """How they are started."""
    record: Record = Record()
    """What is written down."""
    profile: Profile = Profile()
    """Which steps are looked at closely."""
    sample: Sample = Sample()
    """Text written at the end."""
    decoding: Decoding = Decoding()
    """How a translator chooses its words."""

    def __post_init__(self) -> None:
        """Raises SettingError where settings of several sections do not go together, or `run` cannot be a folder's name."""
        super().__post_init__()
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
        refuse_mixture(self.data, self.train.epochs)
        refuse_early_start(self.data, self.train)
        if self.profile.tool == "ncu" and self.launch.mode != "inline":
            raise self.profile.error(
                "tool", "needs launch.mode inline (--launch inline), as Nsight Compute has to start the process that trains"
            )
        endless = not self.train.steps and not self.train.epochs and not self.optimizer.decay_steps
        if endless and self.optimizer.schedule in ("cosine", "linear"):
            raise self.optimizer.error(
                "decay_steps", "must be given for a schedule that falls when only train.hours ends the run"
            )
        ending = f"-{self.lora.adapters - 1}" if self.lora.adapters > 1 else ""
        if self.run is not None and (fault := name_fault(self.run, ending)):
            raise self.error("run", fault)

    @property
    def masks_by_place(self) -> bool:
        """Whether dropout's masks follow from their place and not from how many were drawn before."""
        masks = self.train.dropout_masks
        meshed = self.scaling.group > 1 or self.scaling.mesh == "auto"
        return meshed if masks == "auto" else masks == "place"

    def by_source(self) -> "dict[str, Config]":
        """The settings of each source of a mixture, as of a training on it alone; of one source these, as ""."""
        return {name: replace(self, data=each.data) for name, each in mixture_entries(self.data).items()} or {"": self}

    def flat(self) -> dict[str, Any]:
        """Every setting under its full name, `train.steps` for instance, without passwords and keys, to be written down."""
        return {key: masked_all(value) for key, value in _flatten(asdict(self))}

    def fixed(self) -> dict[str, Any]:
        """The settings, under their full names, that may not differ when the run is resumed; with other passwords
        or keys they are the same."""
        fixed = _fixed_keys(type(self))
        return {key: stripped(value) for key, value in self.flat().items() if key in fixed or defines_source(key)}

    def lasting(self) -> dict[str, Any]:
        """What names are made of: every setting under its first full name, later ones (`since`) only where they were
        changed."""
        later, first = _later_defaults(type(self)), {new: old for old, (new, _) in old_names(type(self)).items()}
        kept = {key: value for key, value in self.flat().items() if key not in later or value != later[key]}
        return {first.get(key, key): stripped(value) for key, value in kept.items()}

    def default_run(self, preset: str) -> str:
        """A run's name when none is given: the preset's name and 8 hexadecimal digits of the fixed settings."""
        old, fixed = old_names(type(self)), _fixed_keys(type(self))
        mixed = ("data.sources.", "data.weights", "data.curriculum")
        lasting = self.lasting()
        kept = {key: lasting[key] for key in lasting if old.get(key, (key,))[0] in fixed or key.startswith(mixed)}
        text = json.dumps(kept, sort_keys=True, default=str)
        return f"{preset}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def name_fault(name: str, ending: str = "") -> str | None:
    """Returns what a run's name, which is its folder's, must be and is not; None if it can be used.

    `ending`: what the names of runs that it starts have in addition.
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
    """The settings that were added later, with their defaults."""
    found: dict[str, Any] = {}
    for item in fields(cls):
        if isinstance(item.type, type) and issubclass(item.type, Section):
            found |= _later_defaults(item.type, f"{prefix}{item.name}.")
        elif item.metadata.get("since"):
            found[f"{prefix}{item.name}"] = item.default
    return found


def _fixed_keys(cls: type, prefix: str = "") -> set[str]:
    keys = set()
    for item in fields(cls):
        if isinstance(item.type, type) and issubclass(item.type, Section):
            keys |= _fixed_keys(item.type, f"{prefix}{item.name}.")
        elif item.metadata.get("fixed"):
            keys.add(f"{prefix}{item.name}")
    return keys
