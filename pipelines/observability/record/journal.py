"""A run's journal: every entry of every attempt, in numbered segments `journal/<attempt>-<n>.jsonl`.

A segment is written by one atomic put, so on any storage a reader sees only whole segments, and a crash loses none. Every
hundred segments are merged into one file, `<attempt>-<first>..<last>.jsonl`. Readers hold one file at a time, however long
the run is. A line is one entry as strict JSON: `attempt`, `sender`, `sequence`, `time` (seconds since 1970), `kind`, `step`,
`values`. The first of each segment also has `writer`, the version that wrote it. JSON has neither NaN nor infinity: they are
written as the strings "NaN", "Infinity" and "-Infinity", and `float()` reads these. A segment's last line, of kind `seal`,
has the SHA-256 of those before it, and readers leave out what does not match; segments of 0.3 have none. `summary.json` has
each attempt's last segment. What readers miss or leave out is an event `damaged` in its place.

    journal = Journal(run_folder, "a1")
    journal.append([{"sender": "rank0", "sequence": 1, "time": 1.0, "kind": "metrics", "step": 1, "values": {"loss": 2.3}}])
    for entry in read_entries(run_folder): ...
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from time import localtime, strftime
from typing import Any, NamedTuple

from raystride.locations import __version__
from raystride.pipelines.observability.record.entry import ENTRY_KEYS, KINDS, Entry, new_entry
from raystride.pipelines.system.permit import Permit
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SEAL, SealBroken, read_sealed
from raystride.pipelines.system.writer import WRITER, refuse_unknown

JOINED_FILE = "metrics.jsonl"
TEXT_LOG_FILE = "log.txt"
SUMMARY_FILE = "summary.json"
LAST_SEGMENTS = "journal"
"""Key of `summary.json`: the number of each attempt's last segment."""
NOT_IN_TEXT_LOG = frozenset({"system", "totals", "rank", "ranks", "parameters"})
"""Kinds that are left out of `log.txt`, since nobody reads them line by line."""
LEADING_FIGURES = ("train_loss", "val_loss", "tokens_per_second")
"""Figures that come first in a line of `log.txt`."""
NUM_READERS = 16
"""Segments read in parallel from remote storage, since each read costs a round trip."""
SEGMENTS_PER_FILE = 100
"""Segments per merged file. Without merging, a month with a segment every ten seconds makes 260,000 files."""
SENDER = "journal"
"""Sender of seals and of events of damage."""
MAX_MERGES_DURING_READ = 100
"""Number of merges that a reader tolerates while it reads one attempt."""


class Segment(NamedTuple):
    """One file of the journal: a single segment, or consecutive segments merged into one file."""

    attempt: str
    number: int
    """Number of its last segment."""
    first: int
    """Number of its first segment; equal to `number` unless it is a merged file."""

    @property
    def name(self) -> str:
        numbers = f"{self.number:06}" if self.first == self.number else f"{self.first:06}..{self.number:06}"
        return f"{self.attempt}-{numbers}.jsonl"


class Journal:
    """Writer of one attempt's segments, after those already there; merges every `SEGMENTS_PER_FILE` into one file."""

    def __init__(self, run_folder: Folder, attempt: str, permit: Permit | None = None) -> None:
        self._run_folder, self._permit = run_folder, permit or Permit()
        self._folder = run_folder / "journal"
        self._attempt = attempt
        all_segments = [segment for segment in list_segments(run_folder) if segment.attempt == attempt]
        self._next = max((segment.number for segment in all_segments), default=0) + 1
        self._unmerged = [segment for segment in all_segments if segment.first == segment.number]
        self._remove_merged()

    def append(self, entries: list[Entry]) -> Segment:
        """Writes entries as the next segment, and adds them to `log.txt`. If it raises OSError, nothing was written.

        Raises the error of a lost permit.
        """
        self._permit.check()
        segment = Segment(self._attempt, self._next, self._next)
        lines = ({WRITER: __version__, **entry} if number == 0 else entry for number, entry in enumerate(entries))
        content = "".join(encode_entry(line) for line in lines)
        self._folder.put(segment.name, content + _seal_line(content.encode(), self._attempt, entries))
        self._next += 1
        self._unmerged.append(segment)
        if self._run_folder.local:
            # For `tail -F` while the run goes on. The end of the run rewrites the file, so a failure here costs nothing.
            with suppress(OSError), (self._run_folder.local / TEXT_LOG_FILE).open("a") as log:
                log.writelines(f"{line}\n" for line in format_entries(entries))
        if len(self._unmerged) >= SEGMENTS_PER_FILE:
            with suppress(OSError):  # the next one tries again
                self._merge()
        return segment

    def entries(self) -> Iterator[Entry]:
        """Yields the entries that an earlier recorder of this attempt wrote, in order. Raises OSError."""
        return (entry for _, entry in _read_attempt_lines(self._run_folder, self._attempt))

    def _merge(self) -> None:
        """Merges the single segments into one file: listing a folder of 100,000 files takes minutes on an object store.

        The merged file is written before the others are removed; readers ignore segments that it repeats.
        """
        merged = Segment(self._attempt, self._unmerged[-1].number, self._unmerged[0].number)
        with self._folder.writer(merged.name) as stream:
            for segment in self._unmerged:
                stream.write(self._folder.read(segment.name))
        self._unmerged = []
        self._remove_merged()

    def _remove_merged(self) -> None:
        """Removes segments that are in merged files, also those that a previous recorder left when it died."""
        unmerged = list_segments(self._run_folder)
        for name in self._folder.names():
            segment = _parse_segment_name(name)
            if segment and segment.attempt == self._attempt and segment not in unmerged:
                self._folder.remove(name)


