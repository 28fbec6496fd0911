"""Trainings that share a base meet in every step: each has the gradients that it has alone."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from raystride.model.lora import iterate_adapters
from raystride.pipelines.config import LoraConfig
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers.byte_pairs import ByteEncoder
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.lora.base import AdaptedModelFactory
from raystride.pipelines.train.lora.lockstep import LockstepGroup, LockstepStrategy
from tests.bases import SHAPES, write_base
from tests.forwards import MicroBatch, RecordingForward
from tests.tiny import tiny

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AdaptedModelFactory]:
    """Makes networks with adapters over one base."""
    folder = tmp_path_factory.mktemp("together")
    base = write_base(folder / "base", SHAPES["llama"])
    shape = replace(SHAPES["llama"], init_from=str(base))
    config = tiny(folder / "text.txt", model=shape, lora=LoraConfig(rank=2))
    encoder = ByteEncoder()
    facts = {"vocabulary_size": encoder.vocabulary_size, "end_id": encoder.end_id}
    task = build_task(config, facts, {"tokenizer": encoder})
    return lambda: AdaptedModelFactory(task, config, Folder(str(folder / "tokenizer")), lambda _: None)


def batches_of(number: int, count: int) -> list[MicroBatch]:
    """Slots of a training, of which no two trainings have the same."""
    random, found = torch.Generator().manual_seed(number), []
    for slot in range(count):
        ids, targets = (torch.randint(200, (1, 6), generator=random) for _ in range(2))
        targets[0, : slot + number] = -100
        found.append(MicroBatch(10 * number + slot, (ids,), targets))
    return found


def with_values(network: Any, seed: int) -> Any:
    """Adapters with values of their own."""
    torch.manual_seed(seed)
    for _, _, _, adapter in iterate_adapters(network):
        torch.nn.init.normal_(adapter.a, std=0.1)
        torch.nn.init.normal_(adapter.b, std=0.1)
    return network


def gradients_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients that there are, by name."""
    return {name: each.grad.clone() for name, each in network.named_parameters() if each.grad is not None}


def in_threads(bodies: Sequence[Callable[[], None]]) -> list[BaseException | None]:
    """Runs each in a thread of its own; what each raised."""
    raised: list[BaseException | None] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            bodies[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "trainings wait for each other for ever"
    return raised


def test_each_has_the_gradients_that_it_has_alone_also_with_other_numbers_of_slots(
    maker: Callable[[], AdaptedModelFactory],
) -> None:
    counts, together = [2, 1, 3], LockstepGroup(3)
    networks: dict[int, Any] = {}
    forwards = [RecordingForward(0.5), RecordingForward(2.0), RecordingForward(1.0)]
    ready = threading.Barrier(3)

    def body(number: int) -> Callable[[], None]:
        def train() -> None:
            member = together.strategy_for(number)
            with together._turn:
                networks[number] = with_values(member.build_network(maker()), number)
            ready.wait(LIMIT_S)
            with member.participate():
                member.run_micro_batches(networks[number], batches_of(number, counts[number]), forwards[number])

        return train

    assert in_threads([body(number) for number in range(3)]) == [None] * 3
    found = {number: gradients_of(network) for number, network in networks.items()}
    bases = {id(networks[number].embedding.weight) for number in range(3)}
    assert len(bases) == 1
    for number, network in networks.items():
        for parameter in network.parameters():
            parameter.grad = None
        total = torch.zeros(2)
        for batch in batches_of(number, counts[number]):
            loss, counted = network(*batch.inputs, batch.targets)
            (loss * forwards[number].scale).backward()
            total += torch.stack((loss.detach(), counted.float()))
        alone = gradients_of(network)
        assert alone.keys() == found[number].keys() != set()
        for name, gradient in alone.items():
            torch.testing.assert_close(found[number][name], gradient, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(forwards[number].measured, total, rtol=1e-5, atol=1e-5)
    slots = [slot for forward in forwards for slot in forward.slots]
    assert len(slots) == 3, "one turn, one surrounding"


def member_of(together: LockstepGroup, number: int, maker: Callable[[], AdaptedModelFactory]) -> LockstepStrategy:
    """A training with its network, made before its thread begins."""
    member = together.strategy_for(number)
    with_values(member.build_network(maker()), number)
    return member


def test_one_that_ends_or_fails_leaves_the_others_to_theirs(maker: Callable[[], AdaptedModelFactory]) -> None:
    together = LockstepGroup(4)
    members = [member_of(together, number, maker) for number in range(3)]
    forwards = [RecordingForward() for _ in range(3)]

    def goes_on() -> None:
        with members[0].participate():
            for _ in range(3):
                members[0].run_micro_batches(torch.nn.Module(), batches_of(0, 1), forwards[0])

    def ends() -> None:
        with members[1].participate():
            members[1].run_micro_batches(torch.nn.Module(), batches_of(1, 1), forwards[1])

    def fails() -> None:
        with members[2].participate():
            raise KeyError("own")

    together.withdraw(3)  # it never began
    raised = in_threads([goes_on, ends, fails])
    assert raised[:2] == [None, None]
    assert isinstance(raised[2], KeyError)
    targets = [int((batches_of(n, 1)[0].targets >= 0).sum()) for n in range(2)]
    assert [float(forward.measured[1]) for forward in forwards] == [3 * targets[0], targets[1], 0]


def test_an_error_in_what_is_computed_for_all_ends_all(maker: Callable[[], AdaptedModelFactory]) -> None:
    together = LockstepGroup(2)
    members = [member_of(together, number, maker) for number in range(2)]
    bad = [MicroBatch(0, (torch.tensor([[10**6]]),), torch.tensor([[1]]))]  # an id that no embedding has

    def body(number: int, batches: list[MicroBatch]) -> Callable[[], None]:
        def train() -> None:
            with members[number].participate():
                members[number].run_micro_batches(torch.nn.Module(), batches, RecordingForward())

        return train

    raised = in_threads([body(0, batches_of(0, 1)), body(1, bad)])
    assert raised[0] is raised[1]
    assert isinstance(raised[0], IndexError)


def test_networks_without_adapters_have_no_base_to_share() -> None:
    with pytest.raises(TypeError, match=r"lora\.rank"):
        LockstepGroup(1).strategy_for(0).build_network(lambda: torch.nn.Linear(1, 1))
