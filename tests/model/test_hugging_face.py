"""Weights go to Hugging Face's layouts and back without a bit changed, and what does not fit is named.

That the layouts mean the same to transformers is shown in tests/pipelines/evaluate/test_export.py, beside its import.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.hugging_face import from_hugging_face, to_hugging_face
from model.hugging_face_config import EPS
from model.transformer import Decoder
from pipelines.config import Model

GPT2 = Model(layers=2, heads=2, width=8, context=6, bias=True)
LLAMA = Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=16, feed_forward=24, context=6)
VOCABULARY = 11


def _decoder(shape: Model, seed: int = 0) -> Decoder:
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
)
def test_the_way_back_gives_every_bit(
    llama: bool, layers: int, groups: int, queries: int, half: int, hidden: int, bias: bool
) -> None:
    heads = groups * queries
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "width": heads * 2 * half, "feed_forward": hidden}
    kind: dict[str, Any] = {"flavour": "llama", "kv_heads": groups} if llama else {"bias": bias}
    shape = Model(context=4, **sizes, **kind)
    model, other = _decoder(shape), _decoder(shape, seed=1)
    assert from_hugging_face(other, *to_hugging_face(model, end_id=0)) == []
    assert _same(model, other)


@pytest.mark.parametrize("shape", [replace(GPT2, bias=False), LLAMA], ids=["gpt2", "llama"])
def test_an_export_shares_no_memory_with_the_model(shape: Model) -> None:
    model = _decoder(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for tensor in to_hugging_face(model, end_id=0)[1].values():
        assert tensor.is_contiguous()
        tensor.zero_()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_openais_folder_has_short_names_and_masks() -> None:
    model, other = _decoder(GPT2), _decoder(GPT2, seed=1)
    description, tensors = to_hugging_face(model, end_id=0)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 6, 6).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert from_hugging_face(other, description, tensors) == []
    assert _same(model, other)


def test_openais_gelu_is_told() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    (note,) = from_hugging_face(_decoder(GPT2), description | {"activation_function": "gelu_new"}, tensors)
    x = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
    gap = torch.nn.functional.gelu(x) - torch.nn.functional.gelu(x, approximate="tanh")
    assert "at most 0.0005 off" in note
    assert 0.0004 < gap.abs().max() < 0.0005


def test_a_tied_llama_starts_with_its_embedding_as_head() -> None:
    description, tensors = to_hugging_face(_decoder(LLAMA), end_id=0)
    del tensors["lm_head.weight"]
    other = _decoder(LLAMA, seed=1)
    from_hugging_face(other, description | {"tie_word_embeddings": True}, tensors)
    assert other.head is not None
    assert torch.equal(other.head.weight, tensors["model.embed_tokens.weight"])
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


REFUSED: list[tuple[Model, dict[str, Any], str]] = [
    (LLAMA, {"model_type": "qwen2"}, r"model_type 'qwen2'.*no biases on queries, keys and values"),
    (LLAMA, {"model_type": "qwen3"}, r"model_type 'qwen3'.*no norms on queries and keys"),
    (LLAMA, {"model_type": "bert"}, r"model_type 'bert', which is neither gpt2 nor llama$"),
    (LLAMA, {"rms_norm_eps": 1e-6}, r"rms_norm_eps is 1e-06, and model.flavour `llama` has 1e-05"),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}}, r"rope_type is 'llama3'"),
    (LLAMA, {"rope_parameters": None, "rope_theta": 500000.0}, r"give --model.rope_theta 500000.0$"),
    (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type is 'linear'"),
    (LLAMA, {"attention_bias": True}, r"attention_bias is True"),
    (LLAMA, {"mlp_bias": True}, r"mlp_bias is True"),
    (LLAMA, {"head_dim": 8}, r"head_dim is 8"),
    (LLAMA, {"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
    (LLAMA, {"num_hidden_layers": 3, "num_key_value_heads": 4}, r"give --model.layers 3 --model.kv_heads 4$"),
    (GPT2, {"n_inner": 40, "n_head": 4}, r"give --model.heads 4 --model.feed_forward 40$"),
    (GPT2, {"layer_norm_epsilon": 1e-6}, r"layer_norm_epsilon is 1e-06"),
    (GPT2, {"activation_function": "relu"}, r"activation_function is 'relu'"),
    (GPT2, {"scale_attn_weights": False}, r"scale_attn_weights is False"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is True"),
]


@pytest.mark.parametrize(("shape", "changes", "message"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_another_arithmetic_is_refused_by_its_name(shape: Model, changes: dict[str, Any], message: str) -> None:
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    with pytest.raises(ValueError, match=message):
        from_hugging_face(_decoder(shape), description | changes, tensors)


def test_another_flavour_lists_what_to_set() -> None:
    description, tensors = to_hugging_face(_decoder(LLAMA), end_id=0)
    with pytest.raises(
        ValueError, match=r"--model.flavour llama --model.heads 4 .*--model.width 16 --model.feed_forward 24$"
    ):
        from_hugging_face(_decoder(GPT2), description, tensors)


def test_a_description_without_sizes_is_refused() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    del description["n_embd"]
    with pytest.raises(ValueError, match=r"config.json has no 'n_embd'"):
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
def test_a_tensor_of_another_shape_is_named_with_both(shape: Model, name: str, expected: str) -> None:
    description, tensors = to_hugging_face(_decoder(shape), end_id=0)
    tensors[name] = torch.zeros(3, 5)
    with pytest.raises(ValueError, match=rf"{name} is \(3, 5\): the settings make it {expected}"):
        from_hugging_face(_decoder(shape), description, tensors)


def test_weights_without_a_place_are_named() -> None:
    description, tensors = to_hugging_face(_decoder(LLAMA), end_id=0)
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.0\.self_attn\.q_norm\.weight$"):
        from_hugging_face(_decoder(LLAMA), description, tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(4)})


def test_another_vocabulary_is_refused_with_a_remedy() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r"has 11 ids and the run's tokenizer 12: .*--tokenizer.file"):
        from_hugging_face(Decoder(GPT2, 12), description, tensors)


def test_too_few_positions_are_refused() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r"has 6 positions: lower model\.context, 8"):
        from_hugging_face(_decoder(replace(GPT2, context=8)), description, tensors)


def test_biases_are_not_dropped() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    with pytest.raises(ValueError, match=r"has biases, .* --model\.bias true"):
        from_hugging_face(_decoder(replace(GPT2, bias=False)), description, tensors)


def test_a_gpt2_with_a_head_of_its_own_is_refused() -> None:
    description, tensors = to_hugging_face(_decoder(GPT2), end_id=0)
    embedding = tensors["transformer.wte.weight"]
    from_hugging_face(_decoder(GPT2), description, tensors | {"lm_head.weight": embedding.clone()})
    with pytest.raises(ValueError, match=r"lm_head\.weight is not its embedding"):
        from_hugging_face(_decoder(GPT2), description, tensors | {"lm_head.weight": embedding + 1})


def test_grouped_heads_are_nothing_that_gpt2_can_say() -> None:
    with pytest.raises(ValueError, match=r"model\.kv_heads is 1"):
        to_hugging_face(_decoder(replace(GPT2, kv_heads=1)), end_id=0)


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_norms_have_the_epsilon_that_is_described(shape: Model) -> None:
    assert {norm.eps for norm in _decoder(shape).modules() if hasattr(norm, "eps")} == {EPS}


def test_a_description_is_checked_without_torch() -> None:
    program = "import sys, model.hugging_face_config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)
