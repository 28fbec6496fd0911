"""Optimisers of PyTorch, of packages and of users' own, by name, as `raystride.fit` takes them: optimizer(model, rate)."""

from collections.abc import Callable
from typing import Any

import torch
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree
from torch import nn

Make = Callable[[nn.Module, float], torch.optim.Optimizer]
CLOSURE, SPARSE = "LBFGS", "SparseAdam"
"""Those that cannot train here: one needs a closure, the other sparse gradients."""


class Counting(torch.optim.Optimizer):
    """Keeps numbers and lists in its group and states: steps at lr / (number of updates), with a mean of five gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0, "norms": [], "limits": (0.5, float("inf"))})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["gradients"] = [*state.get("gradients", []), parameter.grad.clone()][-5:]
                state["updates"] = state.get("updates", 0) + 1
                mean = torch.stack(state["gradients"]).mean(0).clamp(-group["limits"][0], group["limits"][1])
                group["norms"] = [*group["norms"], float(mean.norm())][-3:]
                parameter.data.sub_(mean, alpha=group["lr"] / group["count"] / (1 + max(group["norms"])))


class Blocks(torch.optim.Optimizer):
    """Momentum in blocks of four uint8, each with its scale, as optimisers in 8 bits have it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, number = self.state[parameter], -(-parameter.numel() // 4)
                if not state:
                    state["codes"] = torch.full((number, 4), 128, dtype=torch.uint8)
                    state["scales"] = torch.zeros(number)
                flat = nn.functional.pad(parameter.grad.flatten(), (0, 4 * number - parameter.numel())).view(number, 4)
                momentum = (state["codes"].float() - 128) / 127 * state["scales"][:, None] * 0.9 + flat
                state["scales"] = momentum.abs().amax(1)
                state["codes"] = (momentum / state["scales"].clamp(min=1e-12)[:, None] * 127 + 128).round().to(torch.uint8)
                parameter.data.sub_(momentum.flatten()[: parameter.numel()].view_as(parameter), alpha=group["lr"])


def _of_torch(name: str) -> Make:
    made = getattr(torch.optim, name)
    options: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    options |= {"amsgrad": True} if name == "AdamW" else {"centered": True} if name == "RMSprop" else {}

    def make(model: nn.Module, rate: float) -> torch.optim.Optimizer:
        parameters = [each for each in model.parameters() if name != "Muon" or each.dim() == 2]
        return made(parameters, lr=rate, **options)  # type: ignore[no-any-return]

    return make


def _of(made: Any, **options: Any) -> Make:
    return lambda model, rate: made(model.parameters(), lr=rate, **options)


OF_TORCH = sorted(
    name
    for name, made in vars(torch.optim).items()
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
)
OPTIMIZERS: dict[str, Make] = {name: _of_torch(name) for name in OF_TORCH} | {
    "Lion": _of(Lion),
    "Prodigy": _of(Prodigy),
    "AdamWScheduleFree": _of(AdamWScheduleFree, warmup_steps=3),
    "RAdamScheduleFree": _of(RAdamScheduleFree),
    "SGDScheduleFree": _of(SGDScheduleFree),
    "Counting": _of(Counting),
    "Blocks": _of(Blocks),
}
