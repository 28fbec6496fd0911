"""The fence of checkpoints: a later driver's claim stands, and nobody commits between another one's claim and its put."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken
from raystride.pipelines.train.checkpoint.fence import (
    AttemptSuperseded,
    Claim,
    ClaimBroken,
    check_claim,
    claim_checkpoints,
    commit_fence,
    read_claim,
)
from raystride.pipelines.train.checkpoint.layout import MANIFEST, manifest_name, manifest_names, read_manifest
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.checkpoint.train_state import TrainState
from tests.flips import flip
from tests.pipelines.train.checkpoints import train_model
from tests.some import some


@pytest.fixture(params=["disk", "store"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """Checkpoints on a disk, which has locks, and on a store, which has none."""
    return Folder(str(tmp_path) if request.param == "disk" else f"memory://fence{tmp_path}")


def test_a_group_that_an_earlier_driver_starts_late_does_not_claim(folder: Folder) -> None:
    new = claim_checkpoints(folder, Claim("new", "aaaa", 2))
    with pytest.raises(AttemptSuperseded, match="attempt new has taken this run over from old"):
        claim_checkpoints(folder, Claim("old", "bbbb", 1))
    assert read_claim(folder) == new
    again = claim_checkpoints(folder, Claim("new", "cccc", 2))  # the same driver's next group
    with pytest.raises(AttemptSuperseded, match="from new"):
        check_claim(folder, new)
    check_claim(folder, again)


@given(terms=st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_terms_only_grow(terms: list[int]) -> None:
    place, newest = Folder(f"memory://terms-{'-'.join(map(str, terms))}"), 0
    place.remove()
    for number, term in enumerate(terms):
        try:
            claim_checkpoints(place, Claim(f"attempt{number}", "aaaa", term))
        except AttemptSuperseded:
            assert term < newest
        else:
            assert term >= newest
        newest = max(newest, term)
        found = read_claim(place)
        assert found
        assert found.term == newest


def test_a_claim_with_any_bit_turned_lets_nobody_write(folder: Folder) -> None:
    mine = claim_checkpoints(folder, Claim("20261125-101112-abcd", "0f3e5a7b", 3))
    whole = folder.read("attempt")
    for bit in some(range(8 * len(whole))):
        folder.put("attempt", flip(whole, bit))
        with pytest.raises(ClaimBroken, match=r"attempt is not as it was written, .* remove it if no other driver"):
            check_claim(folder, mine)
        with pytest.raises(SealBroken, match="is not as it was written"):  # for which there is an exit code
            claim_checkpoints(folder, Claim("next", "0f3e", 4))
    folder.remove("attempt")
    claim_checkpoints(folder, Claim("next", "0f3e", 4))


def test_0_3_reads_a_claim_and_writes_one_that_is_read(folder: Folder) -> None:
    claim_checkpoints(folder, Claim("now", "aaaa", 2))
    attempt, token, *term = folder.read("attempt").decode().split()  # as 0.3 does
    assert (attempt, token, term[0]) == ("now", "aaaa", "2")
    folder.put("attempt", "before bbbb 3\n")
    assert read_claim(folder) == Claim("before", "bbbb", 3)


def test_claims_of_earlier_versions_and_without_a_driver_are_replaced(folder: Folder) -> None:
    folder.put("attempt", "earlier 0f3e\n")
    assert read_claim(folder) == Claim("earlier", "0f3e", 0)
    assert claim_checkpoints(folder, Claim("now", "aaaa", 3)).term == 3
    alone = claim_checkpoints(folder, Claim("alone", "bbbb"))
    assert alone.term == 3  # so that a driver's next term is higher still


def test_nobody_claims_between_the_look_and_the_put_on_a_disk(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    old = claim_checkpoints(folder, Claim("old", "aaaa", 1))
    began = threading.Event()

    def take_over() -> None:
        began.set()
        claim_checkpoints(folder, Claim("new", "bbbb", 2))

    thread = threading.Thread(target=take_over)
    with commit_fence(folder, old):
        thread.start()
        began.wait()
        thread.join(0.3)
        assert thread.is_alive()
        assert read_claim(folder) == old
        folder.put("MANIFEST.json", "old")
    thread.join()
    with pytest.raises(AttemptSuperseded), commit_fence(folder, old):
        pytest.fail("committed")


def test_who_committed_late_on_a_store_learns_of_it(tmp_path: Path) -> None:
    folder = Folder(f"memory://late{tmp_path}")
    old = claim_checkpoints(folder, Claim("old", "aaaa", 1))
    with pytest.raises(AttemptSuperseded, match="attempt new"), commit_fence(folder, old):
        claim_checkpoints(folder, Claim("new", "bbbb", 2))


def _group(folder: Folder, attempt: str, term: int) -> Checkpoints:
    group = Checkpoints(folder, attempt, keep=9, log=[].append, term=term)
    group.fence_older_groups()
    return group


def _save(group: Checkpoints, step: int, seed: int) -> str:
    model, optimizer = train_model(seed)
    group.save(model, optimizer, TrainState(step=step), {}, best=False)
    group.wait_for_save()
    return parameters_sha256(model)


def _newest(folder: Folder) -> str:
    """The hash of the parameters that a resumed run begins with."""
    reader, (model, _) = Checkpoints(folder, "r", keep=9, log=[].append), train_model(99)
    found = reader.find_newest()
    assert found
    reader.load(found, model)
    return parameters_sha256(model)


@pytest.mark.parametrize("late", [MANIFEST, manifest_name(1)], ids=["MANIFEST.json", "of its term"])
def test_a_group_that_was_stopped_inside_its_commit_writes_what_nobody_reads(folder: Folder, late: str) -> None:
    """It has looked who may write, and puts its manifest after another driver has saved the step and removed its data."""
    old = _group(folder, "old", 1)
    before = _save(old, 4, seed=1)
    stopped = folder.read("step-00000004/MANIFEST-1.json")
    assert _newest(folder) == before
    after = _save(_group(folder, "new", 2), 4, seed=2)
    folder.remove(f"step-00000004/{old.data}")
    folder.put(f"step-00000004/{late}", stopped)  # continues
    assert _newest(folder) == after
    assert read_manifest(folder / "step-00000004")["attempt"] == "new"


def test_a_late_link_replaces_no_manifest(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups of one driver the first is stopped between its look and its put."""
    if not folder.local:
        pytest.skip("a store has no links: its groups are told apart by their claims")
    old, put_new = _group(folder, "a", 1), Folder.put_new

    def stopped(place: Folder, name: str, content: bytes) -> None:
        monkeypatch.setattr(Folder, "put_new", put_new)
        _save(_group(folder, "a", 1), 4, seed=2)
        put_new(place, name, content)

    monkeypatch.setattr(Folder, "put_new", stopped)
    with pytest.raises(AttemptSuperseded, match="a later group of a has saved this step"):
        _save(old, 4, seed=1)
    assert _newest(folder) == parameters_sha256(train_model(2)[0])


