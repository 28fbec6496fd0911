"""Fused linear layer and cross-entropy of a language model, without holding all logits.

    z = x W^T;  l = log sum_j exp(z_j);  loss = (1 - s) (l - z_t) + s (l - mean_j z_j) + c l^2
    dloss/dz_j = (1 + 2 c l) exp(z_j - l) - (1 - s) [j = t] - s / V

with label smoothing s (Szegedy et al., 2016, section 7) and z-loss c (Chowdhery et al., 2022, section 5). Targets equal to
`ignore_index` do not count. Shapes: x (N, C) or (B, T, C), W (V, C), targets (N) or (B, T).

For each chunk of tokens, the library computes logits; a kernel loops over their vocabulary in blocks and replaces them by
their gradient; two more products turn it into the gradients of x and W. That is done in the forward: three products, as
without chunks, while a backward that recomputes the logits would need four. The idea is from
Liger-Kernel (Hsu et al., 2024); the sums over chunks are in fp32 here.

    loss_sum, counted = linear_cross_entropy(x, weight, targets)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import cdiv, jit, next_power_of_2, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.operation import operation

_CHUNKS = 8
"""Number of chunks of tokens. More save memory, but each reads and writes the fp32 gradient of W once: with eight
of 4,096 tokens, a width of 4,096 and 128,256 words that is a tenth of the time of the products."""
_MIN_CHUNK = 1024
"""Tokens below which a chunk does not fill a large GPU with its products."""
_BLOCK = 4096
"""Logits held at once by a program."""
_SCALED = 2048
"""Elements of a gradient scaled by a program: 16 for each of 128 threads."""

ALIGNMENT = 64
"""Alignment of rows of logits: libraries use slow paths for unaligned rows, and 50,257 is odd."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    product: Product = F.linear,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the loss from all logits at once, in fp32 at least. `product` computes x W^T by the model's CPU backend."""
    logits = product(x, weight).reshape(-1, weight.shape[0])
    logits, flat = logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.reshape(-1)
    loss = F.cross_entropy(logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum")
    counts = flat != ignore_index
    if z_loss:
        loss = loss + z_loss * torch.where(counts, logits.logsumexp(-1).square(), 0.0).sum()
    return loss, counts.sum()


@jit
def _softmax_gradient_kernel(
    logits_ptr, row_stride, targets_ptr, losses_ptr, columns, ignore_index, smoothing, z_loss,
    GRADIENT: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's loss; its logits are replaced by the gradient of the loss. Rows are read in units of UNIT columns."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    counts, is_word = target != ignore_index, (target >= 0) & (target < columns)
    # Read before the first walk, at whose sums all threads meet: none of them overwrites it before another has read it. What
    # is no word has no logit, and a loss that is not a number.
    z_target = tl.load(logits_ptr + target, mask=is_word, other=float("nan")).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    largest, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        readable = (start + offsets) // UNIT < tl.cdiv(columns, UNIT)
        z = tl.load(logits_ptr + start + offsets, mask=readable, other=-float("inf")).to(tl.float32)
        z = tl.where(inside, z, -float("inf"))
        higher = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(z - higher), 0)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        largest = higher
    log_sum = largest + tl.log(total)
    loss = log_sum - (1.0 - smoothing) * z_target - smoothing * (plain / columns) + z_loss * log_sum * log_sum
    tl.store(losses_ptr + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        # Said, not left to what the compiler makes of the walk above.
        tl.debug_barrier()
        factor = tl.where(is_word, 1.0 + 2.0 * z_loss * log_sum, float("nan"))
        for start in range(0, columns, BLOCK):
            readable = (start + offsets) // UNIT < tl.cdiv(columns, UNIT)
            z = tl.load(logits_ptr + start + offsets, mask=readable, other=-float("inf")).to(tl.float32)
            gradient = factor * tl.exp(z - log_sum) - smoothing / columns
            gradient -= tl.where(start + offsets == target, 1.0 - smoothing, 0.0)
            # Zeros behind the words: a product on CPUs would carry a NaN from there.
            gradient = tl.where(counts & (start + offsets < columns), gradient, 0.0)
            tl.store(logits_ptr + start + offsets, gradient.to(logits_ptr.dtype.element_ty), mask=readable)


@jit
def _scale_kernel(x_ptr, factor_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = factor x, multiplied in fp32; the factor is a number on the device."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, x * tl.load(factor_ptr).to(tl.float32), mask=offsets < n)


def rows_per_chunk(rows: int) -> int:
    """Returns the chunk size; it depends only on the number of tokens, so that the order of sums is the same on any GPU."""
    return min(rows, max(_MIN_CHUNK, cdiv(rows, _CHUNKS))) if rows else 1


def contiguous_on_cpu(x: torch.Tensor) -> torch.Tensor:
    """Returns x (N, C), contiguous on CPUs.

    PyTorch's bf16 product on processors with AMX reads one element beyond a row of odd length (2.13 and 2.14), and
    propagates a NaN found there.
    """
    return x if x.is_cuda else x.contiguous()


def aligned_words(words: int) -> int:
    """Returns the columns of a row of logits with its padding."""
    return cdiv(words, ALIGNMENT) * ALIGNMENT


def allocate_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Allocates a chunk's logits, (n, V rounded up), for x (N, C) and weight (V, C)."""
    rows = len(x)
    # Zeros, since PyTorch's bf16 product on CPUs propagates NaN from the memory it overwrites.
    return x.new_zeros(min(rows_per_chunk(rows), rows), aligned_words(weight.shape[0]))


def access_unit(logits: torch.Tensor, words: int) -> int:
    """Returns the columns that are read and written together, of logits (n, W) whose first `words` columns are words."""
    return ALIGNMENT if logits.shape[1] == aligned_words(words) else 1


def write_softmax_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    *,
    ignore_index: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    words: int,
    gradient: bool,
) -> None:
    """Writes the loss of each row of logits (n, W) into `losses` (n), fp32; with `gradient`, dloss/dz in place of z.

    The first `words` columns are words, and the content of the others is lost. Where W is `words` rounded up to a multiple
    of ALIGNMENT, threads read and write 16 bytes at a time, whatever the number of words.
    """
    launch(
        _softmax_gradient_kernel, (logits.shape[0],), logits, logits.stride(0), targets, losses, words,
        ignore_index, label_smoothing, z_loss,
        GRADIENT=gradient, UNIT=access_unit(logits, words), BLOCK=min(_BLOCK, next_power_of_2(words)), num_warps=8,
    )  # fmt: skip


@operation("raystride::linear_cross_entropy")
def _linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    for_x: bool,
    for_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns loss sum, count, and the gradients of x and weight (empty if not requested). x (N, C), targets (N)."""
    # The kernel requires contiguous targets of a chunk.
    x, weight = contiguous_on_cpu(x), contiguous_on_cpu(weight)
    rows, words, targets = x.shape[0], weight.shape[0], targets.contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=x.device)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    size = rows_per_chunk(rows)
    chunks = range(0, rows, size)
    grad_weight = ChunkSum(weight, one=len(chunks) == 1)
    buffer = allocate_logits(x, weight)
    for start in chunks:
        part = slice(start, min(start + size, rows))
        padded = buffer[: part.stop - start]
        logits = torch.mm(x[part], weight.t(), out=padded[:, :words])
        write_softmax_losses(
            padded, targets[part], losses[part], words=words,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, gradient=for_x or for_weight,
        )  # fmt: skip
        if for_x:
            torch.mm(logits, weight, out=grad_x[part])
        if for_weight:
            grad_weight.add_product(logits.t(), x[part])
    counted = (targets != ignore_index).sum()
    return losses.sum(), counted, grad_x, grad_weight.result() if for_weight else weight.new_empty(0)


def _adds_products(x: torch.Tensor) -> bool:
    """Returns whether the library adds products of x's dtype to a sum in fp32 on its device."""
    return x.is_cuda and not torch.version.hip and x.dtype in (torch.float16, torch.bfloat16)


class ChunkSum:
    """A sum over chunks of products of the shape and dtype of `like`, in fp32; a single one is rounded at once.

    On NVIDIA the library adds a product of 16 bits to the sum itself: none is rounded, written and read again.
    """

    def __init__(self, like: torch.Tensor, one: bool) -> None:
        self._like, self._one, self._fused = like, one, not one and _adds_products(like)
        self._total: torch.Tensor | None = None

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Adds a b, (V, n) by (n, C)."""
        if self._total is None and self._fused:
            self._total = torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload]
        elif self._total is None:
            # A single chunk's product is rounded already, so fp32 would hold the same numbers.
            self._total = a @ b if self._one else (a @ b).float()
        elif self._fused:
            torch.ops.aten.addmm.dtype_out(self._total, a, b, torch.float32, out=self._total)
        else:
            self._total += a @ b

    def result(self) -> torch.Tensor:
        """Returns the sum in the dtype of `like`; zeros if nothing was added."""
        return torch.zeros_like(self._like) if self._total is None else self._total.to(self._like.dtype)


@_linear_cross_entropy.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    for_x, for_weight = rest[-2:]
    loss, counted = x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.int64)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if for_x else x.new_empty(0)
    return loss, counted, grad_x, torch.empty_like(weight) if for_weight else weight.new_empty(0)


@operation("raystride::linear_cross_entropy_backward")
def _linear_cross_entropy_backward(saved: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Returns saved * grad in fp32: 1 / counted in bf16 would be off by up to 2^-9, and so would all gradients."""
    saved = saved.contiguous()
    found, n = torch.empty_like(saved), saved.numel()
    launch(_scale_kernel, (cdiv(n, _SCALED),), saved, grad, found, n, BLOCK=_SCALED, num_warps=4)
    return found


@_linear_cross_entropy_backward.register_fake
def _(saved: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(saved, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, counted, grad_x, grad_weight = output
    ctx.mark_non_differentiable(counted, grad_x, grad_weight)
    ctx.save_for_backward(grad_x, grad_weight)
    ctx.wanted = inputs[-2:]


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Scales the gradients computed in the forward by the gradient of the loss."""
    pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    found = [_linear_cross_entropy_backward(saved, grad) if wanted else None for saved, wanted in pairs]
    return (*found, None, None, None, None, None, None)


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    product: Product = F.linear,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of losses in nats over targets other than `ignore_index` (fp32 scalar), and their number (int64).

    Args:
        x: hidden states, (..., C).
        weight: the head, (V, C), of x's dtype outside autocast.
        targets: words, (...), int64; each `ignore_index` or 0 to V - 1.
        ignore_index: marks a target that does not count.
        label_smoothing: fraction of the target's probability spread evenly over all words, 0 to 1.
        z_loss: coefficient of the squared log-sum-exp.
        product: computes x W^T if the reference runs.

    A target that is no word makes the loss NaN, or raises PyTorch's own error if the reference runs.

    Raises:
        ValueError: a weight or targets of other shapes, targets that are not int64, tensors on several devices, or label
            smoothing that is not between 0 and 1.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"linear_cross_entropy: label_smoothing must be between 0 and 1, but is {label_smoothing}")
    expect("linear_cross_entropy", "weight", weight, shape=(*weight.shape[:1], *x.shape[-1:]), beside=x)
    expect("linear_cross_entropy", "targets", targets, shape=x.shape[:-1], dtypes=(torch.int64,), beside=x)
    refusal = f"weight is {weight.dtype}, x {x.dtype}" if weight.dtype != x.dtype else ""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        inside, head, refusal = x.to(dtype), weight.to(dtype), ""
    else:
        inside, head = x, weight
    if not takes_triton("linear_cross_entropy", inside, refusal):
        return linear_cross_entropy_reference(
            x, weight, targets,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, product=product,
        )  # fmt: skip
    graph = torch.is_grad_enabled()
    loss, counted, _, _ = _linear_cross_entropy(
        inside.reshape(-1, inside.shape[-1]), head, targets.reshape(-1), ignore_index, label_smoothing, z_loss,
        graph and inside.requires_grad, graph and head.requires_grad,
    )  # fmt: skip
    return loss, counted
