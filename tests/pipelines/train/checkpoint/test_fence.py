"""The fence of checkpoints: a later driver's claim stands, and nobody commits between another one's claim and its put."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.fence import (
    AttemptSuperseded,
    Claim,
    check_claim,
    claim_checkpoints,
    commit_fence,
    read_claim,
)
from tests.flips import flip
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
        with pytest.raises(AttemptSuperseded, match=r"attempt is not as it was written, .* remove it if no other driver"):
            check_claim(folder, mine)
        with pytest.raises(AttemptSuperseded, match="is not as it was written"):
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
