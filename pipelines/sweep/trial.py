"""One trial: a real training under Ray Train, watched until it is measured precisely enough.

    result = run_trial(candidate, storage, Resources.of_cluster(), tags, tell=lambda window: True)

This runs in the process that drives the trial; what computes are Ray Train's workers, which are new for each trial. What the
training prints goes to `trial.txt` in its own folder.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.cluster.resources import Resources, resolve
from raystride.pipelines.config import SettingError
from raystride.pipelines.config.sweep import Sweep, SweepConfig
from raystride.pipelines.files import Folder
from raystride.pipelines.hang.detector import Hung
from raystride.pipelines.launch.driver import train
from raystride.pipelines.launch.failure import OUT_OF_MEMORY, TrainingFailed, first_cause
from raystride.pipelines.launch.preflight import checks_of_settings
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.launch.session import Watcher
from raystride.pipelines.plugins import Carried
from raystride.pipelines.record import read_entries
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.journal import JournalTail
from raystride.pipelines.record.state import TrainingState
from raystride.pipelines.sources.faults import DataError
from raystride.pipelines.sweep.result import (
    FIGURES,
    MEASURED,
    MeasuredWindow,
    Result,
    Status,
    mean_shares,
    relative_half_width,
    seconds_to_loss,
    windows_of,
)
from raystride.pipelines.sweep.space import Candidate

LEAVE_S = 30.0
"""How long a trial whose time is up may take to end by itself."""


@dataclass(frozen=True)
class SweepPlan:
    """What all trials of a sweep share."""

    base: SweepConfig
    storage: Folder
    price_per_hour: float
    """Of a worker; 0: unknown."""
    there: Resources
    """What the cluster has."""
    carried: Carried = field(default_factory=Carried, repr=False)
    """What the sweep's own script has registered."""

    @property
    def folder(self) -> Folder:
        """The sweep's own folder, with its results and its page."""
        assert self.base.run
        return self.storage / self.base.run


class TookTooLong(TimeoutError):
    """A trial that did not end in its time, and not when it was asked to either."""


class Measuring(Watcher):
    """Looks at a trial's windows as they come, and says when there are enough of them, or no more are wanted.

    `tell` hears of each window, and says whether the trial is to go on.
    """

    def __init__(self, candidate: Candidate, folder: Folder, tell: Callable[[MeasuredWindow], bool]) -> None:
        self._sweep, self._folder, self._tell = candidate.base.sweep, folder, tell
        self._deadline = time.monotonic() + self._sweep.timeout_s
        self._journal, self._entries = JournalTail(folder), list[Entry]()
        self._told = self._step = 0
        self.unwanted = False
        """Whether `tell` ended the trial."""
        self.error: BaseException | None = None

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Reads what is new in the journal. Raises TookTooLong where the trial does not end in its time."""
        late = time.monotonic() - self._deadline
        # Where there are windows to keep, the trial is asked to end, and has a while for it.
        if late > (LEAVE_S if self._told else 0):
            raise TookTooLong(f"it took longer than sweep.timeout_s, {self._sweep.timeout_s:g} s")
        step = state.get("step") or 0
        if late > 0:
            request_stop()
        if step == self._step or self.unwanted:
            return
        self._step = step
        try:
            self._entries += self._journal.new()
        except OSError:  # a storage that is away for a moment: the next look reads more
            return
        windows = windows_of(self._entries)
        self.unwanted = not all(self._tell(window) for window in windows[self._told :])
        self._told = len(windows)
        if self.unwanted or enough(windows, self._sweep):
            request_stop()

    def on_failure(self, error: BaseException) -> None:
        """Keeps what ended the training."""
        self.error = error


def refusal(candidate: Candidate, there: Resources) -> Result | None:
    """The result of a candidate that is not started: refused by a rule, or by the preflight's estimate of its memory."""
    if candidate.config is None:
        return ended(candidate, "refused", candidate.refusal)
    try:
        share = resolve(candidate.config, there)
    except SettingError as error:
        return ended(candidate, "refused", str(error))
    *others, memory = checks_of_settings(candidate.config, share, there, candidate.config.tokenizer.vocabulary_size)
    for check in others:
        if not check.passed:
            return ended(candidate, "refused", f"{check.name}: {check.found}")
    return None if memory.passed else ended(candidate, "too_large", memory.found)


