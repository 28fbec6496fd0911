"""A run's journal: every entry of every attempt, in numbered segments `journal/<attempt>-<n>.jsonl`.

A segment is one atomic put, so that on any storage a reader meets whole segments alone, and a crash loses none. Each hundred
become one file, `<attempt>-<first>..<last>.jsonl`. Readers take one file at a time, whatever the run's length. A line is one
entry as strict JSON: `attempt`, `sender`, `sequence`, `time` (seconds since 1970), `kind`, `step`, `values`. JSON knows
neither NaN nor infinity: they are written as the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.

    journal = Journal(run_folder, "a1")
    journal.append([{"sender": "rank0", "sequence": 1, "time": 1.0, "kind": "metrics", "step": 1, "values": {"loss": 2.3}}])
    for entry in read_entries(run_folder): ...
"""

import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from time import localtime, strftime
from typing import Any, NamedTuple

from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry, new_entry

JOINED = "metrics.jsonl"
READABLE = "log.txt"
NOT_READABLE = frozenset({"system", "totals", "rank", "ranks", "parameters"})
"""Kinds that a person has no use for line by line."""
FIRST = ("train_loss", "val_loss", "tokens_per_second")
"""Figures that stand first in a readable line."""
READERS = 16
"""Segments read at once from remote storage, where each costs a round trip."""
MERGED = 100
"""Segments as they are written that become one file: a month at one every ten seconds is 260,000 files without it."""
MERGES_MET = 100
"""Merges that a reader may meet while it reads one attempt."""


class Segment(NamedTuple):
    """One file of the journal: a segment as it was written, or neighbouring ones that were merged into one file."""

    attempt: str
    number: int
    """Of its last segment."""
    first: int
    """Of its first; the same where it is as it was written."""

    @property
    def name(self) -> str:
        numbers = f"{self.number:06}" if self.first == self.number else f"{self.first:06}..{self.number:06}"
        return f"{self.attempt}-{numbers}.jsonl"


class Journal:
    """Writes the segments of one attempt after those that it already has, and merges each `MERGED` of them into one file."""

    def __init__(self, run_folder: Folder, attempt: str) -> None:
        self._run_folder = run_folder
        self._folder = run_folder / "journal"
        self._attempt = attempt
        found = [segment for segment in segments(run_folder) if segment.attempt == attempt]
        self._next = max((segment.number for segment in found), default=0) + 1
        self._single = [segment for segment in found if segment.first == segment.number]
        self._clear_merged()

    def append(self, entries: list[Entry]) -> Segment:
        """Writes entries as the next segment. Raises OSError, and then nothing was written."""
        segment = Segment(self._attempt, self._next, self._next)
        self._folder.put(segment.name, "".join(encode(entry) for entry in entries))
        self._next += 1
        self._single.append(segment)
        if self._run_folder.local:
            # For who follows the run with `tail -F`; the end writes the whole file anew, so what fails here costs nothing.
            with suppress(OSError), (self._run_folder.local / READABLE).open("a") as log:
                log.writelines(f"{line}\n" for line in readable(entries))
        if len(self._single) >= MERGED:
            with suppress(OSError):  # the next one tries again
                self._merge()
        return segment

    def entries(self) -> Iterator[Entry]:
        """What an earlier recorder of this attempt wrote, in order. Raises OSError."""
        return (entry for _, entry in _read_attempt(self._run_folder, self._attempt))

    def _merge(self) -> None:
        """Has one file in place of many: listing a folder of a hundred thousand takes minutes on an object store.

        The merged file is there before the others go, and readers leave out what it repeats.
        """
        merged = Segment(self._attempt, self._single[-1].number, self._single[0].number)
        with self._folder.writer(merged.name) as stream:
            for segment in self._single:
                stream.write(self._folder.read(segment.name))
        self._single = []
        self._clear_merged()

    def _clear_merged(self) -> None:
        """Removes what merged files hold too, also where the recorder before died over it."""
        kept = segments(self._run_folder)
        for name in self._folder.names():
            segment = _segment(name)
            if segment and segment.attempt == self._attempt and segment not in kept:
                self._folder.remove(name)


def encode(entry: Entry) -> str:
    """An entry as one line of strict JSON; what JSON does not know becomes a number where it is one, else a string."""
    return json.dumps(plain(entry), allow_nan=False, separators=(",", ":")) + "\n"


def plain(value: Any) -> Any:
    """The value in types of strict JSON; numbers of NumPy and PyTorch as numbers, non-finite ones as strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    try:
        return plain(value.item())
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def segments(run_folder: Folder) -> list[Segment]:
    """All segments of a run, each attempt's in the order of writing, without those that a merged file holds too."""
    found = [segment for name in (run_folder / "journal").names() if (segment := _segment(name))]
    kept: list[Segment] = []
    for segment in sorted(found, key=lambda each: (each.attempt, each.first, -each.number)):
        if not (kept and kept[-1].attempt == segment.attempt and segment.number <= kept[-1].number):
            kept.append(segment)
    return kept


def _segment(name: str) -> Segment | None:
    attempt, _, numbers = name.removesuffix(".jsonl").rpartition("-")
    first, _, last = numbers.partition("..")
    proper = attempt and first.isdigit() and (last or first).isdigit()
    return Segment(attempt, int(last or first), int(first)) if proper else None


def read_segment(run_folder: Folder, segment: Segment) -> Iterator[Entry]:
    """A segment's entries; a line that a fault of the disk has damaged becomes an event that says so. Raises OSError."""
    return (entry for _, entry in _read_lines(run_folder, segment))


