"""Vocabulary-parallel fused linear cross-entropy: the head is sharded over a group, and logits are never gathered.

    z_r = x W_r^T;  m = max_r max_j z_rj;  l = m + log sum_r sum_j exp(z_rj - m)
    loss = (1 - s) (l - z_t) + s (l - mean_j z_j) + c l^2
    dloss/dz_rj = (1 + 2 c l) exp(z_rj - l) - (1 - s) [j = t] - s / V

with label smoothing s and z-loss c, as in `linear_cross_entropy`. Worker r has the rows W_r (V_r, C) of the head, x (N, C)
and targets (N) are the same on all. For each chunk of tokens they all-reduce each token's largest logit, then its sum of
exponentials, its target's logit and, for label smoothing, its sum of logits: three or four numbers a token instead of V
(Shoeybi et al., "Megatron-LM", 2019, section 3). Each worker computes its logits by one product and replaces them by their
gradient, in the forward. Two chunks are in flight: during the all-reduce of one, the gradients of the one before are
computed, or the logits of the next.

    loss_sum, counted = linear_cross_entropy_sharded(x, own_rows, targets, first_word=first, words=words, group=group)
    (loss_sum / counted).backward()                           # own_rows.grad is complete, x.grad partial:
    dist.all_reduce(x.grad, group=group)
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from raystride.triton_kernels.arguments import expect
from raystride.triton_kernels.dispatch import takes_triton
from raystride.triton_kernels.language import jit, jit_varying, next_power_of_2, tl
from raystride.triton_kernels.launch import launch
from raystride.triton_kernels.linear_cross_entropy import (
    Product,
    access_unit,
    aligned_words,
    contiguous_on_cpu,
    linear_cross_entropy,
    rows_per_chunk,
)

_NAME = "linear_cross_entropy_sharded"
_BLOCK = 4096
"""Logits held at once by a program."""


class WordShard(NamedTuple):
    """A worker's shard of the vocabulary, and the settings of the loss."""

    first: int
    """Index of its first word."""
    words: int
    """V, the words of all workers."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class _Call(NamedTuple):
    """Arguments of a call other than its tensors."""

    shard: WordShard
    group: dist.ProcessGroup | None
    product: Product
    for_x: bool
    """Whether the gradient of x is required."""
    for_weight: bool
    triton: bool


def _accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype of sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _locate_targets(targets: torch.Tensor, shard: WordShard, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each target's column in this worker's shard (0 if it is not local), and whether it is local."""
    columns = targets - shard.first
    is_local = (columns >= 0) & (columns < own) & (targets != shard.ignore_index)
    return columns.where(is_local, 0), is_local


_Measured = tuple[torch.Tensor, torch.Tensor]


def measure_words_reference(logits: torch.Tensor, targets: torch.Tensor, shard: WordShard) -> _Measured:
    """Returns each row's largest logit (N), and (3, N): sum of exp(z - largest), target's logit or 0, sum of logits.

    logits (N, V_r), in fp32 at least and with V_r > 0, are replaced by exp(z - largest), so that each exponential is
    computed once.
    """
    columns, is_local = _locate_targets(targets, shard, logits.shape[1])
    sums = logits.new_zeros(3, len(logits))
    largest = logits.amax(1)
    sums[1] = logits.gather(1, columns[:, None])[:, 0].where(is_local, 0.0)
    if shard.label_smoothing:
        sums[2] = logits.sum(1)
    # Rows of only -inf have no exponentials; subtracting -inf would give NaN.
    logits.sub_(largest.clamp(min=torch.finfo(logits.dtype).min)[:, None]).exp_()
    sums[0] = logits.sum(1)
    return largest, sums


def words_gradient_reference(
    exponentials: torch.Tensor, targets: torch.Tensor, largest: torch.Tensor, log_sums: torch.Tensor, shard: WordShard
) -> torch.Tensor:
    """Returns dloss/dz (N, V_r), replacing the result of `measure_words_reference`; log_sums (N): l over all words."""
    columns, is_local = _locate_targets(targets, shard, exponentials.shape[1])
    counts, is_word = targets != shard.ignore_index, (targets >= 0) & (targets < shard.words)
    factors = (largest - log_sums).exp() * (1 + 2 * shard.z_loss * log_sums).where(is_word, float("nan"))
    exponentials.mul_(factors[:, None])
    if shard.label_smoothing:
        exponentials.sub_(shard.label_smoothing / shard.words)
    rows = torch.arange(len(targets), device=targets.device)
    exponentials[rows, columns] -= is_local.to(exponentials.dtype) * (1 - shard.label_smoothing)
    return exponentials.masked_fill_(~counts[:, None], 0.0)


