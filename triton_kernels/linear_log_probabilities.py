"""Fused linear layer and log-probabilities of target words, without holding all logits.

    z_i = x_i W^T;  y_i = z_{i, t_i} - log sum_j exp(z_ij), and 0 where t_i is `ignore_index`
    dz_ij = dy_i ([j = t_i] - exp(z_ij - log sum_k exp(z_ik)))

Shapes: x (N, C) or (B, T, C), W (V, C), targets and y (N) or (B, T). Summed over a sequence they are its log-probability,
from which preference and policy losses are computed that are no sum over tokens. So the factor of a row's gradient is not
known in the forward, in which `linear_cross_entropy` computes its gradients: here the backward recomputes the logits, a
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
    allocate_logits,
    contiguous_on_cpu,
    rows_per_chunk,
    write_softmax_losses,
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
    """Computes them from all logits at once, in fp32 at least. `product` computes x W^T by the model's CPU backend."""
    logits = product(x, weight).reshape(-1, weight.shape[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -F.cross_entropy(logits, targets.reshape(-1), ignore_index=ignore_index, reduction="none").view(targets.shape)


@operation("raystride::linear_log_probabilities")
def _linear_log_probabilities(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Returns y (N), fp32; x (N, C), targets (N)."""
    x, weight = contiguous_on_cpu(x), contiguous_on_cpu(weight)
    rows, words, targets = x.shape[0], weight.shape[0], targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    buffer, size = allocate_logits(x, weight), rows_per_chunk(rows)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        padded = buffer[: part.stop - start]
        torch.mm(x[part], weight.t(), out=padded[:, :words])
        write_softmax_losses(padded, targets[part], losses[part], ignore_index=ignore_index, words=words, gradient=False)
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
    """Returns the gradients of x and weight (empty if not required) from that of y, grad (N)."""
    x, weight = contiguous_on_cpu(x), contiguous_on_cpu(weight)
    rows, words, targets = x.shape[0], weight.shape[0], targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    buffer, size = allocate_logits(x, weight), rows_per_chunk(rows)
    grad_weight = ChunkSum(weight, one=rows <= size)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        padded = buffer[: part.stop - start]
        logits = torch.mm(x[part], weight.t(), out=padded[:, :words])
        write_softmax_losses(padded, targets[part], losses[part], ignore_index=ignore_index, words=words, gradient=True)
        # With a factor in fp32: the product is rounded to 16 bits once more, but the factor is not.
        logits.mul_(-grad[part, None])
        if for_x:
            torch.mm(logits, weight, out=grad_x[part])
        if for_weight:
            grad_weight.add_product(logits.t(), x[part])
    return grad_x, grad_weight.result() if for_weight else weight.new_empty(0)


@_linear_log_probabilities_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    for_x, for_weight = rest[-2:]
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    return grad_x, torch.empty_like(weight) if for_weight else weight.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, targets, ctx.ignore_index = inputs
    ctx.save_for_backward(x, weight, targets)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad[:2]
    found = _linear_log_probabilities_backward(grad, *ctx.saved_tensors, ctx.ignore_index, *wanted)
    return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None, None)


_linear_log_probabilities.register_autograd(_backward, setup_context=_setup_context)


def linear_log_probabilities(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    product: Product = F.linear,
) -> torch.Tensor:
    """Returns log-probabilities of the targets in nats, of their shape and in fp32 at least; 0 for `ignore_index`.

    Args:
        x: hidden states, (..., C).
        weight: the head, (V, C), of x's dtype outside autocast.
        targets: words, (...), int64; each `ignore_index` or 0 to V - 1.
        ignore_index: marks a target that does not count.
        product: computes x W^T if the reference runs.

    The log-probability of a target that is no word is NaN, or raises PyTorch's own error if the reference runs.

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
