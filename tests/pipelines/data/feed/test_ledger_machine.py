"""Readers of two runs that fetch, need, advance, die and come again in any order, beside a plain account of the pieces."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raystride.pipelines.data.feed import eviction
from raystride.pipelines.data.feed import ledger as module
from raystride.pipelines.data.feed.ledger import OTHER_RUN_MARGIN, Ledger, PieceStatus

SIZES = [1, 1, 1, 2, 2, 3]
"""Of each piece, in bytes."""
READERS, PIECES, STEPS = st.integers(0, 2), st.integers(0, len(SIZES) - 1), st.integers(1, 30)
CLOCKS = ("slow", "fast", "fast")


def _name(piece: int) -> bytes:
    return piece.to_bytes(16, "little")


class Cache(RuleBasedStateMachine):
    """Time stands still but where a reader advances, so that the model knows each piece's next use."""

    @initialize(room=st.integers(3, 5), uses=st.dictionaries(st.tuples(READERS, PIECES), STEPS, min_size=6, max_size=12))
    def begin(self, room: int, uses: dict[tuple[int, int], int]) -> None:
        """All readers have begun, and as much is there as has room."""
        self.patch, self.now, self.room = pytest.MonkeyPatch(), 1000.0, room
        self.patch.setattr(module.time, "monotonic", lambda: self.now)
        for name, value in (("MIN_FREE_BYTES", 0), ("REAP_INTERVAL_S", 0.0)):
            self.patch.setattr(module, name, value)
        self.patch.setattr(eviction, "SCAN_VALID_S", -1.0)  # each look is a new one
        self.root = Path(tempfile.mkdtemp())
        self.readers = [Ledger(self.root, room, clock) for clock in CLOCKS]
        self.clocks = dict[str, tuple[float, float, float]]()
        """Step, time and pace, by name."""
        self.files = dict[int, int | None]()
        """The reader that fetches a piece, None if it is there."""
        self.uses = dict[tuple[int, int], int]()
        """The next step of a reader that needs a piece."""
        for number in range(3):
            self.advance(number, 0, None, 1, 1.0)
        for (number, piece), step in uses.items():
            self.announce(number, piece, step)
        self.request(0, [*range(room)], urgent=False)
        self.end_fetches(0, arrives=True)

    def teardown(self) -> None:
        if hasattr(self, "readers"):
            for reader in self.readers:
                reader.close()
            self.patch.undo()
            shutil.rmtree(self.root)

    def _next_use(self, piece: int) -> float | None:
        known = [(self.clocks.get(CLOCKS[reader]), step) for (reader, used), step in self.uses.items() if used == piece]
        times = [clock[1] + (step - clock[0]) * clock[2] for clock, step in known if clock]
        return min(times) if times else None

    @rule(reader=READERS, pieces=st.lists(PIECES, min_size=1, max_size=3, unique=True), urgent=st.booleans())
    def request(self, reader: int, pieces: list[int], urgent: bool) -> None:
        before = dict(self.files)
        statuses = self.readers[reader].request([(_name(piece), SIZES[piece]) for piece in pieces], urgent=urgent)
        fetched = [piece for piece, status in zip(pieces, statuses, strict=False) if status == PieceStatus.TO_FETCH]
        there = {piece for piece in range(len(SIZES)) if self.readers[0].status_of(_name(piece))}
        gone = before.keys() - there
        assert there - before.keys() == {*fetched} - before.keys()
        assert all(before[piece] is None for piece in gone), "nobody's fetch goes"
        left = [piece for piece in before if before[piece] is None and piece in there and piece not in fetched]
        total = sum(SIZES[piece] for piece in there)
        assert not fetched or total <= self.room or (urgent and not left), "more only where nothing else can go"
        if urgent:
            assert len(statuses) == len(pieces)
        elif len(statuses) < len(pieces):
            refused = pieces[len(statuses)]
            assert refused not in there
            assert total + SIZES[refused] > self.room
        if fetched:
            assert not gone or not left or min(map(self._order, gone)) >= max(map(self._order, left)), "the last need first"
        else:
            assert not gone
        if len(fetched) == 1 and not urgent:
            needed_at = self._next_use(fetched[0])
            for piece in gone:
                at, margin = self._next_use(piece), OTHER_RUN_MARGIN if self._is_of_others(piece, reader) else 1.0
                assert needed_at is not None
                assert at is None or at - self.now > margin * max(0.0, needed_at - self.now)
        self.files = {piece: fetcher for piece, fetcher in before.items() if piece in there} | dict.fromkeys(fetched, reader)

    def _order(self, piece: int) -> tuple[bool, float]:
        at = self._next_use(piece)
        return at is None, 0.0 if at is None else at

    def _is_of_others(self, piece: int, reader: int) -> bool:
        return {CLOCKS[other] for other, used in self.uses if used == piece} != {CLOCKS[reader]}

    @rule(reader=READERS, arrives=st.booleans())
    def end_fetches(self, reader: int, arrives: bool) -> None:
        for piece in [piece for piece, fetcher in self.files.items() if fetcher == reader]:
            ledger = self.readers[reader]
            if arrives:
                path = Path(ledger.piece_path(_name(piece)))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(SIZES[piece]))
                ledger.mark_present(_name(piece), SIZES[piece])
                ledger.total_bytes()  # the others hear of it with its next transaction
                self.files[piece] = None
            else:
                ledger.mark_missing(_name(piece))
                del self.files[piece]

    @rule(reader=READERS, piece=PIECES)
    def miss(self, reader: int, piece: int) -> None:
        """A reader does not find a file that somebody has removed; it says nothing about another's fetch."""
        if self.files.get(piece, reader) is None:
            Path(self.readers[0].piece_path(_name(piece))).unlink()
        self.readers[reader].mark_missing(_name(piece))
        if piece in self.files and self.files[piece] in (None, reader):
            del self.files[piece]

    @rule(reader=READERS, piece=PIECES, ahead=STEPS)
    def announce(self, reader: int, piece: int, ahead: int) -> None:
        step = int(self.clocks.get(CLOCKS[reader], (0.0,))[0]) + ahead
        self.readers[reader].announce_uses([(_name(piece), step)])
        self.uses.setdefault((reader, piece), step)

    @rule(reader=READERS, piece=PIECES)
    def pin(self, reader: int, piece: int) -> None:
        self.readers[reader].pin([_name(piece)])
        step, *_ = self.clocks.setdefault(CLOCKS[reader], (0.0, self.now, 1.0))
        self.uses[reader, piece] = int(step)

    @rule(reader=READERS, piece=PIECES)
    def unpin(self, reader: int, piece: int) -> None:
        self.readers[reader].unpin([_name(piece)])
        self.uses.pop((reader, piece), None)

    @rule(reader=READERS, piece=PIECES, ahead=STEPS | st.none(), steps=st.integers(1, 3), pace=st.sampled_from([0.5, 2.0]))
    def advance(self, reader: int, piece: int, ahead: int | None, steps: int, pace: float) -> None:
        before, *_ = self.clocks.get(CLOCKS[reader], (0.0,))
        self.now += steps * pace
        self.clocks[CLOCKS[reader]] = before + steps, self.now, pace
        later = None if ahead is None else int(before) + steps + ahead
        self.readers[reader].advance([(_name(piece), later)], step=int(before) + steps, pace=pace)
        if later is None:
            self.uses.pop((reader, piece), None)
        else:
            self.uses[reader, piece] = later

    @rule(reader=READERS)
    def withdraw(self, reader: int) -> None:
        self.readers[reader].withdraw()
        self.uses = {key: step for key, step in self.uses.items() if key[0] != reader}

    @rule(reader=READERS)
    def end_and_come_again(self, reader: int) -> None:
        """Its fetches and needs are gone, and its clock if nobody else has it."""
        self.readers[reader].close()
        self.uses = {key: step for key, step in self.uses.items() if key[0] != reader}
        self.files = {piece: fetcher for piece, fetcher in self.files.items() if fetcher != reader}
        if CLOCKS.count(CLOCKS[reader]) == 1:
            self.clocks.pop(CLOCKS[reader], None)
        self.readers[reader] = Ledger(self.root, self.room, CLOCKS[reader])

    @invariant()
    def the_ledger_says_what_is_there(self) -> None:
        present = {None: PieceStatus.PRESENT}
        found = {piece: self.readers[1].status_of(_name(piece)) for piece in range(len(SIZES))}
        assert {piece: status for piece, status in found.items() if status} == {
            piece: present.get(fetcher, PieceStatus.IN_FLIGHT) for piece, fetcher in self.files.items()
        }
        assert self.readers[2].total_bytes() == sum(SIZES[piece] for piece in self.files)
        on_disk = set(self.root.glob("pieces/*/*"))
        whole = {piece for piece, fetcher in self.files.items() if fetcher is None}
        assert on_disk == {Path(self.readers[0].piece_path(_name(piece))) for piece in whole}
        numbers = {reader.reader: number for number, reader in enumerate(self.readers)}
        uses = self.readers[0]._db.execute("SELECT reader, name, step FROM uses").fetchall()
        assert {(numbers[reader], int.from_bytes(name, "little")): step for reader, name, step in uses} == self.uses
        clocks = self.readers[0]._db.execute("SELECT name, step, time, pace FROM clocks").fetchall()
        assert {name: tuple(values) for name, *values in clocks} == self.clocks


TestCache = Cache.TestCase
TestCache.settings = settings(derandomize=True, max_examples=20, stateful_step_count=14, deadline=None)
