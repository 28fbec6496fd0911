"""A sweep's page: one self-contained HTML file with the recommended settings, the reasons, and the model's predictions.

    write_report(folder, build_answer(base, load_results(folder).values(), cluster))  # as `report.html`

No script, font or picture is fetched from the network. Links lead to the trials' own pages, in the neighbouring folders.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from urllib.parse import quote

from raystride.pipelines.config.sweep import same_work
from raystride.pipelines.observability.pages import Link, bullet_list, empty_note, heading, html_page, html_table, paragraph
from raystride.pipelines.observability.report.drawing import part_label
from raystride.pipelines.sweep import pictures, views
from raystride.pipelines.sweep.answer import TARGET_ERROR, Answer
from raystride.pipelines.sweep.choice import HOUR_S
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.scaling_model.interval import Interval
from raystride.pipelines.sweep.scaling_model.model import HoldOut, NotPredicted, Prediction
from raystride.pipelines.sweep.space import describe_mesh, throughput_unit
from raystride.pipelines.sweep.views import format_number
from raystride.pipelines.system.storage.folder import Folder

MIB = 2**20
MLFLOW_ID_CHARACTERS = 8
"""Characters of an MLflow run's id that the page shows."""
NOT_STARTED = ("refused", "too_large")
"""Statuses of trials that have no page of their own."""


def write_report(folder: Folder, answer: Answer) -> None:
    """Writes the page of the sweep into its folder, as `report.html`. Raises OSError."""
    folder.put("report.html", render_page(answer))


def render_page(answer: Answer) -> str:
    """Returns the page as one HTML document."""
    families = views.build_families(answer)
    speed_sections = [
        ("Speed-up and efficiency", _speed_up_section(answer, families)),
        ("Time against price, energy or workers", _tradeoff_section(answer)),
        ("Where a step's time goes", _step_section(families)),
        ("Speed over two settings", _heat_map_section(answer)),
        ("The scaling model", model_section(answer)),
    ]
    by_quality = answer.base.sweep.by_quality
    has_speeds = not by_quality or not all(map(same_work, answer.base.sweep.space))
    sections = [
        *[(f"Trials by {answer.base.quality_name}", _quality_section(answer))] * by_quality,
        *speed_sections * has_speeds,
        ("All trials", _trials_section(answer)),
        ("Failures", _failures_section(answer.results)),
    ]
    body = [part for title, parts in sections for part in (heading(title), *parts)]
    return html_page(f"Sweep {answer.base.run}", paragraph(answer.text), *_best_section(answer), *body)


def _best_section(answer: Answer) -> Iterator[str]:
    """Yields the key figures of the best."""
    best = answer.best
    if best is None:
        return
    rows = [["settings", best.label], *([name, text] for name, text in _list_figures(answer, best) if text)]
    yield html_table((), rows, texts=2)
    yield paragraph("Train with them: raystride train --config recommended.yaml, which lies beside this page.")


def _list_figures(answer: Answer, result: Result) -> list[tuple[str, str]]:
    price, figure = answer.price_per_hour, result.figures.get
    return [
        (result.quality_name, format_number(result.quality) if math.isfinite(result.quality) else ""),
        (f"{throughput_unit(answer.base)}/s", _format_speed(result)),
        ("workers", str(result.workers)),
        ("mesh", describe_mesh(answer.base.scaling, result.settings)),
        ("device", result.device),
        ("step, ms", format_number(1e3 * fmean(result.step_seconds))),
        ("model FLOP utilisation", _format_optional(figure("mfu"), "{:.1%}")),
        ("price of a million tokens", f"{result.workers * price / HOUR_S / result.speed * 1e6:,.3g}" if price else ""),
        ("joules a token", _format_optional(figure("joules_per_token"), "{:.3g}")),
        ("energy covers", _format_optional(figure("energy_covers"), "{}")),
        ("peak memory, MiB", _format_peak_memory(result)),
        ("target loss after, s", format_number(result.seconds_to_loss) if result.seconds_to_loss else ""),
    ]


def _quality_section(answer: Answer) -> Iterator[str]:
    picture = pictures.draw_quality(answer.merged, answer.best)
    if not picture:
        yield empty_note("Fewer than two trials that differ have a figure.")
        return
    yield picture
    yield paragraph(
        f"{answer.base.quality_name} on the validation samples after {answer.base.sweep.trial_steps:,} steps (of other "
        "batches, after as many samples), one point a combination (the mean of its seeds)."
    )


def _speed_up_section(answer: Answer, families: Sequence[views.Family]) -> Iterator[str]:
    modelled = views.model_speeds(answer, families[0]) if families else []
    picture = pictures.draw_speed_up(families, modelled, views.predicted_speeds(answer)) if families else ""
    if not picture:
        yield empty_note("No two measured trials differ in their number of workers alone, so there is no speed-up to show.")
        return
    yield picture
    text = "The first of the lines is that of the best trial. " * bool(answer.best)
    text += (
        "Lines join trials that differ in workers alone; each counts from its own fewest workers, as if those scaled "
        "perfectly. Bars are 95 % intervals of the windows' mean; a trial of one window has none."
    )
    more = " Where the model predicts, each worker has as much to do as in the best trial, so the batch grows with workers."
    yield paragraph(text + more * bool(views.predicted_speeds(answer)))


