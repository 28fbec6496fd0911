"""Update rules and learning-rate schedules.

The arithmetic is PyTorch's fused operations, called without the classes of `torch.optim` around them: those import the
compiler at their first use (1 s of a start) and take 0.6 ms of Python an update, 2 % of a small model's step on CPUs.

    optimizer = build_optimizer(config.optimizer, model)
    optimizer.update(learning_rate(config.optimizer, step, total_steps, width))
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from raystride.pipelines.config import Optimizer
from raystride.triton_kernels.adamw import adamw

State = dict[nn.Parameter, dict[str, torch.Tensor]]
Group = tuple[list[nn.Parameter], float]
"""Parameters and their decay."""


class Updater(Protocol):
    """What the loop and the checkpoints ask of an optimiser."""

    masters: bool
    """Whether it holds the full value of each parameter itself, as `master`."""

    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Changes the parameters that have a gradient, at this learning rate; where `skip` (fp32 scalar) is 1, nothing."""
        ...

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """All that it remembers of a parameter, by name; nothing before the first update. In shards if the parameter is."""
        ...

    def empty_state(self, parameter: nn.Parameter, of_its_size: bool, dtype: torch.dtype) -> torch.Tensor:
        """Zeros into which a checkpoint can be read: of a parameter's size and in shards as it is, or a scalar."""
        ...

    def load_state(self, parameter: nn.Parameter, held: dict[str, torch.Tensor]) -> None:
        """Goes on with what an optimiser held of a parameter; a `master` becomes the parameter's value, too."""
        ...


@dataclass(frozen=True)
class _Part:
    """A group's tensors in one update, this worker's shards of them."""

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    decay: float


