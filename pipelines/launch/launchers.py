"""Programs that start another one several times, a process a worker: Raystride needs none, it starts its workers itself."""

import os

from raystride.pipelines.config import SettingError
from raystride.pipelines.system.output import print_warning

_LAUNCHERS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),  # `accelerate launch` is one, too
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""By launcher: a variable that it sets, and those with the number of this process and of all."""


def check_launcher() -> None:
    """Refuses to be a later one of the processes that torchrun or mpirun has started, and warns in the first.

    Not in a step of Slurm, whose variables other programs in it inherit. Raises SettingError.
    """
    for launcher in ("torchrun", "mpirun"):
        if (found := _find_process(launcher)) is None:
            continue
        rank, count = found
        advice = f"Raystride starts its workers itself: run it once, without {launcher}, with --scaling.workers {count}"
        if rank:
            raise SettingError(
                f"this is process {rank + 1} of {count} that {launcher} has started. {advice}", setting="scaling.workers"
            )
        print_warning(f"{launcher} has started this program {count} times. {advice}")


def launcher_hint() -> str:
    """Returns what to do if a launcher has started this process beside others, for the refusal of a second one; or ""."""
    for launcher in _LAUNCHERS:
        if found := _find_process(launcher):
            return f". {launcher} has started it {found[1]} times: run it once, with --scaling.workers {found[1]}"
    return ""


def _find_process(launcher: str) -> tuple[int, int] | None:
    """Returns the number of this process from 0, and of all that the launcher has started; None if it has not, or one."""
    mark, rank, count = (os.environ.get(name, "") for name in _LAUNCHERS[launcher])
    if mark and rank.isdecimal() and count.isdecimal() and int(count) > 1:
        return int(rank), int(count)
    return None
