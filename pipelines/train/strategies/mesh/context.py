"""Context parallelism: splits a micro-batch's tokens over the workers of a group; without a group each worker has all of
them.

Rows or packed documents are concatenated and distributed by `triton_kernels.context_plan`, so that every worker has equally
many tokens and about equal work in attention. If their number does not divide evenly, a padding document of a few tokens
follows; none of its targets counts and no other token attends to it. Token-wise operations need only positions; attention
exchanges keys, or heads, by `triton_kernels.attention_context`.

    sharder = ContextSharder(group, form="ring")
    sharder.install_attention(model)                          # its attention then accepts ShardedDocuments
    local = sharder(batch.inputs, batch.targets)              # LocalTokens: ids, positions, targets (1, n), and documents
    loss_sum, counted = model.loss(model.hidden(local.ids, local.positions, documents=local.documents), local.targets)
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from raystride.model.attention import Attention
from raystride.model.dropout import Dropout, Part
from raystride.model.shape import IGNORED
from raystride.model.transformer import Decoder, document_positions
from raystride.triton_kernels.attention_context import attention_context
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.context_plan import ContextPlan, context_plan

Form = Literal["ring", "heads", "keys"]


class LocalTokens(NamedTuple):
    """This worker's tokens of a micro-batch."""

    ids: torch.Tensor
    """(B, T), or (1, n) of a part."""
    positions: torch.Tensor | None
    """Positions of the ids in their documents; None: 0, 1, 2, ... in each row."""
    documents: Any
    """Documents as blocks take them: None, document offsets (m + 1,), or `ShardedDocuments`."""
    targets: torch.Tensor


class ShardedDocuments:
    """Documents with tokens on several workers. Not a dataclass: FSDP2 passes copies of those to blocks."""

    def __init__(self, plan: ContextPlan, padding: int = 0) -> None:
        """`padding`: number of padding tokens at the end."""
        self.plan, self.padding = plan, padding


class ContextSharder:
    """Splits micro-batches of a decoder over the workers of a group; without a group each worker has all tokens."""

    def __init__(self, group: dist.ProcessGroup | None = None, form: Form = "ring") -> None:
        self.group, self.form = group, form

    def install_attention(self, model: Decoder) -> None:
        """Makes a decoder's attention and dropout work on sharded documents."""
        if self.group is None:
            return
        for module in model.modules():
            if isinstance(module, Attention):
                module.packed = self._attention
            elif isinstance(module, Dropout):
                module.part = partial(self._dropout_part, module.part)

    def _dropout_part(self, inner: Part | None, shape: tuple[int, ...], documents: Any) -> Any:
        """Returns the shape of a slot's full dropout mask, and a function that selects this worker's tokens from it."""
        shape, cut = inner(shape, documents) if inner else (shape, lambda mask: mask)
        if not isinstance(documents, ShardedDocuments):
            return shape, cut
        plan, padding = documents.plan, documents.padding
        rows = torch.from_numpy(plan.rows[dist.get_rank(self.group)])
        # Made without padding: by place, a mask of another size would hold other numbers.
        whole = (1, plan.tokens - padding, shape[2])
        return whole, lambda mask: cut(F.pad(mask, (0, 0, 0, padding))[:, rows.to(mask.device)])

    def _attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any, _: Any, longest: int = 0, **rules: Any
    ) -> torch.Tensor:
        """(n, H, D), (n, G, D), (n, G, D) -> (n, H, D)."""
        if not isinstance(documents, ShardedDocuments):  # each worker generates text and computes row losses alone
            return attention_packed(q, k, v, documents, documents, longest=longest, **rules)
        found: torch.Tensor = attention_context(q, k, v, documents.plan, form=self.form, group=self.group, **rules)
        return found

    def __call__(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> LocalTokens:
        """Splits a decoder's inputs, ids (B, T) and optionally document offsets, and its targets (B, T)."""
        ids, *rest = inputs
        documents = rest[0] if rest else None
        if self.group is None:
            positions = None if documents is None else document_positions(documents, ids.numel()).view(ids.shape)
            return LocalTokens(ids, positions, documents, targets)
        rows, tokens = ids.shape
        offsets = [*range(0, rows * tokens + 1, tokens)] if documents is None else documents.tolist()
        if padding := -ids.numel() % (2 * self.group.size()):
            offsets.append(ids.numel() + padding)
        plan = context_plan(tuple(offsets), self.group.size())
        own = torch.from_numpy(plan.rows[self.group.rank()]).to(ids.device)
        positions = document_positions(torch.tensor(offsets, device=ids.device), plan.tokens)
        ids, targets = (
            F.pad(tensor.reshape(-1), (0, padding), value=value) for tensor, value in ((ids, 0), (targets, IGNORED))
        )
        return LocalTokens(ids[own][None], positions[own][None], ShardedDocuments(plan, padding), targets[own][None])
