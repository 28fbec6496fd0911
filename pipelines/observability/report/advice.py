"""Suggestions to improve a run's model and its speed, each with the figure behind it.

    for line in suggest_changes(summary, figures.part_shares, figures.losses):
        print(line)

The thresholds are rules of thumb, defined here once: a part below its threshold is not worth a change.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raystride.pipelines.observability.report.figures import Point

MIN_SHARE = 0.05
"""Minimum share of the time for a suggestion."""
HIGH_COMMUNICATION_SHARE = 0.2
"""Share of the time spent waiting for other workers that more work per step would lower."""
LOW_MFU = 0.3
"""Model FLOP utilisation below that of dense transformers on GPUs."""


MIN_VALIDATIONS = 4
"""Fewer validations say nothing of the course."""
MIN_FALL = 0.005
"""Relative fall of the validation loss over the last quarter that more steps would go on with."""
MIN_RISE = 0.02
"""Relative rise of the validation loss above its minimum that is overfitting, if the training loss fell meanwhile."""


def suggest_changes(
    summary: Mapping[str, Any],
    shares: Mapping[str, float],
    losses: tuple[Sequence[Point], Sequence[Point]] = ((), ()),
) -> list[str]:
    """Returns suggestions as sentences: on the model's quality by its training and validation losses, then on the speed, the
    costliest first; a single sentence if nothing stands out.
    """
    costs = sorted(_find_costs(summary, shares), reverse=True)
    found = [*_judge_losses(*losses), *(text for _, text in costs)]
    return found or ["Nothing stands out: neither the losses nor a part of a step call for a change by our rules of thumb."]


def _judge_losses(training: Sequence[Point], validation: Sequence[Point]) -> Iterator[str]:
    """Yields what the course of the losses suggests."""
    measured = [(step, value) for step, value in validation if math.isfinite(value)]
    if len(measured) < MIN_VALIDATIONS:
        return
    last_step, last = measured[-1]
    best_step, best = min(measured, key=lambda point: point[1])
    before = measured[-1 - max(1, len(measured) // 4)][1]
    trained = [value for step, value in training if step >= best_step and math.isfinite(value)]
    if best_step == last_step and before - last > MIN_FALL * abs(before):
        yield (
            f"The validation loss still fell at the end, from {before:.4g} to {last:.4g} over the last quarter: "
            f"train longer, such as --train.steps {2 * last_step}."
        )
    elif last - best > MIN_RISE * abs(best):
        falls = len(trained) > 1 and trained[-1] < trained[0]
        rise = f"The validation loss rose from {best:.4g} at step {best_step} to {last:.4g} at step {last_step}"
        if falls:
            yield (
                f"{rise} while the training loss fell from {trained[0]:.4g} to {trained[-1]:.4g}, which is overfitting: "
                "more data, more model.dropout, a smaller network or fewer steps. The checkpoint `best` is from before."
            )
        else:
            yield f"{rise}, and the training loss did not fall either: a lower optimizer.learning_rate is steadier."


def _find_costs(summary: Mapping[str, Any], shares: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Yields (share of the time, sentence) pairs."""
    data, reduce = shares.get("data", 0.0), shares.get("reduce", 0.0)
    if data > MIN_SHARE:
        yield data, f"Steps wait {data:.0%} of their time for data: raise data.prefetch, or put the data on a faster disk."
    if reduce > HIGH_COMMUNICATION_SHARE:
        yield (
            reduce,
            f"Workers wait {reduce:.0%} of their time for each other's gradients: more samples a step (train.slot_size), "
            "fewer workers, or faster links.",
        )
    for part, remedy in (
        ("checkpoint", "raise checkpoint.every"),
        ("validation", "raise validation.every or lower validation.samples"),
    ):
        if shares.get(part, 0.0) > MIN_SHARE:
            yield shares[part], f"{part.capitalize()} takes {shares[part]:.0%} of the time: {remedy}."
    loss = summary.get("straggler_loss_share") or 0.0
    if loss > MIN_SHARE:
        worker = f"rank {summary.get('slowest_rank')} on {summary.get('slowest_node')}"
        yield (
            loss,
            f"The group lost {loss:.0%} of its time to {worker}, its slowest worker: look at what else runs there.",
        )
    yield from _find_gpu_costs(summary)


def _find_gpu_costs(summary: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    idle = summary.get("gpu_idle_share") or 0.0
    if idle > MIN_SHARE:
        yield idle, f"GPUs were idle in {idle:.0%} of the samples: larger micro-batches, or train.compile, keep them busy."
    throttled = summary.get("throttled_seconds") or 0.0
    if throttled > 0:
        reasons = ", ".join(summary.get("throttled_seconds_by_reason") or {}) or "unknown reasons"
        yield MIN_SHARE, f"Clocks were held back for {throttled:.0f} s ({reasons}): look at cooling and power limits."
    mfu = summary.get("mfu")
    if mfu is not None and mfu < LOW_MFU:
        yield (
            LOW_MFU - mfu,
            f"Model FLOP utilisation is {mfu:.0%}: try train.precision bf16, larger train.slot_size, train.compile.",
        )
