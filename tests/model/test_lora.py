"""LoRA adapters: their targets and names, merging, and refused settings."""

from typing import Any

import pytest
import torch

from raystride.model.cut import Cut, cut_before_init, cut_parameter
from raystride.model.hugging_face import hf_names
from raystride.model.lora import (
    attach_adapters,
    base_parameters,
    cast_base,
    find_targets,
    iterate_adapters,
    merge_adapters,
    select_targets,
    start_adapters,
)
from raystride.model.shape import UnfitError
from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.pipelines.config import LoraConfig, ModelConfig
from tests.bases import SHAPES


def _with(shape: ModelConfig, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(shape, 50)
    lora = LoraConfig(rank=2, **settings)
    attach_adapters(model, lora, hf_names(model))
    start_adapters(model, lora, seed=1)
    return model


@pytest.mark.parametrize(
    ("kind", "targets", "expected"),
    [
        ("llama", "all-linear", 2 * 7),
        ("llama", ("q_proj", "v_proj"), 2 * 2),
        ("llama", ("attention.k", "feed_forward.down"), 2 * 2),
        ("llama", ("layers.1.self_attn.o_proj",), 1),
        ("gpt2", "all-linear", 2 * 4),
        ("gpt2", ("c_proj",), 2 * 2),
        ("gpt2", ("mlp.c_proj", "attention.qkv"), 2 * 2),
    ],
)
def test_targets_are_names_of_hugging_face_or_ours(kind: str, targets: Any, expected: int) -> None:
    model = _with(SHAPES[kind], targets=targets)
    assert len(list(iterate_adapters(model))) == expected
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(own) == 2 * expected
    assert all(".adapters." in name for name in own)
    assert not own & {name for name, _ in base_parameters(model)}


def test_a_translator_has_names_of_its_own() -> None:
    model = Translator(ModelConfig(architecture="llama", layers=1, heads=2, hidden_size=8, context=8), 40)
    named = {target_linear.our_name.split(".", 2)[2] for target_linear in find_targets(model, hf_names(model))}
    assert {"attention.q", "cross_attention.k", "cross_attention.out", "feed_forward.gate"} <= named
    attach_adapters(model, LoraConfig(rank=2, targets=("cross_attention.v",)), hf_names(model))
    assert [name for name, *_ in iterate_adapters(model)] == ["decoder.0.cross_attention.kv"]


@pytest.mark.parametrize("target", ["lm_head", "head", "proj", "embed_tokens"])
def test_a_name_that_no_layer_has_is_refused_with_those_that_there_are(target: str) -> None:
    model = Decoder(SHAPES["llama"], 50)
    with pytest.raises(UnfitError, match=rf"'{target}'.*down_proj, gate_proj") as raised:
        select_targets(find_targets(model, hf_names(model)), LoraConfig(rank=2, targets=(target,)))
    assert (raised.value.setting, raised.value.value) == ("lora.targets", target)


def test_a_rank_above_a_weights_own_has_no_singular_vectors() -> None:
    with pytest.raises(UnfitError, match=r"^lora\.rank is 17: it must be at most 16, the rank of .*k_proj$") as raised:
        attach_adapters(model := Decoder(SHAPES["llama"], 50), LoraConfig(rank=17, init="pissa"), hf_names(model))
    assert (raised.value.setting, raised.value.value) == ("lora.rank", 17)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_begin_as_nothing_and_can_be_merged(kind: str) -> None:
    torch.manual_seed(0)
    plain, model = Decoder(SHAPES[kind], 50), _with(SHAPES[kind])
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(model.hidden(ids), plain.hidden(ids))
    for _, _, _, adapter in iterate_adapters(model):
        torch.nn.init.normal_(adapter.b)
    changed = model.hidden(ids)
    assert (changed - plain.hidden(ids)).abs().max() > 0.01
    merge_adapters(model)
    assert not list(iterate_adapters(model))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.allclose(model.hidden(ids), changed, atol=1e-5)


def test_a_base_in_bfloat16_computes_as_its_rounded_values_do() -> None:
    model, rounded = _with(SHAPES["llama"]), _with(SHAPES["llama"])
    cast_base(model, torch.bfloat16)
    held = {name for name, parameter in model.named_parameters() if parameter.dtype is torch.bfloat16}
    assert {"embedding.weight", "head.weight", "blocks.0.attention.qkv.weight"} <= held
    assert not any(".adapters." in name or "norm" in name for name in held)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if name in held:
                parameter.copy_(parameter.bfloat16())
    ids = torch.arange(12).view(2, 6)
    for (loss, _), (expected, _) in [(model(ids, ids), rounded(ids, ids))]:
        assert loss.dtype is torch.float32
        assert torch.equal(loss, expected)


def test_a_part_of_a_weight_has_that_part_of_its_adapter() -> None:
    """Queries 8:16 of 32 with the keys and values that belong to them, as the second of four workers has them."""
    ranges = (range(8, 16), range(36, 40), range(52, 56))

    def plan(model: torch.nn.Module) -> None:
        cut_parameter(model.get_submodule("blocks.0.attention.qkv"), "weight", Cut((64, 32), 0, ranges))

    whole, lora = _with(SHAPES["llama"]), LoraConfig(rank=2)
    torch.manual_seed(0)
    with cut_before_init(plan):
        part = Decoder(SHAPES["llama"], 50)
    attach_adapters(part, lora, hf_names(part))
    start_adapters(part, lora, seed=1)
    here: Any = part.get_submodule("blocks.0.attention.qkv")
    there: Any = whole.get_submodule("blocks.0.attention.qkv")
    assert here.rows == {"q": range(8), "k": range(8, 12), "v": range(12, 16)}
    for name, rows in {"q": slice(8, 16), "k": slice(4, 8), "v": slice(4, 8)}.items():
        torch.nn.init.normal_(there.adapters[name].b)
        here.adapters[name].b.data.copy_(there.adapters[name].b[rows])
        assert torch.equal(here.adapters[name].a, there.adapters[name].a)
    x = torch.randn(3, 32)
    expected = there(x)[:, [number for rows in ranges for number in rows]]
    assert torch.allclose(here(x), expected, atol=1e-6)
