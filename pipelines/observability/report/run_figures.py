"""A run's figures with their labels, in one order for the screen, `raystride runs`, the page and the model card.

for figure in list_run_figures(summary):
    print(figure.label, figure.text)                      # status finished, steps 600, val_accuracy 0.66, ...
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunFigure:
    """A figure of a run, as text."""

    key: str
    """Its key in the summary, or the name of the task's metric."""
    label: str
    """Words that a reader sees."""
    text: str
    """The value with its unit."""


def _percent(value: Any) -> str:
    return f"{value:.1%}"


def _whole(value: Any) -> str:
    return f"{value:,}"


def _hours(seconds: Any) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= MIN_CHARGED_S else ""


MIN_CHARGED_S = 36.0
"""A hundredth of an hour, below which the time of workers and GPUs is not shown."""
_Rows = tuple[tuple[str, str, Callable[[Any], str]], ...]
_HEAD: _Rows = (("status", "status", str), ("steps", "steps", _whole))
_FIGURES: _Rows = (
    ("val_loss", "validation loss", lambda value: f"{value:.4f}"),
    ("train_loss", "training loss", lambda value: f"{value:.4f}"),
    ("seen", "{unit} seen", _whole),
    ("tokens_per_second", "{rate}/s", lambda value: f"{value:,.0f}"),
    ("active_parameters", "active parameters", _whole),
    ("workers", "workers", str),
    ("mfu", "MFU", _percent),
    ("step_seconds_p50", "step, median", lambda value: f"{value * 1000:.1f} ms"),
    ("step_seconds_p95", "step, 95 %", lambda value: f"{value * 1000:.1f} ms"),
    ("data_wait_share", "data wait", _percent),
    ("seconds_to_first_step", "time to first step", lambda value: f"{value:.1f} s"),
    ("peak_memory_bytes", "peak memory", lambda value: f"{value / 2**30:.2f} GiB"),
    ("joules_per_token", "energy per token", lambda value: f"{value:.3g} J"),
    ("average_power_watts", "average power", lambda value: f"{value:,.0f} W"),
    ("throttled_seconds", "throttled", lambda value: f"{value:,.1f} s"),
    ("gpu_seconds", "GPU time", _hours),
    ("worker_seconds", "worker time", _hours),
    ("gpu_idle_share", "GPU idle", _percent),
    ("resumed_from", "resumed from", str),
)
"""Key, label and format of the figures before and after the task's own metrics; one of an empty text is not shown."""


def rate_unit(unit: str | None) -> str:
    """Returns the unit of throughput for a task's unit."""
    return unit if unit in ("images", "samples") else "tokens"


def list_run_figures(summary: Mapping[str, Any]) -> list[RunFigure]:
    """Returns the figures of `summary.json` that are known: status, steps, the best step if it is not the last, the task's
    metrics (that of `validation.metric` first), losses, speed, hardware. Figures of a mixture's sources (`val_loss/web`) are
    not among them.
    """
    return [*_known_figures(_HEAD, summary), *_best(summary), *_task_metrics(summary), *_known_figures(_FIGURES, summary)]


def step_text(step: int, last: int | None) -> str:
    """Returns the step of a checkpoint that is used, with the newest one if that is another."""
    return f"step {step:,}" + (f" of {last:,}" if last and last != step else "")


def _best(summary: Mapping[str, Any]) -> Iterator[RunFigure]:
    """Yields the step of the checkpoint that is used, `best`, if it is not the last."""
    best, steps = summary.get("best_step"), summary.get("steps")
    if best and best != steps:
        yield RunFigure("best_step", "best checkpoint", step_text(best, steps))


def _known_figures(rows: _Rows, summary: Mapping[str, Any]) -> Iterator[RunFigure]:
    unit = summary.get("unit") or "tokens"
    words = {"unit": unit, "rate": rate_unit(unit)}
    known = dict(summary) | {"seen": summary.get("tokens_seen" if unit == "tokens" else "samples_seen")}
    for key, label, form in rows:
        if known.get(key) is not None and (text := _to_text(form, known[key])):
            yield RunFigure(key, label.format(**words), text)


def list_metrics(summary: Mapping[str, Any]) -> list[RunFigure]:
    """Returns those of the figures that are metrics of the task, its validation loss included."""
    return [figure for figure in list_run_figures(summary) if figure.key in (summary.get("metrics") or {})]


def format_metric(value: Any) -> str:
    """Returns a metric with four significant digits."""
    return _to_text(lambda number: f"{number:.4g}", value)


def _task_metrics(summary: Mapping[str, Any]) -> Iterator[RunFigure]:
    metrics = {
        name: value for name, value in (summary.get("metrics") or {}).items() if name not in summary and "/" not in name
    }
    chosen = summary.get("metric")
    for name in sorted(metrics, key=lambda name: name != chosen):
        yield RunFigure(name, name, format_metric(metrics[name]))


def _to_text(form: Callable[[Any], str], value: Any) -> str:
    try:
        return form(value)
    except (TypeError, ValueError):  # a non-finite figure is a string in the summary
        return str(value)
