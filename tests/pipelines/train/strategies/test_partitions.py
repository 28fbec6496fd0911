"""Partitions as DeepSpeed's stages lay them out, read and set by parameter, beside the whole tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raystride.pipelines.train.strategies.partitions import Partitions, _flat_partitions, _partitions_of
from tests.distributed import run_distributed

SIZES = [5, 7, 4]
"""Numbers of three parameters that lie end to end: 16, of which two workers have 8 each."""


def laid_end_to_end(rank: int, parameters: list[nn.Parameter], dtype: str = "bit16_groups") -> SimpleNamespace:
    """Returns the optimiser of stages 1 and 2: one partition of a group, and where each parameter's part lies in it."""
    flat = nn.Parameter(torch.cat([each.detach().reshape(-1) for each in parameters])[8 * rank : 8 * rank + 8].clone())
    first = 0
    for parameter in parameters:
        begin, end = max(first, 8 * rank), min(first + parameter.numel(), 8 * rank + 8)
        address = SimpleNamespace(
            hp_fragment_address=SimpleNamespace(start=begin - 8 * rank, numel=end - begin),
            lp_fragment_address=SimpleNamespace(start=begin - first),
        )
        parameter._hp_mapping = address if begin < end else None  # type: ignore[attr-defined]
        first += parameter.numel()
    return SimpleNamespace(**{dtype: [parameters]}, single_partition_of_fp32_groups=[flat])


def parameters() -> list[nn.Parameter]:
    """Three, with numbers that follow each other."""
    ends = [0, 5, 12, 16]
    shapes = [(5,), (7, 1), (2, 2)]
    found = [torch.arange(float(ends[n]), ends[n + 1]).view(shape) for n, shape in enumerate(shapes)]
    return [nn.Parameter(each) for each in found]


@pytest.mark.parametrize("groups", ["bit16_groups", "bf16_groups"])
@pytest.mark.parametrize(
    ("rank", "places"), [(0, [(0, 0, 5), (5, 0, 3), (0, 0, 0)]), (1, [(0, 0, 0), (0, 3, 4), (4, 0, 4)])]
)
def test_a_parameters_part_is_where_its_fragment_lies(rank: int, places: list[tuple[int, int, int]], groups: str) -> None:
    every = parameters()
    zero = laid_end_to_end(rank, every, groups)
    found = dict(_partitions_of(zero, rank))
    assert [(found[each].start, found[each].first, found[each].count) for each in every] == places
    assert all(place.flat is zero.single_partition_of_fp32_groups[0] for place in found.values())


@pytest.mark.parametrize(("rank", "counts"), [(0, [3, 2]), (1, [2, 2]), (2, [0, 2])])
def test_stage_3_cuts_every_parameter_and_its_last_parts_may_be_short(rank: int, counts: list[int]) -> None:
    """Each of three workers has a place for 3 of 5 numbers, and for 2 of 6."""
    flats = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    every = parameters()[:2]
    for each, numbers in zip(every, (5, 6), strict=True):
        each.ds_numel = numbers  # type: ignore[attr-defined]
    position = {0: (0, 0, 3), 1: (1, 0, 2)}
    zero = SimpleNamespace(
        fp16_groups=[every],
        fp32_partitioned_groups_flat=flats,
        grad_position=position,
        get_param_id=lambda parameter: next(n for n, each in enumerate(every) if each is parameter),
    )
    found = dict(_partitions_of(zero, rank))
    assert [found[each].flat is flat for each, flat in zip(every, flats, strict=True)] == [True, True]
    places = [(found[each].start, found[each].first, found[each].count) for each in every]
    assert places == [(0, 3 * rank, counts[0]), (0, 2 * rank, counts[1])]


def test_fp32_partitions_are_those_of_the_stage() -> None:
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        assert _flat_partitions(SimpleNamespace(**{name: (1, 2)})) == [1, 2]
    both = SimpleNamespace(fp32_groups_flat_partition=[1], fp32_partitioned_groups_flat=[2])
    assert _flat_partitions(both) == [2]


def _gradients(rank: int, world: int) -> list[list[float]]:
    """Returns the gradients of each kind of optimiser."""
    zero = laid_end_to_end(0, parameters())
    flat = zero.single_partition_of_fp32_groups[0]
    averaged = {0: [torch.ones(1), torch.full((1,), 2.0)], 1: None, 2: [torch.full((1,), 3.0)]}
    zero.averaged_gradients = averaged
    held = Partitions(zero, None, rank, world, torch.device("cpu"), None)  # type: ignore[arg-type]
    found = [[float(each) for each in held.local_gradients()]]
    for name in ("cpu_offload", "offload_optimizer"):
        setattr(zero, name, True)
        found.append([len(each) for each in held.local_gradients()])
        flat.grad = torch.zeros(8)
        found.append([len(each) for each in held.local_gradients()])
        flat.grad = None
        setattr(zero, name, False)
    zero.fp32_groups_gradient_flat_partition = (torch.full((1,), 5.0),)
    return [*found, [float(each) for each in held.local_gradients()]]


