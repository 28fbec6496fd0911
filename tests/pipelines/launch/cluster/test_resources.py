"""Every `auto` becomes a number that fits what there is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.pipelines.config import LaunchConfig, ScalingConfig, TrainConfig
from raystride.pipelines.launch.cluster.resources import Allocation, Resources, resolve_allocation, usable_cores
from tests.errors import refused
from tests.tiny import tiny


def _resolve(there: Resources, slots: int = 8, mode: str = "ray", **scaling: Any) -> Allocation:
    config = tiny(
        Path("text.txt"),
        train=TrainConfig(steps=1, slots=slots, slot_size=1),
        scaling=ScalingConfig(**scaling),
        launch=LaunchConfig(mode=mode),  # type: ignore[arg-type]
    )
    return resolve_allocation(config, there)


def _machine(cpus: float, gpus: float = 0.0) -> Resources:
    return Resources(cpus, gpus, 2**34, None)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (_machine(4), Allocation(4, "cpu", 1)),
        (_machine(1), Allocation(1, "cpu", 1)),
        (_machine(0.5), Allocation(1, "cpu", 1)),
        (_machine(20), Allocation(8, "cpu", 2)),  # as many as slots, and the cores shared out
        (_machine(16, gpus=2), Allocation(2, "cuda", 8)),
        (_machine(16, gpus=64), Allocation(8, "cuda", 2)),
    ],
    ids=str,
)
def test_auto_takes_what_there_is_up_to_the_slots(there: Resources, expected: Allocation) -> None:
    assert _resolve(there) == expected


def test_what_is_given_is_taken() -> None:
    assert _resolve(_machine(4), workers=2) == Allocation(2, "cpu", 2)
    assert _resolve(_machine(4), workers=2, threads=1) == Allocation(2, "cpu", 1)
    assert _resolve(_machine(4), workers=6) == Allocation(6, "cpu", 1)  # more than there is: the preflight says so
    assert _resolve(_machine(4, gpus=2), device="cpu") == Allocation(4, "cpu", 1)
    assert _resolve(_machine(4), device="cuda") == Allocation(1, "cuda", 4)


def test_an_elastic_run_goes_on_with_no_more_than_it_began_with() -> None:
    assert _resolve(_machine(2), min_workers=4) == Allocation(2, "cpu", 1, min_workers=2)
    assert _resolve(_machine(4), workers=4, min_workers=2) == Allocation(4, "cpu", 1, min_workers=2)


def test_exact_workers_have_one_thread_unless_told_otherwise() -> None:
    def share(**scaling: Any) -> Allocation:
        train = TrainConfig(steps=1, slots=8, slot_size=1, exact=True)
        return resolve_allocation(tiny(Path("text.txt"), train=train, scaling=ScalingConfig(**scaling)), _machine(8))

    assert [share(workers=workers).threads for workers in (1, 2, 3)] == [1, 1, 1]
    assert share(workers=2, threads=4) == Allocation(2, "cpu", 4)


def test_a_single_strategy_is_one_worker() -> None:
    assert _resolve(_machine(4), strategy="single") == Allocation(1, "cpu", 4)


def test_inline_is_one_worker_and_refuses_more() -> None:
    assert _resolve(_machine(4), mode="inline") == Allocation(1, "cpu", 4)
    assert _resolve(_machine(4), mode="inline", workers=1, threads=3) == Allocation(1, "cpu", 3)
    with refused("scaling.workers", 2, names=["--launch inline"]):
        _resolve(_machine(4), mode="inline", workers=2)


def test_a_worker_takes_no_more_threads_than_a_node_has() -> None:
    two_nodes = Resources(8, 0, 2**34, None, nodes=2, node_cpus=(4.0, 4.0))
    assert _resolve(two_nodes, workers=1) == Allocation(1, "cpu", 4)
    assert _resolve(two_nodes, workers=3) == Allocation(3, "cpu", 2)
    assert _resolve(two_nodes) == Allocation(8, "cpu", 1)
    uneven = Resources(8, 0, 2**34, None, nodes=2, node_cpus=(6.0, 2.0))
    assert _resolve(uneven, workers=2) == Allocation(2, "cpu", 3)


def test_a_worker_asks_for_its_threads_or_for_a_gpu() -> None:
    assert Allocation(2, "cpu", 3).per_worker == {"CPU": 3}
    assert Allocation(2, "cuda", 3).per_worker == {"GPU": 1}


def test_this_machine_has_cores_and_memory() -> None:
    there = Resources.of_this_machine()
    assert there.cpus == usable_cores() >= 1
    assert there.memory_bytes > 2**28
    assert there.nodes == 1


def test_this_machines_gpus_are_those_that_pytorch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="A card", total_memory=8e10)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: card)
    there = Resources.of_this_machine()
    assert (there.gpus, there.gpu_name, there.gpu_memory_bytes, there.gpu_problem) == (2, "A card", 8e10, "")
    without = Resources.of_this_machine(gpus=False)
    assert (without.gpus, without.gpu_name, without.gpu_memory_bytes) == (0, None, None)
    assert (without.cpus, without.memory_bytes) == (there.cpus, there.memory_bytes)


def test_gpus_that_pytorch_cannot_use_are_none_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlSystemGetDriverVersion", lambda: "470.82")
    monkeypatch.setattr("pynvml.nvmlDeviceGetCount", lambda: 2)
    there = Resources.of_this_machine()
    assert (there.gpus, there.gpu_name) == (0, None)
    assert there.gpu_problem.startswith("there are 2 GPUs, but PyTorch")


def test_a_cluster_has_the_memory_of_its_smallest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(True, 48, 16), (True, 6, 2), (False, 1, 1)]
    nodes = [
        {"Alive": alive, "Resources": {"CPU": 4.0, "memory": heap * 2.0**30, "object_store_memory": store * 2.0**30}}
        for alive, heap, store in sizes
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    there = Resources.of_cluster(gpus=False)
    assert (there.memory_bytes, there.cpus, there.nodes, there.node_cpus) == (8 * 2**30, 8, 2, (4.0, 4.0))
    assert (there.gpus, there.gpu_problem) == (0, "")


@pytest.mark.usefixtures("ray_cluster")
def test_the_cluster_is_counted_whole() -> None:
    there = Resources.of_cluster()
    assert (there.cpus, there.nodes, there.node_cpus) == (2, 1, (2,))
    assert there.memory_bytes > 2**28