def _seal_line(content: bytes, attempt: str, entries: list[Entry]) -> str:
    values = {SEAL: hashlib.sha256(content).hexdigest()}
    time = entries[-1]["time"] if entries else 0.0
    seal = {"kind": "seal", "time": time, "step": None, "values": values}
    return encode_entry(seal | {"attempt": attempt, "sender": SENDER, "sequence": 0})


def encode_entry(entry: Mapping[str, Any]) -> str:
    """Returns an entry as one line of strict JSON; other types become numbers if possible, else strings."""
    return json.dumps(to_json_value(entry), allow_nan=False, separators=(",", ":")) + "\n"


def to_json_value(value: Any) -> Any:
    """Converts a value to types of strict JSON; NumPy and PyTorch scalars to numbers, non-finite numbers to strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(item) for item in value]
    try:
        return to_json_value(value.item())
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


def list_segments(run_folder: Folder) -> list[Segment]:
    """Returns all segments of a run, each attempt's in the order of writing, without those repeated in a merged file."""
    all_segments = [segment for name in (run_folder / "journal").names() if (segment := _parse_segment_name(name))]
    unmerged: list[Segment] = []
    for segment in sorted(all_segments, key=lambda segment: (segment.attempt, segment.first, -segment.number)):
        if not (unmerged and unmerged[-1].attempt == segment.attempt and segment.number <= unmerged[-1].number):
            unmerged.append(segment)
    return unmerged


def last_segments(run_folder: Folder) -> dict[str, int]:
    """Returns the number of each attempt's last segment."""
    return {segment.attempt: segment.number for segment in list_segments(run_folder)}


def _recorded_segments(run_folder: Folder) -> dict[str, int]:
    try:
        return dict(read_sealed(run_folder, SUMMARY_FILE).get(LAST_SEGMENTS) or {})
    except (FileNotFoundError, SealBroken):
        return {}


def _parse_segment_name(name: str) -> Segment | None:
    attempt, _, numbers = name.removesuffix(".jsonl").rpartition("-")
    first, _, last = numbers.partition("..")
    proper = attempt and first.isdigit() and (last or first).isdigit()
    return Segment(attempt, int(last or first), int(first)) if proper else None


def read_segment(run_folder: Folder, segment: Segment) -> Iterator[Entry]:
    """Yields a segment's entries; a line damaged by a disk fault becomes an event `damaged`. Raises OSError."""
    return (entry for _, entry in _read_segment_lines(run_folder, segment))


def stream_entries(run_folder: Folder) -> Iterator[Entry]:
    """Yields all entries of a run, attempts in the order of their begin. Raises OSError.

    Reads `metrics.jsonl` if there are no segments. Holds one segment at a time, so memory does not grow with the run.
    """
    return (entry for _, entry in _read_run_lines(run_folder))


def stream_attempt(run_folder: Folder, attempt: str) -> Iterator[Entry]:
    """Yields the entries of one attempt, whose segments must be there. Raises OSError."""
    return (entry for _, entry in _read_attempt_lines(run_folder, attempt))


def read_entries(run_folder: Folder) -> list[Entry]:
    """Returns all entries of a run at once, for short runs. Raises OSError."""
    return list(stream_entries(run_folder))


