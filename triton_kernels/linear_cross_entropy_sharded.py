"""The loss of a language model whose words are spread over the workers of a group; nobody ever holds all logits.

    z = x W_r^T of a worker's own words;  m = max over all workers of z;  l = m + log sum over all workers of exp(z - m)
    loss = (1 - s) (l - z_t) + s (l - mean_j z_j) + c l^2,  as `linear_cross_entropy`

For a chunk of tokens at a time, workers exchange their largest logit, and then in one sum their part of the exponentials,
the target's logit, which one of them has, and with label smoothing the plain sum (Shoeybi et al., 2019, section 3).
Gradients are made in the forward, as there; that of x is this worker's part of a sum over the workers, for the caller to
take. The logits are computed and walked over by PyTorch, on GPUs as well.
Shapes: x (..., C), the same on all workers, W_r (V_r, C), targets (...), the same on all.

    loss_sum, counted = linear_cross_entropy_sharded(x, rows, targets, first_word=128, words=256, group=group)
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.linear_cross_entropy import Product, rows_of_a_chunk


def linear_cross_entropy_sharded(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    first_word: int,
    words: int,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    product: Product = F.linear,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the losses in nats over targets that are not `ignore_index` (fp32 scalar), and how many those are (int64).

    All workers of `group` call it together and get the same; their `weight` (V_r, C) are the rows `first_word` to
    `first_word` + V_r - 1 of `words`, of which a worker may have none. The gradient of x is this worker's part of the whole.
    The rest is as `linear_cross_entropy` has it: a target that is no word makes the loss NaN.

    Raises ValueError for shapes or types that do not go together, and for rows that are not among the words.
    """
    expect("linear_cross_entropy_sharded", "weight", weight, shape=(*weight.shape[:1], *x.shape[-1:]), beside=x)
    expect("linear_cross_entropy_sharded", "targets", targets, shape=x.shape[:-1], dtypes=(torch.int64,), beside=x)
    if not 0 <= first_word <= first_word + len(weight) <= words:
        raise ValueError(
            f"linear_cross_entropy_sharded: rows {first_word} to {first_word + len(weight) - 1} are not among {words} words"
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    flat, rows = targets.reshape(-1), x.reshape(-1, x.shape[-1])
    rules = (first_word, words, group, ignore_index, label_smoothing, z_loss, product)
    loss: torch.Tensor = _Loss.apply(rows, weight, flat, torch.is_grad_enabled(), *rules)  # type: ignore[no-untyped-call]
    return loss, (flat != ignore_index).sum()


def bytes_exchanged(tokens: int, *, label_smoothing: float = 0.0, itemsize: int = 4) -> int:
    """Bytes that a worker gives to sums and maxima over its group for so many tokens; backward exchanges nothing here."""
    return tokens * itemsize * (4 if label_smoothing else 3)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        graph: bool,
        first_word: int,
        words: int,
        group: dist.ProcessGroup,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        product: Product,
    ) -> torch.Tensor:
        for_x, for_weight = (graph and each for each in ctx.needs_input_grad[:2])
        grad_x = torch.zeros_like(x) if for_x else None
        # Sums over chunks in fp32 at least.
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        total = torch.zeros((), dtype=wide, device=x.device)
        for start in range(0, len(x), rows_of_a_chunk(len(x))):
            part = slice(start, start + rows_of_a_chunk(len(x)))
            z, target = product(x[part], weight).to(wide), targets[part]
            counts = target != ignore_index
            own = target - first_word
            here = counts & (own >= 0) & (own < len(weight))
            log_sum, z_target, plain = _exchanged(z, own, here, smoothing, group)
            # What is no word has no logit, and a loss that is not a number.
            is_word = (target >= 0) & (target < words)
            losses = log_sum - (1 - smoothing) * z_target - smoothing * plain / words + z_loss * log_sum.square()
            total += torch.where(counts, losses.where(is_word, float("nan")), 0.0).sum()
            if not (for_x or for_weight):
                continue
            factor = torch.where(counts, (1 + 2 * z_loss * log_sum).where(is_word, float("nan")), 0.0)
            gradient = z.sub_(log_sum[:, None]).exp_().mul_(factor[:, None])
            if smoothing:
                gradient -= counts[:, None].to(wide) * (smoothing / words)
            if len(weight):
                gradient.scatter_add_(1, own.masked_fill(~here, 0)[:, None], here[:, None].to(wide) * (smoothing - 1))
            gradient = gradient.to(x.dtype)
            if grad_x is not None:
                grad_x[part] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.t() @ x[part]
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients are there since the forward; they lack the factor that comes from what follows the loss."""
        scaled = (None if each is None else (each * grads[0]).to(each.dtype) for each in ctx.saved_tensors)
        return (*scaled, *[None] * 9)


def _exchanged(
    z: torch.Tensor, own: torch.Tensor, here: torch.Tensor, smoothing: float, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of logits (N, V_r): the log-sum-exp over all words, the target's logit and, with smoothing, all logits' sum, (N)."""
    largest = z.amax(-1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    z_target = z.gather(1, own.masked_fill(~here, 0)[:, None])[:, 0] if z.shape[1] else torch.zeros_like(largest)
    sums = [(z - largest[:, None]).exp_().sum(-1), z_target.masked_fill(~here, 0.0)]
    parts = torch.stack([*sums, z.sum(-1)] if smoothing else sums)
    dist.all_reduce(parts, group=group)
    return largest + parts[0].log(), parts[1], parts[2] if smoothing else torch.zeros_like(largest)
