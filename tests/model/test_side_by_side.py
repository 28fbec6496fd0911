"""Networks over one base, computed together, have the losses and gradients that each has alone."""

from typing import Any

import pytest
import torch

from raystride.model.hugging_face import names_there
from raystride.model.linear import bf16_products
from raystride.model.lora import adapted, attach, start_adapters
from raystride.model.preference import PairRule, PreferenceDecoder
from raystride.model.side_by_side import SideBySide, over_same_base
from raystride.model.transformer import Decoder, PackedDecoder
from raystride.model.translator import Translator
from raystride.pipelines.config import Lora, Model
from tests.bases import SHAPES
from tests.some import some

SAME = [Lora(rank=2), Lora(rank=2, alpha=4), Lora(rank=2)]
UNLIKE = [Lora(rank=2, targets=("q_proj",)), Lora(rank=3), Lora(rank=2, targets=("down_proj", "v_proj"), rslora=True)]


def _networks(kind: type[Decoder], loras: list[Lora]) -> list[Any]:
    torch.manual_seed(0)
    network: Any = kind(SHAPES["llama"], 50)
    found = []
    for seed, lora in enumerate(loras):
        network = over_same_base(network)
        attach(network, lora, names_there(network))
        start_adapters(network, lora, seed)
        for _, _, _, adapter in adapted(network):
            torch.nn.init.normal_(adapter.b, std=0.1)
        found.append(network)
    return found


def _gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    assert found
    for each in network.parameters():
        each.grad = None
    return found


@pytest.mark.parametrize("loras", [SAME, UNLIKE])
@pytest.mark.parametrize("packed", [False, True])
def test_each_has_the_loss_and_the_gradient_that_it_has_alone(loras: list[Lora], packed: bool) -> None:
    networks = _networks(PackedDecoder if packed else Decoder, loras)
    ids = [torch.randint(0, 50, (2, 8)) for _ in loras]
    targets = [torch.where(torch.rand(each.shape) < 0.2, -100, each) for each in ids]
    documents = [torch.tensor(each) for each in ([0, 5, 16], [0, 8, 11, 16], [0, 16])]
    inputs = [(each, own) if packed else (each,) for each, own in zip(ids, documents, strict=True)]
    alone = []
    for network, own, aims in zip(networks, inputs, targets, strict=True):
        loss, counted = network(*own, aims)
        loss.backward()
        alone.append((float(loss.detach()), int(counted), _gradients(network)))
    together = SideBySide(networks).losses([0, 1, 2], inputs, targets)
    torch.stack([loss for loss, _ in together]).sum().backward()
    for network, (loss, counted), (expected, aims_counted, gradients) in some(zip(networks, together, alone, strict=True)):
        assert abs(float(loss.detach()) - expected) < 1e-4
        assert int(counted) == aims_counted
        found = _gradients(network)
        assert found.keys() == gradients.keys()
        for name, each in found.items():
            assert torch.allclose(each, gradients[name], atol=1e-5), name


def test_some_of_them_and_rows_of_other_lengths_are_computed_as_well() -> None:
    networks = _networks(Decoder, SAME)
    ids = [torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (1, 5))]
    found = SideBySide(networks).losses([2, 0], [(each,) for each in ids], ids)
    for (loss, _), network, own in some(zip(found, (networks[2], networks[0]), ids, strict=True)):
        assert abs(float(loss.detach()) - float(network(own, own)[0].detach())) < 1e-4


@pytest.mark.parametrize("loras", [SAME, UNLIKE])
def test_in_fewer_bits_each_has_the_loss_that_it_has_alone(loras: list[Lora], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, as on GPUs, and by bfloat16 products of CPUs that have them; others imitate these."""
    monkeypatch.setattr("raystride.model.linear.has_bf16", lambda: True)
    networks = _networks(Decoder, loras)
    ids = torch.randint(0, 50, (2, 8))
    for fewer_bits in (torch.autocast("cpu", dtype=torch.bfloat16), bf16_products()):
        with fewer_bits:
            alone = [float(network(ids, ids)[0].detach()) for network in networks]
            together = SideBySide(networks).losses([0, 1, 2], [(ids,)] * 3, [ids] * 3)
        assert len(set(alone)) == 3
        for (loss, _), expected in zip(together, alone, strict=True):
            assert abs(float(loss.detach()) - expected) < 1e-4


def test_all_have_one_base_in_memory() -> None:
    first, second, _ = _networks(Decoder, SAME)
    assert first.embedding.weight is second.embedding.weight
    qkv = "blocks.0.attention.qkv"
    assert first.get_submodule(qkv).weight is second.get_submodule(qkv).weight
    assert first.get_submodule(qkv).adapters["q"].a is not second.get_submodule(qkv).adapters["q"].a


def test_what_has_another_loss_is_refused() -> None:
    shape = Model(flavour="llama", layers=1, heads=2, width=8, context=8)
    for network in (Translator(shape, 40), PreferenceDecoder(shape, 40, PairRule())):
        with pytest.raises(ValueError, match=r"lora\.adapters .* train a decoder"):
            SideBySide([network])
