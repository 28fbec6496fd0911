"""How the files of a run's checkpoints are called, for those who read them without PyTorch.

checkpoints.read_json(f"{step_name(500)}/{MANIFEST}")      # checkpoints/step-00000500/MANIFEST.json
"""

MANIFEST = "MANIFEST.json"
"""The last file of a checkpoint to be written: without it there is none."""

BEFORE_PRODUCTS = "as before 0.3"
"""What an exact run's checkpoints say of its linear products where it began before they were measured."""


def step_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"
