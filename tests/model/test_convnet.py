"""The convolutional network: gradients against finite differences, its sizes, its losses, and that SGD lowers them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from raystride.model.convnet import ConvNet, Loss
from raystride.model.shape import convnet_flops
from raystride.pipelines.config import TrainConfig
from raystride.pipelines.train.strategies.recompute import recompute
from tests.some import some

LOSSES: list[Loss] = ["cross_entropy", "mse"]
CLASSES = 4


def _tiny(loss: Loss, **changes: Any) -> ConvNet:
    torch.manual_seed(1)
    return ConvNet((2, 5, 6), CLASSES, channels=(3, 2), hidden=(6,), loss=loss, **changes).double()


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Images in fp64 and targets, one of which does not count."""
    torch.manual_seed(2)
    return torch.rand(3, 2, 5, 6, dtype=torch.float64), torch.tensor([3, -100, 0])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_inputs_gradient_is_that_of_finite_differences(loss: Loss) -> None:
    model, (images, targets) = _tiny(loss, label_smoothing=0.1), _batch()
    assert torch.autograd.gradcheck(lambda x: model(x, targets)[0], images.requires_grad_())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_parameters_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    model, (images, targets) = _tiny(loss), _batch()
    names = [name for name, _ in model.named_parameters()]

    def loss_of(*values: torch.Tensor) -> torch.Tensor:
        loss_sum: torch.Tensor = functional_call(model, dict(zip(names, values, strict=True)), (images, targets))[0]
        return loss_sum

    assert torch.autograd.gradcheck(loss_of, tuple(p.detach().clone().requires_grad_() for p in model.parameters()))


def test_gradients_add_up_until_they_are_zeroed() -> None:
    model, batch = _tiny("cross_entropy"), _batch()

    def gradients() -> list[torch.Tensor]:
        model(*batch)[0].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    once, twice = gradients(), gradients()
    assert all(torch.allclose(2 * a, b) for a, b in some(zip(once, twice, strict=True)))
    model.zero_grad()
    assert all(torch.equal(a, b) for a, b in some(zip(once, gradients(), strict=True)))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_small_step_of_plain_sgd_lowers_the_cost(loss: Loss) -> None:
    model, batch = _tiny(loss), _batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    costs = []
    for _ in range(20):
        optimizer.zero_grad()
        cost, _ = model(*batch)
        cost.backward()
        optimizer.step()
        costs.append(cost.item())
    assert all(after < before for before, after in some(pairwise(costs)))


@settings(max_examples=30, deadline=None)
@given(
    image=st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    channels=st.lists(st.integers(1, 5), max_size=5).map(tuple),
    hidden=st.lists(st.integers(1, 9), max_size=3).map(tuple),
)
def test_any_sizes_fit_together(image: tuple[int, int, int], channels: tuple[int, ...], hidden: tuple[int, ...]) -> None:
    model = ConvNet(image, CLASSES, channels=channels, hidden=hidden)
    assert model.logits(torch.zeros(2, *image, dtype=torch.uint8)).shape == (2, CLASSES)


def test_operations_are_counted_as_pytorch_counts_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = ConvNet((1, 8, 8), CLASSES, channels=(4, 8), hidden=(16,), linear="torch")
    counter = FlopCounterMode(display=False)
    with counter:
        model.logits(torch.zeros(1, 1, 8, 8))
    # Training on an image: a forward, and as much for each of its two gradients.
    assert convnet_flops((1, 8, 8), CLASSES, channels=(4, 8), hidden=(16,)) == 3 * counter.get_total_flops()


def test_bytes_are_normalised_as_floats_are() -> None:
    model = _tiny("mse")
    images = torch.arange(60, dtype=torch.uint8).mul(4).view(1, 2, 5, 6)
    assert torch.equal(model.logits(images), model.logits(images.double() / 255))


@pytest.mark.parametrize("training", [True, False])
def test_losses_are_those_of_their_formulas(training: bool) -> None:
    images, targets = _batch()
    rows, smoothing = [0, 2], 0.3 if training else 0.0
    wanted = (1 - smoothing) * torch.eye(CLASSES, dtype=torch.float64)[targets[rows]] + smoothing / CLASSES
    for loss in LOSSES:
        model = _tiny(loss, label_smoothing=0.3).train(training)
        logits = model.logits(images)[rows]
        each = -(wanted * logits.log_softmax(-1)).sum(-1) if loss == "cross_entropy" else (logits - wanted).square().mean(-1)
        loss_sum, counted = model(images, targets)
        assert (loss_sum.item(), counted.item()) == (pytest.approx(each.sum().item()), 2)


def test_variance_survives_depth() -> None:
    """He et al. (2015): without their factor, each of ten layers would halve it."""
    torch.manual_seed(0)
    model = ConvNet((3, 1, 1), 64, channels=(), hidden=(256,) * 10)
    assert 0.2 < model.logits(torch.rand(64, 3, 1, 1)).std().item() < 5


@pytest.mark.parametrize("way", ["none", "full"])
def test_it_learns_where_a_bright_pixel_is(way: str) -> None:
    torch.manual_seed(0)
    model = recompute(ConvNet((1, 8, 8), 2, channels=(4, 8), hidden=(16,)), TrainConfig(activation_checkpointing=way))  # type: ignore[arg-type]
    images = torch.randint(0, 60, (32, 1, 8, 8), dtype=torch.uint8)
    targets = torch.arange(32) % 2
    images[torch.arange(32), 0, 3, targets * 5 + 1] = 255
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss_sum, counted = model(images, targets)
        optimizer.zero_grad()
        (loss_sum / counted).backward()
        optimizer.step()
    assert (loss_sum / counted).item() < 0.1
