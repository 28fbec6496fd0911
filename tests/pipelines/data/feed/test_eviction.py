"""Eviction order: first unneeded pieces, least recently used first, then those with the furthest next use."""

import sqlite3
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.feed import eviction as victims_module
from raystride.pipelines.data.feed.eviction import EvictionCandidate, EvictionQueue
from raystride.pipelines.data.feed.ledger import _TABLES


class Database:
    """Ledger tables with a reader `1` of the clock `own`, at step 10 with 2 s per step."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.executescript(_TABLES)
        self.reader(1, "own", step=10, pace=2.0)

    def reader(self, number: int, clock: str, step: int, pace: float) -> None:
        self.db.execute("INSERT INTO readers VALUES (?, ?)", (number, clock))
        self.db.execute("INSERT INTO clocks VALUES (?, ?, 100.0, ?)", (clock, step, pace))

    def add_piece(self, name: bytes, *, last_used: float = 0.0, fetcher: int | None = None, **uses: int) -> None:
        """Adds a piece with the next step at which each reader (`r1=12`) needs it."""
        self.db.execute("INSERT OR REPLACE INTO files VALUES (?, 7, ?, ?)", (name, fetcher, last_used))
        for reader, step in uses.items():
            self.db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", (name, int(reader[1:]), step))

    def pop_all(self, eviction_queue: EvictionQueue) -> list[bytes]:
        found = []
        while (candidate := eviction_queue.pop(self.db)) is not None:
            found.append(candidate.name)
        return found


def test_the_order_is_that_of_the_next_use() -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    database.add_piece(b"soon", r1=11)
    database.add_piece(b"late", r1=30)
    database.add_piece(b"unused lately", last_used=5.0)
    database.add_piece(b"unused long", last_used=1.0)
    database.add_piece(b"on its way", fetcher=1)
    assert eviction_queue.pop(database.db) is None, "nobody has looked"
    eviction_queue.refresh(database.db)
    assert database.pop_all(eviction_queue) == [b"unused long", b"unused lately", b"late", b"soon"]


def test_a_piece_is_needed_when_the_first_of_its_readers_needs_it_by_that_ones_pace() -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    database.reader(2, "other", step=0, pace=0.5)
    database.add_piece(b"both", r1=20, r2=30)  # 100 + 10 * 2, or 100 + 30 * 0.5
    database.add_piece(b"own", r1=15)
    database.add_piece(b"other", r2=60)
    eviction_queue.refresh(database.db)
    found = {candidate.name: candidate for candidate in iter(lambda: eviction_queue.pop(database.db), None)}
    assert {name: candidate.next_use_at for name, candidate in found.items()} == {
        b"both": 115.0,
        b"own": 110.0,
        b"other": 130.0,
    }
    assert {name for name, candidate in found.items() if candidate.needed_by_others} == {b"both", b"other"}
    assert (found[b"both"].num_readers, found[b"both"].step_sum, found[b"both"].size) == (2, 50, 7)


def test_what_has_changed_since_a_look_goes_where_it_belongs_now() -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    for number in range(5):
        database.add_piece(bytes([number]), r1=20 + number)
    eviction_queue.refresh(database.db)
    database.add_piece(bytes([4]), r1=11)  # nobody says so, and it is seen where it would go
    database.add_piece(bytes([9]), r1=25)
    eviction_queue.invalidate([bytes([9])])
    assert database.pop_all(eviction_queue) == [bytes([number]) for number in (9, 3, 2, 1, 0, 4)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(11, 40)), max_size=12))
def test_what_has_changed_one_after_another_goes_where_it_belongs_now(changes: list[tuple[int, int]]) -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    steps = {number: 20 + number for number in range(3)}
    for number, step in steps.items():
        database.add_piece(bytes([number]), r1=step)
    eviction_queue.refresh(database.db)
    for number, step in changes:
        steps[number] = step
        database.add_piece(bytes([number]), r1=step)
        eviction_queue.invalidate([bytes([number])])
    found = []
    while candidate := eviction_queue.pop(database.db):
        found.append(candidate.name[0])
        database.db.execute("DELETE FROM files WHERE name = ?", (candidate.name,))
    assert sorted(found) == sorted(steps)
    assert [steps[number] for number in found] == sorted(steps.values(), reverse=True)


def test_what_is_taken_besides_is_passed_over_and_can_be_put_back() -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    for number in range(3):
        database.add_piece(bytes([number]), r1=20 + number)
    eviction_queue.refresh(database.db)
    first = eviction_queue.pop(database.db)
    assert first is not None
    eviction_queue.put_back([first])
    second = eviction_queue.pop(database.db, excluded=[first])
    assert second is not None
    assert (first.name, second.name) == (bytes([2]), bytes([1]))
    eviction_queue.invalidate_all()
    assert eviction_queue.pop(database.db) is None


def test_a_look_holds_for_a_while_and_many_changes_make_another(monkeypatch: pytest.MonkeyPatch) -> None:
    database, eviction_queue = Database(), EvictionQueue("own")
    assert not eviction_queue.is_expired, "nobody has looked"
    eviction_queue.refresh(database.db)
    assert not eviction_queue.is_expired
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert eviction_queue.is_expired
    monkeypatch.setattr(victims_module, "MAX_INVALIDATED", 3)
    monkeypatch.setattr(victims_module, "QUERY_BATCH", 2)
    for number in range(3):
        database.add_piece(bytes([number]), r1=20 + number)
    eviction_queue.invalidate([bytes([number]) for number in range(3)])  # by their names, in two goes
    assert database.pop_all(eviction_queue) == [bytes([number]) for number in (2, 1, 0)]
    database.add_piece(b"x", r1=40)
    eviction_queue.invalidate(
        [bytes([number]) for number in range(4)]
    )  # all are looked at, one that nobody has named as well
    assert eviction_queue.pop(database.db) == EvictionCandidate(b"x", 7, 160.0, 0, 0.0, 1, 40)
