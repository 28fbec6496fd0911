"""Metrics of our own tasks: one table, which the settings, the sweep, the screen and the report read.

    known_direction("val_accuracy/web")                       # "max"
    METRICS["perplexity"].is_mean_per_token                   # True: not comparable between tokenizers

A further metric is a row of the table, and a name in the `metrics` of the task that computes it.
"""

import re
from dataclasses import dataclass
from typing import Literal

Direction = Literal["min", "max"]


@dataclass(frozen=True)
class Metric:
    """A metric of a validation."""

    direction: Direction
    """Whether a smaller or a larger value is better."""
    sentence: str
    """Its definition, for people."""
    is_mean_per_token: bool = False
    """Whether it is a mean over targets, tokens in a task of texts, and no score of the task."""


METRICS: dict[str, Metric] = {
    "loss": Metric("min", "mean over the targets, in nats", is_mean_per_token=True),
    "perplexity": Metric("min", "e to the power of the loss", is_mean_per_token=True),
    "kl": Metric("min", "divergence from the reference model"),
    "rejected_reward": Metric("min", "beta times the log-ratio of the rejected answer"),
    "accuracy": Metric("max", "share of the samples that are right"),
    "macro_f1": Metric("max", "mean over the classes of F1"),
    "bleu": Metric("max", "overlap of n-grams (Papineni et al., 2002), from 0 to 100"),
    "chrf": Metric("max", "F-score of n-grams of characters (Popović, 2015), from 0 to 100"),
    "margin": Metric("max", "difference of the two rewards"),
    "chosen_reward": Metric("max", "beta times the log-ratio of the chosen answer"),
}
"""By the whole name, without `val_`."""
_LARGER_IN_0_3 = re.compile("accuracy|f1|precision|recall|bleu|chrf|auc|exact_match|margin|reward")


def is_mean_per_token(name: str) -> bool:
    """Returns whether a metric, with or without `val_`, is the loss or follows from it."""
    metric = METRICS.get(name.removeprefix("val_"))
    return metric is not None and metric.is_mean_per_token


def known_direction(name: str) -> Direction | None:
    """Returns the better direction of a metric, with or without `val_`: of losses and our own tasks' ones, else None."""
    name = name.partition("/")[0].removeprefix("val_")
    if name.endswith("_loss"):
        return "min"
    return METRICS[name].direction if name in METRICS else None


def direction_in_0_3(name: str) -> Direction:
    """Returns the meaning of `validation.direction auto` until 0.3: larger by a part of the name, smaller of any other."""
    return "max" if _LARGER_IN_0_3.search(name) else "min"
