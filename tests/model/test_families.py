"""Each family that is claimed computes what transformers computes, for settings that are drawn: logits, gradients, text.

Logits agree within 1e-5 of the largest. Gradients are compared with transformers' in float64 (its norms and ours compute in
fp32): within 3e-5 of the largest, or three times the error of transformers' own in fp32. The usual tests draw two settings a
family, the weekly ones 18 more; `make test-families` draws all 20.
"""

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from raystride.model.generate import generate
from raystride.model.hugging_face import from_hugging_face, to_hugging_face
from raystride.model.hugging_face_config import differing_settings
from raystride.model.hugging_face_families import FAMILIES, ModelType
from raystride.model.transformer import Decoder
from raystride.pipelines.config import ModelConfig

DRAWS, USUAL = 20, 2
CONTEXT, PROMPT, TOKENS = 32, 6, 20
CLOSE = 1e-5
FULL, SLIDING = "full_attention", "sliding_attention"
CASES = [
    pytest.param(kind, draw, id=f"{kind}-{draw}", marks=[pytest.mark.weekly, pytest.mark.long] if draw >= USUAL else [])
    for kind in ("gpt2", *FAMILIES)
    for draw in range(DRAWS)
]


def drawn_settings(kind: ModelType | str, random: Random) -> dict[str, Any]:
    """The keys of a `config.json` of a family, with what varies among its models."""
    layers, heads, words = random.randint(1, 4), random.choice([1, 2, 4, 6]), random.randint(20, 60)
    size = 2 * random.randint(2, 6)
    if kind == "gpt2":
        drawn = {"n_layer": layers, "n_head": heads, "n_embd": heads * size, "n_positions": CONTEXT, "vocab_size": words}
        return drawn | {"n_inner": random.choice([None, 8 * random.randint(1, 9)]), "layer_norm_epsilon": 10**-5.5}
    family = FAMILIES[kind]  # type: ignore[index]
    width = heads * size if family.even_heads else 4 * random.randint(2, 12)
    if kind == "phi3":
        size = 8  # transformers turns a share of the head that must be even
        width = heads * size
    settings: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([each for each in range(1, heads + 1) if heads % each == 0]),
        "head_dim": size,
        "hidden_size": width,
        "intermediate_size": 4 * random.randint(1, 20),
        "max_position_embeddings": CONTEXT,
        "vocab_size": words,
        "rms_norm_eps": random.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": random.random() < 0.5,
        "pad_token_id": None,
    }
    theta = random.choice([100.0, 10000.0, 1e6])
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    scaled = random.choice(["default", *(("llama3", "linear") if "rope_scaling" in family.others else ())])
    if scaled == "linear":
        rope |= {"rope_type": "linear", "factor": random.choice([2.0, 8.0])}
    elif scaled == "llama3":
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"rope_type": "llama3", **factors, "original_max_position_embeddings": random.choice([8, 16])}
    if kind == "phi3":
        rope["partial_rotary_factor"] = random.choice([0.25, 0.5, 0.75])
        settings["original_max_position_embeddings"] = CONTEXT
    settings["rope_parameters"] = rope
    if kind == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": random.choice([10.0, 10000.0])}
        settings["rope_parameters"] = {FULL: rope, SLIDING: local}
    if "out_bias" in family.others:
        settings["attention_bias"] = random.random() < 0.5
    if "window" in family.others | family.marks:
        settings["sliding_window"] = random.choice([3, 8])
        if family.is_gemma or random.random() < 0.7:
            types = [random.choice([FULL, SLIDING]) for _ in range(layers)]
            settings |= {"layer_types": types} if "window_layers" in family.others else {}
            settings |= {} if family.is_gemma else {"use_sliding_window": True, "max_window_layers": 0}
        else:
            settings["sliding_window"] = None
    settings |= drawn_experts(kind, random) if family.routers else {}
    if kind == "olmoe":
        del settings["head_dim"]
    if kind == "smollm3":
        settings["no_rope_layers"] = [random.randint(0, 1) for _ in range(layers)]
    if kind == "gemma2":
        settings["attn_logit_softcapping"] = random.choice([None, 5.0, 50.0])
    if family.is_gemma:
        settings["final_logit_softcapping"] = random.choice([None, 3.0, 30.0])
        settings["query_pre_attn_scalar"] = random.choice([size, 4, 30])
    return settings


