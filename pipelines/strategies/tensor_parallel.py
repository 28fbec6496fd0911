"""Tensor and sequence parallelism: heads, hidden units and words spread over the workers of a group, and the tokens.

Attention and feed-forward are cut by heads and by hidden units, first columns and then rows (Shoeybi et al., 2019, section
3). Between them, where norms and additions work token by token, each worker has a part of the tokens (Korthikanti et al.,
2022, section 4.2): a part gathers all tokens before it and leaves its sum in parts behind it. Embedding and head are cut by
words, and the loss never sees all logits (`triton_kernels.linear_cross_entropy_sharded`).

All arithmetic is on plain tensors. PyTorch's own plans (`ColwiseParallel`, ...) hold parameters as DTensors; those cannot
say that queries, keys and values of a few heads are three ranges of one matrix, and would take every kernel through a second
dispatcher. So these are styles of our own for `parallelize_module`.

Tokens are padded to a multiple of the workers with zeros, which nothing reads: any length goes, also that of one token.

    parallelize(model, mesh["tensor"])                        # inside of `model.cut.cut_before_drawn`
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
    """A stream (B, T, C) of which each worker of a group has neighbouring tokens, (B, ceil(T / workers), C)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.tokens = 0
        """T of the stream that is on its way; a part alone does not tell how much of it is padding."""

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This worker's tokens of a stream that all workers have."""
        self.tokens = x.shape[1]
        return _Split.apply(x, self.group)  # type: ignore[no-any-return, no-untyped-call]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, of which each worker then computes something else: gradients are sums over the workers."""
        return _Gather.apply(x, self.group, self.tokens, True)  # type: ignore[no-any-return, no-untyped-call]

    def gather_alike(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens, of which all workers then compute the same: gradients are the same on each."""
        return _Gather.apply(x, self.group, self.tokens, False)  # type: ignore[no-any-return, no-untyped-call]

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """This worker's tokens of the sum over the workers of what each has computed of all tokens."""
        return _Leave.apply(y, self.group)  # type: ignore[no-any-return, no-untyped-call]


def _pad(x: torch.Tensor, size: int) -> torch.Tensor:
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _own(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return _pad(x, group.size()).chunk(group.size(), dim=1)[group.rank()].contiguous()


def _all_tokens(x: torch.Tensor, group: dist.ProcessGroup, tokens: int) -> torch.Tensor:
    batch, part, width = x.shape
    parts = x.new_empty(group.size() * batch, part, width)
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    whole = parts.view(group.size(), batch, part, width).transpose(0, 1).reshape(batch, -1, width)
    return whole if whole.shape[1] == tokens else whole[:, :tokens].contiguous()


def _own_sum(y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    padded = _pad(y, group.size())
    batch, tokens, width = padded.shape
    parts = padded.view(batch, group.size(), -1, width).transpose(0, 1).contiguous()
    found = y.new_empty(batch, tokens // group.size(), width)
    dist.reduce_scatter_tensor(found, parts.view(group.size() * batch, -1, width), group=group)
    return found


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.tokens = group, x.shape[1]
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_tokens(grads[0], ctx.group, ctx.tokens), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, tokens: int, summed: bool) -> torch.Tensor:
        ctx.group, ctx.summed = group, summed
        return _all_tokens(x, group, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (_own_sum if ctx.summed else _own)(grads[0], ctx.group), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.tokens = group, y.shape[1]
        return _own_sum(y, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _all_tokens(grads[0], ctx.group, ctx.tokens), None


class _Sum(torch.autograd.Function):
    """The sum over the workers, of which all then compute the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


def own_range(length: int, rank: int, size: int) -> range:
    """The neighbouring ones of `length` that a worker of `size` has."""
    return range(rank * length // size, (rank + 1) * length // size)


class _Style(ParallelStyle):
    """What one of our styles needs: the workers, and the stream that it stands in."""

    def __init__(self, shards: TokenShards) -> None:
        super().__init__()
        self.shards = shards

    def cut(self, module: Linear | nn.Embedding, dimension: int, *ranges: range) -> None:
        """Keeps these ranges of a module's weight, and of its bias where that lies along the same dimension."""
        cut_parameter(module, "weight", Cut(tuple(module.weight.shape), dimension, ranges))
        if isinstance(module, Linear) and module.bias is not None:
            if dimension == 0:
                cut_parameter(module, "bias", Cut(tuple(module.bias.shape), 0, ranges))
            else:
                self.add_bias_once(module)

    def add_bias_once(self, module: Linear) -> None:
        """Has the first worker alone add the bias of a product that is summed over the workers."""
        assert module.bias is not None
        summed_over_tensor(module.bias)
        if self.shards.rank:
            module.adds_bias = False

    def enclose(self, module: nn.Module) -> nn.Module:
        """All tokens come in, and this worker's part of the sum goes out."""
        module.register_forward_pre_hook(lambda _, given: (self.shards.gather(given[0]), *given[1:]))
        module.register_forward_hook(lambda _, __, y: self.shards.leave(y))
        return module


def summed_over_tensor(parameter: nn.Parameter) -> None:
    """Marks a parameter that every worker has whole, and of whose gradient each has a part of the sum."""
    parameter.summed_over_tensor = True  # type: ignore[attr-defined]


class Heads(_Style):
    """Attention with a part of the heads, and of the keys' and values' heads that belong to them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        attention: Any = module
        size, rank, shards = attention.head_size, self.shards.rank, self.shards.size
        queries, keys = attention.heads * size, attention.kv_heads * size
        own, own_keys = own_range(queries, rank, shards), own_range(keys, rank, shards)
        after = [range(start + own_keys.start, start + own_keys.stop) for start in (0, keys, queries, queries + keys)]
        if isinstance(attention, CrossAttention):
            self.cut(attention.q, 0, own)
            self.cut(attention.kv, 0, *after[:2])
        else:
            self.cut(attention.qkv, 0, own, *after[2:])
            for norm in (attention.q_norm, attention.k_norm):
                if norm is not None:
                    summed_over_tensor(norm.weight)
        self.cut(attention.out, 1, own)
        attention.heads //= shards
        attention.kv_heads //= shards
        attention.first_head = rank * attention.heads
        return self.enclose(module)


class Hidden(_Style):
    """A feed-forward with a part of its hidden units."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        down: Any = module.down
        own = own_range(down.weight.shape[1], self.shards.rank, self.shards.size)
        for name in ("gate", "up"):
            if hasattr(module, name):
                self.cut(getattr(module, name), 0, own)
        self.cut(down, 1, own)
        return self.enclose(module)


class Tokens(_Style):
    """A norm that sees a part of the tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for parameter in module.parameters():
            summed_over_tensor(parameter)
        return module


class Masks(_Style):
    """A dropout that sees a part of the tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Dropout)
        module.part = self._part
        return module

    def _part(self, shape: tuple[int, ...], _: Any) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
        return (shape[0], self.shards.tokens, shape[2]), lambda mask: _own(mask, self.shards.group)


class Begin(_Style):
    """The first block of a stream, before which its tokens are shared out."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, given: (self.shards.split(given[0]), *given[1:]))
        return module


class End(Tokens):
    """The norm behind a stream's last block, after which every worker has all tokens."""

    def __init__(self, shards: TokenShards, alike: bool = False) -> None:
        """`alike`: all workers compute the same of them."""
        super().__init__(shards)
        self._gather = shards.gather_alike if alike else shards.gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, __, x: self._gather(x))
        return module


class Words(_Style):
    """An embedding, or a head, with a part of the words."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        table: Any = module
        own = own_range(table.weight.shape[0], self.shards.rank, self.shards.size)
        self.cut(table, 0, own)
        if isinstance(table, nn.Embedding):
            table.forward = partial(  # type: ignore[method-assign]
                _embed, table, own, self.shards.group
            )
        return module


def _embed(table: nn.Embedding, own: range, group: dist.ProcessGroup, ids: torch.Tensor) -> torch.Tensor:
    """Rows of ids (B, T), all of them on every worker: the others' are zeros here, and come by the sum."""
    here = (ids >= own.start) & (ids < own.stop)
    rows = F.embedding((ids - own.start).masked_fill(~here, 0), table.weight).masked_fill(~here[..., None], 0.0)
    return _Sum.apply(rows, group)  # type: ignore[no-any-return, no-untyped-call]


def parallelize(model: nn.Module, mesh: DeviceMesh) -> TokenShards:
    """Cuts a network whose parameters have no values yet over the workers of a mesh of one dimension.

    Returns the stream of its last blocks. Raises ValueError for a network that cannot be cut so.
    """
    shards = TokenShards(mesh.get_group())
    if isinstance(model, Translator):
        encoder = TokenShards(shards.group)
        plan = _stream(model, "encoder", "encoder_norm", encoder) | _stream(model, "decoder", "norm", shards)
    elif isinstance(model, Decoder | Classifier):
        plan = _stream(model, "blocks", "norm", shards, alike=isinstance(model, Classifier))
    else:
        raise ValueError(f"a {type(model).__name__} cannot be spread by tensor parallelism: set scaling.tensor 1")
    plan |= {name: Words(shards) for name in ("embedding", "target_embedding") if getattr(model, name, None) is not None}
    if isinstance(model, Decoder) and model.head is not None:
        plan["head"] = Words(shards)
    parallelize_module(model, mesh, plan)
    if not isinstance(model, Classifier):
        _spread_words(model, model.vocabulary_size, shards)
    return shards


_PARTS: dict[str, Callable[[TokenShards], ParallelStyle]] = {
    "dropout": Masks,
    "norm": Tokens,
    "attention": Heads,
    "cross_attention": Heads,
    "feed_forward": Hidden,
}
"""How the modules of a block are spread, by their names without numbers."""


def _stream(
    model: nn.Module, blocks: str, norm: str, shards: TokenShards, *, alike: bool = False
) -> dict[str, ParallelStyle]:
    """The plan of a stream from its first block to the norm behind its last."""
    plan: dict[str, ParallelStyle] = {
        f"{blocks}.*.{name}": _PARTS[name.rstrip("1234")](shards)
        for name, _ in model.get_submodule(f"{blocks}.0").named_children()
        if name.rstrip("1234") in _PARTS
    }
    return plan | {f"{blocks}.0": Begin(shards), norm: End(shards, alike)}


def _spread_words(model: Any, words: int, shards: TokenShards) -> None:
    """Has a network compute its loss and its logits with a part of the words."""
    first = own_range(words, shards.rank, shards.size).start
    model.cross_entropy = partial(linear_cross_entropy_sharded, first_word=first, words=words, group=shards.group)
    model.logits = partial(_all_logits, model.logits, words, shards)


def _all_logits(
    logits: Callable[[torch.Tensor], torch.Tensor], words: int, shards: TokenShards, hidden: torch.Tensor
) -> torch.Tensor:
    """(..., C) -> (..., V), on all workers; without gradient."""
    own = logits(hidden.detach())
    lengths = [len(own_range(words, rank, shards.size)) for rank in range(shards.size)]
    padded = F.pad(own.flatten(0, -2), (0, max(lengths) - own.shape[-1]))
    parts = own.new_empty(shards.size * len(padded), max(lengths))
    dist.all_gather_into_tensor(parts, padded, group=shards.group)
    whole = [each[:, :length] for each, length in zip(parts.chunk(shards.size), lengths, strict=True)]
    return torch.cat(whole, dim=-1).view(*own.shape[:-1], words)
