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

from typing import Any

from raystride.pipelines.record.journal import plain

SUMMARY_KEYS = (
    "run",
    "status",
    "steps",
    "samples_seen",
    "tokens_seen",
    "train_loss",
    "val_loss",
    "metrics",
    "tokens_per_second",
    "mfu",
    "parameters",
    "flops_per_token",
    "step_seconds_p50",
    "step_seconds_p95",
    "data_wait_share",
    "seconds_to_first_step",
    "peak_memory_bytes",
    "energy_joules",
    "energy_covers",
    "joules_per_token",
    "average_power_watts",
    "throttled_seconds",
    "throttled_seconds_by_reason",
    "gpu_idle_share",
    "slowest_rank",
    "slowest_node",
    "straggler_loss_share",
    "waiting_share",
    "parameters_sha256",
    "resumed_from",
    "mlflow_run_id",
)

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


def build_summary(run: str, status: str, newest: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The summary from what the loop gave at its end and, where it gave nothing (it died), from the newest measurements.

    Raises ValueError for a status that is none of `STATUSES`.
    """
    if status not in STATUSES:
        raise ValueError(f"status is {status!r}: it must be one of {', '.join(STATUSES)}")
    summary = {key: newest.get(key) for key in SUMMARY_KEYS} | {"metrics": {}} | given
    summary |= {"run": run, "status": status}
    return {key: _whole(value) if key in COUNTS else plain(value) for key, value in summary.items()}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else plain(value)
