"""Where a run lies: its storage as an absolute place, and its name.

config, storage = locate(parsed)                          # config.storage "/home/me/runs", config.run "lm_python-1f3a90c2"
"""

import json
import os
from dataclasses import replace

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.files import Folder

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In the environment of a submitted job: what Ray tells of it, as JSON."""


def locate(parsed: Parsed[Config]) -> tuple[Config, Folder]:
    """The settings with the run's name and absolute places, and the storage.

    Inside a submitted job the working directory is a temporary package, so relative places go to $RAYSTRIDE_STORAGE or
    ~/raystride on the head.
    """
    config = parsed.settings
    base = os.environ.get("RAYSTRIDE_STORAGE") or (os.path.expanduser("~/raystride") if JOB in os.environ else None)
    storage = Folder.at(config.storage, base)
    return replace(config, storage=storage.uri, run=config.run or config.default_run(parsed.preset)), storage


def submission_id() -> str | None:
    """The name under which Ray knows the submitted job that this is; None for any other process."""
    text = os.environ.get(JOB)
    return json.loads(text).get("metadata", {}).get("job_submission_id") if text else None