def run_trial(
    candidate: Candidate,
    storage: Folder,
    there: Resources,
    tags: Mapping[str, str],
    tell: Callable[[MeasuredWindow], bool],
    carried: Carried | None = None,
) -> Result:
    """Trains the candidate's settings to the end of their windows; what became of it. Needs Ray."""
    config = candidate.config
    assert config
    began = time.monotonic()
    folder = storage / candidate.run
    watcher = Measuring(candidate, folder, tell)
    refused = ""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "trial.txt"
        try:
            with path.open("w") as file, redirect_stdout(file), redirect_stderr(file):
                train(config, storage, Screen(), watcher, tags, carried)
        except TrainingFailed:
            pass  # the watcher has what it raised
        except (CannotRun, SettingError, DataError) as error:
            refused = str(error)
        finally:
            # Also of a trial that failed: what it printed may say why.
            folder.upload(path, path.name)
    seconds = time.monotonic() - began
    if refused:
        return ended(candidate, "refused", refused, seconds=seconds)
    if watcher.error:
        return result_of(candidate, folder, there, *why(watcher.error), seconds=seconds)
    return result_of(candidate, folder, there, "stopped_early" if watcher.unwanted else "measured", seconds=seconds)


def why(error: BaseException) -> tuple[Status, str]:
    """What kind of end this was, and its cause in a line."""
    rank, cause = first_cause(error)
    first, *_ = str(cause).strip().splitlines() or [""]  # below it, Ray writes of memory whatever the cause
    text = (f"rank {rank}: " if rank is not None else "") + f"{type(cause).__name__}: {first}".removesuffix(": ")
    if isinstance(cause, Hung | TookTooLong):
        return "hung", text
    return "out_of_memory" if OUT_OF_MEMORY.search(text) else "failed", text


def ended(candidate: Candidate, status: Status, cause: str, seconds: float = 0.0) -> Result:
    """The result of a trial without figures."""
    return Result(
        key=candidate.key,
        run=candidate.run,
        settings=dict(candidate.settings),
        label=candidate.label,
        round=candidate.round,
        status=status,
        cause=cause,
        seconds=seconds,
    )


def result_of(
    candidate: Candidate, folder: Folder, there: Resources, status: Status, cause: str = "", seconds: float = 0.0
) -> Result:
    """The result from what the trial left in its folder; failed where that has no window after the warm-up."""
    sweep = candidate.base.sweep
    entries = read_entries(folder)
    windows = windows_of(entries)
    kept = [window for window in windows if window.begin >= sweep.warmup_steps]
    if not kept:
        without = "it ended before the first window after the warm-up"
        return ended(candidate, "failed" if status in MEASURED else status, cause or without, seconds)
    summary = folder.read_json("summary.json") if folder.exists("summary.json") else {}
    trained = sum(window.step_seconds * (window.end - window.begin) for window in windows)
    told = [entry["values"] for entry in entries if entry["kind"] == "parameters"]
    parameters: Mapping[str, Any] = told[-1] if told else {}
    device, threads = _device(folder, str(parameters.get("device", ""))), int(parameters.get("threads", 0))
    return replace(
        ended(candidate, status, cause, seconds),
        workers=int(parameters.get("workers", 0)),
        device=device,
        threads=threads,
        places_per_node=_places_per_node(there, device, threads),
        tokens_per_step=kept[-1].tokens_per_second * kept[-1].step_seconds,
        speeds=tuple(window.tokens_per_second for window in kept),
        step_seconds=tuple(window.step_seconds for window in kept),
        shares=mean_shares(kept),
        figures={name: summary[name] for name in FIGURES if summary.get(name) is not None},
        seconds_to_loss=seconds_to_loss(windows, sweep.target_loss) if sweep.target_loss else None,
        loss=kept[-1].loss,
        val_loss=_validated(summary) if sweep.objective == "loss" else None,
        overhead_s=max(0.0, seconds - trained),
    )


def enough(windows: list[MeasuredWindow], sweep: Sweep) -> bool:
    """Whether a trial may end early: the loss is reached where that is the aim, else the speed is known well enough."""
    if sweep.objective == "time_to_loss":
        return seconds_to_loss(windows, sweep.target_loss) is not None
    if sweep.objective == "loss":
        return False  # losses are compared after equally many steps
    speeds = [window.tokens_per_second for window in windows if window.begin >= sweep.warmup_steps]
    return len(speeds) >= sweep.least_windows and relative_half_width(speeds) <= sweep.precision


def _validated(summary: Mapping[str, Any]) -> float | None:
    """The validation loss at the end; infinite where it is no number, which the summary has as a word."""
    found = summary.get("val_loss")
    return math.inf if isinstance(found, str) else found


def _device(folder: Folder, kind: str) -> str:
    """What a worker computed on, by name: `cpu`, or the GPUs' of the head node."""
    gpus = folder.read_json("environment.json").get("gpus") if kind == "cuda" else None
    return str(gpus[0]["name"]) if gpus else kind


def _places_per_node(there: Resources, device: str, threads: int) -> int:
    """How many workers find a place on one node of the cluster."""
    if device != "cpu":
        return max(1, int(there.gpus // there.nodes))
    return max(1, int(max(there.node_cpus, default=there.cpus) // max(1, threads)))
