"""Copies that a checkpoint writes from: right for every kind of tensor, and in the same memory each time."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from raystride.pipelines.train.checkpoint import staging
from raystride.pipelines.train.checkpoint.staging import Staging
from tests.distributed import run_distributed


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "matrix": torch.randn(30, 7),
        "columns": torch.randn(6, 5).t(),
        "half": torch.randn(9).bfloat16(),
        "step": torch.tensor(3.0),
        "nothing": torch.zeros(0, 4),
        "large": torch.randn(100_001),
    }


@pytest.mark.parametrize("alone", [0, 1 << 40])
def test_copies_are_what_tensors_were_in_memory_that_is_kept(alone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MIN_THREADED_BYTES", alone)
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 1000)
    place, first = Staging(), _tensors()
    copies, wait_for_copies = place.copy_tensors(first)
    wait_for_copies()
    assert copies.keys() == first.keys()
    assert all(torch.equal(copies[name], first[name]) and copies[name].dtype == first[name].dtype for name in first)
    before = {name: tensor.data_ptr() for name, tensor in copies.items()}
    for tensor in first.values():
        tensor.zero_()
    assert copies["matrix"].any()  # what was copied stays
    second = _tensors() | {"half": torch.randn(10).bfloat16()}
    copies, _ = place.copy_tensors(second)
    assert all(torch.equal(copies[name], second[name]) for name in second)
    assert [name for name in second if copies[name].data_ptr() != before[name]] == ["half"]


def _shards(rank: int, world: int) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    local = torch.arange(6.0).view(2, 3) + rank
    shards = DTensor.from_local(local, mesh, [Shard(0)])
    copies, _ = Staging().copy_tensors({"weight": shards})
    local.zero_()
    copy_tensors = copies["weight"]
    whole = copy_tensors.full_tensor()  # type: ignore[attr-defined]
    expected = torch.cat([torch.arange(6.0).view(2, 3) + each for each in range(world)])
    return isinstance(copy_tensors, DTensor) and copy_tensors.shape == (4, 3) and torch.equal(whole, expected)


def test_a_tensor_in_shards_stays_in_shards() -> None:
    assert run_distributed(_shards, 2) == [True, True]
