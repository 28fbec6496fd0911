"""A run's journal: every entry of every attempt, in numbered segments `journal/<attempt>-<n>.jsonl`.

A segment is one atomic put, so that on any storage a reader meets whole segments alone, and a crash loses none. A line is
one entry as strict JSON: `attempt`, `sender`, `sequence`, `time` (seconds since 1970), `kind`, `step`, `values`. JSON knows
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
from datetime import datetime
from typing import Any, NamedTuple

from raystride.pipelines.files import Folder
from raystride.pipelines.record.entry import Entry

JOINED = "metrics.jsonl"
READABLE = "log.txt"
FIRST = ("train_loss", "val_loss", "tokens_per_second")
"""Figures that stand first in a readable line."""
READERS = 16
"""Segments read at once from remote storage, where each costs a round trip."""


class Segment(NamedTuple):
    """One file of the journal."""

    attempt: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.attempt}-{self.number:06}.jsonl"


class Journal:
    """Writes the segments of one attempt after those that it already has."""

    def __init__(self, run_folder: Folder, attempt: str) -> None:
        self._run_folder = run_folder
        self._attempt = attempt
        self._found = [segment for segment in segments(run_folder) if segment.attempt == attempt]
        self._next = max((segment.number for segment in self._found), default=0) + 1

    def append(self, entries: list[Entry]) -> Segment:
        """Writes entries as the next segment. Raises OSError, and then nothing was written."""
        segment = Segment(self._attempt, self._next)
        (self._run_folder / "journal").put(segment.name, "".join(encode(entry) for entry in entries))
        # Only now: a segment that failed leaves its number to the next try.
        self._next += 1
        if self._run_folder.local:
            # For who follows the run with `tail -F`; the end writes the whole file anew, so what fails here costs nothing.
            with suppress(OSError), (self._run_folder.local / READABLE).open("a") as log:
                log.writelines(f"{line}\n" for line in readable(entries))
        return segment

    def entries(self) -> Iterator[Entry]:
        """What an earlier recorder of this attempt wrote, in order. Raises OSError."""
        return _read_all(self._run_folder, self._found)


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
    """All segments of a run, each attempt's in the order of writing."""
    found = []
    for name in (run_folder / "journal").names():
        attempt, _, number = name.removesuffix(".jsonl").rpartition("-")
        if attempt and number.isdigit():
            found.append(Segment(attempt, int(number)))
    return sorted(found)


def read_segment(run_folder: Folder, segment: Segment) -> list[Entry]:
    """A segment's entries; a line that a fault of the disk has damaged becomes an event that says so. Raises OSError."""
    entries: list[Entry] = []
    for number, line in enumerate((run_folder / "journal").read(segment.name).splitlines(), start=1):
        try:
            entry = json.loads(line)
            # What is JSON and no entry is damaged as well.
            entry["sender"], entry["sequence"], entry["values"], entry["time"]
        except (ValueError, KeyError, TypeError):
            values = {"name": "damaged", "text": f"line {number} of {segment.name} is damaged"}
            entry = {"attempt": segment.attempt, "sender": "journal", "sequence": 0, "kind": "event", "step": None}
            entry |= {"time": entries[-1]["time"] if entries else 0.0, "values": values}
        entries.append(entry)
    return entries


def read_entries(run_folder: Folder) -> list[Entry]:
    """All entries of a run, attempts in the order in which they began; from `metrics.jsonl` where there are no segments."""
    found = segments(run_folder)
    if not found:
        try:
            return [json.loads(line) for line in run_folder.read(JOINED).splitlines()]
        except FileNotFoundError:
            return []
    attempts: dict[str, list[Entry]] = {}
    for entry in _read_all(run_folder, found):
        attempts.setdefault(entry["attempt"], []).append(entry)
    ordered = sorted(attempts.values(), key=lambda entries: float(entries[0]["time"]))
    return [entry for entries in ordered for entry in entries]


def join(run_folder: Folder) -> list[Entry]:
    """Writes all segments as `metrics.jsonl`, and readable lines as `log.txt`; the entries. Raises OSError."""
    entries = read_entries(run_folder)
    run_folder.put(JOINED, "".join(encode(entry) for entry in entries))
    run_folder.put(READABLE, "".join(f"{line}\n" for line in readable(entries)))
    return entries


def readable(entries: Iterable[Entry]) -> Iterator[str]:
    """Entries as lines for a person: time, step, what happened. Readings of the hosts, and the parameters, are left out."""
    for entry in entries:
        if entry["kind"] in ("system", "totals", "rank", "parameters"):
            continue
        when = datetime.fromtimestamp(float(entry["time"])).strftime("%Y-%m-%d %H:%M:%S")
        step = "" if entry.get("step") is None else f"step {entry['step']}"
        values = entry.get("values") or {}
        first = [key for key in FIRST if key in values]
        shown = (f"{key} {_shown(values[key])}" for key in dict.fromkeys([*first, *values]))
        text = str(values.get("text") or "") or "  ".join(shown)
        what = entry["values"]["name"] if entry["kind"] == "event" else entry["kind"]
        yield f"{when}  {step:<12} {what:<10} {text.rstrip()}".rstrip()


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_all(run_folder: Folder, found: list[Segment]) -> Iterator[Entry]:
    if run_folder.local:
        for segment in found:
            yield from read_segment(run_folder, segment)
        return
    with ThreadPoolExecutor(READERS) as pool:
        for entries in pool.map(lambda segment: read_segment(run_folder, segment), found):
            yield from entries
