"""Base of tasks that give each sample one of several labels: label names, class weights, metrics.

The first number of an example is its label. Validation counts a confusion matrix with a row for each true label; see
`accuracy_and_macro_f1`.

    class Classification(LabelTask): ...                    # adds the encoding of examples, and a network
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.tasks.task import (
    IGNORED,
    TRAINING,
    Column,
    Document,
    Facts,
    Inputs,
    NetworkMethods,
    Rows,
    Task,
    mean,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_LABELS = 1000
"""A column with more values is probably not a label."""
BINS = 15
"""Bins of confidence for the calibration error."""


class LabelTask(Task):
    """Base of classification tasks: a sample is a whole example, its target is its label."""

    surveyed = True
    metrics = ("val_loss", "val_accuracy", "val_macro_f1")
    network_methods: ClassVar[NetworkMethods] = {"logits": (TRAINING, "evaluate", "predict")}

    @property
    def label_column(self) -> Column:
        """The column with the label."""
        return Column("data.label_column", self.config.data.label_column, "label", answer=True)

    @property
    def labels(self) -> list[str]:
        """Names of the labels, by their numbers."""
        return list(self.facts["labels"])

    def survey(self, documents: Iterable[Document]) -> Facts:
        """Counts the labels."""
        return {"labels": dict(Counter(document[-1] for document in documents))}

    def learn(self, surveys: Sequence[Facts]) -> Facts:
        """Returns the labels, sorted (numbers by value), and their frequencies. Raises SettingError."""
        counts: Counter[str] = Counter()
        for survey in surveys:
            counts.update(survey["labels"])
        names, setting = sorted(counts, key=_sort_key), self.label_column
        if not 2 <= len(names) <= MAX_LABELS:
            found = f"{len(names):,} different values" if len(names) != 1 else f"one value alone, {names[0]!r},"
            raise SettingError(
                f"{setting.setting} is {setting.name!r}: it has {found} and a classifier needs 2 to {MAX_LABELS:,} "
                "different ones; name another column",
                setting=setting.setting,
                value=setting.name,
            )
        if all(map(_is_number, names)) and any("." in name for name in names):
            raise SettingError(
                f"{setting.setting} is {setting.name!r}: it has fractions ({', '.join(names[:3])}, ...), which are scores "
                "and no classes; name another column, or write classes as whole numbers or words",
                setting=setting.setting,
                value=setting.name,
            )
        return {"labels": names, "shares": [counts[name] / counts.total() for name in names]}

    def label_number(self, label: str) -> int:
        """Returns a label's number. Raises ValueError for a label that the training data does not have."""
        try:
            return self.labels.index(label)
        except ValueError:
            known = ", ".join(self.labels[:20])
            raise ValueError(f"has the label {label!r}, which the training data has not; it has {known}") from None

    @property
    def class_weights(self) -> tuple[float, ...]:
        """A weight for each label, with mean 1 over the examples, by `objective.class_weights`; empty: all equal."""
        if self.config.objective.class_weights == "none":
            return ()
        return tuple(1.0 / (len(self.labels) * share) for share in self.facts["shares"])

    @property
    def targets_per_sample(self) -> float:
        """One: the label."""
        return 1.0

    def targets(self, rows: Rows, masks: Rows | None) -> "torch.Tensor":
        """Returns the labels of some examples, (B) int64."""
        import torch

        counts = [True] * len(rows) if masks is None else [bool(mask.any()) for mask in masks]
        return torch.tensor([int(row[0]) if counted else IGNORED for row, counted in zip(rows, counts, strict=True)])

    @property
    def counted(self) -> int:
        """The number of entries of the confusion matrix."""
        return len(self.labels) ** 2

    def measure(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor", *, together: bool = False
    ) -> "tuple[torch.Tensor, ...]":
        """Returns the sum of cross-entropies in nats, the number of counted labels, and the confusion matrix (labels^2), row
        by row."""
        import torch
        from torch.nn.functional import cross_entropy

        logits = _compute_logits(model, inputs).float()
        real = targets != IGNORED
        # Ignored targets add 0 to the first cell: on a GPU a selection would wait for its size.
        pairs = (targets * logits.shape[1] + logits.argmax(-1)).where(real, 0)
        confusion = torch.zeros(logits.shape[1] ** 2, device=logits.device).index_add_(0, pairs, real.float())
        return cross_entropy(logits, targets, reduction="sum"), real.sum(), confusion

    def score(self, loss_sum: float, targets: float, counts: np.ndarray) -> dict[str, float]:
        """Returns mean loss in nats, accuracy and macro F1."""
        accuracy, macro_f1 = accuracy_and_macro_f1(counts.reshape(len(self.labels), -1))
        return {"val_loss": mean(loss_sum, targets), "val_accuracy": accuracy, "val_macro_f1": macro_f1}

    def answer(self, model: "nn.Module", inputs: Inputs) -> list[dict[str, Any]]:
        """Returns the most probable label, its probability, and those of all labels."""
        return self._describe_logits(_compute_logits(model, inputs).float())

    def _describe_logits(self, logits: "torch.Tensor") -> list[dict[str, Any]]:
        probabilities, names = logits.softmax(-1).cpu().numpy(), self.labels
        return [
            {"label": names[row.argmax()], "probability": float(row.max()), "probabilities": row.tolist()}
            for row in probabilities
        ]

    def losses(self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the cross-entropy of each sample in nats, (B), and whether its label counts, (B) bool."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(_compute_logits(model, inputs).float(), targets, reduction="none"), targets != IGNORED

    def answer_with_losses(
        self, model: "nn.Module", inputs: Inputs, targets: "torch.Tensor"
    ) -> "tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]":
        """Returns the results of `answer` and of `losses` from one forward, unless a plug-in has methods of its own."""
        from torch.nn.functional import cross_entropy

        if not self._inherits(LabelTask, "answer", "losses"):
            return super().answer_with_losses(model, inputs, targets)
        logits = _compute_logits(model, inputs).float()
        return self._describe_logits(logits), cross_entropy(logits, targets, reduction="none"), targets != IGNORED

    def grade(self, table: Mapping[str, Any]) -> dict[str, float]:
        """Returns loss, accuracy, macro F1, calibration error, and each label's precision and recall, by torchmetrics."""
        import torch
        from torchmetrics.functional import classification as by

        true, given = (torch.from_numpy(numbers) for numbers in self._label_numbers(table))
        probabilities = torch.tensor(np.stack(table[self.given("probabilities")]))
        count = len(self.labels)
        found = {
            "accuracy": float(by.multiclass_accuracy(given, true, count, average="micro")),
            "macro_f1": float(by.multiclass_f1_score(given, true, count)),
            "calibration_error": float(by.multiclass_calibration_error(probabilities, true, count, n_bins=BINS)),
        }
        for name, function in (("precision", by.multiclass_precision), ("recall", by.multiclass_recall)):
            values = function(given, true, count, average="none").tolist()
            found |= {f"{name}/{label}": value for label, value in zip(self.labels, values, strict=True)}
        return super().grade(table) | found

    def grades(self, table: Mapping[str, Any]) -> Callable[[np.ndarray], dict[str, float]]:
        """Returns the metrics of `grade` as a function of weights, from additive sums, since torchmetrics has no weights.

        The calibration error (Guo et al., 2017) is the mean gap between confidence and accuracy over BINS of confidence.
        """
        count, grades = len(self.labels), super().grades(table)
        true, given = self._label_numbers(table)
        confidence = np.asarray(table[self.given("probability")], float)
        bins = np.searchsorted(np.linspace(0, 1, BINS + 1), confidence, side="right")
        gaps = (true == given) - confidence

        def grade_with_weights(weights: np.ndarray) -> dict[str, float]:
            confusion = np.bincount(true * count + given, weights, count**2).reshape(count, count)
            accuracy, macro_f1 = accuracy_and_macro_f1(confusion)
            error = mean(float(np.abs(np.bincount(bins, weights * gaps)).sum()), float(weights.sum()))
            found = {"accuracy": accuracy, "macro_f1": macro_f1, "calibration_error": error}
            for name, axis in (("precision", 0), ("recall", 1)):
                values = confusion.diagonal() / np.maximum(confusion.sum(axis), 1)
                found |= {f"{name}/{label}": float(value) for label, value in zip(self.labels, values, strict=True)}
            return grades(weights) | found

        return grade_with_weights

    def proportions(self, table: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """Returns accuracy, and each label's precision of the rows predicted as it and recall of its own rows."""
        confusion = self.confusion(table)
        right, found = confusion.diagonal(), {"accuracy": (int(confusion.trace()), int(confusion.sum()))}
        for name, axis in (("precision", 0), ("recall", 1)):
            pairs = zip(self.labels, right.tolist(), confusion.sum(axis).tolist(), strict=True)
            found |= {f"{name}/{label}": (count, of) for label, count, of in pairs}
        return found

    @property
    def without_interval(self) -> frozenset[str]:
        """The calibration error: noise makes that of resamples larger."""
        return frozenset({"calibration_error"})

    def confusion(self, table: Mapping[str, Any]) -> np.ndarray:
        """Returns the confusion matrix of predicted samples (true labels in rows): (labels, labels), whole numbers."""
        count, (true, given) = len(self.labels), self._label_numbers(table)
        return np.bincount(true * count + given, minlength=count**2).reshape(count, count)

    def _label_numbers(self, table: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the true and of the predicted labels."""
        numbers = {name: number for number, name in enumerate(self.labels)}
        names = table[self.label_column.name], table[self.given("label")]
        true, given = (np.array([numbers[name] for name in column], np.int64) for column in names)
        return true, given


def accuracy_and_macro_f1(confusion: np.ndarray) -> tuple[float, float]:
    """Returns accuracy and macro F1 of a confusion matrix (true, predicted).

    Macro F1 is the mean over the labels of 2 TP / (2 TP + FP + FN), without labels that occur in neither, as in
    torchmetrics.
    """
    right, occurring = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    f1 = 2 * right[occurring > 0] / occurring[occurring > 0]
    return mean(float(right.sum()), float(confusion.sum())), mean(float(f1.sum()), len(f1))


def _is_number(name: str) -> bool:
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _sort_key(name: str) -> tuple[int, str]:
    """Sorts numbers by value and before words, words alphabetically."""
    return (int(name), "") if name.isdecimal() and len(name) < 18 else (10**18, name)


def _compute_logits(model: "nn.Module", inputs: Inputs) -> "torch.Tensor":
    logits: torch.Tensor = model.logits(*inputs)  # type: ignore[operator]
    return logits
