"""Mixture of experts: a feed-forward of which each token uses a few parts (Shazeer et al., 2017; Fedus et al., 2022).

A router gives each token k of E experts and a weight for each; y = sum over the chosen of weight_e expert_e(x), and the
shared experts for every token. Tokens are sorted by expert, so that each projection of all experts is one grouped
product. No token is dropped, whatever the loads.

    softmax               p = softmax(W x); the k largest p, and p itself as weights (OLMoE, Muennighoff et al., 2024)
    softmax_normalized    the same, divided by the sum of the chosen ones (Mixtral, Jiang et al., 2024)
    sigmoid               p = sigmoid(W x); the k largest p + bias, weights p of the chosen, normalised. After each step
                          the bias of an expert with a load above the mean falls by a rate, of one below it rises (Wang et
                          al., 2024)

Shapes: x (B, T, C), N = B T tokens; weights of experts (E, out, in); the router is computed in fp32.

    layer = Experts(config.model, build_shared=partial(SwiGLU, config.model.hidden_size, products=Products()))
    y = layer(x)                                              # (B, T, C) -> (B, T, C)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from raystride.model.linear import is_bf16_allowed, linear
from raystride.model.shape import DecoderShape, balance_loss, expert_width
from raystride.triton_kernels.geglu import geglu
from raystride.triton_kernels.swiglu import swiglu

MAX_EXPERT_FIGURES = 64
"""Most experts of which each has a figure of its own."""


class Exchange(Protocol):
    """Moves tokens between the workers that share out a layer's experts."""

    def to_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends rows sorted by expert, `counts` (E,) of each; returns those of the local experts, and how many of each."""
        ...

    def from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends results of the last `to_experts` back, in the order of its rows."""
        ...


class RoutedTokens(NamedTuple):
    """The router's decisions about N tokens."""

    logits: torch.Tensor
    """(N, E), fp32."""
    probabilities: torch.Tensor
    """(N, E), fp32; of `sigmoid` they do not add up to 1."""
    chosen: torch.Tensor
    """Indices of experts (N, k), int64."""
    weights: torch.Tensor
    """Weights of the chosen experts (N, k), fp32."""


class Router(nn.Module):
    """Chooses experts for tokens; weight (E, C), and with `sigmoid` a bias (E,) that is moved, not trained."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.kind, self.num_chosen = shape.router, shape.experts_per_token
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden_size))
        self.bias: nn.Parameter | None = None
        if self.kind == "sigmoid":
            self.bias = nn.Parameter(torch.zeros(shape.experts), requires_grad=False)
            self.bias.keeps_fp32 = True  # type: ignore[attr-defined]  # bfloat16 would swallow its small moves

    def forward(self, x: torch.Tensor) -> RoutedTokens:
        """Routes tokens x (N, C)."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
            if self.kind != "sigmoid":
                probabilities = logits.softmax(-1)
                weights, chosen = probabilities.topk(self.num_chosen, -1)
            else:
                probabilities = logits.sigmoid()
                assert self.bias is not None
                chosen = (probabilities + self.bias).topk(self.num_chosen, -1).indices
                weights = probabilities.gather(-1, chosen)
            if self.kind != "softmax":
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return RoutedTokens(logits, probabilities, chosen, weights)


class ExpertLinear(nn.Module):
    """A linear layer of each expert, without bias; weight (E, out, in)."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Maps rows (M, in), sorted by expert, `counts` (E,) int64 of each, to (M, out)."""
        return expert_products(rows, self.weight, counts)


class Experts(nn.Module):
    """A gated feed-forward with experts; `gate`, `up` and `down` hold those of all experts."""

    exchange: Exchange | None = None
    """Set if this worker holds a part of the experts."""
    routed: RoutedTokens | None = None
    """Decisions of the last forward in training, for `Routing`."""

    def __init__(self, shape: DecoderShape, build_shared: Callable[[int], nn.Module]) -> None:
        """`build_shared` makes a feed-forward of this hidden width for the shared experts."""
        super().__init__()
        self.num_experts, self.is_gelu = shape.experts, shape.gate == "gelu"
        width, hidden = shape.hidden_size, expert_width(shape)
        self.router = Router(shape)
        self.gate = ExpertLinear(shape.experts, width, hidden)
        self.up = ExpertLinear(shape.experts, width, hidden)
        self.down = ExpertLinear(shape.experts, hidden, width)
        self.shared = build_shared(shape.shared_experts * hidden) if shape.shared_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C)."""
        tokens = x.reshape(-1, x.shape[-1])
        routed = self.router(tokens)
        self.routed = routed if self.training else None
        order = routed.chosen.flatten().argsort(stable=True)
        counts = count_choices(routed.chosen.flatten(), self.num_experts)
        rows = Dispatch.apply(tokens, order, routed.chosen.shape[1])  # type: ignore[no-untyped-call]
        if self.exchange is None:
            results = self._compute(rows, counts)
        else:
            results = self.exchange.from_experts(self._compute(*self.exchange.to_experts(rows, counts)))
        parts = Collect.apply(results, order).view(*routed.chosen.shape, -1)  # type: ignore[no-untyped-call]
        y = (parts * routed.weights[..., None]).sum(1).to(parts.dtype).view(x.shape)
        return y if self.shared is None else y + self.shared(x)  # type: ignore[no-any-return]

    def _compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Applies the local experts to rows (M, C) sorted by expert."""
        gate, up = self.gate(rows, counts), self.up(rows, counts)
        hidden = geglu(gate, up, tanh=True) if self.is_gelu else swiglu(gate, up)
        return self.down(hidden, counts)  # type: ignore[no-any-return]