def compute_word_losses(largest: torch.Tensor, sums: torch.Tensor, targets: torch.Tensor, shard: WordShard) -> _Measured:
    """Returns each row's loss and l, (N) both, from the largest logits (N) and the sums (3, N) over all workers."""
    log_sums = largest + sums[0].log()
    losses = log_sums - (1 - shard.label_smoothing) * sums[1] + shard.z_loss * log_sums.square()
    if shard.label_smoothing:
        losses -= shard.label_smoothing / shard.words * sums[2]
    is_word = (targets >= 0) & (targets < shard.words)
    return losses.where(is_word, float("nan")).where(targets != shard.ignore_index, 0.0), log_sums


@jit_varying("rows")
def _measure_words_kernel(
    logits_ptr, row_stride, targets_ptr, largest_ptr, sums_ptr, rows, columns, first_word, ignore_index,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's largest logit, and of its sums the exponentials relative to it, the target's logit (0 elsewhere), all."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    place = target - first_word
    here = (place >= 0) & (place < columns) & (target != ignore_index)
    z_target = tl.load(logits_ptr + place, mask=here, other=0.0).to(tl.float32)
    offsets = tl.arange(0, BLOCK)
    largest, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        readable = (start + offsets) // UNIT < tl.cdiv(columns, UNIT)
        z = tl.load(logits_ptr + start + offsets, mask=readable, other=-float("inf")).to(tl.float32)
        z = tl.where(inside, z, -float("inf"))
        higher = tl.maximum(largest, tl.max(z, 0))
        # As the reference: what is -inf throughout has no exponentials, -inf - -inf would be NaN.
        finite = tl.maximum(higher, -3.0e38)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(z - finite), 0)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        largest = higher
    tl.store(largest_ptr + row, largest)
    tl.store(sums_ptr + row, total)
    tl.store(sums_ptr + rows + row, z_target)
    tl.store(sums_ptr + rows + rows + row, plain)


