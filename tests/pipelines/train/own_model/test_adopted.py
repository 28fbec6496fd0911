"""What people bring from PyTorch gives what the functions of `fit` give; what does not fit is named."""

import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import raystride
from raystride.pipelines.config import SettingError, TrainConfig
from raystride.pipelines.train.own_model.adopted import (
    PairLoss,
    ReplayedSchedule,
    adopt,
    adopt_loaders,
    adopt_loss,
    adopt_optimizer,
    adopt_schedule,
)
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.describe import _check_schedule, _hash_parts
from raystride.pipelines.train.own_model.network import read_loss

generator = torch.Generator().manual_seed(3)
X, Y = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
SETTINGS = {"launch": "inline", "record.mlflow": False, "train.steps": 6, "scaling.threads": 1, "validation.every": 3}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def collate(samples: list[Any]) -> list[torch.Tensor]:
    """Pairs of stacked tensors."""
    return [torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])]


def cosine(step: int, total_steps: int) -> float:
    """As LambdaLR takes it, of a known number of steps."""
    return float(0.5 + 0.5 * np.cos(np.pi * step / 6))


class Gradients(raystride.Observer):
    """Remembers the largest gradient before each update."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.names: list[str] = []

    def on_gradients(self, step: int, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        norms = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        self.seen.append((step, float(torch.stack(norms).norm())))


def test_a_script_of_pytorchs_objects_trains_as_one_of_functions(tmp_path: Path) -> None:
    model, observer = make_model(), Gradients()
    optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    run = raystride.fit(
        model,
        DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, collate_fn=collate),
        nn.CrossEntropyLoss(),
        validation=DataLoader(TensorDataset(X, Y), batch_size=16, collate_fn=collate),
        optimizer=optimizer,
        schedule=lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, 6)),
        observers=[observer],
        settings=SETTINGS | {"train.clip_norm": 0.25},
        run="objects",
        storage=tmp_path,
    )
    by_functions = raystride.fit(
        make_model,
        TensorDataset(X, Y),
        lambda model, batch: (functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        validation=TensorDataset(X, Y),
        collate=collate,
        optimizer=lambda model, rate: AdamW(model.parameters(), lr=rate, weight_decay=0.1),
        schedule=cosine,
        settings=SETTINGS | {"train.clip_norm": 0.25, "train.batch": 8, "optimizer.learning_rate": 0.02},
        run="functions",
        storage=tmp_path,
    )
    assert "the highest learning rate is never reached" not in (tmp_path / "objects" / "log.txt").read_text()
    assert run.settings.train.slots * run.settings.train.slot_size == 8
    assert run.settings.optimizer.learning_rate == 0.02
    one, other = run.load_model(), by_functions.load_model()
    for name, value in make_model().state_dict().items():
        assert torch.equal(one.state_dict()[name], other.state_dict()[name]), name
        assert not torch.equal(one.state_dict()[name], value), name
    assert [step for step, _ in observer.seen] == [1, 2, 3, 4, 5, 6]
    assert observer.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(0 < norm <= 0.25 * (1 + 1e-5) for _, norm in observer.seen), "after clipping"


def test_a_loaders_batch_and_processes_are_defaults() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=2)
    own = OwnModel(make_model, loader, PairLoss(nn.CrossEntropyLoss()))
    found, settings = adopt(own, {"seed": 1})
    assert found.data is loader.dataset
    assert found.collate is None, "PyTorch's own"
    assert settings == {"seed": 1, "train.batch": 8, "data.read_processes": 2}
    for given in ({"train": {"batch": 4}}, {"train.slots": 2}, {"train": {"slot_size": 2}}):
        assert adopt(own, given)[1] == {**given, "data.read_processes": 2}
    assert adopt(own, {"train": {"steps": 4}})[1]["train"] == {"steps": 4, "batch": 8}


DATASET = TensorDataset(X, Y)
SAMPLERS: dict[str, tuple[Any, str]] = {
    "weighted": (lambda: DataLoader(DATASET, sampler=WeightedRandomSampler([1.0] * 40, 40)), "weigh classes in the loss"),
    "with replacement": (lambda: DataLoader(DATASET, sampler=RandomSampler(DATASET, replacement=True)), "or make a mixture"),
    "some": (lambda: DataLoader(DATASET, sampler=RandomSampler(DATASET, num_samples=5)), "or make a mixture"),
    "distributed": (
        lambda: DataLoader(DATASET, sampler=torch.utils.data.DistributedSampler(DATASET, 2, 0)),
        "leave it out, workers share the samples",
    ),
    "subset": (
        lambda: DataLoader(DATASET, sampler=torch.utils.data.SubsetRandomSampler([1])),
        "torch.utils.data.Subset",
    ),
    "batches": (lambda: DataLoader(DATASET, batch_sampler=[[1], [2]]), "its sampler is list"),
    "no batches": (lambda: DataLoader(DATASET, batch_size=None), "give the dataset of samples, and train.batch"),
}


@pytest.mark.parametrize(("make", "words"), SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_is_refused_with_a_remedy(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=rf"must be a loader of each sample once an epoch.*{words}"):
        adopt_loaders(make(), None, None)
    with pytest.raises(SettingError, match=r"^validation must be a loader"):
        adopt_loaders(DATASET, make(), None)


def test_two_loaders_that_collate_differently_are_refused() -> None:
    one, other = DataLoader(DATASET, collate_fn=collate), DataLoader(DATASET)
    with pytest.raises(SettingError, match="validation must collate as the loader of data does"):
        adopt_loaders(one, other, None)
    assert adopt_loaders(one, other, collate)[:3] == (DATASET, DATASET, collate)
    assert adopt_loaders(DATASET, one, None)[:3] == (DATASET, DATASET, collate)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9)),
    "groups": lambda model: SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "momentum": 0.5}], lr=0.01
    ),
    "a part": lambda model: torch.optim.RMSprop(model[2].parameters(), lr=0.01, centered=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_rebuilt_by_names(make: Any) -> None:
    """It steps as the given one does, on a copy of the model, also after a journey."""
    model = make_model()
    rebuild, settings = adopt_optimizer(make(model), model)
    copied = make_model()
    rebuilt, given = pickle.loads(pickle.dumps(rebuild))(copied, settings["optimizer.learning_rate"]), make(model)
    for _ in range(3):
        for network, optimizer in ((model, given), (copied, rebuilt)):
            optimizer.zero_grad()
            functional.cross_entropy(network(X), Y).backward()
            optimizer.step()
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other)
    rates = [group["lr"] for group in rebuild(make_model(), 2 * settings["optimizer.learning_rate"]).param_groups]
    assert rates == [2 * group["lr"] for group in given.param_groups], "a sweep over the rate"


@pytest.mark.parametrize("given", [SGD, functools.partial(SGD, momentum=0.9)], ids=["class", "partial"])
def test_an_optimizers_class_is_made_for_what_is_trained(given: Any) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    made = adopt_optimizer(given, model)[0](model, 0.3)
    assert [len(group["params"]) for group in made.param_groups] == [2]
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.3, 0.9 if given is not SGD else 0)


def test_an_optimizer_that_has_begun_or_is_of_another_model_is_refused() -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    with pytest.raises(SettingError, match="optimizer must hold parameters of `model`, given as the module itself"):
        adopt_optimizer(optimizer, make_model)
    functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    with pytest.raises(SettingError, match="optimizer must be an optimizer that has made no step"):
        adopt_optimizer(optimizer, model)


def _rates(make: Any, steps: int) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=7, gamma=0.3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=130, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=9), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[10]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_is_replayed(make: Any) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    given = make(optimizer)
    schedule = adopt_schedule(given)
    rates = _rates(make, 120)
    for step in (119, 0, 57, 100):  # in any order, as after a resume
        assert schedule.learning_rate * schedule(step, 120) == pytest.approx(rates[step], rel=1e-12)
    assert optimizer.param_groups[0]["lr"] == rates[0], "the given one is as it was"
    assert given.last_epoch == 0


class Drawn(lr_scheduler.LRScheduler):
    """Another rate at each look."""

    count = 0

    def get_lr(self) -> list[float]:
        type(self).count += 1
        return [self.count * 0.1 for _ in self.base_lrs]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "follows a metric: use validation.patience"),
        (
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=200),
            "changes momentum; OneCycleLR takes",
        ),
        (Drawn, "must be a function of the step: a second replay gives other rates"),
        (lambda o: lr_scheduler.StepLR, "must be a scheduler that is made"),
    ],
    ids=["plateau", "momentum", "draws", "class"],
)
def test_what_is_no_function_of_the_step_is_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        adopt_schedule(make(SGD([nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9)))


def test_a_warm_up_from_nothing_keeps_the_optimizers_rate() -> None:
    """The scheduler has set the rate of the first step, which is 0."""
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.5)
    warm_up = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    found, settings = adopt(OwnModel(model, (X, Y), adopt_loss, optimizer=optimizer, schedule=warm_up), {})  # type: ignore[arg-type]
    assert settings == {"optimizer.learning_rate": 0.5}
    assert found.optimizer(model, 0.5).param_groups[0]["lr"] == 0.5  # type: ignore[misc]
    assert [found.schedule(step, 20) for step in (0, 5, 15)] == [0, 0.5, 1.0]  # type: ignore[misc]


def test_schedulers_of_groups_and_those_that_have_begun_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = SGD([{"params": [each], "lr": 0.1} for each in parameters])
    with pytest.raises(SettingError, match="the same factor for each group"):
        adopt_schedule(lr_scheduler.LambdaLR(groups, [lambda step: 1.0, lambda step: 0.5 + step]))
    scheduler = lr_scheduler.StepLR(groups, 3)
    groups.step()
    scheduler.step()
    with pytest.raises(SettingError, match="a scheduler that has made no step"):
        adopt_schedule(scheduler)


def test_a_scheduler_that_ends_before_the_training_is_refused() -> None:
    schedule = ReplayedSchedule(
        lr_scheduler.OneCycleLR(SGD([nn.Parameter(torch.zeros(1))], lr=0.5), 0.5, total_steps=50, cycle_momentum=False)
    )
    schedule(49, 50)
    with pytest.raises(SettingError, match="schedule must go on to the end: it has rates for 51 steps, and step 99"):
        schedule(99, 100)


@pytest.mark.parametrize(("rates", "is_refused"), [(10, False), (5, True)])
def test_a_scheduler_ends_with_the_epochs(rates: int, is_refused: bool) -> None:
    """38 samples twice in batches of 8, whatever the default of train.steps."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=rates, cycle_momentum=False)
    own, _ = adopt(OwnModel(make_model, (X, Y), nn.CrossEntropyLoss(), schedule=scheduler), {})
    train = TrainConfig(steps=1000, epochs=2.0, slots=4, slot_size=2)
    if is_refused:
        with pytest.raises(SettingError, match="schedule must go on to the end"):
            _check_schedule(own, train, 38)
    else:
        _check_schedule(own, train, 38)