def _tradeoff_section(answer: Answer) -> Iterator[str]:
    tradeoffs, tokens = views.build_tradeoffs(answer), views.reference_tokens(answer)
    if not tradeoffs:
        yield empty_note("No trial has a speed.")
        return
    costs = " and ".join(tradeoff.cost for tradeoff in tradeoffs)
    note = " Neither a price nor energy is known." if costs == views.WORKER_SECONDS else ""
    yield paragraph(f"For {tokens:,.0f} tokens: seconds against {costs}.{note} No trial beats one on the front in both.")
    for tradeoff in tradeoffs:
        yield pictures.draw_tradeoff(tradeoff, answer.best, f"seconds for {tokens:,.0f} tokens")
        rows = [
            [one.label, f"{one.workers}", format_number(seconds), format_number(cost)]
            for one, seconds, cost in tradeoff.front
        ]
        yield html_table(["on the front", "workers", "seconds", tradeoff.cost], rows)


def _step_section(families: Sequence[views.Family]) -> Iterator[str]:
    if not families:
        yield empty_note("No step was measured.")
        return
    family = families[0]
    yield pictures.draw_step_parts(family)
    first, last = family.results[0], family.results[-1]
    text = f"These trials: {family.label}."
    if last.workers > first.workers:
        text += " " + _describe_bottleneck(views.scaling_overhead(family), first.workers, last)
    note = "Parts are the host's time; on GPUs forward, backward and optimiser are that of launching them."
    yield paragraph(f"{text} {note}")


def _describe_bottleneck(overhead: dict[str, float], min_workers: int, last: Result) -> str:
    step_ms = 1e3 * fmean(last.step_seconds)
    name = max(overhead, key=lambda part: overhead[part])
    text = (
        f"On {last.workers} workers a step takes {format_number(step_ms)} ms; perfect scaling from {min_workers} would take "
    )
    text += f"{format_number(step_ms - sum(overhead.values()))} ms."
    if overhead[name] <= 0:
        return f"{text} No part takes longer than that."
    return f"{text} What grew most is {part_label(name)}: {format_number(overhead[name])} ms more than it would be then."


def _heat_map_section(answer: Answer) -> Iterator[str]:
    grid = views.build_grid(answer)
    if grid is None:
        yield empty_note("Fewer than two settings vary.")
        return
    yield pictures.draw_heat_map(grid, throughput_unit(answer.base))
    yield paragraph(
        f"{throughput_unit(answer.base).capitalize()} a second of the fastest combination in each cell. Hatched: none has a "
        "figure; empty: none was tried."
    )


def _trials_section(answer: Answer) -> Iterator[str]:
    results = answer.results
    if not results:
        yield empty_note("None has ended.")
        return
    head = [
        "settings",
        "status",
        answer.base.quality_name,
        f"{throughput_unit(answer.base)}/s",
        "workers",
        "ms a step",
        "data",
        "network",
        "J/token",
        "MiB",
        "trial, s",
    ]
    by_quality = answer.base.sweep.by_quality
    best_first = sorted(results, key=lambda result: result.final_cost if by_quality else -result.speed)
    has_mlflow = any(result.mlflow_run_id for result in results)
    yield html_table(
        [*head, *["MLflow run"] * has_mlflow],
        [_trial_row(one, has_mlflow) for one in best_first],
        texts=2,
    )
    yield paragraph(
        "Links lead to the trials' own pages, whose folders lie beside this one. "
        "data, network: shares of a step that the host waits for data and for other workers. MiB: peak memory of a worker."
    )


def _trial_row(result: Result, has_mlflow: bool) -> list[str | Link]:
    label = f"{result.label} (round {result.round + 1})" if result.round else result.label
    name = label if result.status in NOT_STARTED else Link(label, f"../{quote(result.run)}/report.html")
    status = result.status.replace("_", " ")
    seconds = f"{result.seconds:,.1f}"
    run = [(result.mlflow_run_id or "")[:MLFLOW_ID_CHARACTERS]] * has_mlflow
    if not result.is_measured:
        return [name, status, *[""] * 8, seconds, *run]
    return [
        name,
        status,
        format_number(result.quality) if math.isfinite(result.quality) else "",
        _format_speed(result),
        str(result.workers),
        format_number(1e3 * fmean(result.step_seconds)),
        _format_optional(result.shares.get("data"), "{:.1%}"),
        _format_optional(result.shares.get("reduce"), "{:.1%}"),
        _format_optional(result.figures.get("joules_per_token"), "{:.3g}"),
        _format_peak_memory(result),
        seconds,
        *run,
    ]


