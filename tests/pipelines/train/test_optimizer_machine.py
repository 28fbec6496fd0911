"""Updates in any order, skipped ones, and states that are carried to another optimiser, beside PyTorch's own."""

import copy

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from raystride.pipelines.config import OptimizerConfig
from raystride.pipelines.train.optimizer import FusedUpdater, build_optimizer

BETAS, EPS, DECAY, MOMENTUM = (0.8, 0.9), 1e-6, 0.1, 0.7


class _Network(nn.Module):
    """Two matrices and two vectors: only matrices decay, and not all have a gradient in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 3)


class Updates(RuleBasedStateMachine):
    """The model is `torch.optim` on a copy of the network, which is not called for a skipped update."""

    @initialize(kind=st.sampled_from(["adamw", "sgd"]))
    def build(self, kind: str) -> None:
        torch.manual_seed(0)
        self.network = _Network()
        self.settings = OptimizerConfig(
            kind=kind,  # type: ignore[arg-type]
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
            momentum=MOMENTUM,
        )
        self.optimizer = build_optimizer(self.settings, self.network)
        self.plain = copy.deepcopy(self.network)
        # One each: PyTorch's fused SGD does not take a parameter whose first gradient comes later than another's.
        self.references = {layer: self._build_reference(kind, layer) for layer in self.plain.children()}

    @staticmethod
    def _build_reference(kind: str, layer: nn.Module) -> torch.optim.Optimizer:
        matrix, vector = layer.parameters()
        groups = [{"params": [matrix], "weight_decay": DECAY}, {"params": [vector], "weight_decay": 0.0}]
        if kind == "adamw":
            return torch.optim.AdamW(groups, betas=BETAS, eps=EPS, fused=True)
        return torch.optim.SGD(groups, momentum=MOMENTUM, fused=True)

    @rule(seed=st.integers(0, 99), rate=st.sampled_from([0.01, 0.1]), frozen=st.booleans())
    def update(self, seed: int, rate: float, frozen: bool) -> None:
        self._set_gradients(seed, frozen)
        self.optimizer.update(rate, torch.tensor(0.0))
        for layer, reference in self.references.items():
            for group in reference.param_groups:
                group["lr"] = rate
            if layer is self.plain.first or not frozen:
                reference.step()

    @rule(seed=st.integers(0, 99), frozen=st.booleans(), bad=st.sampled_from([1.0, float("nan"), float("inf")]))
    def skip(self, seed: int, frozen: bool, bad: float) -> None:
        self._set_gradients(seed, frozen, bad)
        self.optimizer.update(0.1, torch.tensor(1.0))

    @rule()
    def resume(self) -> None:
        """Another optimiser goes on with a copy of each parameter's state; one without a state begins anew."""
        before = self.optimizer
        assert isinstance(before, FusedUpdater)
        self.optimizer = build_optimizer(self.settings, self.network)
        for parameter in self.network.parameters():
            if state := before.state(parameter):
                self.optimizer.load_state(parameter, {name: value.clone() for name, value in state.items()})

    @invariant()
    def the_bits_are_pytorchs(self) -> None:
        for mine, theirs in zip(self.network.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def _set_gradients(self, seed: int, frozen: bool, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for network in (self.network, self.plain):
            generator.manual_seed(seed)
            for name, parameter in network.named_parameters():
                gradient = factor * torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if frozen and name.startswith("second") else gradient


TestUpdates = Updates.TestCase
TestUpdates.settings = settings(derandomize=True, max_examples=20, stateful_step_count=12, deadline=None)
