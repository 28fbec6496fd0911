"""The part of a sweep's page that tells of the scaling model: how far it is off, what it knows, what it expects.

parts = [heading("The scaling model"), *expectations(answer)]
"""

from collections.abc import Callable, Iterator

from pipelines.pages import items, missing, paragraph, table
from pipelines.sweep import pictures
from pipelines.sweep.answer import AIM, Answer
from pipelines.sweep.choice import HOUR_S
from pipelines.sweep.interval import Interval
from pipelines.sweep.scaling import HeldBack, NotPredicted, Prediction

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
