"""A sweep's page: one self-contained HTML file that says what to use here and why, and what the scaling model expects.

    write_report(folder, answer(base, results(folder).values(), there))               # as `report.html`

No script, font or picture is fetched from elsewhere; links lead to the trials' own pages, whose folders lie beside it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from urllib.parse import quote

from raystride.pipelines.files import Folder
from raystride.pipelines.pages import Link, heading, items, missing, page, paragraph, table
from raystride.pipelines.report.drawing import spoken
from raystride.pipelines.scaling_model.interval import Interval
from raystride.pipelines.scaling_model.model import HeldBack, NotPredicted, Prediction
from raystride.pipelines.sweep import pictures, views
from raystride.pipelines.sweep.answer import AIM, Answer
from raystride.pipelines.sweep.choice import HOUR_S
from raystride.pipelines.sweep.result import Result
from raystride.pipelines.sweep.space import mesh_words
from raystride.pipelines.sweep.views import plain_number

MIB = 2**20
NOT_STARTED = ("refused", "too_large")
"""How trials ended that have no page of their own."""


def write_report(folder: Folder, answer: Answer) -> None:
    """Puts the page of the sweep in this folder there, as `report.html`. Raises OSError."""
    folder.put("report.html", sweep_page(answer))


def sweep_page(answer: Answer) -> str:
    """The page as one HTML document."""
    families = views.families(answer)
    sections = [
        ("Speed-up and efficiency", _scaling(answer, families)),
        ("Time against price, energy or workers", _tradeoffs(answer)),
        ("Where a step's time goes", _step_parts(families)),
        ("Speed over two settings", _heat(answer)),
        ("The scaling model", expectations(answer)),
        ("All trials", _trials(answer)),
        ("Failures", _failures(answer.results)),
    ]
    body = [part for title, parts in sections for part in (heading(title), *parts)]
    return page(f"Sweep {answer.base.run}", paragraph(answer.text), *_best(answer), *body)


def _best(answer: Answer) -> Iterator[str]:
    """Key figures of the best."""
    best = answer.best
    if best is None:
        return
    rows = [["settings", best.label], *([name, text] for name, text in _figures(answer, best) if text)]
    yield table((), rows, texts=2)
    yield paragraph("Train with them: train.py --config recommended.yaml, which lies beside this page.")


def _figures(answer: Answer, result: Result) -> list[tuple[str, str]]:
    price, figure = answer.price_per_hour, result.figures.get
    return [
        ("loss", plain_number(result.final_loss) if math.isfinite(result.final_loss) else ""),
        ("tokens/s", _speed(result)),
        ("workers", str(result.workers)),
        ("mesh", mesh_words(answer.base.scaling, result.settings)),
        ("device", result.device),
        ("step, ms", plain_number(1e3 * fmean(result.step_seconds))),
        ("model FLOP utilisation", _shown(figure("mfu"), "{:.1%}")),
        ("price of a million tokens", f"{result.workers * price / HOUR_S / result.speed * 1e6:,.3g}" if price else ""),
        ("joules a token", _shown(figure("joules_per_token"), "{:.3g}")),
        ("energy covers", _shown(figure("energy_covers"), "{}")),
        ("peak memory, MiB", _peak_memory(result)),
        ("target loss after, s", plain_number(result.seconds_to_loss) if result.seconds_to_loss else ""),
    ]


def _scaling(answer: Answer, families: Sequence[views.Family]) -> Iterator[str]:
    modelled = views.modelled(answer, families[0]) if families else []
    picture = pictures.speed_up(families, modelled, views.predicted(answer)) if families else ""
    if not picture:
        yield missing("No two measured trials differ in their number of workers alone, so there is no speed-up to show.")
        return
    yield picture
    text = "The first of the lines is that of the best trial. " * bool(answer.best)
    text += (
        "Lines join trials that differ in workers alone; each counts from its own fewest workers, as if those scaled "
        "perfectly. Bars are 95 % intervals of the windows' mean; a trial of one window has none."
    )
    more = " Where the model predicts, each worker has as much to do as in the best trial, so the batch grows with workers."
    yield paragraph(text + more * bool(views.predicted(answer)))


def _tradeoffs(answer: Answer) -> Iterator[str]:
    found, tokens = views.tradeoffs(answer), views.tokens_of(answer)
    if not found:
        yield missing("No trial has a speed.")
        return
    kinds = " and ".join(each.cost for each in found)
    known = " Neither a price nor energy is known." if kinds == views.WORKER_SECONDS else ""
    yield paragraph(f"For {tokens:,.0f} tokens: seconds against {kinds}.{known} No trial beats one on the front in both.")
    for each in found:
        yield pictures.tradeoff(each, answer.best, f"seconds for {tokens:,.0f} tokens")
        rows = [
            [one.label, f"{one.workers}", plain_number(seconds), plain_number(cost)] for one, seconds, cost in each.front
        ]
        yield table(["on the front", "workers", "seconds", each.cost], rows)


def _step_parts(families: Sequence[views.Family]) -> Iterator[str]:
    if not families:
        yield missing("No step was measured.")
        return
    family = families[0]
    yield pictures.trial_step_parts(family)
    first, last = family.results[0], family.results[-1]
    text = f"These trials: {family.label}."
    if last.workers > first.workers:
        text += " " + _what_stops(views.beyond_ideal(family), first.workers, last)
    note = "Parts are the host's time; on GPUs forward, backward and optimiser are that of launching them."
    yield paragraph(f"{text} {note}")


def _what_stops(beyond: dict[str, float], fewest: int, last: Result) -> str:
    took = 1e3 * fmean(last.step_seconds)
    name = max(beyond, key=lambda part: beyond[part])
    text = f"On {last.workers} workers a step takes {plain_number(took)} ms; perfect scaling from {fewest} would take "
    text += f"{plain_number(took - sum(beyond.values()))} ms."
    if beyond[name] <= 0:
        return f"{text} No part takes longer than that."
    return f"{text} What grew most is {spoken(name)}: {plain_number(beyond[name])} ms more than it would be then."


def _heat(answer: Answer) -> Iterator[str]:
    grid = views.grid_of(answer)
    if grid is None:
        yield missing("Fewer than two settings vary.")
        return
    yield pictures.heat(grid)
    yield paragraph(
        "Tokens a second of the fastest combination in each cell. Hatched: none has a figure; empty: none was tried."
    )


def _trials(answer: Answer) -> Iterator[str]:
    results = answer.results
    if not results:
        yield missing("None has ended.")
        return
    head = [
        "settings",
        "status",
        "loss",
        "tokens/s",
        "workers",
        "ms a step",
        "data",
        "communication",
        "J/token",
        "MiB",
        "trial, s",
    ]
    by_loss = answer.base.sweep.objective == "loss"
    best_first = sorted(results, key=lambda result: result.final_loss if by_loss else -result.speed)
    told = any(result.mlflow_run_id for result in results)
    yield table([*head, "outside steps, s", *["MLflow run"] * told], [_trial(one, told) for one in best_first], texts=2)
    yield paragraph(
        "Links lead to the trials' own pages, whose folders lie beside this one. "
        "data, communication: shares of a step that the host waits for them. MiB: peak memory of a worker."
    )


def _trial(result: Result, told: bool) -> list[str | Link]:
    label = f"{result.label} (round {result.round + 1})" if result.round else result.label
    named = label if result.status in NOT_STARTED else Link(label, f"../{quote(result.run)}/report.html")
    status = result.status.replace("_", " ")
    seconds = [f"{result.seconds:,.1f}", f"{result.overhead_s:,.1f}"]
    run = [result.mlflow_run_id or ""] * told
    if not result.measured:
        return [named, status, *[""] * 8, *seconds, *run]
    return [
        named,
        status,
        plain_number(result.final_loss) if math.isfinite(result.final_loss) else "",
        _speed(result),
        str(result.workers),
        plain_number(1e3 * fmean(result.step_seconds)),
        _shown(result.shares.get("data"), "{:.1%}"),
        _shown(result.shares.get("reduce"), "{:.1%}"),
        _shown(result.figures.get("joules_per_token"), "{:.3g}"),
        _peak_memory(result),
        *seconds,
        *run,
    ]


def _failures(results: Sequence[Result]) -> Iterator[str]:
    without = sorted((result for result in results if not result.measured), key=lambda result: result.status)
    if not without:
        yield missing("None: every trial has figures.")
        return
    kinds = Counter(result.status.replace("_", " ") for result in without)
    yield paragraph(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) + ".")
    rows = [[result.label, result.status.replace("_", " "), result.cause] for result in without]
    yield table(["settings", "status", "cause"], rows, texts=3)


def _speed(result: Result) -> str:
    return f"{result.speed:,.0f}" + f" ± {result.spread:.1%}" * (len(result.speeds) > 1)


def _peak_memory(result: Result) -> str:
    """The most memory that a worker held, in MiB, as text."""
    return f"{result.figures['peak_memory_bytes'] / MIB:,.0f}" if result.figures.get("peak_memory_bytes") else ""


def _shown(value: float | str | None, form: str) -> str:
    """A figure, or nothing where it is not known."""
    return "" if value is None else form.format(value)


JOULES_PER_KWH = 3.6e6


def expectations(answer: Answer) -> Iterator[str]:
    """The model's error on trials held back, its unknowns, what it predicts, and why it does not."""
    if answer.model and answer.held:
        yield from _errors(answer.held)
        terms = answer.model.terms()
        rows = [[term.name, term.source, _interval(term.value), term.unit] for term in terms]
        yield table(["unknown", "known from", "value (80 % interval)", "unit"], rows, texts=2)
        yield items(str(term) for term in terms if term.remedy)
    yield from _predictions(answer)
    if answer.remarks:
        yield items(answer.remarks)