class FusedUpdater:
    """Fused updates of fp32 values: the parameters, or where those are bfloat16, their master copies or fp32 copies.

    Without masters the new value is rounded to bfloat16 stochastically (Zamirai et al., 2020): up with the probability that
    the distance to the lower neighbour is of the gap, from PyTorch's generator of the device.
    """

    def __init__(self, groups: list[Group], *, stochastic: bool = False) -> None:
        self.groups, self._stochastic = groups, stochastic
        self.masters = not stochastic and any(p.dtype != torch.float32 for group, _ in groups for p in group)
        self._state: State = {}
        self._begun: set[nn.Parameter] = set()

    @torch.no_grad()
    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Changes the parameters that have a gradient, at this learning rate; where `skip` (fp32 scalar) is 1, nothing."""
        for parameters, decay in self.groups:
            trained = [p for p in parameters if p.grad is not None]
            if trained:
                self._update_group(trained, decay, learning_rate, skip)

    def _update_group(
        self, trained: list[nn.Parameter], decay: float, learning_rate: float, skip: torch.Tensor | None
    ) -> None:
        states = [self._state[p] if p in self._begun else self._begin(p) for p in trained]
        parameters = [local(p) for p in trained]
        held_in_less = parameters[0].dtype != torch.float32
        values = parameters
        if held_in_less and self._stochastic:
            values = [p.float() for p in parameters]
        elif held_in_less:
            values = [local(state["master"]) for state in states]
        if skip is not None:
            # Offloaded values lie in main memory, the verdict on the GPU.
            skip = skip.to(values[0].device)
        gradients = [local(p.grad) for p in trained if p.grad is not None]
        self._step(_Part(values, gradients, states, decay), learning_rate, skip)
        if held_in_less and self._stochastic:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(round_stochastically(value))
        elif held_in_less:
            torch._foreach_copy_(parameters, values)

    def _begin(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        state = self._fresh(parameter)
        if self.masters:
            state["master"] = parameter.detach().float()
        self._state[parameter] = state | self._state.get(parameter, {})
        self._begun.add(parameter)
        return self._state[parameter]

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """All that is remembered of a parameter, by name, in shards if the parameter is; empty before its first update."""
        return self._state.get(parameter, {})

    def empty_state(self, parameter: nn.Parameter, of_its_size: bool, dtype: torch.dtype) -> torch.Tensor:
        """Zeros into which a checkpoint can be read: of a parameter's size and in shards as it is, or a scalar."""
        if of_its_size:
            return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return torch.zeros((), dtype=dtype, device=parameter.device)

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, held: dict[str, torch.Tensor]) -> None:
        """Goes on with what an optimiser held of a parameter; a `master` becomes the parameter's value, too."""
        if "master" in held:
            parameter.copy_(held["master"])
        self._state[parameter] = held
        # What `held` lacks, after a change of rule or precision, is begun by the next update.
        self._begun.discard(parameter)

    def _fresh(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter before its first update."""
        raise NotImplementedError

    def _step(self, part: _Part, learning_rate: float, skip: torch.Tensor | None) -> None:
        raise NotImplementedError


class AdamW(FusedUpdater):
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), all parameters of a group in one fused operation."""

    def __init__(self, groups: list[Group], betas: tuple[float, float], eps: float, *, stochastic: bool = False) -> None:
        super().__init__(groups, stochastic=stochastic)
        self._betas, self._eps = betas, eps

    def _fresh(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
        }

    def _step(self, part: _Part, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate (m / (sqrt(v) + eps) + decay p), with bias-corrected moments m and v of the gradient."""
        steps = [state["step"] for state in part.states]
        # A step that is left out does not count, or bias correction would be that of one more update.
        torch._foreach_add_(steps, 1 if skip is None else 1 - skip)
        adamw(
            part.values,
            part.gradients,
            [local(state["exp_avg"]) for state in part.states],
            [local(state["exp_avg_sq"]) for state in part.states],
            steps,
            learning_rate=learning_rate,
            betas=self._betas,
            eps=self._eps,
            decay=part.decay,
            skip=skip,
        )


class SGD(FusedUpdater):
    """Stochastic gradient descent with optional momentum (Sutskever et al., 2013) and decay added to the gradient."""

    def __init__(self, groups: list[Group], momentum: float, *, stochastic: bool = False) -> None:
        super().__init__(groups, stochastic=stochastic)
        self._momentum = momentum

    def _fresh(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if not self._momentum:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    def _step(self, part: _Part, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate b, with b <- momentum b + g + decay p."""
        torch.ops.aten._fused_sgd_(
            part.values,
            part.gradients,
            [local(state["momentum_buffer"]) for state in part.states] if self._momentum else [],
            weight_decay=part.decay,
            momentum=self._momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            # The buffers begin at zero, so the first step needs no case of its own.
            is_first_step=False,
            found_inf=skip,
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's shard of a tensor that lies in shards (a DTensor), else the tensor itself; call it without gradients."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """fp32 to bfloat16, up or down by chance, right on average; what bfloat16 can hold stays. Finite values only."""
    # bfloat16 is the upper half of fp32: noise below its last bit carries over as often as the lower half is large.
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device)
    return ((values.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def build_optimizer(settings: Optimizer, model: nn.Module, *, stochastic: bool = False) -> Updater:
    """AdamW or SGD over two groups: matrices decay, vectors (biases, norms) do not. `stochastic`: see FusedUpdater."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        ([p for p in trained if p.dim() >= 2], settings.weight_decay),
        ([p for p in trained if p.dim() < 2], 0.0),
    ]
    if settings.kind == "sgd":
        return SGD(groups, settings.momentum, stochastic=stochastic)
    return AdamW(groups, settings.betas, settings.eps, stochastic=stochastic)


def learning_rate(settings: Optimizer, step: int, total_steps: int, width: int) -> float:
    """The rate of update `step` (0 is the first) of `total_steps`.

    Warm-up is linear. Then `cosine` (Loshchilov and Hutter, 2017) or `linear` fall to `lowest_rate` of the highest,
    `constant` stays; `noam` is factor width^-0.5 min(n^-0.5, n warmup^-1.5) with n = step + 1 (Vaswani et al., 2017, eq. 3).
    """
    if settings.schedule == "noam":
        number = step + 1
        return float(settings.learning_rate * width**-0.5 * min(number**-0.5, number * settings.warmup_steps**-1.5))
    if step < settings.warmup_steps:
        # + 1, so that the first update is not lost to a rate of 0.
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    end = settings.decay_steps or total_steps
    done = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    above = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.learning_rate * (settings.lowest_rate + (1 - settings.lowest_rate) * above)
