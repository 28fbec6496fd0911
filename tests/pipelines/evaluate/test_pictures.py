"""Pictures of a classifier's answers, whatever its labels are."""

import numpy as np
import pytest

from raystride.pipelines.evaluate.pictures import confusion_picture


@pytest.mark.parametrize("label", ["costs $5 or $6_{", r"$\bad{tex$", "plain", "ключ"])
def test_a_label_is_text_and_no_formula(label: str) -> None:
    assert confusion_picture([label, "other"], np.array([[3, 1], [0, 2]])).startswith(b"\x89PNG")