def _errors(held: HeldBack) -> Iterator[str]:
    if not held.trials:
        yield missing(f"How far the model is off is not known: {held}.")
        return
    yield pictures.errors(held)
    verdict = "within" if held.median <= AIM else "above"
    yield paragraph(f"{held}. The aim is a median of at most {AIM:.0%}: it is {verdict} that.")


def _predictions(answer: Answer) -> Iterator[str]:
    found = [each for each in answer.predictions if isinstance(each, Prediction)]
    if found:
        rows = [[name, *map(figure, found)] for name, figure in PREDICTED if any(map(figure, found))]
        yield paragraph("With as much to do for each worker as in the best trial; in brackets, 80 % intervals.")
        yield table(["", *(f"{each.workers:,} workers" for each in found)], rows)
        yield items(f"{each.workers:,} workers: {each.limit}{_assumed(each)}" for each in found)
    reasons: dict[tuple[str, ...], list[str]] = {}
    for each in answer.predictions:
        if isinstance(each, NotPredicted):
            reasons.setdefault(each.reasons, []).append(f"{each.workers:,}")
    yield from (
        missing(f"Not predicted for {', '.join(counts)} workers: {'; '.join(why)}.") for why, counts in reasons.items()
    )
    if not answer.predictions:
        yield missing("Nothing is predicted: there is no model, or it does not describe the best trial.")


