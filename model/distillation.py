"""Knowledge distillation: the loss of labels mixed with the divergence from a teacher's next-token distribution.

    loss = (1 - a) CE(z, t) + a T^2 D(u / T, z / T)                           Hinton, Vinyals and Dean (2015)

z are the student's logits, u the teacher's, D one of `objectives.DIVERGENCES` of p = softmax(z / T) and q = softmax(u / T),
a `kd_ratio`. T^2 keeps the size of the gradients at any temperature. Only tokens with a target count. Logits of
`DISTILLED_ROWS` tokens are held at once, and their gradients are made in the forward, as in
`triton_kernels.linear_cross_entropy`; sums over chunks are in fp32 at least.

    student.distillation = Distillation(teacher, "forward_kl", kd_ratio=0.5, temperature=2.0)
    loss_sum, counted = student(ids, targets)                 # in training; in evaluation the labels' loss
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from raystride.model.objectives import DISTILLED_ROWS, DIVERGENCES, DivergenceName
from raystride.model.shape import IGNORED

if TYPE_CHECKING:
    from raystride.model.transformer import Decoder

Projection = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits (n, V) of hidden states (n, C) by a head (V, C)."""


@dataclass(frozen=True)
class Distillation:
    """A frozen teacher, and how its distribution enters a student's loss. It is no part of the student's modules."""

    teacher: "Decoder"
    divergence: DivergenceName = "forward_kl"
    kd_ratio: float = 0.5
    """Weight of the divergence; the rest is that of the labels' loss."""
    temperature: float = 1.0

    def loss(
        self,
        inputs: tuple[torch.Tensor, torch.Tensor | None],
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        project: Projection,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of losses in nats over targets (B, T) other than IGNORED, and their number.

        `inputs` are ids (B, T) and offsets of packed documents, `hidden` (B, T, C) the student's last hidden states.
        """
        with torch.no_grad():
            seen = self.teacher.hidden(inputs[0], documents=inputs[1]).flatten(0, -2)
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, head = hidden.to(dtype), head.to(dtype)
        flat = targets.flatten()
        loss: torch.Tensor = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), head, seen, flat, self, project
        )
        return loss, (flat != IGNORED).sum()

    def losses(self, z: torch.Tensor, u: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss sum of logits z and u (n, V) and its gradient for z (n, V); targets (n). u is overwritten."""
        counts, labels = (targets != IGNORED)[:, None], targets.clamp(min=0)[:, None]
        log_q = u.div_(self.temperature).log_softmax(-1)
        del u  # the chunk's matrices are most of the memory
        log_p = z.log_softmax(-1)
        tempered = log_p if self.temperature == 1 else (z / self.temperature).log_softmax(-1)
        del z
        plain = -log_p.gather(-1, labels)
        divergence, gradient = DIVERGENCES[self.divergence].compute(tempered, log_q)
        share, scale = 1 - self.kd_ratio, self.kd_ratio * self.temperature
        loss = share * plain + scale * self.temperature * divergence
        of_labels = log_p.exp_().scatter_add_(-1, labels, torch.full_like(plain, -1.0))
        gradient.mul_(scale).add_(of_labels, alpha=share)
        return torch.where(counts, loss, 0.0).sum(), gradient.masked_fill_(~counts, 0.0)


class _DistillationLoss(torch.autograd.Function):
    """The loss sum of hidden states (N, C) and a head (V, C); both gradients are made with it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        seen: torch.Tensor,
        targets: torch.Tensor,
        rules: Distillation,
        project: Projection,
    ) -> torch.Tensor:
        wanted = ctx.needs_input_grad[:2]
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.zeros_like(hidden) if wanted[0] else None
        grad_head = torch.zeros_like(head, dtype=total.dtype) if wanted[1] else None
        weight = head.detach().requires_grad_(wanted[1])
        for start in range(0, len(hidden), DISTILLED_ROWS):
            part = slice(start, start + DISTILLED_ROWS)
            rows = hidden[part].detach().requires_grad_(wanted[0])
            with torch.enable_grad():
                z = project(rows, weight)
            made, dtype, logits = get_gradient_edge(z) if any(wanted) else None, z.dtype, [z.detach().to(total.dtype)]
            del z  # of the graph the edge is enough, and no name here keeps the logits
            loss, gradient = rules.losses(logits.pop(), rules.teacher.logits(seen[part]).to(total.dtype), targets[part])
            total += loss
            leaves = [leaf for leaf, want in zip((rows, weight), wanted, strict=True) if want]
            found = list(torch.autograd.grad([made], leaves, [gradient.to(dtype)])) if made else []
            if grad_hidden is not None:
                grad_hidden[part] = found.pop(0)
            if grad_head is not None:
                grad_head += found.pop()
        ctx.save_for_backward(grad_hidden, None if grad_head is None else grad_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        # In fp32: 1 / counted in bf16 would be off by up to 2^-9, and so would all gradients.
        scaled = (None if saved is None else (saved.to(grad.dtype) * grad).to(saved.dtype) for saved in ctx.saved_tensors)
        return (*scaled, None, None, None, None)


def freeze(teacher: nn.Module) -> None:
    """Makes a teacher constant: no gradients, no dropout."""
    teacher.requires_grad_(False).eval()
