"""The ledger evicts the piece with the furthest next use over all readers, and removes dead readers."""

import os
import signal
import sqlite3
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raystride.pipelines.data.feed import eviction as victims
from raystride.pipelines.data.feed import ledger as module
from raystride.pipelines.data.feed.ledger import Ledger, PieceStatus
from raystride.pipelines.data.feed.shuffling import count_belady_fetches
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _much_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 0)
    monkeypatch.setattr(module, "REAP_INTERVAL_S", 0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def _name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _fetch_piece(ledger: Ledger, number: int, size: int = 1, *, urgent: bool = True) -> bool:
    """Ensures that a piece is present; returns whether it had to be fetched."""
    claims = ledger.request([(_name(number), size)], urgent=urgent)
    if claims == [PieceStatus.TO_FETCH]:
        place = Path(ledger.piece_path(_name(number)))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(bytes(size))
        ledger.mark_present(_name(number), size)
        assert ledger.status_of(_name(number)) == PieceStatus.PRESENT  # and the others hear of it
    return claims == [PieceStatus.TO_FETCH]


@given(read=st.lists(st.integers(0, 9), min_size=1, max_size=60), held=st.integers(1, 6))
@example(read=[0, 1, 3, 2, 1, 1, 4, 2, 0, 3, 1, 0, 2], held=3)
@settings(max_examples=40, deadline=None)
def test_one_reader_fetches_as_often_as_the_best_cache_would(
    tmp_path_factory: pytest.TempPathFactory, read: list[int], held: int
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("cache"), held)
    later = {piece: read.index(piece) for piece in read}
    fetched, now = 0, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        # Steps take as long as they are said to: a look at what may go holds for a while, and times are compared with it.
        patch.setattr(time, "monotonic", lambda: now)
        ledger.advance([], step=0, pace=1.0)
        ledger.announce_uses([(_name(piece), step) for piece, step in later.items()])
        for step, piece in enumerate(read):
            fetched += _fetch_piece(ledger, piece)
            following = next((at for at in range(step + 1, len(read)) if read[at] == piece), None)
            now += 1.0
            ledger.advance([(_name(piece), following)], step=step + 1, pace=1.0)
    assert fetched == count_belady_fetches(read, held)
    assert fetched <= _fewest_fetches(read, held)
    assert ledger.total_bytes() <= held
    ledger.close()


def _fewest_fetches(read: list[int], held: int) -> int:
    """Returns the minimum number of fetches by brute force for short readings; else the number of reads."""
    if len(read) > 14:
        return len(read)
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for piece in read:
        after: dict[frozenset[int], int] = {}
        for there, fetched in best.items():
            if piece in there:
                choices = [(there, fetched)]
            elif len(there) < held:
                choices = [(there | {piece}, fetched + 1)]
            else:
                choices = [(there - {gone} | {piece}, fetched + 1) for gone in there]
            for now, count in choices:
                after[now] = min(count, after.get(now, count))
        best = after
    return min(best.values())


def test_what_nobody_waits_for_takes_no_room_of_what_is_needed_sooner(root: Path) -> None:
    ledger = Ledger(root, 2)
    ledger.advance([], step=0, pace=1.0)
    ledger.announce_uses([(_name(1), 1), (_name(2), 5), (_name(3), 3), (_name(4), 9)])
    assert _fetch_piece(ledger, 1)
    assert _fetch_piece(ledger, 2)
    assert not _fetch_piece(ledger, 4, urgent=False)
    assert _fetch_piece(ledger, 3, urgent=False)  # instead of 2
    assert ledger.status_of(_name(2)) is None
    assert not Path(ledger.piece_path(_name(2))).exists()
    assert _fetch_piece(ledger, 4)  # somebody waits for it: instead of 3, which is needed later than 1
    assert [ledger.status_of(_name(piece)) for piece in (1, 3, 4)] == [PieceStatus.PRESENT, None, PieceStatus.PRESENT]


@given(held=st.integers(1, 8), wanted=st.lists(st.integers(1, 3), max_size=4))
@settings(deadline=None, max_examples=25)
def test_a_request_for_several_pieces_evicts_no_more_than_they_need(
    tmp_path_factory: pytest.TempPathFactory, held: int, wanted: list[int]
) -> None:
    """Pieces of a byte make room for larger ones."""
    root = tmp_path_factory.mktemp("ledger")
    ledger = Ledger(root, 12)
    for number in range(held):
        _fetch_piece(ledger, number)
    pieces = [(_name(100 + number), size) for number, size in enumerate(wanted)]
    assert ledger.request(pieces, urgent=True) == [PieceStatus.TO_FETCH] * len(pieces)
    assert ledger.total_bytes() == min(12, held + sum(wanted))
    ledger.close()


def test_two_runs_count_in_seconds_and_the_workers_of_one_in_steps(root: Path) -> None:
    slow, fast = Ledger(root, 3, "slow"), Ledger(root, 3, "fast")
    other = Ledger(root, 3, "fast")
    slow.advance([], step=10, pace=100.0)
    fast.advance([], step=1000, pace=0.1)
    slow.announce_uses([(_name(1), 11)])  # in 100 s
    fast.announce_uses([(_name(2), 1100)])  # in 10 s
    other.announce_uses([(_name(3), 1010)])  # in 1 s
    assert all(_fetch_piece(each, piece) for each, piece in ((slow, 1), (fast, 2), (other, 3)))
    fast.announce_uses([(_name(4), 1050)])
    assert _fetch_piece(fast, 4)
    assert [slow.status_of(_name(piece)) for piece in (1, 2, 3, 4)] == [None, *[PieceStatus.PRESENT] * 3]
    slow.announce_uses([(_name(5), 10)])
    for each in (slow, fast, other):
        each.withdraw()
    assert _fetch_piece(slow, 5)


def _reads_and_hangs(root: Path, ready: str) -> None:
    ledger = Ledger(root, 4, "dies")
    ledger.advance([], step=0, pace=1.0)
    ledger.announce_uses([(_name(1), 1)])
    ledger.request([(_name(7), 1)], urgent=True)
    place = Path(ledger.piece_path(_name(7)))
    place.parent.mkdir(parents=True, exist_ok=True)
    ledger.temporary_path(place).touch()
    Path(ready).touch()
    time.sleep(600)


def test_the_dead_are_forgotten_with_what_they_were_fetching(root: Path, tmp_path: Path) -> None:
    child = get_context("spawn").Process(target=_reads_and_hangs, args=(root, str(tmp_path / "ready")), daemon=True)
    child.start()
    wait_until((tmp_path / "ready").exists, "the other process")
    ledger = Ledger(root, 4)
    assert ledger.request([(_name(7), 1)]) == [PieceStatus.IN_FLIGHT]
    assert child.pid
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert ledger.request([(_name(7), 1)]) == [PieceStatus.TO_FETCH]
    assert not list(root.rglob("*.tmp-*"))
    with sqlite3.connect(root / module.DATABASE) as db:
        assert db.execute("SELECT COUNT(*) FROM uses").fetchone() == (0,)
        assert db.execute("SELECT COUNT(*) FROM readers").fetchone() == (1,)


@pytest.mark.parametrize("what", ["torn", "of another start", "none"])
def test_pieces_that_no_ledger_vouches_for_are_removed(root: Path, what: str) -> None:
    ledger = Ledger(root, 4)
    _fetch_piece(ledger, 1)
    place = Path(ledger.piece_path(_name(1)))
    ledger.close()
    (root / ("0" * 32)).write_bytes(b"an earlier version's")
    if what == "of another start":
        with sqlite3.connect(root / module.DATABASE) as db:
            db.execute("UPDATE boot SET id = 'another'")
        db.close()
    else:
        for path in root.glob(f"{module.DATABASE}*"):
            path.unlink()
        if what == "torn":
            (root / module.DATABASE).write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    again = Ledger(root, 4)
    assert again.status_of(_name(1)) is None
    assert not place.exists()
    assert not (root / ("0" * 32)).exists()
    assert _fetch_piece(again, 1)


def test_a_disk_that_is_short_bounds_what_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(root, 1 << 40)
    assert _fetch_piece(ledger, 1, 100)
    assert _fetch_piece(ledger, 2, 100)
    monkeypatch.setattr(module, "MIN_FREE_BYTES", 1 << 60)
    assert not ledger.request([(_name(3), 100)])  # nobody waits for it, and when it is needed is not known ...
    assert _fetch_piece(ledger, 3, 100)  # ... but now somebody does
    assert ledger.total_bytes() == 100


def test_what_came_is_not_lost_with_a_transaction_that_fails(root: Path) -> None:
    ledger = Ledger(root, 4)
    ledger.request([(_name(1), 1)], urgent=True)
    ledger.mark_present(_name(1), 1)
    with pytest.raises(ZeroDivisionError):
        ledger.announce_uses((_name(number), 1 // number) for number in (1, 0))
    assert ledger.status_of(_name(1)) == PieceStatus.PRESENT


def test_what_another_reader_needs_meanwhile_stays_though_a_look_holds_for_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(victims, "SCAN_VALID_S", 1e9)
    ledger, other = Ledger(root, 3, "run"), Ledger(root, 3, "run")
    other.advance([], step=0, pace=1.0)
    assert all(_fetch_piece(ledger, piece) for piece in (1, 2, 3, 4))
    other.announce_uses([(_name(2), 1)])
    assert _fetch_piece(ledger, 5)
    assert [ledger.status_of(_name(piece)) for piece in range(1, 6)] == [
        None,
        PieceStatus.PRESENT,
        None,
        PieceStatus.PRESENT,
        PieceStatus.PRESENT,
    ]


def test_what_is_wanted_no_more_goes_before_what_is_needed_at_last(root: Path) -> None:
    ledger = Ledger(root, 2)
    ledger.advance([], step=0, pace=1.0)
    ledger.announce_uses([(_name(2), 50), (_name(3), 5), (_name(4), 4)])
    for piece in (1, 2):
        _fetch_piece(ledger, piece)
    ledger.pin([_name(1)])
    assert _fetch_piece(ledger, 3)  # instead of 2, which is needed long after 1
    assert [ledger.status_of(_name(piece)) for piece in (1, 2, 3)] == [PieceStatus.PRESENT, None, PieceStatus.PRESENT]
    ledger.unpin([_name(1)])
    assert _fetch_piece(ledger, 4)
    assert [ledger.status_of(_name(piece)) for piece in (1, 3, 4)] == [None, PieceStatus.PRESENT, PieceStatus.PRESENT]
    ledger.close()
