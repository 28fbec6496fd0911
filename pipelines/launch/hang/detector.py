"""Detects a hanging worker group from heartbeats, and the ranks that block the others.

Workers of a group wait for each other, so a group hangs when none of them makes progress for long. The culprit is a worker
without heartbeats (stopped, swapped out, its node lost); if there is none, a worker that has not reached the phase in which
the others wait. Time is measured by the observing process, and only while it observes: no clocks are compared, and a
suspended laptop is no hang.

    detector = HangDetector("auto", every_s=5.0)
    hang = detector.check(recorder.heartbeats(), time.monotonic())        # None, or Hang(culprits=(1,), silent=True, ...)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raystride.pipelines.launch.hang.heartbeat import ENDED, Heartbeat, is_new_generation
from raystride.pipelines.launch.hang.process import Process

HangTimeout = Literal["auto"] | int
"""`launch.hang_s`."""
AUTO_S = 600.0
AUTO_FACTOR = 3.0
FIRST_STEPS_S = 1800.0
"""Limit for the first steps, which compile, tune and connect; also the process group's own limit."""
WARMUP_CHECKS = 3
"""Number of checks that saw finished steps, after which the first steps are over."""
TRAINING_PHASES = frozenset({"data", "step", "slot", "forward", "backward", "reduce", "update"})
"""Phases in which a live worker must make progress. The duration of a validation or a checkpoint has no known bound."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A hang of a worker group: its culprits and its duration."""

    culprits: tuple[int, ...]
    """The ranks that the others wait for; empty if none stands out."""
    silent: bool
    """Whether the culprits send no heartbeats."""
    heartbeats: Mapping[int, Heartbeat]
    """The newest heartbeat of each worker."""
    seconds: float
    """Seconds without progress of any worker, or without heartbeats of the silent ones."""
    limit_s: float


class HangDetector:
    """Checks the heartbeats periodically and accumulates the time without progress."""

    def __init__(self, hang_s: HangTimeout, every_s: float) -> None:
        self._hang_s, self._max_gap_s = hang_s, 2 * every_s
        self._last_check: float | None = None
        self._reset()

    def _reset(self) -> None:
        self._known: dict[int, Heartbeat] = {}
        self._silent_s: dict[int, float] = {}
        self._still_s = self._longest_s = 0.0
        self._warm = 0

    @property
    def limit_s(self) -> float:
        """Seconds without progress that count as a hang; half of them for a worker without heartbeats."""
        limit = max(AUTO_S, AUTO_FACTOR * self._longest_s) if self._hang_s == "auto" else float(self._hang_s)
        return limit if self._warm >= WARMUP_CHECKS else max(limit, FIRST_STEPS_S)

    def check(self, heartbeats: Mapping[int, Heartbeat], now: float) -> Hang | None:
        """Processes the newest heartbeats at `now`, on any steady clock; returns a hang, or None."""
        # Unobserved time does not count: this process may have slept, or waited for the recorder.
        elapsed = 0.0 if self._last_check is None else min(now - self._last_check, self._max_gap_s)
        self._last_check = now
        if any(is_new_generation(self._known, heartbeat) for heartbeat in heartbeats.values()):
            self._reset()
        self._update_timers(heartbeats, elapsed)
        if any(heartbeat.current_phase == ENDED for heartbeat in self._known.values()):
            return None
        return self._find_hang()

    def _update_timers(self, heartbeats: Mapping[int, Heartbeat], elapsed: float) -> None:
        in_training = any(heartbeat.current_phase in TRAINING_PHASES for heartbeat in self._known.values())
        before, self._known = self._known, {**self._known, **heartbeats}
        for rank, heartbeat in self._known.items():
            is_new = rank not in before or before[rank].number != heartbeat.number
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + elapsed
        pairs = [(before[rank], heartbeat) for rank, heartbeat in self._known.items() if rank in before]
        self._warm += any(old.step_s != new.step_s for old, new in pairs)
        if len(pairs) == len(self._known) and all(old.progress_mark == new.progress_mark for old, new in pairs):
            self._still_s += elapsed
        else:
            if in_training:  # the group recovered from a pause this long, so it is not a hang
                self._longest_s = max(self._longest_s, self._still_s)
            self._still_s = 0.0

    def _find_hang(self) -> Hang | None:
        limit = self.limit_s
        silent = tuple(sorted(rank for rank, seconds in self._silent_s.items() if seconds > limit / 2))
        if silent and self._still_s > limit / 2:
            heard_s = max(self._silent_s[rank] for rank in silent)
            return Hang(culprits=silent, silent=True, heartbeats=self._known, seconds=heard_s, limit_s=limit)
        if self._still_s > limit and any(heartbeat.current_phase in TRAINING_PHASES for heartbeat in self._known.values()):
            culprits = _find_culprits({rank: heartbeat.current_phase for rank, heartbeat in self._known.items()})
            return Hang(culprits=culprits, silent=False, heartbeats=self._known, seconds=self._still_s, limit_s=limit)
        return None


def _find_culprits(phases: Mapping[int, str]) -> tuple[int, ...]:
    """Returns the ranks that the others wait for: not in `reduce` yet, or still without data; empty if all are equal."""
    for late in (
        [rank for rank, current_phase in phases.items() if current_phase != "reduce"],
        [rank for rank, current_phase in phases.items() if current_phase == "data"],
    ):
        if 0 < len(late) < len(phases):
            return tuple(sorted(late))
    return tuple(phases) if len(phases) == 1 else ()


class Hung(RuntimeError):
    """A group of workers hung and was killed. `frames` are the culprit's calls, innermost last, if they could be read."""

    def __init__(self, text: str, hang: Hang, frames: list[str]) -> None:
        super().__init__(text)
        self.frames = frames
        self.processes = frozenset(heartbeat.process for heartbeat in hang.heartbeats.values())
        self.worker_failures = dict.fromkeys(hang.culprits[:1], self)
        """Same attribute as Ray's errors, so that the screen names the rank."""


def describe_hang(hang: Hang) -> str:
    """Describes a hang in one line: culprits, their phase, and the duration."""
    if not hang.culprits:
        everywhere = ", ".join(sorted({heartbeat.current_phase or "no phase" for heartbeat in hang.heartbeats.values()}))
        subject = f"all {len(hang.heartbeats)} workers have stood still ({everywhere}) and none stands out"
    else:
        first = hang.heartbeats[hang.culprits[0]]
        current_phase = first.current_phase or "no phase"
        state = f"has not been heard of, last in {current_phase}," if hang.silent else f"has stood still in {current_phase}"
        others = f" (and ranks {', '.join(map(str, hang.culprits[1:]))})" if hang.culprits[1:] else ""
        subject = f"{_describe_process(first.process)}{others} {state}"
    rule = f"half of launch.hang_s {hang.limit_s:.0f}" if hang.silent else f"launch.hang_s {hang.limit_s:.0f}"
    return f"{subject} for {hang.seconds:.0f} s ({rule})"


def _describe_process(process: Process) -> str:
    return f"rank {process.rank} on {process.node} (pid {process.pid})"
