"""Aggregates per-worker and per-node measurements, so that a run's record does not grow with their number.

Every worker sends its own time with every log. The times of all workers become one comparison (`slowest_rank`, ...) and one
entry `ranks` with at most 64 rows, for each interval at first and later for bins of ever more intervals. With more than
eight nodes, readings of hosts and devices become the minimum, mean and maximum over all nodes.

    group = Aggregator()
    group.ingest(entry)                                       # True: it is aggregated, and not recorded itself
    for entry in group.drain(): ...                           # the entries to record
"""

import re
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, Self

from raystride.pipelines.observability.record.entry import Entry, GroupTime, System, WorkerTime, new_entry
from raystride.pipelines.observability.record.summary import RunSummary

MIN_OPEN, MAX_OPEN_FIGURES = 64, 200_000
"""Bounds on incomplete intervals, and on the workers' figures in all of them together. A dead worker sends none, and after
an outage workers send their backlogs one after another."""
BINS_PER_LENGTH = 256
"""Number of bins of one length; the next ones are twice as long, so that a million intervals make about 3,000 bins."""
MAX_ROWS = 64
"""Rows of a bin; with more workers, a row is the slowest of several neighbours."""
MAX_NODES = 8
"""Up to this number of nodes, the readings of each are recorded unchanged."""


class Aggregator:
    """Aggregates of the workers and nodes of an attempt. Not thread-safe."""

    def __init__(self) -> None:
        self._ranks, self._nodes = RankAggregator(), NodeAggregator()

    def ingest(self, entry: Entry) -> bool:
        """Returns True if the entry is aggregated instead of recorded. Raises KeyError if a figure is missing."""
        if entry["kind"] == "rank":
            self._ranks.ingest(entry["step"], entry["values"])
            return True
        return entry["kind"] == "system" and self._nodes.ingest(entry)

    def drain(self) -> list[Entry]:
        """Returns the aggregated entries since the last call."""
        return self._ranks.drain() + self._nodes.drain()

    def flush(self) -> list[Entry]:
        """Returns all remaining entries, those of incomplete bins and rounds included, at the end of the record."""
        return self.drain() + self._ranks.flush() + self._nodes.flush()

    def figures(self) -> RunSummary:
        """Returns the comparison of workers over all intervals; empty for one worker, or while one's figures are missing."""
        return self._ranks.figures()

    def to_json(self) -> dict[str, Any]:
        """Returns the whole state, for `from_json`."""
        return {"ranks": self._ranks.to_json(), "nodes": self._nodes.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], num_recorded_bins: int) -> Self:
        """Returns the aggregator of a state from `to_json`; bins that were recorded since are not emitted a second time."""
        group = cls()
        group._ranks = RankAggregator.from_json(content["ranks"], num_recorded_bins)
        group._nodes = NodeAggregator.from_json(content["nodes"])
        return group


