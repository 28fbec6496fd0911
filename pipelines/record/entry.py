"""What crosses from the workers, the driver and the jobs to a run's record: one dict an entry, of twelve kinds.

An entry stays a dict on its whole way, through a pickle to the recorder and as a line of JSON in the journal, and its `kind`
tells mypy what its `values` are. `sequence` counts a sender's entries from 1; `sender` and `attempt` are added on the way.

    new_entry("metrics", {"train_loss": 2.31}, step=10)      # {"kind": "metrics", "time": 1.7e9, "step": 10, ...}
    new_entry("event", {"name": "warning", "text": "the disk is nearly full"})
    if told["kind"] == "checkpoint": told["values"]["path"]
"""

import time as clock
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict, cast, get_args, overload

from raystride.pipelines.credentials import hidden, masked_all

Figures = Mapping[str, float]
"""Measurements by name."""


class CheckpointPath(TypedDict):
    """Where a checkpoint lies: its URI."""

    path: str


class FileName(TypedDict):
    """A file, relative to the run's folder."""

    name: str


class EventText(TypedDict):
    """What happened, by a name for programs (`warning`, `note`, `phase`, `attempt`, `end`, ...) and a text for people."""

    name: str
    text: str


class ErrorText(TypedDict):
    """An exception's whole text, and the rank where it was raised."""

    text: str
    rank: int


class WorkerTime(TypedDict):
    """A worker's seconds in the steps since its last log: all of them, its own (not waiting for others), for its data."""

    rank: int
    world: int
    node: str
    steps: int
    seconds: float
    own_s: float
    data_s: float


class GroupTime(TypedDict):
    """Workers' own seconds in so many `steps`, which end with the entry's.

    A row a rank, or the slowest of the ranks from the row's on to the next one's.
    """

    ranks: list[int]
    steps: int
    own_s: list[float]


class NodeTotals(TypedDict):
    """What a node's sampler has counted since it began; `tokens` and `seconds` by the node of rank 0 alone.

    `throttled_seconds` is None where no device tells it; `source` is the sender's name, as a node may have several.
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


class _Sent(TypedDict):
    """What every entry has: `time` in seconds since 1970, and the optimiser's step it belongs to, if any."""

    time: float
    step: int | None
    sequence: NotRequired[int]
    sender: NotRequired[str]
    attempt: NotRequired[str]


class Metrics(_Sent):
    """What the loop logged."""

    kind: Literal["metrics"]
    values: Figures


class System(_Sent):
    """Readings of hosts and devices, and comparisons of workers."""

    kind: Literal["system"]
    values: Figures


class Rank(_Sent):
    """A worker's own time."""

    kind: Literal["rank"]
    values: WorkerTime


class RanksTime(_Sent):
    """The workers' own times, compared by the recorder."""

    kind: Literal["ranks"]
    values: GroupTime


class Totals(_Sent):
    """What a node has counted so far."""

    kind: Literal["totals"]
    values: NodeTotals


class Parameters(_Sent):
    """The attempt's settings, by dotted name."""

    kind: Literal["parameters"]
    values: Mapping[str, object]


class Tags(_Sent):
    """Words about the run, as trackers show them."""

    kind: Literal["tags"]
    values: Mapping[str, str]


class CheckpointDone(_Sent):
    """A checkpoint that is complete."""

    kind: Literal["checkpoint"]
    values: CheckpointPath


class Artifact(_Sent):
    """A file that trackers should have."""

    kind: Literal["artifact"]
    values: FileName


class Event(_Sent):
    """Something that happened."""

    kind: Literal["event"]
    values: EventText


class Error(_Sent):
    """What ended a worker."""

    kind: Literal["error"]
    values: ErrorText


class Summary(_Sent):
    """Figures of the whole attempt, for `summary.json`."""

    kind: Literal["summary"]
    values: Mapping[str, Any]


Entry = (
    Metrics | System | Rank | RanksTime | Totals | Parameters | Tags | CheckpointDone | Artifact | Event | Error | Summary
)
KINDS = frozenset(kind for each in get_args(Entry) for kind in get_args(each.__annotations__["kind"]))

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
    """Returns an entry of the present moment, or of `time` in seconds since 1970."""
    return {"kind": kind, "time": clock.time() if time is None else time, "step": step, "values": values}


def warning(text: str) -> Entry:
    """Returns a warning for people."""
    return new_entry("event", {"name": "warning", "text": text})


TOLD = frozenset({"parameters", "tags", "checkpoint", "event", "error"})
"""The kinds with texts that people read."""


def without_secrets(entry: Entry) -> Entry:
    """The entry without what this process knows to be a password or key; of figures there are none."""
    if entry["kind"] not in TOLD or not any(isinstance(value, str | tuple | list) for value in entry["values"].values()):
        return entry
    values = {key: hidden(value) if isinstance(value, str) else masked_all(value) for key, value in entry["values"].items()}
    return cast(Entry, entry | {"values": values})


def check_entry(entry: Entry) -> None:
    """Raises KeyError, TypeError or ValueError where what came over the wire is no entry."""
    if entry["kind"] not in KINDS:
        raise ValueError(f"the kind {entry['kind']!r} is none of {', '.join(sorted(KINDS))}")
    float(entry["time"])
    if not isinstance(entry["values"], Mapping):
        raise TypeError(f"the values of a {entry['kind']} are {type(entry['values']).__name__}")
