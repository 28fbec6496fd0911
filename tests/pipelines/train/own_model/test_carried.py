"""What users' objects keep is in the checkpoints: optimisers' states of any kind, modes, extra state, buffers, the loss."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raystride
from raystride.pipelines.config import OptimizerConfig, ScalingConfig, SettingError
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.contents import join_tensors, refuse_unlike_numbers, split_tensors
from raystride.pipelines.train.checkpoint.layout import read_manifest
from raystride.pipelines.train.checkpoint.manager import Checkpoints
from raystride.pipelines.train.checkpoint.train_state import TrainState
from raystride.pipelines.train.own_model.definition import OwnModel
from raystride.pipelines.train.own_model.network import OwnNetwork
from raystride.pipelines.train.own_model.optimizer import TorchOptimizer, build_own_optimizer
from raystride.pipelines.train.strategies.parameter_layout import saved_buffers
from raystride.pipelines.train.strategies.strategy import average_buffers
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.pipelines.train.own_model.modules import MODULES, REFUSED_KINDS
from tests.pipelines.train.own_model.optimizers import CLOSURE, OPTIMIZERS, SPARSE, Make
from tests.pipelines.train.own_model.test_training import DDP, FSDP, STEPS, own_job
from tests.pipelines.train.strategies.course import next_attempt, run_course
from tests.some import some

X, Y = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 3


def _make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _build(make: Make) -> tuple[OwnNetwork, TorchOptimizer]:
    torch.manual_seed(0)
    own = OwnModel(_make_network, (X, Y), _loss, optimizer=make)
    model = OwnNetwork(_make_network(), own, {})
    return model, build_own_optimizer(own, OptimizerConfig(learning_rate=0.01), model)


def _train(model: OwnNetwork, optimizer: TorchOptimizer, steps: range) -> None:
    for step in steps:
        rows = torch.arange(8) + 8 * (step % 6)
        model.zero_grad()
        _loss(model.module, (X[rows], Y[rows])).backward()
        optimizer.update(0.01 / (1 + step))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in (CLOSURE, SPARSE)])
def test_an_optimizer_goes_on_with_the_bits_of_one_that_was_not_stopped(tmp_path: Path, name: str) -> None:
    whole, of_whole = _build(OPTIMIZERS[name])
    _train(whole, of_whole, range(9))
    cut, of_cut = _build(OPTIMIZERS[name])
    _train(cut, of_cut, range(5))
    checkpoints = Checkpoints(Folder(str(tmp_path)), "a1", keep=1)
    checkpoints.save(cut, of_cut, TrainState(step=5), {}, best=False)
    checkpoints.finish()
    resumed, of_resumed = _build(OPTIMIZERS[name])
    found = checkpoints.find_newest()
    assert found
    checkpoints.load(found, resumed, of_resumed)
    for model, optimizer in ((cut, of_cut), (resumed, of_resumed)):  # a save changes nothing
        _train(model, optimizer, range(5, 9))
        for one, other in zip(whole.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_checkpoints_have_the_weights_that_such_an_optimizer_evaluates(tmp_path: Path, name: str) -> None:
    model, optimizer = _build(OPTIMIZERS[name])
    _train(model, optimizer, range(5))
    checkpoints = Checkpoints(Folder(str(tmp_path)), "a1", keep=1)
    checkpoints.save(model, optimizer, TrainState(step=5), {}, best=False)
    checkpoints.finish()
    with optimizer.evaluated_weights():
        evaluated = [parameter.detach().clone() for parameter in model.parameters()]
    read, _ = _build(OPTIMIZERS[name])
    found = checkpoints.find_newest()
    assert found
    checkpoints.load(found, read)
    for wanted, trained, other in zip(evaluated, model.parameters(), read.parameters(), strict=True):
        assert torch.equal(wanted, other)
        assert not torch.equal(trained, other)


TENSORS = st.sampled_from(
    [torch.tensor(3), torch.zeros(0), torch.arange(6.0).view(2, 3), torch.tensor([1 + 2j]), torch.tensor([True])]
)
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), TENSORS, st.sampled_from([torch.float16])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_what_objects_keep_comes_back_as_it_was(value: Any) -> None:
    content, tensors = split_tensors(value, "objects")
    again = join_tensors(json.loads(json.dumps(content, allow_nan=False)), tensors)
    assert _repeated(again) == _repeated(value)


def _repeated(value: Any) -> str:
    return repr(value)  # NaN equals itself there, 1 is not True, and tensors have values


@pytest.mark.parametrize("value", [{"a": [object()]}, {(1, 2): 3}, {1}])
def test_other_things_are_named_by_their_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"state(\.a\.0)? is a (object|dict|set)"):
        split_tensors(value, "state")


class Parts(nn.Module):
    """A network with all that a module may keep besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.back.requires_grad_(False)
        self.back.eval()
        self.head, self.calls = nn.Linear(8, 3), 0
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("multiplier", torch.tensor([2_654_435_761, 1 << 40]))
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.detach().mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += self.training
        hidden = self.back(x - 0.01 * self.mean) * (1 + 0.01 * (self.calls % 3))
        return self.head(hidden) * self.turns.real  # type: ignore[no-any-return, operator]

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "of": torch.tensor([self.calls])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Tempered(nn.Module):
    """A loss that learns its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(()))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]) * self.logarithm.exp(), batch[1])


def _fit(storage: Path, run: str, steps: int, **given: Any) -> raystride.Run:
    settings: dict[str, Any] = {"train.steps": steps, "train.slots": 2, "train.slot_size": 4, "validation.every": 2}
    settings |= {"checkpoint.every": 3, "launch.mode": "inline", "record.mlflow": False}
    settings |= {"optimizer.learning_rate": 0.05, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
    arguments = {"model": Parts, "data": (X, Y), "loss": _loss} | given
    return raystride.fit(**arguments, settings=settings, run=run, storage=storage)


def _read(run: raystride.Run) -> dict[str, Any]:
    state = run.load_model("last").state_dict()
    return {key: value.tolist() if isinstance(value, torch.Tensor) else str(value) for key, value in state.items()}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({}, marks=pytest.mark.long, id="settings"),
        pytest.param({"loss": Tempered()}, marks=pytest.mark.long, id="a loss that learns"),
        pytest.param({"loss": Tempered(), "optimizer": OPTIMIZERS["AdamWScheduleFree"]}, id="schedule-free"),
    ],
)
def test_a_resumed_fit_has_modes_extra_state_buffers_and_loss_as_one_that_went_through(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    through = _fit(tmp_path, "through", 7, **given)
    _fit(tmp_path, "cut", 3, **given)
    resumed = _fit(tmp_path, "cut", 7, **given)
    assert _read(resumed) == _read(through)
    assert resumed.summary["parameters_sha256"] == through.summary["parameters_sha256"]
    assert resumed.summary["val_loss"] == through.summary["val_loss"]
    found = through.load_model("last")
    assert found.back[1].num_batches_tracked == 0  # type: ignore[union-attr, index]
    assert found.calls == 7
    assert found.multiplier.tolist() == [2_654_435_761, 1 << 40]  # type: ignore[operator, union-attr]
    if given:
        tensors = read_manifest(Folder(str(tmp_path / "cut" / "checkpoints" / "step-00000007")))["tensors"]
        assert "model.criterion.logarithm" in tensors
        assert given["loss"].logarithm == 0  # the user's is as it was


class Kinds(nn.Module):
    """Buffers of all types, equal on all workers but for those whose name ends with `seen`."""

    saves_buffers = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128):
            values = torch.tensor([0.1, -0.0, 3.0e-5, 1 / 3, float("nan")]).to(dtype)
            self.register_buffer(f"of {str(dtype)[6:]}", values * 1j if dtype.is_complex else values)
            self.register_buffer(f"{str(dtype)[6:]} seen", torch.tensor(1.0 + 2 * rank).to(dtype))
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
            self.register_buffer(f"of {str(dtype)[6:]}", torch.tensor([1, 0, 2**24 + 1, 2**40 + 3]).to(dtype))
            self.register_buffer(f"{str(dtype)[6:]} seen", torch.tensor(3 * rank).to(dtype))


def _average(rank: int, world: int, _: None) -> dict[str, Any]:
    from raystride.pipelines.config import Config, ScalingConfig
    from raystride.pipelines.train.strategies import build_strategy

    config = Config(scaling=ScalingConfig(strategy="ddp"))
    model = Kinds(rank)
    average_buffers(model, build_strategy(config, device=torch.device("cpu"), rank=rank, world=world))
    return {name: _list_bytes(buffer) for name, buffer in model.named_buffers()}


def _list_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def test_buffers_of_any_type_keep_their_bits_where_workers_agree() -> None:
    first, second = run_distributed(_average, 2, None)
    assert first == second
    given = dict(Kinds(0).named_buffers())
    for name, found in some(first.items()):
        is_mean = name.endswith("seen") and (given[name].is_floating_point() or given[name].is_complex())
        assert found == _list_bytes(torch.full_like(given[name], 2) if is_mean else given[name]), name


WORKERS = [("Adafactor", DDP), ("Counting", DDP), ("Lion", FSDP), ("Prodigy", DDP), ("AdamWScheduleFree", FSDP)]
FURTHER = [("Blocks", DDP), ("AdamWScheduleFree", DDP), ("RAdamScheduleFree", DDP), ("Lion", DDP)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scaling"), [*WORKERS, *(pytest.param(*each, marks=pytest.mark.weekly) for each in FURTHER)]
)
def test_on_two_workers_a_resumed_training_has_the_same_bits(tmp_path: Path, name: str, scaling: Any) -> None:
    through = run_course(own_job(tmp_path, f"with {name}", "through", scaling), 2)
    job = own_job(tmp_path, f"with {name}", "cut", scaling, steps=3)
    run_course(job, 2)
    resumed = run_course(next_attempt(job, train=replace(job.config.train, steps=STEPS)), 2)
    assert (resumed.sha256, resumed.losses) == (through.sha256, through.losses[3:])


def _compare_numbers(rank: int, world: int, differs: bool) -> str:
    model, optimizer = _build(OPTIMIZERS["Counting"])
    _train(model, optimizer, range(2))
    (group,) = optimizer._optimizer.param_groups
    group["norms"] = [*group["norms"], float(rank) if differs else 0.5]  # as of its own shards
    try:
        refuse_unlike_numbers(model, optimizer, dist.new_group(backend="gloo"))
    except SettingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differs", [False, True])
def test_numbers_that_an_optimizer_has_otherwise_on_another_worker_are_refused(differs: bool) -> None:
    found = run_distributed(_compare_numbers, 2, differs)
    assert all(("same numbers on all workers" in text and "norms" in text) is differs for text in found), found


def _train_each(rank: int, world: int, jobs: list[tuple[Job, Job | None]]) -> list[tuple[Any, ...]]:
    """For each pair of jobs, what a training that went through ends with, and one that was cut: hash, buffers, loss."""
    from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
    from raystride.pipelines.train.worker.build import build_training

    def train(job: Job) -> tuple[Any, ...]:
        training = build_training(job, WorkerInfo(rank=rank, world=world), [], lambda: False, lambda _: None)
        training.run()
        buffers = [_list_bytes(buffer) for _, buffer in saved_buffers(training.model)]
        return parameters_sha256(training.model, training.optimizer), buffers, training.metrics["val_loss"]

    found = []
    for through, cut in jobs:
        whole = train(through)
        if cut is None:
            found.append((whole, whole))
            continue
        train(replace(cut, config=replace(cut.config, train=replace(cut.config.train, steps=3))))
        found.append((whole, train(replace(cut, attempt="a2"))))
    return found


KINDS = [name for name in MODULES if name not in REFUSED_KINDS and name != "max_norm"]
SOME_KINDS = ["tied blocks", "nested", "weight_norm", "teacher", "recurrent"]
NOT_SHARDED = ("teacher", "property")
ZERO = [ScalingConfig(strategy="deepspeed", zero=stage) for stage in (1, 2, 3)]
WRAPPED = ("compiled", "compiled part")
"""Kinds whose parameters DeepSpeed cannot gather."""
FOLLOWING = ("spectral_norm", "old spectral_norm", "forward hook", "backward hook", "persistent", "teacher")
"""Kinds whose state follows the forwards of a worker."""


@pytest.mark.long
@pytest.mark.parametrize("kinds", [SOME_KINDS, pytest.param(KINDS, marks=pytest.mark.weekly)], ids=["some", "all"])
@pytest.mark.parametrize("scaling", [DDP, FSDP, *ZERO], ids=["ddp", "fsdp", "zero 1", "zero 2", "zero 3"])
def test_networks_of_any_kind_go_on_with_the_same_bits_on_two_workers(tmp_path: Path, scaling: Any, kinds: Any) -> None:
    kinds = [name for name in kinds if scaling is DDP or name not in NOT_SHARDED]
    kinds = [name for name in kinds if scaling.zero < 3 or name not in WRAPPED]

    def make(name: str, way: str, scaling: Any = None) -> Job:
        return own_job(tmp_path, f"of {name}", f"{name} {way}", scaling, slots=5)  # 3 and 2 micro-batches a step

    alone = run_distributed(_train_each, 1, [(make(name, "alone"), None) for name in kinds])[0]
    jobs = [(make(name, "whole", scaling), make(name, "cut", scaling)) for name in kinds]
    for found in run_distributed(_train_each, 2, jobs):
        for name, (whole, resumed), ((*_, loss), _) in zip(kinds, some(found), alone, strict=True):
            assert whole == resumed, name
            assert name in FOLLOWING or whole[-1] == pytest.approx(loss, rel=1e-5), name
