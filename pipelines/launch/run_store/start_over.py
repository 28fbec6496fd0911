"""Starts a run over under its own name (`launch.start_over`): its checkpoints are moved aside, and nothing is deleted.

A command may be started many times: by Slurm, by Ray, after a reboot. So the setting holds for one attempt: the start after
one that started over goes on.

starts_over(config.launch, folder, screen.log)            # in the driver, before anything expensive
move_checkpoints_aside(folder, attempt, screen.log)       # runs/mine/checkpoints-before-20261121-101500-3f2a
"""

import os
from collections.abc import Callable

from raystride.pipelines.config import LaunchConfig, SettingError
from raystride.pipelines.launch.run_store.resume import read_previous_attempt
from raystride.pipelines.system.storage.folder import Folder

CHECKPOINTS = "checkpoints"


def starts_over(launch: LaunchConfig, folder: Folder, log: Callable[[str], None]) -> bool:
    """Returns whether this attempt begins at step 0; logs if `launch.start_over` has had its effect already.

    Raises SettingError if the storage cannot rename the folder of the checkpoints.
    """
    if not launch.start_over:
        return False
    if earlier := _previous_attempt_that_started_over(folder):
        log(
            f"launch.start_over has had its effect: attempt {earlier} started over, and this one goes on. To start over "
            "again, start the run without it first"
        )
        return False
    if folder.local is None and (folder / CHECKPOINTS).names():
        raise SettingError(
            f"launch.start_over is true, and a store cannot rename the checkpoints in {folder / CHECKPOINTS}: give this run "
            "another name with --run NAME",
            setting="launch.start_over",
            value=True,
            allowed=False,
        )
    return True


def move_checkpoints_aside(folder: Folder, attempt: str, log: Callable[[str], None]) -> None:
    """Renames the folder of a run's checkpoints, if there is one, after the attempt before which they were made."""
    if folder.local is None or not folder.exists(CHECKPOINTS):
        return
    aside = f"{CHECKPOINTS}-before-{attempt}"
    os.rename(folder.local / CHECKPOINTS, folder.local / aside)
    log(f"starting over: the earlier checkpoints are in {folder / aside}, and nothing was deleted")


def _previous_attempt_that_started_over(folder: Folder) -> str:
    """Returns the name of the newest attempt if its own settings say that it started over, else ""."""
    attempts = folder / "attempts"
    newest = next(reversed(attempts.names()), "")
    before = read_previous_attempt(attempts / newest) if newest else None
    return newest if before and before.config.launch.start_over else ""
