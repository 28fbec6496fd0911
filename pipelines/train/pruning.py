"""What goes when a checkpoint is committed: old data, never manifests, and what dead groups and failed saves left.

prune(run / "checkpoints", newest="step-00000500", keep=3)
hinted(run / "checkpoints", "best")                       # "step-00000400", or "" where there is none
"""

from typing import Any

from raystride.pipelines.files import Folder
from raystride.pipelines.train.names import MANIFEST, checkpoint_names, step_of


def prune(folder: Folder, newest: str, keep: int) -> None:
    """Removes data of all but the newest `keep` checkpoints and the best, and files of which no manifest speaks.

    Later steps than `newest`, which was just saved, are left alone: they were damaged when this attempt began, so they
    must not count, and this attempt will come to them. One listing, however many checkpoints there have been.
    """
    held: dict[str, set[str]] = {}
    last = step_of(newest)
    for file in folder.sizes(temporary=True):
        name, _, inside = file.partition("/")
        step = step_of(name)
        if step is not None and last is not None and inside and step <= last:
            held.setdefault(name, set()).add(inside.partition("/")[0])
    whole = checkpoint_names(name for name, inside in held.items() if MANIFEST in inside)
    kept = {*whole[-keep:], hinted(folder, "best")}
    for name in checkpoint_names(held):
        if name not in whole:
            folder.remove(name)
            continue
        data = held[name] - {MANIFEST}
        if name in kept:
            # Mostly there is one folder of data, which is the manifest's.
            owner = _owner(folder / name) if len(data) > 1 else None
            data = data - {owner} if owner else set()  # damaged: nobody can say what belongs to it
        for each in sorted(data):
            folder.remove(f"{name}/{each}")


def hinted(folder: Folder, hint: str) -> str:
    """The step that the file `best` or `last` names; empty where there is none."""
    try:
        return folder.read(hint).decode().strip()
    except FileNotFoundError:
        return ""


def data_of(manifest: dict[str, Any]) -> str:
    """The folder inside a checkpoint's that holds its files. Before 0.2 it had the attempt's name."""
    return str(manifest.get("folder") or manifest["attempt"])


def _owner(folder: Folder) -> str | None:
    """The folder of data that a checkpoint's manifest names; None where it cannot be read."""
    try:
        return data_of(folder.read_json(MANIFEST))
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return None