def refuse_newer_entries(run_folder: Folder) -> None:
    """Raises WrittenByNewer if a newer version wrote the journal, and entries of it are of a kind or have keys that this one
    does not know. Readers that only show a run pass over these. Raises OSError.
    """
    known = {*ENTRY_KEYS, WRITER}
    writer: object = None
    for entry in stream_entries(run_folder):
        writer = entry.get(WRITER, writer)
        unknown = {key: value for key, value in entry.items() if value and key not in known}
        if entry["kind"] not in KINDS:
            unknown[f"entries `{entry['kind']}`"] = entry["step"]
        refuse_unknown(str(run_folder / "journal"), writer, unknown)


def join_segments(run_folder: Folder) -> Entry | None:
    """Writes all segments to `metrics.jsonl` and text to `log.txt`; returns the last entry, if any. Raises OSError."""
    entry = None
    with run_folder.writer(TEXT_LOG_FILE) as log, run_folder.writer(JOINED_FILE) as joined:

        def write_and_pass_on() -> Iterator[Entry]:
            nonlocal entry
            for line, entry in _read_run_lines(run_folder):
                joined.write(line)
                yield entry

        for text in format_entries(write_and_pass_on()):
            log.write(f"{text}\n".encode())
    return entry


class JournalTail:
    """Incremental reader of the journal of a running training."""

    def __init__(self, run_folder: Folder) -> None:
        self._run_folder = run_folder
        self._positions: dict[str, _ReadPosition] = {}
        self._read: list[Entry] = []

    def read_new(self) -> list[Entry]:
        """Returns the entries since the last call, each attempt's in order. After an OSError the next call returns all."""
        for attempt in dict.fromkeys(segment.attempt for segment in list_segments(self._run_folder)):
            position = self._positions.setdefault(attempt, _ReadPosition())
            self._read += (entry for _, entry in _read_attempt_lines(self._run_folder, attempt, position))
        read, self._read = self._read, []
        return read


def format_entries(entries: Iterable[Entry]) -> Iterator[str]:
    """Yields entries as lines of text: time, step, kind, values. The kinds in `NOT_IN_TEXT_LOG` are left out."""
    second, timestamp = -1, ""
    for entry in entries:
        kind, values = entry["kind"], entry.get("values") or {}
        if kind in NOT_IN_TEXT_LOG:
            continue
        if (now := int(float(entry["time"]))) != second:  # a run of a million lines writes them within a minute
            second, timestamp = now, strftime("%Y-%m-%d %H:%M:%S", localtime(now))
        step = "" if entry.get("step") is None else f"step {entry['step']}"
        text = str(values.get("text") or "")
        if not text:
            first = {key: values[key] for key in LEADING_FIGURES if key in values}
            text = "  ".join([f"{key} {_format_value(value)}" for key, value in (first | dict(values)).items()])
        label = entry["values"]["name"] if entry["kind"] == "event" else kind
        yield f"{timestamp}  {step:<12} {label:<10} {text.rstrip()}".rstrip()


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


Line = tuple[bytes, Entry]
"""A line of a segment as bytes, and its entry."""


def _read_run_lines(run_folder: Folder) -> Iterator[Line]:
    recorded, there = _recorded_segments(run_folder), last_segments(run_folder)
    if not there:
        with suppress(FileNotFoundError):
            yield from _parse_lines(BytesIO(run_folder.read(JOINED_FILE)), _JOINED)
    for attempt in sorted(there, key=lambda attempt: _start_time(run_folder, attempt)):
        yield from _read_attempt_lines(run_folder, attempt)
    for attempt, last in recorded.items():
        if last > (number := there.get(attempt, 0)):
            yield _damaged_line(attempt, f"the journal's segments {number + 1} to {last} of {attempt} are gone")


def _start_time(run_folder: Folder, attempt: str) -> float:
    times = (float(entry["time"]) for _, entry in _read_attempt_lines(run_folder, attempt))
    return next(filter(None, times), math.inf)  # what is damaged at the begin has 0


