"""What of a micro-batch a worker computes: all of its tokens, or with context parallelism a part.

Rows or packed documents are laid end to end and dealt out by `triton_kernels.context_plan`, so that every worker has equally
many tokens and about as much to do in attention. Where their number does not divide so, a document of a few tokens fills it
up, of which no target counts and which no other token sees. All that works token by token needs positions alone; attention
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
import torch.nn.functional as F

from raystride.model.attention import Attention
from raystride.model.dropout import Dropout, Part
from raystride.model.shape import IGNORED
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

    def __init__(self, plan: ContextPlan, filling: int = 0) -> None:
        """`filling`: tokens at the end that stand for nothing."""
        self.plan, self.filling = plan, filling


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
        plan, filling = documents.plan, documents.filling
        rows = torch.from_numpy(plan.rows[dist.get_rank(self.group)])
        # Drawn for the tokens alone: a mask of another size would hold other numbers.
        whole = (1, plan.tokens - filling, shape[2])
        return whole, lambda mask: cut(F.pad(mask, (0, 0, 0, filling))[:, rows.to(mask.device)])

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
        offsets = [*range(0, rows * tokens + 1, tokens)] if documents is None else documents.tolist()
        if filling := -ids.numel() % (2 * self.group.size()):
            offsets.append(ids.numel() + filling)
        plan = context_plan(tuple(offsets), self.group.size())
        own = torch.from_numpy(plan.rows[self.group.rank()]).to(ids.device)
        positions = document_positions(torch.tensor(offsets, device=ids.device), plan.tokens)
        ids, targets = (F.pad(each.reshape(-1), (0, filling), value=value) for each, value in ((ids, 0), (targets, IGNORED)))
        return Fed(ids[own][None], positions[own][None], Dealt(plan, filling), targets[own][None])
