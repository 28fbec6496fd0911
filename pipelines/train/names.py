"""How the files of a run's checkpoints are called, for those who read them without PyTorch.

checkpoints.read_json(f"{step_name(500)}/{MANIFEST}")      # checkpoints/step-00000500/MANIFEST.json
newest = checkpoint_names(checkpoints.names())[-1]         # "step-00000500"
"""

import re
from collections.abc import Iterable

MANIFEST = "MANIFEST.json"
"""The last file of a checkpoint to be written: without it there is none."""

BEFORE_PRODUCTS = "as before 0.3"
"""What an exact run's checkpoints say of its linear products where it began before they were measured."""


_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint's folder; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """Returns those names that are checkpoints' folders, each once, by their steps: from 10^8 on text has another order."""
    found = {name: step for name in names if (step := step_of(name)) is not None}
    return sorted(found, key=found.__getitem__)
