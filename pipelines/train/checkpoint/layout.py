"""File names of a run's checkpoints, for code that reads them without PyTorch.

read_sealed(checkpoints / step_name(500), MANIFEST)        # checkpoints/step-00000500/MANIFEST.json
newest = checkpoint_names(checkpoints.names())[-1]         # "step-00000500"
"""

import re
from collections.abc import Iterable

MANIFEST_KEYS = frozenset(
    [
        *("attempt", "bits", "commit", "data", "device", "fed", "files", "folder", "format", "lora", "order", "parent_step"),
        *("positions", "python", "run", "state", "step", "tensors", "threads", "versions", "world"),
    ]
)
"""All keys of manifests up to this version; one of a newer version may have more."""
MANIFEST = "MANIFEST.json"
"""The last file of a checkpoint to be written: without it there is no checkpoint."""

BEFORE_PRODUCTS = "as before 0.3"
"""Marks the linear products of an exact run that began before they were measured, in its checkpoints."""


_STEP = re.compile(r"step-(\d+)")


def step_name(step: int) -> str:
    """Returns the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """Returns the step of a checkpoint's folder; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """Returns the names that are checkpoint folders, each once, sorted by step: from 10^8 on text sorts differently."""
    found = {name: step for name in names if (step := parse_step(name)) is not None}
    return sorted(found, key=found.__getitem__)
