"""One trial: a real training under Ray Train, watched until it is measured precisely enough.

    result = run_trial(candidate, storage, Resources.of_cluster(), tags, on_window=lambda window: True)

This runs in the process that drives the trial; Ray Train's workers, new for each trial, compute. The training's output
goes to `trial.txt` in its own folder.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from raystride.pipelines.config import SettingError
from raystride.pipelines.config.attempts import read_environment
from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
from raystride.pipelines.data.plugins import PluginBundle
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.cluster.resources import Resources, resolve_allocation
from raystride.pipelines.launch.console.failure import OUT_OF_MEMORY, TrainingFailed, first_cause
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.console.session import Watcher
from raystride.pipelines.launch.hang.detector import Hung
from raystride.pipelines.launch.preflight.checks import check_settings
from raystride.pipelines.launch.provenance import OWNER_TAG
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.journal import JournalTail
from raystride.pipelines.observability.record.state import TrainingState
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.sweep.result import (
    KEPT_FIGURES,
    STATUSES_WITH_FIGURES,
    MeasuredWindow,
    Result,
    Status,
    extract_windows,
    mean_shares,
    relative_half_width,
    seconds_to_loss,
)
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.system.storage.folder import Folder

BUSY_INTERVAL_S = 0.5
GRACE_S = 30.0
"""Time that a trial beyond its timeout has to end by itself."""


@dataclass(frozen=True)
class SweepPlan:
    """Common parameters of all trials of a sweep."""

    base: SweepJobConfig
    storage: Folder
    price_per_hour: float
    """Price of a worker; 0: unknown."""
    resources: Resources
    """Resources of the cluster."""
    plugins: PluginBundle = field(default_factory=PluginBundle, repr=False)
    """Plug-ins that the sweep's own script has registered."""
    owner: str = ""
    """Whom the trials are charged to: where they are driven, nobody's variables hold."""

    @property
    def tags(self) -> dict[str, str]:
        """Tags of each trial in MLflow."""
        source = {"mlflow.source.name": f"raystride sweep {self.base.run}", "raystride.sweep": str(self.base.run)}
        return source | ({OWNER_TAG: self.owner} if self.owner else {})

    @property
    def folder(self) -> Folder:
        """The sweep's own folder, with its results and its page."""
        assert self.base.run
        return self.storage / self.base.run


class TrialTimeout(TimeoutError):
    """A trial exceeded its timeout, and did not end when it was asked to."""


class TrialWatcher(Watcher):
    """Watches a trial's windows, and stops it when there are enough of them, or no more are wanted.

    `on_window` gets each window, and returns False to stop the trial.
    """

    def __init__(self, candidate: Candidate, folder: Folder, on_window: Callable[[MeasuredWindow], bool]) -> None:
        self._sweep, self._folder, self._on_window = candidate.base.sweep, folder, on_window
        self._deadline = time.monotonic() + self._sweep.timeout_s
        self._journal, self._entries = JournalTail(folder), list[Entry]()
        self._num_reported = self._step = 0
        self.is_unwanted = False
        """True if `on_window` ended the trial."""
        self.error: BaseException | None = None

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Reads new entries of the journal. Raises TrialTimeout if the trial exceeds its timeout."""
        overtime_s = time.monotonic() - self._deadline
        # If there are windows to keep, the trial is asked to end, and has a grace period.
        if overtime_s > (GRACE_S if self._num_reported else 0):
            raise TrialTimeout(f"it took longer than sweep.timeout_s, {self._sweep.timeout_s:g} s")
        step = state.get("step") or 0
        if overtime_s > 0:
            request_stop()
        if step == self._step or self.is_unwanted:
            return
        self._step = step
        try:
            self._entries += self._journal.read_new()
        except OSError:  # the storage is unreachable for a moment: the next call reads more
            return
        windows = extract_windows(self._entries)
        self.is_unwanted = not all(self._on_window(window) for window in windows[self._num_reported :])
        self._num_reported = len(windows)
        if self.is_unwanted or is_precise_enough(windows, self._sweep):
            request_stop()

    def on_failure(self, error: BaseException) -> None:
        """Keeps the error that ended the training."""
        self.error = error


def refuse_candidate(candidate: Candidate, resources: Resources) -> Result | None:
    """Returns the result of a candidate that is not started, by a rule or by the preflight's memory estimate; None if it is
    fine."""
    if candidate.config is None:
        return result_without_figures(candidate, "refused", candidate.refusal)
    try:
        share = resolve_allocation(candidate.config, resources)
    except SettingError as error:
        return result_without_figures(candidate, "refused", str(error))
    *others, memory = check_settings(candidate.config, share, resources)
    for check in others:
        if not check.passed:
            return result_without_figures(candidate, "refused", f"{check.name}: {check.found}")
    return None if memory.passed else result_without_figures(candidate, "too_large", memory.found)


def run_trial(
    candidate: Candidate,
    storage: Folder,
    resources: Resources,
    tags: Mapping[str, str],
    on_window: Callable[[MeasuredWindow], bool],
    plugins: PluginBundle | None = None,
) -> Result:
    """Trains the candidate's settings to the end of their windows; returns the outcome. Needs Ray."""
    config = candidate.config
    assert config
    busy_share = measure_busy_share()
    start = time.monotonic()
    folder = storage / candidate.run
    watcher = TrialWatcher(candidate, folder, on_window)
    refusal = ""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "trial.txt"
        try:
            with path.open("w") as file, redirect_stdout(file), redirect_stderr(file):
                train(config, storage, Screen(), watcher, tags, plugins)
        except TrainingFailed:
            pass  # the watcher has the error
        except (CannotRun, SettingError, DataError) as error:
            refusal = str(error)
        finally:
            # Also for a trial that failed: its output may say why.
            folder.upload(path, path.name)
    seconds = time.monotonic() - start
    if refusal:
        return result_without_figures(candidate, "refused", refusal, seconds=seconds)
    if watcher.error:
        return build_result(candidate, folder, resources, *classify_failure(watcher.error), seconds=seconds)
    status: Status = "stopped_early" if watcher.is_unwanted else "measured"
    return replace(build_result(candidate, folder, resources, status, seconds=seconds), busy_share=busy_share)


