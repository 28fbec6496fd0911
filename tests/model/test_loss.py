"""The loss of bounded logits is that of all of them at once, with its gradients."""

import torch
import torch.nn.functional as F

from raystride.model import loss


def test_some_rows_at_a_time_have_the_loss_of_all() -> None:
    torch.manual_seed(0)
    rows = 2 * loss.ROWS + 3
    x, weight = (torch.randn(size, requires_grad=True, dtype=torch.float64) for size in ((1, rows, 4), (7, 4)))
    targets = torch.randint(0, 7, (1, rows))
    targets[0, ::3] = loss.IGNORED
    found, counted = loss.capped_cross_entropy(x, weight, targets, softcap=2.0, product=F.linear)
    logits = 2.0 * torch.tanh(x @ weight.t() / 2.0)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=loss.IGNORED, reduction="sum")
    assert counted == (targets != loss.IGNORED).sum()
    torch.testing.assert_close(found, expected)
    for mine, other in zip(torch.autograd.grad(found, (x, weight)), torch.autograd.grad(expected, (x, weight)), strict=True):
        torch.testing.assert_close(mine, other)