def test_gradients_lie_where_each_of_deepspeeds_optimisers_has_them() -> None:
    assert run_distributed(_gradients, 1) == [[[1.0, 2.0, 3.0], [], [8], [], [8], [5.0]]]


class Moments:
    """A rule that remembers a vector and a count of each partition."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, torch.Tensor]] = {}

    def state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        fresh = {"moment": -parameter.detach() - 0.5, "count": torch.tensor(3.0)}
        return self.kept.get(id(parameter), fresh)

    def load_state(self, parameter: nn.Parameter, held: dict[str, torch.Tensor]) -> None:
        self.kept[id(parameter)] = held


def _states(rank: int, world: int) -> dict[str, Any]:
    """Returns the state of each parameter, and the partition once other values were loaded."""
    every, rule, updates = parameters(), Moments(), list[Any]()
    zero = laid_end_to_end(rank, every)
    flat = zero.single_partition_of_fp32_groups[0]
    held = Partitions(zero, rule, rank, world, torch.device("cpu"), lambda *given: updates.append(given))  # type: ignore[arg-type]
    states = [held.state(each) for each in every]
    found: dict[str, Any] = {
        "rows": [state["master"].to_local() for state in states],
        "master": [state["master"].full_tensor() for state in states],
        "moment": [state["moment"].full_tensor() for state in states],
        "count": [float(state["count"]) for state in states],
    }
    for each in every:
        whole = torch.arange(100.0, 100 + each.numel()).view(each.shape)
        held.load_state(each, {"master": whole, "moment": whole + 1000, "count": torch.tensor(4.0)})
    found |= {"flat": flat.detach(), "values": [each.detach() for each in every]}
    (kept,) = rule.kept.values()
    found |= {"kept": kept["moment"].detach(), "kept count": float(kept["count"])}
    empty = held.empty_state(every[1], None, torch.float32)
    assert isinstance(empty, DTensor)
    found |= {"empty": tuple(empty.shape), "scalar": tuple(held.empty_state(every[1], [], torch.float32).shape)}
    held.update(0.5, None)
    return found | {"updates": updates}


def test_what_is_held_of_a_parameter_is_whole_over_all_workers_and_is_set_where_its_part_lies() -> None:
    results = run_distributed(_states, 2)
    wholes = [each.detach() for each in parameters()]
    loaded = [torch.arange(100.0, 100 + each.numel()).view(each.shape) for each in wholes]
    end_to_end = torch.cat([each.reshape(-1) for each in loaded])
    for rank, found in enumerate(results):
        own = slice(8 * rank, 8 * rank + 8)
        for master, moment, rows, whole in zip(found["master"], found["moment"], found["rows"], wholes, strict=True):
            assert torch.equal(master, whole)
            assert torch.equal(moment, -whole - 0.5)
            assert torch.equal(rows, whole.chunk(2)[rank])
        assert found["count"] == [3.0] * 3
        assert torch.equal(found["flat"], end_to_end[own])
        assert all(torch.equal(value, whole) for value, whole in zip(found["values"], loaded, strict=True))
        assert torch.equal(found["kept"], end_to_end[own] + 1000)
        assert found["kept count"] == 4.0
        assert (found["empty"], found["scalar"]) == ((7, 1), ())
        assert found["updates"] == [(0.5, None)]


def _stage_3_parameters(rank: int, world: int) -> list[Any]:
    """Parameters of stage 3, of which the model computes with a partition; a small one is whole beside it."""
    small, large = (nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(0)))
    flats = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    for each in (small, large):
        each.ds_numel, each.ds_shape, each.ds_tensor = 6, torch.Size((6,)), torch.zeros(4)  # type: ignore[attr-defined]
    zero = SimpleNamespace(
        fp16_groups=[[small], [large]],
        fp32_partitioned_groups_flat=flats,
        grad_position={0: (0, 0, 3), 1: (1, 0, 3)},
        get_param_id=lambda parameter: 0 if parameter is small else 1,
    )
    held = Partitions(zero, Moments(), rank, world, torch.device("cpu"), None)  # type: ignore[arg-type]
    for each in (small, large):
        held.load_state(each, {"master": torch.arange(1.0, 7.0)})
    partitions: list[Any] = [each.ds_tensor.tolist() for each in (small, large)]  # type: ignore[attr-defined]
    return [*partitions, small.tolist(), large.tolist(), [flat.tolist() for flat in flats]]


def test_stage_3_sets_the_partition_with_which_the_model_computes() -> None:
    for rank, found in enumerate(run_distributed(_stage_3_parameters, 2)):
        own = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]][rank]
        assert found == [[*own, 0.0], [*own, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [], [own, own]]