def count_choices(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Returns how often each expert is in `chosen`, (E,) int64, without a wait for the device."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(0, chosen, torch.ones_like(chosen))


class Dispatch(torch.autograd.Function):
    """Copies tokens (N, C) to rows (N k, C) in an order of their N k choices; the gradient is added without atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, order: torch.Tensor, num_chosen: int) -> torch.Tensor:
        ctx.num_chosen = num_chosen
        ctx.save_for_backward(order)
        return tokens[order // num_chosen]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (order,) = grads, ctx.saved_tensors
        return grad[_inverse(order)].view(-1, ctx.num_chosen, grad.shape[-1]).sum(1), None, None


class Collect(torch.autograd.Function):
    """Puts rows in an order of choices back into the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows[_inverse(order)]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (order,) = grads, ctx.saved_tensors
        return grad[order], None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def expert_products(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns x W_e^T of rows (M, in) sorted by expert, `counts` (E,) of each, weight (E, out, in): (M, out).

    One grouped product where PyTorch takes it, else a loop over the experts, which waits for the device. Under autocast and
    inside `bf16_products` factors are bfloat16.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    rounded = device == "cpu" and rows.dtype == torch.float32 and is_bf16_allowed()
    if grouped_mm_supports(rows, weight, torch.bfloat16 if rounded else weight.dtype):
        offsets = counts.cumsum(0, dtype=torch.int32)
        return _GroupedProduct.apply(rows, weight, offsets, rounded)  # type: ignore[no-any-return, no-untyped-call]
    return expert_products_loop(rows, weight, counts)


def expert_products_loop(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns `expert_products`, expert by expert; a frozen weight in fewer bits is widened for its product."""
    parts = zip(rows.split(counts.tolist()), weight, strict=True)
    return torch.cat([linear(part, expert) for part, expert in parts])


def grouped_mm_supports(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether `torch.nn.functional.grouped_mm` takes factors of this dtype: rows of 16 bytes, fp32 or bfloat16."""
    if (
        not hasattr(F, "grouped_mm")
        or not len(rows)
        or rows.dtype != weight.dtype
        or dtype not in (torch.float32, torch.bfloat16)
    ):
        return False
    aligned = all(width * dtype.itemsize % 16 == 0 for width in weight.shape[1:])
    # An older GPU has no kernel of it.
    return aligned and (rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) >= (8, 0))


class _GroupedProduct(torch.autograd.Function):
    """Products of all experts; its gradients are contiguous, which grouped products need."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, rounded: bool) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.rounded = rounded
        return _grouped(rows, weight.transpose(1, 2), offsets, rounded)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, offsets = ctx.saved_tensors
        grad, needs = grads[0].contiguous(), ctx.needs_input_grad
        grad_rows = _grouped(grad, weight, offsets, ctx.rounded) if needs[0] else None
        grad_weight = _grouped(grad.t(), rows, offsets, ctx.rounded) if needs[1] else None
        return grad_rows, grad_weight, None, None


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, rounded: bool) -> torch.Tensor:
    if rounded:
        return F.grouped_mm(a.bfloat16(), b.bfloat16(), offs=offsets).float()
    return F.grouped_mm(a, b, offs=offsets)


class Routing:
    """Losses and loads of a network's expert layers.

    The balance loss of a slot is E sum_e f_e P_e, the mean over the layers; f_e is the share of its choices that are e, P_e
    its mean probability of e (Fedus et al., 2022, equation 4: 1 if even). The z-loss is the mean of logsumexp(logits)^2
    (Zoph et al., 2022). Both are of the tokens with a target, and weighted as those targets are in the loss; so other slots
    beside a slot change nothing. Their gradients are trained, their values are not in the reported loss.
    """

    def __init__(self, network: nn.Module, shape: DecoderShape) -> None:
        """`network` has all its modules."""
        self._layers = [module for module in network.modules() if isinstance(module, Experts)]
        self._balance, self._z, self._rate = balance_loss(shape), shape.router_z_loss, shape.router_bias_rate
        self.slot_rows: Sequence[int] = ()
        """Number of samples of each slot in the next micro-batch; empty: all are of one slot."""
        self.sum_over_group: Callable[[torch.Tensor], object] = lambda values: None
        """Sums in place over the workers that compute a slot together."""
        self._step_loads: torch.Tensor | None = None
        self._loads: torch.Tensor | None = None

    @property
    def biases(self) -> list[nn.Parameter]:
        """The routers' biases that are moved after each step."""
        return [layer.router.bias for layer in self._layers if layer.router.bias is not None]

    def add_losses(self, loss_sum: torch.Tensor, mask: torch.Tensor, documents: torch.Tensor | None = None) -> torch.Tensor:
        """Counts loads of the last forward, and returns `loss_sum` with the gradients of balance loss and z-loss.

        `mask` (B, T) marks tokens with a target; `documents` are the offsets of samples packed in rows.
        """
        routed = [layer.routed for layer in self._layers if layer.routed is not None]
        if not routed:
            return loss_sum
        for layer in self._layers:
            layer.routed = None  # else a copy of the network would have to copy a graph
        segments = self._mark_slots(mask, documents)
        sizes = segments.sum(1)
        # All layers at once: (L, N, ...); counts (L, S, E).
        chosen = torch.stack([layer.chosen for layer in routed])
        experts = routed[0].logits.shape[-1]
        choices = torch.zeros(*chosen.shape[:2], experts, device=chosen.device).scatter_(2, chosen, 1.0)
        counts = segments @ choices
        own = counts.sum(1)
        self._step_loads = own if self._step_loads is None else self._step_loads + own
        if not routed[0].logits.requires_grad or not (self._balance or self._z):
            return loss_sum
        self.sum_over_group(counts)
        self.sum_over_group(sizes)
        extra = loss_sum.new_zeros(())
        if self._balance:
            sums = torch.stack([segments @ layer.probabilities for layer in routed])
            shares = counts / (chosen.shape[-1] * sizes.clamp(min=1))[:, None]
            extra = extra + self._balance * experts / len(routed) * (shares * sums).sum()
        if self._z:
            squares = torch.stack([layer.logits.logsumexp(-1).square() @ segments.sum(0) for layer in routed])
            extra = extra + self._z * squares.mean()
        return _WithGradient.apply(loss_sum, extra)  # type: ignore[no-any-return, no-untyped-call]

    def _mark_slots(self, mask: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """Returns (S, N) fp32, 1 where a token with a target is of a slot."""
        rows = list(self.slot_rows)
        marks = mask.flatten().float()
        if len(rows) < 2:
            return marks[None]
        device = mask.device
        counts = torch.tensor(rows, device=device)
        slots = torch.arange(len(rows), device=device).repeat_interleave(counts, output_size=sum(rows))
        if len(slots) == mask.shape[0]:
            owner = slots.repeat_interleave(mask.shape[1])
        elif documents is not None:
            owner = slots.repeat_interleave(documents.diff().long(), output_size=mask.numel())
        else:  # several sequences a sample: all first ones, then all second ones
            owner = slots.repeat(mask.shape[0] // len(slots)).repeat_interleave(mask.shape[1])
        return marks * (owner == torch.arange(len(rows), device=device)[:, None])

    def begin_step(self) -> None:
        """Forgets the loads of a step that was not finished."""
        self._step_loads = None

    @torch.no_grad()
    def finish_step(self, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor], bad: torch.Tensor) -> None:
        """Moves the biases by the step's loads over all workers; not if `bad` (a scalar on the device). Collective."""
        biases = self.biases
        loads = self._step_loads
        if loads is None:  # this worker had no micro-batch
            loads = torch.zeros(len(self._layers), self._layers[0].num_experts, device=bad.device)
        self._loads = loads if self._loads is None else self._loads + loads
        self._step_loads = None
        for layer in self._layers:
            layer.routed = None  # of a recomputation
        if biases and self._rate and self._layers[0].router.weight.requires_grad:
            loads = all_reduce_sum(loads.clone())
            moves = self._rate * (loads.mean(1, keepdim=True) - loads).sign() * ~bad
            torch._foreach_add_([bias.detach() for bias in biases], list(moves.unbind()))

    def take_loads(self, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns and resets the choices of each expert over all workers since the last call, (L, E). Collective."""
        loads, self._loads = self._loads, None
        if loads is None:
            loads = torch.zeros(len(self._layers), self._layers[0].num_experts, device=self._layers[0].router.weight.device)
        return all_reduce_sum(loads.clone())

    def take_figures(self, all_reduce_sum: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Returns loads since the last call as multiples of an even share, 1. Collective.

        `expert_load_min` and `expert_load_max` are over layers and experts; `expert_load/3` is expert 3's over all layers,
        of at most MAX_EXPERT_FIGURES experts.
        """
        loads = self.take_loads(all_reduce_sum)
        if not loads.any():
            return {}
        shares, by_expert = loads / loads.mean(1, keepdim=True), loads.sum(0) / loads.sum(0).mean()
        found = {"expert_load_min": float(shares.min()), "expert_load_max": float(shares.max())}
        if len(by_expert) <= MAX_EXPERT_FIGURES:
            found |= {f"expert_load/{expert}": share for expert, share in enumerate(by_expert.tolist())}
        return found


class _WithGradient(torch.autograd.Function):
    """A value with the gradients of another sum as well."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], grads[0].float()
