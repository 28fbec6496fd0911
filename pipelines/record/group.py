"""What many workers and nodes tell, made few before it is recorded: nothing in a run's record grows with their number.

Each worker's own time comes with every log. Over all workers it becomes one comparison (`slowest_rank`, ...) and one entry
`ranks` with 64 rows at most, of each interval at first and then of ever longer bins of them. Of more than eight nodes,
readings of hosts and devices become the least, the mean and the most of all.

    group = Group()
    group.takes(entry)                                        # True: it is summed up here, and not recorded itself
    for entry in group.made(): ...                            # what came of it
"""

import re
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, Self

from raystride.pipelines.record.entry import Entry, GroupTime, System, WorkerTime, new_entry
from raystride.pipelines.record.summary import RunSummary

MIN_OPEN, MAX_OPEN_FIGURES = 64, 200_000
"""Intervals that may wait for a worker's figures, as a worker that died sends none, and figures in all of them together:
after an outage workers send what they have one after another."""
BINS_A_LENGTH = 256
"""Bins of one length; the next ones are twice as long, so that a million intervals make some three thousand."""
MOST_ROWS = 64
"""Of a bin; where there are more workers, a row is the slowest of neighbours."""
MOST_NODES = 8
"""Nodes up to which each one's readings are recorded by themselves."""


class Group:
    """The workers and nodes of an attempt; calls must not overlap."""

    def __init__(self) -> None:
        self._ranks, self._nodes = Ranks(), Nodes()

    def takes(self, entry: Entry) -> bool:
        """Whether the entry is summed up here instead of being recorded. Raises KeyError where a figure is missing."""
        if entry["kind"] == "rank":
            self._ranks.see(entry["step"], entry["values"])
            return True
        return entry["kind"] == "system" and self._nodes.see(entry)

    def made(self) -> list[Entry]:
        """The entries that have come of it since the last call."""
        return self._ranks.take_news() + self._nodes.take_news()

    def rest(self) -> list[Entry]:
        """The entries of what is not complete, at the end of the record."""
        return self.made() + self._ranks.rest() + self._nodes.rest()

    def figures(self) -> RunSummary:
        """The workers compared over all intervals; empty for a single one, or while one's figures are missing."""
        return self._ranks.figures()

    def to_json(self) -> dict[str, Any]:
        """Returns all that is summed up here, as `restored` takes it."""
        return {"ranks": self._ranks.to_json(), "nodes": self._nodes.to_json()}

    @classmethod
    def restored(cls, content: Mapping[str, Any], bins_recorded: int) -> Self:
        """Returns the group that `to_json` told of. Of bins that were recorded since, none is made a second time."""
        group = cls()
        group._ranks = Ranks.restored(content["ranks"], bins_recorded)
        group._nodes = Nodes.restored(content["nodes"])
        return group