@dataclass
class _ReadPosition:
    """Position of a reader in an attempt: the last segment, and each sender's last entry."""

    segment: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def filter_new(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yields the lines with new entries; damaged lines have sequence 0 and are always yielded."""
        for line, entry in lines:
            sender, sequence = entry["sender"], entry["sequence"]
            if sequence > self.seen.get(sender, 0) or not sequence:
                self.seen[sender] = sequence
                yield line, entry


def _read_attempt_lines(run_folder: Folder, attempt: str, position: _ReadPosition | None = None) -> Iterator[Line]:
    """Yields an attempt's lines after a position, and advances it; reads segments merged meanwhile from the merged file."""
    position, num_missing, listed = position or _ReadPosition(), 0, list[Segment]()
    while True:
        remaining = [
            segment
            for segment in list_segments(run_folder)
            if segment.attempt == attempt and segment.number > position.segment
        ]
        gone = _find_gone(position.segment, remaining)
        if gone and remaining != listed:  # a listing beside a merge may see neither the file nor those merged into it
            listed = remaining
            continue
        try:
            for segment, lines in _fetch_segments(run_folder, remaining):
                if segment in gone:
                    yield _damaged_line(attempt, f"the journal's segments {gone[segment]} of {attempt} are gone")
                yield from position.filter_new(lines)
                position.segment = segment.number
            return
        except FileNotFoundError:
            if (num_missing := num_missing + 1) > MAX_MERGES_DURING_READ:
                raise


def _find_gone(last: int, segments: list[Segment]) -> dict[Segment, str]:
    """Returns the numbers of the segments that are missing before one of these, the first of which should follow `last`."""
    before = [last, *(segment.number for segment in segments)]
    return {
        segment: f"{number + 1} to {segment.first - 1}"
        for number, segment in zip(before, segments, strict=False)
        if segment.first > number + 1
    }


def _fetch_segments(run_folder: Folder, remaining: list[Segment]) -> Iterator[tuple[Segment, Iterable[Line]]]:
    """Yields segments with their lines; from remote storage `NUM_READERS` at once, since each costs a round trip."""
    if run_folder.local:
        yield from ((segment, _read_segment_lines(run_folder, segment)) for segment in remaining)
        return
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(remaining), NUM_READERS):
            batch = remaining[start : start + NUM_READERS]
            contents = pool.map((run_folder / "journal").read, [segment.name for segment in batch])
            for segment, content in zip(batch, contents, strict=True):
                yield segment, _parse_lines(BytesIO(content), segment)


def _read_segment_lines(run_folder: Folder, segment: Segment) -> Iterator[Line]:
    """Yields the lines of a segment; a local file is streamed."""
    if not run_folder.local:
        yield from _parse_lines(BytesIO((run_folder / "journal").read(segment.name)), segment)
        return
    try:
        with (run_folder.local / "journal" / segment.name).open("rb") as lines:
            yield from _parse_lines(lines, segment)
    except IsADirectoryError:
        yield from _parse_lines((), segment)


def _damaged_line(attempt: str, text: str, time: float = 0.0) -> Line:
    entry = new_entry("event", {"name": "damaged", "text": text}, time=time)
    entry |= {"attempt": attempt, "sender": SENDER, "sequence": 0}
    return encode_entry(entry).encode(), entry


_JOINED = Segment(JOINED_FILE, 0, 1)
"""The joined file, which has no seals."""


def _parse_lines(lines: Iterable[bytes], segment: Segment) -> Iterator[Line]:
    """Parses a segment's lines; a line damaged by a disk fault, lines that do not match their seal or have lost it, and a
    segment without any become an event `damaged`.
    """
    number, time, unsealed, hashed = 0, 0.0, list[Line](), hashlib.sha256()
    missing, is_of_0_3 = segment.number - segment.first + 1, True
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entry["sender"], entry["sequence"]
            seal = entry["values"].get(SEAL) if entry["kind"] == "seal" else None
            time = float(entry["time"])
        except (ValueError, KeyError, TypeError, AttributeError):
            unsealed.append(_damaged_line(segment.attempt, f"line {number} of {segment.name} is damaged", time))
        else:
            if entry["kind"] == "seal":
                if seal != hashed.hexdigest():
                    text = f"the lines of {segment.name} before line {number} do not match their SHA-256, and are left out"
                    unsealed = [_damaged_line(segment.attempt, text, time)]
                yield from unsealed
                unsealed, hashed, missing, is_of_0_3 = [], hashlib.sha256(), missing - 1, False
                continue
            unsealed.append((line, entry))
            is_of_0_3 &= WRITER not in entry
        hashed.update(line)
    if not number:
        unsealed = [_damaged_line(segment.attempt, f"{segment.name} has no lines")]
    elif missing > 0 and not is_of_0_3:
        text = f"{segment.name} was cut: {missing} of its seals are gone, and the lines after line {number - len(unsealed)}"
        unsealed = [_damaged_line(segment.attempt, text, time)]
    yield from unsealed
