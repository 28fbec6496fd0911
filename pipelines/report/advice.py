"""What a run's figures say that one could try next, each with the figure behind it.

    for line in advise(summary, shares):                      # shares of a step's time by part; see `phases`
        print(line)

The bounds are rules of thumb, stated here once: a part that takes less is not worth a change.
"""

from collections.abc import Iterator, Mapping
from typing import Any

WORTH = 0.05
"""A share of the time that is worth doing something about."""
MUCH_COMMUNICATION = 0.2
"""A share of waiting for other workers that more work a step would lower."""
LOW_MFU = 0.3
"""Below this a GPU computes less than dense transformers usually reach."""


def advise(summary: Mapping[str, Any], shares: Mapping[str, float]) -> list[str]:
    """Sentences, the costliest first; one that says so where nothing stands out."""
    found = sorted(_found(summary, shares), reverse=True)
    return [text for _, text in found] or ["Nothing stands out: no part of a step is worth a change by our rules of thumb."]


def _found(summary: Mapping[str, Any], shares: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """(share of the time, sentence)."""
    data, reduce = shares.get("data", 0.0), shares.get("reduce", 0.0)
    if data > WORTH:
        yield data, f"Steps wait {data:.0%} of their time for data: raise data.prefetch, or put the data on a faster disk."
    if reduce > MUCH_COMMUNICATION:
        yield (
            reduce,
            f"Workers wait {reduce:.0%} of their time for each other's gradients: more samples a step (train.slot_size), "
            "fewer workers, or faster links.",
        )
    for part, remedy in (
        ("checkpoint", "raise checkpoint.every"),
        ("validation", "raise validation.every or lower validation.samples"),
    ):
        if shares.get(part, 0.0) > WORTH:
            yield shares[part], f"{part.capitalize()} takes {shares[part]:.0%} of the time: {remedy}."
    lost = summary.get("straggler_loss_share") or 0.0
    if lost > WORTH:
        where = f"rank {summary.get('slowest_rank')} on {summary.get('slowest_node')}"
        yield lost, f"The group lost {lost:.0%} of its time to {where}, its slowest worker: look at what else runs there."
    yield from _of_gpus(summary)


def _of_gpus(summary: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    idle = summary.get("gpu_idle_share") or 0.0
    if idle > WORTH:
        yield idle, f"GPUs were idle in {idle:.0%} of the samples: larger micro-batches, or train.compile, keep them busy."
    throttled = summary.get("throttled_seconds") or 0.0
    if throttled > 0:
        reasons = ", ".join(summary.get("throttled_seconds_by_reason") or {}) or "unknown reasons"
        yield WORTH, f"Clocks were held back for {throttled:.0f} s ({reasons}): look at cooling and power limits."
    reached = summary.get("mfu")
    if reached is not None and reached < LOW_MFU:
        yield (
            LOW_MFU - reached,
            f"Model FLOP utilisation is {reached:.0%}: try train.precision bf16, larger train.slot_size, train.compile.",
        )