class Ranks:
    """The times of a group's workers: of each interval, of bins of intervals, and of all so far."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, WorkerTime]] = {}
        self._bin: dict[int, WorkerTime] = {}
        self._intervals = self._bins = self._step = 0
        self._sums: dict[int, WorkerTime] = {}
        self._world = 0
        self._news: list[Entry] = []
        self._made = self._skipped = 0
        """Bins that were closed, and how many of the next ones are in the journal already."""

    def to_json(self) -> dict[str, Any]:
        """Returns everything, as `restored` takes it."""
        return {
            "open": [[step, list(interval.values())] for step, interval in self._open.items()],
            "bin": list(self._bin.values()),
            "sums": list(self._sums.values()),
            "counts": [self._intervals, self._bins, self._step, self._world, self._made],
        }

    @classmethod
    def restored(cls, content: Mapping[str, Any], recorded: int) -> Self:
        """Returns what `to_json` told of, where so many bins have been recorded by now."""
        ranks = cls()
        ranks._open = {step: {each["rank"]: each for each in values} for step, values in content["open"]}
        ranks._bin, ranks._sums = ({each["rank"]: each for each in content[name]} for name in ("bin", "sums"))
        ranks._intervals, ranks._bins, ranks._step, ranks._world, ranks._made = content["counts"]
        ranks._skipped = max(0, recorded - ranks._made)
        return ranks

    def see(self, step: int | None, values: WorkerTime) -> None:
        """Takes in a worker's figures of the interval that ended with `step`. Raises KeyError where one is missing."""
        rank, world = int(values["rank"]), int(values["world"])
        if world != self._world:  # the group was started anew, smaller or larger: its ranks are others
            self._news += self.rest()
            self._open, self._sums, self._world = {}, {}, world
        _add(self._sums, values)
        if step is None:
            return
        interval = self._open.setdefault(step, {})
        interval[rank] = values
        if len(interval) == world:
            self._end_interval(step, self._open.pop(step))
        elif len(self._open) > max(MIN_OPEN, MAX_OPEN_FIGURES // world):
            del self._open[min(self._open)]

    def take_news(self) -> list[Entry]:
        """The entries of the bins that were completed since the last call."""
        news, self._news = self._news, []
        return news

    def rest(self) -> list[Entry]:
        """The entries of the bin that is not complete, which is closed by it."""
        if not self._bin:
            return []
        compared = {key: value for key, value in compare(self._bin).items() if isinstance(value, int | float)}
        rest = [new_entry("system", compared, self._step), new_entry("ranks", rows(self._bin), self._step)]
        self._bin, self._intervals = {}, 0
        self._made += 1
        if self._skipped:
            self._skipped -= 1
            return []
        return rest

    def figures(self) -> RunSummary:
        """The comparison over all intervals; empty for a single worker, or while one's figures are missing."""
        return compare(self._sums) if self._world > 1 and len(self._sums) == self._world else {}

    def _end_interval(self, step: int, interval: dict[int, WorkerTime]) -> None:
        for values in interval.values():
            _add(self._bin, values)
        self._intervals += 1
        self._step = step
        if self._intervals >= 2 ** (self._bins // BINS_A_LENGTH):
            self._bins += 1
            self._news += self.rest()


def _add(sums: dict[int, WorkerTime], values: WorkerTime) -> None:
    """Adds a worker's figures to its sums."""
    before = sums.get(values["rank"])
    if before is None:
        sums[values["rank"]] = values.copy()
        return
    before["steps"] += values["steps"]
    before["seconds"] += values["seconds"]
    before["own_s"] += values["own_s"]
    before["data_s"] += values["data_s"]


def compare(workers: Mapping[int, WorkerTime]) -> RunSummary:
    """The slowest of several workers, its node, and what the group lost by it."""
    own = {rank: values["own_s"] for rank, values in workers.items()}
    slowest = max(own, key=lambda rank: own[rank])
    others = median(seconds for rank, seconds in own.items() if rank != slowest)
    lasted = fmean(values["seconds"] for values in workers.values())
    return {
        "slowest_rank": slowest,
        "slowest_node": workers[slowest]["node"],
        "straggler_loss_share": (own[slowest] - others) / lasted if lasted > 0 else 0.0,
        "waiting_share": 1 - fmean(own.values()) / lasted if lasted > 0 else 0.0,
    }


def rows(workers: Mapping[int, WorkerTime]) -> GroupTime:
    """The workers' times by rank, in at most `MOST_ROWS` rows: with more workers the slowest of each so many neighbours."""
    times = [workers[rank] for rank in sorted(workers)]
    neighbours = -(-len(times) // MOST_ROWS)
    kept = [times[at : at + neighbours] for at in range(0, len(times), neighbours)]
    return {
        "ranks": [row[0]["rank"] for row in kept],
        "steps": max(each["steps"] for each in times),
        "own_s": [max(each["own_s"] for each in row) for row in kept],
    }


class Nodes:
    """Readings of many nodes: each figure's least, mean and most over all hosts and devices, once a round of samples."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._round: list[System] = []
        self._rounds = 0
        self._news: list[Entry] = []

    def to_json(self) -> dict[str, Any]:
        """Returns everything, as `restored` takes it."""
        return {"known": sorted(self._known), "told": sorted(self._told), "round": self._round, "rounds": self._rounds}

    @classmethod
    def restored(cls, content: Mapping[str, Any]) -> Self:
        """Returns what `to_json` told of."""
        nodes = cls()
        nodes._known, nodes._told = set(content["known"]), {(sender, name) for sender, name in content["told"]}
        nodes._round, nodes._rounds = list(content["round"]), content["rounds"]
        return nodes

    def see(self, entry: System) -> bool:
        """Whether the readings are kept here: of the first round for a while, later ones of more than `MOST_NODES` nodes."""
        parts = [name.split("/", 2) for name in entry["values"]]
        nodes = {part[1] for part in parts if len(part) == 3 and part[0] == "system"}
        if not nodes:
            return False
        self._known |= nodes
        # A worker reads its node's host and its GPUs, each by itself.
        what = entry["sender"], min(entry["values"])
        if what in self._told:  # the next round begins
            self._news += self.rest()
        if self._rounds and len(self._known) <= MOST_NODES:
            return False
        self._told.add(what)
        self._round.append(entry)
        return True

    def take_news(self) -> list[Entry]:
        """The entries of the rounds that were completed since the last call."""
        news, self._news = self._news, []
        return news

    def rest(self) -> list[Entry]:
        """What comes of the round that is not complete, which is closed by it: its entries, of many nodes a single one."""
        told, self._round, self._told = self._round, [], set()
        self._rounds += bool(told)
        if not told or len(self._known) <= MOST_NODES:
            return list(told)
        found: dict[str, list[float]] = {}
        for name, value in (item for entry in told for item in entry["values"].items()):
            figure = re.sub(r"_\d+_", "_", name.split("/", 2)[-1])  # of all devices together: `gpu_3_power` as `gpu_power`
            if isinstance(value, int | float):
                found.setdefault(f"system/{figure}", []).append(value)
        figures: dict[str, float] = {}
        for name, values in found.items():
            figures |= {f"{name}_least": min(values), f"{name}_mean": fmean(values), f"{name}_most": max(values)}
        return [new_entry("system", figures, told[-1]["step"])]
