"""The outcome of a trial: its figures, or the reason why it has none. One file each in the sweep's folder, written at its
end.

    windows = [window for window in extract_windows(read_entries(folder)) if window.begin >= 10]
    relative_half_width([window.tokens_per_second for window in windows])       # 0.02: known to 2 %
    save_result(sweep_folder, result); load_results(sweep_folder)    # of all trials so far, by key

A window is the interval between two lines of the log; its speed is that of its steps by the host's clock. The spread of
a figure is the 95 % interval of the windows' mean. Neighbours in time are alike, by how much a few windows cannot tell: the
interval is one over all correlations of neighbours from 0 to 0.8 (`python -m benchmarks.coverage`).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from raystride.pipelines.config import Config
from raystride.pipelines.config.renamed import with_current_names
from raystride.pipelines.config.train import cost_of
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES
from raystride.pipelines.observability.record.journal import to_json_value
from raystride.pipelines.sweep.space import Candidate
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import put_sealed, read_sealed

Status = Literal["measured", "stopped_early", "out_of_memory", "failed", "hung", "refused", "too_large"]
"""How a trial ended. `refused`: the settings contradict each other; `too_large`: the memory estimate ruled it out before it
started; `stopped_early`: the scheduler found others better."""
STATUSES_WITH_FIGURES = ("measured", "stopped_early")
"""Statuses of trials with figures."""
RETRYABLE_STATUSES = ("out_of_memory", "failed", "hung")
"""Statuses of trials that might have figures if they were measured again."""
TRIALS_FOLDER = "trials"
KEPT_FIGURES = (
    "joules_per_token",
    "energy_covers",
    "average_power_watts",
    "peak_memory_bytes",
    "mfu",
    "parameters",
    "flops_per_token",
    "seconds_to_first_step",
    "throttled_seconds",
    "gpu_idle_share",
    "straggler_loss_share",
)
"""Figures of the run's summary that a trial keeps."""


@dataclass(frozen=True)
class MeasuredWindow:
    """A few steps that were measured together."""

    begin: int
    """The step before the first of them."""
    end: int
    """The last of them."""
    tokens_per_second: float
    step_seconds: float
    """Mean of its steps."""
    shares: Mapping[str, float]
    """Shares of its time, by part of a step; see `observability.phases`."""
    loss: float | None
    """Mean training loss of its steps; None if it is not finite."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A trial that has ended: its figures, or the reason why it has none."""

    key: str
    run: str
    settings: dict[str, Any]
    label: str
    round: int
    status: Status
    cause: str = ""
    """The reason for missing figures."""
    workers: int = 0
    device: str = ""
    """`cpu`, or the GPU by name."""
    threads: int = 0
    places_per_node: int = 1
    """Number of such workers that fit on one node."""
    tokens_per_step: float = 0.0
    speeds: tuple[float, ...] = ()
    """Tokens a second of each window."""
    step_seconds: tuple[float, ...] = ()
    """Mean seconds of a step of each window."""
    shares: dict[str, float] = field(default_factory=dict)
    """Mean share of a step's time by part, and the rest."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Other figures of the run's summary; see `KEPT_FIGURES`."""
    seconds_to_loss: float | None = None
    """From the first step to the window with the target's mean loss; None: no target, or not reached."""
    loss: float | None = None
    """Mean training loss of the last window."""
    val_loss: float | None = None
    """Validation loss at the trial's end; None unless trials are compared by quality."""
    metric: float | None = None
    """Value of `validation.metric` at the trial's end, with the objective `metric`; None if it was not finite."""
    metric_name: str = ""
    """Name of that metric; empty with other objectives."""
    direction: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of it is better."""
    losses: tuple[float, ...] = ()
    """Final costs of several merged rounds; see `final_cost`."""
    busy_share: float = 0.0
    """Share of this machine's processors that others used just before the trial; 0: not measured."""
    seconds: float = 0.0
    """Wall-clock time of the trial, its start and end included."""
    overhead_s: float = 0.0
    """The part of it outside the training loop."""
    mlflow_run_id: str | None = None

    @property
    def final_loss(self) -> float:
        """Validation loss, or else training loss; infinite if neither is known."""
        return cost_of(self.loss if self.val_loss is None else self.val_loss)

    @property
    def final_cost(self) -> float:
        """The figure that compares trials by quality, less is better: that of the metric if there is one, else the loss."""
        return cost_of(self.metric, self.direction) if self.metric_name else self.final_loss

    @property
    def quality(self) -> float:
        """That figure as it was measured."""
        return -self.final_cost if self.metric_name and self.direction == "max" else self.final_cost

    @property
    def quality_name(self) -> str:
        """Its name: `loss`, or that of the metric."""
        return self.metric_name or "loss"

    @property
    def speed(self) -> float:
        """Mean tokens a second; 0 if nothing was measured."""
        return statistics.fmean(self.speeds) if self.speeds else 0.0

    @property
    def spread(self) -> float:
        """Half the 95 % interval of that mean, as a share of it; infinite for one window."""
        return relative_half_width(self.speeds)

    @property
    def is_measured(self) -> bool:
        """True if the trial has figures."""
        return self.status in STATUSES_WITH_FIGURES and bool(self.speeds)


