"""Labels of a classifier: their order and bounds, predictions, and counts."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import log_softmax

from raystride.pipelines.config import Config
from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.labels import MAX_LABELS, LabelTask, accuracy_and_macro_f1
from raystride.pipelines.data.tasks.task import IGNORED
from tests.errors import refused


class Fixed(nn.Module):
    """A network that returns its input as logits."""

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def task_of(*labels: str, **facts: Any) -> LabelTask:
    """Returns a classification with these labels."""
    return Classification(Config(task="classification"), {"vocabulary_size": 9, "end_id": 0, "labels": list(labels)} | facts)


def learn_labels(names: list[str]) -> list[str]:
    """Returns the labels in the learned order, each occurring once."""
    return list(LabelTask.learn(task_of(), [{"labels": dict.fromkeys(names, 1)}])["labels"])


def test_numbers_come_by_value_and_before_words_and_words_by_their_letters() -> None:
    long = "9" * 18
    assert learn_labels(["b", "10", "Z", "9", "-1", "1.5", "007", long]) == ["007", "9", "10", "-1", "1.5", long, "Z", "b"]


@given(names=st.lists(st.integers(0, 10**17 - 1), min_size=2, max_size=20, unique=True))
def test_whole_numbers_are_learned_as_they_are_counted(names: list[int]) -> None:
    assert learn_labels([str(number) for number in names]) == [str(number) for number in sorted(names)]


@pytest.mark.parametrize(("count", "fits"), [(0, False), (1, False), (2, True), (MAX_LABELS, True), (MAX_LABELS + 1, False)])
def test_a_classifier_has_two_to_a_thousand_labels(count: int, fits: bool) -> None:
    names = [f"label {number}" for number in range(count)]
    if fits:
        assert learn_labels(names) == sorted(names)
        return
    with refused("data.label_column", "label"):
        learn_labels(names)


@pytest.mark.parametrize("names", [["0.0", "0.5", "5.0"], ["1", "2.5"], ["0.0", "1.0"], ["-.5", "1e-3"]])
def test_scores_are_no_classes_in_csv_as_in_json(names: list[str]) -> None:
    with refused("data.label_column", "label", names=["scores", names[0]]):
        learn_labels(names)
    assert learn_labels([*names, "none"])[-1] == "none"


def test_shares_of_labels_are_of_all_surveys_together() -> None:
    task = task_of()
    surveys = [
        LabelTask.survey(task, [("text", "a"), ("text", "b"), ("text", "a")]),
        LabelTask.survey(task, [("text", "b")] * 5),
    ]
    assert surveys == [{"labels": {"a": 2, "b": 1}}, {"labels": {"b": 5}}]
    assert LabelTask.learn(task, surveys) == {"labels": ["a", "b"], "shares": [0.25, 0.75]}


def test_an_unknown_label_raises_with_the_first_twenty() -> None:
    names = [f"{number:02}" for number in range(30)]
    task = task_of(*names)
    assert [task.label_number(name) for name in names] == list(range(30))
    with pytest.raises(ValueError, match=r"'30'.* 19$"):
        task.label_number("30")
    assert (task.counted, task.targets_per_sample) == (900, 1.0)


def test_targets_are_the_first_numbers_of_unmasked_examples() -> None:
    rows = [np.array([2, 7, 7]), np.array([1, 7]), np.array([0, 7])]
    masks = [np.array([False, False, True]), np.array([False, False]), np.array([True, True])]
    task = task_of("a", "b", "c")
    assert task.targets(rows, None).tolist() == [2, 1, 0]
    assert task.targets(rows, masks).tolist() == [2, IGNORED, 0]
    assert task.targets(rows, None).dtype == torch.int64


def test_an_answer_is_the_likeliest_label_with_its_probability() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.2, 0.3]])).bfloat16()
    found = task_of("a", "b", "c").answer(Fixed(), (logits,))
    assert [answer["label"] for answer in found] == ["b", "a"]
    for answer, expected in zip(found, [[0.2, 0.7, 0.1], [0.5, 0.2, 0.3]], strict=True):
        assert answer["probability"] == pytest.approx(max(expected), abs=5e-3)  # of logits in bfloat16
        assert answer["probabilities"] == pytest.approx(expected, abs=5e-3)
        assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-6)


class OwnAnswer(Classification):
    """A plug-in's task that answers otherwise."""

    def answer(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[dict[str, Any]]:
        return [{"label": "mine"} for _ in inputs[0]]


def test_answers_and_losses_come_from_one_forward_unless_a_plugin_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    monkeypatch.setattr(Fixed, "logits", lambda self, logits: forwards.append(1) or logits)
    task, logits, targets = task_of("a", "b"), torch.tensor([[1.0, 2.0], [0.5, 0.0]]), torch.tensor([0, IGNORED])
    answers, losses, counts = task.answer_with_losses(Fixed(), (logits,), targets)
    assert len(forwards) == 1
    assert answers == task.answer(Fixed(), (logits,))
    expected = task.losses(Fixed(), (logits,), targets)
    assert torch.equal(losses, expected[0])
    assert torch.equal(counts, expected[1])
    own = OwnAnswer(task.config, task.facts)
    assert own.answer_with_losses(Fixed(), (logits,), targets)[0] == [{"label": "mine"}] * 2


def test_losses_and_the_confusion_matrix_are_of_the_samples_that_count() -> None:
    task, model = task_of("a", "b", "c"), Fixed()
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 4.0]])
    targets = torch.tensor([0, IGNORED, 1, 1])
    expected = [
        -log_softmax(row, 0)[target].item() if target >= 0 else 0.0 for row, target in zip(logits, targets, strict=True)
    ]
    each, counts = task.losses(model, (logits,), targets)
    assert each.tolist() == pytest.approx(expected)
    assert counts.tolist() == [True, False, True, True]
    loss, counted, confusion = task.measure(model, (logits,), targets)
    assert (loss.item(), int(counted)) == (pytest.approx(sum(expected)), 3)
    assert confusion.view(3, 3).tolist() == [[0, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert task.score(6.0, 4.0, confusion.numpy()) == pytest.approx(
        {"val_loss": 1.5, "val_accuracy": 1 / 3, "val_macro_f1": (0 + 0.5 + 0) / 3}
    )


def table_of(pairs: str) -> dict[str, Any]:
    """Returns predicted samples, `xy` for one of label x that was predicted as y."""
    true, given_labels = zip(*pairs.split(), strict=True)
    return {
        "label": list(true),
        "label_given": list(given_labels),
        "probability": [0.5] * len(true),
        "loss": [2.0, *[0.0] * (len(true) - 1)],
        "targets": [1] * len(true),
    }


def test_rows_of_a_confusion_matrix_are_true_labels() -> None:
    confusion = task_of("a", "b").confusion(table_of("ab ab aa bb"))
    assert confusion.tolist() == [[1, 2], [0, 1]]
    assert confusion.dtype == np.int64


def test_precision_is_by_prediction_and_recall_by_true_label() -> None:
    grades = task_of("a", "b", "c").grades(table_of("ab ab aa bb"))
    found = grades(np.ones(4))
    assert {name: found[name] for name in found if "/" in name} == pytest.approx(
        {"precision/a": 1, "recall/a": 1 / 3, "precision/b": 1 / 3, "recall/b": 1, "precision/c": 0, "recall/c": 0}
    )
    assert found["loss"] == 0.5
    assert found["accuracy"] == 0.5
    assert found["calibration_error"] == pytest.approx(0, abs=1e-12)
    assert grades(np.array([0.0, 0.0, 0.0, 1.0]))["calibration_error"] == pytest.approx(0.5)
    assert grades(np.array([2.0, 0.0, 0.0, 0.0]))["loss"] == 2.0


def test_scores_of_nothing_are_not_numbers_and_labels_that_nobody_names_do_not_count() -> None:
    assert np.isnan(accuracy_and_macro_f1(np.zeros((2, 2)))).all()
    accuracy, macro_f1 = accuracy_and_macro_f1(np.array([[3, 1, 0], [0, 0, 0], [0, 0, 0]]))
    assert (accuracy, macro_f1) == pytest.approx((0.75, (6 / 7 + 0) / 2))