CRITERIA: dict[str, nn.Module] = {
    "plain": nn.CrossEntropyLoss(),
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
    "ignored": nn.CrossEntropyLoss(ignore_index=1, label_smoothing=0.1),
    "shares": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0])),
}


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_loss_of_classes_is_that_of_the_whole_batch_however_it_is_cut(kind: str) -> None:
    """A mean over each part would weigh the classes of a short part more."""
    criterion, model = CRITERIA[kind], make_model()
    labels = functional.one_hot(Y, 3).float() if kind == "shares" else Y
    loss = adopt_loss(criterion)
    total, count = 0.0, 0.0
    for part in (slice(0, 7), slice(7, 40)):
        (value, counted), _ = read_loss(loss(model, [X[part], labels[part]]), len(X[part]))
        total, count = total + value.item(), count + float(counted)
    assert total / count == pytest.approx(float(criterion(model(X), labels)), rel=1e-5)


def test_losses_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        TypeError, match=r"CrossEntropyLoss is for samples that are pairs .*a mapping of x, y: give a function"
    ):
        adopt_loss(nn.CrossEntropyLoss())(make_model(), {"x": X, "y": Y})
    with pytest.raises(SettingError, match="loss must have reduction 'mean'"):
        adopt_loss(nn.MSELoss(reduction="sum"))
    own = functools.partial(collate)
    assert adopt_loss(own) is own