def drawn_experts(kind: str, random: Random) -> dict[str, Any]:
    """The keys of experts in a `config.json`."""
    experts = random.randint(1, 7)
    found: dict[str, Any] = {"num_experts_per_tok": random.randint(1, min(3, experts))}
    found["num_local_experts" if kind == "mixtral" else "num_experts"] = experts
    found |= {} if kind == "mixtral" else {"norm_topk_prob": random.random() < 0.5}
    return found | ({"moe_intermediate_size": 4 * random.randint(1, 9)} if kind == "qwen3_moe" else {})


def theirs(kind: str, settings: dict[str, Any], seed: int) -> Any:
    """A model of transformers in which no two numbers are alike."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **settings, attn_implementation="eager")
    config._experts_implementation = "eager"  # the one that takes float64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name and not kind.startswith("gemma") else 0.0
        torch.nn.init.normal_(parameter, around, 0.3)
    return model


def ours(description: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Decoder:
    """The decoder that a description asks for, with its weights."""
    shape = ModelConfig(context=CONTEXT)
    for _ in range(2):  # the second time the flavour is known
        shape = replace(shape, **differing_settings(shape, description))
    made = Decoder(replace(shape, family=description["model_type"]), description["vocab_size"]).eval()
    from_hugging_face(made, description, tensors)
    return made


def drawn_pair(kind: str, draw: int) -> tuple[Any, dict[str, Any], Decoder]:
    """Returns transformers' model of drawn settings, its description, and the decoder with its weights."""
    model = theirs(kind, drawn_settings(kind, Random(f"{kind} {draw}")), draw)
    description = model.config.to_dict()
    return model, description, ours(description, model.state_dict())


@pytest.mark.parametrize(("kind", "draw"), CASES)
def test_logits_gradients_and_text_are_those_of_transformers(kind: str, draw: int) -> None:
    model, description, mine = drawn_pair(kind, draw)
    ids = torch.randint(0, description["vocab_size"], (3, CONTEXT), generator=torch.Generator().manual_seed(draw))
    inputs, targets = ids[:, :-1], ids[:, 1:]

    expected = model(inputs).logits
    found = mine.logits(mine.hidden(inputs))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE * float(expected.detach().abs().max()))

    loss_sum, counted = mine(inputs, targets)
    (loss_sum / counted).backward()
    for parameter in mine.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    written = to_hugging_face(mine, 0)[1]
    rounded, exact = (gradients(each, inputs, targets) for each in (model, deepcopy(model).double()))
    assert len(exact) == len(list(model.parameters()))
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    own_error = max(float((rounded[name] - gradient).abs().max()) for name, gradient in exact.items())
    added = kind.startswith("gemma")  # its norms' weights are written less one
    for name, gradient in by_number(kind, exact).items():
        found = written[name if name in written else name.removeprefix("transformer.")] + (added and "norm" in name)
        error = float((found - gradient).abs().max())
        assert error <= 3 * max(CLOSE * largest, own_error), (name, error, largest, own_error)


def by_number(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of the hub: those of all experts as one of each."""
    found: dict[str, torch.Tensor] = {}
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
        start, _, last = name.partition(".experts.")
        parts = {"gate_up_proj": (0, 1), "down_proj": (2,)}.get(last, ())
        for expert, matrices in enumerate(tensor) if parts else ():
            halves = matrices.chunk(len(parts))
            found |= {
                f"{start}.experts.{expert}.{names[part]}.weight": half for part, half in zip(parts, halves, strict=True)
            }
        found |= {} if parts else {name: tensor}
    return found


def gradients(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of transformers' model, by name, in float64."""
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("kind", "draw"), CASES)
def test_text_is_that_of_transformers_with_and_without_a_cache(kind: str, draw: int) -> None:
    model, description, mine = drawn_pair(kind, draw)
    prompts = torch.randint(0, description["vocab_size"], (2, PROMPT), generator=torch.Generator().manual_seed(draw))
    model.generation_config.eos_token_id = None
    seen = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
    written = [
        model.generate(prompts, **seen, do_sample=False, max_new_tokens=TOKENS, use_cache=use_cache)[:, PROMPT:]
        for use_cache in (True, False)
    ]
    assert torch.equal(*written)
    assert list(generate(mine, prompts.tolist(), tokens=TOKENS, temperature=0)) == written[0].t().tolist()
