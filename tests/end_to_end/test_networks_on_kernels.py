"""Classifier, translator and convolutional network on the Triton kernels, in the interpreter, against PyTorch."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from raystride.model.beam import translate
from raystride.model.classifier import Classifier
from raystride.model.convnet import ConvNet
from raystride.model.translator import Translator
from raystride.pipelines.config import ModelConfig
from raystride.triton_kernels.dispatch import kernels_ran, use_kernels
from tests.bases import ENCODERS

SHAPE = ModelConfig(architecture="original", layers=1, heads=2, hidden_size=16, context=8, pooling="attention")
IDS, LENGTHS = torch.arange(12).view(2, 6) % 11, torch.tensor([6, 3])
LABELS = torch.tensor([2, -100])
IMAGES = torch.arange(2 * 3 * 5 * 4, dtype=torch.uint8).view(2, 3, 5, 4)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "classifier": (lambda: Classifier(SHAPE, 11, 3), (IDS, LENGTHS, LABELS)),
    "bert": (lambda: Classifier(ENCODERS["bert"], 11, 3), (IDS, LENGTHS, LABELS)),
    "translator": (lambda: Translator(SHAPE, 11, label_smoothing=0.1), (IDS, LENGTHS, IDS, IDS.roll(-1, 1))),
    "convnet": (lambda: ConvNet((3, 5, 4), 3, channels=(4,), hidden=(8,), loss="mse"), (IMAGES, LABELS)),
}


@pytest.fixture(autouse=True)
def choose_again_afterwards() -> Iterator[None]:
    """Leaves the process as it was."""
    yield
    use_kernels("auto")


@pytest.mark.parametrize("case", CASES)
def test_same_loss_and_gradients_with_kernels_and_without(case: str) -> None:
    build, batch = CASES[case]
    found = []
    for kernels in ("torch", "triton"):
        use_kernels(kernels)
        torch.manual_seed(0)
        model = build()
        use_kernels(kernels)
        loss, counted = model(*batch)
        loss.backward()
        assert set(kernels_ran().values()) == {kernels}
        found.append([loss.detach(), counted, *(p.grad for p in model.parameters() if p.grad is not None)])
    for mine, other in zip(*reversed(found), strict=True):
        # fp32, 2^-24: some hundred roundings one after another, relative to the largest of a tensor.
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


def test_same_translations_with_kernels_and_without() -> None:
    found = []
    for kernels in ("torch", "triton"):
        use_kernels(kernels)
        torch.manual_seed(0)
        model = Translator(SHAPE, 11)
        found.append(translate(model, IDS, LENGTHS, start_id=0, end_id=1, longest=4, beams=2))
        assert set(kernels_ran().values()) == {kernels}
    assert found[0] == found[1]
