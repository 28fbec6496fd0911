"""Tensor and sequence parallelism: heads, hidden units, the vocabulary and tokens are sharded over the workers of a group.

Attention and feed-forward are cut by heads and by hidden units, first columns and then rows (Shoeybi et al., 2019, section
3). Between them, for norms and additions, which work token by token, each worker has a part of the tokens (Korthikanti et
al., 2022, section 4.2): a module all-gathers the tokens before it and reduce-scatters its sum. Embedding and head are cut by
words, and the loss never needs all logits (`triton_kernels.linear_cross_entropy_sharded`).

All arithmetic is on plain tensors. PyTorch's own plans (`ColwiseParallel`, ...) store parameters as DTensors; those cannot
express that queries, keys and values of a few heads are three ranges of one matrix, and would send every kernel through a
second dispatcher. So these are our own styles for `parallelize_module`.

Tokens are zero-padded to a multiple of the workers; nothing reads the padding, so any length works, even one token.

    parallelize(model, mesh["tensor"])                        # inside `model.cut.cut_before_init`
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from raystride.model.classifier import Classifier
from raystride.model.cross_attention import CrossAttention
from raystride.model.cut import Cut, cut_parameter
from raystride.model.dropout import Dropout
from raystride.model.linear import Linear
from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.triton_kernels.linear_cross_entropy_sharded import linear_cross_entropy_sharded


class TokenShards:
    """A stream (B, T, C) split by neighbouring tokens over a group, (B, ceil(T / workers), C) per worker."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.tokens = 0
        """T of the current stream; a part alone does not show how much of it is padding."""

    def split_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this worker's tokens of a stream that all workers have."""
        self.tokens = x.shape[1]
        return _Shorten.apply(x, self.group, False)  # type: ignore[no-any-return, no-untyped-call]

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """All-gathers tokens for different computations on each worker: gradients are summed over the workers."""
        return _AllGather.apply(x, self.group, self.tokens, True)  # type: ignore[no-any-return, no-untyped-call]

    def gather_replicated(self, x: torch.Tensor) -> torch.Tensor:
        """All-gathers tokens for the same computation on all workers: gradients are equal on each."""
        return _AllGather.apply(x, self.group, self.tokens, False)  # type: ignore[no-any-return, no-untyped-call]

    def reduce_scatter(self, y: torch.Tensor) -> torch.Tensor:
        """Returns this worker's tokens of the sum over the workers' results for all tokens."""
        return _Shorten.apply(y, self.group, True)  # type: ignore[no-any-return, no-untyped-call]


def _pad_tokens(x: torch.Tensor, size: int) -> torch.Tensor:
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _own_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _pad_tokens(x, group.size()).chunk(group.size(), dim=1)[group.rank()].contiguous()


def _all_gather_tokens(x: torch.Tensor, group: dist.ProcessGroup, tokens: int) -> torch.Tensor:
    batch, part, width = x.shape
    parts = x.new_empty(group.size() * batch, part, width)
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    whole = parts.view(group.size(), batch, part, width).transpose(0, 1).reshape(batch, -1, width)
    return whole if whole.shape[1] == tokens else whole[:, :tokens].contiguous()


