"""What became of a trial: its figures, or why it has none. One file each in the sweep's folder, written when it ended.

    windows = [window for window in windows_of(read_entries(folder)) if window.begin >= 10]
    relative_half_width([window.tokens_per_second for window in windows])       # 0.02: known to 2 %
    keep_result(sweep_folder, result); results(sweep_folder)         # of all trials so far, by key

A window is the interval between two lines of the log; its speed is that of its steps by the host's clock. The spread beside
a figure is the 95 % interval of the windows' mean, as if windows were independent, which neighbours in time hardly are.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from raystride.pipelines.config.train import cost_of
from raystride.pipelines.files import Folder
from raystride.pipelines.phases import PARTS
from raystride.pipelines.record.journal import plain
from raystride.pipelines.sweep.space import Candidate

Status = Literal["measured", "stopped_early", "out_of_memory", "failed", "hung", "refused", "too_large"]
"""How a trial ended. `refused`: the settings contradict each other; `too_large`: the memory estimate ruled it out before it
started; `stopped_early`: the scheduler found others better."""
MEASURED = ("measured", "stopped_early")
"""Those with figures."""
WITHOUT_FIGURES = ("out_of_memory", "failed", "hung")
"""Those that might have figures if they were measured again."""
PLACE = "trials"
FIGURES = (
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
"""Of the run's summary, those that a trial keeps."""


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
    """Of its time, by part of a step; see `phases`."""
    loss: float | None
    """Mean training loss of its steps; None where it is not finite."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A trial that has ended: its figures, or why it has none."""

    key: str
    run: str
    settings: dict[str, Any]
    label: str
    round: int
    status: Status
    cause: str = ""
    """Why there are no figures, or not all."""
    workers: int = 0
    device: str = ""
    """`cpu`, or the GPU by name."""
    threads: int = 0
    places_per_node: int = 1
    """Workers like these that one node has room for."""
    tokens_per_step: float = 0.0
    speeds: tuple[float, ...] = ()
    """Tokens a second of each window."""
    step_seconds: tuple[float, ...] = ()
    """Mean seconds of a step of each window."""
    shares: dict[str, float] = field(default_factory=dict)
    """Mean share of a step's time by part, and the rest."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Others of the run's summary; see `FIGURES`."""
    seconds_to_loss: float | None = None
    """From the first step to the window whose mean loss is the target's; None: not asked, or not reached."""
    loss: float | None = None
    """Mean training loss of the last window."""
    val_loss: float | None = None
    """Validation loss at the trial's end; of one sample, unless the objective is `loss`."""
    losses: tuple[float, ...] = ()
    """Of several rounds together, what each of them ended with."""
    seconds: float = 0.0
    """Wall-clock time of the trial, its start and end included."""
    overhead_s: float = 0.0
    """Of them, outside the training loop."""
    mlflow_run_id: str | None = None

    @property
    def final_loss(self) -> float:
        """What tells how well it learned: the validation loss, or else that of training; infinite where neither is known."""
        return cost_of(self.loss if self.val_loss is None else self.val_loss)

    @property
    def speed(self) -> float:
        """Mean tokens a second; 0 where nothing was measured."""
        return statistics.fmean(self.speeds) if self.speeds else 0.0

    @property
    def spread(self) -> float:
        """Half the 95 % interval of that mean, as a share of it; infinite for one window."""
        return relative_half_width(self.speeds)

    @property
    def measured(self) -> bool:
        """Whether the trial has figures."""
        return self.status in MEASURED and bool(self.speeds)


def windows_of(entries: Iterable[Mapping[str, Any]]) -> list[MeasuredWindow]:
    """The windows of a journal's newest attempt, from its first step."""
    attempt, found, previous = None, list[MeasuredWindow](), 0
    for entry in entries:
        if entry["attempt"] != attempt:
            attempt, found, previous = entry["attempt"], [], 0
        values = entry["values"]
        if entry["kind"] != "metrics" or not values.get("step_seconds_mean"):
            continue
        speed, seconds, step = float(values["tokens_per_second"]), float(values["step_seconds_mean"]), int(entry["step"])
        shares = {name: values.get(f"phase_{name}_share", 0.0) for name in PARTS}
        found.append(MeasuredWindow(previous, step, speed, seconds, shares, _finite(values.get("train_loss"))))
        previous = step
    return found


def _finite(value: Any) -> float | None:
    """A number of the journal, which writes what is not finite as a word."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def mean_shares(windows: Sequence[MeasuredWindow]) -> dict[str, float]:
    """Mean share of a step's time by part, and the rest."""
    shares = {name: statistics.fmean(window.shares[name] for window in windows) for name in PARTS}
    return shares | {"rest": max(0.0, 1 - sum(shares.values()))}


def seconds_to_loss(windows: Sequence[MeasuredWindow], target: float) -> float | None:
    """Seconds of training until a window's mean loss is the target or less; None where none is."""
    elapsed = 0.0
    for window in windows:
        elapsed += window.step_seconds * (window.end - window.begin)
        if window.loss is not None and window.loss <= target:
            return elapsed
    return None


def relative_half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval (Student's) of the mean, as a share of the mean; infinite for fewer than two values."""
    if len(values) < 2:
        return math.inf
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def keep_result(sweep: Folder, result: Result) -> None:
    """Writes a result into the sweep's folder, whole or not at all."""
    # A loss that is infinite stays one: as null it would be none, and that of training would stand for it.
    sweep.put_json(f"{PLACE}/{result.key}.json", plain(asdict(result)))


def forget(sweep: Folder, key: str) -> None:
    """Removes a trial's result, if there is one, so that it is measured again."""
    sweep.remove(f"{PLACE}/{key}.json")


def result_at(sweep: Folder, key: str) -> Result | None:
    """The result of the trial of this key, if there is one. What this version does not know of it is left out."""
    try:
        read: dict[str, Any] = (sweep / PLACE).read_json(f"{key}.json")
    except FileNotFoundError:
        return None
    known = {item.name for item in fields(Result)}
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in read.items() if name in known
    }
    if isinstance(given.get("val_loss"), str):
        given["val_loss"] = float(given["val_loss"])
    return Result(**given)


def result_of_candidate(sweep: Folder, candidate: Candidate) -> Result | None:
    """Returns a candidate's result, also one that an earlier version wrote; None if there is none."""
    found = (result_at(sweep, key) for key in candidate.keys)
    return next((result for result in found if result and candidate.has(result.settings, result.round)), None)


def keys(sweep: Folder) -> list[str]:
    """The keys of all trials that ended."""
    return [name.removesuffix(".json") for name in (sweep / PLACE).names() if name.endswith(".json")]


def results(sweep: Folder) -> dict[str, Result]:
    """The results of all trials that ended, by their keys."""
    return {key: result for key in keys(sweep) if (result := result_at(sweep, key))}
