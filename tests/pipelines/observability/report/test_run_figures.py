"""All pages show a run's figures in one order: the task's own metric comes before the losses, in the task's unit."""

import pytest

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
        (FALLING, FALLING[:3], ("Nothing stands out",)),
        (FALLING, [*RISING, (900, float("nan"))], ("overfitting",)),
    ],
)
def test_advice_on_quality_follows_the_losses(
    training: list[tuple[int, float]], validation: list[tuple[int, float]], words: tuple[str, ...]
) -> None:
    (sentence,) = suggest_changes({}, {}, (training, validation))
    assert all(word in sentence for word in words), sentence
