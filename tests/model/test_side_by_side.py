"""Networks over one base, computed together, have the losses and gradients that each has alone."""

from typing import Any

import pytest
import torch

from raystride.model.hugging_face import hf_names
from raystride.model.linear import bf16_products
from raystride.model.lora import attach_adapters, iterate_adapters, start_adapters
from raystride.model.preference import PairRule, PreferenceDecoder
from raystride.model.side_by_side import SideBySide, share_base
from raystride.model.transformer import Decoder, PackedDecoder
from raystride.model.translator import Translator
from raystride.pipelines.config import LoraConfig, ModelConfig
from tests.bases import SHAPES
from tests.some import some

SAME = [LoraConfig(rank=2), LoraConfig(rank=2, alpha=4), LoraConfig(rank=2)]
UNLIKE = [
    LoraConfig(rank=2, targets=("q_proj",)),
    LoraConfig(rank=3),
    LoraConfig(rank=2, targets=("down_proj", "v_proj"), rslora=True),
]


def _networks(kind: type[Decoder], loras: list[LoraConfig]) -> list[Any]:
    torch.manual_seed(0)
    network: Any = kind(SHAPES["llama"], 50)
    found = []
    for seed, lora in enumerate(loras):
        network = share_base(network)
        attach_adapters(network, lora, hf_names(network))
        start_adapters(network, lora, seed)
        for _, _, _, adapter in iterate_adapters(network):
            torch.nn.init.normal_(adapter.b, std=0.1)
        found.append(network)
    return found


def _gradients(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert found
    for parameter in network.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("loras", [SAME, UNLIKE])
@pytest.mark.parametrize("packed", [False, True])
def test_each_has_the_loss_and_the_gradient_that_it_has_alone(loras: list[LoraConfig], packed: bool) -> None:
    networks = _networks(PackedDecoder if packed else Decoder, loras)
    ids = [torch.randint(0, 50, (2, 8)) for _ in loras]
    targets = [torch.where(torch.rand(ids_of_one.shape) < 0.2, -100, ids_of_one) for ids_of_one in ids]
    documents = [torch.tensor(starts) for starts in ([0, 5, 16], [0, 8, 11, 16], [0, 16])]
    inputs = [(own_ids, own) if packed else (own_ids,) for own_ids, own in zip(ids, documents, strict=True)]
    alone = []
    for network, own, aims in zip(networks, inputs, targets, strict=True):
        loss, counted = network(*own, aims)
        loss.backward()
        alone.append((float(loss.detach()), int(counted), _gradients(network)))
    together = SideBySide(networks).compute_losses([0, 1, 2], inputs, targets)
    torch.stack([loss for loss, _ in together]).sum().backward()
    for network, (loss, counted), (expected, aims_counted, gradients) in some(zip(networks, together, alone, strict=True)):
        assert abs(float(loss.detach()) - expected) < 1e-4
        assert int(counted) == aims_counted
        found = _gradients(network)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            assert torch.allclose(gradient, gradients[name], atol=1e-5), name


def test_some_of_them_and_rows_of_other_lengths_are_computed_as_well() -> None:
    networks = _networks(Decoder, SAME)
    ids = [torch.randint(0, 50, (2, 8)), torch.randint(0, 50, (1, 5))]
    found = SideBySide(networks).compute_losses([2, 0], [(own_ids,) for own_ids in ids], ids)
    for (loss, _), network, own in some(zip(found, (networks[2], networks[0]), ids, strict=True)):
        assert abs(float(loss.detach()) - float(network(own, own)[0].detach())) < 1e-4


@pytest.mark.parametrize("loras", [SAME, UNLIKE])
def test_in_fewer_bits_each_has_the_loss_that_it_has_alone(loras: list[LoraConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, as on GPUs, and by bfloat16 products of CPUs that have them; others imitate these."""
    monkeypatch.setattr("raystride.model.linear.has_bf16", lambda: True)
    networks = _networks(Decoder, loras)
    ids = torch.randint(0, 50, (2, 8))
    for fewer_bits in (torch.autocast("cpu", dtype=torch.bfloat16), bf16_products()):
        with fewer_bits:
            alone = [float(network(ids, ids)[0].detach()) for network in networks]
            together = SideBySide(networks).compute_losses([0, 1, 2], [(ids,)] * 3, [ids] * 3)
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
    shape = ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=8, context=8)
    for network in (Translator(shape, 40), PreferenceDecoder(shape, 40, PairRule())):
        with pytest.raises(ValueError, match=r"lora\.adapters .* train a decoder"):
            SideBySide([network])