@jit
def _words_gradient_kernel(
    logits_ptr, row_stride, targets_ptr, log_sums_ptr, columns, first_word, words, ignore_index, smoothing, z_loss,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's logits are replaced by the gradient of the loss; its log-sum-exp is that over all workers' words."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    log_sum = tl.load(log_sums_ptr + row)
    counts, is_word = target != ignore_index, (target >= 0) & (target < words)
    factor = tl.where(is_word, 1.0 + 2.0 * z_loss * log_sum, float("nan"))
    offsets = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        readable = (start + offsets) // UNIT < tl.cdiv(columns, UNIT)
        z = tl.load(logits_ptr + start + offsets, mask=readable, other=-float("inf")).to(tl.float32)
        gradient = factor * tl.exp(z - log_sum) - smoothing / words
        gradient -= tl.where(start + offsets == target - first_word, 1.0 - smoothing, 0.0)
        # Zeros behind the words: a product on CPUs would carry a NaN from there.
        gradient = tl.where(counts & (start + offsets < columns), gradient, 0.0)
        tl.store(logits_ptr + start + offsets, gradient.to(logits_ptr.dtype.element_ty), mask=readable)


def measure_words(logits: torch.Tensor, targets: torch.Tensor, shard: WordShard, columns: int) -> _Measured:
    """Computes `measure_words_reference` by a kernel, in fp32; logits (N, W), with contiguous rows, are unchanged.

    The first `columns` are this worker's words, as in `write_softmax_losses`.
    """
    largest, sums = (torch.empty(*n, len(logits), dtype=torch.float32, device=logits.device) for n in ((), (3,)))
    launch(
        _measure_words_kernel, (len(logits),), logits, logits.stride(0), targets, largest, sums, len(logits),
        columns, shard.first, shard.ignore_index, UNIT=access_unit(logits, columns), BLOCK=_block_size(columns), num_warps=8,
    )  # fmt: skip
    return largest, sums


def words_gradient(
    logits: torch.Tensor, targets: torch.Tensor, log_sums: torch.Tensor, shard: WordShard, columns: int
) -> None:
    """Replaces logits (N, W) by dloss/dz by a kernel; log_sums (N), fp32: l over all words.

    The first `columns` are this worker's words, as in `write_softmax_losses`.
    """
    launch(
        _words_gradient_kernel, (len(logits),), logits, logits.stride(0), targets, log_sums, columns,
        shard.first, shard.words, shard.ignore_index, shard.label_smoothing, shard.z_loss,
        UNIT=access_unit(logits, columns), BLOCK=_block_size(columns), num_warps=8,
    )  # fmt: skip


def _block_size(columns: int) -> int:
    return min(_BLOCK, next_power_of_2(columns))


class _Chunk:
    """A chunk of tokens in flight: logits, all-reduces, losses, gradients."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, call: _Call, buffer: torch.Tensor | None
    ) -> None:
        x, weight = contiguous_on_cpu(x), contiguous_on_cpu(weight)
        self.x, self.weight, self.targets, self.call = x, weight, targets, call
        logits = self._multiply() if buffer is None else torch.mm(x, weight.t(), out=buffer[: len(x), : len(weight)])
        self._logits = logits if call.triton else logits.to(_accumulation_dtype(logits))
        if len(weight):
            if buffer is not None:
                self._padded = buffer[: len(x)]
                self._own_largest, self._sums = measure_words(self._padded, targets, call.shard, len(weight))
            else:
                self._own_largest, self._sums = measure_words_reference(self._logits, targets, call.shard)
        else:
            self._sums = x.new_zeros(3, len(x), dtype=_accumulation_dtype(x))
            self._own_largest = torch.full_like(self._sums[0], -float("inf"))
        self._largest = self._own_largest.clone()
        self._work = dist.all_reduce(self._largest, dist.ReduceOp.MAX, call.group, async_op=True)

    def _multiply(self) -> torch.Tensor:
        """Computes the product with its own graph, by the model's backend.

        Its saved tensors are needed within this forward; outer hooks would recompute or move them in the middle of it.
        """
        call = self.call
        self._leaves = [self.x.detach().requires_grad_(call.for_x), self.weight.detach().requires_grad_(call.for_weight)]
        # Not every library multiplies by a matrix without rows.
        multiply = call.product if len(self.weight) else F.linear
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            self._product = multiply(*self._leaves)
        return (
            self._product.data
        )  # not `detach()`: with it, autograd would notice the in-place writes; the graph reads no result

    def start_sum_exchange(self) -> None:
        """Waits for the largest logits, and starts the all-reduce of the sums."""
        self._work.wait()
        self._sums[0] *= (self._own_largest - self._largest).exp()
        sent = self._sums if self.call.shard.label_smoothing else self._sums[:2]
        self._work = dist.all_reduce(sent, group=self.call.group, async_op=True)

    def losses(self) -> torch.Tensor:
        """Waits for the sums and returns the losses (n)."""
        self._work.wait()
        losses, self._log_sums = compute_word_losses(self._largest, self._sums, self.targets, self.call.shard)
        return losses

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the gradients of x and of weight, None if not required."""
        shard, logits, call = self.call.shard, self._logits, self.call
        if call.triton:
            if len(self.weight):
                words_gradient(self._padded, self.targets, self._log_sums, shard, len(self.weight))
            return logits @ self.weight if call.for_x else None, logits.t() @ self.x if call.for_weight else None
        if len(self.weight):
            words_gradient_reference(logits, self.targets, self._own_largest, self._log_sums, shard)
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(self._product, wanted, logits.to(self._product.dtype)))
        return next(found) if call.for_x else None, next(found) if call.for_weight else None


class _Result:
    """Losses and gradients of all tokens, accumulated by chunks."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, call: _Call, one: bool) -> None:
        self._one = one
        self.losses = x.new_empty(len(x), dtype=_accumulation_dtype(x))
        self.grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if call.for_x else x.new_empty(0)
        self._grad_weight: torch.Tensor | None = None
        self._weight = weight

    def add_chunk(self, chunk: _Chunk, part: slice) -> None:
        """Adds the losses and gradients of the tokens of this part."""
        self.losses[part] = chunk.losses()
        if not (chunk.call.for_x or chunk.call.for_weight):
            return
        grad_x, grad_weight = chunk.gradients()
        if grad_x is not None:
            self.grad_x[part] = grad_x
        if grad_weight is None:
            return
        if self._grad_weight is None:
            # A single chunk's product is rounded already, so fp32 would hold the same numbers.
            self._grad_weight = grad_weight if self._one else grad_weight.to(_accumulation_dtype(grad_weight))
        else:
            self._grad_weight += grad_weight

    def grad_weight(self) -> torch.Tensor:
        """Returns the gradient of weight; zeros without chunks."""
        return torch.zeros_like(self._weight) if self._grad_weight is None else self._grad_weight.to(self._weight.dtype)


def _compute_chunks(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, call: _Call) -> _Result:
    """Computes losses and gradients; x (N, C), weight (V_r, C), targets (N)."""
    rows, size = len(x), rows_per_chunk(len(x))
    result = _Result(x, weight, call, rows <= size)
    # One for each chunk in flight; zeros for the reason in `linear_cross_entropy`.
    columns = aligned_words(len(weight))
    buffers = [x.new_zeros(size, columns) if call.triton and n * size < rows else None for n in range(2)]
    before: tuple[_Chunk, slice] | None = None
    for number, start in enumerate(range(0, rows, size)):
        part = slice(start, min(start + size, rows))
        chunk = _Chunk(x[part], weight, targets[part], call, buffers[number % 2])
        if before:
            result.add_chunk(*before)
        chunk.start_sum_exchange()
        before = chunk, part
    if before:
        result.add_chunk(*before)
    return result


class _ShardedLoss(torch.autograd.Function):
    """Autograd function; the backward scales the gradients computed in the forward by the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, call: _Call) -> torch.Tensor:
        result = _compute_chunks(x, weight, targets, call)
        ctx.call = call
        ctx.save_for_backward(result.grad_x, result.grad_weight() if call.for_weight else weight.new_empty(0))
        return result.losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        call = ctx.call
        scale = torch.ops.raystride.linear_cross_entropy_backward if call.triton else _scale_gradient
        pairs = zip(ctx.saved_tensors, (call.for_x, call.for_weight), strict=True)
        return (*(scale(saved, grad) if wanted else None for saved, wanted in pairs), None, None)


