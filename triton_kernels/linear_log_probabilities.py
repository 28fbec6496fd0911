"""The log-probability of each word that follows, from a decoder's last hidden states, without ever holding all logits.

    z_i = x_i W^T;  y_i = z_{i, t_i} - log sum_j exp(z_ij), and 0 where t_i is `ignore_index`
    dz_ij = dy_i ([j = t_i] - exp(z_ij - log sum_k exp(z_ik)))

Shapes: x (N, C) or (B, T, C), W (V, C), targets and y (N) or (B, T). Added up over a sequence, they are its log-probability,
of which preferences and policies make losses that are no sum over tokens. So what a row's gradient is multiplied with is not
known in the forward, where `linear_cross_entropy` makes its gradients: here the backward multiplies the logits out again, a
chunk of tokens at a time, four products in all. The kernel is that of `linear_cross_entropy`.

    y = linear_log_probabilities(x, weight, targets).sum(-1)   # (B), in fp32
"""

from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.linear_cross_entropy import (
    ChunkSum,
    Product,
    dense_on_cpus,
    logits_buffer,
    rows_of_a_chunk,
    softmax_losses,
)
from raystride.triton_kernels.operation import operation


def linear_log_probabilities_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    product: Product = F.linear,
) -> torch.Tensor:
    """All logits at once, in fp32 at least. `product` multiplies x W^T; the model brings the fastest for its CPU."""
    logits = product(x, weight).reshape(-1, weight.shape[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(logits, targets.reshape(-1), ignore_index=ignore_index, reduction="none").view(targets.shape)


@operation("raystride::linear_log_probabilities")
def _linear_log_probabilities(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """y (N), fp32; x (N, C), targets (N)."""
    x, weight = dense_on_cpus(x), dense_on_cpus(weight)
    rows, words, targets = x.shape[0], weight.shape[0], targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    buffer, size = logits_buffer(x, weight), rows_of_a_chunk(rows)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        logits = torch.mm(x[part], weight.t(), out=buffer[: part.stop - start, :words])
        softmax_losses(logits, targets[part], losses[part], ignore_index=ignore_index, gradient=False)
    return losses.neg_()


@_linear_log_probabilities.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@operation("raystride::linear_log_probabilities_backward")
def _linear_log_probabilities_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight (empty where not wanted) from that of y, grad (N)."""
    x, weight = dense_on_cpus(x), dense_on_cpus(weight)
    rows, words, targets = x.shape[0], weight.shape[0], targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    buffer, size = logits_buffer(x, weight), rows_of_a_chunk(rows)
    grad_weight = ChunkSum(weight, one=rows <= size)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        logits = torch.mm(x[part], weight.t(), out=buffer[: part.stop - start, :words])
        softmax_losses(logits, targets[part], losses[part], ignore_index=ignore_index, gradient=True)
        # By a factor in fp32: in 16 bits the product is rounded once more, but the factor is not.
        logits.mul_(-grad[part, None])
        if for_x:
            torch.mm(logits, weight, out=grad_x[part])
        if for_weight:
            grad_weight.add(logits.t() @ x[part])
    return grad_x, grad_weight.result() if for_weight else weight.new_empty(0)


@_linear_log_probabilities_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    return grad_x, torch.empty_like(weight) if for_weight else weight.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(x, weight, targets)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:2]
    found = _linear_log_probabilities_backward(grad, *ctx.saved_tensors, ctx.ignore_index, *wanted)
    return (*(each if want else None for each, want in zip(found, wanted, strict=True)), None, None)


_linear_log_probabilities.register_autograd(_differentiate, setup_context=_save)


def linear_log_probabilities(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    product: Product = F.linear,
) -> torch.Tensor:
    """Log-probabilities of the targets in nats, of their shape and in fp32 at least; 0 where one is `ignore_index`.

    Args:
        x: hidden states, (..., C).
        weight: the head, (V, C), of x's dtype outside autocast.
        targets: words, (...), int64; each `ignore_index` or 0 to V - 1.
        ignore_index: marks a target that does not count.
        product: multiplies x W^T where the reference runs.

    A target that is no word has NaN for a log-probability, or is PyTorch's own error where the reference runs.

    Raises:
        ValueError: a weight or targets of other shapes, targets that are not int64, or tensors on several devices.
    """
    name = "linear_log_probabilities"
    expect(name, "weight", weight, shape=(*weight.shape[:1], *x.shape[-1:]), beside=x)
    expect(name, "targets", targets, shape=x.shape[:-1], dtypes=(torch.int64,), beside=x)
    refusal = f"weight is {weight.dtype}, x {x.dtype}" if weight.dtype != x.dtype else ""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inside, head, refusal = x.to(dtype), weight.to(dtype), ""
    else:
        inside, head = x, weight
    if not takes_triton(name, inside, refusal):
        return linear_log_probabilities_reference(x, weight, targets, ignore_index=ignore_index, product=product)
    found: torch.Tensor = _linear_log_probabilities(
        inside.reshape(-1, inside.shape[-1]), head, targets.reshape(-1), ignore_index
    )
    return found.view(targets.shape)
