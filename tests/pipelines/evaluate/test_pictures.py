"""Pictures of a classifier's predictions, for any labels: their fields, counts and points, read from the figures."""

from typing import Any

import numpy as np
import pytest

from raystride.pipelines.data.tasks.labels import BINS
from raystride.pipelines.evaluate import evaluation as pictures
from raystride.pipelines.evaluate.evaluation import draw_confusion, draw_reliability
from raystride.pipelines.observability.report.drawing import MAX_COUNTED_LABELS, MAX_NAMED_LABELS


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures of a test's pictures."""
    made: list[Any] = []
    plain = pictures._new_figure

    def kept(*size: float) -> Any:
        made.append(plain(*size))
        return made[-1]

    monkeypatch.setattr(pictures, "_new_figure", kept)
    return made


@pytest.mark.parametrize("label", ["costs $5 or $6_{", r"$\bad{tex$", "plain", "ключ"])
def test_a_label_is_text_and_no_formula(label: str) -> None:
    assert draw_confusion([label, "other"], np.array([[3, 1], [0, 2]])).startswith(b"\x89PNG")


def test_fields_are_shares_of_a_row_with_their_counts(figures: list[Any]) -> None:
    confusion = np.array([[3000, 1000, 0], [1, 1, 0], [0, 0, 0]])
    draw_confusion(["a", "b", "c"], confusion)
    (axes,) = figures[0].axes
    (image,) = axes.get_images()
    np.testing.assert_allclose(image.get_array(), [[0.75, 0.25, 0], [0.5, 0.5, 0], [0, 0, 0]])
    assert image.get_clim() == (0, 1)
    texts = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
    assert texts[0, 0] == ("3,000", "white")
    assert texts[1, 0] == ("1,000", "black"), "given is across, true is down"
    assert texts[0, 1] == ("1", "black"), "half of a row is still light"
    assert len(texts) == 9
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [text.get_text() for text in ticks] == ["a", "b", "c"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")


@pytest.mark.parametrize(
    ("count", "counts", "names"),
    [(MAX_COUNTED_LABELS, True, True), (MAX_COUNTED_LABELS + 1, False, True), (MAX_NAMED_LABELS + 1, False, False)],
)
def test_many_labels_have_no_counts_and_more_no_names(figures: list[Any], count: int, counts: bool, names: bool) -> None:
    labels = [f"label {number}" for number in range(count)]
    draw_confusion(labels, np.eye(count, dtype=int))
    (axes,) = figures[0].axes
    assert bool(axes.texts) is counts
    assert ([text.get_text() for text in axes.get_xticklabels()] == labels) is names
    assert ([text.get_text() for text in axes.get_yticklabels()] == labels) is names
    assert figures[0].get_figwidth() == figures[0].get_figheight() == pytest.approx(3 + 0.35 * min(count, MAX_NAMED_LABELS))


def test_reliability_is_the_mean_of_each_bin_that_has_answers(figures: list[Any]) -> None:
    """A confidence at the upper edge of a bin counts with those below."""
    assert BINS == 15
    confidence = np.array([0.41, 0.45, 8 / 15, 8 / 15 + 0.01, 1.0, 1.0, 1.0])
    right = np.array([True, False, True, False, True, True, False])
    draw_reliability(confidence, right)
    (axes,) = figures[0].axes
    ideal, line = axes.get_lines()
    assert ideal.get_xydata().tolist() == [[0, 0], [1, 1]]
    points = [(0.43, 0.5), (8 / 15, 1.0), (8 / 15 + 0.01, 0.0), (1.0, 2 / 3)]
    np.testing.assert_allclose(line.get_xydata(), points)
    assert [text.get_text() for text in axes.texts] == ["2", "1", "1", "3"]
    np.testing.assert_allclose([text.xy for text in axes.texts], points)
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1.02), (0, 1.02))
