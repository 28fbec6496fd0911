"""Names and manifests of a run's checkpoints, for code that reads them without PyTorch.

A manifest is named by the term of the driver that wrote it, so a late writer writes a file that nobody reads: of several,
the one of the highest term counts that is as it was written, and none above the newest claim (`checkpoint.fence`).
`MANIFEST.json` beside it has the same content, for 0.3; alone, it is of 0.3 and counts as term 0.

    read_manifest(checkpoints / step_name(500))            # step-00000500/MANIFEST-3.json, or MANIFEST.json
    newest = checkpoint_names(checkpoints.names())[-1]     # "step-00000500"
"""

import hashlib
import math
import re
from collections.abc import Iterable
from typing import Any

from raystride.pipelines.config.train import parse_branch
from raystride.pipelines.system.storage.folder import Folder, strict_json
from raystride.pipelines.system.storage.sealed import SealBroken, read_sealed
from raystride.pipelines.system.writer import WrittenByNewer
from raystride.pipelines.train.checkpoint.fence import ClaimBroken, read_claim

MANIFEST_KEYS = frozenset(
    [
        *("absent_gradients", "attempt", "bits", "branched_from", "commit", "data", "device", "dropout_masks"),
        *("fed", "files", "folder"),
        *("format", "lora", "objects", "order", "parent_step", "positions", "python", "run", "state", "step", "tensors"),
        *("teacher_sha256", "term", "threads", "versions", "world"),
    ]
)
"""All keys of manifests up to this version; one of a newer version may have more."""
MANIFEST = "MANIFEST.json"
"""The last file of a checkpoint to be written: without a manifest there is no checkpoint."""

BRANCHED_FROM = "branched_from"
"""Key of the checkpoint that a branch began at: its `run`, its `step` and the `manifest_sha256` of its content."""
OBJECTS = "objects"
"""Key of what a user's optimiser and modules keep besides tensors by name, and the name of its tensors' first part."""

BEFORE_PRODUCTS = "as before 0.3"
"""Marks the linear products of an exact run that began before they were measured, in its checkpoints."""


_STEP, _MANIFEST = re.compile(r"step-(\d+)"), re.compile(r"MANIFEST(?:-(\d+))?\.json")


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


def newest_committed_step(checkpoints: Folder) -> int | None:
    """Returns the step of the newest committed checkpoint, None if there is none."""
    names = reversed(checkpoint_names(checkpoints.names()))
    return next((parse_step(name) for name in names if any(map(is_manifest, (checkpoints / name).names()))), None)


def manifest_name(term: int) -> str:
    """Returns the name of a manifest that a driver of this term writes; 0: it has no term."""
    return f"MANIFEST-{term}.json" if term else MANIFEST


def is_manifest(name: str) -> bool:
    """Returns whether a checkpoint's file is a manifest."""
    return _MANIFEST.fullmatch(name) is not None


def newest_term(checkpoints: Folder) -> float:
    """Returns the term of the newest claim; infinite if that is not known. Raises OSError."""
    try:
        claim = read_claim(checkpoints)
    except ClaimBroken:  # it forbids writing, and says nothing about what is there
        claim = None
    return (claim.term if claim else 0) or math.inf  # claims of 0.2 have no term


def manifest_names(step: Folder, newest: float | None = None) -> list[str]:
    """Returns the names of a checkpoint's manifests, the highest term first, without those above the newest claim.

    `newest` is that claim's term, if the caller knows it.
    """
    newest = newest_term(step.parent) if newest is None else newest
    terms = {name: int(found[1] or 0) for name in step.names() if (found := _MANIFEST.fullmatch(name))}
    return sorted((name for name in terms if terms[name] <= newest), key=terms.__getitem__, reverse=True)


def check_manifest(manifest: dict[str, Any], step: Folder, name: str) -> None:
    """Raises SealBroken if a manifest is another step's or driver's."""
    stated = manifest_name(manifest.get("term", 0))
    if step_name(manifest["step"]) != step.name or (stated != name and name != MANIFEST):
        raise SealBroken(f"{step / name} is the manifest {stated} of {step_name(manifest['step'])}")


def read_manifest(step: Folder, newest: float | None = None) -> dict[str, Any]:
    """Returns a checkpoint's manifest, without a look at its data; empty if none is as it was written.

    `newest`: see `manifest_names`. Raises OSError, WrittenByNewer.
    """
    for name in manifest_names(step, newest):
        try:
            manifest = read_sealed(step, name, known=MANIFEST_KEYS)
            check_manifest(manifest, step, name)
        except WrittenByNewer:
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue
        return manifest
    return {}


def newest_manifest(folder: Folder) -> dict[str, Any]:
    """Returns the newest manifest of a run's checkpoints that can be read, empty if there is none. Raises WrittenByNewer."""
    checkpoints = folder / "checkpoints"
    names = reversed(checkpoint_names(checkpoints.names()))
    return next(filter(None, (read_manifest(checkpoints / name) for name in names)), {})


def beginning_manifest(folder: Folder, branch_from: str | None) -> dict[str, Any]:
    """Returns the manifest that a start of a run goes on from: its newest, else that of `train.branch_from`, else empty."""
    if (own := newest_manifest(folder)) or not branch_from:
        return own
    run, step = parse_branch(branch_from)
    return read_manifest(folder.parent / run / "checkpoints" / step_name(step)) if step is not None else {}


def content_sha256(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's content: as JSON with sorted keys, without its seal and writer."""
    return hashlib.sha256(strict_json(manifest, sort_keys=True).encode()).hexdigest()
