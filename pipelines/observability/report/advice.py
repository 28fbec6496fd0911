"""Suggestions to improve a run's model and its speed, each with the figure behind it.

    for line in suggest_changes(summary, figures.part_shares, figures.losses, config, answers):
        print(line)

The thresholds are rules of thumb, defined here once: a part below its threshold is not worth a change. What could not be
judged is said, with the setting that would allow it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raystride.pipelines.config import Config
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


MAX_WARMUP_SHARE = 1 / 3
"""Share of the steps above which a warm-up leaves too few at the full learning rate."""
MIN_ROWS = 100
"""Validation rows below which a share is known to a tenth at best: the 95 % interval of a half is 0.40 to 0.60."""
LOW_RECALL = 0.5
"""Share of a label's rows that are answered right below which the label is named."""


def suggest_changes(
    summary: Mapping[str, Any],
    shares: Mapping[str, float],
    losses: tuple[Sequence[Point], Sequence[Point]] = ((), ()),
    config: Config | None = None,
    answers: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns suggestions as sentences: on the model's quality by its settings, its answers (`Origin.answers`) and its
    losses, then on the speed, the costliest first; then what was not judged. A single sentence if there is nothing.
    """
    costs = sorted(_find_costs(summary, shares), reverse=True)
    found = [*_judge_settings(summary, config), *_judge_answers(answers or {}), *_judge_losses(*losses)]
    found += [text for _, text in costs]
    unjudged = _too_few_validations(*losses)
    if not found:
        judged = "no part of a step calls" if unjudged else "neither the losses nor a part of a step call"
        found = [f"Nothing stands out: {judged} for a change by our rules of thumb."]
    return [*found, *unjudged]


def _too_few_validations(training: Sequence[Point], validation: Sequence[Point]) -> list[str]:
    """Returns a sentence about the course of the losses if there are too few validations to judge it."""
    measured = sum(math.isfinite(value) for _, value in validation)
    if measured >= MIN_VALIDATIONS or not (training or validation):
        return []
    count = f"{measured} validation{'s' * (measured != 1)}" if measured else "no validation"
    return [
        f"Not judged: whether the model learned enough or too much, as there {'were' if measured > 1 else 'was'} {count}: "
        f"a lower validation.every gives the {MIN_VALIDATIONS} that tell it."
    ]


def _judge_settings(summary: Mapping[str, Any], config: Config | None) -> Iterator[str]:
    """Yields what the settings of the run suggest."""
    if config is None:
        return
    steps = summary.get("steps") or 0
    warmup = config.optimizer.warmup(steps)
    if config.optimizer.schedule != "constant" and steps and warmup > MAX_WARMUP_SHARE * steps:
        yield (
            f"The learning rate rose in {min(warmup, steps):,} of {steps:,} steps: fewer optimizer.warmup_steps, such as "
            f"{max(1, steps // 10):,}, leave more at the full rate."
        )
    data = config.data
    if data.validation == "source" and data.validation_source == data.source:
        yield (
            "The validation data is the training data: its figures say what was learned by heart. Name other data as "
            "data.validation_source, or hold some out with data.validation hash."
        )


def _judge_answers(answers: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a classifier's answers on the validation rows suggest."""
    rows = [sum(row) for row in answers.get("confusion", ())]
    if not (total := sum(rows)):
        return
    labels, right = answers["labels"], [row[number] for number, row in enumerate(answers["confusion"])]
    most = max(range(len(rows)), key=rows.__getitem__)
    if len([count for count in rows if count]) > 1 and sum(right) <= rows[most]:
        yield (
            f"{sum(right):,} of {total:,} validation rows are answered right, and {rows[most]:,} would be by always saying "
            f"{labels[most]!r}: train longer, or with objective.class_weights balanced."
        )
    missed = [number for number, count in enumerate(rows) if count and right[number] < LOW_RECALL * count]
    if missed and len(missed) < len(rows):
        named = ", ".join(f"{labels[number]!r} ({right[number]:,} of {rows[number]:,})" for number in missed[:3])
        more = f" and {len(missed) - 3:,} more" if len(missed) > 3 else ""
        yield (
            f"Less than half of some labels' rows are answered right: {named}{more}. More rows of them, or "
            "objective.class_weights balanced, may help."
        )
    absent = [labels[number] for number, count in enumerate(rows) if not count]
    if absent:
        yield (
            f"{len(absent):,} of {len(rows):,} labels have no validation row, {absent[0]!r} for instance, so nothing is "
            "known of them: a larger data.validation_fraction."
        )
    if total < MIN_ROWS:
        margin = 1 / math.sqrt(total)
        yield (
            f"There are {total:,} validation rows, so that the accuracy is known to about {margin:.2f}: a larger "
            "data.validation_fraction tells models apart."
        )


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
