"""Update rules.

The arithmetic is PyTorch's fused operations, called without the classes of `torch.optim`: those import the compiler at
their first use (1 s of a start) and take 0.6 ms of Python an update, 2 % of a small model's step on CPUs.

    optimizer = build_optimizer(config.optimizer, model)
    optimizer.update(learning_rate)
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters
from raystride.pipelines.config import Config, OptimizerConfig
from raystride.pipelines.config.parameter_groups import find_group, refuse_unmatched
from raystride.pipelines.data.plugins import BUILT_IN_TASKS
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.train.checkpoint.train_state import (
    AVERAGE,
    TRAINED,
    State,
    Updater,
    empty_state,
    local_shard,
)
from raystride.pipelines.train.memory.networks import expected_facts
from raystride.pipelines.train.muon import DEFAULT_MOMENTUM, RMS, block_matrices, share_directions
from raystride.pipelines.train.strategies.parameter_layout import layout_of
from raystride.pipelines.train.strategies.strategy import Group
from raystride.triton_kernels.adamw import adamw, copy_rounded

ASSUMED_IMAGE = (3, 64, 64)
"""Channels and sides of images whose size only preparation tells."""


@dataclass(frozen=True)
class Average:
    """An exponential moving average of the parameters."""

    decay: float
    """Share of the average that a step keeps."""
    is_evaluated: bool
    """Whether it is validated, stored as the model and exported, in place of the trained weights."""


@dataclass(frozen=True)
class GroupUpdate:
    """A group's tensors in one update, this worker's shards of them."""

    parameters: list[nn.Parameter]
    values: list[torch.Tensor]
    """The master copies if there are any, else the parameters."""
    copies: list[torch.Tensor]
    """The parameters of master copies, else none."""
    stochastic: bool
    """Whether the values are bfloat16, rounded stochastically."""
    gradients: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    decay: float


class FusedUpdater:
    """Fused updates, computed in fp32: of fp32 parameters, or for bfloat16 parameters of their master copies.

    Without masters the new value is rounded to bfloat16 stochastically, see `round_stochastically`. With an `average`, the
    state has an exponential moving average of each parameter, in fp32 and sharded as it is.
    """

    def __init__(self, groups: list[Group], *, stochastic: bool = False, average: Average | None = None) -> None:
        self.groups, self._stochastic, self._average = groups, stochastic, average
        self.evaluates_other_weights = average is not None and average.is_evaluated
        self.has_masters = not stochastic and any(p.dtype != torch.float32 for group in groups for p in group.parameters)
        self.on_change: Callable[[list[nn.Parameter], list[torch.Tensor]], None] | None = None
        """Called with parameters and the changes of this worker's shards of them, after each update; None: not measured."""
        self._state: State = {}
        self._completed: set[nn.Parameter] = set()

    @torch.no_grad()
    def update(self, learning_rate: float, skip: torch.Tensor | None = None) -> None:
        """Updates the parameters that have a gradient, at this learning rate; does nothing if `skip` (fp32 scalar) is 1."""
        for parameters, decay, lr_ratio in self.groups:
            trained = [p for p in parameters if p.grad is not None]
            if trained:
                self._update_group(trained, decay, learning_rate * lr_ratio, skip)

    def _update_group(
        self, trained: list[nn.Parameter], decay: float, learning_rate: float, skip: torch.Tensor | None
    ) -> None:
        states = [self._state[p] if p in self._completed else self._complete_state(p) for p in trained]
        parameters = [local_shard(p) for p in trained]
        low_precision = parameters[0].dtype != torch.float32
        values, copies = parameters, []
        if low_precision and not self._stochastic:
            values, copies = [local_shard(state["master"]) for state in states], parameters
        if skip is not None:
            # Offloaded values are in main memory, the verdict on the GPU.
            skip = skip.to(values[0].device)
        gradients = [local_shard(p.grad) for p in trained if p.grad is not None]
        stochastic = low_precision and self._stochastic
        before = [value.clone() for value in values] if self.on_change else []
        self._apply_update(GroupUpdate(trained, values, copies, stochastic, gradients, states, decay), learning_rate, skip)
        if self.on_change:
            torch._foreach_sub_(before, values)
            self.on_change(trained, before)
        if self._average:
            weight = 1 - self._average.decay
            averages = [local_shard(state[AVERAGE]) for state in states]
            if skip is None:
                torch._foreach_lerp_(averages, values, weight)
            else:
                torch._foreach_lerp_(averages, values, [weight * (1 - skip)] * len(values))

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Puts the averages into the parameters if they are to be evaluated, and takes them out again bit for bit."""
        averaged = [parameter for parameter in self._state if AVERAGE in self._state[parameter]]
        if not self.evaluates_other_weights or not averaged:
            yield
            return
        trained = [parameter.detach().clone() for parameter in averaged]
        with torch.no_grad():
            for parameter in averaged:
                parameter.copy_(self._state[parameter][AVERAGE])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(averaged, trained, strict=True):
                    parameter.copy_(value)

    def _complete_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Initialises the missing state of a parameter."""
        state = self._initial_state(parameter)
        if self.has_masters:
            state["master"] = parameter.detach().float()
        if self._average:
            state[AVERAGE] = parameter.detach().float().clone()
        self._state[parameter] = state | self._state.get(parameter, {})
        self._completed.add(parameter)
        return self._state[parameter]

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the state of a parameter, by name, sharded if the parameter is; empty before its first update."""
        return self._state.get(parameter, {})

    empty_state = staticmethod(empty_state)

    @torch.no_grad()
    def load_state(self, parameter: nn.Parameter, stored: dict[str, torch.Tensor]) -> None:
        """Restores a parameter's state; a `master` also becomes the parameter's value.

        Where trained weights are stored apart, the model's are averages.
        """
        if TRAINED in stored:
            stored[AVERAGE] = stored["master"] if self.has_masters else parameter.detach().clone()
            trained = stored.pop(TRAINED)
            stored |= {"master": trained} if self.has_masters else {}
            parameter.copy_(trained)
        if "master" in stored:
            parameter.copy_(stored["master"])
        self._state[parameter] = stored
        # The next update initialises state that `stored` lacks after a change of rule or precision.
        self._completed.discard(parameter)

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Returns the state of a parameter before its first update."""
        raise NotImplementedError

    def _apply_update(self, group_update: GroupUpdate, learning_rate: float, skip: torch.Tensor | None) -> None:
        raise NotImplementedError


