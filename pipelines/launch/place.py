"""Where a run lies: its storage as an absolute place, and its name.

config, storage = locate(parsed)                          # config.storage "/home/me/runs", config.run "lm_python-1f3a90c2"
"""

import os
from dataclasses import replace

from raystride.pipelines.cluster.internals import in_submitted_job
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.files import Folder


def locate(parsed: Parsed[Config]) -> tuple[Config, Folder]:
    """The settings with the run's name and absolute places, and the storage.

    Inside a submitted job the working directory is a temporary package, so relative places go to $RAYSTRIDE_STORAGE or
    ~/raystride on the head. Raises SettingError for an address whose password nothing gives again.
    """
    unused = () if parsed.settings.record.mlflow else ("record.mlflow_uri",)
    config = parsed.settings.filled(optional=("data.test_source", *unused))
    base = os.environ.get("RAYSTRIDE_STORAGE") or (os.path.expanduser("~/raystride") if in_submitted_job() else None)
    storage = Folder.at(config.storage, base)
    return replace(config, storage=storage.uri, run=config.run or config.default_run(parsed.preset)), storage