def _scale_gradient(saved: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Scales in fp32: 1 / counted in bf16 would be off by up to 2^-9, and so would all gradients."""
    return (saved.to(_accumulation_dtype(saved)) * grad).to(saved.dtype)


def linear_cross_entropy_sharded(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    first_word: int,
    words: int,
    group: dist.ProcessGroup | None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    product: Product = F.linear,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of losses in nats over targets other than `ignore_index` (fp32 scalar), and their number (int64).

    The result is the same on all workers of the group. They call it at the same time with the same x, targets and settings.
    A worker's gradient of weight is complete; that of x is partial, to be summed over the workers.

    Args:
        x: hidden states, (..., C).
        weight: this worker's rows of the head, (V_r, C), V_r >= 0, of x's dtype outside autocast.
        targets: words, (...), int64; each `ignore_index` or 0 to words - 1.
        first_word: the word of weight's first row.
        words: V, of all workers together.
        group: the workers; None: all processes. A single worker calls `linear_cross_entropy`, with the same bits.
        ignore_index: marks a target that does not count.
        label_smoothing: fraction of the target's probability spread evenly over all words, 0 to 1.
        z_loss: coefficient of the squared log-sum-exp.
        product: computes x W^T if the reference runs.

    A target that is no word makes the loss NaN (with one worker as in `linear_cross_entropy`).

    Raises:
        ValueError: as in `linear_cross_entropy`, rows outside the words, or a single worker without all words.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    shard = WordShard(first_word, words, ignore_index, label_smoothing, z_loss)
    _check_arguments(x, weight, targets, shard, ranks)
    if ranks == 1:
        return linear_cross_entropy(
            x, weight, targets,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, product=product,
        )  # fmt: skip
    refusal = f"weight is {weight.dtype}, x {x.dtype}" if weight.dtype != x.dtype else ""
    # As autocast has it, which leaves float64 alone.
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, refusal = x.to(dtype), weight.to(dtype), ""
    triton = takes_triton(_NAME, x, refusal)
    graph = torch.is_grad_enabled()
    call = _Call(shard, group, product, graph and x.requires_grad, graph and weight.requires_grad, triton)
    flat = targets.reshape(-1).contiguous()
    arguments = x.reshape(-1, x.shape[-1]), weight, flat, call
    loss = _ShardedLoss.apply(*arguments) if call.for_x or call.for_weight else _compute_chunks(*arguments).losses.sum()
    return loss, (flat != ignore_index).sum()


def _check_arguments(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shard: WordShard, ranks: int) -> None:
    if not 0 <= shard.label_smoothing <= 1:
        raise ValueError(f"{_NAME}: label_smoothing must be between 0 and 1, but is {shard.label_smoothing}")
    expect(_NAME, "weight", weight, shape=(*weight.shape[:1], *x.shape[-1:]), beside=x)
    expect(_NAME, "targets", targets, shape=x.shape[:-1], dtypes=(torch.int64,), beside=x)
    after = shard.first + len(weight)
    if shard.first < 0 or after > shard.words or (ranks == 1 and len(weight) != shard.words):
        raise ValueError(
            f"{_NAME}: rows {shard.first} to {after - 1} are not among {shard.words} words, or not all of one worker"
        )
