"""The name of a run that is started without one.

name_run(config, "lm_python", storage)                    # "lm_python-1f3a90c2"
"""

import json
from dataclasses import replace

from raystride.pipelines.config import Config
from raystride.pipelines.config.attempts import SETTINGS_FILE
from raystride.pipelines.config.parse import with_settings
from raystride.pipelines.config.stored_run import read_run
from raystride.pipelines.system.storage.folder import Folder


def name_run(config: Config, preset: str, storage: Folder) -> str:
    """Returns the default name of these settings; that of 0.3, if the storage has such a run and its result is the same.

    Names of 0.3 leave out the learning rate and what else a resume may change. Raises SettingError if that run's settings
    are damaged.
    """
    name, earlier = config.default_run(preset), config.default_run_of_0_3(preset)
    if any((storage / str(own.run)).exists(SETTINGS_FILE) for own in expand_adapters(replace(config, run=name))):
        return name
    stored = [(own, _read_stored_settings(storage / str(own.run))) for own in expand_adapters(replace(config, run=earlier))]
    known = [(own, before) for own, before in stored if before]
    return earlier if known and all(_shaping(own) == _shaping(before) for own, before in known) else name


def expand_adapters(config: Config) -> list[Config]:
    """Returns the settings of each run: of several adapters these are named `<run>-0`, `<run>-1`, ...

    Raises SettingError for an invalid value.
    """
    variants, count = config.lora.variants or {}, config.lora.adapters
    if count == 1:
        return [config]
    base = replace(config, lora=replace(config.lora, adapters=1, variants=None))
    configs = [with_settings(base, {key: values[number] for key, values in variants.items()}) for number in range(count)]
    return [replace(adapter_config, run=f"{config.run}-{number}") for number, adapter_config in enumerate(configs)]


def _read_stored_settings(folder: Folder) -> Config | None:
    try:
        return read_run(folder).settings
    except FileNotFoundError:
        return None


def _shaping(config: Config) -> str:
    """Returns the free settings that shape a result, as JSON holds them."""
    return json.dumps(config.free_result_settings(), sort_keys=True, default=str)
