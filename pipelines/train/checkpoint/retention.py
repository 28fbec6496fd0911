"""Checkpoint retention: a commit removes old data, leftovers of dead groups and failed saves, and manifests above a hundred.

prune_checkpoints(run / "checkpoints", newest="step-00000500", keep=3, writer="20261125-101112-abcd-0f3e")
read_hint(run / "checkpoints", "best")                    # "step-00000400", or "" if there is none
"""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.history import thin_manifests
from raystride.pipelines.train.checkpoint.layout import (
    checkpoint_names,
    is_manifest,
    newest_term,
    parse_step,
    read_manifest,
    step_name,
)

MAX_READ_BACK = 2**30
"""Bytes of a new checkpoint that are read back as a whole before others are removed."""


def prune_checkpoints(folder: Folder, newest: str, keep: int, writer: str) -> None:
    """Removes the data of all but the newest `keep` whole checkpoints and the best, and files that no manifest mentions.

    `newest` was just saved by the group of this name, and is first compared with its manifest: raises OSError, with nothing
    removed, if it is another's or a file has another size or, read back, other bytes. Steps later than
    `newest` are kept: they were damaged when this attempt began, so they must not count, and this attempt will reach them.
    A damaged one before it does not count either. One listing, and the manifests of those that are kept, however many
    checkpoints there have been.
    """
    files: dict[str, set[str]] = {}
    last, sizes = parse_step(newest), folder.sizes(temporary=True)
    for file in sizes:
        name, _, inside = file.partition("/")
        step = parse_step(name)
        if step is not None and last is not None and inside and step <= last:
            files.setdefault(name, set()).add(inside.partition("/")[0])
    manifest = read_manifest(folder / newest)
    if not manifest or data_folder(manifest) != writer:
        raise OSError(f"{folder / newest} is not of {writer}: nothing is removed")
    for name, found in _unlike_sizes(newest, manifest, sizes).items():
        stated = manifest["files"][name]["bytes"]
        raise OSError(f"{folder / newest / name} has {found} bytes and not {stated}: nothing is removed")
    _verify_contents(folder / newest, manifest["files"])
    driver = manifest.get("term", 0)
    whole = checkpoint_names(name for name, inside in files.items() if any(map(is_manifest, inside)))
    kept = {read_hint(folder, "best"), step_name(manifest.get("state", {}).get("best_step", 0))}
    num_whole, term = 0, newest_term(folder)
    for name in reversed(whole):
        if num_whole == keep:
            break
        kept.add(name)
        if not all(map(is_manifest, files[name])):  # else its data was removed
            manifest = read_manifest(folder / name, term)
            num_whole += bool(manifest) and not _unlike_sizes(name, manifest, sizes)
    without_data = []
    for name in checkpoint_names(files):
        if name in whole and name not in kept:
            without_data.append(name)
        if name not in whole:
            folder.remove(name)
            continue
        data = {entry for entry in files[name] if not is_manifest(entry)}
        if name in kept:
            # Mostly there is one data folder, the manifest's.
            owner = _manifest_data_folder(folder / name) if len(data) > 1 else None
            data = data - {owner} if owner else set()  # damaged: its files are unknown
        for entry in sorted(data):
            folder.remove(f"{name}/{entry}")
    thin_manifests(folder, without_data, driver)


def _unlike_sizes(name: str, manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int | None]:
    """Returns the files of a checkpoint that are missing in a listing, or have another size there, with that size."""
    found = {file: sizes.get(f"{name}/{file}") for file in manifest.get("files", {})}
    return {file: size for file, size in found.items() if size != manifest["files"][file]["bytes"]}


def _verify_contents(step: Folder, files: Mapping[str, Any]) -> None:
    """Reads the files back from the disk or store: whole up to `MAX_READ_BACK`, of others the first and the last part.

    Raises OSError if one is not as it was written.
    """
    left = MAX_READ_BACK
    for name, stated in sorted(files.items()):
        if step.local:
            with (step.local / name).open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else memory would answer for the disk
        left -= stated["bytes"]
        ends = stated.get("ends") if left < 0 else None
        parts = [(0, ends[0]), (stated["bytes"] - ends[1]["bytes"], ends[1])] if ends else [(0, stated)]
        for start, part in parts:
            digest = hashlib.sha256()
            for chunk in step.read_chunks(name, start, start + part["bytes"]):
                digest.update(chunk)
            if digest.hexdigest() != part["sha256"]:
                raise OSError(f"{step / name} is not as it was written: nothing is removed")


def read_hint(folder: Folder, hint: str) -> str:
    """Returns the checkpoint that the file `best` or `last` names; "" if there is none."""
    try:
        return folder.read(hint).decode(errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError):
        return ""


def data_folder(manifest: dict[str, Any]) -> str:
    """Returns the name of the data folder inside a checkpoint. Before 0.2 it was the attempt's name."""
    return str(manifest.get("folder") or manifest["attempt"])


def best_name(folder: Folder) -> str:
    """Returns the best checkpoint's name by the newest manifest; "" if there is none. Raises OSError.

    The file `best` counts where that manifest's best step has no checkpoint, because the store refused it. Where nothing was
    validated, it counts only if it names a later checkpoint than that manifest's, which is damaged then.
    """
    hint = read_hint(folder, "best")
    for name in reversed(checkpoint_names(folder.names())):
        if state := read_manifest(folder / name).get("state"):
            best = step_name(state.get("best_step", 0))
            if any(map(is_manifest, (folder / best).names())):
                return best
            is_earlier = (parse_step(hint) or 0) <= (parse_step(name) or 0)
            return "" if state.get("best_step") == 0 and is_earlier else hint
    return hint


def _manifest_data_folder(folder: Folder) -> str | None:
    """Returns the data folder that a checkpoint's manifest names; None if it cannot be read."""
    manifest = read_manifest(folder)
    return data_folder(manifest) if manifest else None