def _assumed(found: Prediction) -> str:
    names = ", ".join(found.assumed)
    return f" Neither measured nor described, so all that is possible is in the intervals: {names}." if names else ""


def _interval(value: Interval | None, form: str = ".3g", factor: float = 1.0) -> str:
    return value.times(factor).text(form) if value else ""


def _briefly(value: Interval) -> str:
    low, middle, high = map(pictures.brief, (value.low, value.middle, value.high))
    return f"{middle} ({low} to {high})"


PREDICTED: list[tuple[str, Callable[[Prediction], str]]] = [
    ("nodes", lambda each: f"{each.nodes:,}"),
    ("ms a step", lambda each: _interval(each.step_seconds, ",.3g", 1e3)),
    ("tokens/s", lambda each: _briefly(each.tokens_per_second)),
    ("efficiency", lambda each: _interval(each.efficiency, ".0%")),
    ("hours", lambda each: _interval(each.seconds, ",.3g", 1 / HOUR_S)),
    ("price", lambda each: _interval(each.cost, ",.3g")),
    ("kWh", lambda each: _interval(each.joules, ",.3g", 1 / JOULES_PER_KWH)),
    ("utilisation", lambda each: _interval(each.utilisation, ".0%")),
]
"""Figures of a prediction; one that none has is left out."""