def extract_windows(entries: Iterable[Mapping[str, Any]]) -> list[MeasuredWindow]:
    """Returns the windows of a journal's newest attempt, from its first step."""
    attempt, windows, previous = None, list[MeasuredWindow](), 0
    for entry in entries:
        if entry["attempt"] != attempt:
            attempt, windows, previous = entry["attempt"], [], 0
        values = entry["values"]
        if entry["kind"] != "metrics" or not values.get("step_seconds_mean"):
            continue
        speed, seconds, step = float(values["tokens_per_second"]), float(values["step_seconds_mean"]), int(entry["step"])
        shares = {name: values.get(f"phase_{name}_share", 0.0) for name in EXCLUSIVE_PHASES}
        windows.append(MeasuredWindow(previous, step, speed, seconds, shares, _parse_finite(values.get("train_loss"))))
        previous = step
    return windows


def _parse_finite(value: Any) -> float | None:
    """Returns a number of the journal; None for a non-finite one, written as a word."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def mean_shares(windows: Sequence[MeasuredWindow]) -> dict[str, float]:
    """Returns the mean share of a step's time by part, and the rest."""
    shares = {name: statistics.fmean(window.shares[name] for window in windows) for name in EXCLUSIVE_PHASES}
    return shares | {"rest": max(0.0, 1 - sum(shares.values()))}


def seconds_to_loss(windows: Sequence[MeasuredWindow], target: float) -> float | None:
    """Returns the seconds of training until a window's mean loss is at most the target; None if none is."""
    elapsed = 0.0
    for window in windows:
        elapsed += window.step_seconds * (window.end - window.begin)
        if window.loss is not None and window.loss <= target:
            return elapsed
    return None


CORRELATIONS = tuple(number / 10 for number in range(9))
"""Correlations of neighbouring windows, equally likely before they are seen."""


def relative_half_width(values: Sequence[float]) -> float:
    """Returns half the 95 % interval of the mean, as a share of the mean; infinite for fewer than two values.

    Values follow each other in time, and each resembles its neighbour (an autoregression of order 1, of a correlation in
    CORRELATIONS). Mean and variance are unknown: given the correlation the mean has Student's distribution, and the
    interval is that of the mixture, by how likely the values make each correlation.
    """
    if len(values) < 2:
        return math.inf
    if min(values) == max(values):
        return 0.0
    import numpy as np
    from scipy.special import stdtr, stdtrit

    x, degrees, mean = np.array(values), len(values) - 1, statistics.fmean(values)
    correlation = np.array(CORRELATIONS)[:, None]
    # The rows' sums of the inverse of the matrix of correlations correlation^|i - j|.
    weights = np.where((np.arange(len(x)) % degrees) == 0, 1.0, 1 - correlation) / (1 + correlation)
    total = weights.sum(1)
    middle = weights @ x / total
    off = x - middle[:, None]
    conditional = 1 - correlation[:, 0] ** 2
    squares = off[:, 0] ** 2 + ((off[:, 1:] - correlation * off[:, :-1]) ** 2).sum(1) / conditional
    log_density = -0.5 * (degrees * np.log(conditional) + np.log(total) + degrees * np.log(squares))
    share = np.exp(log_density - log_density.max())
    share /= share.sum()
    error = np.sqrt(squares / degrees / total)
    low, high = 0.0, float(np.abs(middle - mean).max() + stdtrit(degrees, 0.975) * error.max())
    for _ in range(60):
        half = (low + high) / 2
        inside = stdtr(degrees, (mean + half - middle) / error) - stdtr(degrees, (mean - half - middle) / error)
        low, high = (low, half) if share @ inside >= 0.95 else (half, high)
    return high / mean


def save_result(sweep: Folder, result: Result) -> None:
    """Writes a result into the sweep's folder, atomically."""
    # An infinite loss stays infinite: null would mean none, and the training loss would replace it.
    put_sealed(sweep, f"{TRIALS_FOLDER}/{result.key}.json", to_json_value(asdict(result)))


def remove_result(sweep: Folder, key: str) -> None:
    """Removes a trial's result, if there is one, so that it is measured again."""
    sweep.remove(f"{TRIALS_FOLDER}/{key}.json")


def load_result(sweep: Folder, key: str) -> Result | None:
    """Returns the result of the trial of this key, or None. Fields unknown to this version are left out.

    Raises SealBroken, with the remedy, if the file is not as it was written.
    """
    try:
        stored = read_sealed(sweep / TRIALS_FOLDER, f"{key}.json", "remove it, and the sweep measures this trial again")
    except FileNotFoundError:
        return None
    known = {item.name for item in fields(Result)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items() if name in known
    }
    if isinstance(values.get("val_loss"), str):
        values["val_loss"] = float(values["val_loss"])
    return Result(**values | {"settings": with_current_names(values["settings"], Config)})


def load_candidate_result(sweep: Folder, candidate: Candidate) -> Result | None:
    """Returns a candidate's result, also one of an earlier version; None if there is none."""
    stored = (load_result(sweep, key) for key in candidate.keys)
    return next((result for result in stored if result and candidate.matches(result.settings, result.round)), None)


def list_keys(sweep: Folder) -> list[str]:
    """Returns the keys of all trials that ended."""
    return [name.removesuffix(".json") for name in (sweep / TRIALS_FOLDER).names() if name.endswith(".json")]


def load_results(sweep: Folder) -> dict[str, Result]:
    """Returns the results of all trials that ended, by their keys."""
    return {key: result for key in list_keys(sweep) if (result := load_result(sweep, key))}