def _failures_section(results: Sequence[Result]) -> Iterator[str]:
    failures = sorted((result for result in results if not result.is_measured), key=lambda result: result.status)
    if not failures:
        yield empty_note("None: every trial has figures.")
        return
    kinds = Counter(result.status.replace("_", " ") for result in failures)
    yield paragraph(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + ".")
    rows = [[result.label, result.status.replace("_", " "), result.cause] for result in failures]
    yield html_table(["settings", "status", "cause"], rows, texts=3)


def _format_speed(result: Result) -> str:
    return f"{result.speed:,.0f}" + f" ± {result.spread:.1%}" * (len(result.speeds) > 1)


def _format_peak_memory(result: Result) -> str:
    """Returns the peak memory of a worker, in MiB, as text."""
    return f"{result.figures['peak_memory_bytes'] / MIB:,.0f}" if result.figures.get("peak_memory_bytes") else ""


def _format_optional(value: float | str | None, form: str) -> str:
    """Returns a formatted figure, or "" if it is unknown."""
    return "" if value is None else form.format(value)


JOULES_PER_KWH = 3.6e6


def model_section(answer: Answer) -> Iterator[str]:
    """Yields the model's error on held-out trials, its unknowns, its predictions, and the reasons for missing ones."""
    if answer.model and answer.held_out:
        yield from _error_section(answer.held_out)
        terms = answer.model.terms()
        rows = [[term.name, term.source, _format_interval(term.value), term.unit] for term in terms]
        yield html_table(["unknown", "known from", "value (80 % interval)", "unit"], rows, texts=2)
        yield bullet_list(str(term) for term in terms if term.remedy)
    yield from _prediction_section(answer)
    if answer.remarks:
        yield bullet_list(answer.remarks)


def _error_section(held_out: HoldOut) -> Iterator[str]:
    if not held_out.trials:
        yield empty_note(f"How far the model is off is not known: {held_out}.")
        return
    yield pictures.draw_errors(held_out)
    verdict = "within" if held_out.median <= TARGET_ERROR else "above"
    yield paragraph(f"{held_out}. The aim is a median of at most {TARGET_ERROR:.0%}: it is {verdict} that.")


def _prediction_section(answer: Answer) -> Iterator[str]:
    predictions = [prediction for prediction in answer.predictions if isinstance(prediction, Prediction)]
    if predictions:
        labels = {RATE: f"{throughput_unit(answer.base)}/s"}
        rows = [
            [labels.get(name, name), *map(figure, predictions)]
            for name, figure in PREDICTION_ROWS
            if any(map(figure, predictions))
        ]
        yield paragraph("With as much to do for each worker as in the best trial; in brackets, 80 % intervals.")
        yield html_table(["", *(f"{prediction.workers:,} workers" for prediction in predictions)], rows)
        yield bullet_list(
            f"{prediction.workers:,} workers: {prediction.limit}{_describe_assumed(prediction)}"
            for prediction in predictions
        )
    reasons: dict[tuple[str, ...], list[str]] = {}
    for prediction in answer.predictions:
        if isinstance(prediction, NotPredicted):
            reasons.setdefault(prediction.reasons, []).append(f"{prediction.workers:,}")
    yield from (
        empty_note(f"Not predicted for {', '.join(counts)} workers: {'; '.join(why)}.") for why, counts in reasons.items()
    )
    if not answer.predictions:
        yield empty_note("Nothing is predicted: there is no model, or it does not describe the best trial.")


def _describe_assumed(prediction: Prediction) -> str:
    names = ", ".join(prediction.assumed)
    return f" Neither measured nor described, so all that is possible is in the intervals: {names}." if names else ""


def _format_interval(value: Interval | None, form: str = ".3g", factor: float = 1.0) -> str:
    return value.scale(factor).text(form) if value else ""


def _format_brief_interval(value: Interval) -> str:
    low, middle, high = map(pictures.format_brief, (value.low, value.middle, value.high))
    return f"{middle} ({low} to {high})"


RATE = "throughput"
"""The row with throughput's unit as its label."""
PREDICTION_ROWS: list[tuple[str, Callable[[Prediction], str]]] = [
    ("nodes", lambda prediction: f"{prediction.nodes:,}"),
    ("ms a step", lambda prediction: _format_interval(prediction.step_seconds, ",.3g", 1e3)),
    (RATE, lambda prediction: _format_brief_interval(prediction.tokens_per_second)),
    ("efficiency", lambda prediction: _format_interval(prediction.efficiency, ".0%")),
    ("hours", lambda prediction: _format_interval(prediction.seconds, ",.3g", 1 / HOUR_S)),
    ("price", lambda prediction: _format_interval(prediction.cost, ",.3g")),
    ("kWh", lambda prediction: _format_interval(prediction.joules, ",.3g", 1 / JOULES_PER_KWH)),
    ("utilisation", lambda prediction: _format_interval(prediction.utilisation, ".0%")),
]
"""Figures of a prediction; one that is always absent is left out."""
