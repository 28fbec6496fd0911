"""What `summary.json` holds: the figures of a finished run for programs, every key always there, null where unknown.

Rates are per second, durations in seconds, memory in bytes. Non-finite figures are the strings "NaN" and "Infinity".
`tokens_per_second` counts what goes in, without padding: tokens that a decoder predicts, those of texts, those of both sides
of a translation, each image as one. `mfu` is this rate times `flops_per_token`, the operations to train on one of these, as
a share of the devices' peak. `tokens_seen` counts targets.
Energy is that of what `energy_covers` names, `GPUs` or `CPU packages`, of all nodes; throttled seconds add up over GPUs.
With several workers, `straggler_loss_share` is the share of the steps' time that the group lost by its slowest rank, and
`waiting_share` what workers on average waited for each other; both by the hosts' clocks.

    summary = build_summary(run="my-run", status="finished", newest={"train_loss": 1.9}, given={"steps": 500})
"""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from raystride.pipelines.record.journal import plain


class _Always(TypedDict, total=False):
    """The keys that every `summary.json` has, null (None) where unknown; a worker's own summary has some of them."""

    run: str
    status: str
    steps: int | None
    samples_seen: int | None
    tokens_seen: int | None
    train_loss: float | str | None
    val_loss: float | str | None
    metrics: dict[str, Any]
    tokens_per_second: float | None
    mfu: float | None
    parameters: int | None
    flops_per_token: float | None
    step_seconds_p50: float | None
    step_seconds_p95: float | None
    data_wait_share: float | None
    seconds_to_first_step: float | None
    peak_memory_bytes: int | None
    energy_joules: float | None
    energy_covers: str | None
    joules_per_token: float | None
    average_power_watts: float | None
    throttled_seconds: float | None
    throttled_seconds_by_reason: dict[str, float] | None
    gpu_idle_share: float | None
    slowest_rank: int | None
    slowest_node: str | None
    straggler_loss_share: float | None
    waiting_share: float | None
    parameters_sha256: str | None
    resumed_from: int | None
    mlflow_run_id: str | None


class RunSummary(_Always, total=False):
    """What `summary.json` holds, or what is known of it while the run goes on."""

    ending: str
    """Why the loop ended."""
    interrupted_by: str
    """The signal that asked for it."""
    workers: int
    """Of the last attempt."""
    complete: bool
    """Whether all steps are done, or the run ended early by itself."""
    precision: str
    """How numbers were multiplied: what `train.precision auto` came to."""
    products: str
    """Which way linear products on CPUs went, and what was measured to be gained by it."""
    kernels: dict[str, str]
    """Which implementation of each operation ran."""


SUMMARY_KEYS = tuple(_Always.__annotations__)

STATUSES = {
    "finished": "FINISHED",
    "done": "FINISHED",
    "stopped_early": "FINISHED",
    "out_of_time": "KILLED",
    "stopped": "KILLED",
    "failed": "FAILED",
}
"""How a run can end, and what MLflow calls it."""

COUNTS = frozenset({"steps", "samples_seen", "tokens_seen", "peak_memory_bytes", "resumed_from"})
"""Whole numbers, which the loop measures as floats like all else."""


def build_summary(run: str, status: str, newest: Mapping[str, Any], given: Mapping[str, Any]) -> RunSummary:
    """The summary from what the loop gave at its end and, where it gave nothing (it died), from the newest measurements.

    Raises ValueError for a status that is none of `STATUSES`.
    """
    if status not in STATUSES:
        raise ValueError(f"status is {status!r}: it must be one of {', '.join(STATUSES)}")
    summary = {key: newest.get(key) for key in SUMMARY_KEYS} | {"metrics": {}} | dict(given)
    summary |= {"run": run, "status": status}
    return cast(RunSummary, {key: _whole(value) if key in COUNTS else plain(value) for key, value in summary.items()})


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else plain(value)
