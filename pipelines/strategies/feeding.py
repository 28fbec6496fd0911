"""What of a micro-batch a worker computes: all of its tokens, or with context parallelism a part.

Rows or packed documents are laid end to end and dealt out by `triton_kernels.context_plan`, so that every worker has equally
many tokens and about as much to do in attention. All that works token by token needs their positions alone; attention
exchanges keys, or heads, by `triton_kernels.attention_context`.

    feeding = Feeding(group, form="ring")
    feeding.enter(model)                                      # its attention takes what follows
    fed = feeding(batch.inputs, batch.targets)                # Fed(ids (1, n), positions (1, n), documents, targets (1, n))
    loss_sum, counted = model.loss(model.hidden(fed.ids, fed.positions, documents=fed.documents), fed.targets)
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from raystride.model.attention import Attention
from raystride.model.dropout import Dropout, Part
from raystride.model.transformer import Decoder, document_positions
from raystride.triton_kernels.attention_context import attention_context
from raystride.triton_kernels.attention_packed import attention_packed
from raystride.triton_kernels.context_plan import ContextPlan, context_plan

Form = Literal["ring", "heads", "keys"]


class Fed(NamedTuple):
    """What of a micro-batch this worker computes."""

    ids: torch.Tensor
    """(B, T), or (1, n) of a part."""
    positions: torch.Tensor | None
    """Of the ids in their documents; None: 0, 1, 2, ... in each row."""
    documents: Any
    """As blocks take them: None, where documents begin (m + 1,), or a `Dealt`."""
    targets: torch.Tensor


class Dealt:
    """Documents of which each worker has some tokens. No dataclass: FSDP2 hands blocks copies of those."""

    def __init__(self, plan: ContextPlan) -> None:
        self.plan = plan


class Feeding:
    """Cuts micro-batches of a decoder over the workers of a group; without a group each has all."""

    def __init__(self, group: dist.ProcessGroup | None = None, form: Form = "ring") -> None:
        self.group, self.form = group, form

    def enter(self, model: Decoder) -> None:
        """Has a decoder's attention go over the whole of what is dealt out."""
        if self.group is None:
            return
        for module in model.modules():
            if isinstance(module, Attention):
                module.packed = self._attend
            elif isinstance(module, Dropout):
                module.part = partial(self._part, module.part)

    def _part(self, inner: Part | None, shape: tuple[int, ...], documents: Any) -> Any:
        """What of a slot's stream a dropout sees, which may see a part of this worker's tokens alone."""
        shape, cut = inner(shape, documents) if inner else (shape, lambda mask: mask)
        if not isinstance(documents, Dealt):
            return shape, cut
        rows = torch.from_numpy(documents.plan.rows[dist.get_rank(self.group)])
        return (1, sum(map(len, documents.plan.rows)), shape[2]), lambda mask: cut(mask[:, rows.to(mask.device)])

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Any, _: Any, **rules: Any
    ) -> torch.Tensor:
        """(n, H, D), (n, G, D), (n, G, D) -> (n, H, D)."""
        if not isinstance(documents, Dealt):  # text is written, and losses of rows are told, by each worker for itself
            return attention_packed(q, k, v, documents, documents, **rules)
        found: torch.Tensor = attention_context(q, k, v, documents.plan, form=self.form, group=self.group, **rules)
        return found

    def __call__(self, inputs: tuple[torch.Tensor, ...], targets: torch.Tensor) -> Fed:
        """A decoder's inputs, ids (B, T) and perhaps where documents begin, and its targets (B, T)."""
        ids, *rest = inputs
        documents = rest[0] if rest else None
        if self.group is None:
            positions = None if documents is None else document_positions(documents, ids.numel()).view(ids.shape)
            return Fed(ids, positions, documents, targets)
        rows, tokens = ids.shape
        offsets = range(0, rows * tokens + 1, tokens) if documents is None else documents.tolist()
        plan = context_plan(tuple(offsets), self.group.size())
        own = torch.from_numpy(plan.rows[self.group.rank()]).to(ids.device)
        begins = torch.tensor(offsets, device=ids.device) if documents is None else documents
        positions = document_positions(begins, ids.numel())
        return Fed(_take(ids, own), _take(positions, own), Dealt(plan), _take(targets, own))


def _take(each: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return each.reshape(-1)[rows][None]
