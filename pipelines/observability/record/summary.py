"""`summary.json`: the figures of a finished run for programs, with every key always present, null if unknown.

Rates are per second, durations in seconds, memory in bytes. Non-finite figures are the strings "NaN" and "Infinity".
`tokens_per_second` counts inputs without padding: tokens that a decoder predicts, tokens of texts, tokens of both sides of a
translation, each image as one. `mfu` is this rate times `flops_per_token`, the operations to train on one of these tokens,
as a share of the devices' peak. `tokens_seen` counts targets.
Energy is that of the devices in `energy_covers`, `GPUs` or `CPU packages`, of all nodes; throttled seconds are summed over
GPUs. With several workers, `straggler_loss_share` is the share of the steps' time that the group lost by its slowest rank,
and `waiting_share` the average share that workers waited for each other; both by the hosts' clocks.

    summary = build_summary(run="my-run", status="finished", newest={"train_loss": 1.9}, given={"steps": 500})
    put_summary(run, summary); read_summary(run)["steps"]    # 500
"""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from raystride.pipelines.config.attempts import ATTEMPTS
from raystride.pipelines.observability.record.journal import LAST_SEGMENTS, SUMMARY_FILE, last_segments, to_json_value
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken, put_sealed, read_sealed


class _SummaryKeys(TypedDict, total=False):
    """The keys of every `summary.json`, null (None) if unknown; a worker's own summary has some of them."""

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


class RunSummary(_SummaryKeys, total=False):
    """Content of `summary.json`, or the part that is known while the run goes on."""

    ending: str
    """Reason for the end of the training loop."""
    interrupted_by: str
    """Name of the signal that requested the end."""
    workers: int
    """Number of workers of the last attempt."""
    active_parameters: int
    """With experts, parameters that a token uses."""
    unit: str
    """Unit of the samples that were seen: tokens, examples, pairs or images."""
    metric: str
    """The metric by which checkpoints are compared, `validation.metric`."""
    best_step: int | None
    """Step of the checkpoint `best`, which is used unless another is asked for; None without one."""
    complete: bool
    """True if all steps are done, or the run stopped early by itself."""
    precision: str
    """Precision of matrix products, as `train.precision auto` was resolved."""
    products: str
    """Backend of linear products on CPUs, and its measured gain."""
    kernels: dict[str, str]
    """Implementation that ran, by operation."""
    worker_seconds: float
    """Seconds that the run has held its workers, of all attempts: those of each worker are added (`record.usage`)."""
    gpu_seconds: float
    """The same for GPUs; 0 on CPUs."""
    usage: dict[str, Any]
    """Seconds, workers and GPUs of each attempt."""
    owner: str
    """Whom this is charged to (`record.owner`)."""
    journal: dict[str, int]
    """Number of the journal's last segment, by attempt."""


SUMMARY_KEYS = tuple(_SummaryKeys.__annotations__)

STATUSES = {
    "finished": "FINISHED",
    "done": "FINISHED",
    "stopped_early": "FINISHED",
    "out_of_time": "KILLED",
    "stopped": "KILLED",
    "failed": "FAILED",
}
"""Statuses of an ended run, and MLflow's words for them."""

COUNT_KEYS = frozenset({"steps", "samples_seen", "tokens_seen", "peak_memory_bytes", "resumed_from"})
"""Keys of whole numbers, which the loop measures as floats."""


def build_summary(run: str, status: str, newest: Mapping[str, Any], given: Mapping[str, Any]) -> RunSummary:
    """Builds the summary from `given`, the loop's figures at its end, else (the loop died) from the `newest` measurements.

    Raises ValueError for a status that is not in `STATUSES`.
    """
    if status not in STATUSES:
        raise ValueError(f"status is {status!r}: it must be one of {', '.join(STATUSES)}")
    summary = {key: newest.get(key) for key in SUMMARY_KEYS} | {"metrics": {}} | dict(given)
    summary |= {"run": run, "status": status}
    return cast(
        RunSummary, {key: _to_int(value) if key in COUNT_KEYS else to_json_value(value) for key, value in summary.items()}
    )


def _to_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else to_json_value(value)


def put_summary(run: Folder, summary: Mapping[str, Any]) -> None:
    """Writes a run's `summary.json`, sealed, with the journal's last segments. Raises OSError."""
    put_sealed(run, SUMMARY_FILE, dict(summary) | {LAST_SEGMENTS: last_segments(run)})


def read_summary(run: Folder) -> dict[str, Any]:
    """Returns the content of a run's `summary.json`, empty if there is none.

    Raises SealBroken if it is not as written, or another run's. Where a run's folder has got another name, one of the
    attempts must be the run's own.
    """
    remedy = "remove it; a training of this run writes it again"
    try:
        found = read_sealed(run, SUMMARY_FILE, remedy)
    except FileNotFoundError:
        return {}
    attempts = (found.get(LAST_SEGMENTS) or {}).keys()
    if found.get("run") not in (None, run.name) and attempts and attempts.isdisjoint((run / ATTEMPTS).names()):
        raise SealBroken(f"{run / SUMMARY_FILE} is that of another run, {found['run']}: {remedy}")
    return found
