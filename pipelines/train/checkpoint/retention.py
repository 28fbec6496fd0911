"""Checkpoint retention: a commit removes old data, never manifests, and leftovers of dead groups and failed saves.

prune_checkpoints(run / "checkpoints", newest="step-00000500", keep=3, writer="20261125-101112-abcd-0f3e")
read_hint(run / "checkpoints", "best")                    # "step-00000400", or "" if there is none
"""

from typing import Any

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed
from raystride.pipelines.train.checkpoint.layout import MANIFEST, checkpoint_names, parse_step


def prune_checkpoints(folder: Folder, newest: str, keep: int, writer: str) -> None:
    """Removes the data of all but the newest `keep` checkpoints and the best, and files that no manifest mentions.

    `newest` was just saved by the group of this name, and is first compared with its manifest: raises OSError, with nothing
    removed, if it is another's or a file has another size. Steps later than `newest` are kept: they were damaged when this
    attempt began, so they must not count, and this attempt will reach them. One listing, however many checkpoints there have
    been.
    """
    files: dict[str, set[str]] = {}
    last, sizes = parse_step(newest), folder.sizes(temporary=True)
    for file in sizes:
        name, _, inside = file.partition("/")
        step = parse_step(name)
        if step is not None and last is not None and inside and step <= last:
            files.setdefault(name, set()).add(inside.partition("/")[0])
    manifest = read_sealed(folder / newest, MANIFEST)
    if data_folder(manifest) != writer:
        raise OSError(f"{folder / newest} is of {data_folder(manifest)} and not of {writer}: nothing is removed")
    for name, stated in manifest["files"].items():
        if (found := sizes.get(f"{newest}/{name}")) != stated["bytes"]:
            raise OSError(f"{folder / newest / name} has {found} bytes and not {stated['bytes']}: nothing is removed")
    whole = checkpoint_names(name for name, inside in files.items() if MANIFEST in inside)
    kept = {*whole[-keep:], read_hint(folder, "best")}
    for name in checkpoint_names(files):
        if name not in whole:
            folder.remove(name)
            continue
        data = files[name] - {MANIFEST}
        if name in kept:
            # Mostly there is one data folder, the manifest's.
            owner = _manifest_data_folder(folder / name) if len(data) > 1 else None
            data = data - {owner} if owner else set()  # damaged: its files are unknown
        for entry in sorted(data):
            folder.remove(f"{name}/{entry}")


def read_hint(folder: Folder, hint: str) -> str:
    """Returns the checkpoint that the file `best` or `last` names; "" if there is none."""
    try:
        return folder.read(hint).decode().strip()
    except FileNotFoundError:
        return ""


def data_folder(manifest: dict[str, Any]) -> str:
    """Returns the name of the data folder inside a checkpoint. Before 0.2 it was the attempt's name."""
    return str(manifest.get("folder") or manifest["attempt"])


def _manifest_data_folder(folder: Folder) -> str | None:
    """Returns the data folder that a checkpoint's manifest names; None if it cannot be read."""
    try:
        return data_folder(read_sealed(folder, MANIFEST))
    except (ValueError, KeyError, TypeError, FileNotFoundError):
        return None
