"""Folder of a configuration's prepared data: its location in the storage, and whether it is complete.

prepared_folder(config, storage, NO_KEPT_PREPARATIONS)    # <storage>/.prepared/<fingerprint>
is_prepared(config, storage)                              # with data.start_after_mib: nothing is left to prepare
"""

from raystride.pipelines.config import Config
from raystride.pipelines.prepare.fingerprint import NO_KEPT_PREPARATIONS, KeptPreparations, identity
from raystride.pipelines.prepare.one_source import load_finished_manifest
from raystride.pipelines.storage.folder import Folder
from raystride.pipelines.tasks import build_task


def is_prepared(config: Config, storage: Folder, kept: KeptPreparations = NO_KEPT_PREPARATIONS) -> bool:
    """Returns whether the data that a training would prepare concurrently (`data.start_after_mib`) is complete.

    Raises SettingError, DataError.
    """
    return config.data.start_after_mib > 0 and load_finished_manifest(prepared_folder(config, storage, kept)) is not None


def prepared_folder(config: Config, storage: Folder, kept: KeptPreparations) -> Folder:
    """Returns the folder of the prepared data. Raises SettingError, DataError."""
    return storage / ".prepared" / identity(config, build_task(config), kept, storage).data
