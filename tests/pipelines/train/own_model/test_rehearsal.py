"""What a user hands to `fit` is rehearsed: refused or said by name where it could not be resumed, and left as it was."""

import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raystride.pipelines.config import Config, FitConfig, ScalingConfig, SettingError, TrainConfig
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.own_model import rehearsal
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.describe import describe_own_model
from tests.pipelines.train.own_model.modules import MODULES, REFUSED_KINDS
from tests.pipelines.train.own_model.optimizers import CLOSURE, OPTIMIZERS, SPARSE

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)), torch.arange(12) % 3
CONFIG = Config()
EXACT = replace(CONFIG, train=TrainConfig(exact=True))
UNDER_FSDP = replace(CONFIG, scaling=ScalingConfig(strategy="fsdp"))
UNDER_ZERO = replace(CONFIG, scaling=ScalingConfig(strategy="deepspeed", zero=3))
KEYS = replace(CONFIG, fit=FitConfig(rehearse="keys"))


class Network(nn.Module):
    """A linear network; `extra` is called in its forward with it and the inputs, and what it returns is added."""

    def __init__(self, extra: Callable[[Any, torch.Tensor], Any] = lambda *_: 0.0) -> None:
        super().__init__()
        self.head, self.extra, self.calls, self.seen = nn.Linear(4, 3), extra, 0, torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.extra(self, x)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def describe(config: Config = CONFIG, **given: Any) -> list[str]:
    """Describes, and so rehearses, a model; returns the warnings."""
    parts = {"model": Network, "data": (X, Y), "loss": loss} | given
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        describe_own_model(OwnModel(**parts), config)
    return [text for each in said if not (text := str(each.message)).startswith("torch.distributed is")]


def count_calls(network: Any, x: torch.Tensor) -> torch.Tensor:
    network.calls += 1
    return network.calls * x[:, :3]  # type: ignore[no-any-return]


def count_idly(network: Any, _: Any) -> float:
    network.calls += 1
    return 0.1 if network.calls > 1000 else 0.0


def keep_last(network: Any, x: torch.Tensor) -> float:
    network.seen = x.mean(0).detach()
    return 0.0


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.table(torch.zeros(len(x), dtype=torch.int64))  # type: ignore[no-any-return]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.head = nn.Parameter(torch.ones(3, dtype=torch.complex64)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(x) * self.turn).real


class Opaque(nn.Module):
    """Extra state that no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"of": object()}

    def set_extra_state(self, state: Any) -> None: ...


class Forgetful(Opaque):
    """Extra state that is saved and not restored."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.calls