class RankAggregator:
    """Sums of the workers' times: by interval, by bin of intervals, and since the beginning."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, WorkerTime]] = {}
        self._bin: dict[int, WorkerTime] = {}
        self._intervals = self._bins = self._step = 0
        self._sums: dict[int, WorkerTime] = {}
        self._world = 0
        self._ready: list[Entry] = []
        self._num_closed = self._num_to_skip = 0
        """Number of closed bins, and of the next ones that are in the journal already."""

    def to_json(self) -> dict[str, Any]:
        """Returns the whole state, for `from_json`."""
        return {
            "open": [[step, list(interval.values())] for step, interval in self._open.items()],
            "bin": list(self._bin.values()),
            "sums": list(self._sums.values()),
            "counts": [self._intervals, self._bins, self._step, self._world, self._num_closed],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], num_recorded: int) -> Self:
        """Returns the sums of a state from `to_json`; `num_recorded` bins are in the journal by now."""
        ranks = cls()
        ranks._open = {step: {times["rank"]: times for times in values} for step, values in content["open"]}
        ranks._bin, ranks._sums = ({times["rank"]: times for times in content[name]} for name in ("bin", "sums"))
        ranks._intervals, ranks._bins, ranks._step, ranks._world, ranks._num_closed = content["counts"]
        ranks._num_to_skip = max(0, num_recorded - ranks._num_closed)
        return ranks

    def ingest(self, step: int | None, values: WorkerTime) -> None:
        """Adds a worker's figures of the interval that ended with `step`. Raises KeyError if one is missing."""
        rank, world = int(values["rank"]), int(values["world"])
        if world != self._world:  # the group was restarted with another size: the ranks are other workers
            self._ready += self.flush()
            self._open, self._sums, self._world = {}, {}, world
        _add_times(self._sums, values)
        if step is None:
            return
        interval = self._open.setdefault(step, {})
        interval[rank] = values
        if len(interval) == world:
            self._end_interval(step, self._open.pop(step))
        elif len(self._open) > max(MIN_OPEN, MAX_OPEN_FIGURES // world):
            del self._open[min(self._open)]

    def drain(self) -> list[Entry]:
        """Returns the entries of the bins that were completed since the last call."""
        news, self._ready = self._ready, []
        return news

    def flush(self) -> list[Entry]:
        """Closes the incomplete bin and returns its entries."""
        if not self._bin:
            return []
        compared = {key: value for key, value in compare_workers(self._bin).items() if isinstance(value, int | float)}
        entries = [new_entry("system", compared, self._step), new_entry("ranks", rank_rows(self._bin), self._step)]
        self._bin, self._intervals = {}, 0
        self._num_closed += 1
        if self._num_to_skip:
            self._num_to_skip -= 1
            return []
        return entries

    def figures(self) -> RunSummary:
        """Returns the comparison over all intervals; empty for a single worker, or while one's figures are missing."""
        return compare_workers(self._sums) if self._world > 1 and len(self._sums) == self._world else {}

    def _end_interval(self, step: int, interval: dict[int, WorkerTime]) -> None:
        for values in interval.values():
            _add_times(self._bin, values)
        self._intervals += 1
        self._step = step
        if self._intervals >= 2 ** (self._bins // BINS_PER_LENGTH):
            self._bins += 1
            self._ready += self.flush()


def _add_times(sums: dict[int, WorkerTime], values: WorkerTime) -> None:
    """Adds a worker's times to its sums."""
    totals = sums.get(values["rank"])
    if totals is None:
        sums[values["rank"]] = values.copy()
        return
    totals["steps"] += values["steps"]
    totals["seconds"] += values["seconds"]
    totals["own_s"] += values["own_s"]
    totals["data_s"] += values["data_s"]


def compare_workers(workers: Mapping[int, WorkerTime]) -> RunSummary:
    """Returns the slowest worker, its node, and the shares of time that the group lost by it and by waiting."""
    own_s = {rank: values["own_s"] for rank, values in workers.items()}
    slowest = max(own_s, key=lambda rank: own_s[rank])
    others_s = median(seconds for rank, seconds in own_s.items() if rank != slowest)
    mean_s = fmean(values["seconds"] for values in workers.values())
    return {
        "slowest_rank": slowest,
        "slowest_node": workers[slowest]["node"],
        "straggler_loss_share": (own_s[slowest] - others_s) / mean_s if mean_s > 0 else 0.0,
        "waiting_share": 1 - fmean(own_s.values()) / mean_s if mean_s > 0 else 0.0,
    }


def rank_rows(workers: Mapping[int, WorkerTime]) -> GroupTime:
    """Returns the workers' times by rank in at most `MAX_ROWS` rows; with more workers a row is the slowest of several."""
    times = [workers[rank] for rank in sorted(workers)]
    neighbours = -(-len(times) // MAX_ROWS)
    rows = [times[start : start + neighbours] for start in range(0, len(times), neighbours)]
    return {
        "ranks": [row[0]["rank"] for row in rows],
        "steps": max(worker["steps"] for worker in times),
        "own_s": [max(worker["own_s"] for worker in row) for row in rows],
    }


class NodeAggregator:
    """Readings of many nodes: minimum, mean and maximum of each figure over all hosts and devices, per round of samples."""

    def __init__(self) -> None:
        self._known_nodes: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self._round: list[System] = []
        self._rounds = 0
        self._ready: list[Entry] = []

    def to_json(self) -> dict[str, Any]:
        """Returns the whole state, for `from_json`."""
        return {
            "known": sorted(self._known_nodes),
            "told": sorted(self._reported),
            "round": self._round,
            "rounds": self._rounds,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the readings of a state from `to_json`."""
        nodes = cls()
        nodes._known_nodes, nodes._reported = set(content["known"]), {(sender, name) for sender, name in content["told"]}
        nodes._round, nodes._rounds = list(content["round"]), content["rounds"]
        return nodes

    def ingest(self, entry: System) -> bool:
        """Returns True if the readings are held: those of the first round, and beyond `MAX_NODES` nodes all."""
        parts = [name.split("/", 2) for name in entry["values"]]
        nodes = {part[1] for part in parts if len(part) == 3 and part[0] == "system"}
        if not nodes:
            return False
        self._known_nodes |= nodes
        # A worker samples its node's host and its GPUs separately.
        reading = entry["sender"], min(entry["values"])
        if reading in self._reported:  # the next round begins
            self._ready += self.flush()
        if self._rounds and len(self._known_nodes) <= MAX_NODES:
            return False
        self._reported.add(reading)
        self._round.append(entry)
        return True

    def drain(self) -> list[Entry]:
        """Returns the entries of the rounds that were completed since the last call."""
        news, self._ready = self._ready, []
        return news

    def flush(self) -> list[Entry]:
        """Closes the incomplete round and returns its entries; with more than `MAX_NODES` nodes a single one."""
        round_entries, self._round, self._reported = self._round, [], set()
        self._rounds += bool(round_entries)
        if not round_entries or len(self._known_nodes) <= MAX_NODES:
            return list(round_entries)
        values_by_figure: dict[str, list[float]] = {}
        for name, value in (item for entry in round_entries for item in entry["values"].items()):
            figure = re.sub(r"_\d+_", "_", name.split("/", 2)[-1])  # over all devices: `gpu_3_power` as `gpu_power`
            if isinstance(value, int | float):
                values_by_figure.setdefault(f"system/{figure}", []).append(value)
        figures: dict[str, float] = {}
        for name, values in values_by_figure.items():
            figures |= {f"{name}_least": min(values), f"{name}_mean": fmean(values), f"{name}_most": max(values)}
        return [new_entry("system", figures, round_entries[-1]["step"])]
