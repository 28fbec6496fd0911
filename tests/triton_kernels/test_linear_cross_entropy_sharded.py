"""The loss over words that are spread over workers is that of the whole head, with its gradients, and no logits are sent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from raystride.triton_kernels import linear_cross_entropy_sharded as module
from raystride.triton_kernels.linear_cross_entropy import linear_cross_entropy_reference
from raystride.triton_kernels.linear_cross_entropy_sharded import bytes_exchanged, linear_cross_entropy_sharded
from tests.distributed import run_distributed

WORDS, WIDTH = 11, 8
CUTS = {1: (0, 11), 2: (0, 4, 11), 4: (0, 3, 3, 7, 11)}
"""Where each worker's words begin, and the end; one of four has none."""
RULES: list[dict[str, float]] = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-3}, {"label_smoothing": 0.2, "z_loss": 1e-2}]


def _case(dtype: torch.dtype, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, weight = (torch.randn(n, WIDTH, generator=generator, dtype=dtype) for n in (tokens, WORDS))
    targets = torch.randint(0, WORDS, (tokens,), generator=generator)
    targets[:7] = -100
    return x.view(2, -1, WIDTH), weight, targets.view(2, -1)


def _errors(rank: int, world: int, dtype: torch.dtype, tokens: int, rules: dict[str, float]) -> tuple[float, ...]:
    """Relative, of the loss and of the gradients of x and of this worker's rows."""
    x, weight, targets = _case(dtype, tokens)
    first, end = CUTS[world][rank : rank + 2]
    whole = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted, count = linear_cross_entropy_reference(*whole, targets, **rules)
    (0.37 * wanted).backward()
    own = [x.clone().requires_grad_(), weight[first:end].clone().requires_grad_()]
    found, counted = linear_cross_entropy_sharded(
        *own, targets, first_word=first, words=WORDS, group=dist.group.WORLD, **rules
    )
    (0.37 * found).backward()
    assert int(counted) == int(count)
    gradients = [(own[0].grad, whole[0].grad), (own[1].grad, whole[1].grad[first:end])]  # type: ignore[index]
    dist.all_reduce(own[0].grad)
    norms = [whole[0].grad.norm(), whole[1].grad.norm()]  # type: ignore[union-attr]
    errors = [float((ours - theirs).norm() / norm) for (ours, theirs), norm in zip(gradients, norms, strict=True)]  # type: ignore[operator]
    return abs(float(found.detach() / wanted.detach()) - 1), *errors


def _all(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32):
        # 1300 tokens are two chunks.
        found[str(dtype)] = max(max(_errors(rank, world, dtype, n, rules)) for n in (20, 1300) for rules in RULES)
    x, weight, targets = _case(torch.float32, 20)
    first, end = CUTS[world][rank : rank + 2]
    sent, reduce = [0], dist.all_reduce

    def counting(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return reduce(tensor, *arguments, **keywords)

    part: dict[str, Any] = {"first_word": first, "words": WORDS, "group": dist.group.WORLD}
    module.dist.all_reduce = counting
    with torch.no_grad():
        for smoothing in (0.0, 0.1):
            linear_cross_entropy_sharded(x, weight[first:end], targets, label_smoothing=smoothing, **part)
    module.dist.all_reduce = reduce
    found["sent"] = sent[0]
    targets[1, 3] = WORDS
    found["no word"] = float(linear_cross_entropy_sharded(x, weight[first:end], targets, **part)[0])
    with torch.autocast("cpu", torch.bfloat16):
        found["bf16"] = float(linear_cross_entropy_sharded(x, weight[first:end], targets.clamp(max=WORDS - 1), **part)[0])
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_it_is_the_loss_of_the_whole(world: int) -> None:
    x, weight, targets = _case(torch.float32, 20)
    targets[1, 3] = WORDS - 1
    whole = float(linear_cross_entropy_reference(x, weight, targets)[0])
    for found in run_distributed(_all, world):
        assert found["torch.float64"] < 1e-12
        assert found["torch.float32"] < 5e-6
        assert found["sent"] == bytes_exchanged(20) + bytes_exchanged(20, label_smoothing=0.1)
        assert found["no word"] != found["no word"]
        assert found["bf16"] == pytest.approx(whole, rel=2e-2)


def test_rows_that_are_no_words_are_refused() -> None:
    x, weight, targets = _case(torch.float32, 20)
    with pytest.raises(ValueError, match="rows 3 to 13 are not among 11 words"):
        linear_cross_entropy_sharded(x, weight, targets, first_word=3, words=WORDS, group=None)  # type: ignore[arg-type]