class OnItself(torch.optim.SGD):
    """Counts its steps on itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["lr"] = group["lr"] / self.count
        super().step(closure)


def mean_with(second: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    """A loss that returns a second value beside the mean."""

    def pair(model: nn.Module, batch: Any) -> Any:
        out = model(batch[0])
        return nn.functional.cross_entropy(out, batch[1]), second(out, batch[1])

    return pair


TEMPERATURE = nn.Parameter(torch.ones(()))


def tempered(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]) * TEMPERATURE, batch[1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a closure": ({"optimizer": OPTIMIZERS[CLOSURE]}, "optimizer must return one whose step needs no closure.* LBFGS"),
    "dense gradients": (
        {"optimizer": OPTIMIZERS[SPARSE]},
        "optimizer raised RuntimeError: SparseAdam does not",
    ),
    "sparse gradients": ({"model": Sparse}, r"model must give dense gradients.*table\.weight is sparse"),
    "complex parameters": ({"model": Turned}, "model must have float32 parameters.*turn is torch.complex64"),
    "auxiliary loss": ({"loss": mean_with(lambda out, _: out.square().mean())}, "loss must return.*its second value is no"),
    "accuracy": (
        {"loss": mean_with(lambda out, y: (out.argmax(1) == y).float().mean() + 0.5)},
        "its second value is no count",
    ),
    "negative": ({"loss": mean_with(lambda *_: -8)}, r"its second value is no count \(-8 for 2 samples"),
    "foreign parameters": ({"loss": tempered}, r"loss must reach parameters of the model alone.*one of shape \(\)"),
    "state on a module": ({"model": lambda: Network(count_calls)}, "model must train alike after a resume.*calls of module"),
    "state on an optimizer": ({"optimizer": lambda m, lr: OnItself(m.parameters(), lr)}, "count of the optimizer"),
    "no JSON": ({"model": Opaque}, r"model must keep numbers, texts, tensors.*modules\.module\.of is a object"),
    "not restored": ({"model": Forgetful}, "model: extra state of module must come back from a checkpoint"),
    "8 bits under fsdp": (
        {"config": UNDER_FSDP, "optimizer": OPTIMIZERS["Blocks"]},
        r"optimizer must keep states of a",
    ),
    "factors under fsdp": ({"config": UNDER_FSDP, "optimizer": OPTIMIZERS["Adafactor"]}, r"_var of module\.head\.weight is"),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_go_on_is_refused_by_name_before_the_start(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        describe(**given)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in (CLOSURE, SPARSE)])
def test_optimizers_that_go_on_with_the_same_bits_are_taken_without_a_word(name: str) -> None:
    found = describe(optimizer=OPTIMIZERS[name])
    assert [said for said in found if not (name == "Muon" and "optimizer holds 1 of the 2" in said)] == []


REMARKS = "deprecated|Full backward hook|have no gradient from the first batch"
"""Of PyTorch on old modules and hooks, and ours on unused parameters."""


@pytest.mark.parametrize("name", [name for name in MODULES if name not in (*REFUSED_KINDS, "max_norm")])
@pytest.mark.parametrize("given", ["callable", "instance"])
def test_networks_that_go_on_with_the_same_bits_are_taken_without_a_word(name: str, given: str) -> None:
    if given == "instance" and name in OF_INSTANCES:
        pytest.skip("refused, see below")
    model = MODULES[name](4) if given == "instance" else partial(MODULES[name], 4)
    assert [said for said in describe(model=model) if not re.search(REMARKS, said)] == []


OF_INSTANCES = {
    "old weight_norm": "model must be a module that can be copied, or the callable that makes it",
    "hook with the model": "model must be the callable that makes it.*as forward_hooks of body does",
    "slot": "loss raised AttributeError: 'Slotted' object has no attribute 'counted'",
}
OF_SETTINGS: dict[tuple[str, str], str] = {
    ("max_norm", "auto"): r"scaling\.workers must be 1 where a forward changes trained parameters.*table\.weight",
    ("max_norm", "exact"): r"train\.exact must be false where a forward changes parameters.*table\.weight",
    ("teacher", "exact"): r"train\.exact must be false where a forward changes parameters.*teacher\.weight",
    ("teacher", "fsdp"): r"scaling\.strategy must not be fsdp or deepspeed where a forward.*teacher\.weight",
    ("property", "fsdp"): r"scaling\.strategy must not be fsdp or deepspeed for parameters without a dim.*raw",
    ("compiled", "zero"): r"scaling\.zero must be 1 or 2 for modules that torch\.compile\(\) has wrapped.*_orig_mod",
    ("compiled part", "zero"): r"scaling\.zero must be 1 or 2 for modules that torch\.compile\(\) has wrapped.*_orig_mod",
    ("spectral_norm", "exact"): r"train\.exact must be false where a forward changes buffers",
    ("cache", "exact"): r"train\.exact must be false where a forward changes buffers",
}


@pytest.mark.parametrize("name", REFUSED_KINDS)
def test_networks_that_could_not_go_on_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingError, match=REFUSED_KINDS[name]):
        describe(model=partial(MODULES[name], 4))


@pytest.mark.parametrize("name", OF_INSTANCES)
def test_modules_that_a_copy_would_change_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingError, match=OF_INSTANCES[name]):
        describe(model=MODULES[name](4))


@pytest.mark.parametrize(("name", "under"), OF_SETTINGS)
def test_networks_that_settings_do_not_allow_are_refused_by_name(name: str, under: str) -> None:
    config = {"auto": CONFIG, "exact": EXACT, "fsdp": UNDER_FSDP, "zero": UNDER_ZERO}[under]
    with pytest.raises(SettingError, match=OF_SETTINGS[name, under]):
        describe(config, model=partial(MODULES[name], 4))


def test_on_one_worker_a_forward_may_change_trained_parameters() -> None:
    assert describe(replace(CONFIG, scaling=ScalingConfig(workers=1)), model=partial(MODULES["max_norm"], 4)) == []


def test_what_each_forward_makes_anew_is_no_state() -> None:
    assert describe(model=lambda: Network(keep_last)) == []


def test_what_may_matter_later_is_said() -> None:
    (said,) = describe(model=lambda: Network(count_idly))
    assert said.startswith("a step changes attribute calls of module, which no checkpoint holds: keep it in a buffer")


def test_draws_from_other_generators_are_said_and_refused_under_exact() -> None:
    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * float(np.random.default_rng().random())

    (said,) = describe(loss=noisy)
    assert said.startswith("not reproducible: two equal steps differ in parameter module.head.weight, ")
    with pytest.raises(SettingError, match=r"train\.exact must be false where equal steps have other results"):
        describe(EXACT, loss=noisy)


@pytest.mark.parametrize("config", [CONFIG, KEYS], ids=["bits", "keys"])
def test_what_the_user_owns_is_as_it_was_and_callables_are_called_three_times(config: Config) -> None:
    noise, drawn, other = torch.Generator().manual_seed(3), np.random.default_rng(4), random.Random(5)
    model, made = Network(), []
    weight, x, y = model.head.weight.detach().clone(), X.numpy().copy(), Y.numpy().copy()

    def noisy(network: nn.Module, batch: Any) -> torch.Tensor:
        scale = float(torch.rand((), generator=noise)) + drawn.random() + other.random()
        return loss(network, (batch[0] + scale * torch.rand(()), batch[1]))

    def make(network: nn.Module, rate: float) -> torch.optim.Optimizer:
        made.append(network)
        return torch.optim.Adam(network.parameters(), lr=rate)

    torch.manual_seed(6)
    random.seed(7)
    np.random.seed(8)
    states = [noise.get_state().tolist(), repr(drawn.bit_generator.state), repr(other.getstate())]
    everywhere = [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]
    data = {"x": x, "y": y}
    describe(config, model=model, data=(x, y), loss=noisy, optimizer=make)
    assert states == [noise.get_state().tolist(), repr(drawn.bit_generator.state), repr(other.getstate())]
    assert everywhere == [torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state())]
    assert torch.equal(model.head.weight, weight)
    assert model.head.weight.grad is None
    assert (data["x"] == X.numpy()).all()
    assert (data["y"] == Y.numpy()).all()
    assert len(made) <= 3


def test_a_refusal_waits_for_the_save_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of removing the folder that it writes into was taken for one of the disk, and the refusal was lost."""
    written: list[str] = []
    put_chunks = Folder.put_chunks

    def slowly(folder: Folder, name: str, *given: Any, **named: Any) -> Any:
        time.sleep(0.3)
        found = put_chunks(folder, name, *given, **named)
        written.append(name)
        return found

    monkeypatch.setattr(Folder, "put_chunks", slowly)

    def noisy(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss(model, batch) * float(np.random.default_rng().random())

    with pytest.raises(SettingError, match=r"train\.exact must be false where equal steps have other results"):
        describe(EXACT, loss=noisy)
    assert "last" in written


def test_a_loss_in_place_is_as_reproducible_as_another() -> None:
    """Each of the equal steps has a batch of its own."""

    def in_place(network: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(0.5)
        return loss(network, batch)

    assert describe(EXACT, loss=in_place) == []


def test_large_networks_and_slow_steps_are_compared_by_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(rehearsal.Checkpoints, "save", lambda *arguments, **_: saved.append(arguments))
    for limit in ("MAX_COMPARED_BYTES", "MAX_COMPARED_S"):
        with monkeypatch.context() as little:
            little.setattr(rehearsal, limit, 0)
            assert describe(model=lambda: Network(count_calls)) == []
            with pytest.raises(SettingError, match="must keep numbers, texts, tensors"):
                describe(model=Opaque)
    assert not saved


def test_off_is_off() -> None:
    assert describe(replace(CONFIG, fit=FitConfig(rehearse="off")), model=lambda: Network(count_calls)) == []
