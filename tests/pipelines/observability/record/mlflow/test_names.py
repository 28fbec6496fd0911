"""Names of figures in MLflow's sections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.observability.record.mlflow.names import section_name


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        ("train_loss", "train/loss"),
        ("learning_rate", "train/learning_rate"),
        ("clipped_share", "train/clipped_share"),
        ("tokens_seen/web", "tokens_seen.web"),
        ("val_loss", "val/loss"),
        ("val_loss/web", "val/loss/web"),
        ("validation_accuracy", "validation_accuracy"),
        ("test_recall/yes", "test_recall.yes"),
        ("tokens_per_second", "tokens_per_second"),
        ("system/gpu_0/power", "system/gpu_0/power"),
    ],
)
def test_losses_have_sections_and_the_rest_none(figure: str, name: str) -> None:
    assert section_name(figure) == name


@given(st.text(min_size=1))
def test_no_section_comes_before_that_of_the_training(figure: str) -> None:
    """MLflow sorts sections by name, and shows those of the system elsewhere."""
    section, slash, _ = section_name(figure).rpartition("/")
    assert not slash or section >= "train" or section.startswith("system")