def _reduce_scatter_tokens(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    padded = _pad_tokens(y, group.size())
    batch, tokens, width = padded.shape
    parts = padded.view(batch, group.size(), -1, width).transpose(0, 1).contiguous()
    own_sum = y.new_empty(batch, tokens // group.size(), width)
    dist.reduce_scatter_tensor(own_sum, parts.view(group.size() * batch, -1, width), group=group)
    return own_sum


class _Shorten(torch.autograd.Function):
    """Keeps a worker's own tokens, `summed` over the workers or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, summed: bool) -> torch.Tensor:
        ctx.group, ctx.tokens = group, x.shape[1]
        return (_reduce_scatter_tokens if summed else _own_tokens)(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_gather_tokens(grads[0], ctx.group, ctx.tokens), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, tokens: int, summed: bool) -> torch.Tensor:
        ctx.group, ctx.summed = group, summed
        return _all_gather_tokens(x, group, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (_reduce_scatter_tokens if ctx.summed else _own_tokens)(grads[0], ctx.group), None, None, None


class _AllReduce(torch.autograd.Function):
    """Sum over the workers, followed by the same computation on all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def even_range(length: int, rank: int, size: int) -> range:
    """Returns the part of `range(length)` that belongs to worker `rank` of `size`."""
    return range(rank * length // size, (rank + 1) * length // size)


class _TensorParallelStyle(ParallelStyle):
    """Base of our parallel styles: the workers and their stream."""

    def __init__(self, shards: TokenShards) -> None:
        super().__init__()
        self.shards = shards

    def cut_weight(self, module: Linear | nn.Embedding, dimension: int, *ranges: range) -> None:
        """Keeps these ranges of a module's weight, and of its bias if it lies along the same dimension."""
        cut_parameter(module, "weight", Cut(tuple(module.weight.shape), dimension, ranges))
        if isinstance(module, Linear) and module.bias is not None:
            if dimension == 0:
                cut_parameter(module, "bias", Cut(tuple(module.bias.shape), 0, ranges))
            else:
                self.add_bias_once(module)

    def add_bias_once(self, module: Linear) -> None:
        """Makes only the first worker add the bias of a product that is summed over the workers."""
        assert module.bias is not None
        mark_summed_over_tensor(module.bias)
        if self.shards.rank:
            module.adds_bias = False

    def gather_then_reduce_scatter(self, module: nn.Module) -> nn.Module:
        """All-gathers the tokens on input and reduce-scatters the output."""
        module.register_forward_pre_hook(lambda _, inputs: (self.shards.gather_tokens(inputs[0]), *inputs[1:]))
        module.register_forward_hook(lambda _, __, y: self.shards.reduce_scatter(y))
        return module


def mark_summed_over_tensor(parameter: nn.Parameter) -> None:
    """Marks a replicated parameter with a partial gradient on each worker."""
    parameter.summed_over_tensor = True  # type: ignore[attr-defined]


class HeadParallel(_TensorParallelStyle):
    """Attention with a part of the heads, and of their key and value heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        size, rank, shards = attention.head_size, self.shards.rank, self.shards.size
        queries, keys = attention.heads * size, attention.kv_heads * size
        own, own_keys = even_range(queries, rank, shards), even_range(keys, rank, shards)
        shifted_keys = [range(start + own_keys.start, start + own_keys.stop) for start in (0, keys, queries, queries + keys)]
        if isinstance(attention, CrossAttention):
            self.cut_weight(attention.q, 0, own)
            self.cut_weight(attention.kv, 0, *shifted_keys[:2])
        else:
            self.cut_weight(attention.qkv, 0, own, *shifted_keys[2:])
            for norm in (attention.q_norm, attention.k_norm):
                if norm is not None:
                    mark_summed_over_tensor(norm.weight)
        self.cut_weight(attention.out, 1, own)
        attention.heads //= shards
        attention.kv_heads //= shards
        attention.first_head = rank * attention.heads
        return self.gather_then_reduce_scatter(module)


class FeedForwardParallel(_TensorParallelStyle):
    """A feed-forward with a part of its hidden units."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        down: Any = module.down
        own = even_range(down.weight.shape[1], self.shards.rank, self.shards.size)
        for name in ("gate", "up"):
            if hasattr(module, name):
                self.cut_weight(getattr(module, name), 0, own)
        self.cut_weight(down, 1, own)
        return self.gather_then_reduce_scatter(module)


class TokenParallelNorm(_TensorParallelStyle):
    """A norm over a part of the tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            mark_summed_over_tensor(parameter)
        return module


class TokenParallelDropout(_TensorParallelStyle):
    """A dropout over a part of the tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        module.part = self._part
        return module

    def _part(self, shape: tuple[int, ...], _: Any) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
        return (shape[0], self.shards.tokens, shape[2]), lambda mask: _own_tokens(mask, self.shards.group)


class ScatterTokens(_TensorParallelStyle):
    """The first block of a stream; its input tokens are split over the workers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (self.shards.split_tokens(inputs[0]), *inputs[1:]))
        return module


class GatherTokens(TokenParallelNorm):
    """The norm behind a stream's last block; its output tokens are all-gathered."""

    def __init__(self, shards: TokenShards, is_replicated: bool = False) -> None:
        """`is_replicated`: all workers compute the same from them."""
        super().__init__(shards)
        self._gather = shards.gather_replicated if is_replicated else shards.gather_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, x: self._gather(x))
        return module


class VocabularyParallel(_TensorParallelStyle):
    """An embedding or a head with a part of the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        table: Any = module
        own = even_range(table.weight.shape[0], self.shards.rank, self.shards.size)
        self.cut_weight(table, 0, own)
        if isinstance(table, nn.Embedding):
            table.forward = partial(  # type: ignore[method-assign]
                _embed_sharded, table, own, self.shards.group
            )
        return module


def _embed_sharded(table: nn.Embedding, own: range, group: dist.ProcessGroup, ids: torch.Tensor) -> torch.Tensor:
    """Embeds ids (B, T), all of them on every worker: other workers' rows are zero here and come by the all-reduce."""
    is_local = (ids >= own.start) & (ids < own.stop)
    rows = F.embedding((ids - own.start).masked_fill(~is_local, 0), table.weight).masked_fill(~is_local[..., None], 0.0)
    return _AllReduce.apply(rows, group)  # type: ignore[no-any-return, no-untyped-call]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> TokenShards:
    """Cuts a network without parameter values over the workers of a one-dimensional mesh.

    Returns the stream of its last blocks. Raises ValueError for a network that cannot be cut so.
    """
    shards = TokenShards(mesh.get_group())
    if isinstance(model, Translator):
        encoder = TokenShards(shards.group)
        plan = _stream_plan(model, "encoder", "encoder_norm", encoder) | _stream_plan(model, "decoder", "norm", shards)
    elif isinstance(model, Decoder | Classifier):
        plan = _stream_plan(model, "blocks", "norm", shards, is_replicated=isinstance(model, Classifier))
    else:
        raise ValueError(f"a {type(model).__name__} cannot be spread by tensor parallelism: set scaling.tensor 1")
    plan |= {
        name: VocabularyParallel(shards)
        for name in ("embedding", "target_embedding")
        if getattr(model, name, None) is not None
    }
    if isinstance(model, Decoder) and model.head is not None:
        plan["head"] = VocabularyParallel(shards)
    parallelize_module(model, mesh, plan)
    if not isinstance(model, Classifier):
        _shard_vocabulary(model, model.vocabulary_size, shards)
    return shards


_STYLES: dict[str, Callable[[TokenShards], ParallelStyle]] = {
    "dropout": TokenParallelDropout,
    "norm": TokenParallelNorm,
    "attention": HeadParallel,
    "cross_attention": HeadParallel,
    "feed_forward": FeedForwardParallel,
}
"""Parallel styles of a block's modules, by their names without numbers."""


def _stream_plan(
    model: nn.Module, blocks: str, norm: str, shards: TokenShards, *, is_replicated: bool = False
) -> dict[str, ParallelStyle]:
    """Returns the plan of a stream, from its first block to the norm behind its last."""
    plan: dict[str, ParallelStyle] = {
        f"{blocks}.*.{name}": _STYLES[name.rstrip("1234")](shards)
        for name, _ in model.get_submodule(f"{blocks}.0").named_children()
        if name.rstrip("1234") in _STYLES
    }
    return plan | {f"{blocks}.0": ScatterTokens(shards), norm: GatherTokens(shards, is_replicated)}


def _shard_vocabulary(model: Any, words: int, shards: TokenShards) -> None:
    """Makes a network compute its loss and its logits with a part of the vocabulary."""
    first = even_range(words, shards.rank, shards.size).start
    model.cross_entropy = partial(linear_cross_entropy_sharded, first_word=first, words=words, group=shards.group)
    model.logits = partial(_gather_logits, model.logits, words, shards)


def _gather_logits(
    logits: Callable[[torch.Tensor], torch.Tensor], words: int, shards: TokenShards, hidden: torch.Tensor
) -> torch.Tensor:
    """All-gathers logits: (..., C) -> (..., V), on all workers; without gradient."""
    own = logits(hidden.detach())
    lengths = [len(even_range(words, rank, shards.size)) for rank in range(shards.size)]
    padded = F.pad(own.flatten(0, -2), (0, max(lengths) - own.shape[-1]))
    parts = own.new_empty(shards.size * len(padded), max(lengths))
    dist.all_gather_into_tensor(parts, padded, group=shards.group)
    whole = [
        logits_of_worker[:, :length] for logits_of_worker, length in zip(parts.chunk(shards.size), lengths, strict=True)
    ]
    return torch.cat(whole, dim=-1).view(*own.shape[:-1], words)
