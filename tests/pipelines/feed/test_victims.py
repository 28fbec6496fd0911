"""What makes room: first what nobody needs, of it the longest unused, then what is needed farthest in the future."""

import sqlite3
import time

import pytest

from raystride.pipelines.feed import victims as victims_module
from raystride.pipelines.feed.ledger import _TABLES
from raystride.pipelines.feed.victims import Victim, Victims


class Database:
    """A ledger's tables with a reader `1` of the clock `own`, which is at step 10, and takes 2 s a step."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.executescript(_TABLES)
        self.reader(1, "own", step=10, pace=2.0)

    def reader(self, number: int, clock: str, step: int, pace: float) -> None:
        self.db.execute("INSERT INTO readers VALUES (?, ?)", (number, clock))
        self.db.execute("INSERT INTO clocks VALUES (?, ?, 100.0, ?)", (clock, step, pace))

    def piece(self, name: bytes, *, used: float = 0.0, fetcher: int | None = None, **uses: int) -> None:
        """A piece, and at which step each reader (`r1=12`) needs it next."""
        self.db.execute("INSERT OR REPLACE INTO files VALUES (?, 7, ?, ?)", (name, fetcher, used))
        for reader, step in uses.items():
            self.db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", (name, int(reader[1:]), step))

    def take_all(self, victims: Victims) -> list[bytes]:
        found = []
        while (victim := victims.take(self.db)) is not None:
            found.append(victim.name)
        return found


def test_the_order_is_that_of_the_next_use() -> None:
    database, victims = Database(), Victims("own")
    database.piece(b"soon", r1=11)
    database.piece(b"late", r1=30)
    database.piece(b"unused lately", used=5.0)
    database.piece(b"unused long", used=1.0)
    database.piece(b"on its way", fetcher=1)
    assert victims.take(database.db) is None, "nobody has looked"
    victims.look(database.db)
    assert database.take_all(victims) == [b"unused long", b"unused lately", b"late", b"soon"]


def test_a_piece_is_needed_when_the_first_of_its_readers_needs_it_by_that_ones_pace() -> None:
    database, victims = Database(), Victims("own")
    database.reader(2, "other", step=0, pace=0.5)
    database.piece(b"both", r1=20, r2=30)  # 100 + 10 * 2, or 100 + 30 * 0.5
    database.piece(b"own", r1=15)
    database.piece(b"other", r2=60)
    victims.look(database.db)
    found = {victim.name: victim for victim in iter(lambda: victims.take(database.db), None)}
    assert {name: victim.at for name, victim in found.items()} == {b"both": 115.0, b"own": 110.0, b"other": 130.0}
    assert {name for name, victim in found.items() if victim.others} == {b"both", b"other"}
    assert (found[b"both"].readers, found[b"both"].steps, found[b"both"].size) == (2, 50, 7)


def test_what_has_changed_since_a_look_goes_where_it_belongs_now() -> None:
    database, victims = Database(), Victims("own")
    for number in range(5):
        database.piece(bytes([number]), r1=20 + number)
    victims.look(database.db)
    database.piece(bytes([4]), r1=11)  # nobody says so, and it is seen where it would go
    database.piece(bytes([9]), r1=25)
    victims.changed([bytes([9])])
    assert database.take_all(victims) == [bytes([number]) for number in (9, 3, 2, 1, 0, 4)]


def test_what_is_taken_besides_is_passed_over_and_can_be_put_back() -> None:
    database, victims = Database(), Victims("own")
    for number in range(3):
        database.piece(bytes([number]), r1=20 + number)
    victims.look(database.db)
    first = victims.take(database.db)
    assert first is not None
    victims.put_back([first])
    second = victims.take(database.db, besides=[first])
    assert second is not None
    assert (first.name, second.name) == (bytes([2]), bytes([1]))
    victims.forget()
    assert victims.take(database.db) is None


def test_a_look_holds_for_a_while_and_many_changes_make_another(monkeypatch: pytest.MonkeyPatch) -> None:
    database, victims = Database(), Victims("own")
    assert not victims.stale, "nobody has looked"
    victims.look(database.db)
    assert not victims.stale
    later = time.monotonic() + 3600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert victims.stale
    monkeypatch.setattr(victims_module, "MOST_CHANGED", 3)
    monkeypatch.setattr(victims_module, "AT_ONCE", 2)
    for number in range(3):
        database.piece(bytes([number]), r1=20 + number)
    victims.changed([bytes([number]) for number in range(3)])  # by their names, in two goes
    assert database.take_all(victims) == [bytes([number]) for number in (2, 1, 0)]
    database.piece(b"x", r1=40)
    victims.changed([bytes([number]) for number in range(4)])  # all are looked at, one that nobody has named as well
    assert victims.take(database.db) == Victim(b"x", 7, 160.0, 0, 0.0, 1, 40)
