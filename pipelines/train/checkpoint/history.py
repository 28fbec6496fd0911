"""Links of removed manifests: what the audit needs of them, in a few hundred bytes each.

A run keeps at most `MAX_MANIFESTS` manifests of checkpoints whose data was removed; of the others a link stays: positions,
parent and the sum of what its ranks have fed. Each driver writes links into a file named by its term, so a late writer
replaces no other's; readers join them all.

    thin_manifests(checkpoints, names, term=3)             # checkpoints/history-3.json, and the manifests are gone
    read_links(checkpoints)[500]["parent_step"]            # 490
"""

import re
from collections.abc import Sequence
from typing import Any

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed, read_sealed
from raystride.pipelines.train.checkpoint.layout import BRANCHED_FROM, content_sha256, parse_step, read_manifest

MAX_MANIFESTS, KEPT_MANIFESTS = 100, 50
"""Manifests without data above which they are thinned, and how many stay then."""
MIN_STEPS = 100
"""Steps between two manifests that stay."""
LINK_KEYS = frozenset(("step", "parent_step", "positions", "world", "attempt"))
"""Keys of a manifest that its link has as they are; a manifest of a version that wrote none of them stays."""
_HISTORY = re.compile(r"history-(\d+)\.json")


def thin_manifests(checkpoints: Folder, names: Sequence[str], term: int) -> None:
    """Removes manifests of checkpoints without data, `names` in the order of their steps, if there are too many.

    The older they are, the further those that stay lie apart. A manifest that cannot be read stays. Raises OSError.
    """
    if len(names) <= MAX_MANIFESTS:
        return
    steps = {step: name for name in names if (step := parse_step(name)) is not None}
    kept, removed = choose_manifests(list(steps)), {}
    for step, name in steps.items():
        if step not in kept and LINK_KEYS | {"fed", "order"} <= (manifest := read_manifest(checkpoints / name)).keys():
            removed[step] = _to_link(manifest)
    if not removed:
        return
    file = f"history-{term}.json"
    put_sealed(
        checkpoints, file, {"links": {str(step): link for step, link in (_read(checkpoints, file) | removed).items()}}
    )
    for step in removed:
        checkpoints.remove(steps[step])


def choose_manifests(steps: Sequence[int]) -> set[int]:
    """Returns which manifests of these steps, in order, stay: at most `KEPT_MANIFESTS`, the newest and the oldest included.

    Two of them are at least `MIN_STEPS` and a share of their age apart; the share doubles until they are few enough.
    """
    newest, share = steps[-1], 1 / 32
    while True:
        kept, last = [newest], newest
        for step in reversed(steps[:-1]):
            if last - step >= max(MIN_STEPS, share * (newest - step)):
                kept.append(step)
                last = step
        found = {*kept, steps[0]}
        if len(found) <= KEPT_MANIFESTS:
            return found
        share *= 2


def _to_link(manifest: dict[str, Any]) -> dict[str, Any]:
    """Returns what an audit needs of a manifest; `order` only of a plain one, as others grow and are known by the newest."""
    first, end = manifest["positions"]
    left_out = [slot for slot in manifest.get("state", {}).get("left_out", ()) if first <= slot[2] < end]
    order = manifest["order"]
    return {
        **{key: manifest[key] for key in sorted(LINK_KEYS)},
        **({BRANCHED_FROM: manifest[BRANCHED_FROM]} if BRANCHED_FROM in manifest else {}),
        "manifest_sha256": content_sha256(manifest),
        "fed": {"all": f"{sum(int(digest, 16) for digest in manifest['fed'].values()) % 2**64:x}"},
        "state": {"left_out": left_out},
        "order": None if "sources" in order or "generations" in order else order,
    }


def read_links(checkpoints: Folder) -> dict[int, dict[str, Any]]:
    """Returns the links of removed manifests by their steps; of a step with several, that of the highest term.

    A damaged file is left out: the audit then names the place where the chain breaks. Raises OSError.
    """
    terms = {int(found[1]): name for name in checkpoints.names() if (found := _HISTORY.fullmatch(name))}
    links: dict[int, dict[str, Any]] = {}
    for term in sorted(terms):
        links |= _read(checkpoints, terms[term])
    return links


def _read(checkpoints: Folder, name: str) -> dict[int, dict[str, Any]]:
    try:
        return {int(step): link for step, link in read_sealed(checkpoints, name)["links"].items()}
    except (FileNotFoundError, SealBroken, KeyError, ValueError, AttributeError):
        return {}
