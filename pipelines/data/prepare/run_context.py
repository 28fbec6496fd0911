"""Context of a run: the settings, the storage, the log and the kept preparations that the driver's steps share.

context = RunContext(config, storage, print)
context.prepared_folder                                   # <storage>/.prepared/<fingerprint>
context = context.with_config(chosen)                     # a later step has chosen the mesh
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from raystride.pipelines.config import Config, DataConfig
from raystride.pipelines.data.prepare.fingerprint import NO_KEPT_PREPARATIONS, Identity, KeptPreparations, identity
from raystride.pipelines.data.prepare.manifest import load_finished_manifest
from raystride.pipelines.data.prepare.opened_sources import OpenedSources, Sources
from raystride.pipelines.data.sources.pieces import Part
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tasks.task import Task
from raystride.pipelines.system.storage.folder import Folder

Log = Callable[[str], None]
OnRay = bool | Literal["large"]
"""Whether Ray Data prepares: always, never, or only data that is worth its start; see `one_source.is_worth_ray`."""


@dataclass(frozen=True)
class RunContext:
    """Shared by the checks, the preparation and the training of one run."""

    config: Config
    """Settings, as far as they are decided."""
    storage: Folder
    """Folder of all runs, with the prepared data in `.prepared`."""
    log: Log = print
    """Receives each line of the driver's output."""
    kept: KeptPreparations = NO_KEPT_PREPARATIONS
    """Preparations with which a resumed run goes on."""
    notice: Log = print
    """Receives the lines that a program must not miss either: what differs between a run and this start of it."""
    opened: OpenedSources = field(default_factory=OpenedSources, compare=False, repr=False)
    """Sources that are open already."""

    def with_config(self, config: Config) -> "RunContext":
        """Returns the context with other settings."""
        return replace(self, config=config)

    @property
    def run_folder(self) -> Folder:
        """Folder of the run, which must have a name."""
        return self.storage / str(self.config.run)

    @property
    def task(self) -> Task:
        """Task of the settings. Raises SettingError."""
        return build_task(self.config)

    @property
    def is_inline(self) -> bool:
        """Whether everything runs in this process, without Ray."""
        return self.config.launch.mode == "inline"

    @property
    def on_ray(self) -> OnRay:
        """Whether Ray Data prepares the run's data: never inline, else large data."""
        return False if self.is_inline else "large"

    def identity(self, task: Task | None = None) -> Identity:
        """Returns the fingerprints of the run's data, for another task than that of the settings if one is given.

        Raises SettingError, DataError.
        """
        return identity(self.config, task or self.task, self.kept, self.storage, self.open_sources)

    def open_sources(self, config: Config, task: Task) -> Sources:
        """Opens the sources of settings, once a command. Raises DataError."""
        return self.opened.open(config, task, self.log)

    def check_sources(self, data: DataConfig, sources: Sources) -> None:
        """Raises DataError for a source of settings that is visibly unreadable, unless faults are skipped."""
        self.opened.check(data, sources, self.log)

    def divide_sources(self, data: DataConfig, sources: Sources) -> tuple[Part, ...]:
        """Returns the parts of the sources of settings. Raises DataError."""
        return self.opened.divide(data, sources, self.log)

    @property
    def prepared_folder(self) -> Folder:
        """Folder of the run's prepared data, complete or not. Raises SettingError, DataError."""
        return self.storage / ".prepared" / self.identity().data

    @property
    def is_prepared(self) -> bool:
        """Whether the data that a training would prepare concurrently (`data.start_after_mib`) is complete.

        Raises SettingError, DataError.
        """
        return self.config.data.start_after_mib > 0 and load_finished_manifest(self.prepared_folder) is not None