def stream_entries(run_folder: Folder) -> Iterator[Entry]:
    """All entries of a run one by one, attempts in the order in which they began. Raises OSError.

    From `metrics.jsonl` where there are no segments. Holds one segment at a time, so a run may be as long as it likes.
    """
    return (entry for _, entry in _lines(run_folder))


def read_entries(run_folder: Folder) -> list[Entry]:
    """All entries of a run at once, for short ones. Raises OSError."""
    return list(stream_entries(run_folder))


def join(run_folder: Folder) -> Entry | None:
    """Writes all segments as `metrics.jsonl`, and readable lines as `log.txt`; the last entry, if any. Raises OSError."""
    entry = None
    with run_folder.writer(READABLE) as log, run_folder.writer(JOINED) as joined:

        def passed() -> Iterator[Entry]:
            nonlocal entry
            for line, entry in _lines(run_folder):
                joined.write(line)
                yield entry

        for text in readable(passed()):
            log.write(f"{text}\n".encode())
    return entry


class JournalTail:
    """What a run's journal has that was not read yet, for who follows a run that trains."""

    def __init__(self, run_folder: Folder) -> None:
        self._run_folder = run_folder
        self._positions: dict[str, _Position] = {}
        self._read: list[Entry] = []

    def new(self) -> list[Entry]:
        """The entries since the last call, each attempt's in order. Raises OSError, and the next call has them all."""
        for attempt in dict.fromkeys(segment.attempt for segment in segments(self._run_folder)):
            position = self._positions.setdefault(attempt, _Position())
            self._read += (entry for _, entry in _read_attempt(self._run_folder, attempt, position))
        read, self._read = self._read, []
        return read


def readable(entries: Iterable[Entry]) -> Iterator[str]:
    """Entries as lines for a person: time, step, what happened. Readings of the hosts, and the parameters, are left out."""
    second, when = -1, ""
    for entry in entries:
        kind, values = entry["kind"], entry.get("values") or {}
        if kind in NOT_READABLE:
            continue
        if (now := int(float(entry["time"]))) != second:  # a run of a million lines writes them within a minute
            second, when = now, strftime("%Y-%m-%d %H:%M:%S", localtime(now))
        step = "" if entry.get("step") is None else f"step {entry['step']}"
        text = str(values.get("text") or "")
        if not text:
            first = {key: values[key] for key in FIRST if key in values}
            text = "  ".join([f"{key} {_shown(value)}" for key, value in (first | dict(values)).items()])
        what = entry["values"]["name"] if entry["kind"] == "event" else kind
        yield f"{when}  {step:<12} {what:<10} {text.rstrip()}".rstrip()


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


Line = tuple[bytes, Entry]
"""A line of a segment as it stands there, and what it says."""


def _lines(run_folder: Folder) -> Iterator[Line]:
    attempts = dict.fromkeys(segment.attempt for segment in segments(run_folder))
    if not attempts:
        with suppress(FileNotFoundError):
            yield from _parsed(BytesIO(run_folder.read(JOINED)), Segment(JOINED, 0, 0))
        return
    for attempt in sorted(attempts, key=lambda attempt: _began(run_folder, attempt)):
        yield from _read_attempt(run_folder, attempt)


def _began(run_folder: Folder, attempt: str) -> float:
    return float(next((entry["time"] for _, entry in _read_attempt(run_folder, attempt)), math.inf))


@dataclass
class _Position:
    """How far a reader has come in an attempt: the last segment, and each sender's last entry."""

    segment: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def unseen(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines whose entries are new; what is damaged has no number."""
        for line, entry in lines:
            sender, sequence = entry["sender"], entry["sequence"]
            if sequence > self.seen.get(sender, 0) or not sequence:
                self.seen[sender] = sequence
                yield line, entry


def _read_attempt(run_folder: Folder, attempt: str, position: _Position | None = None) -> Iterator[Line]:
    """An attempt's lines after a position, which moves on. What was merged meanwhile is read from the merged file."""
    position, missing = position or _Position(), 0
    while True:
        left = [each for each in segments(run_folder) if each.attempt == attempt and each.number > position.segment]
        try:
            for segment, lines in _fetched(run_folder, left):
                yield from position.unseen(lines)
                position.segment = segment.number
            return
        except FileNotFoundError:
            if (missing := missing + 1) > MERGES_MET:
                raise


def _fetched(run_folder: Folder, left: list[Segment]) -> Iterator[tuple[Segment, Iterable[Line]]]:
    """Segments with their lines, from a remote storage some ahead, where each costs a round trip."""
    if run_folder.local:
        yield from ((segment, _read_lines(run_folder, segment)) for segment in left)
        return
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(left), READERS):
            some = left[start : start + READERS]
            contents = pool.map((run_folder / "journal").read, [segment.name for segment in some])
            for segment, content in zip(some, contents, strict=True):
                yield segment, _parsed(BytesIO(content), segment)


def _read_lines(run_folder: Folder, segment: Segment) -> Iterator[Line]:
    """The lines of a segment, of which a local one is read as it goes."""
    if not run_folder.local:
        yield from _parsed(BytesIO((run_folder / "journal").read(segment.name)), segment)
        return
    with (run_folder.local / "journal" / segment.name).open("rb") as lines:
        yield from _parsed(lines, segment)


def _parsed(lines: Iterable[bytes], segment: Segment) -> Iterator[Line]:
    """A segment's lines; of one that a fault of the disk has damaged, an event that says so."""
    time = 0.0
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entry["sender"], entry["sequence"], entry["values"]
            time = float(entry["time"])
        except (ValueError, KeyError, TypeError):
            entry = new_entry("event", {"name": "damaged", "text": f"line {number} of {segment.name} is damaged"}, time=time)
            entry |= {"attempt": segment.attempt, "sender": "journal", "sequence": 0}
            line = encode(entry).encode()
        yield line, entry
