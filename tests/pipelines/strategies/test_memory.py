"""The memory that a worker is told to need."""

from pipelines.config import Model
from pipelines.strategies.memory import estimate


def test_states_follow_the_parameters() -> None:
    shape = Model(layers=12, heads=12, width=768, context=1024, bias=True)
    need = estimate(shape, vocabulary_size=50257, tokens=1024, precision="bf16", moments=2)
    assert need.parameters == need.gradients == 4 * 124_439_808
    assert need.optimizer == 2 * need.parameters
    assert need.total > need.parameters + need.gradients + need.optimizer


def test_activations_grow_with_tokens_and_shrink_with_precision() -> None:
    shape = Model()
    few, many = (
        estimate(shape, vocabulary_size=100, tokens=tokens, precision="fp32", moments=2).activations for tokens in (10, 1000)
    )
    half = estimate(shape, vocabulary_size=100, tokens=1000, precision="bf16", moments=2).activations
    assert many == 100 * few
    assert half < many