def test_manifests_of_terms_that_nobody_has_claimed_are_not_read(folder: Folder) -> None:
    right = _save(_group(folder, "a", 2), 4, seed=1)
    content = folder.read("step-00000004/MANIFEST-2.json")
    folder.put("step-00000004/MANIFEST-3.json", content)
    assert manifest_names(folder / "step-00000004") == ["MANIFEST-2.json", MANIFEST]
    assert _newest(folder) == right
    folder.put("step-00000009/MANIFEST-2.json", content)  # of another step
    folder.put("step-00000004/MANIFEST-1.json", content)  # of another term
    folder.remove("step-00000004/MANIFEST-2.json")
    assert _newest(folder) == right  # by the copy, which names no term


def test_what_0_3_reads_is_the_newest_step_and_what_it_saves_counts(folder: Folder) -> None:
    """It knows `MANIFEST.json` alone, and puts it into a step that it saves again."""
    _save(_group(folder, "a", 1), 4, seed=1)
    assert folder.read("step-00000004/MANIFEST.json") == folder.read("step-00000004/MANIFEST-1.json")
    claim_checkpoints(folder, Claim("b", "bbbb", 2))
    theirs = Checkpoints(folder, "b", keep=9, log=[].append)
    right = _save(theirs, 6, seed=3)
    assert folder.exists("step-00000006/MANIFEST.json")
    assert not folder.exists("step-00000006/MANIFEST-2.json")
    assert _newest(folder) == right


def test_a_claim_removes_the_locks_of_the_groups_before(tmp_path: Path) -> None:
    """Each group of a killed driver left one."""
    folder = Folder(str(tmp_path))
    for term in range(1, 4):
        claim = claim_checkpoints(folder, Claim("a", f"{term:08x}", term))
        with commit_fence(folder, claim):
            (tmp_path / f".attempt-dead{term}.lock").touch()  # of one whose claim was replaced while it died
    claim_checkpoints(folder, Claim("b", "0000beef", 9))
    assert [path.name for path in tmp_path.glob(".attempt-*")] == []