def measure_busy_share() -> float:
    """Returns the share of this machine's processors in use, over half a second in which no trial runs here."""
    return float(psutil.cpu_percent(BUSY_INTERVAL_S)) / 100


def classify_failure(error: BaseException) -> tuple[Status, str]:
    """Returns the status of a failed trial, and its cause in a line."""
    rank, cause = first_cause(error)
    first, *_ = str(cause).strip().splitlines() or [""]  # below it, Ray mentions memory whatever the cause
    text = (f"rank {rank}: " if rank is not None else "") + f"{type(cause).__name__}: {first}".removesuffix(": ")
    if isinstance(cause, Hung | TrialTimeout):
        return "hung", text
    return "out_of_memory" if OUT_OF_MEMORY.search(text) else "failed", text


def result_without_figures(candidate: Candidate, status: Status, cause: str, seconds: float = 0.0) -> Result:
    """Returns the result of a trial without figures."""
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


def build_result(
    candidate: Candidate, folder: Folder, resources: Resources, status: Status, cause: str = "", seconds: float = 0.0
) -> Result:
    """Returns the result from the trial's folder; failed if that has no window after the warm-up."""
    sweep = candidate.sweep
    entries = read_entries(folder)
    windows = extract_windows(entries)
    measured = [window for window in windows if window.begin >= sweep.warmup_steps]
    if not measured:
        without = "it ended before the first window after the warm-up"
        return result_without_figures(
            candidate, "failed" if status in STATUSES_WITH_FIGURES else status, cause or without, seconds
        )
    summary = read_summary(folder)
    training_s = sum(window.step_seconds * (window.end - window.begin) for window in windows)
    reported = [entry["values"] for entry in entries if entry["kind"] == "parameters"]
    parameters: Mapping[str, Any] = reported[-1] if reported else {}
    device, threads = _device_name(folder, str(parameters.get("device", ""))), int(parameters.get("threads", 0))
    return replace(
        result_without_figures(candidate, status, cause, seconds),
        workers=int(parameters.get("workers", 0)),
        device=device,
        threads=threads,
        places_per_node=_places_per_node(resources, device, threads),
        tokens_per_step=measured[-1].tokens_per_second * measured[-1].step_seconds,
        speeds=tuple(window.tokens_per_second for window in measured),
        step_seconds=tuple(window.step_seconds for window in measured),
        shares=mean_shares(measured),
        figures={name: summary[name] for name in KEPT_FIGURES if summary.get(name) is not None},
        seconds_to_loss=seconds_to_loss(windows, sweep.target_loss) if sweep.target_loss else None,
        loss=measured[-1].loss,
        val_loss=_final_val_loss(summary) if sweep.by_quality else None,
        **_final_metric(candidate.base, summary),
        overhead_s=max(0.0, seconds - training_s),
    )


def is_precise_enough(windows: list[MeasuredWindow], sweep: SweepConfig) -> bool:
    """Returns True if a trial may end early: the loss is reached if that is the aim, else the speed is known precisely
    enough."""
    if sweep.objective == "time_to_loss":
        return seconds_to_loss(windows, sweep.target_loss) is not None
    if sweep.by_quality:
        return False  # losses are compared after equally many steps
    speeds = [window.tokens_per_second for window in windows if window.begin >= sweep.warmup_steps]
    return len(speeds) >= sweep.min_windows and relative_half_width(speeds) <= sweep.target_precision


def _final_val_loss(summary: Mapping[str, Any]) -> float | None:
    """Returns the validation loss at the end; infinite if it is not finite, as the summary has a word then."""
    val_loss = summary.get("val_loss")
    return math.inf if isinstance(val_loss, str) else val_loss


def _final_metric(base: SweepJobConfig, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the metric at the end, if that is the objective."""
    if base.sweep.objective != "metric":
        return {}
    name = base.validation.metric
    value = (summary.get("metrics") or {}).get(name, summary.get(name))
    # A figure that is not finite is a word in the summary.
    number = float(value) if isinstance(value, int | float) else None
    return {"metric": number, "metric_name": name, "direction": base.validation.better}


def _device_name(folder: Folder, kind: str) -> str:
    """Returns the device of a worker: `cpu`, or the name of the head node's GPUs."""
    gpus = read_environment(folder).get("gpus") if kind == "cuda" else None
    return str(gpus[0]["name"]) if gpus else kind


def _places_per_node(resources: Resources, device: str, threads: int) -> int:
    """Returns the number of workers that fit on one node of the cluster."""
    if device != "cpu":
        return max(1, int(resources.gpus // resources.nodes))
    return max(1, int(max(resources.node_cpus, default=resources.cpus) // max(1, threads)))
