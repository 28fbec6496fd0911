"""Parameters of a whole network, gathered from what one model or several workers' parts hold of them."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.cut import Cut
from raystride.pipelines.train.strategies.parameter_layout import (
    ParameterLayout,
    count_parameters,
    full_base_parameters,
    full_parameters,
    layout_of,
    saved_parameters,
)
from tests.distributed import run_distributed

SHAPES = {"z": (2, 3), "kept": (2,), "frozen": (3,), "a": (4,)}


class Network(nn.Module):
    """Some parameters: `frozen` is a base's, `kept` is not trained either, yet the run's own."""

    def __init__(self) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(torch.arange(math.prod(shape)).view(shape) + 10.0 * number))
        self.frozen.requires_grad_(False)
        self.has_frozen_base = True
        self.kept.requires_grad_(False)
        self.kept.kept = True


class Masters:
    """An optimiser that holds the master copy of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        return {"master": torch.full((4,), 0.5)} if parameter is self.parameter else {"moment": torch.zeros(1)}


def test_a_runs_own_parameters_are_trained_or_kept_with_those() -> None:
    model = Network()
    assert [name for name, _ in saved_parameters(model)] == ["z", "kept", "a"]
    assert count_parameters(model) == 15
    assert layout_of(model) is None


def test_a_frozen_part_of_a_network_without_adapters_is_saved() -> None:
    model = Network()
    del model.has_frozen_base
    assert [name for name, _ in saved_parameters(model)] == list(SHAPES)


def test_values_come_by_name_and_are_masters_if_there_are_any() -> None:
    model = Network()
    assert [name for name, _ in full_parameters(model)] == ["a", "kept", "z"]
    assert dict(full_parameters(model))["a"].tolist() == [30, 31, 32, 33]
    assert not dict(full_parameters(model))["a"].requires_grad
    has_masters = dict(full_parameters(model, Masters(model.a)))
    assert has_masters["a"].tolist() == [0.5] * 4
    assert has_masters["z"].tolist() == model.z.tolist()
    assert [(name, value.tolist()) for name, value in full_base_parameters(model)] == [("frozen", [20, 21, 22])]


def test_a_part_counts_as_the_whole_network() -> None:
    model = Network()
    model.a.ds_shape = torch.Size((100, 2))  # as DeepSpeed's stage 3 has it
    assert count_parameters(model) == 211
    model.layout = ParameterLayout({"a": (5, 6), "b": (7,), "scalar": ()}, [], {})
    assert count_parameters(model) == 38
    assert layout_of(model) is model.layout


def _gather(rank: int, world: int, dtype: torch.dtype) -> dict[str, Any]:
    """Gathers parameters of which each worker has some: the tied rows, columns in two ranges, one of a worker alone."""
    whole = {
        "columns": torch.arange(10.0).view(2, 5).neg().to(dtype),
        "rows": torch.tensor([-0.0, 1.0, math.nan, 3.0], dtype=dtype),
        "everywhere": torch.tensor([7.0, -0.0], dtype=dtype),
        "alone": torch.tensor([[5.0]], dtype=dtype),
    }
    ranges = {"columns": [(range(1), range(3, 5)), (range(1, 3),)][rank], "rows": [(range(1),), (range(1, 4),)][rank]}
    cuts = {name: Cut(tuple(whole[name].shape), int(name == "columns"), own) for name, own in ranges.items()}
    model = nn.Module()
    for name, value in whole.items():
        if name != "alone" or rank == 1:
            cut = cuts.get(name)
            model.register_parameter(name, nn.Parameter(cut.local_part(value) if cut else value.clone()))
    owned = {"columns", "rows"} | ({"alone"} if rank else {"everywhere"})
    model.layout = ParameterLayout({name: tuple(value.shape) for name, value in whole.items()}, [], cuts, owned)
    return {name: (value, whole[name]) for name, value in full_parameters(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_two_workers_make_the_whole_to_the_bit(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for found in run_distributed(_gather, 2, dtype):
        assert list(found) == ["alone", "columns", "everywhere", "rows"]
        for value, whole in found.values():
            assert value.dtype == dtype
            assert torch.equal(value.view(bits), whole.view(bits))