class AdamW(FusedUpdater):
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2), all parameters of a group in one fused operation."""

    def __init__(self, groups: list[Group], betas: tuple[float, float], eps: float, **options: Any) -> None:
        """`options`: see FusedUpdater."""
        super().__init__(groups, **options)
        self._betas, self._eps = betas, eps

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
        }

    def _apply_update(self, group_update: GroupUpdate, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate (m / (sqrt(v) + eps) + decay p), with bias-corrected moments m and v of the gradient."""
        steps = [state["step"] for state in group_update.states]
        # A skipped step does not count, or bias correction would assume one more update.
        torch._foreach_add_(steps, 1 if skip is None else 1 - skip)
        adamw(
            group_update.values,
            group_update.gradients,
            [local_shard(state["exp_avg"]) for state in group_update.states],
            [local_shard(state["exp_avg_sq"]) for state in group_update.states],
            steps,
            learning_rate=learning_rate,
            betas=self._betas,
            eps=self._eps,
            decay=group_update.decay,
            skip=skip,
            copies=group_update.copies,
            stochastic=group_update.stochastic,
        )


class SGD(FusedUpdater):
    """Stochastic gradient descent with optional momentum (Sutskever et al., 2013) and decay added to the gradient."""

    def __init__(self, groups: list[Group], momentum: float, **options: Any) -> None:
        """`options`: see FusedUpdater."""
        super().__init__(groups, **options)
        self._momentum = momentum

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if not self._momentum:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    def _apply_update(self, group_update: GroupUpdate, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate b, with b <- momentum b + g + decay p."""
        values, stochastic = group_update.values, group_update.stochastic
        updated = [value.float() for value in values] if stochastic else values
        torch.ops.aten._fused_sgd_(
            updated,
            group_update.gradients,
            [local_shard(state["momentum_buffer"]) for state in group_update.states] if self._momentum else [],
            weight_decay=group_update.decay,
            momentum=self._momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            # The buffers begin at zero, so the first step is no special case.
            is_first_step=False,
            found_inf=skip,
        )
        copy_rounded(updated, values if stochastic else group_update.copies, stochastic=stochastic)


class Muon(AdamW):
    """Muon with Nesterov's momentum for matrices (Jordan et al., 2024), AdamW for other parameters.

    Equal to `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` (Liu et al., 2025): an update has the size of AdamW's,
    so both have one learning rate.
    """

    def __init__(
        self,
        groups: list[Group],
        matrices: set[nn.Parameter],
        betas: tuple[float, float],
        eps: float,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        **options: Any,
    ) -> None:
        """`matrices` are whole groups; `options`: see FusedUpdater."""
        super().__init__(groups, betas, eps, **options)
        self._matrices, self._momentum = matrices, momentum

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        if parameter not in self._matrices:
            return super()._initial_state(parameter)
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    def _apply_update(self, group_update: GroupUpdate, learning_rate: float, skip: torch.Tensor | None) -> None:
        """p <- p - rate (decay p + 0.2 sqrt(largest side) O(g + momentum (b - g))), with b <- b + (1 - momentum) (g - b)."""
        if group_update.parameters[0] not in self._matrices:
            super()._apply_update(group_update, learning_rate, skip)
            return
        looked_ahead = []
        for gradient, state in zip(group_update.gradients, group_update.states, strict=True):
            buffer = local_shard(state["momentum_buffer"])
            moved = buffer.lerp(gradient, 1 - self._momentum)
            looked_ahead.append(gradient.lerp(moved, self._momentum))
            _put(buffer, moved, skip)
        directions = share_directions(group_update.parameters, looked_ahead)
        values, stochastic = group_update.values, group_update.stochastic
        updated = [value.float() for value in values] if stochastic else values
        for parameter, value, direction in zip(group_update.parameters, updated, directions, strict=True):
            rate = learning_rate * RMS * math.sqrt(max(parameter.shape))
            decayed = value.mul(1 - learning_rate * group_update.decay)
            _put(value, decayed.add_(direction, alpha=-rate), skip)
        copy_rounded(updated, values if stochastic else group_update.copies, stochastic=stochastic)


def _put(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Writes a value, unless `skip` is 1; what is skipped may be no number."""
    target.copy_(value if skip is None else torch.where(skip > 0, target, value))


def build_optimizer(settings: OptimizerConfig, model: nn.Module, **options: Any) -> Updater:
    """Builds the optimiser of the settings: matrices decay, vectors (biases, norms) do not. `options`: see FusedUpdater.

    Raises SettingError for Muon without a matrix, and for a group's pattern that matches nothing.
    """
    if settings.kind == "muon":
        matrices = block_matrices(model)
        if not matrices:
            rule = "must be `adamw` for a network without matrices in blocks (items of an nn.ModuleList)"
            raise settings.error("kind", rule)
        momentum = settings.momentum or DEFAULT_MOMENTUM
        groups = _group_parameters(settings, model, matrices)
        return Muon(groups, matrices, settings.betas, settings.eps, momentum=momentum, **options)
    groups = _group_parameters(settings, model)
    if settings.kind == "sgd":
        return SGD(groups, settings.momentum, **options)
    return AdamW(groups, settings.betas, settings.eps, **options)


def _group_parameters(
    settings: OptimizerConfig, model: nn.Module, first: Collection[nn.Parameter] = frozenset()
) -> list[Group]:
    """Groups the trained parameters by rate and decay: the `first` ones, other matrices, vectors; each by `settings.groups`.

    Raises SettingError for a pattern that matches nothing of the whole network.
    """
    trained = {user_name(model, name): p for name, p in model.named_parameters() if p.requires_grad}
    layout = layout_of(model)
    refuse_unmatched(settings.groups, trained if layout is None else layout.shapes)
    found: dict[tuple[int, int], Group] = {}
    for name, parameter in trained.items():
        number = find_group(settings.groups, name)
        kind = 0 if parameter in first else 1 if parameter.dim() >= 2 else 2
        rule = {"weight_decay": settings.weight_decay if kind < 2 else 0.0, "lr_ratio": 1.0}
        rule |= {} if number is None else settings.groups[number]
        group = found.setdefault((-1 if number is None else number, kind), Group([], rule["weight_decay"], rule["lr_ratio"]))
        group.parameters.append(parameter)
    return [found[key] for key in sorted(found)]


def user_name(model: nn.Module, name: str) -> str:
    """Returns the name of a parameter as a pattern has it: of a user's own network, that in their module."""
    return name.removeprefix("module.") if hasattr(model, "users_module") else name


def check_groups(config: Config) -> None:
    """Raises SettingError for a pattern of `optimizer.groups` that matches nothing, before a network has values.

    Of a task of a user's own the network is not known here, and its workers raise it.
    """
    facts = dict(expected_facts(config))
    if "dataset" in facts:  # its rehearsal has built the optimiser
        refuse_unmatched(config.optimizer.groups, facts["dataset"]["parameters"])
    elif config.task in BUILT_IN_TASKS:
        facts |= {"image": facts.get("image") or ASSUMED_IMAGE}
        plain = replace(config, objective=replace(config.objective, class_weights="none"))
        # An image network computes a forward to know its sizes, and is small.
        with nullcontext() if config.task == "images" else torch.device("meta"):
            model = build_task(plain, facts).build_model()
            if config.lora.rank:
                attach_adapters(model, config.lora, hf_names(model))
        _group_parameters(config.optimizer, model)
