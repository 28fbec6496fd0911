"""Entries of a run's record, sent by workers, driver and jobs: one dict each, of twelve kinds.

An entry is a dict everywhere: pickled on its way to the recorder, one line of JSON in the journal. Its `kind` tells mypy the
type of its `values`. `sequence` counts a sender's entries from 1; `sender` and `attempt` are added by the recorder.

    new_entry("metrics", {"train_loss": 2.31}, step=10)      # {"kind": "metrics", "time": 1.7e9, "step": 10, ...}
    new_entry("event", {"name": "warning", "text": "the disk is nearly full"})
    if told["kind"] == "checkpoint": told["values"]["path"]
"""

import time as clock
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict, cast, get_args, overload

from raystride.pipelines.system.credentials import redact, redact_all_uris

Figures = Mapping[str, float]
"""Measurements by name."""


class CheckpointPath(TypedDict):
    """The URI of a checkpoint."""

    path: str


class FileName(TypedDict):
    """A file, relative to the run's folder."""

    name: str


class EventText(TypedDict):
    """An event: a name for programs (`warning`, `note`, `phase`, `attempt`, `end`, ...) and a text for people."""

    name: str
    text: str


class ErrorText(TypedDict):
    """The full text of an exception, and the rank that raised it."""

    text: str
    rank: int


class WorkerTime(TypedDict):
    """A worker's seconds in the steps since its last log: in all, its own (not waiting for others), waiting for data."""

    rank: int
    world: int
    node: str
    steps: int
    seconds: float
    own_s: float
    data_s: float


class GroupTime(TypedDict):
    """Workers' own seconds in the last `steps` steps up to the entry's step.

    A row is one rank, or the slowest of the ranks from the row's up to the next row's.
    """

    ranks: list[int]
    steps: int
    own_s: list[float]


class NodeTotals(TypedDict):
    """Totals of a node's sampler since it began; only the node of rank 0 sends `tokens` and `seconds`.

    `throttled_seconds` is None if no device reports it. `source` is the sender's name, since a node may have several.
    """

    node: str
    nodes: int
    covers: str
    joules: float
    unmetered: int
    readings: int
    idle: int
    throttled_seconds: float | None
    throttled_by_reason: dict[str, float]
    tokens: NotRequired[float]
    seconds: NotRequired[float]
    source: NotRequired[str]


class _EntryBase(TypedDict):
    """Keys of every entry: `time` in seconds since 1970, and the optimiser's step, if the entry belongs to one."""

    time: float
    step: int | None
    sequence: NotRequired[int]
    sender: NotRequired[str]
    attempt: NotRequired[str]


class Metrics(_EntryBase):
    """Measurements that the training loop logged."""

    kind: Literal["metrics"]
    values: Figures


class System(_EntryBase):
    """Readings of hosts and devices, and comparisons of workers."""

    kind: Literal["system"]
    values: Figures


class Rank(_EntryBase):
    """Times of one worker."""

    kind: Literal["rank"]
    values: WorkerTime


class RanksTime(_EntryBase):
    """Times of all workers, aggregated by the recorder."""

    kind: Literal["ranks"]
    values: GroupTime


class Totals(_EntryBase):
    """Totals of a node so far."""

    kind: Literal["totals"]
    values: NodeTotals


class Parameters(_EntryBase):
    """The attempt's settings, by dotted name."""

    kind: Literal["parameters"]
    values: Mapping[str, object]


class Tags(_EntryBase):
    """Tags of the run, for trackers such as MLflow."""

    kind: Literal["tags"]
    values: Mapping[str, str]


class CheckpointDone(_EntryBase):
    """A checkpoint that is complete."""

    kind: Literal["checkpoint"]
    values: CheckpointPath


class Artifact(_EntryBase):
    """A file to log to trackers."""

    kind: Literal["artifact"]
    values: FileName


class Event(_EntryBase):
    """An event of the run: a warning, a phase, its begin or end."""

    kind: Literal["event"]
    values: EventText


class Error(_EntryBase):
    """The error that ended a worker."""

    kind: Literal["error"]
    values: ErrorText


class Summary(_EntryBase):
    """Figures of the whole attempt, for `summary.json`."""

    kind: Literal["summary"]
    values: Mapping[str, Any]


Entry = (
    Metrics | System | Rank | RanksTime | Totals | Parameters | Tags | CheckpointDone | Artifact | Event | Error | Summary
)
KINDS = frozenset(kind for entry_type in get_args(Entry) for kind in get_args(entry_type.__annotations__["kind"]))

ENTRY_KEYS = frozenset({*_EntryBase.__annotations__, "kind", "values"})

_Step = int | None
_Time = float | None


@overload
def new_entry(kind: Literal["metrics", "system"], values: Figures, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["rank"], values: WorkerTime, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["ranks"], values: GroupTime, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["totals"], values: NodeTotals, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["checkpoint"], values: CheckpointPath, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["artifact"], values: FileName, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["event"], values: EventText, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["error"], values: ErrorText, step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(kind: Literal["tags"], values: Mapping[str, str], step: _Step = ..., time: _Time = ...) -> Entry: ...
@overload
def new_entry(
    kind: Literal["parameters", "summary"], values: Mapping[str, object], step: _Step = ..., time: _Time = ...
) -> Entry: ...
def new_entry(kind: Any, values: Any, step: _Step = None, time: _Time = None) -> Any:
    """Returns an entry with the current time, or with `time` in seconds since 1970."""
    return {"kind": kind, "time": clock.time() if time is None else time, "step": step, "values": values}


def warning_entry(text: str) -> Entry:
    """Returns an event entry with a warning for people."""
    return new_entry("event", {"name": "warning", "text": text})


TEXT_KINDS = frozenset({"parameters", "tags", "checkpoint", "event", "error"})
"""Kinds with texts for people, in which secrets may appear."""


def redact_entry(entry: Entry) -> Entry:
    """Returns the entry without the passwords and keys that this process knows; entries of figures are unchanged."""
    if entry["kind"] not in TEXT_KINDS or not any(
        isinstance(value, str | tuple | list) for value in entry["values"].values()
    ):
        return entry
    values = {
        key: redact(value) if isinstance(value, str) else redact_all_uris(value) for key, value in entry["values"].items()
    }
    return cast(Entry, entry | {"values": values})


def check_entry(entry: Entry) -> None:
    """Checks a dict received from a sender. Raises KeyError, TypeError or ValueError if it is no valid entry."""
    if entry["kind"] not in KINDS:
        raise ValueError(f"the kind {entry['kind']!r} is none of {', '.join(sorted(KINDS))}")
    float(entry["time"])
    if not isinstance(entry["values"], Mapping):
        raise TypeError(f"the values of a {entry['kind']} are {type(entry['values']).__name__}")