def test_other_objects_are_other_code() -> None:
    """Else a complete run would be returned for them."""

    def found(**changes: Any) -> str:
        model = make_model()
        changed = {name: make(model) for name, make in changes.items()}
        return _hash_parts(adopt(OwnModel(model, (X, Y), **{"loss": nn.CrossEntropyLoss(), **changed}), {})[0])

    hashes = [
        found(),
        found(loss=lambda _: nn.CrossEntropyLoss(weight=torch.ones(3))),
        found(loss=lambda _: nn.CrossEntropyLoss(ignore_index=2)),
        found(optimizer=lambda model: AdamW(model.parameters())),
        found(optimizer=lambda model: AdamW(model.parameters(), betas=(0.5, 0.9))),
        found(schedule=lambda model: lr_scheduler.StepLR(SGD(model.parameters(), lr=0.1), 3)),
        found(schedule=lambda model: lr_scheduler.StepLR(SGD(model.parameters(), lr=0.1), 4)),
    ]
    assert len(set(hashes)) == len(hashes)
    assert found(optimizer=lambda model: AdamW(model.parameters())) == hashes[3]


def test_two_optimizers_of_the_page_learn_and_are_resumed(tmp_path: Path) -> None:
    """One class that wraps them; the rehearsal compares a resumed step with one that went through, bit by bit."""
    page = (Path(__file__).parents[4] / "docs" / "own-model.md").read_text()
    code = page.partition("## Two optimizers")[2].partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"__name__": __name__, "torch": torch, "nn": nn, "softplus": functional.softplus}
    exec(code.partition("run = raystride.fit")[0], names)
    runs = [
        raystride.fit(
            names["GAN"],
            {"x": X[:, :2]},
            names["adversarial_loss"],
            optimizer=names["TwoOptimizers"],
            settings=SETTINGS | {"train.batch": 8, "train.steps": steps},
            run=run,
            storage=tmp_path,
        )
        for run, steps in (("whole", 6), ("cut", 3), ("cut", 6))
    ]
    assert runs[0].summary["parameters_sha256"] == runs[2].summary["parameters_sha256"]
    assert runs[2].summary["resumed_from"] == 3
    assert {"val_generator", "val_discriminator"} <= set(runs[0].summary["metrics"])
    before = names["GAN"]().state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in runs[0].load_model().state_dict().items())
