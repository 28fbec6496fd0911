"""Judges from the workers' heartbeats whether a group hangs, and who holds it up.

Workers of a group wait for each other, so a group hangs when none of them has moved for long. A worker that is not even
heard of (stopped, swapped out, its node away) is the one; else the one that has not come to where the others wait. Time is
that of whoever looks, and only as much of it as was watched: no clocks are compared, and a sleeping laptop is no hang.

    detector = HangDetector("auto", every_s=5.0)
    hang = detector.look(recorder.heartbeats(), time.monotonic())         # None, or Hang(culprits=(1,), silent=True, ...)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raystride.pipelines.hang.heartbeat import ENDED, Heartbeat, another_group
from raystride.pipelines.hang.process import Process

HangS = Literal["auto"] | int
"""`launch.hang_s`."""
AUTO_S = 600.0
AUTO_FACTOR = 3.0
FIRST_S = 1800.0
"""For the first steps, which compile, tune and connect; the process group's own limit too."""
WARM_LOOKS = 3
"""Looks at which steps had ended since the last one, after which the first steps are over."""
JUDGED = frozenset({"data", "step", "slot", "forward", "backward", "reduce", "update"})
"""Where a worker that lives must move. How long a validation or a checkpoint may take, nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A group that hangs: who holds it up, and for how long."""

    culprits: tuple[int, ...]
    """The ranks that the others wait for; empty where none stands out."""
    silent: bool
    """Whether these are not even heard of."""
    heartbeats: Mapping[int, Heartbeat]
    """The newest of each worker."""
    seconds: float
    """For which nobody has moved, or nothing was heard of the silent ones."""
    limit_s: float


class HangDetector:
    """Looks at the heartbeats every so many seconds, and remembers what it saw."""

    def __init__(self, hang_s: HangS, every_s: float) -> None:
        self._hang_s, self._most_s = hang_s, 2 * every_s
        self._looked: float | None = None
        self._begin()

    def _begin(self) -> None:
        self._known: dict[int, Heartbeat] = {}
        self._silent_s: dict[int, float] = {}
        self._still_s = self._longest_s = 0.0
        self._warm = 0

    @property
    def limit_s(self) -> float:
        """Seconds without a move that make a hang; half of them where a worker is not heard of."""
        limit = max(AUTO_S, AUTO_FACTOR * self._longest_s) if self._hang_s == "auto" else float(self._hang_s)
        return limit if self._warm >= WARM_LOOKS else max(limit, FIRST_S)

    def look(self, heartbeats: Mapping[int, Heartbeat], now: float) -> Hang | None:
        """Takes in the newest heartbeats at `now`, on any steady clock; a hang, where it is one."""
        # What was not watched does not count: this process may have slept, or waited for the recorder.
        passed = 0.0 if self._looked is None else min(now - self._looked, self._most_s)
        self._looked = now
        if any(another_group(self._known, heartbeat) for heartbeat in heartbeats.values()):
            self._begin()
        self._listen(heartbeats, passed)
        if any(heartbeat.inside == ENDED for heartbeat in self._known.values()):
            return None
        return self._verdict()

    def _listen(self, heartbeats: Mapping[int, Heartbeat], passed: float) -> None:
        judged = any(heartbeat.inside in JUDGED for heartbeat in self._known.values())
        before, self._known = self._known, {**self._known, **heartbeats}
        for rank, heartbeat in self._known.items():
            heard = rank not in before or before[rank].number != heartbeat.number
            self._silent_s[rank] = 0.0 if heard else self._silent_s[rank] + passed
        pairs = [(before[rank], heartbeat) for rank, heartbeat in self._known.items() if rank in before]
        self._warm += any(old.stepped != new.stepped for old, new in pairs)
        if len(pairs) == len(self._known) and all(old.moved == new.moved for old, new in pairs):
            self._still_s += passed
        else:
            if judged:  # from so long a pause the group has come back, so it is none that should end it
                self._longest_s = max(self._longest_s, self._still_s)
            self._still_s = 0.0

    def _verdict(self) -> Hang | None:
        limit = self.limit_s
        silent = tuple(sorted(rank for rank, seconds in self._silent_s.items() if seconds > limit / 2))
        if silent and self._still_s > limit / 2:
            heard_s = max(self._silent_s[rank] for rank in silent)
            return Hang(culprits=silent, silent=True, heartbeats=self._known, seconds=heard_s, limit_s=limit)
        if self._still_s > limit and any(heartbeat.inside in JUDGED for heartbeat in self._known.values()):
            culprits = _apart({rank: heartbeat.inside for rank, heartbeat in self._known.items()})
            return Hang(culprits=culprits, silent=False, heartbeats=self._known, seconds=self._still_s, limit_s=limit)
        return None


def _apart(insides: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks that the others wait for: those not in `reduce` yet, or still without data; empty where all are alike."""
    for late in (
        [rank for rank, inside in insides.items() if inside != "reduce"],
        [rank for rank, inside in insides.items() if inside == "data"],
    ):
        if 0 < len(late) < len(insides):
            return tuple(sorted(late))
    return tuple(insides) if len(insides) == 1 else ()


class Hung(RuntimeError):
    """A group of workers hung, and was ended. `frames` are the culprit's calls, innermost last, where they could be read."""

    def __init__(self, text: str, hang: Hang, frames: list[str]) -> None:
        super().__init__(text)
        self.frames = frames
        self.processes = frozenset(heartbeat.process for heartbeat in hang.heartbeats.values())
        self.worker_failures = dict.fromkeys(hang.culprits[:1], self)
        """As Ray's errors have them, so that the screen names the rank."""


def describe_hang(hang: Hang) -> str:
    """Who holds up whom, where, and for how long, in a line."""
    if not hang.culprits:
        everywhere = ", ".join(sorted({heartbeat.inside or "no phase" for heartbeat in hang.heartbeats.values()}))
        who = f"all {len(hang.heartbeats)} workers have stood still ({everywhere}) and none stands out"
    else:
        first = hang.heartbeats[hang.culprits[0]]
        inside = first.inside or "no phase"
        state = f"has not been heard of, last in {inside}," if hang.silent else f"has stood still in {inside}"
        others = f" (and ranks {', '.join(map(str, hang.culprits[1:]))})" if hang.culprits[1:] else ""
        who = f"{_named(first.process)}{others} {state}"
    rule = f"half of launch.hang_s {hang.limit_s:.0f}" if hang.silent else f"launch.hang_s {hang.limit_s:.0f}"
    return f"{who} for {hang.seconds:.0f} s ({rule})"


def _named(process: Process) -> str:
    return f"rank {process.rank} on {process.node} (pid {process.pid})"
