"""All pages show a run's figures in one order: the task's own metric comes before the losses, in the task's unit."""

from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, OptimizerConfig
from raystride.pipelines.observability.report.advice import suggest_changes
from raystride.pipelines.observability.report.run_figures import list_run_figures


def test_the_tasks_metric_comes_first_and_samples_have_their_unit() -> None:
    summary = {
        "status": "finished", "steps": 600, "tokens_seen": 90_000, "samples_seen": 19_200, "val_loss": 0.8,
        "train_loss": 0.5, "metrics": {"val_macro_f1": 0.61, "val_accuracy": 0.66, "val_loss": 0.8, "val_loss/web": 0.9},
        "metric": "val_accuracy", "unit": "examples", "tokens_per_second": 4506.0,
    }  # fmt: skip
    found = [(figure.label, figure.text) for figure in list_run_figures(summary)]
    assert found == [
        ("status", "finished"), ("steps", "600"), ("val_accuracy", "0.66"), ("val_macro_f1", "0.61"),
        ("validation loss", "0.8000"), ("training loss", "0.5000"), ("examples seen", "19,200"), ("tokens/s", "4,506"),
    ]  # fmt: skip


def test_a_summary_of_an_earlier_version_counts_tokens_and_a_broken_figure_is_shown_as_it_is() -> None:
    found = {figure.label: figure.text for figure in list_run_figures({"tokens_seen": 84, "val_loss": "NaN", "mfu": None})}
    assert found == {"validation loss": "NaN", "tokens seen": "84"}


FALLING = [(step, 2.0 - step / 1000) for step in range(100, 900, 100)]
RISING = [(step, 1.0 + (step - 300) ** 2 / 1e6) for step in range(100, 900, 100)]
FLAT = [(step, 1.0) for step in range(100, 900, 100)]


@pytest.mark.parametrize(
    ("training", "validation", "words"),
    [
        (FALLING, FALLING, ("still fell", "--train.steps 1600")),
        (FALLING, RISING, ("at step 300", "overfitting", "model.dropout")),
        (RISING, RISING, ("learning_rate",)),
        (FALLING, FLAT, ("Nothing stands out",)),
        (FALLING, [*RISING, (900, float("nan"))], ("overfitting",)),
    ],
)
def test_advice_on_quality_follows_the_losses(
    training: list[tuple[int, float]], validation: list[tuple[int, float]], words: tuple[str, ...]
) -> None:
    (sentence,) = suggest_changes({}, {}, (training, validation))
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("count", "words"), [(0, "was no validation"), (1, "was 1 validation:"), (3, "were 3 validations:")]
)
def test_what_was_not_judged_is_said(count: int, words: str) -> None:
    nothing, unjudged = suggest_changes({}, {}, (FALLING, FALLING[:count]))
    assert nothing == "Nothing stands out: no part of a step calls for a change by our rules of thumb."
    assert words in unjudged
    assert "validation.every" in unjudged


def _answers(*confusion: list[int]) -> dict[str, Any]:
    return {"labels": ["bill", "crash", "idea"][: len(confusion)], "confusion": list(confusion)}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        # The reader's run: 37 of 43 rows are of one label, and nothing else was learned.
        (_answers([37, 0], [6, 0]), ["37 of 43", "always saying 'bill'", "'crash' (0 of 6)", "known to about 0.15"]),
        (_answers([300, 10], [90, 40]), ["'crash' (40 of 130)", "class_weights"]),
        (_answers([300, 0, 0], [0, 100, 0], [0, 0, 0]), ["1 of 3 labels", "'idea'"]),
        (_answers([50, 0], [0, 40]), ["90 validation rows", "validation_fraction"]),
        (_answers([300, 10], [20, 140]), ["Nothing stands out"]),
        (_answers([0, 0], [0, 0]), ["Nothing stands out"]),
        (_answers([120]), ["Nothing stands out"]),
    ],
)
def test_advice_on_a_classifier_follows_its_answers(answers: dict[str, Any], words: list[str]) -> None:
    advice = "\n".join(suggest_changes({}, {}, (FALLING, FLAT), None, answers))
    assert all(word in advice for word in words), advice
    assert ("Nothing stands out" in advice) == ("Nothing stands out" in words)


def test_advice_on_settings() -> None:
    late = Config(optimizer=OptimizerConfig(warmup_steps=50))
    (sentence,) = suggest_changes({"steps": 60}, {}, (FALLING, FLAT), late)
    assert "rose in 50 of 60 steps" in sentence
    assert "such as 6" in sentence
    (sentence,) = suggest_changes({"steps": 600}, {}, (FALLING, FLAT), late)
    assert "Nothing stands out" in sentence
    same = Config(data=DataConfig(source="a.csv", validation="source", validation_source="a.csv"))
    (sentence,) = suggest_changes({"steps": 10**6}, {}, (FALLING, FLAT), same)
    assert "The validation data is the training data" in sentence
