"""Weights go to Hugging Face's layouts and back without a bit changed, and what does not fit is named.

That the layouts mean the same to transformers is shown in tests/pipelines/evaluate/test_export.py, beside its import.
"""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.hugging_face import from_hugging_face, to_hugging_face
from raystride.model.hugging_face_config import check_description, describe, model_type
from raystride.model.norm import LayerNorm, RMSNorm
from raystride.model.shape import UnfitError
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig
from raystride.pipelines.config.parse import parse
from tests.some import some

GPT2 = ModelConfig(layers=2, heads=2, hidden_size=8, context=6, bias=True)
LLAMA = ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=16, ffn_size=24, context=6)
QWEN2 = replace(LLAMA, qkv_bias=True, tie_embeddings=True, norm_eps=1e-6)
QWEN3 = replace(LLAMA, qk_norm=True, head_size=6)
SCALED = replace(LLAMA, rope_scaling=(8.0, 1.0, 4.0, 64.0), tie_embeddings=True)
MISTRAL = replace(LLAMA, window=3)
SMOLLM3 = replace(LLAMA, nope_layers=(1,))
PHI3 = replace(LLAMA, rotary_fraction=0.5)
GEMMA2 = replace(
    LLAMA, norm="sandwich", gate="gelu", scaled_embedding=True, tie_embeddings=True, softcap=50.0, logit_softcap=30.0
)
GEMMA2 = replace(GEMMA2, window=3, window_layers=(0,), query_pre_attn_scalar=12)
GEMMA3 = replace(GEMMA2, softcap=0, logit_softcap=0, qk_norm=True, window_rope_theta=1e3)
MIXTRAL = replace(LLAMA, experts=3, expert_ffn_size=12)
QWEN3_MOE = replace(QWEN3, experts=4, router="softmax", experts_per_token=1)
OLMOE = replace(LLAMA, experts=4, qk_norm=True, qk_norm_joint=True, expert_ffn_size=8)
FAMILIES = {"mistral": MISTRAL, "smollm3": SMOLLM3, "phi3": PHI3, "gemma2": GEMMA2, "gemma3": GEMMA3}
FAMILIES |= {"mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "olmoe": OLMOE}
SHAPES = {"gpt2": GPT2, "llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
VOCABULARY = 11


def _decoder(shape: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder in which no two numbers are alike, norms and biases included."""
    torch.manual_seed(seed)
    model = Decoder(shape, VOCABULARY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def _same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@settings(max_examples=20)
@given(
    llama=st.booleans(),
    layers=st.integers(1, 3),
    groups=st.integers(1, 3),
    queries=st.integers(1, 2),
    half=st.integers(1, 3),
    hidden=st.integers(0, 9),
    bias=st.booleans(),
    tied=st.sampled_from([None, False, True]),
    size=st.integers(0, 2),
    kind=st.sampled_from(["llama", "qwen2", "qwen3"]),
)
def test_the_way_back_gives_every_bit(
    llama: bool,
    layers: int,
    groups: int,
    queries: int,
    half: int,
    hidden: int,
    bias: bool,
    tied: bool | None,
    size: int,
    kind: str,
) -> None:
    heads = groups * queries
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "hidden_size": heads * 2 * half, "ffn_size": hidden}
    extra: dict[str, Any] = {"bias": bias}
    if llama:
        extra = {"architecture": "llama", "kv_heads": groups, "head_size": 2 * size}
        extra |= {"qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3"}
    shape = ModelConfig(context=4, tie_embeddings=tied, **sizes, **extra)
    assert model_type(shape) == (kind if llama else "gpt2")
    model, other = _decoder(shape), _decoder(shape, seed=1)
    from_hugging_face(other, *to_hugging_face(model, end_id=0))
    assert _same(model, other)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *FAMILIES.values()], ids=[*SHAPES, *FAMILIES])
def test_every_family_comes_back(shape: ModelConfig) -> None:
    model, other = _decoder(shape), _decoder(shape, seed=1)
    description, tensors = to_hugging_face(model, end_id=0)
    from_hugging_face(other, description, tensors)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        # What is added to 1 is rounded once each way.
        assert torch.allclose(mine, theirs, rtol=2**-22, atol=2**-22)
    # Halves of what is written as one tensor are told when one is asked for.
    assert sorted(to_hugging_face(other, end_id=0)[1]) == sorted(tensors)


@pytest.mark.parametrize("shape", [replace(GPT2, bias=False), *SHAPES.values()])
def test_an_export_shares_no_memory_with_the_model(shape: ModelConfig) -> None:
    model = _decoder(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for tensor in some(to_hugging_face(model, end_id=0)[1].values()):
        assert tensor.is_contiguous()
        tensor.zero_()
    assert all(torch.equal(parameter, before[name]) for name, parameter in some(model.named_parameters()))


def test_openais_folder_has_short_names_and_masks() -> None:
    model, other = _decoder(GPT2), _decoder(GPT2, seed=1)
    description, tensors = to_hugging_face(model, end_id=0)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 6, 6).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    from_hugging_face(other, description, tensors)
    assert _same(model, other)


@pytest.mark.parametrize("shape", [QWEN2, replace(GPT2, gelu="tanh"), SCALED], ids=["qwen2", "gpt2", "llama"])
def test_a_head_of_its_own_may_start_as_the_embedding(shape: ModelConfig) -> None:
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    assert "lm_head.weight" not in tensors
    other = _decoder(replace(shape, tie_embeddings=False), seed=1)
    from_hugging_face(other, description, tensors)
    assert other.head is not None
    assert torch.equal(other.head.weight, other.embedding.weight)
    assert other.head.weight.data_ptr() != other.embedding.weight.data_ptr()


def test_the_first_learned_positions_suffice() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    other = _decoder(replace(GPT2, context=4), seed=1)
    from_hugging_face(other, description, tensors)
    assert other.positions is not None
    assert torch.equal(other.positions.weight, tensors["transformer.wpe.weight"][:4])


def test_weights_in_bfloat16_become_the_models_own_dtype() -> None:
    model, other = _decoder(LLAMA), _decoder(LLAMA, seed=1)
    description, tensors = to_hugging_face(model, end_id=0)
    from_hugging_face(other, description, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert torch.equal(other.embedding.weight, model.embedding.weight.bfloat16().float())


LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED: list[tuple[ModelConfig, dict[str, Any], str]] = [
    (LLAMA, {"model_type": "t5"}, r"model_type 't5', which is none of gpt2, llama, qwen2, qwen3, mistral"),
    (LLAMA, {"model_type": "qwen2"}, r"give --model.qkv_bias true$"),
    (LLAMA, {"model_type": "qwen3"}, r"give --model.qk_norm true$"),
    (
        QWEN2,
        {"model_type": "llama", "tie_word_embeddings": False},
        r"give --model.tie_embeddings false --model.qkv_bias false$",
    ),
    (QWEN3, {"head_dim": None}, r"give --model.head_size 128$"),
    (LLAMA, {"head_dim": 8}, r"give --model.head_size 8$"),
    (LLAMA, {"tie_word_embeddings": True}, r"give --model.tie_embeddings true$"),
    (LLAMA, {"rms_norm_eps": 1e-6}, r"give --model.norm_eps 1e-06$"),
    (LLAMA, {"rope_parameters": None, "rope_theta": 500000.0}, r"give --model.rope_theta 500000.0$"),
    (SCALED, {"rope_parameters": None, "rope_scaling": None}, r"give --model.rope_scaling null$"),
    (SCALED, {"rope_parameters": {"rope_type": "llama3"}}, r"config.json has no 'factor'$"),
    (LLAMA, {"rope_parameters": LINEAR}, r"give --model.rope_factor 2.0$"),
    (PHI3, {"rope_parameters": {"rope_type": "longrope"}}, r"rope_type is 'longrope', and a `phi3` here has 'default'$"),
    (LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, r"rope_type is 'dynamic', .* has 'default' or .*'llama3'"),
    (LLAMA, {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30.0, and a `llama` here has None$"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0, and a `gemma3_text` here has None$"),
    (GEMMA3, {"use_bidirectional_attention": True}, r"use_bidirectional_attention is True"),
    (GEMMA3, {"hidden_activation": "silu"}, r"hidden_activation is 'silu'"),
    (GEMMA2, {"sliding_window": 5}, r"give --model.window 5$"),
    (GEMMA2, {"layer_types": ["full_attention", "sliding_attention"]}, r"give --model.window_layers '\[1\]'$"),
    (GEMMA2, {"model_type": "gemma3_text"}, r"its attn_logit_softcapping is 50.0"),
    (SMOLLM3, {"no_rope_layers": [1, 1]}, r"give --model.nope_layers '\[\]'$"),
    (MISTRAL, {"sliding_window": None}, r"give --model.window 0$"),
    (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, r"rope_type is 'yarn'"),
    (LLAMA, {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
    (LLAMA, {"attention_bias": True}, r"give --model.qkv_bias true --model.out_bias true$"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, r"window 4 .*window_layers '\[1\]'$"),
    (QWEN3, {"layer_types": ["full_attention", "chunked_attention"]}, r"layer_types is .*'chunked_attention'"),
    (LLAMA, {"mlp_bias": True}, r"mlp_bias is True"),
    (LLAMA, {"hidden_act": "gelu", "num_hidden_layers": 3}, r"hidden_act is 'gelu'"),
    (LLAMA, {"num_hidden_layers": 3, "num_key_value_heads": 4}, r"give --model.layers 3 --model.kv_heads 4$"),
    (replace(GPT2, norm="post"), {}, r"give --model.norm pre$"),
    (GPT2, {"n_inner": 40, "n_head": 4}, r"give --model.heads 4 --model.ffn_size 40$"),
    (GPT2, {"layer_norm_epsilon": 1e-6}, r"give --model.norm_eps 1e-06$"),
    (GPT2, {"activation_function": "gelu_new"}, r"give --model.gelu tanh$"),
    (GPT2, {"activation_function": "relu"}, r"activation_function is 'relu'"),
    (GPT2, {"tie_word_embeddings": False}, r"give --model.tie_embeddings false$"),
    (replace(GPT2, bias=False), {"bias": True}, r"give --model.bias true$"),
    (GPT2, {"scale_attn_weights": False}, r"scale_attn_weights is False"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is True"),
]


@pytest.mark.parametrize(("shape", "changes", "message"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_another_arithmetic_is_refused_by_its_name(shape: ModelConfig, changes: dict[str, Any], message: str) -> None:
    description, tensors = to_hugging_face(
        _decoder(shape if shape.norm == "sandwich" else replace(shape, norm="pre")), end_id=0
    )
    with pytest.raises(ValueError, match=message):
        from_hugging_face(_decoder(shape), description | changes, tensors)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *FAMILIES.values(), SCALED])
def test_the_flags_that_are_named_describe_the_folder(shape: ModelConfig) -> None:
    description, _ = to_hugging_face(_decoder(shape), end_id=0)
    with pytest.raises(ValueError, match=r": give --model\.") as raised:
        check_description(ModelConfig(), description)
    flags = str(raised.value).partition(": give ")[2]
    told = parse(Config, shlex.split(flags), program="train.py").settings.model
    check_description(told, description)
    # The folder is read up to any length; all else is told.
    assert describe(replace(told, context=6), VOCABULARY, end_id=0) == description


def test_a_description_without_sizes_is_refused() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    del description["n_embd"]
    with pytest.raises(ValueError, match=r"config\.json .*'n_embd'"):
        from_hugging_face(_decoder(GPT2), description, tensors)


def test_a_missing_tensor_is_named() -> None:
    description, tensors = to_hugging_face(_decoder(LLAMA), end_id=0)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.1\.self_attn\.k_proj\.weight"):
        from_hugging_face(_decoder(LLAMA), description, tensors)


@pytest.mark.parametrize(
    ("shape", "name", "expected"),
    [
        (GPT2, "transformer.h.1.mlp.c_fc.weight", r"\(8, 32\)"),
        (LLAMA, "model.layers.0.self_attn.v_proj.weight", r"\(8, 16\)"),
    ],
    ids=["gpt2", "llama"],
)
def test_a_tensor_of_another_shape_is_named_with_both(shape: ModelConfig, name: str, expected: str) -> None:
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    tensors[name] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=rf"{name} is \(3, 5\).*{expected}$"):
        from_hugging_face(_decoder(shape), description, tensors)


def test_weights_without_a_place_are_named() -> None:
    description, tensors = to_hugging_face(_decoder(LLAMA), end_id=0)
    with pytest.raises(ValueError, match=r"no place: model\.layers\.0\.self_attn\.q_norm\.weight$"):
        from_hugging_face(_decoder(LLAMA), description, tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)})


def test_another_vocabulary_is_refused_with_a_remedy() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r" 11 ids .*tokenizer 12: .*--tokenizer\.file"):
        from_hugging_face(Decoder(GPT2, 12), description, tensors)


def test_too_few_positions_are_refused() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r" 6 positions.*model\.context, 8"):
        from_hugging_face(_decoder(replace(GPT2, context=8)), description, tensors)


def test_biases_are_not_dropped() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r"ln_1\.bias .*--model\.bias true"):
        from_hugging_face(_decoder(replace(GPT2, bias=False)), description | {"bias": False}, tensors)


@pytest.mark.parametrize(("shape", "embedding"), [(GPT2, "transformer.wte"), (QWEN2, "model.embed_tokens")])
def test_a_tied_head_may_be_there_twice_but_not_differ(shape: ModelConfig, embedding: str) -> None:
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    head = tensors[f"{embedding}.weight"].clone()
    from_hugging_face(_decoder(shape), description, tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        from_hugging_face(_decoder(shape), description, tensors | {"lm_head.weight": head + 1})


UNSAYABLE = [
    (replace(GPT2, kv_heads=1), "kv_heads", ()),
    (replace(GPT2, head_size=6), "head_size", ()),
    (replace(GPT2, qk_norm=True), "qk_norm", ()),
    (replace(GPT2, window=3), "window", ()),
    (replace(QWEN2, qk_norm=True), "qk_norm", ("beside model.qkv_bias", "`qwen2`")),
    (replace(LLAMA, norm="sandwich", gate="gelu"), "scaled_embedding", ("`gemma2`", "has model.scaled_embedding")),
    (replace(GEMMA3, softcap=5), "softcap", ()),
    (replace(MIXTRAL, router="sigmoid"), "router", ("`mixtral`",)),
    (replace(MIXTRAL, shared_experts=1), "shared_experts", ("`mixtral`",)),
    (replace(MIXTRAL, family="qwen3"), "experts", ("`qwen3`",)),
    (replace(OLMOE, head_size=6), "head_size", ("`olmoe`",)),
    (replace(LLAMA, head_size=6, hidden_size=18), "heads", ("model.hidden_size, 18",)),
    (replace(GPT2, norm="post"), "norm", ()),
    (replace(GPT2, architecture="original", bias=False), "architecture", ()),
]


@pytest.mark.parametrize(("shape", "setting", "names"), UNSAYABLE)
def test_what_no_layout_can_say_is_named(shape: ModelConfig, setting: str, names: tuple[str, ...]) -> None:
    value = getattr(shape, setting)
    with pytest.raises(UnfitError) as raised:
        to_hugging_face(_decoder(shape), end_id=0)
    assert (raised.value.setting, raised.value.value) == (f"model.{setting}", value)
    assert not [name for name in (f"model.{setting} is ", str(value), *names) if name not in str(raised.value)]


@pytest.mark.parametrize("shape", [replace(shape, norm_eps=1e-3) for shape in SHAPES.values()], ids=SHAPES.keys())
def test_all_norms_have_the_epsilon_that_is_described(shape: ModelConfig) -> None:
    found = [norm.eps for norm in _decoder(shape).modules() if isinstance(norm, LayerNorm | RMSNorm)]
    assert found == [1e-3] * (2 * shape.layers * (2 if shape.qk_norm else 1) + 1)


def test_a_description_is_checked_without_torch() -> None:
    program = "import sys, raystride.model.hugging_face_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize("shape", [GEMMA2, GEMMA3, replace(GPT2, tie_embeddings=True)], ids=["gemma2", "gemma3", "gpt2"])
def test_a_head_of_its_own_begins_as_an_embedding_that_is_tied_by_default(shape: ModelConfig) -> None:
    """As published folders have it, config.json says nothing of it."""
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    del description["tie_word_embeddings"]
    apart = _decoder(replace(shape, tie_embeddings=False), seed=1)
    from_hugging_face(apart, description, tensors)
    assert apart.head is not None
    assert torch.equal(apart.head.weight, apart.embedding.weight)
