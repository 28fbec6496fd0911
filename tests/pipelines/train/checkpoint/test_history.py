"""Manifests without data are thinned, and the audit proves the same from the links that stay."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.feed.order import Order, digest
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint import history
from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit
from raystride.pipelines.train.checkpoint.history import (
    KEPT_MANIFESTS,
    MIN_STEPS,
    choose_manifests,
    read_links,
    thin_manifests,
)
from raystride.pipelines.train.checkpoint.layout import checkpoint_names, content_sha256, manifest_name, read_manifest
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.retention import prune_checkpoints
from raystride.pipelines.train.checkpoint.train_state import TrainState
from tests.pipelines.train.checkpoints import train_model

ORDER = Order(samples=64, seed=3)
BATCH = 2
EVERY = 10


def write(folder: Path, first: int, last: int, term: int = 1, parent: int = 0, **more: Any) -> Folder:
    """Writes manifests of each tenth step, whose two ranks fed two samples a step; one slot was left out."""
    checkpoints = Folder(str(folder))
    left_out = [[23, 0, 46, 1]]
    for step in range(first, last + 1, EVERY):
        positions = np.arange(parent * BATCH, step * BATCH)
        fed = positions[positions != 46]
        ranks = [fed[rank::2] for rank in range(2)]
        manifest: dict[str, Any] = {
            "attempt": f"a{term}", "world": 2, "step": step, "parent_step": parent, "term": term, "folder": "data",
            "positions": [parent * BATCH, step * BATCH], "order": vars(ORDER), "files": {},
            "fed": {str(rank): f"{digest(own // 64, ORDER.sample_ids_at(own)):016x}" for rank, own in enumerate(ranks)},
            "state": {"left_out": left_out if step > 23 else [], "best_step": 0},
        }  # fmt: skip
        manifest |= more
        for name in (manifest_name(term), "MANIFEST.json"):
            (checkpoints / f"step-{step:08d}").put_json(name, manifest)
        parent = step
    return checkpoints


def names(checkpoints: Folder) -> list[str]:
    return checkpoint_names(checkpoints.names())


def test_the_chain_is_proven_as_before_and_what_is_exchanged_is_found(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 10, 3000)
    before = audit(checkpoints)
    thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    assert len(names(checkpoints)) <= KEPT_MANIFESTS + 1
    assert audit(checkpoints) == before
    size = (tmp_path / "history-1.json").stat().st_size / len(read_links(checkpoints))
    assert size < 600
    content = json.loads((tmp_path / "history-1.json").read_text())
    gone = next(step for step in content["links"] if step != "30")
    content["links"][gone]["fed"]["all"] = "1"
    (tmp_path / "history-1.json").write_text(json.dumps({"links": content["links"]}))
    with pytest.raises(AuditFailed, match=f"step-{int(gone):08}"):
        audit(checkpoints)
    (tmp_path / "history-1.json").write_text(json.dumps(content))  # its seal is of other bytes
    with pytest.raises(AuditFailed, match="of which there is no manifest"):
        audit(checkpoints)


def test_a_hundred_stay_as_they_are(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 10, 1000)
    thin_manifests(checkpoints, names(checkpoints), term=1)
    assert len(names(checkpoints)) == 100
    assert not (tmp_path / "history-1.json").exists()


def test_links_of_several_drivers_are_joined_and_the_later_one_counts(tmp_path: Path) -> None:
    """The second attempt went back to step 1,500, and made the steps after it again."""
    checkpoints = write(tmp_path, 10, 2000)
    thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    write(tmp_path, 1510, 4000, term=2, parent=1500)
    if not (tmp_path / "step-00001500").exists():
        assert 1500 in read_links(checkpoints)
    thin_manifests(checkpoints, names(checkpoints)[:-1], term=2)
    assert {"history-1.json", "history-2.json"} <= set(checkpoints.names())
    assert {link["attempt"] for step, link in read_links(checkpoints).items() if step > 1500} == {"a2"}
    found = audit(checkpoints)
    assert (found.steps, found.checkpoints, found.attempts, found.left_out) == (4000, 400, 2, 1)


def test_a_branch_is_proven_though_its_origin_and_its_first_manifest_were_thinned(tmp_path: Path) -> None:
    parents = write(tmp_path / "parent/checkpoints", 10, 3000)
    step = next(step for step in range(10, 3000, EVERY) if step not in choose_manifests(range(10, 3000, EVERY)))
    origin = read_manifest(parents / f"step-{step:08d}")
    begun = {"run": "parent", "step": step, "manifest_sha256": content_sha256(origin)}
    branch = write(tmp_path / "branch/checkpoints", step + EVERY, 4000, parent=step, branched_from=begun)
    before = audit(branch)
    for checkpoints in (parents, branch):
        thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    assert step in read_links(parents)
    assert audit(branch) == before
    (tmp_path / "parent/checkpoints/history-1.json").unlink()
    with pytest.raises(AuditFailed, match=f"follows step-{step:08d} of run parent"):
        audit(branch)


def test_a_crash_between_the_two_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = write(tmp_path, 10, 3000)
    before, remove = audit(checkpoints), Folder.remove

    def die(folder: Folder, name: str = "") -> None:
        if name == "step-00000050":
            raise KeyboardInterrupt
        remove(folder, name)

    monkeypatch.setattr(Folder, "remove", die)
    with pytest.raises(KeyboardInterrupt):
        thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    assert audit(checkpoints) == before
    monkeypatch.setattr(Folder, "remove", remove)
    thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    assert audit(checkpoints) == before
    assert len(names(checkpoints)) <= KEPT_MANIFESTS + 1


@given(st.sets(st.integers(1, 10**7), min_size=101, max_size=400))
def test_what_stays_is_far_apart_and_ever_further(found: set[int]) -> None:
    steps = sorted(found)
    kept = sorted(choose_manifests(steps))
    assert len(kept) <= KEPT_MANIFESTS
    assert {steps[0], steps[-1]} <= set(kept) <= set(steps)
    assert all(after - before >= MIN_STEPS for before, after in pairwise(kept[1:]))


def test_a_manifest_that_cannot_be_read_or_has_no_chain_stays(tmp_path: Path) -> None:
    checkpoints = write(tmp_path, 10, 3000)
    (tmp_path / "step-00000020" / "MANIFEST.json").write_text("{")
    (tmp_path / "step-00000020" / "MANIFEST-1.json").write_text("{")
    (tmp_path / "step-00000030" / "MANIFEST-1.json").unlink()
    (checkpoints / "step-00000030").put_json("MANIFEST.json", {"step": 30, "attempt": "of 0.1"})
    thin_manifests(checkpoints, names(checkpoints)[:-1], term=1)
    assert {"step-00000020", "step-00000030"} <= set(names(checkpoints))


def test_a_commit_thins_and_keeps_best_and_what_has_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_MANIFESTS", 3)
    monkeypatch.setattr(history, "KEPT_MANIFESTS", 2)
    for step in range(1, 9):
        model, optimizer = train_model(step)
        checkpoints = Checkpoints(Folder(str(tmp_path)), "a1", keep=2)
        state = TrainState(step=step, position=4 * step, fed_digest=step, best_step=4 if step >= 4 else 0)
        checkpoints.save(model, optimizer, state, {"run": "r", "order": vars(ORDER)}, best=step == 4)
        checkpoints.wait_for_save()
    left = names(Folder(str(tmp_path)))
    assert {"step-00000004", "step-00000007", "step-00000008"} <= set(left)
    assert len(left) <= 3 + 3
    assert read_links(Folder(str(tmp_path)))
    with pytest.raises(OSError, match="nothing is removed"):
        prune_checkpoints(Folder(str(tmp_path)), "step-00000008", 1, "another")
